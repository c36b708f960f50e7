//! Measures contents before they are copied to an image.
//!
//! Invariant: exactly the entries that [`populate`](crate::populate) copies are counted.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use fjord::Timespec;
use fjord_format::htree::LINK_COUNT_MAX;
use rustix::fs::{FileType, OFlags};

use crate::builder::{COPY_BYTES, shown};
use crate::digest::Digest;
use crate::error::{Result, TreeError};
use crate::host::DEPTH_MAX;
use crate::host::read::{for_data, join, names, open_in, open_root, read, top_bytes, xattrs};
use crate::host::sys::{self, Place, Status};
use crate::rules::Rules;
use crate::tar::error::TarError;
use crate::tar::excluded::{ExcludedMembers, plain_name};
use crate::tar::input::TarInput;
use crate::tar::stream::{TarEntry, TarKind, TarReader};

/// Block sizes that a measure keeps its count for: 1 KiB to 64 KiB.
const BLOCK_SHIFTS: std::ops::RangeInclusive<u32> = 10..=16;
/// Targets of symbolic links that are shorter lie in the inode.
const FAST_LINK_BYTES: u64 = 60;
/// Bytes of an attribute's entry without name and value, the name's padding among them.
const ATTRIBUTE_ENTRY_BYTES: usize = 16 + 3;
/// Bytes of a block of attributes that hold none: its header and the end of the list.
const ATTRIBUTE_HEAD_BYTES: usize = 36;
/// Attributes up to so many bytes of names and values lie in the inode.
const INODE_ATTRIBUTE_BYTES: usize = 64;

/// Space that contents need in an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Entries of all kinds, further names of a file included.
    pub entries: u64,
    /// Bytes of file data, holes left out.
    pub bytes: u64,
    /// Inodes that they need.
    pub inodes: u64,
    /// Blocks that they need, for each of [`BLOCK_SHIFTS`].
    blocks: [u64; 7],
    /// Values of attributes that need inodes of their own in an image with `ea_inode`, likewise. Equal ones
    /// share one, which is not counted on.
    value_inodes: [u64; 7],
    /// Bytes of directory entries; directory blocks may be half empty.
    name_bytes: u64,
    /// The latest time of a change of content among them.
    pub newest: Option<Timespec>,
    /// A digest of all of them, where [`Rules::digest`] asks for one.
    pub digest: Option<[u8; 16]>,
}

impl Contents {
    /// Measures a directory tree, as [`populate`](crate::populate) would copy it.
    ///
    /// # Errors
    /// [`TreeError::Source`](crate::TreeError::Source) when part of it cannot be read.
    pub fn of_directory(source: &Path, rules: &Rules) -> Result<Contents> {
        let path = source.as_os_str().as_bytes();
        let dir = open_root(source)?;
        let contents = Contents::default();
        let top_bytes = top_bytes(path);
        let digest = rules.digest.then(Digest::default);
        let mut walk = Walk { contents, linked: HashMap::new(), rules, top_bytes, digest };
        let status = read(path, sys::status(dir.as_fd()))?;
        walk.attributes(path, &status, Place::Open(dir.as_fd()))?;
        walk.directory(&dir, path, 0)?;
        walk.contents.entries += 1;
        walk.contents.digest = walk.digest.as_ref().map(Digest::finish);
        Ok(walk.contents)
    }

    /// Reads a tar stream, compressed or not, to its end.
    ///
    /// # Errors
    /// [`TreeError::Tar`](crate::TreeError::Tar) if it cannot be read or is not a tar stream.
    pub fn of_tar(stream: &mut dyn Read, rules: &Rules) -> Result<Contents> {
        let mut count = TarCount::new(rules);
        let counted =
            TarReader::new(stream, false).and_then(|mut reader| count.stream(&mut reader));
        let name = || "the tar stream".to_owned();
        counted.map_err(|source| TreeError::Tar { name: name(), source })?;
        Ok(count.finish())
    }

    /// Reads tar files and standard input to their ends, and leaves them as they were, but for
    /// knowing the excluded members that hard links need. What later ones replace is counted too.
    ///
    /// # Errors
    /// As [`Contents::of_tar`].
    pub fn of_tars(inputs: &mut [TarInput], rules: &Rules) -> Result<Contents> {
        let mut count = TarCount::new(rules);
        for input in inputs.iter_mut() {
            input.measured(|reader| count.stream(reader))?;
        }
        let targets = Arc::new(std::mem::take(&mut count.excluded).into_targets());
        for input in inputs {
            input.excluded_targets = targets.clone();
        }
        Ok(count.finish())
    }

