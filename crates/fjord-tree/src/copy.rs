//! Copies inside one image.
//!
//! Invariant: a copy never grows into itself: the directory that a tree goes to does not lie in the
//! tree.

use std::collections::HashMap;

use fjord::attr::S_ISGID;
use fjord::{Attr, FileKind, InodeNo, InodeRef, SetAttr};
use fjord_format::inode::DeviceNumber;
use rustix::io::Errno;

use crate::builder::{Builder, COPY_BYTES, Meta, New, Populated, Progress, Spot, shown};
use crate::error::{Result, TreeError};
use crate::extract::readable_names;
use crate::host::DEPTH_MAX;
use crate::marks::Marks;
use crate::put::Destination;
use crate::rules::Rules;

/// Directories above a target that are looked at; paths in a sound image are not nearly as deep.
const ABOVE_MAX: usize = 1 << 16;

/// Permission bits that a copy takes over where attributes are not kept; of a directory also the
/// sticky bit, as mkdir(2) does.
const PERMISSIONS: u16 = 0o777;
const DIR_PERMISSIONS: u16 = 0o1777;

/// What copies keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyRules {
    /// Modes, owners and times.
    pub attributes: bool,
    /// Also extended attributes, access control lists, and which names are hard links of one file.
    pub all: bool,
    /// Files that are there stay.
    pub no_clobber: bool,
    /// Permission bits to leave out where attributes are not kept.
    pub umask: u16,
}

/// What is copied, and where to.
pub struct CopyItem {
    /// A file, or a directory with all that is in it.
    pub file: InodeRef,
    /// Where it goes; only a directory has contents that go into another.
    pub to: Destination,
    /// Path of the target, for messages.
    pub path: Vec<u8>,
}

/// Copies files inside one image. Symbolic links are copied, not followed; directories are merged; a
/// file that has the name is replaced atomically, by a rename, when the copy is complete and durable.
/// An item that fails does not stop the others: the second value has the errors. Nor does an entry of a
/// directory, as far as the error concerns no other: [`Populated::failed`] and [`Populated::unkept`].
///
/// Errors are [`TreeError::Usage`] for a directory that would go into itself, and for a file whose
/// contents are to go into a directory; [`TreeError::Full`], [`TreeError::InTheWay`],
/// [`TreeError::Engine`].
pub fn copy(
    items: &[CopyItem],
    rules: &CopyRules,
    progress: Progress<'_>,
) -> (Populated, Vec<TreeError>) {
    let Some(first) = items.first() else { return Default::default() };
    let (fs, tree_rules) = (first.file.fs(), Rules::default());
    let mut builder = Builder::over(&fs, &tree_rules, progress);
    builder.cred.umask = rules.umask;
    let buffer = vec![0; COPY_BYTES];
    let mut copy = Copy { builder: &mut builder, rules, linked: HashMap::new(), buffer };
    let failed = items.iter().filter_map(|item| copy.item(item).err()).collect();
    (builder.done, failed)
}

struct Copy<'c, 'a> {
    builder: &'c mut Builder<'a>,
    rules: &'c CopyRules,
    /// The copies of what has several names.
    linked: HashMap<InodeNo, InodeNo>,
    buffer: Vec<u8>,
}

impl Copy<'_, '_> {
    fn item(&mut self, item: &CopyItem) -> Result<()> {
        let CopyItem { file, to, path } = item;
        match to {
            Destination::Name(dir, name) => {
                self.check_not_inside(file, dir, path)?;
                self.entry(file, Spot { parent: dir, name, path }, 0)
            }
            Destination::Contents(dir) => {
                if file.attr().kind() != FileKind::Directory {
                    let message = format!("{}: only a directory has contents", shown(path));
                    return Err(TreeError::Usage(message));
                }
                self.check_not_inside(file, dir, path)?;
                self.contents(file, (dir, false), path, 0)
            }
        }
    }

    /// Fails if `dir` is `file` or lies below it.
    fn check_not_inside(&self, file: &InodeRef, dir: &InodeRef, path: &[u8]) -> Result<()> {
        let mut above = dir.clone();
        for _ in 0..ABOVE_MAX {
            if above.ino() == file.ino() {
                let path = shown(path);
                let message = format!("{path}: a directory cannot be copied into itself");
                return Err(TreeError::Usage(message));
            }
            if above.ino() == InodeNo::ROOT {
                return Ok(());
            }
            above = self.builder.at(path, above.lookup(b".."))?;
        }
        self.builder.at(path, Err(Errno::LOOP.into()))
    }

