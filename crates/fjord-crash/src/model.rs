//! The model: current and earlier contents of the file system, and promises.
//!
//! Owns [`Model`]: objects (inodes) and slots (a name in a directory), each aspect of them with
//! its [`History`]. A promise pins an aspect: from its moment on, a crash may leave the version of
//! then or a later one, never an older one.
//!
//! What each call promises (docs/crash-model.md says where each promise comes from):
//! - `fsync` of a file: content, size, mode, owner, group, mtime, attributes, and its set of names;
//! - `fdatasync` of a file: content and size, and that the file has a name since it was made;
//! - `fsync` and `fdatasync` of anything else: its mode, owner, mtime, attributes, names, and each of
//!   its entries; and where it commits everything ([`Scope::Everything`]), names, modes, owners and
//!   attributes of all objects as they were when the call began;
//! - each of them: that the directories above exist under some name that they had since they
//!   were made, as far as no rename is on the way that nothing has promised;
//! - `sync`: everything;
//! - `fbarrier`, `fdatabarrier`: what fsync and fdatasync promise, if any change shows that began
//!   after the call.
//!
//! Invariants: versions are in the order of time; promises only move forward.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fjord::FileKind;
use serde::{Deserialize, Serialize};

use crate::content::Content;
use crate::ops::{Op, leaf, parent};

/// An object of a model.
pub type ObjectId = usize;
/// A name in a directory.
pub type Slot = (ObjectId, String);
/// The root directory's object.
pub const ROOT: ObjectId = 0;

/// The versions of one aspect.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct History<T> {
    /// When the change to it began, and the value.
    versions: Vec<(u64, T)>,
    /// When a promise was made, and the oldest version that it admits.
    promises: Vec<(u64, usize)>,
}

impl<T: PartialEq + Clone> History<T> {
    /// An aspect that begins with this value.
    pub fn new(value: T) -> Self {
        History { versions: vec![(0, value)], promises: Vec::new() }
    }

    /// The value now.
    pub fn current(&self) -> &T {
        &self.versions[self.versions.len() - 1].1
    }

    /// A change that began at `start`.
    pub fn push(&mut self, start: u64, value: T) {
        if *self.current() != value {
            self.versions.push((start, value));
        }
    }

    /// At `stamp` the present value was promised.
    pub fn promise(&mut self, stamp: u64) {
        self.promise_from(stamp, self.versions.len() - 1);
    }

    /// The value after all changes that began up to `stamp`.
    pub fn at(&self, stamp: u64) -> &T {
        // The first version is there from the beginning.
        &self.versions[self.versions.partition_point(|version| version.0 <= stamp).max(1) - 1].1
    }

    /// What a cut at `cut` may leave, oldest first; never empty.
    pub fn admissible(&self, cut: u64) -> impl Iterator<Item = &T> + Clone {
        let due = self.promises.iter().filter(|promise| promise.0 < cut);
        let first = due.map(|promise| promise.1).max().unwrap_or(0);
        let begun = self.versions[first + 1..].iter().filter(move |version| version.0 < cut);
        self.versions[first..=first].iter().chain(begun).map(|version| &version.1)
    }

    /// As [`History::admissible`], in a list.
    pub fn admissible_list(&self, cut: u64) -> Vec<&T> {
        self.admissible(cut).collect()
    }

    /// Whether the value is one that it only had from changes on that began after `stamp`.
    pub fn is_newer(&self, value: &T, stamp: u64) -> bool {
        let mut same = self.versions.iter().filter(|version| version.1 == *value).peekable();
        same.peek().is_some() && same.all(|version| version.0 > stamp)
    }

    /// When the first change to this value began, if it ever had it.
    pub fn first_had(&self, value: &T) -> Option<u64> {
        self.versions.iter().find(|version| version.1 == *value).map(|version| version.0)
    }

    /// How many versions began before `stamp`.
    fn len_before(&self, stamp: u64) -> usize {
        self.versions.partition_point(|version| version.0 < stamp)
    }

