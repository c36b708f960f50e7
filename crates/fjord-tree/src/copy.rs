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
use crate::host::DEPTH_MAX;
use crate::rules::Rules;

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
    /// The directory that the copy goes to.
    pub dir: InodeRef,
    /// The name that it gets.
    pub name: Vec<u8>,
}

/// Copies files inside one image. Symbolic links are copied, not followed; directories are merged; a
/// file that has the name is replaced when the copy is complete.
///
/// # Errors
/// [`TreeError::Usage`] for a directory that would go into itself, and for trees that are too deep;
/// [`TreeError::Full`], [`TreeError::InTheWay`], [`TreeError::Engine`].
pub fn copy(items: &[CopyItem], rules: &CopyRules, progress: Progress<'_>) -> Result<Populated> {
    let Some(first) = items.first() else { return Ok(Populated::default()) };
    let (fs, tree_rules) = (first.dir.fs(), Rules::default());
    let mut builder = Builder::over(&fs, &tree_rules, progress);
    builder.cred.umask = rules.umask;
    let buffer = vec![0; COPY_BYTES];
    let mut copy = Copy { builder: &mut builder, rules, linked: HashMap::new(), buffer };
    for CopyItem { file, dir, name } in items {
        check_not_inside(copy.builder, file, dir, name)?;
        copy.entry(file, Spot { parent: dir, name, path: name }, 0)?;
    }
    builder.finish()
}

/// Fails if `dir` is `file` or lies below it.
fn check_not_inside(
    builder: &Builder<'_>,
    file: &InodeRef,
    dir: &InodeRef,
    name: &[u8],
) -> Result<()> {
    let mut above = dir.clone();
    for _ in 0..=DEPTH_MAX * 8 {
        if above.ino() == file.ino() {
            return Err(TreeError::Usage("a directory cannot be copied into itself".to_owned()));
        }
        if above.ino() == InodeNo::ROOT {
            return Ok(());
        }
        above = builder.at(name, above.lookup(b".."))?;
    }
    builder.at(name, Err(Errno::LOOP.into()))
}

struct Copy<'c, 'a> {
    builder: &'c mut Builder<'a>,
    rules: &'c CopyRules,
    /// The copies of what has several names.
    linked: HashMap<InodeNo, InodeNo>,
    buffer: Vec<u8>,
}

impl Copy<'_, '_> {
    fn entry(&mut self, file: &InodeRef, spot: Spot<'_>, depth: usize) -> Result<()> {
        let attr = file.attr();
        if attr.kind() == FileKind::Directory {
            return self.directory(file, spot, depth);
        }
        let there = match spot.parent.lookup(spot.name) {
            Err(error) if error.is(Errno::NOENT) => None,
            found => Some(self.builder.at(spot.path, found)?.attr()),
        };
        if there.is_some() && self.rules.no_clobber {
            return Ok(());
        }
        if self.rules.all
            && let Some(first) = self.linked.get(&file.ino())
        {
            let first = self.builder.at(spot.path, self.builder.fs.inode(*first, None))?;
            self.builder.link(spot, &first)?;
            self.builder.count_entry();
            return Ok(());
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
            return self.builder.at(spot.path, Err(Errno::LOOP.into()));
        }
        let (made, is_new) = self.builder.directory_in(spot)?;
        let mut names = Vec::new();
        let read = from.read_dir(0, &mut |entry| {
            if entry.name != b"." && entry.name != b".." {
                names.push(entry.name.to_vec());
            }
            true
        });
        self.builder.at(spot.path, read)?;
        names.sort();
        for name in names {
            let path = [spot.path, b"/", &name].concat();
            let child = self.builder.at(&path, from.lookup(&name))?;
            self.entry(&child, Spot { parent: &made, name: &name, path: &path }, depth + 1)?;
        }
        if self.rules.attributes {
            self.keep(from, &made, spot.path)?;
        } else if is_new {
            // It was closed to others while it was filled.
            let inherited = made.attr().mode & S_ISGID;
            let mode = from.attr().mode & DIR_PERMISSIONS & !self.rules.umask;
            self.set_mode(&made, mode | inherited, spot.path)?;
        }
        self.builder.count_entry();
        Ok(())
    }

    /// Copies what is no directory.
    fn other(
        &mut self,
        file: &InodeRef,
        attr: &Attr,
        there: Option<Attr>,
        spot: Spot<'_>,
    ) -> Result<InodeRef> {
        let path = spot.path;
        let mode = attr.mode & PERMISSIONS;
        let mut target = Vec::new();
        let new = match attr.kind() {
            FileKind::Regular => New::FileWith { mode },
            FileKind::Symlink => {
                target = self.builder.at(path, file.read_link())?;
                New::Symlink(&target)
            }
            kind => New::Node {
                mode: kind.mode_bits() | mode,
                device: DeviceNumber::from_u32(attr.rdev),
            },
        };
        let (rules, buffer) = (self.rules, &mut self.buffer);
        let made = self.builder.place(spot, new, &mut |builder, made| {
            if attr.kind() == FileKind::Regular {
                data(builder, file, made, path, buffer)?;
            }
            if rules.attributes {
                let meta = meta(builder, file, rules.all, path)?;
                return builder.apply(made, path, &meta);
            }
            let is_file = |kind: FileKind| kind == FileKind::Regular;
            let Some(there) = there.filter(|there| is_file(there.kind()) && is_file(attr.kind()))
            else {
                return Ok(());
            };
            // As if its content alone were new.
            let change = SetAttr {
                mode: Some(there.mode),
                uid: Some(there.uid),
                gid: Some(there.gid),
                ..SetAttr::default()
            };
            let cred = builder.cred.clone();
            builder.at(path, made.set_attr(&change, &cred)).map(drop)
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
    Ok(Meta { mode: mode & 0o7777, uid, gid, atime, mtime, xattrs })
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
