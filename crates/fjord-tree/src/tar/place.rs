//! Paths of entries in the image: directories on the path, links, whiteouts of layers.
//!
//! Invariants: a path never leaves the image: links are followed as in a chroot (`..` of the root is the
//! root). The last entry of a name counts; what a plain stream loses by that is listed. A whiteout removes
//! entries of lower layers, never those of its own layer, in any order. The root's `lost+found`
//! stays a directory, which e2fsck requires.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use fjord::{FileKind, InodeNo, InodeRef, Timespec};
use rustix::io::Errno;

use super::error::{EntryError, TarError, short};
use crate::builder::{Builder, Meta, shown};
use crate::error::{Result, TreeError};
use crate::marks::Marks;

/// Symbolic links that one way follows at most (Linux's MAXSYMLINKS).
const LINKS_MAX: usize = 40;
/// Names of a directory that are read at once.
const BATCH: usize = 512;
const LOST_FOUND: &[u8] = b"lost+found";

/// The parts of a name, `.` and slashes left out.
pub(super) fn parts(path: &[u8]) -> Result<Vec<&[u8]>, EntryError> {
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(EntryError::DotDot);
    }
    if path.contains(&0) {
        return Err(EntryError::ZeroByte);
    }
    Ok(parts)
}

/// An entry's name, its directory, and what messages call it.
pub(super) struct Place<'p> {
    pub(super) parent: InodeRef,
    pub(super) name: &'p [u8],
    /// As it is in the stream.
    pub(super) path: &'p [u8],
}

impl Place<'_> {
    pub(super) fn is_lost_found(&self, places: &Places<'_, '_>) -> bool {
        self.name == LOST_FOUND && self.parent.ino() == places.top
    }
}

/// What is left of a way, and directories that it may need.
struct Way<'w> {
    /// All of it, as the entry has it.
    parts: &'w [&'w [u8]],
    /// Names, the next one last.
    rest: Vec<Vec<u8>>,
    links: usize,
    /// Time of the directories that are made; none are made without.
    make: Option<Timespec>,
    path: &'w [u8],
}

impl Way<'_> {
    /// How far it has led, for messages.
    fn so_far(&self, name: &[u8]) -> String {
        let left = self.parts.len().saturating_sub(self.rest.len());
        if self.links == 0 { short(&self.parts[..left].join(&b'/')) } else { short(name) }
    }
}

/// The image while streams are put in.
pub(super) struct Places<'b, 'a> {
    pub(super) builder: &'b mut Builder<'a>,
    /// Name of the stream, for messages.
    pub(super) stream: String,
    top: InodeNo,
    layers: bool,
    /// The directory of the entry before, which is mostly that of the next one too.
    last: Option<(Vec<u8>, InodeRef)>,
    /// Names that the layer has put in or gone through: their directory and a hash of the name.
    of_layer: HashSet<(InodeNo, u64)>,
    hasher: RandomState,
}

impl<'b, 'a> Places<'b, 'a> {
    pub(super) fn new(builder: &'b mut Builder<'a>, layers: bool) -> Result<Places<'b, 'a>> {
        let top = builder.at(b"/", builder.fs.root())?.ino();
        Ok(Places {
            builder,
            stream: String::new(),
            top,
            layers,
            last: None,
            of_layer: HashSet::new(),
            hasher: RandomState::new(),
        })
    }

    /// A further stream begins.
    pub(super) fn begin(&mut self, stream: &str) {
        stream.clone_into(&mut self.stream);
        self.of_layer.clear();
    }

    pub(super) fn layers(&self) -> bool {
        self.layers
    }

    /// An error of the entry at `path`.
    pub(super) fn refuse(&self, path: &[u8], reason: EntryError) -> TreeError {
        self.tar(TarError::Entry { path: short(path), reason })
    }

    /// An error of the stream.
    pub(super) fn tar(&self, source: TarError) -> TreeError {
        TreeError::Tar { name: self.stream.clone(), source }
    }

    /// Remembers that the layer has this name.
    pub(super) fn mark(&mut self, parent: InodeNo, name: &[u8]) {
        if self.layers {
            self.of_layer.insert((parent, self.hasher.hash_one(name)));
        }
    }

    fn is_of_layer(&self, parent: InodeNo, name: &[u8]) -> bool {
        self.of_layer.contains(&(parent, self.hasher.hash_one(name)))
    }

    /// Something was replaced or removed: what was known of ways may be wrong.
    fn forget_ways(&mut self) {
        self.last = None;
    }