    /// All values of changes that began up to `stamp`.
    pub fn begun_by(&self, stamp: u64) -> impl Iterator<Item = &T> + Clone {
        let begun = self.versions.iter().filter(move |version| version.0 <= stamp);
        begun.map(|version| &version.1)
    }

    /// Takes over what `other`, an earlier state of the same aspect, promises at `stamp`.
    fn adopt(&mut self, other: &History<T>, stamp: u64) {
        self.promises.extend(other.promises.iter().filter(|promise| promise.0 == stamp));
    }

    /// All values it ever had.
    pub fn ever(&self) -> impl Iterator<Item = &T> {
        self.versions.iter().map(|version| &version.1)
    }

    /// As [`History::promise`], for the first version that `wanted` accepts, or a later one.
    fn promise_where(&mut self, stamp: u64, wanted: impl Fn(&T) -> bool) {
        if let Some(index) = self.versions.iter().position(|version| wanted(&version.1)) {
            self.promise_from(stamp, index);
        }
    }

    /// Whether only the present value is admissible.
    fn is_fixed(&self) -> bool {
        self.promises.last().is_some_and(|promise| promise.1 + 1 == self.versions.len())
    }

    /// The moments after which what is admissible may be another.
    fn stamps(&self) -> impl Iterator<Item = u64> {
        let versions = self.versions.iter().map(|version| version.0);
        versions.chain(self.promises.iter().map(|promise| promise.0))
    }

    /// Forgets the past; the present is promised from the beginning.
    fn settle(&mut self) {
        let value = self.current().clone();
        *self = History { versions: vec![(0, value)], promises: vec![(0, 0)] };
    }
}

/// An aspect, whatever its values are.
trait Promising {
    /// At `stamp` the version `index` or a later one was promised, after all promises so far.
    fn promise_from(&mut self, stamp: u64, index: usize);

    /// The version `index` or a later one was promised from the beginning.
    fn require(&mut self, index: usize);
}

impl<T> Promising for History<T> {
    fn promise_from(&mut self, stamp: u64, index: usize) {
        let index = index.min(self.versions.len() - 1);
        if self.promises.last().is_none_or(|last| last.1 < index) {
            self.promises.push((stamp, index));
        }
    }

    fn require(&mut self, index: usize) {
        self.promises.insert(0, (0, index.min(self.versions.len() - 1)));
    }
}

impl History<Attrs> {
    /// How many of the first `len` versions there are up to the newest that changed more than the
    /// modification time. The time of a write is stored with the data or later, not by the commits
    /// between.
    fn solid_len(&self, len: usize) -> usize {
        let same = |pair: &[(u64, Attrs)]| {
            let (old, new) = (pair[0].1, pair[1].1);
            Attrs { mtime: old.mtime, ..new } == old
        };
        let lazy = self.versions[..len].windows(2).rev().take_while(|pair| same(pair)).count();
        len - lazy
    }
}

/// Times in a saved model: seconds and nanoseconds.
mod saved_time {
    use fjord::Timespec;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Timespec, to: S) -> Result<S::Ok, S::Error> {
        (time.sec, time.nsec).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Timespec, D::Error> {
        let (sec, nsec) = Deserialize::deserialize(from)?;
        Ok(Timespec { sec, nsec })
    }
}

/// Kinds in a saved model: the type bits of a mode.
mod saved_kind {
    use fjord::FileKind;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(kind: &FileKind, to: S) -> Result<S::Ok, S::Error> {
        kind.mode_bits().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<FileKind, D::Error> {
        let bits = Deserialize::deserialize(from)?;
        FileKind::from_mode(bits).ok_or_else(|| D::Error::custom("no kind of file"))
    }
}

/// Attributes that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attrs {
    /// Permission bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    #[serde(with = "saved_time")]
    pub mtime: fjord::Timespec,
}

/// Extended attributes by name.
pub type Xattrs = BTreeMap<String, Vec<u8>>;

