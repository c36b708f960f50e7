//! Checks of a recovered tree.
//!
//! Owns the comparison of a [`Tree`] with a [`Model`] at a cut, and [`Problem`], the failures. Each
//! aspect of each object must be one of its admissible versions; content is compared byte by byte,
//! because a write may be there partly.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fjord::{DataMode, FileKind};

use crate::content::{BLOCK_BYTES, Content};
use crate::model::{Attrs, History, Model, Object, ObjectId, ROOT, Slot};
use crate::moment;
use crate::tree::{Seen, Tree};

/// The kinds of finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The image does not mount, or a file cannot be read.
    RecoveryFailed,
    /// e2fsck finds fault with the recovered image.
    Fsck,
    /// A promised version is lost, or older than promised.
    PromiseLost,
    /// A change shows that came after a barrier, and something from before it does not.
    OrderBroken,
    /// A file shows bytes that were never written to it there.
    ForeignBytes,
    /// A name, inode, size or attribute that never was.
    Invented,
    /// Recovering again, or after a cut inside recovery, gives something else.
    NotIdempotent,
    /// Linux or e2fsck recover the image to another tree.
    Disagrees,
    /// A log with a wrong bit was replayed all the same.
    DamageReplayed,
    /// The engine failed while the workload ran.
    EngineFailed,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 10] = [
        Kind::RecoveryFailed,
        Kind::Fsck,
        Kind::PromiseLost,
        Kind::OrderBroken,
        Kind::ForeignBytes,
        Kind::Invented,
        Kind::NotIdempotent,
        Kind::Disagrees,
        Kind::DamageReplayed,
        Kind::EngineFailed,
    ];
}

/// A finding without its case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?}: {text}")]
pub struct Problem {
    /// Its kind.
    pub kind: Kind,
    /// What is wrong where.
    pub text: String,
}

impl Problem {
    /// A problem.
    pub fn new(kind: Kind, text: impl Into<String>) -> Problem {
        Problem { kind, text: text.into() }
    }
}

/// What a run may ask for, by how it was mounted.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The data mode: what unsynced bytes may be.
    pub data: DataMode,
    /// Changes of metadata are durable in the order of the calls: one thread, and a policy that
    /// commits whole transactions only, as jbd2 does.
    pub metadata_in_order: bool,
    /// Everything is as of one moment: one thread, whole transactions, and data in the journal.
    pub one_moment: bool,
}

/// The objects that the inodes of a tree are, by inode number.
pub(crate) type Found = HashMap<u64, ObjectId>;

/// Compares a recovered tree with what a cut at `cut` may leave.
///
/// # Errors
/// The first problem.
pub fn check(tree: &Tree, model: &Model, cut: u64, rules: Rules) -> Result<(), Problem> {
    let data = rules.data;
    let mut found: Found = HashMap::new();
    for (ino, seen) in &tree.inodes {
        let by_number = model.by_number(*ino).iter();
        let same = by_number.copied().find(|id| same(&model.objects()[*id], seen));
        found.extend(same.map(|id| (*ino, id)));
    }
    compare(tree, &found, model, cut, data)?;
    if rules.metadata_in_order {
        in_order(tree, &found, model, cut, data)?;
    }
    if rules.one_moment {
        moment::check(tree, &found, model, cut)?;
    }
    // The last barrier after which something shows implies those before it.
    let barriers = model.barriers().iter().filter(|barrier| barrier.stamp < cut);
    let mut implied =
        barriers.rev().filter(|barrier| shows_newer(tree, &found, model, barrier.stamp));
    let Some(last) = implied.next() else { return Ok(()) };
    let implied = model.barriers().iter().filter(|barrier| barrier.stamp <= last.stamp);
    let stricter = implied.fold(model.clone(), |model, barrier| model.with(barrier));
    compare(tree, &found, &stricter, cut, data).map_err(|problem| {
        let text = format!("behind the barrier at {}: {}", last.stamp, problem.text);
        Problem::new(Kind::OrderBroken, text)
    })
}

/// Who sees a change of metadata sees all that came before it.
fn in_order(
    tree: &Tree,
    found: &Found,
    model: &Model,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    let newest = newest_shown(tree, found, model);
    let stricter = model.with_metadata_before(newest);
    compare(tree, found, &stricter, cut, data).map_err(|problem| {
        let text = format!("behind the change of metadata at {newest}: {}", problem.text);
        Problem::new(Kind::OrderBroken, text)
    })
}

