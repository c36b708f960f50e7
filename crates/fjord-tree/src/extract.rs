//! Entries of an image on their way to the host: content, holes, links, devices, owners, modes,
//! times and attributes, as `cp -a` keeps them.
//!
//! Invariants: a copy never leaves the directory that it goes to, whatever names and links the
//! image has; losses are listed, and never grant additional permissions.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use fjord::{Error, FileKind, InodeNo, InodeRef};
use fjord_format::inode::DeviceNumber;
use rustix::io::Errno;

use crate::builder::{COPY_BYTES, shown};
use crate::error::{Result, TreeError, list, list_or_end};
use crate::host::DEPTH_MAX;
use crate::host::sys::{self, Place};
use crate::host::write::{Attributes, Setter, Spot, failed, open_dir};

/// Options of copying out of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtractRules {
    /// Keep owners and groups, which needs root; else files belong to the caller.
    pub owners: bool,
}

/// Progress of the copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extracted {
    /// Entries of all kinds.
    pub entries: u64,
    /// Bytes of file data, holes left out.
    pub bytes: u64,
    /// Losses by path, with reasons.
    pub unkept: Vec<String>,
    /// Entries that could not be copied, with reasons.
    pub failed: Vec<String>,
    /// Entries that could not be read, because the image is damaged there.
    pub damaged: Vec<String>,
    /// Whether damage is the reason for some of `unkept`.
    pub unkept_by_damage: bool,
}

/// Copies a file, or a directory with all that is in it, to the path `target`, which the caller of
/// the program named: symbolic links there are followed. What is there already is replaced,
/// directories are merged. An entry that cannot be written is listed, and the others are copied,
/// unless they would fail too. `progress` is called after each entry and each piece of data.
///
/// # Errors
/// [`TreeError::Engine`] when the image cannot be read, [`TreeError::Target`] when the copy cannot be
/// written, [`TreeError::InTheWay`]. Below a directory, damage is listed, and the others are copied.
pub fn extract(
    file: &InodeRef,
    target: &Path,
    rules: &ExtractRules,
    progress: &mut dyn FnMut(&Extracted),
) -> Result<Extracted> {
    let mut out = Extraction::new(rules, progress);
    let kind = file.attr().kind();
    let there = std::fs::metadata(target).ok();
    if kind == FileKind::Directory && there.as_ref().is_some_and(std::fs::Metadata::is_dir) {
        let dir = open_dir(target)?;
        out.directory(file, &dir, target, 0)?;
        return Ok(out.done);
    }
    if kind == FileKind::Regular && there.is_some_and(|there| !there.is_file() && !there.is_dir()) {
        // A device or a pipe takes the data.
        let opened = std::fs::File::options().write(true).open(target);
        let mut opened = opened.map_err(|source| target_failed(target, source))?;
        out.stream(file, &mut opened, target)?;
        return Ok(out.done);
    }
    // A link that leads to a file is followed, as cp(1) does.
    let followed = (kind == FileKind::Regular).then(|| std::fs::canonicalize(target).ok());
    let target = followed.flatten().unwrap_or_else(|| target.to_owned());
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty());
    let dir = open_dir(parent.unwrap_or(Path::new(".")))?;
    let name = target.file_name().unwrap_or_default().as_bytes();
    out.entry(file, &dir, name, &target, 0)?;
    Ok(out.done)
}

/// As [`extract`], to `name` in the directory `dir`. Only links in the path `dir` are followed: what
/// has the name may come from an earlier copy, so a link or a device there is not written through.
///
/// # Errors
/// As [`extract`].
pub fn extract_into(
    file: &InodeRef,
    dir: &Path,
    name: &[u8],
    rules: &ExtractRules,
    progress: &mut dyn FnMut(&Extracted),
) -> Result<Extracted> {
    let mut out = Extraction::new(rules, progress);
    let target = dir.join(OsStr::from_bytes(name));
    out.entry(file, &open_dir(dir)?, name, &target, 0)?;
    Ok(out.done)
}

/// Writes the content of a regular file to a stream, holes as zeroes.
///
/// # Errors
/// As [`extract`]; [`TreeError::Usage`] for what is no regular file.
pub fn extract_to_stream(
    file: &InodeRef,
    stream: &mut dyn Write,
    progress: &mut dyn FnMut(&Extracted),
) -> Result<Extracted> {
    if file.attr().kind() != FileKind::Regular {
        let message = "only the content of a regular file can go to standard output";
        return Err(TreeError::Usage(message.to_owned()));
    }
    let rules = ExtractRules::default();
    let mut out = Extraction::new(&rules, progress);
    out.stream(file, stream, Path::new("standard output"))?;
    Ok(out.done)
}