/// An inode.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Object {
    /// Its number.
    pub ino: u64,
    /// Its generation.
    pub generation: u32,
    /// Its kind.
    #[serde(with = "saved_kind")]
    pub kind: FileKind,
    /// Where a symbolic link points.
    pub target: Option<Vec<u8>>,
    /// Content of a regular file.
    pub content: History<Content>,
    /// Attributes.
    pub attrs: History<Attrs>,
    /// Extended attributes.
    pub xattrs: History<Xattrs>,
    /// Its names. The first version is "none": not made yet.
    pub names: History<BTreeSet<Slot>>,
}

/// How far a sync of something that is no regular file reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The object itself and its entries: policy `group`, whose commits are as small as can be.
    Own,
    /// All metadata, as in ext4 (`ext4_sync_file`: `ext4_force_commit`).
    Everything,
}

/// How many versions each aspect had at some moment.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Attributes, extended attributes, names of each object.
    objects: Vec<[usize; 3]>,
    slots: BTreeMap<Slot, usize>,
}

/// What the engine says of a new or changed inode.
#[derive(Clone, Debug)]
pub struct Made {
    /// Its number.
    pub ino: u64,
    /// Its generation.
    pub generation: u32,
    /// Its kind.
    pub kind: FileKind,
    /// Its attributes.
    pub attrs: Attrs,
}

/// A promise of order: whoever sees a change that began after `stamp` sees what was promised.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Barrier {
    /// When the call returned.
    pub stamp: u64,
    /// The model of that moment, if the call had promised durability.
    promised: Box<Model>,
}

/// The file system as it should be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Model {
    objects: Vec<Object>,
    /// Objects that ever had an inode number.
    by_number: HashMap<u64, Vec<ObjectId>>,
    slots: BTreeMap<Slot, History<Option<ObjectId>>>,
    /// Promises of order.
    barriers: Vec<Barrier>,
    /// Counts writes; each has a pattern of its own.
    pub write_count: u64,
    /// Several threads work at once: between two operations on a directory, which the model is
    /// told after each, its times may have had values that nobody saw.
    #[serde(default)]
    pub is_threaded: bool,
}

impl Model {
    /// A model with a root directory only.
    pub fn new(root: &Made) -> Model {
        let mut model = Model {
            objects: Vec::new(),
            by_number: HashMap::new(),
            slots: BTreeMap::new(),
            barriers: Vec::new(),
            write_count: 0,
            is_threaded: false,
        };
        model.add(root, None);
        model
    }

    fn add(&mut self, made: &Made, target: Option<Vec<u8>>) -> ObjectId {
        self.by_number.entry(made.ino).or_default().push(self.objects.len());
        self.objects.push(Object {
            ino: made.ino,
            generation: made.generation,
            kind: made.kind,
            target,
            content: History::new(Content::default()),
            attrs: History::new(made.attrs),
            xattrs: History::new(Xattrs::new()),
            names: History::new(BTreeSet::new()),
        });
        self.objects.len() - 1
    }

    /// All objects that ever were.
    pub fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// All objects that ever had this inode number.
    pub fn by_number(&self, ino: u64) -> &[ObjectId] {
        self.by_number.get(&ino).map_or(&[], Vec::as_slice)
    }

    /// All names that ever were.
    pub fn slots(&self) -> impl Iterator<Item = (&Slot, &History<Option<ObjectId>>)> {
        self.slots.iter()
    }

    /// The object at a path now.
    pub fn resolve(&self, path: &str) -> Option<ObjectId> {
        path.split('/')
            .filter(|name| !name.is_empty())
            .try_fold(ROOT, |dir, name| *self.slots.get(&(dir, name.to_owned()))?.current())
    }

    fn slot(&self, path: &str) -> Option<Slot> {
        Some((self.resolve(parent(path))?, leaf(path).to_owned()))
    }