/// When the newest change of metadata began that the tree shows.
fn newest_shown(tree: &Tree, found: &Found, model: &Model) -> u64 {
    let object = |(ino, seen): (&u64, &Seen)| {
        let object = &model.objects()[*found.get(ino)?];
        object.attrs.first_had(&seen.attrs).max(object.xattrs.first_had(&seen.xattrs))
    };
    let shown = shown_slots(tree, found);
    let slot = |(slot, history): (&Slot, &History<Option<ObjectId>>)| {
        history.first_had(&shown.get(slot).copied())
    };
    let stamps = tree.inodes.iter().filter_map(object).chain(model.slots().filter_map(slot));
    stamps.max().unwrap_or(0)
}

/// Whether the tree shows a change that began after `stamp`.
fn shows_newer(tree: &Tree, found: &Found, model: &Model, stamp: u64) -> bool {
    let object = |(ino, seen): (&u64, &Seen)| {
        let Some(object) = found.get(ino).map(|id| &model.objects()[*id]) else { return false };
        object.attrs.is_newer(&seen.attrs, stamp)
            || object.xattrs.is_newer(&seen.xattrs, stamp)
            || object.kind == FileKind::Regular && has_newer_bytes(&object.content, seen, stamp)
    };
    let shown = shown_slots(tree, found);
    let slot = |(slot, history): (&Slot, &History<Option<ObjectId>>)| {
        history.is_newer(&shown.get(slot).copied(), stamp)
    };
    tree.inodes.iter().any(object) || model.slots().any(slot)
}

/// Whether a file shows a byte that no change begun by `stamp` left there. (Patterns have no
/// zeros: those may be of any time.)
fn has_newer_bytes(history: &History<Content>, seen: &Seen, stamp: u64) -> bool {
    let older = history.begun_by(stamp);
    seen.content.blocks().any(|number| {
        let block = seen.content.block(number);
        let is_old = |index: usize, byte: u8| {
            byte == 0 || older.clone().any(|version| version.block(number)[index] == byte)
        };
        !older.clone().any(|version| version.block(number) == block)
            && !block.iter().enumerate().all(|(index, &byte)| is_old(index, byte))
    })
}

fn compare(
    tree: &Tree,
    found: &Found,
    model: &Model,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    for (ino, seen) in &tree.inodes {
        let Some(&id) = found.get(ino) else {
            let names: Vec<_> = seen.names.iter().map(|name| &name.1).collect();
            let text = format!("inode {ino} (named {names:?}) was never made");
            return Err(Problem::new(Kind::Invented, text));
        };
        object(found, model, id, seen, cut, data)?;
    }
    slots(tree, found, model, cut)?;
    for (id, object) in model.objects().iter().enumerate() {
        let there = tree.inodes.get(&object.ino).is_some_and(|seen| same(object, seen));
        if id != ROOT && !there && !object.names.admissible(cut).any(|names| names.is_empty()) {
            let text = format!("{} is not there", describe(object));
            return Err(Problem::new(Kind::PromiseLost, text));
        }
    }
    Ok(())
}

fn same(object: &Object, seen: &Seen) -> bool {
    object.generation == seen.generation && object.kind == seen.kind
}

fn describe(object: &Object) -> String {
    let names: Vec<_> = object.names.ever().flatten().map(|slot| slot.1.as_str()).collect();
    format!("{:?} {} (names over time: {names:?})", object.kind, object.ino)
}

/// A value must be admissible; says whether it is too old or was never there.
fn one_of<T: PartialEq + Clone + std::fmt::Debug>(
    history: &History<T>,
    value: &T,
    cut: u64,
    what: impl Fn() -> String,
) -> Result<(), Problem> {
    if history.admissible(cut).any(|version| version == value) {
        return Ok(());
    }
    let wanted: Vec<_> = history.admissible(cut).collect();
    let old = history.ever().any(|version| version == value);
    let kind = if old { Kind::PromiseLost } else { Kind::Invented };
    let text = format!("{}: found {value:?}, admissible {wanted:?}", what());
    Err(Problem::new(kind, shorten(text)))
}