    /// Blocks of `block_size` bytes that they need: data, attributes, directories that may be half
    /// empty.
    pub(crate) fn blocks(&self, block_size: u32) -> u64 {
        let names = self.name_bytes.saturating_mul(2) / u64::from(block_size.max(1));
        self.blocks[shift_index(block_size)] + names
    }

    /// Counts blocks from `offset` on, as long as `len` bytes.
    fn add_blocks(&mut self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        for (blocks, shift) in self.blocks.iter_mut().zip(BLOCK_SHIFTS) {
            let last = offset.saturating_add(len - 1) >> shift;
            *blocks = blocks.saturating_add(last - (offset >> shift) + 1);
        }
    }

    /// Adds what other contents need, without their names.
    fn add(&mut self, other: &Contents) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inodes = self.inodes.saturating_add(other.inodes);
        self.newest = self.newest.max(other.newest);
        for (blocks, more) in self.blocks.iter_mut().zip(other.blocks) {
            *blocks = blocks.saturating_add(more);
        }
        for (inodes, more) in self.value_inodes.iter_mut().zip(other.value_inodes) {
            *inodes = inodes.saturating_add(more);
        }
    }

    /// Inodes that values of attributes need in an image with `ea_inode` and blocks of `block_size`
    /// bytes. Each also takes a block more than values that lie one behind the other.
    pub(crate) fn value_inodes(&self, block_size: u32) -> u64 {
        self.value_inodes[shift_index(block_size)]
    }

    fn add_time(&mut self, time: Timespec) {
        self.newest = self.newest.max(Some(time));
    }

    fn add_data(&mut self, offset: u64, len: u64) {
        self.bytes = self.bytes.saturating_add(len);
        self.add_blocks(offset, len);
    }

    fn add_directory(&mut self) {
        self.inodes += 1;
        self.add_blocks(0, 1);
    }

    fn add_link(&mut self, target: &[u8]) {
        self.inodes += 1;
        if target.len() as u64 >= FAST_LINK_BYTES {
            self.add_blocks(0, target.len() as u64);
        }
    }

    fn add_name(&mut self, name: &[u8]) {
        self.entries += 1;
        self.name_bytes += 8 + (name.len() as u64).next_multiple_of(4);
    }

    fn add_attributes(&mut self, attributes: &[(Vec<u8>, Vec<u8>)]) {
        let bytes: usize = attributes.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes <= INODE_ATTRIBUTE_BYTES {
            return;
        }
        self.add_blocks(0, bytes as u64);
        let entry = |(name, value): &(Vec<u8>, Vec<u8>)| {
            ATTRIBUTE_ENTRY_BYTES + name.len() + value.len().next_multiple_of(4)
        };
        let needed: usize = attributes.iter().map(entry).sum();
        let mut sizes: Vec<usize> = attributes.iter().map(|(_, value)| value.len()).collect();
        sizes.sort_unstable();
        for (inodes, shift) in self.value_inodes.iter_mut().zip(BLOCK_SHIFTS) {
            let mut left = needed;
            let room = (1 << shift) - ATTRIBUTE_HEAD_BYTES;
            // The largest first.
            for size in sizes.iter().rev() {
                if left <= room {
                    break;
                }
                left -= size.next_multiple_of(4);
                *inodes += 1;
            }
        }
    }
}

/// Where counts for blocks of this size are.
fn shift_index(block_size: u32) -> usize {
    let shift = block_size.trailing_zeros().clamp(*BLOCK_SHIFTS.start(), *BLOCK_SHIFTS.end());
    (shift - BLOCK_SHIFTS.start()) as usize
}

/// Directories of tar streams that are remembered, so that they are counted once.
const DIRECTORIES_MAX: usize = 1 << 18;

/// State of measuring tar streams.
struct TarCount<'r> {
    rules: &'r Rules,
    contents: Contents,
    /// Hashes of paths. Two that are the same only make the count too small by one.
    directories: HashSet<u64>,
    digest: Option<Digest>,
    excluded: ExcludedMembers,
    /// Hard links so far.
    hard_links: u64,
    /// Size of the largest file so far.
    largest_bytes: u64,
}