    fn set_slot(&mut self, start: u64, slot: Slot, object: Option<ObjectId>) {
        let history = self.slots.entry(slot.clone()).or_insert_with(|| History::new(None));
        let before = *history.current();
        history.push(start, object);
        for (id, add) in [(before, false), (object, true)] {
            let Some(id) = id else { continue };
            let mut names = self.objects[id].names.current().clone();
            if add {
                names.insert(slot.clone());
            } else {
                names.remove(&slot);
            }
            self.objects[id].names.push(start, names);
        }
    }

    /// Moves names in one step, so that no version shows half of it.
    fn set_slots(&mut self, start: u64, changes: &[(Slot, Option<ObjectId>)]) {
        let mut names: BTreeMap<ObjectId, BTreeSet<Slot>> = BTreeMap::new();
        let now = |objects: &[Object], id: ObjectId| objects[id].names.current().clone();
        for (slot, object) in changes {
            let history = self.slots.entry(slot.clone()).or_insert_with(|| History::new(None));
            if let Some(before) = *history.current() {
                let set = names.entry(before).or_insert_with(|| now(&self.objects, before));
                set.remove(slot);
            }
            history.push(start, *object);
        }
        for (slot, object) in changes {
            if let Some(id) = *object {
                let set = names.entry(id).or_insert_with(|| now(&self.objects, id));
                set.insert(slot.clone());
            }
        }
        for (id, set) in names {
            self.objects[id].names.push(start, set);
        }
    }

    /// A new object under a new name.
    pub fn made(&mut self, start: u64, path: &str, made: &Made, target: Option<Vec<u8>>) {
        let id = self.add(made, target);
        if let Some(slot) = self.slot(path) {
            self.set_slot(start, slot, Some(id));
        }
    }

    /// The engine has carried out an operation that began at `start` and makes no new object;
    /// `bytes` are what it wrote.
    pub fn apply(&mut self, start: u64, op: &Op, bytes: &[u8]) {
        match op {
            Op::Link(from, to) => {
                if let (object @ Some(_), Some(slot)) = (self.resolve(from), self.slot(to)) {
                    self.set_slot(start, slot, object);
                }
            }
            Op::Unlink(path) | Op::Rmdir(path) => {
                if let Some(slot) = self.slot(path) {
                    self.set_slot(start, slot, None);
                }
            }
            Op::Rename(from, to) => self.rename(start, from, to, false),
            Op::Exchange(from, to) => self.rename(start, from, to, true),
            Op::Truncate(path, size) => self.edit(start, path, |c| c.set_size(*size)),
            Op::Append(path, _) => self.edit(start, path, |c| c.write(c.size_bytes(), bytes)),
            Op::Write(path, offset, _) => self.edit(start, path, |c| c.write(*offset, bytes)),
            Op::Magic(path, offset) => self.edit(start, path, |c| c.write(*offset, bytes)),
            Op::Fallocate(path, mode, offset, len) => {
                self.edit(start, path, |content| allocate(content, *mode, *offset, *len));
            }
            Op::SetXattr(path, name, _) => self.xattr(start, path, name, Some(bytes.to_vec())),
            Op::RemoveXattr(path, name) => self.xattr(start, path, name, None),
            // Attributes are told by `attrs`; the others change nothing or make objects.
            _ => {}
        }
    }

    fn rename(&mut self, start: u64, from: &str, to: &str, exchange: bool) {
        let (Some(a), Some(b)) = (self.slot(from), self.slot(to)) else { return };
        let (old, new) = (self.resolve(from), self.resolve(to));
        // Two names of one file: nothing happens.
        if old != new {
            let back = new.filter(|_| exchange);
            self.set_slots(start, &[(a, back), (b, old)]);
        }
    }

    fn edit(&mut self, start: u64, path: &str, change: impl FnOnce(&mut Content)) {
        if let Some(id) = self.resolve(path) {
            let mut content = self.objects[id].content.current().clone();
            change(&mut content);
            self.objects[id].content.push(start, content);
        }
    }