struct Extraction<'e> {
    rules: &'e ExtractRules,
    done: Extracted,
    /// Where the first name went of what has several.
    linked: HashMap<InodeNo, PathBuf>,
    buffer: Vec<u8>,
    progress: &'e mut dyn FnMut(&Extracted),
}

fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "a file",
        FileKind::Directory => "a directory",
        FileKind::Symlink => "a symbolic link",
        FileKind::CharDevice | FileKind::BlockDevice => "a device",
        FileKind::Fifo => "a pipe",
        FileKind::Socket => "a socket",
    }
}

fn target_failed(path: &Path, source: std::io::Error) -> TreeError {
    TreeError::Target { path: path.display().to_string(), source }
}

fn at<T>(path: &Path, result: fjord::Result<T>) -> Result<T> {
    result.map_err(|source| TreeError::Engine { path: path.display().to_string(), source })
}

/// A name of the image as one that cannot lead elsewhere on the host.
fn checked_name(name: &[u8], path: &Path) -> Result<CString> {
    let is_safe = !name.is_empty() && name != b"." && name != b".." && !name.contains(&b'/');
    match CString::new(name) {
        Ok(name) if is_safe => Ok(name),
        _ => Err(TreeError::Usage(format!(
            "{}: the image has an entry named {:?}, which is not a valid name; run e2fsck -f",
            path.display(),
            shown(name)
        ))),
    }
}

/// The names in a directory of the image but `.` and `..`, sorted: those that can be read, and the error that others
/// cannot.
pub fn readable_names(dir: &InodeRef) -> (Vec<Vec<u8>>, fjord::Result<()>) {
    let mut names = Vec::new();
    let read = dir.read_dir(0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push(entry.name.to_vec());
        }
        true
    });
    names.sort();
    (names, read)
}