impl<'r> TarCount<'r> {
    fn new(rules: &'r Rules) -> TarCount<'r> {
        TarCount {
            rules,
            contents: Contents::default(),
            directories: HashSet::new(),
            digest: rules.digest.then(Digest::default),
            excluded: ExcludedMembers::default(),
            hard_links: 0,
            largest_bytes: 0,
        }
    }

    fn finish(mut self) -> Contents {
        self.contents.digest = self.digest.as_ref().map(Digest::finish);
        self.contents
    }

    fn stream(&mut self, reader: &mut TarReader<'_>) -> Result<(), TarError> {
        while let Some(entry) = reader.next_entry()? {
            if self.rules.excludes_entry(&entry) {
                self.excluded(&entry, reader)?;
                continue;
            }
            self.entry(&entry);
            self.digest(&entry, reader)?;
            if entry.kind == TarKind::HardLink {
                self.link_to_excluded(&entry.link);
                self.hard_links += 1;
                if self.hard_links.is_multiple_of(u64::from(LINK_COUNT_MAX) - 1) {
                    // Perhaps all of one file, which then needs a copy.
                    self.contents.inodes += 1;
                    self.contents.add_data(0, self.largest_bytes);
                }
            }
            self.largest_bytes = self.largest_bytes.max(entry.size);
        }
        // One stream is not as two.
        if let Some(digest) = &mut self.digest {
            digest.number(u64::MAX);
        }
        Ok(())
    }

    /// Remembers what an excluded member would take, in case that a hard link needs it.
    fn excluded(&mut self, entry: &TarEntry, reader: &mut TarReader<'_>) -> Result<(), TarError> {
        if matches!(entry.kind, TarKind::Directory | TarKind::HardLink | TarKind::Other(_)) {
            return Ok(());
        }
        let mut alone = TarCount::new(self.rules);
        alone.inode(entry);
        alone.digest(entry, reader)?;
        self.excluded.note(plain_name(&entry.path), alone.finish());
        Ok(())
    }

    fn link_to_excluded(&mut self, target: &[u8]) {
        let Some(member) = self.excluded.link_to(target) else { return };
        if let (Some(digest), Some(of_member)) = (&mut self.digest, member.digest) {
            digest.bytes(&of_member);
        }
        self.contents.add(&member);
    }

    fn digest(&mut self, entry: &TarEntry, reader: &mut TarReader<'_>) -> Result<(), TarError> {
        let Some(digest) = &mut self.digest else { return Ok(()) };
        digest.bytes(&entry.path);
        digest.bytes(&entry.link);
        digest.bytes(format!("{:?}", entry.kind).as_bytes());
        let owner = (entry.mode.into(), entry.uid, entry.gid);
        digest.meta(owner, entry.mtime, &entry.xattrs, self.rules);
        let (major, minor) = entry.device;
        for number in [entry.size, major.into(), minor.into(), entry.pieces.len() as u64] {
            digest.number(number);
        }
        for (offset, len) in &entry.pieces {
            digest.number(*offset);
            digest.number(*len);
        }
        let mut buffer = vec![0; COPY_BYTES.min(entry.size as usize)];
        loop {
            match reader.read_data(&mut buffer)? {
                0 => return Ok(()),
                count => digest.data(&buffer[..count]),
            }
        }
    }

    fn entry(&mut self, entry: &TarEntry) {
        let parts = entry.path.split(|byte| *byte == b'/');
        let mut parts = parts.filter(|part| !part.is_empty() && *part != b".").peekable();
        let mut path = DefaultHasher::new();
        // Directories are made on the way, named by an entry or not.
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                self.contents.add_name(part);
                if entry.kind != TarKind::Directory {
                    break;
                }
            }
            path.write(part);
            path.write_u8(b'/');
            if self.directories.len() == DIRECTORIES_MAX {
                // Some are counted again: rather too many than memory without end.
                self.directories.clear();
            }
            if self.directories.insert(path.finish()) {
                self.contents.add_directory();
            }
        }
        self.inode(entry);
    }

    /// What the entry needs besides its name.
    fn inode(&mut self, entry: &TarEntry) {
        let contents = &mut self.contents;
        contents.add_time(entry.mtime);
        match entry.kind {
            TarKind::Directory | TarKind::HardLink | TarKind::Other(_) => {}
            TarKind::Symlink => contents.add_link(&entry.link),
            _ => {
                contents.inodes += 1;
                entry.pieces.iter().for_each(|(offset, len)| contents.add_data(*offset, *len));
            }
        }
        if !self.rules.without_xattrs {
            contents.add_attributes(&entry.xattrs);
        }
    }
}

/// A file with several names.
struct Linked {
    /// Its number in the order of the look.
    number: u64,
    /// Names so far, of it or of the last copy that it needs.
    names: u32,
}