    /// The directory that these parts lead to, made (with this time) where it is not there.
    pub(super) fn make_parent(
        &mut self,
        parts: &[&[u8]],
        path: &[u8],
        mtime: Timespec,
    ) -> Result<InodeRef> {
        let way = parts.join(&b'/');
        if let Some((known, inode)) = &self.last
            && *known == way
        {
            return Ok(inode.clone());
        }
        let inode = self.walk(parts, path, Some(mtime))?;
        // With leave to make directories there is always an end.
        let inode = inode.ok_or_else(|| self.refuse(path, EntryError::NoName))?;
        self.last = Some((way, inode.clone()));
        Ok(inode)
    }

    /// The directory that these parts lead to, if it is there.
    pub(super) fn find_parent(&mut self, parts: &[&[u8]], path: &[u8]) -> Result<Option<InodeRef>> {
        self.walk(parts, path, None)
    }

    fn walk(
        &mut self,
        parts: &[&[u8]],
        path: &[u8],
        make: Option<Timespec>,
    ) -> Result<Option<InodeRef>> {
        let rest = parts.iter().rev().map(|part| part.to_vec()).collect();
        let mut way = Way { parts, rest, links: 0, make, path };
        let mut here = self.builder.at(path, self.builder.fs.root())?;
        while let Some(name) = way.rest.pop() {
            match self.step(&here, &name, &mut way)? {
                Some(next) => here = next,
                None => return Ok(None),
            }
        }
        Ok(Some(here))
    }

    fn step(
        &mut self,
        here: &InodeRef,
        name: &[u8],
        way: &mut Way<'_>,
    ) -> Result<Option<InodeRef>> {
        let next = match here.lookup(name) {
            Err(error) if error.is(Errno::NOENT) => match way.make {
                Some(mtime) => {
                    self.mark(here.ino(), name);
                    return self.make_way(here, name, way.path, mtime).map(Some);
                }
                None => return Ok(None),
            },
            result => self.builder.at(way.path, result)?,
        };
        match next.attr().kind() {
            FileKind::Directory => {
                if way.make.is_some() && name != b".." {
                    self.mark(here.ino(), name);
                }
                Ok(Some(next))
            }
            FileKind::Symlink => self.follow(here, &next, way).map(Some),
            // Names of files that lie below one cannot be there.
            _ if way.make.is_none() => Ok(None),
            _ => Err(self.refuse(way.path, EntryError::BelowFile(way.so_far(name)))),
        }
    }

    /// Gives the directory that a link is relative to, its target put before the rest of the way.
    fn follow(&mut self, here: &InodeRef, link: &InodeRef, way: &mut Way<'_>) -> Result<InodeRef> {
        let target = self.builder.at(way.path, link.read_link())?;
        way.links += 1;
        if way.links > LINKS_MAX {
            return Err(self.refuse(way.path, EntryError::LinkLoop));
        }
        let parts = target.split(|byte| *byte == b'/');
        let parts = parts.filter(|part| !part.is_empty() && *part != b".");
        way.rest.extend(parts.rev().map(<[u8]>::to_vec));
        if target.starts_with(b"/") {
            return self.builder.at(way.path, self.builder.fs.root());
        }
        Ok(here.clone())
    }

    /// A directory that no entry has named: as `mkdir -p` makes it, but with the time of what
    /// asked for it, so that the same stream gives the same image.
    fn make_way(
        &mut self,
        parent: &InodeRef,
        name: &[u8],
        path: &[u8],
        mtime: Timespec,
    ) -> Result<InodeRef> {
        let made = parent.mkdir(name, 0o755, &self.builder.cred);
        let inode = self.builder.at(path, made)?;
        let meta = Meta {
            mode: 0o755,
            uid: 0,
            gid: 0,
            atime: mtime,
            mtime,
            xattrs: Vec::new(),
            marks: Marks::default(),
        };
        // Its own name will do for messages: a long way has as many directories as parts.
        self.builder.defer(&inode, name, meta)?;
        Ok(inode)
    }

    /// The directory of this name, made where it is not there.
    pub(super) fn directory(&mut self, place: &Place<'_>) -> Result<InodeRef> {
        let make = |places: &Self| {
            let made = place.parent.mkdir(place.name, 0o755, &places.builder.cred);
            made.map_err(|source| TreeError::Engine { path: shown(place.path), source })
        };
        let there = match place.parent.lookup(place.name) {
            Err(error) if error.is(Errno::NOENT) => return make(self),
            result => self.builder.at(place.path, result)?,
        };
        match there.attr().kind() {
            FileKind::Directory => return Ok(there),
            FileKind::Symlink if !self.layers => {
                let target = self.builder.at(place.path, there.read_link())?;
                self.builder.not_kept(format!(
                    "{}: a symbolic link to {} earlier, which this directory replaces",
                    shown(place.path),
                    short(&target)
                ));
            }
            _ => {}
        }
        drop(there);
        self.forget_ways();
        self.builder.at(place.path, place.parent.unlink(place.name))?;
        make(self)
    }