impl<'e> Extraction<'e> {
    fn new(rules: &'e ExtractRules, progress: &'e mut dyn FnMut(&Extracted)) -> Extraction<'e> {
        let buffer = vec![0; COPY_BYTES];
        Extraction { rules, done: Extracted::default(), linked: HashMap::new(), buffer, progress }
    }

    fn count(&mut self) {
        self.done.entries += 1;
        (self.progress)(&self.done);
    }

    fn entry(
        &mut self,
        file: &InodeRef,
        dir: &OwnedFd,
        name: &[u8],
        path: &Path,
        depth: usize,
    ) -> Result<()> {
        let name = checked_name(name, path)?;
        let spot = Spot { dir, name: &name, path };
        let attr = file.attr();
        if attr.kind() == FileKind::Directory {
            let opened = spot.directory()?;
            return self.directory(file, &opened, path, depth);
        }
        if let Some(first) = self.linked.get(&file.ino()) {
            spot.link(first)?;
            self.count();
            return Ok(());
        }
        let made = match attr.kind() {
            FileKind::Regular => self.file(file, spot),
            FileKind::Symlink => self.symlink(file, spot),
            _ => self.node(file, spot),
        };
        match made {
            // Without privilege, or on a file system that has no such thing.
            Err(TreeError::Target { path, source })
                if source.raw_os_error() == Some(libc::EPERM) =>
            {
                let kind = kind_name(attr.kind());
                self.done.unkept.push(format!("{path}: {kind} skipped: {source}"));
                return Ok(());
            }
            made => made?,
        }
        if attr.nlink > 1 {
            self.linked.insert(file.ino(), path.to_owned());
        }
        self.count();
        Ok(())
    }

    /// Copies what is in a directory to an open one, and then its attributes.
    fn directory(
        &mut self,
        from: &InodeRef,
        to: &OwnedFd,
        path: &Path,
        depth: usize,
    ) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(TreeError::too_deep(path.as_os_str().as_bytes()));
        }
        let filled = self.fill(from, to, path, depth);
        // Also of one that is not complete: nobody may enter it yet.
        let wanted = self.attributes(from, path);
        self.set(Place::Open(to.as_fd()), path, &wanted);
        self.count();
        filled
    }

    /// Copies what is in a directory. Entries that fail on their own do not stop the others.
    fn fill(&mut self, from: &InodeRef, to: &OwnedFd, path: &Path, depth: usize) -> Result<()> {
        let (names, read) = readable_names(from);
        for name in names {
            let path = path.join(OsStr::from_bytes(&name));
            let copied = at(&path, from.lookup(&name))
                .and_then(|file| self.entry(&file, to, &name, &path, depth + 1));
            copied.or_else(|error| self.go_on(error))?;
        }
        at(path, read).or_else(|error| self.go_on(error))
    }

    /// Lists an error that concerns one entry; also damage, beside which the rest can be read.
    fn go_on(&mut self, error: TreeError) -> Result<()> {
        if let TreeError::Engine { source: Error::Corrupt { .. } | Error::Io(_), .. } = &error {
            list(&mut self.done.damaged, error.to_string());
            return Ok(());
        }
        list_or_end(error, &mut self.done.unkept, &mut self.done.failed)
    }

    fn file(&mut self, file: &InodeRef, spot: Spot<'_>) -> Result<()> {
        let wanted = self.attributes(file, spot.path);
        spot.place_file(&mut |made| {
            self.data(file, made, spot.path)?;
            self.set(Place::Open(made.as_fd()), spot.path, &wanted);
            Ok(())
        })
    }

    fn symlink(&mut self, file: &InodeRef, spot: Spot<'_>) -> Result<()> {
        let wanted = self.attributes(file, spot.path);
        let target = CString::new(at(spot.path, file.read_link())?);
        let target = failed(spot.path, target.map_err(|_| Errno::INVAL))?;
        let dir = spot.dir.as_fd();
        spot.place(&|name| sys::make_symlink(dir, name, &target), &mut |(), name: &CStr| {
            self.set(Place::At(dir, name), spot.path, &wanted);
            Ok(())
        })
    }

    /// A device, pipe or socket.
    fn node(&mut self, file: &InodeRef, spot: Spot<'_>) -> Result<()> {
        let wanted = self.attributes(file, spot.path);
        let DeviceNumber { major, minor } = DeviceNumber::from_u32(wanted.attr.rdev);
        let device = rustix::fs::makedev(major, minor);
        // Its own permissions come when it has its owner.
        let mode = u32::from(wanted.attr.mode) & !0o7777 | 0o600;
        let dir = spot.dir.as_fd();
        spot.place(&|name| sys::make_node(dir, name, mode, device), &mut |(), name: &CStr| {
            self.set(Place::At(dir, name), spot.path, &wanted);
            Ok(())
        })
    }

    /// What cannot be read of them is listed: the rest of the entry is worth a copy.
    fn attributes(&mut self, file: &InodeRef, path: &Path) -> Attributes {
        let mut xattrs = Vec::new();
        let names = file.list_xattr().unwrap_or_else(|error| {
            self.lose(path, "extended attributes", &error);
            Vec::new()
        });
        for name in names {
            match file.get_xattr(&name) {
                Ok(value) => xattrs.push((name, value)),
                Err(error) => self.lose(path, &format!("attribute {}", shown(&name)), &error),
            }
        }
        Attributes { attr: file.attr(), xattrs, owners: self.rules.owners }
    }

    fn lose(&mut self, path: &Path, what: &str, error: &Error) {
        self.done.unkept_by_damage |= matches!(error, Error::Corrupt { .. } | Error::Io(_));
        list(&mut self.done.unkept, format!("{}: {what}: {error}", path.display()));
    }

    fn set(&mut self, place: Place<'_>, path: &Path, wanted: &Attributes) {
        let unkept = &mut self.done.unkept;
        Setter { place, path, unkept }.set_all(wanted);
    }

    /// Copies the data of a file, leaving out its holes.
    fn data(&mut self, file: &InodeRef, to: &OwnedFd, path: &Path) -> Result<()> {
        let size = file.attr().size;
        let mut offset = 0;
        while offset < size {
            let start = match file.seek_data(offset) {
                Err(error) if error.is(Errno::NXIO) => break,
                found => at(path, found)?,
            };
            let end = at(path, file.seek_hole(start))?.min(size);
            offset = start;
            while offset < end {
                let want = (end - offset).min(self.buffer.len() as u64) as usize;
                let count = at(path, file.read(offset, &mut self.buffer[..want]))?;
                if count == 0 {
                    break;
                }
                failed(path, write_all_at(to, &self.buffer[..count], offset))?;
                offset += count as u64;
                self.count_bytes(count);
            }
            offset = offset.max(end);
        }
        failed(path, rustix::fs::ftruncate(to, size))
    }

    fn stream(&mut self, file: &InodeRef, to: &mut dyn Write, path: &Path) -> Result<()> {
        let mut offset = 0;
        loop {
            let count = at(path, file.read(offset, &mut self.buffer))?;
            if count == 0 {
                break;
            }
            let written = to.write_all(&self.buffer[..count]);
            written.map_err(|source| target_failed(path, source))?;
            offset += count as u64;
            self.count_bytes(count);
        }
        to.flush().map_err(|source| target_failed(path, source))?;
        self.count();
        Ok(())
    }

    fn count_bytes(&mut self, count: usize) {
        self.done.bytes += count as u64;
        (self.progress)(&self.done);
    }
}

fn write_all_at(to: &OwnedFd, data: &[u8], offset: u64) -> rustix::io::Result<()> {
    let mut done = 0;
    while done < data.len() {
        match rustix::io::pwrite(to, &data[done..], offset + done as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