/// State of measuring a directory tree.
struct Walk<'r> {
    contents: Contents,
    /// What has several names, by device and inode.
    linked: HashMap<(u64, u64), Linked>,
    rules: &'r Rules,
    /// Bytes of a path before the part that begins at the top of the tree.
    top_bytes: usize,
    digest: Option<Digest>,
}

impl Walk<'_> {
    fn directory(&mut self, dir: &OwnedFd, path: &[u8], depth: usize) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(TreeError::too_deep(path));
        }
        for name in names(dir, path)? {
            let path = join(path, &name);
            let status = read(&path, sys::status_at(dir.as_fd(), &name))?;
            let is_dir = status.kind() == FileType::Directory;
            if self.rules.exclude.has(&path[self.top_bytes..], is_dir) {
                continue;
            }
            self.contents.add_name(name.to_bytes());
            if let Some(digest) = &mut self.digest {
                digest.bytes(&path[self.top_bytes..]);
            }
            if is_dir {
                let below = open_in(dir, &name, &path, OFlags::DIRECTORY)?;
                self.contents.add_directory();
                self.attributes(&path, &status, Place::Open(below.as_fd()))?;
                self.directory(&below, &path, depth + 1)?;
            } else if let Some(linked) = self.linked.get_mut(&status.key())
                && linked.names < LINK_COUNT_MAX
            {
                linked.names += 1;
                if let Some(digest) = &mut self.digest {
                    digest.number(linked.number);
                }
            } else {
                self.entry(dir, &name, &path, &status)?;
                if status.links > 1 {
                    let linked = Linked { number: self.contents.entries, names: 1 };
                    self.linked.insert(status.key(), linked);
                }
            }
        }
        Ok(())
    }

    /// Anything but a directory.
    fn entry(&mut self, dir: &OwnedFd, name: &CStr, path: &[u8], status: &Status) -> Result<()> {
        match status.kind() {
            FileType::Symlink => {
                let target = read(path, rustix::fs::readlinkat(dir, name, Vec::new()))?;
                self.contents.add_link(target.as_bytes());
                if let Some(digest) = &mut self.digest {
                    digest.bytes(target.as_bytes());
                }
            }
            FileType::RegularFile => {
                self.contents.inodes += 1;
                let file = open_in(dir, name, path, OFlags::NONBLOCK)?;
                self.data(&file, path, status)?;
                return self.attributes(path, status, Place::Open(file.as_fd()));
            }
            _ => self.contents.inodes += 1,
        }
        self.attributes(path, status, Place::At(dir.as_fd(), name))
    }

    fn data(&mut self, file: &OwnedFd, path: &[u8], status: &Status) -> Result<()> {
        let (contents, digest) = (&mut self.contents, &mut self.digest);
        let mut add = |start: u64, end: u64| {
            contents.add_data(start, end - start);
            match digest {
                Some(digest) => digest_data(digest, file, path, start, end),
                None => Ok(()),
            }
        };
        if !status.has_holes() {
            return add(0, status.size);
        }
        for_data(file.as_fd(), status.size, &mut add, |errno| TreeError::Source {
            path: shown(path),
            source: errno.into(),
        })
    }

    fn attributes(&mut self, path: &[u8], status: &Status, place: Place<'_>) -> Result<()> {
        self.contents.add_time(status.mtime);
        // Those that are left out still count for the mode.
        let xattrs = match self.rules.without_xattrs && self.digest.is_none() {
            true => Vec::new(),
            false => read(path, xattrs(place))?,
        };
        if !self.rules.without_xattrs {
            self.contents.add_attributes(&xattrs);
        }
        if let Some(digest) = &mut self.digest {
            // The size of a directory is its file system's affair.
            if status.kind() != FileType::Directory {
                digest.number(status.size);
            }
            digest.number(status.rdev);
            let owner = (status.mode, status.uid, status.gid);
            digest.meta(owner, status.mtime, &xattrs, self.rules);
        }
        Ok(())
    }
}

/// Feeds a range of a file's data.
fn digest_data(
    digest: &mut Digest,
    file: &OwnedFd,
    path: &[u8],
    start: u64,
    end: u64,
) -> Result<()> {
    digest.number(start);
    digest.number(end);
    let mut buffer = vec![0; COPY_BYTES.min((end - start) as usize)];
    let mut at = start;
    while at < end {
        let want = (end - at).min(buffer.len() as u64) as usize;
        let count = read(path, rustix::io::pread(file, &mut buffer[..want], at))?;
        if count == 0 {
            break;
        }
        digest.data(&buffer[..count]);
        at += count as u64;
    }
    Ok(())
}
