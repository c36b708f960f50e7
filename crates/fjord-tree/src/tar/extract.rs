//! Copies entries of tar streams into an image, in the order of the streams.
//!
//! Owns the replacement of earlier entries of the same name. Invariant: a later entry replaces an
//! earlier one as a whole, attributes included, except that a directory keeps its entries; in a
//! plain stream, a replacement that loses entries is listed.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::sync::Arc;

use fjord::{InodeNo, InodeRef, Timespec};
use fjord_format::inode::{DeviceNumber, S_IFBLK, S_IFCHR, S_IFIFO};
use rustix::io::Errno;

use super::error::{EntryError, short};
use super::excluded::plain_name;
use super::input::{TarInput, TarOptions};
use super::place::{Place, Places, parts};
use super::stream::{TarEntry, TarKind, TarReader};
use crate::builder::{Builder, COPY_BYTES, Meta, New, Spot, shown};
use crate::error::{Result, TreeError};
use crate::marks::Marks;

/// Prefix of names that remove a name of lower layers.
const WHITEOUT: &[u8] = b".wh.";
/// Removes all that lower layers have in the directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of what AUFS keeps for itself.
const AUFS: &[u8] = b".wh..wh.";
/// Largest parts of a device number that ext4 holds.
const MAJOR_MAX: u32 = 0xfff;
const MINOR_MAX: u32 = 0xf_ffff;

/// Copies all entries of a stream, compressed or not, into the image.
pub(crate) fn from_stream(builder: &mut Builder<'_>, stream: &mut dyn Read) -> Result<()> {
    let name = "the tar stream";
    let reader = TarReader::new(stream, TarOptions::default().ask_host);
    let reader = reader.map_err(|source| TreeError::Tar { name: name.to_owned(), source })?;
    Extractor::new(builder, false)?.stream(name, reader)
}

/// Copies all entries of these streams into the image, one stream after the other.
pub(crate) fn from_inputs(
    builder: &mut Builder<'_>,
    inputs: &[TarInput],
    options: &TarOptions,
) -> Result<()> {
    let mut extractor = Extractor::new(builder, options.layers)?;
    if let Some(first) = inputs.first() {
        extractor.excluded_targets = first.excluded_targets.clone();
    }
    for input in inputs {
        let name = input.name();
        let reader = input.reader(options.ask_host);
        let reader = reader.map_err(|source| TreeError::Tar { name: name.to_owned(), source })?;
        extractor.stream(name, reader)?;
    }
    Ok(())
}

/// An excluded member that a hard link needs.
enum Held {
    /// Its file, without a name as long as no link has given one.
    Inode(InodeRef),
    /// Anything without data.
    Entry(Box<TarEntry>),
}

struct Extractor<'b, 'a> {
    places: Places<'b, 'a>,
    buffer: Vec<u8>,
    /// Names of excluded members that hard links need.
    excluded_targets: Arc<HashSet<Vec<u8>>>,
    /// Those of them that were there, by name.
    held: HashMap<Vec<u8>, Held>,
    /// Files that have as many names as they can, and the copy that gets the next ones.
    copies: HashMap<InodeNo, InodeNo>,
}

impl<'b, 'a> Extractor<'b, 'a> {
    fn new(builder: &'b mut Builder<'a>, layers: bool) -> Result<Extractor<'b, 'a>> {
        Ok(Extractor {
            places: Places::new(builder, layers)?,
            buffer: vec![0; COPY_BYTES],
            excluded_targets: Arc::default(),
            held: HashMap::new(),
            copies: HashMap::new(),
        })
    }

    fn stream(&mut self, name: &str, mut reader: TarReader<'_>) -> Result<()> {
        self.places.begin(name);
        while let Some(entry) = reader.next_entry().map_err(|source| self.places.tar(source))? {
            match self.places.builder.rules.excludes_entry(&entry) {
                true => self.hold(entry, &mut reader)?,
                false => self.entry(entry, &mut reader)?,
            }
        }
        Ok(())
    }

    fn entry(&mut self, mut entry: TarEntry, reader: &mut TarReader<'_>) -> Result<()> {
        let path = std::mem::take(&mut entry.path);
        let path = &path[..];
        if let TarKind::Other(kind) = entry.kind {
            self.other(kind, path);
            return Ok(());
        }
        let parts = parts(path).map_err(|reason| self.places.refuse(path, reason))?;
        if self.places.layers() && self.whiteout(&parts, path)? {
            return Ok(());
        }
        if entry.kind != TarKind::HardLink {
            // Another name of a file says nothing new of it.
            self.leave_out(&mut entry, path);
        }
        let Some((name, way)) = parts.split_last() else {
            if entry.kind != TarKind::Directory {
                return Err(self.places.refuse(path, EntryError::NoName));
            }
            let top = self.places.builder.at(path, self.places.builder.fs.root())?;
            return self.places.builder.finish_entry(&top, path, meta(entry));
        };
        let parent = self.places.make_parent(way, path, entry.mtime)?;
        let place = Place { parent, name, path };
        self.places.mark(place.parent.ino(), name);
        match entry.kind {
            TarKind::Directory => {
                let inode = self.places.directory(&place)?;
                self.places.builder.finish_entry(&inode, path, meta(entry))
            }
            TarKind::HardLink => self.hard_link(&entry.link, &place),
            _ => {
                let inode = self.make(&entry, &place)?;
                if entry.kind == TarKind::File {
                    self.copy_data(&entry, reader, &inode, path)?;
                }
                self.places.builder.finish_entry(&inode, path, meta(entry))
            }
        }
    }

