//! Adds entries to a mounted image: common code for directory trees and tar streams.
//!
//! Invariants: attributes of a directory are set after all that goes into it, since new entries
//! change its times and would inherit its default access lists. An entry that replaces another is
//! complete and durable before it takes the name; one that fails leaves nothing behind, and what
//! had the name before stays.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use fjord::{
    Cred, FileKind, Fs, InodeNo, InodeRef, RenameFlags, SetAttr, SetTime, Timespec, XattrFlags,
};
use fjord_block::Device;
use fjord_format::acl::{Acl, AclEntry, AclTag};
use fjord_format::features::Incompat;
use fjord_format::htree::LINK_COUNT_MAX;
use fjord_format::inode::DeviceNumber;
use rustix::io::Errno;

use crate::build::Build;
use crate::error::{Full, Result, TreeError, list, list_or_end};
use crate::host::write::without_list;
use crate::marks::Marks;
use crate::owners::IdKind;
use crate::rules::Rules;
use crate::tar::input::{TarInput, TarOptions};

/// Bytes read from the source at once.
pub(crate) const COPY_BYTES: usize = 1 << 20;
/// Blocks of so many bytes are no larger on most machines, so larger ones are not proposed.
const LARGE_BLOCK_BYTES: u32 = 4096;
/// The ID that is none.
const NO_ID: u32 = u32::MAX;
/// What Linux shows in place of IDs that it cannot show.
const OVERFLOW_ID: u32 = 65_534;
/// Inodes of this size have no room for years after 2038 and fractions of a second.
const SMALL_INODE_BYTES: u16 = 128;
/// Bytes of the longest name.
const NAME_BYTES_MAX: usize = 255;
/// Most bytes of paths and attributes that are kept until the end.
const DEFERRED_BYTES_MAX: usize = 64 << 20;
/// Data and entries that a new image collects before they are written to the device.
const UNWRITTEN_BYTES_MAX: u64 = 6 << 20;
const UNWRITTEN_ENTRIES_MAX: u64 = 4096;
/// Attributes that hold access control lists.
pub(crate) const ACL_XATTRS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// What went into the image so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    /// Entries of all kinds.
    pub entries: u64,
    /// Bytes of file data, holes left out.
    pub bytes: u64,
    /// Blocks that they take up; known at the end of [`populate`].
    pub blocks: u64,
    /// Inodes in use, those of the file system itself among them; known at the end of [`populate`].
    pub inodes: u64,
    /// Paths and names of records that fjord does not support.
    pub skipped: Vec<String>,
    /// Losses by path, with reasons: attributes that the image cannot hold, entries that could not
    /// be read.
    pub unkept: Vec<String>,
    /// Entries that could not be copied, with reasons.
    pub failed: Vec<String>,
}

/// Where the contents come from.
pub enum Source<'a> {
    /// A directory; its entries go to the root of the image.
    Directory(&'a Path),
    /// A tar stream, compressed or not.
    Tar(&'a mut dyn io::Read),
    /// Tar files and standard input, one after the other.
    Tars(&'a [TarInput], &'a TarOptions),
}

/// Called after each entry and each piece of data.
pub type Progress<'a> = &'a mut dyn FnMut(&Populated);

/// Mounts the image on the device, puts the contents in and unmounts it. `progress` is called
/// after each entry and each piece of data.
///
/// # Errors
/// [`TreeError::Source`] when the contents cannot be read, [`TreeError::Full`] when the image is
/// too small for them, [`TreeError::Engine`] when the image cannot take them otherwise.
pub fn populate(
    device: Arc<dyn Device>,
    source: Source<'_>,
    rules: &Rules,
    progress: Progress<'_>,
) -> Result<Populated> {
    let engine = |source| TreeError::Engine { path: "the image".to_owned(), source };
    let build = Build::start(device, rules.latest).map_err(engine)?;
    let gather = build.gather.clone();
    // What the engine says of it is about mounts.
    let full_below = |error| match error {
        TreeError::Engine { .. } if gather.is_full_below() => {
            TreeError::Full { path: "the contents".to_owned(), of: Full::Below }
        }
        error => error,
    };
    let before = build.fs.statfs();
    let mut builder = Builder::new(&build.fs, rules, progress);
    let filled = match source {
        Source::Directory(path) => crate::host::read::from_dir(&mut builder, path),
        Source::Tar(stream) => crate::tar::extract::from_stream(&mut builder, stream),
        Source::Tars(inputs, options) => {
            crate::tar::extract::from_inputs(&mut builder, inputs, options)
        }
    };
    let filled = filled.and_then(|()| builder.finish()).and_then(|mut filled| {
        build.fs.sync().map_err(|error| full_or(&build.fs, "the contents".to_owned(), error))?;
        let after = build.fs.statfs();
        filled.blocks = before.blocks_free.saturating_sub(after.blocks_free);
        filled.inodes = after.files.saturating_sub(after.files_free);
        Ok(filled)
    });
    // The image is made clean even when the contents did not fit.
    let finished = build.finish().map_err(engine);
    let populated = filled.map_err(full_below)?;
    finished.map_err(full_below).map(|()| populated)
}

/// Attributes to give to an inode.
#[derive(Clone, Debug)]
pub(crate) struct Meta {
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) atime: Timespec,
    pub(crate) mtime: Timespec,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) marks: Marks,
}

