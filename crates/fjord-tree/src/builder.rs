//! Fills a new image: what a directory tree and a tar stream have in common.
//!
//! Invariant: attributes of a directory are set after all else, since new entries change its
//! times and would inherit its default access lists.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use fjord::{Cred, Fs, InodeNo, InodeRef, MountOptions, SetAttr, SetTime, Timespec, XattrFlags};
use fjord_block::Device;
use rustix::io::Errno;

use crate::error::{Result, TreeError};

/// Bytes read from the source at once.
pub(crate) const COPY_BYTES: usize = 1 << 20;

/// What went into the image so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    /// Entries of all kinds.
    pub entries: u64,
    /// Bytes of file data, holes left out.
    pub bytes: u64,
    /// Paths and names of attributes that the image cannot hold or fjord does not know.
    pub skipped: Vec<String>,
}

/// Where the contents come from.
pub enum Source<'a> {
    /// A directory; its entries go to the root of the image.
    Directory(&'a Path),
    /// A tar stream, not compressed.
    Tar(&'a mut dyn io::Read),
}

/// Mounts the image on the device, puts the contents in and unmounts it. `progress` is called
/// after each entry and each piece of data.
///
/// # Errors
/// [`TreeError::Source`] when the contents cannot be read, [`TreeError::Engine`] when the image
/// cannot take them: too small, or the device failed.
pub fn populate(
    device: Arc<dyn Device>,
    source: Source<'_>,
    progress: &mut dyn FnMut(&Populated),
) -> Result<Populated> {
    let engine = |source| TreeError::Engine { path: "the image".to_owned(), source };
    let fs = Fs::open_device(device, &MountOptions::default()).map_err(engine)?;
    let mut builder = Builder::new(&fs, progress);
    let filled = match source {
        Source::Directory(path) => crate::host::from_dir(&mut builder, path),
        Source::Tar(stream) => crate::tar::extract::from_tar(&mut builder, stream),
    };
    let filled = filled.and_then(|()| builder.finish());
    // The image is made clean even when the contents did not fit.
    let unmounted = fs.unmount().map_err(engine);
    let populated = filled?;
    unmounted.map(|()| populated)
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
}

/// Puts entries into a mounted image.
pub(crate) struct Builder<'a> {
    pub(crate) fs: &'a Fs,
    pub(crate) cred: Cred,
    pub(crate) done: Populated,
    directories: HashMap<InodeNo, (String, Meta)>,
    progress: &'a mut dyn FnMut(&Populated),
}

/// A path for messages.
pub(crate) fn shown(path: &[u8]) -> String {
    OsStr::from_bytes(path).to_string_lossy().into_owned()
}

impl<'a> Builder<'a> {
    fn new(fs: &'a Fs, progress: &'a mut dyn FnMut(&Populated)) -> Builder<'a> {
        Builder {
            fs,
            cred: Cred::root(),
            done: Populated::default(),
            directories: HashMap::new(),
            progress,
        }
    }

    /// Gives an error of the engine the path that it happened at.
    pub(crate) fn at<T>(&self, path: &[u8], result: fjord::Result<T>) -> Result<T> {
        result.map_err(|source| TreeError::Engine { path: shown(path), source })
    }

    /// The directory of this name, made when it is not there.
    pub(crate) fn directory(
        &mut self,
        parent: &InodeRef,
        name: &[u8],
        path: &[u8],
    ) -> Result<InodeRef> {
        match parent.mkdir(name, 0o755, &self.cred) {
            Err(error) if error.is(Errno::EXIST) => {
                let there = self.at(path, parent.lookup(name))?;
                if there.attr().kind() == fjord::FileKind::Directory {
                    return Ok(there);
                }
                drop(there);
                self.at(path, parent.unlink(name))?;
                self.at(path, parent.mkdir(name, 0o755, &self.cred))
            }
            result => self.at(path, result),
        }
    }

    /// Sets attributes now or, for a directory, at the end; counts the entry.
    pub(crate) fn finish_entry(&mut self, inode: &InodeRef, path: &[u8], meta: Meta) -> Result<()> {
        if inode.attr().kind() == fjord::FileKind::Directory {
            self.directories.insert(inode.ino(), (shown(path), meta));
        } else {
            self.apply(inode, &shown(path), &meta)?;
        }
        self.count_entry();
        Ok(())
    }

    pub(crate) fn count_entry(&mut self) {
        self.done.entries += 1;
        (self.progress)(&self.done);
    }

    fn apply(&mut self, inode: &InodeRef, path: &str, meta: &Meta) -> Result<()> {
        let engine = |source| TreeError::Engine { path: path.to_owned(), source };
        let change = SetAttr {
            // The mode of a link is always 0777.
            mode: (inode.attr().kind() != fjord::FileKind::Symlink).then_some(meta.mode),
            uid: Some(meta.uid),
            gid: Some(meta.gid),
            atime: Some(SetTime::At(meta.atime)),
            mtime: Some(SetTime::At(meta.mtime)),
            ..SetAttr::default()
        };
        inode.set_attr(&change, &self.cred).map_err(engine)?;
        // After the owner, whose change would take capabilities away.
        for (name, value) in &meta.xattrs {
            match inode.set_xattr(name, value, XattrFlags::empty()) {
                Err(error) if error.is(Errno::OPNOTSUPP) => {
                    self.done.skipped.push(format!("{path}: {}", shown(name)));
                }
                result => result.map_err(engine)?,
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Populated> {
        for (ino, (path, meta)) in std::mem::take(&mut self.directories) {
            let inode = self.at(path.as_bytes(), self.fs.inode(ino, None))?;
            self.apply(&inode, &path, &meta)?;
        }
        Ok(self.done)
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
        Ok(())
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