    fn entry(&mut self, file: &InodeRef, spot: Spot<'_>, depth: usize) -> Result<()> {
        let attr = file.attr();
        if attr.kind() == FileKind::Directory {
            return self.directory(file, spot, depth);
        }
        let there = match spot.parent.lookup(spot.name) {
            Err(error) if error.is(Errno::NOENT) => None,
            found => Some(self.builder.at(spot.path, found)?),
        };
        if there.is_some() && self.rules.no_clobber {
            return Ok(());
        }
        if self.rules.all
            && let Some(first) = self.linked.get(&file.ino())
        {
            let first = self.builder.at(spot.path, self.builder.fs.inode(*first, None))?;
            if self.builder.link(spot, &first)? {
                self.builder.count_entry();
                return Ok(());
            }
        }
        let copied = self.other(file, &attr, there, spot)?;
        self.builder.count_entry();
        if self.rules.all && attr.nlink > 1 {
            self.linked.insert(file.ino(), copied.ino());
        }
        Ok(())
    }

    fn directory(&mut self, from: &InodeRef, spot: Spot<'_>, depth: usize) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(TreeError::too_deep(spot.path));
        }
        let (made, is_new) = self.builder.directory_in(spot)?;
        self.contents(from, (&made, is_new), spot.path, depth)
    }

    /// Copies what is in a directory to another, which may be new, and then its attributes.
    fn contents(
        &mut self,
        from: &InodeRef,
        (made, is_new): (&InodeRef, bool),
        path: &[u8],
        depth: usize,
    ) -> Result<()> {
        let filled = self.fill(from, made, path, depth);
        let finished = self.finish(from, (made, is_new), path);
        filled.and(finished)
    }

    /// Copies what is in a directory. Entries that fail on their own do not stop the others.
    fn fill(&mut self, from: &InodeRef, made: &InodeRef, path: &[u8], depth: usize) -> Result<()> {
        let (names, read) = readable_names(from);
        let read = self.builder.at(path, read);
        for name in names {
            let below = [path.strip_suffix(b"/").unwrap_or(path), b"/", &name].concat();
            let child = self.builder.at(&below, from.lookup(&name))?;
            let spot = Spot { parent: made, name: &name, path: &below };
            if let Err(error) = self.entry(&child, spot, depth + 1) {
                self.builder.go_on(error)?;
            }
        }
        read
    }

    /// Gives a directory its attributes, complete or not.
    fn finish(
        &mut self,
        from: &InodeRef,
        (made, is_new): (&InodeRef, bool),
        path: &[u8],
    ) -> Result<()> {
        if self.rules.attributes {
            self.keep(from, made, path)?;
        } else if is_new {
            // It was closed to others while it was filled.
            let inherited = made.attr().mode & S_ISGID;
            let mode = from.attr().mode & DIR_PERMISSIONS & !self.rules.umask;
            self.set_mode(made, mode | inherited, path)?;
        }
        self.builder.count_entry();
        Ok(())
    }

    /// Copies what is no directory.
    fn other(
        &mut self,
        file: &InodeRef,
        attr: &Attr,
        there: Option<InodeRef>,
        spot: Spot<'_>,
    ) -> Result<InodeRef> {
        let path = spot.path;
        let mode = attr.mode & PERMISSIONS;
        let target = self.builder.target_of(file, path)?;
        let new = like(attr, mode, &target);
        let (rules, buffer) = (self.rules, &mut self.buffer);
        let made = self.builder.place(spot, new, &mut |builder, made| {
            if attr.kind() == FileKind::Regular {
                data(builder, file, made, path, buffer)?;
            }
            if rules.attributes {
                let meta = meta(builder, file, rules.all, path)?;
                return builder.apply(made, path, &meta);
            }
            let is_file = |file: &InodeRef| file.attr().kind() == FileKind::Regular;
            match there.as_ref().filter(|there| is_file(there) && is_file(file)) {
                Some(there) => builder.keep_of_replaced(there, made, path),
                None => Ok(()),
            }
        });
        drop(target);
        made
    }

    fn set_mode(&mut self, file: &InodeRef, mode: u16, path: &[u8]) -> Result<()> {
        let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
        let cred = self.builder.cred.clone();
        self.builder.at(path, file.set_attr(&change, &cred)).map(drop)
    }

    fn keep(&mut self, from: &InodeRef, to: &InodeRef, path: &[u8]) -> Result<()> {
        let meta = meta(self.builder, from, self.rules.all, path)?;
        self.builder.apply(to, path, &meta)
    }
}