fn shorten(mut text: String) -> String {
    if text.len() > 800 {
        let mut end = 800;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

fn object(
    found: &Found,
    model: &Model,
    id: ObjectId,
    seen: &Seen,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    let object = &model.objects()[id];
    let what = |aspect: &'static str| move || format!("{aspect} of {}", describe(object));
    if seen.target != object.target {
        let text = format!("the target of {} is {:?}", describe(object), seen.target);
        return Err(Problem::new(Kind::ForeignBytes, shorten(text)));
    }
    if !(model.is_threaded
        && object.kind == FileKind::Directory
        && was_for_a_moment(&object.attrs, seen.attrs, cut))
    {
        one_of(&object.attrs, &seen.attrs, cut, what("attributes"))?;
    }
    one_of(&object.xattrs, &seen.xattrs, cut, what("extended attributes"))?;
    if object.kind == FileKind::Regular {
        content(&object.content, &seen.content, cut, data)
            .map_err(|p| Problem::new(p.kind, format!("{}: {}", describe(object), p.text)))?;
    }
    if id == ROOT {
        return Ok(());
    }
    if let Some((dir, name)) = seen.names.iter().find(|(dir, _)| !found.contains_key(dir)) {
        let text = format!("{name:?} lies in inode {dir}, which was never made");
        return Err(Problem::new(Kind::Invented, text));
    }
    one_of(&object.names, &names_seen(seen, found), cut, what("names"))
}

/// The names of an inode, in directories that were made.
pub(crate) fn names_seen(seen: &Seen, found: &Found) -> BTreeSet<Slot> {
    let slot = |(dir, name): &(u64, String)| Some((*found.get(dir)?, name.clone()));
    seen.names.iter().filter_map(slot).collect()
}

/// Whether these are admissible attributes of a directory that several threads change, but for a
/// time that is not older than an admissible one and not later than all that it ever had. Whoever
/// tells the model may have seen the time that another thread's change set, which began earlier than
/// his own: such a time may be on the device before the call began with which the model has it.
fn was_for_a_moment(history: &History<Attrs>, seen: Attrs, cut: u64) -> bool {
    let mut admissible = history.admissible(cut);
    admissible.clone().any(|attrs| attrs.mtime <= seen.mtime)
        && history.ever().any(|attrs| attrs.mtime >= seen.mtime)
        && admissible.any(|attrs| Attrs { mtime: seen.mtime, ..*attrs } == seen)
}

fn shown_slots(tree: &Tree, found: &Found) -> BTreeMap<Slot, ObjectId> {
    let mut shown: BTreeMap<Slot, ObjectId> = BTreeMap::new();
    for (ino, seen) in &tree.inodes {
        for (dir, name) in &seen.names {
            if let (Some(&dir), Some(&id)) = (found.get(dir), found.get(ino)) {
                shown.insert((dir, name.clone()), id);
            }
        }
    }
    shown
}

fn slots(tree: &Tree, found: &Found, model: &Model, cut: u64) -> Result<(), Problem> {
    let shown = shown_slots(tree, found);
    for (slot, history) in model.slots() {
        let value = shown.get(slot).copied();
        one_of(history, &value, cut, || format!("object at {:?} in directory {}", slot.1, slot.0))?;
    }
    Ok(())
}

/// What a cut may leave of a file's bytes.
///
/// A file has the size of one of its versions, or while it grew one between two. A byte may be of
/// that version or of a younger one (an overwrite goes ahead of its metadata), or of an older one
/// (data not written yet) if the file has not been shorter than that since.
struct Bytes<'a> {
    history: &'a History<Content>,
    admissible: Vec<&'a Content>,
    /// Which of the admissible versions may have set the size that is seen.
    sized: Vec<usize>,
    seen: &'a Content,
    data: DataMode,
}

impl Bytes<'_> {
    /// Versions that may have left the byte at `at`.
    fn sources(&self, at: u64) -> impl Iterator<Item = &Content> {
        let reaches = move |source: usize, sized: usize| {
            source >= sized
                || self.admissible[source..sized].iter().all(|version| version.size_bytes() > at)
        };
        let list = self.admissible.iter().enumerate();
        list.filter(move |(source, _)| self.sized.iter().any(|&sized| reaches(*source, sized)))
            .map(|(_, version)| *version)
    }

    fn check_block(&self, number: u64) -> Result<(), Problem> {
        let base = number * BLOCK_BYTES;
        let end = self.seen.size_bytes().saturating_sub(base).min(BLOCK_BYTES) as usize;
        // Who may have left the last byte may have left all of them.
        let whole = (end > 0).then(|| self.sources(base + end as u64 - 1)).into_iter().flatten();
        if whole.into_iter().any(|version| version.block(number) == self.seen.block(number)) {
            return Ok(());
        }
        for (index, byte) in self.seen.block(number)[..end].iter().enumerate() {
            let at = base + index as u64;
            let of = |version: &Content| version.block(number)[index];
            if self.sources(at).any(|version| of(version) == *byte) {
                continue;
            }
            let first = of(self.admissible[0]);
            let fixed = first != 0 && self.admissible.iter().all(|version| of(version) == first);
            if self.data == DataMode::Writeback && !fixed {
                continue;
            }
            let written = self.history.ever().any(|version| of(version) == *byte);
            let kind = if *byte == 0 || written { Kind::PromiseLost } else { Kind::ForeignBytes };
            let wanted: BTreeSet<u8> = self.sources(at).map(of).collect();
            let text = format!("byte {at} is {byte:#04x}, admissible {wanted:02x?}");
            return Err(Problem::new(kind, text));
        }
        Ok(())
    }
}