    fn xattr(&mut self, start: u64, path: &str, name: &str, value: Option<Vec<u8>>) {
        if let Some(id) = self.resolve(path) {
            let mut xattrs = self.objects[id].xattrs.current().clone();
            match value {
                Some(value) => drop(xattrs.insert(name.to_owned(), value)),
                None => drop(xattrs.remove(name)),
            }
            self.objects[id].xattrs.push(start, xattrs);
        }
    }

    /// The attributes of the object at `path` after an operation that began at `start`.
    pub fn attrs(&mut self, start: u64, path: &str, attrs: Attrs) {
        if let Some(id) = self.resolve(path) {
            self.objects[id].attrs.push(start, attrs);
        }
    }

    /// The state of now, if the call that begins promises more than its own object, for
    /// [`Model::promise_marked`].
    pub fn mark(&self, op: &Op, scope: Scope) -> Option<Mark> {
        let (Op::Fsync(path) | Op::Fdatasync(path) | Op::Fbarrier(path) | Op::Fdatabarrier(path)) =
            op
        else {
            return None;
        };
        let kind = self.objects[self.resolve(path)?].kind;
        if scope == Scope::Own || kind == FileKind::Regular {
            return None;
        }
        let of = |object: &Object| {
            let attrs = object.attrs.solid_len(object.attrs.versions.len());
            [attrs, object.xattrs.versions.len(), object.names.versions.len()]
        };
        let slots = self.slots.iter().map(|(slot, history)| (slot.clone(), history.versions.len()));
        Some(Mark { objects: self.objects.iter().map(of).collect(), slots: slots.collect() })
    }

    /// As [`Model::promise`]; what was there at `mark` is promised, too.
    pub fn promise_marked(&mut self, stamp: u64, op: &Op, mark: Option<&Mark>) {
        match (op, mark) {
            (Op::Fbarrier(path), _) => self.order(stamp, &Op::Fsync(path.clone()), mark),
            (Op::Fdatabarrier(path), _) => self.order(stamp, &Op::Fdatasync(path.clone()), mark),
            (_, Some(mark)) => {
                self.promise(stamp, op);
                self.for_metadata(mark, |aspect, index| aspect.promise_from(stamp, index));
            }
            (_, None) => self.promise(stamp, op),
        }
    }

    /// Does something with each aspect of metadata and the version that was newest at `mark`.
    fn for_metadata(&mut self, mark: &Mark, act: impl Fn(&mut dyn Promising, usize)) {
        for (object, [attrs, xattrs, names]) in self.objects.iter_mut().zip(&mark.objects) {
            act(&mut object.attrs, attrs.saturating_sub(1));
            act(&mut object.xattrs, xattrs.saturating_sub(1));
            act(&mut object.names, names.saturating_sub(1));
        }
        for (slot, len) in &mark.slots {
            if let Some(history) = self.slots.get_mut(slot) {
                act(history, len.saturating_sub(1));
            }
        }
    }

    /// A sync call has returned, at `stamp`.
    pub fn promise(&mut self, stamp: u64, op: &Op) {
        let (path, data_only) = match op {
            Op::Fsync(path) => (path, false),
            Op::Fdatasync(path) => (path, true),
            Op::Sync => return self.promise_all(stamp),
            _ => return,
        };
        let Some(id) = self.resolve(path) else { return };
        let object = &mut self.objects[id];
        // fdatasync of a directory is fsync, as in ext4: its data are its names.
        let data_only = data_only && object.kind == FileKind::Regular;
        object.content.promise(stamp);
        object.names.promise_where(stamp, |names| !names.is_empty());
        if !data_only {
            object.attrs.promise(stamp);
            object.xattrs.promise(stamp);
            object.names.promise(stamp);
            for (slot, history) in &mut self.slots {
                let own = object.names.current().contains(slot);
                let entry = object.kind == FileKind::Directory && slot.0 == id;
                if own || entry {
                    history.promise(stamp);
                }
            }
        }
        self.promise_above(stamp, id);
    }