    /// Lists an entry that makes no file.
    fn other(&mut self, kind: u8, path: &[u8]) {
        let what = match kind {
            b'A' => "an access list of Solaris",
            b'E' => "extended attributes of Solaris",
            b'I' => "attributes of an inode without its content",
            b'M' => "the rest of a file from another volume; join the volumes first",
            b'N' => "long names of an old GNU tar",
            // A volume label is nothing that files lose.
            _ => {
                let kind = char::from(kind);
                self.places.builder.skip(format!("{}: entry of type {kind:?}", shown(path)));
                return;
            }
        };
        let kind = char::from(kind);
        self.places.builder.not_kept(format!("{}: entry of type {kind:?}: {what}", shown(path)));
    }

    /// Takes out what the image cannot hold, and lists it.
    fn leave_out(&mut self, entry: &mut TarEntry, path: &[u8]) {
        let has_user = matches!(entry.kind, TarKind::File | TarKind::Directory);
        let has_default = entry.kind == TarKind::Directory;
        let mut left_out = std::mem::take(&mut entry.unkept);
        entry.xattrs.retain(|(name, _)| {
            let fits = match &name[..] {
                b"system.posix_acl_default" => has_default,
                b"system.posix_acl_access" => entry.kind != TarKind::Symlink,
                // As in Linux: others have no owner who may set them.
                name => has_user || !name.starts_with(b"user."),
            };
            if !fits {
                left_out.push(format!("attribute {}: not for this type of file", shown(name)));
            }
            fits
        });
        for what in left_out {
            self.places.builder.not_kept(format!("{}: {what}", shown(path)));
        }
        for what in &entry.ignored {
            self.places.builder.skip(format!("{}: {what}", shown(path)));
        }
    }