fn content(
    history: &History<Content>,
    seen: &Content,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    let admissible = history.admissible_list(cut);
    if admissible.contains(&seen) {
        return Ok(());
    }
    let size = seen.size_bytes();
    let fits = |index: &usize| {
        let now = admissible[*index].size_bytes();
        let before = index.checked_sub(1).map(|before| admissible[before].size_bytes());
        now == size || before.is_some_and(|before| before <= size && size <= now)
    };
    let sized: Vec<usize> = (0..admissible.len()).filter(fits).collect();
    if sized.is_empty() {
        let sizes: Vec<_> = admissible.iter().map(|version| version.size_bytes()).collect();
        let text = format!("size {size}, admissible {sizes:?}");
        return Err(Problem::new(Kind::PromiseLost, shorten(text)));
    }
    let mut numbers: Vec<u64> = admissible.iter().flat_map(|version| version.blocks()).collect();
    numbers.extend(seen.blocks());
    numbers.sort_unstable();
    numbers.dedup();
    let bytes = Bytes { history, admissible, sized, seen, data };
    numbers.into_iter().try_for_each(|number| bytes.check_block(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(len: usize, byte: u8) -> Content {
        Content::from_slice(&vec![byte; len])
    }

    fn kind(history: &History<Content>, seen: &Content) -> Option<Kind> {
        content(history, seen, 100, DataMode::Ordered).err().map(|problem| problem.kind)
    }

    /// A thread told the model of a directory's time that another thread's call had set, which had
    /// begun earlier and had not told yet.
    #[test]
    fn a_directory_may_have_a_time_that_another_thread_told() {
        let at = |mode, sec| {
            let mtime = fjord::Timespec { sec, nsec: 0 };
            Attrs { mode, uid: 0, gid: 0, mtime }
        };
        let mut history = History::new(at(0o755, 5));
        history.push(20, at(0o755, 8));
        assert!(was_for_a_moment(&history, at(0o755, 8), 15));
        assert!(was_for_a_moment(&history, at(0o755, 6), 15));
        for wrong in [at(0o755, 4), at(0o755, 9), at(0o700, 8)] {
            assert!(!was_for_a_moment(&history, wrong, 15), "{wrong:?}");
        }
    }

    #[test]
    fn a_size_without_its_data_is_found() {
        let mut history = History::new(filled(100, 1));
        history.push(1, filled(9000, 1));
        assert_eq!(kind(&history, &filled(5000, 1)), None);
        let mut seen = filled(100, 1);
        seen.set_size(9000);
        assert_eq!(kind(&history, &seen), Some(Kind::PromiseLost));
    }

    #[test]
    fn what_a_truncation_took_does_not_come_back_with_growth() {
        let mut history = History::new(filled(8000, 1));
        let mut cut = filled(8000, 1);
        cut.set_size(5000);
        history.push(1, cut.clone());
        let mut grown = cut.clone();
        grown.set_size(8000);
        history.push(2, grown);
        // The first version itself has this size too, and may be what is there.
        assert_eq!(kind(&history, &filled(8000, 1)), None);
        let mut longer = cut;
        longer.set_size(8100);
        history.push(3, longer);
        let mut stale = filled(8000, 1);
        stale.set_size(8100);
        assert_eq!(kind(&history, &stale), Some(Kind::PromiseLost));
    }

    #[test]
    fn an_overwrite_may_be_ahead_of_the_size() {
        let mut history = History::new(filled(5000, 1));
        history.push(1, filled(9000, 2));
        assert_eq!(kind(&history, &filled(5000, 2)), None);
        assert_eq!(kind(&history, &filled(5000, 3)), Some(Kind::ForeignBytes));
    }
}