    fn order(&mut self, stamp: u64, as_if: &Op, mark: Option<&Mark>) {
        let mut promised = Box::new(self.clone());
        promised.barriers.clear();
        promised.promise_marked(stamp, as_if, mark);
        self.barriers.push(Barrier { stamp, promised });
    }

    /// The promises of order so far, oldest first.
    pub fn barriers(&self) -> &[Barrier] {
        &self.barriers
    }

    /// The moments after which a cut may leave something else, in order: changes begun, promises.
    pub fn stamps(&self) -> Vec<u64> {
        let mut stamps: Vec<u64> = self.barriers.iter().map(|barrier| barrier.stamp).collect();
        for object in &self.objects {
            stamps.extend(object.content.stamps().chain(object.attrs.stamps()));
            stamps.extend(object.xattrs.stamps().chain(object.names.stamps()));
        }
        stamps.extend(self.slots.values().flat_map(History::stamps));
        stamps.sort_unstable();
        stamps.dedup();
        stamps
    }

    /// The model if what this barrier ordered was promised.
    pub fn with(&self, barrier: &Barrier) -> Model {
        let (mut model, stamp) = (self.clone(), barrier.stamp);
        for (object, then) in model.objects.iter_mut().zip(&barrier.promised.objects) {
            object.content.adopt(&then.content, stamp);
            object.attrs.adopt(&then.attrs, stamp);
            object.xattrs.adopt(&then.xattrs, stamp);
            object.names.adopt(&then.names, stamp);
        }
        for (slot, then) in &barrier.promised.slots {
            if let Some(history) = model.slots.get_mut(slot) {
                history.adopt(then, stamp);
            }
        }
        model
    }

    /// The model if all metadata from before `stamp` was promised.
    pub fn with_metadata_before(&self, stamp: u64) -> Model {
        let of = |object: &Object| {
            let attrs = object.attrs.solid_len(object.attrs.len_before(stamp));
            [attrs, object.xattrs.len_before(stamp), object.names.len_before(stamp)]
        };
        let slots = self.slots.iter().map(|(slot, all)| (slot.clone(), all.len_before(stamp)));
        let mark = Mark { objects: self.objects.iter().map(of).collect(), slots: slots.collect() };
        let mut model = self.clone();
        model.for_metadata(&mark, |aspect, index| aspect.require(index));
        model
    }

    /// The directories that must be there because `id` must: as long as only one set of names is
    /// admissible, those of these names.
    fn promise_above(&mut self, stamp: u64, id: ObjectId) {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if !self.objects[id].names.is_fixed() {
                continue;
            }
            for dir in self.objects[id].names.current().clone().into_iter().map(|slot| slot.0) {
                if dir != ROOT {
                    self.objects[dir].names.promise_where(stamp, |names| !names.is_empty());
                    todo.push(dir);
                }
            }
        }
    }

    fn promise_all(&mut self, stamp: u64) {
        for object in &mut self.objects {
            object.content.promise(stamp);
            object.attrs.promise(stamp);
            object.xattrs.promise(stamp);
            object.names.promise(stamp);
        }
        self.slots.values_mut().for_each(|history| history.promise(stamp));
    }

    /// The file system was unmounted: the present is all there is.
    pub fn settle(&mut self) {
        for object in &mut self.objects {
            object.content.settle();
            object.attrs.settle();
            object.xattrs.settle();
            object.names.settle();
        }
        self.slots.values_mut().for_each(History::settle);
        self.barriers.clear();
    }
}