/// A new entry of the same kind; `target` is that of a symbolic link.
fn like<'t>(attr: &Attr, mode: u16, target: &'t [u8]) -> New<'t> {
    match attr.kind() {
        FileKind::Regular => New::FileWith { mode },
        FileKind::Symlink => New::Symlink(target),
        kind => {
            New::Node { mode: kind.mode_bits() | mode, device: DeviceNumber::from_u32(attr.rdev) }
        }
    }
}

impl Builder<'_> {
    /// Where a symbolic link leads; empty for anything else.
    fn target_of(&self, file: &InodeRef, path: &[u8]) -> Result<Vec<u8>> {
        match file.attr().kind() {
            FileKind::Symlink => self.at(path, file.read_link()),
            _ => Ok(Vec::new()),
        }
    }

    /// A further file like one that cannot have more names.
    pub(crate) fn copy_of(
        &mut self,
        file: &InodeRef,
        spot: Spot<'_>,
        buffer: &mut [u8],
    ) -> Result<InodeRef> {
        let (attr, path) = (file.attr(), spot.path);
        let target = self.target_of(file, path)?;
        let new =
            if attr.kind() == FileKind::Regular { New::File } else { like(&attr, 0o600, &target) };
        self.place(spot, new, &mut |builder, made| {
            if attr.kind() == FileKind::Regular {
                data(builder, file, made, path, buffer)?;
            }
            let meta = meta(builder, file, true, path)?;
            builder.apply(made, path, &meta)
        })
    }

    /// Gives a new file what stays of the one that it replaces, as if only the content were new:
    /// owner, mode, attributes and lists, but not capabilities.
    fn keep_of_replaced(&mut self, there: &InodeRef, made: &InodeRef, path: &[u8]) -> Result<()> {
        let mut kept = meta(self, there, true, path)?;
        kept.xattrs.retain(|(name, _)| name != b"security.capability");
        (kept.atime, kept.mtime) = (made.attr().atime, made.attr().mtime);
        self.apply(made, path, &kept)
    }
}

/// What an original hands on.
fn meta(builder: &Builder<'_>, file: &InodeRef, all: bool, path: &[u8]) -> Result<Meta> {
    let mut xattrs = Vec::new();
    for name in builder.at(path, file.list_xattr())? {
        // As for cp -p, which keeps lists among the rights.
        if all || name.starts_with(b"system.posix_acl_") {
            let value = builder.at(path, file.get_xattr(&name))?;
            xattrs.push((name, value));
        }
    }
    let Attr { mode, uid, gid, atime, mtime, .. } = file.attr();
    Ok(Meta { mode: mode & 0o7777, uid, gid, atime, mtime, xattrs, marks: Marks::default() })
}

/// Copies the data of a file, leaving out its holes.
fn data(
    builder: &mut Builder<'_>,
    from: &InodeRef,
    to: &InodeRef,
    path: &[u8],
    buffer: &mut [u8],
) -> Result<()> {
    let size = from.attr().size;
    let mut offset = 0;
    while offset < size {
        let start = match from.seek_data(offset) {
            Err(error) if error.is(Errno::NXIO) => break,
            found => builder.at(path, found)?,
        };
        let end = builder.at(path, from.seek_hole(start))?.min(size);
        offset = start;
        while offset < end {
            let want = (end - offset).min(buffer.len() as u64) as usize;
            let count = builder.at(path, from.read(offset, &mut buffer[..want]))?;
            if count == 0 {
                let path = shown(path);
                return Err(TreeError::Usage(format!("{path} has become shorter meanwhile")));
            }
            builder.write(to, path, offset, &buffer[..count])?;
            offset += count as u64;
        }
    }
    builder.set_size(to, path, size)
}