    /// Makes room for something that is no directory and has a name that is taken.
    pub(super) fn clear(&mut self, place: &Place<'_>) -> Result<()> {
        self.forget_ways();
        let there = self.builder.at(place.path, place.parent.lookup(place.name))?;
        if there.attr().kind() != FileKind::Directory {
            drop(there);
            return self.builder.at(place.path, place.parent.unlink(place.name));
        }
        if place.is_lost_found(self) {
            return Err(self.refuse(place.path, EntryError::LostFound));
        }
        let mut listing = Listing::default();
        let has_entries = !self.layers
            && listing.next(&there).map_err(|source| engine(place.path, source))?.is_some();
        if has_entries {
            self.builder.not_kept(format!(
                "{}: a directory with entries earlier, which this entry replaces",
                shown(place.path)
            ));
        }
        self.remove_tree(&place.parent, place.name, there, place.path)
    }

    /// Removes a name of lower layers, and what it holds of them.
    pub(super) fn hide(&mut self, place: &Place<'_>) -> Result<()> {
        let there = match place.parent.lookup(place.name) {
            Err(error) if error.is(Errno::NOENT) => return Ok(()),
            result => self.builder.at(place.path, result)?,
        };
        self.forget_ways();
        let is_directory = there.attr().kind() == FileKind::Directory;
        let stays = self.is_of_layer(place.parent.ino(), place.name) || place.is_lost_found(self);
        match (is_directory, stays) {
            (true, true) => self.hide_entries(there, place.path),
            (false, true) => Ok(()),
            (true, false) => self.remove_tree(&place.parent, place.name, there, place.path),
            (false, false) => {
                drop(there);
                self.builder.at(place.path, place.parent.unlink(place.name))
            }
        }
    }

    /// Removes what lower layers have in a directory, also in directories there that stay.
    pub(super) fn hide_entries(&mut self, directory: InodeRef, path: &[u8]) -> Result<()> {
        self.forget_ways();
        let mut stack = vec![directory];
        while let Some(dir) = stack.pop() {
            let mut listing = Listing::default();
            while let Some(name) = listing.next(&dir).map_err(|source| engine(path, source))? {
                let place = Place { parent: dir.clone(), name: &name, path };
                if place.is_lost_found(self) {
                    continue;
                }
                let there = self.builder.at(path, dir.lookup(&name))?;
                let is_directory = there.attr().kind() == FileKind::Directory;
                match (is_directory, self.is_of_layer(dir.ino(), &name)) {
                    (true, true) => stack.push(there),
                    (false, true) => {}
                    (true, false) => self.remove_tree(&dir, &name, there, path)?,
                    (false, false) => {
                        drop(there);
                        self.builder.at(path, dir.unlink(&name))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes a directory and all in it, without recursion on the stack.
    fn remove_tree(
        &mut self,
        parent: &InodeRef,
        name: &[u8],
        directory: InodeRef,
        path: &[u8],
    ) -> Result<()> {
        let mut stack = vec![(parent.clone(), name.to_vec(), directory, Listing::default())];
        while let Some((parent, name, dir, listing)) = stack.last_mut() {
            let Some(below) = listing.next(dir).map_err(|source| engine(path, source))? else {
                self.builder.forget(dir.ino());
                let (parent, name) = (parent.clone(), std::mem::take(name));
                stack.pop();
                self.builder.at(path, parent.rmdir(&name))?;
                continue;
            };
            let there = self.builder.at(path, dir.lookup(&below))?;
            if there.attr().kind() == FileKind::Directory {
                let dir = dir.clone();
                stack.push((dir, below, there, Listing::default()));
            } else {
                drop(there);
                self.builder.at(path, dir.unlink(&below))?;
            }
        }
        Ok(())
    }
}

fn engine(path: &[u8], source: fjord::Error) -> TreeError {
    TreeError::Engine { path: shown(path), source }
}

/// The names in a directory, some at a time; names may go meanwhile.
#[derive(Default)]
struct Listing {
    cookie: u64,
    /// The next name last.
    fetched: Vec<Vec<u8>>,
    is_done: bool,
}

impl Listing {
    fn next(&mut self, directory: &InodeRef) -> fjord::Result<Option<Vec<u8>>> {
        while self.fetched.is_empty() && !self.is_done {
            let mut count = 0;
            let (cookie, fetched) = (&mut self.cookie, &mut self.fetched);
            directory.read_dir(*cookie, &mut |entry| {
                *cookie = entry.next_cookie;
                count += 1;
                if entry.name != b"." && entry.name != b".." {
                    fetched.push(entry.name.to_vec());
                }
                count < BATCH
            })?;
            self.is_done = count < BATCH;
            self.fetched.reverse();
        }
        Ok(self.fetched.pop())
    }
}