/// What fallocate does to the bytes.
fn allocate(content: &mut Content, mode: fjord::FallocMode, offset: u64, len: u64) {
    use fjord::FallocMode as Mode;
    let end = offset + len;
    if mode.contains(Mode::COLLAPSE_RANGE) {
        content.collapse(offset, len);
    } else if mode.contains(Mode::INSERT_RANGE) {
        content.insert(offset, len);
    } else {
        if mode.intersects(Mode::PUNCH_HOLE | Mode::ZERO_RANGE) {
            content.zero(offset, end);
        }
        if !mode.contains(Mode::KEEP_SIZE) && end > content.size_bytes() {
            content.set_size(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(ino: u64, kind: FileKind) -> Made {
        let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, mtime: fjord::Timespec::default() };
        Made { ino, generation: 0, kind, attrs }
    }

    #[test]
    fn a_promise_admits_now_and_later() {
        let mut history = History::new(1);
        history.push(10, 2);
        history.promise(20);
        history.push(30, 3);
        let at = |cut| history.admissible(cut).copied().collect::<Vec<_>>();
        assert_eq!(at(5), [1]);
        assert_eq!(at(15), [1, 2]);
        assert_eq!(at(25), [2]);
        assert_eq!(at(40), [2, 3]);
    }

    #[test]
    fn a_rename_is_one_step() {
        let mut model = Model::new(&made(2, FileKind::Directory));
        model.made(1, "a", &made(12, FileKind::Regular), None);
        model.made(2, "b", &made(13, FileKind::Regular), None);
        model.apply(3, &Op::Rename("a".into(), "b".into()), &[]);
        let sizes: Vec<_> = model.objects()[1].names.ever().map(BTreeSet::len).collect();
        assert_eq!(sizes, [0, 1, 1]);
        assert_eq!(model.resolve("b"), Some(1));
        assert!(model.objects()[2].names.current().is_empty());
        assert!(model.slots[&(ROOT, "b".to_owned())].ever().copied().eq([None, Some(2), Some(1)]));
    }

    /// ext4 commits everything for whatever is no regular file, and SQLite syncs directories by
    /// fdatasync.
    #[test]
    fn fdatasync_of_a_directory_promises_names() {
        let mut model = Model::new(&made(2, FileKind::Directory));
        model.made(1, "d", &made(12, FileKind::Directory), None);
        model.made(2, "d/a", &made(13, FileKind::Regular), None);
        model.apply(3, &Op::Unlink("d/a".into()), &[]);
        model.made(4, "b", &made(14, FileKind::Regular), None);
        let op = Op::Fdatasync("d".into());
        assert!(model.mark(&Op::Fdatasync("b".into()), Scope::Everything).is_none());
        assert!(model.mark(&op, Scope::Own).is_none());
        let mark = model.mark(&op, Scope::Everything);
        model.apply(5, &Op::Rename("b".into(), "c".into()), &[]);
        let (mut own, mut all) = (model.clone(), model);
        own.promise_marked(6, &op, None);
        all.promise_marked(6, &op, mark.as_ref());
        let at = |model: &Model, dir: ObjectId, name: &str| {
            let slot = &model.slots[&(dir, name.to_owned())];
            slot.admissible(9).copied().collect::<Vec<_>>()
        };
        assert_eq!(at(&own, 1, "a"), [None]);
        assert_eq!(at(&own, ROOT, "b"), [None, Some(3), None]);
        // What came while the call ran is not promised.
        assert_eq!(at(&all, ROOT, "b"), [Some(3), None]);
    }

    #[test]
    fn times_of_writes_are_not_promised_by_others() {
        let attrs = |mode, sec| Attrs {
            mtime: fjord::Timespec { sec, nsec: 0 },
            ..Attrs { mode, ..made(2, FileKind::Regular).attrs }
        };
        let mut history = History::new(attrs(0o644, 1));
        history.push(2, attrs(0o600, 1));
        history.push(3, attrs(0o600, 3));
        history.push(4, attrs(0o600, 4));
        assert_eq!(history.solid_len(4), 2);
    }

    #[test]
    fn fdatasync_promises_some_name() {
        let mut model = Model::new(&made(2, FileKind::Directory));
        model.made(1, "a", &made(12, FileKind::Regular), None);
        model.apply(2, &Op::Rename("a".into(), "b".into()), &[]);
        model.promise(3, &Op::Fdatasync("b".into()));
        let names = model.objects()[1].names.admissible(9);
        assert_eq!(names.map(BTreeSet::len).collect::<Vec<_>>(), [1, 1]);
    }
}