    /// Does what a whiteout says; false when the entry is none.
    fn whiteout(&mut self, parts: &[&[u8]], path: &[u8]) -> Result<bool> {
        let Some((name, way)) = parts.split_last() else { return Ok(false) };
        if *name != OPAQUE && parts.iter().any(|part| part.starts_with(AUFS)) {
            return Ok(true);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(false) };
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(self.places.refuse(path, EntryError::Whiteout));
        }
        let Some(parent) = self.places.find_parent(way, path)? else { return Ok(true) };
        if *name == OPAQUE {
            self.places.hide_entries(parent, path)?;
        } else {
            self.places.hide(&Place { parent, name: hidden, path })?;
        }
        Ok(true)
    }

    fn make(&mut self, entry: &TarEntry, place: &Place<'_>) -> Result<InodeRef> {
        let refuse = |reason| Err(self.places.refuse(place.path, reason));
        let (major, minor) = entry.device;
        match entry.kind {
            TarKind::Symlink if entry.link.is_empty() => return refuse(EntryError::NoTarget),
            TarKind::Symlink if entry.link.contains(&0) => return refuse(EntryError::ZeroByte),
            _ if major > MAJOR_MAX || minor > MINOR_MAX => {
                return refuse(EntryError::Device(major, minor));
            }
            _ => {}
        }
        let device = DeviceNumber { major, minor };
        let new = match entry.kind {
            TarKind::Symlink => New::Symlink(&entry.link),
            TarKind::CharDevice => New::Node { mode: S_IFCHR | 0o600, device },
            TarKind::BlockDevice => New::Node { mode: S_IFBLK | 0o600, device },
            TarKind::Fifo => New::Node { mode: S_IFIFO | 0o600, device },
            _ => New::File,
        };
        let mut made = new.make(&place.parent, place.name, &self.places.builder.cred);
        if made.as_ref().is_err_and(|error| error.is(Errno::EXIST)) {
            self.places.clear(place)?;
            made = new.make(&place.parent, place.name, &self.places.builder.cred);
        }
        self.places.builder.at(place.path, made)
    }

    /// Keeps an excluded member if a hard link needs it.
    fn hold(&mut self, mut entry: TarEntry, reader: &mut TarReader<'_>) -> Result<()> {
        let name = plain_name(&entry.path);
        let held = match entry.kind {
            _ if !self.excluded_targets.contains(&name) => return Ok(()),
            TarKind::Directory | TarKind::HardLink | TarKind::Other(_) => return Ok(()),
            TarKind::File => {
                let path = std::mem::take(&mut entry.path);
                self.leave_out(&mut entry, &path);
                let builder = &mut *self.places.builder;
                let root = builder.at(&path, builder.fs.root())?;
                let inode = builder.at(&path, root.tmpfile(0o600, &builder.cred))?;
                self.copy_data(&entry, reader, &inode, &path)?;
                self.places.builder.apply(&inode, &path, &meta(entry))?;
                Held::Inode(inode)
            }
            _ => Held::Entry(Box::new(entry)),
        };
        self.held.insert(name, held);
        Ok(())
    }

    /// A hard link whose target is not in the image: in its place goes what was excluded.
    fn link_to_excluded(&mut self, link: &[u8], place: &Place<'_>) -> Result<()> {
        let (path, name) = (place.path, plain_name(link));
        let inode = match self.held.remove(&name) {
            Some(Held::Inode(inode)) => {
                self.link_to(&inode, link, place)?;
                inode
            }
            Some(Held::Entry(mut entry)) => {
                self.leave_out(&mut entry, path);
                let inode = self.make(&entry, place)?;
                self.places.builder.finish_entry(&inode, path, meta(*entry))?;
                inode
            }
            None if self.places.builder.rules.exclude.has_any_part(&name, false) => {
                return Err(self.places.refuse(path, EntryError::ExcludedTarget(short(link))));
            }
            None => return Err(self.places.refuse(path, EntryError::MissingTarget(short(link)))),
        };
        self.held.insert(name, Held::Inode(inode));
        Ok(())
    }

    fn hard_link(&mut self, link: &[u8], place: &Place<'_>) -> Result<()> {
        let path = place.path;
        let parts = parts(link).map_err(|reason| self.places.refuse(path, reason))?;
        let Some((target_name, way)) = parts.split_last() else {
            return Err(self.places.refuse(path, EntryError::NoTarget));
        };
        let Some(target_parent) = self.places.find_parent(way, path)? else {
            return self.link_to_excluded(link, place);
        };
        if self.places.layers() && target_name.starts_with(WHITEOUT) {
            let what = format!("{}: a hard link to the whiteout {}", shown(path), short(link));
            self.places.builder.not_kept(what);
            return Ok(());
        }
        let target = match target_parent.lookup(target_name) {
            Err(error) if error.is(Errno::NOENT) => return self.link_to_excluded(link, place),
            result => self.places.builder.at(path, result)?,
        };
        if target.attr().kind() == fjord::FileKind::Directory {
            return Err(self.places.refuse(path, EntryError::LinkToDirectory(short(link))));
        }
        self.link_to(&target, link, place)
    }

    /// Gives `target` one more name, in place of what has it; or its newest copy, where it has as many as it
    /// can.
    fn link_to(&mut self, target: &InodeRef, link: &[u8], place: &Place<'_>) -> Result<()> {
        let path = place.path;
        let newest = self.copies.get(&target.ino());
        let newest = newest.map(|ino| self.places.builder.fs.inode(*ino, None)).transpose();
        let newest = self.places.builder.at(path, newest)?;
        let file = newest.as_ref().unwrap_or(target);
        let mut linked = place.parent.link(file, place.name);
        if linked.as_ref().is_err_and(|error| error.is(Errno::EXIST)) {
            let there = self.places.builder.at(path, place.parent.lookup(place.name))?.ino();
            if there == target.ino() || there == file.ino() {
                self.places.builder.count_entry();
                return Ok(());
            }
            self.places.clear(place)?;
            linked = place.parent.link(file, place.name);
        }
        match linked {
            Err(error) if error.is(Errno::MLINK) => {
                self.places.builder.tell_copy(path);
                let spot = Spot { parent: &place.parent, name: place.name, path };
                let copy = self.places.builder.copy_of(file, spot, &mut self.buffer)?;
                self.copies.insert(target.ino(), copy.ino());
            }
            // It was in the directory that the link has replaced.
            Err(error) if error.is(Errno::NOENT) => {
                return Err(self.places.refuse(path, EntryError::MissingTarget(short(link))));
            }
            result => self.places.builder.at(path, result)?,
        }
        self.places.builder.count_entry();
        Ok(())
    }

    fn copy_data(
        &mut self,
        entry: &TarEntry,
        reader: &mut TarReader<'_>,
        inode: &InodeRef,
        path: &[u8],
    ) -> Result<()> {
        for (offset, len) in &entry.pieces {
            let mut done = 0;
            while done < *len {
                let want = (len - done).min(self.buffer.len() as u64) as usize;
                let read = reader.read_data(&mut self.buffer[..want]);
                let count = read.map_err(|source| self.places.tar(source))?;
                if count == 0 {
                    break;
                }
                let data = &self.buffer[..count];
                self.places.builder.write(inode, path, offset + done, data)?;
                done += count as u64;
            }
        }
        self.places.builder.set_size(inode, path, entry.size)
    }
}

fn meta(entry: TarEntry) -> Meta {
    let atime: Timespec = entry.atime.unwrap_or(entry.mtime);
    Meta {
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        atime,
        mtime: entry.mtime,
        xattrs: entry.xattrs,
        marks: Marks::default(),
    }
}