/// Where an entry goes.
#[derive(Clone, Copy)]
pub(crate) struct Spot<'s> {
    pub(crate) parent: &'s InodeRef,
    pub(crate) name: &'s [u8],
    /// For messages.
    pub(crate) path: &'s [u8],
}

/// An entry to make that is no directory.
#[derive(Clone, Copy)]
pub(crate) enum New<'n> {
    /// A regular file that nobody but its owner may read until it is complete.
    File,
    /// A regular file with permission bits of its own, but for the umask or as its directory's
    /// default list has them.
    FileWith { mode: u16 },
    /// A symbolic link with its target.
    Symlink(&'n [u8]),
    /// A device, pipe or socket.
    Node {
        /// Type and permission bits.
        mode: u16,
        device: DeviceNumber,
    },
}

impl New<'_> {
    pub(crate) fn make(
        self,
        parent: &InodeRef,
        name: &[u8],
        cred: &Cred,
    ) -> fjord::Result<InodeRef> {
        match self {
            New::File => parent.create(name, 0o600, cred),
            New::FileWith { mode } => parent.create(name, mode, cred),
            New::Symlink(target) => parent.symlink(name, target, cred),
            New::Node { mode, device } => parent.mknod(name, mode, device.to_u32(), cred),
        }
    }
}

/// Memory that waits for the end with a directory.
fn deferred_bytes(path: &[u8], meta: &Meta) -> usize {
    let xattrs: usize = meta.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
    path.len() + xattrs
}

/// Puts entries into a mounted image.
pub(crate) struct Builder<'a> {
    pub(crate) fs: &'a Fs,
    pub(crate) cred: Cred,
    pub(crate) done: Populated,
    pub(crate) rules: &'a Rules,
    /// The image had contents before: what a new entry inherits is taken from it.
    over: bool,
    directories: BTreeMap<InodeNo, (Vec<u8>, Meta)>,
    /// What is marked when everything has its names and contents.
    marks_last: Vec<(InodeNo, Vec<u8>, Marks)>,
    /// Bytes of paths and attributes that they hold.
    deferred_bytes: usize,
    /// Temporary names given so far.
    beside_count: u32,
    /// What a new image holds in memory.
    unwritten: Unwritten,
    changed_times: ChangedTimes,
    progress: Progress<'a>,
}

/// Times that the image holds as others.
#[derive(Clone, Copy, Default)]
struct ChangedTimes {
    /// Entries with times beyond what their inodes can hold.
    entries: u64,
    /// Some lost their fractions of a second.
    fractions: bool,
}

impl ChangedTimes {
    /// Notes the times of an entry: wanted and set.
    fn note(&mut self, times: [(Timespec, Timespec); 2]) {
        let is_other = times.iter().any(|(wanted, set)| wanted.sec != set.sec);
        self.entries += u64::from(is_other);
        let is_cut =
            |(wanted, set): &(Timespec, Timespec)| wanted.sec == set.sec && wanted.nsec != set.nsec;
        self.fractions |= times.iter().any(is_cut);
    }
}

