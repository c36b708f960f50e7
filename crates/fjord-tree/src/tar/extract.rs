//! Contents from a tar stream, in the order of the stream.
//!
//! Invariant: nothing leaves the image: `..` in a name is refused, and links on the way to an
//! entry are resolved inside the image.

use std::io::Read;

use fjord::{FileKind, InodeRef, Timespec};
use fjord_format::inode::{DeviceNumber, S_IFBLK, S_IFCHR, S_IFIFO};
use rustix::io::Errno;

use crate::builder::{Builder, COPY_BYTES, Meta, shown};
use crate::error::{Result, TreeError};
use crate::tar::stream::{TarEntry, TarKind, TarReader};

/// Copies all entries of the stream into the image.
pub(crate) fn from_tar(builder: &mut Builder<'_>, stream: &mut dyn Read) -> Result<()> {
    let mut extractor = Extractor { builder, parent: None, buffer: vec![0; COPY_BYTES] };
    let mut reader = TarReader::new(stream);
    while let Some(entry) = reader.next_entry()? {
        if extractor.builder.rules.excludes_entry(&entry) {
            continue;
        }
        extractor.entry(&entry, &mut reader)?;
    }
    Ok(())
}

struct Extractor<'b, 'a> {
    builder: &'b mut Builder<'a>,
    /// The directory of the entry before, which is mostly that of the next one too.
    parent: Option<(Vec<u8>, InodeRef)>,
    buffer: Vec<u8>,
}

/// The parts of a name, `.` and slashes left out.
fn parts(path: &[u8]) -> Result<Vec<&[u8]>> {
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(TreeError::Usage(format!(
            "the tar stream has an entry {:?}; names with '..' are refused",
            shown(path)
        )));
    }
    Ok(parts)
}

impl Extractor<'_, '_> {
    fn entry(&mut self, entry: &TarEntry, reader: &mut TarReader<&mut dyn Read>) -> Result<()> {
        let path = &entry.path;
        for record in &entry.ignored {
            self.builder.done.skipped.push(format!("{}: {record}", shown(path)));
        }
        if let TarKind::Other(kind) = entry.kind {
            let kind = char::from(kind);
            self.builder.done.skipped.push(format!("{}: entry of type {kind:?}", shown(path)));
            return Ok(());
        }
        let parts = parts(path)?;
        let Some((name, way)) = parts.split_last() else {
            if entry.kind != TarKind::Directory {
                return Err(TreeError::Usage("the tar stream has an entry without a name".into()));
            }
            let root = self.builder.at(path, self.builder.fs.root())?;
            return self.builder.finish_entry(&root, path, meta(entry));
        };
        let parent = self.parent(way)?;
        if entry.kind == TarKind::Directory {
            // A directory that replaces something may be what the parent was found by.
            self.parent = None;
            let inode = self.builder.directory(&parent, name, path)?;
            return self.builder.finish_entry(&inode, path, meta(entry));
        }
        if entry.kind == TarKind::HardLink {
            return self.hard_link(entry, &parent, name);
        }
        let inode = self.make(entry, &parent, name)?;
        if entry.kind == TarKind::File {
            self.copy_data(entry, reader, &inode)?;
        }
        self.builder.finish_entry(&inode, path, meta(entry))
    }

    fn make(&mut self, entry: &TarEntry, parent: &InodeRef, name: &[u8]) -> Result<InodeRef> {
        let device = DeviceNumber { major: entry.device.0, minor: entry.device.1 }.to_u32();
        let cred = self.builder.cred.clone();
        let make = || match entry.kind {
            TarKind::Symlink => parent.symlink(name, &entry.link, &cred),
            TarKind::CharDevice => parent.mknod(name, S_IFCHR | 0o600, device, &cred),
            TarKind::BlockDevice => parent.mknod(name, S_IFBLK | 0o600, device, &cred),
            TarKind::Fifo => parent.mknod(name, S_IFIFO | 0o600, 0, &cred),
            _ => parent.create(name, 0o600, &cred),
        };
        match make() {
            // A later entry of a name takes the place of the earlier one.
            Err(error) if error.is(Errno::EXIST) => {
                self.remove(parent, name, &entry.path)?;
                self.builder.at(&entry.path, make())
            }
            result => self.builder.at(&entry.path, result),
        }
    }

    fn remove(&mut self, parent: &InodeRef, name: &[u8], path: &[u8]) -> Result<()> {
        self.parent = None;
        let there = self.builder.at(path, parent.lookup(name))?;
        let is_dir = there.attr().kind() == FileKind::Directory;
        drop(there);
        let removed = if is_dir { parent.rmdir(name) } else { parent.unlink(name) };
        self.builder.at(path, removed)
    }

    fn hard_link(&mut self, entry: &TarEntry, parent: &InodeRef, name: &[u8]) -> Result<()> {
        let link = parts(&entry.link)?;
        let Some((target_name, way)) = link.split_last() else {
            return Err(TreeError::Usage(format!("{}: a link to nothing", shown(&entry.path))));
        };
        let target_parent = self.parent(way)?;
        let target = self.builder.at(&entry.link, target_parent.lookup(target_name))?;
        match parent.link(&target, name) {
            Err(error) if error.is(Errno::EXIST) => {
                let there = self.builder.at(&entry.path, parent.lookup(name))?;
                if there.ino() != target.ino() {
                    drop(there);
                    self.remove(parent, name, &entry.path)?;
                    self.builder.at(&entry.path, parent.link(&target, name))?;
                }
            }
            result => self.builder.at(&entry.path, result)?,
        }
        self.builder.count_entry();
        Ok(())
    }

    fn copy_data(
        &mut self,
        entry: &TarEntry,
        reader: &mut TarReader<&mut dyn Read>,
        inode: &InodeRef,
    ) -> Result<()> {
        for (offset, len) in &entry.pieces {
            let mut done = 0;
            while done < *len {
                let want = (len - done).min(self.buffer.len() as u64) as usize;
                let count = reader.read_data(&mut self.buffer[..want])?;
                if count == 0 {
                    break;
                }
                let data = &self.buffer[..count];
                self.builder.write(inode, &entry.path, offset + done, data)?;
                done += count as u64;
            }
        }
        self.builder.set_size(inode, &entry.path, entry.size)
    }

    /// The directory that these parts lead to, made where the stream has not named it.
    fn parent(&mut self, way: &[&[u8]]) -> Result<InodeRef> {
        let path = way.join(&b'/');
        if let Some((known, inode)) = &self.parent
            && *known == path
        {
            return Ok(inode.clone());
        }
        let resolved = {
            use std::os::unix::ffi::OsStrExt;
            let absolute = [b"/", &path[..]].concat();
            self.builder.fs.resolve(std::ffi::OsStr::from_bytes(&absolute))
        };
        let inode = match resolved {
            Err(error) if error.is(Errno::NOENT) => match way.split_last() {
                Some((name, above)) => {
                    let above = self.parent(above)?;
                    self.builder.directory(&above, name, &path)?
                }
                None => self.builder.at(&path, Err(error))?,
            },
            result => self.builder.at(&path, result)?,
        };
        self.parent = Some((path, inode.clone()));
        Ok(inode)
    }
}

fn meta(entry: &TarEntry) -> Meta {
    let atime: Timespec = entry.atime.unwrap_or(entry.mtime);
    Meta {
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        atime,
        mtime: entry.mtime,
        xattrs: entry.xattrs.clone(),
    }
}