/// What has gone into a new image since all of it was written to the device.
#[derive(Default)]
struct Unwritten {
    bytes: u64,
    entries: u64,
}

impl Unwritten {
    /// Whether to write it out: seldom enough to write much at a time, and before it fills the
    /// memory that the mount may use.
    fn is_much(&self) -> bool {
        self.bytes > UNWRITTEN_BYTES_MAX || self.entries > UNWRITTEN_ENTRIES_MAX
    }
}

/// An error of the engine, with its kind if it is a lack of space.
fn full_or(fs: &Fs, path: String, source: fjord::Error) -> TreeError {
    match source.is(Errno::NOSPC) {
        true => TreeError::Full { path, of: Full::of(fs) },
        false => TreeError::Engine { path, source },
    }
}

/// A path for messages.
pub(crate) fn shown(path: &[u8]) -> String {
    OsStr::from_bytes(path).to_string_lossy().into_owned()
}

impl<'a> Builder<'a> {
    /// Into a new image.
    pub(crate) fn new(fs: &'a Fs, rules: &'a Rules, progress: Progress<'a>) -> Builder<'a> {
        Builder {
            fs,
            cred: Cred::root(),
            done: Populated::default(),
            rules,
            over: false,
            directories: BTreeMap::new(),
            marks_last: Vec::new(),
            deferred_bytes: 0,
            beside_count: 0,
            unwritten: Unwritten::default(),
            changed_times: ChangedTimes::default(),
            progress,
        }
    }

    /// Into an image that has contents.
    pub(crate) fn over(fs: &'a Fs, rules: &'a Rules, progress: Progress<'a>) -> Builder<'a> {
        Builder { over: true, ..Builder::new(fs, rules, progress) }
    }

    /// Gives an error of the engine the path that it happened at, and a lack of space its kind.
    pub(crate) fn at<T>(&self, path: &[u8], result: fjord::Result<T>) -> Result<T> {
        result.map_err(|source| self.failed(path, source))
    }

    fn failed(&self, path: &[u8], source: fjord::Error) -> TreeError {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let path = shown(path);
        if source.is(Errno::NAMETOOLONG) && name.len() <= NAME_BYTES_MAX {
            return TreeError::LinkTooLong { path, block_size: self.fs.geometry().block_size };
        }
        full_or(self.fs, path, source)
    }

    /// Makes an entry that is no directory, completes it by `fill`, and gives it its name.
    pub(crate) fn place(
        &mut self,
        spot: Spot<'_>,
        new: New<'_>,
        fill: &mut dyn FnMut(&mut Self, &InodeRef) -> Result<()>,
    ) -> Result<InodeRef> {
        let Spot { parent, name, path } = spot;
        let made = match new.make(parent, name, &self.cred) {
            Err(error) if error.is(Errno::EXIST) => return self.replace(spot, new, fill),
            made => self.at(path, made)?,
        };
        match fill(self, &made) {
            Ok(()) => Ok(made),
            Err(error) => {
                // The error is the one that counts.
                let _ = parent.unlink(name);
                Err(error)
            }
        }
    }

    /// As [`Builder::place`], where the name is in use: made beside, then renamed. A file has no
    /// name at all until it is complete, so that not even a killed process leaves a part of it.
    fn replace(
        &mut self,
        spot: Spot<'_>,
        new: New<'_>,
        fill: &mut dyn FnMut(&mut Self, &InodeRef) -> Result<()>,
    ) -> Result<InodeRef> {
        let Spot { parent, path, .. } = spot;
        self.check_replaceable(spot)?;
        let beside = self.free_name(spot)?;
        let file_mode = match new {
            New::File => Some(0o600),
            New::FileWith { mode } => Some(mode),
            _ => None,
        };
        if let Some(mode) = file_mode {
            let made = self.at(path, parent.tmpfile(mode, &self.cred))?;
            fill(self, &made)?;
            self.at(path, made.fsync(false))?;
            self.at(path, parent.link(&made, &beside))?;
            self.take_name(spot, &beside)?;
            return Ok(made);
        }
        let made = self.at(path, new.make(parent, &beside, &self.cred))?;
        if let Err(error) = fill(self, &made) {
            // The error is the one that counts.
            let _ = parent.unlink(&beside);
            return Err(error);
        }
        self.take_name(spot, &beside)?;
        Ok(made)
    }

    /// A directory that is there already (`false`), or a new one (`true`).
    pub(crate) fn directory_in(&self, spot: Spot<'_>) -> Result<(InodeRef, bool)> {
        let Spot { parent, name, path } = spot;
        match parent.mkdir(name, 0o700, &self.cred) {
            Err(error) if error.is(Errno::EXIST) => {
                let there = self.at(path, parent.lookup(name))?;
                if there.attr().kind() == FileKind::Directory {
                    return Ok((there, false));
                }
                Err(TreeError::InTheWay {
                    path: shown(path),
                    what: "something other than a directory",
                })
            }
            made => Ok((self.at(path, made)?, true)),
        }
    }

    fn check_replaceable(&self, spot: Spot<'_>) -> Result<()> {
        let there = self.at(spot.path, spot.parent.lookup(spot.name))?;
        if there.attr().kind() == FileKind::Directory {
            return Err(TreeError::InTheWay { path: shown(spot.path), what: "a directory" });
        }
        Ok(())
    }

    /// Renames the complete entry of the name `beside`.
    fn take_name(&self, spot: Spot<'_>, beside: &[u8]) -> Result<()> {
        let Spot { parent, name, path } = spot;
        let renamed = parent.rename(beside, parent, name, RenameFlags::empty(), &self.cred);
        self.at(path, renamed).inspect_err(|_| {
            // The error is the one that counts.
            let _ = parent.unlink(beside);
        })
    }

    /// A name that nothing has beside an entry.
    fn free_name(&mut self, spot: Spot<'_>) -> Result<Vec<u8>> {
        loop {
            self.beside_count += 1;
            let name = format!(".fjord-{}-{}", std::process::id(), self.beside_count).into_bytes();
            match spot.parent.lookup(&name) {
                Err(error) if error.is(Errno::NOENT) => return Ok(name),
                found => drop(self.at(spot.path, found)?),
            }
        }
    }

    /// Gives `first` one more name, in place of what has it. False, with a line in the list, if ext4 allows it
    /// no more names: the caller makes a copy, which gets those that follow.
    pub(crate) fn link(&mut self, spot: Spot<'_>, first: &InodeRef) -> Result<bool> {
        let Spot { parent, name, path } = spot;
        match parent.link(first, name) {
            Err(error) if error.is(Errno::EXIST) => {}
            done => return self.linked(path, done),
        }
        let there = self.at(path, parent.lookup(name))?.ino();
        if there == first.ino() {
            return Ok(true);
        }
        self.check_replaceable(spot)?;
        let beside = self.free_name(spot)?;
        let linked = self.linked(path, parent.link(first, &beside))?;
        if linked {
            self.take_name(spot, &beside)?;
        }
        Ok(linked)
    }

    /// Whether there was room for one more name; if not, it is listed.
    fn linked(&mut self, path: &[u8], done: fjord::Result<()>) -> Result<bool> {
        match done {
            Err(error) if error.is(Errno::MLINK) => {
                self.tell_copy(path);
                Ok(false)
            }
            done => self.at(path, done).map(|()| true),
        }
    }

    /// Lists that a name is one of a copy.
    pub(crate) fn tell_copy(&mut self, path: &[u8]) {
        self.not_kept(format!(
            "{}: a hard link to a file that has {LINK_COUNT_MAX} names, as many as ext4 allows: the further \
             names are those of a copy",
            shown(path)
        ));
    }

    /// Sets attributes now or, for a directory, at the end; counts the entry.
    pub(crate) fn finish_entry(&mut self, inode: &InodeRef, path: &[u8], meta: Meta) -> Result<()> {
        if inode.attr().kind() == FileKind::Directory {
            self.defer(inode, path, meta)?;
        } else {
            self.apply(inode, path, &meta)?;
        }
        self.count_entry();
        Ok(())
    }

    /// Sets attributes of a directory at the end.
    ///
    /// # Errors
    /// [`TreeError::DirectoryAttributes`] when what is kept until then is too much.
    pub(crate) fn defer(&mut self, inode: &InodeRef, path: &[u8], meta: Meta) -> Result<()> {
        self.forget(inode.ino());
        self.deferred_bytes += deferred_bytes(path, &meta);
        if self.deferred_bytes > DEFERRED_BYTES_MAX {
            let (path, max_bytes) = (shown(path), DEFERRED_BYTES_MAX);
            return Err(TreeError::DirectoryAttributes { path, max_bytes });
        }
        self.directories.insert(inode.ino(), (path.to_vec(), meta));
        Ok(())
    }

    /// Nothing is left to set for a directory, for it is gone.
    pub(crate) fn forget(&mut self, ino: InodeNo) {
        if let Some((path, meta)) = self.directories.remove(&ino) {
            self.deferred_bytes -= deferred_bytes(&path, &meta);
        }
    }

    /// Lists a record or an entry that says nothing fjord takes over.
    pub(crate) fn skip(&mut self, what: String) {
        list(&mut self.done.skipped, what);
    }

    /// Lists what could not be kept.
    pub(crate) fn not_kept(&mut self, what: String) {
        list(&mut self.done.unkept, what);
    }

    /// Lists an error that concerns only one entry, so that the others can be copied.
    ///
    /// # Errors
    /// The same, if it ends the copy.
    pub(crate) fn go_on(&mut self, error: TreeError) -> Result<()> {
        list_or_end(error, &mut self.done.unkept, &mut self.done.failed)
    }

    pub(crate) fn count_entry(&mut self) {
        self.done.entries += 1;
        (self.progress)(&self.done);
    }

    /// Sets attributes, owner, mode and times.
    pub(crate) fn apply(&mut self, inode: &InodeRef, path: &[u8], meta: &Meta) -> Result<()> {
        let kind = inode.attr().kind();
        if self.over {
            self.remove_other_lists(inode, path, meta)?;
        }
        let owner = self.rules.owners.map(meta.uid, meta.gid);
        let is_root = inode.ino() == InodeNo::ROOT;
        let (uid, gid) = self.rules.root_owner.filter(|_| is_root).unwrap_or(owner);
        let [uid, gid] =
            [("user", uid), ("group", gid)].map(|(what, id)| self.valid_id(what, id, path));
        let kept_mode = self.rules.kept_mode(meta.mode.into(), &meta.xattrs);
        // Only permission bits went in.
        let mode = self.file_mode(kind).unwrap_or(kept_mode as u16);
        let (atime, mtime) = self.times(meta);
        let change = SetAttr {
            // The mode of a link is always 0777.
            mode: (kind != FileKind::Symlink).then_some(mode),
            uid: Some(uid),
            gid: Some(gid),
            atime: Some(SetTime::At(atime)),
            mtime: Some(SetTime::At(mtime)),
            ..SetAttr::default()
        };
        let set = self.at(path, inode.set_attr(&change, &self.cred))?;
        self.changed_times.note([(atime, set.atime), (mtime, set.mtime)]);
        // After the owner, whose change would take capabilities away.
        for (name, value) in meta.xattrs.iter().filter(|_| !self.rules.without_xattrs) {
            self.set_xattr(inode, path, name, value)?;
        }
        match meta.marks {
            marks if marks.is_empty() => {}
            marks if marks.come_last() => {
                self.marks_last.push((inode.ino(), path.to_vec(), marks));
            }
            marks => self.mark(inode, path, marks)?,
        }
        self.unwritten.entries += 1;
        self.write_out(path)
    }

    fn mark(&mut self, inode: &InodeRef, path: &[u8], marks: Marks) -> Result<()> {
        for what in self.at(path, marks.set(inode))? {
            self.not_kept(format!("{}: {what}", shown(path)));
        }
        Ok(())
    }

    /// An ID that Linux knows: the largest number means "unchanged" to chown(2), and no mount shows it.
    fn valid_id(&mut self, what: &str, id: u32, path: &[u8]) -> u32 {
        if id != NO_ID {
            return id;
        }
        self.not_kept(format!(
            "{}: {what} {NO_ID} is none that Linux knows: it became {OVERFLOW_ID}",
            shown(path)
        ));
        OVERFLOW_ID
    }

    /// Writes to the device what a new image has in memory, if that is much.
    fn write_out(&mut self, path: &[u8]) -> Result<()> {
        if self.over || !self.unwritten.is_much() {
            return Ok(());
        }
        self.unwritten = Unwritten::default();
        self.at(path, self.fs.sync())
    }

    /// The mode that the rules give to a file.
    fn file_mode(&self, kind: FileKind) -> Option<u16> {
        self.rules.file_mode.filter(|_| kind == FileKind::Regular)
    }

    fn times(&self, meta: &Meta) -> (Timespec, Timespec) {
        match self.rules.latest {
            Some(latest) => (meta.mtime.min(latest), meta.mtime.min(latest)),
            None => (meta.atime, meta.mtime),
        }
    }

    fn set_xattr(
        &mut self,
        inode: &InodeRef,
        path: &[u8],
        name: &[u8],
        value: &[u8],
    ) -> Result<()> {
        let list = self.list_for(inode.attr().kind(), name, value);
        let value = list.as_deref().unwrap_or(value);
        match inode.set_xattr(name, value, XattrFlags::empty()) {
            Ok(()) => Ok(()),
            Err(error) => {
                let Some(why) = self.why_unkept(name, value, &error) else {
                    return self.at(path, Err(error));
                };
                self.not_kept(format!("{}: attribute {}: {why}", shown(path), shown(name)));
                self.lose_list(inode, path, name, value)
            }
        }
    }

    /// What is said of an attribute that ext4, or this image, cannot hold; `None` where something
    /// else is wrong.
    fn why_unkept(&self, name: &[u8], value: &[u8], error: &fjord::Error) -> Option<String> {
        if error.is(Errno::OPNOTSUPP) {
            return Some("not known to ext4".to_owned());
        }
        if error.is(Errno::RANGE) {
            return Some(format!("a name of {} bytes; ext4 has 1 to 255", name.len()));
        }
        // A malformed access list is another thing: what it allows is unknown.
        if error.is(Errno::INVAL) && !ACL_XATTRS.contains(&name) {
            return Some("ext4 has no such name".to_owned());
        }
        if error.is(Errno::TOOBIG) {
            return Some(format!("{} bytes; Linux has at most 65536", value.len()));
        }
        if error.is(Errno::NOSPC) && !self.is_full() {
            return Some(self.too_large(value.len()));
        }
        None
    }

    /// What is said of an attribute with a value of `bytes` that does not fit beside the others.
    fn too_large(&self, bytes: usize) -> String {
        let block_size = self.fs.geometry().block_size;
        let has_large = self.fs.geometry().features.incompat.contains(Incompat::EA_INODE);
        let hint = match (block_size < LARGE_BLOCK_BYTES, has_large) {
            (true, false) => {
                ": make the image with larger blocks (mkfs -b 4096) or with the feature ea_inode \
                 (mkfs -O ea_inode)"
            }
            (true, true) => ": make the image with larger blocks (mkfs -b 4096)",
            (false, false) => ": make the image with the feature ea_inode (mkfs -O ea_inode)",
            (false, true) => "",
        };
        format!("{bytes} bytes do not fit in a block of {block_size} bytes with the others{hint}")
    }

    /// An access control list that is not kept: none is left, and the mode does not have its mask.
    fn lose_list(&self, inode: &InodeRef, path: &[u8], name: &[u8], value: &[u8]) -> Result<()> {
        if !ACL_XATTRS.contains(&name) {
            return Ok(());
        }
        match inode.remove_xattr(name) {
            Err(error) if error.is(Errno::NODATA) || error.is(Errno::OPNOTSUPP) => {}
            removed => self.at(path, removed)?,
        }
        if name == ACL_XATTRS[0] && inode.attr().kind() != FileKind::Symlink {
            let mode = without_list(value, inode.attr().mode.into()) as u16;
            let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
            self.at(path, inode.set_attr(&change, &self.cred))?;
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        let found = self.fs.statfs();
        found.blocks_free == 0 || found.files_free == 0
    }

    /// An access control list as it goes into the image: with the IDs that its users and groups have
    /// there, and limited to the mode that the rules give, as by chmod(2). `None` where it is the
    /// same.
    fn list_for(&self, kind: FileKind, name: &[u8], value: &[u8]) -> Option<Vec<u8>> {
        let mode = self.file_mode(kind).filter(|_| name == ACL_XATTRS[0]);
        let keeps_ids = self.rules.owners.keeps_all();
        if keeps_ids && mode.is_none() || !ACL_XATTRS.contains(&name) {
            return None;
        }
        let mut list = Acl::from_xattr(value).ok()??;
        if !keeps_ids {
            list = self.mapped_list(&list)?;
        }
        if let Some(mode) = mode {
            list.chmod(mode);
        }
        Some(list.to_xattr())
    }

    /// A list with the IDs of the image.
    fn mapped_list(&self, list: &Acl) -> Option<Acl> {
        let owners = &self.rules.owners;
        let map = |entry: &AclEntry| {
            let tag = match entry.tag {
                AclTag::User(id) => AclTag::User(owners.map_id(IdKind::User, id)),
                AclTag::Group(id) => AclTag::Group(owners.map_id(IdKind::Group, id)),
                other => other,
            };
            AclEntry { tag, perm: entry.perm }
        };
        let mut entries: Vec<AclEntry> = list.entries().iter().map(map).collect();
        entries.sort_by_key(|entry| entry.tag.sort_key());
        // Of two that have become one, nobody gets the rights of both.
        entries.dedup_by(|later, first| {
            let is_same = later.tag == first.tag;
            if is_same {
                first.perm &= later.perm;
            }
            is_same
        });
        Acl::new(entries)
    }

    /// Removes access control lists that the source does not have: inherited ones, and those of a
    /// directory that was there before.
    fn remove_other_lists(&self, inode: &InodeRef, path: &[u8], meta: &Meta) -> Result<()> {
        for name in self.at(path, inode.list_xattr())? {
            let is_kept = meta.xattrs.iter().any(|(kept, _)| *kept == name);
            if ACL_XATTRS.contains(&&name[..]) && !is_kept {
                self.at(path, inode.remove_xattr(&name))?;
            }
        }
        Ok(())
    }

    /// Sets what was left for the end.
    pub(crate) fn finish(mut self) -> Result<Populated> {
        for (ino, (path, meta)) in std::mem::take(&mut self.directories) {
            let inode = self.at(&path, self.fs.inode(ino, None))?;
            self.apply(&inode, &path, &meta)?;
        }
        for (ino, path, marks) in std::mem::take(&mut self.marks_last) {
            let inode = self.at(&path, self.fs.inode(ino, None))?;
            self.mark(&inode, &path, marks)?;
        }
        self.tell_times();
        Ok(self.done)
    }

    /// Lists, once for all entries, that times became others.
    fn tell_times(&mut self) {
        let ChangedTimes { entries, fractions } = self.changed_times;
        let inode_size = self.fs.geometry().inode_size;
        let (last, hint) = match inode_size {
            SMALL_INODE_BYTES => {
                ("2038-01-19", ": make the image with larger inodes (mkfs -I 256)")
            }
            _ => ("2446-05-10", ""),
        };
        if entries > 0 {
            self.not_kept(format!(
                "times of {entries} entries: inodes of {inode_size} bytes keep times from 1901-12-13 \
                 to {last} only, which earlier and later ones became{hint}"
            ));
        }
        if fractions {
            self.skip(format!(
                "fractions of a second of times: inodes of {inode_size} bytes keep whole \
                 seconds{hint}"
            ));
        }
    }

    /// Writes all of `data` at `offset`.
    pub(crate) fn write(
        &mut self,
        inode: &InodeRef,
        path: &[u8],
        offset: u64,
        data: &[u8],
    ) -> Result<()> {
        let mut written = 0;
        while written < data.len() {
            let at = offset + written as u64;
            match self.at(path, inode.write(at, &data[written..]))? {
                0 => return self.at(path, Err(Errno::NOSPC.into())),
                count => written += count,
            }
        }
        self.done.bytes += data.len() as u64;
        (self.progress)(&self.done);
        self.unwritten.bytes += data.len() as u64;
        self.write_out(path)
    }

    /// Gives a file its length, which holes at the end leave open.
    pub(crate) fn set_size(&mut self, inode: &InodeRef, path: &[u8], size: u64) -> Result<()> {
        if inode.attr().size == size {
            return Ok(());
        }
        let change = SetAttr { size: Some(size), ..SetAttr::default() };
        self.at(path, inode.set_attr(&change, &self.cred)).map(drop)
    }
}
