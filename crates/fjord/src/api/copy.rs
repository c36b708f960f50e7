//! Copying a file within an image.
//!
//! Owns which attributes a copy gets. Invariant: the copy never grants more than the original: it
//! has the original's access control list with its mode, and set-user-ID, set-group-ID and
//! capabilities only with its owner and group.

use std::path::Path;

use rustix::io::Errno;

use super::file::write_all_at;
use super::metadata::{self, Permissions};
use super::{OpenOptions, path};
use crate::attr::{Attr, S_ISGID, S_ISUID};
use crate::error::{Error, Result};
use crate::vfs::{Fs, InodeRef, XattrFlags};

/// Bytes that are in memory at a time.
const CHUNK_BYTES: u64 = 1 << 20;

const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
const CAPABILITY: &[u8] = b"security.capability";

impl Fs {
    /// Copies a file; returns its size in bytes. As `std::fs::copy`: symbolic links are followed, an
    /// existing file is replaced by content and keeps its owner, a new one belongs to root.
    ///
    /// The copy has the original's content with its holes, permission bits, access control
    /// list and extended attributes. Set-user-ID, set-group-ID and capabilities are kept only if
    /// owner and group are those of the original ([`Fs::chown`] before the copy, or
    /// [`Fs::set_permissions`] after it). Times are those of the copying. Extended attributes that
    /// only the replaced file had stay. Durable only after a sync; if the copy fails, part of it
    /// stays.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/original", "content")?;
    /// assert_eq!(fs.copy("/original", "/copy")?, 7);
    /// assert_eq!(fs.read("/copy")?, b"content");
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Usage` if `from` is not a regular file, or both are the same one; `EISDIR`, `ENOSPC`,
    /// `EROFS`; as [`Fs::resolve`].
    pub fn copy(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<u64> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let source = self.resolve(from)?;
        let attr = source.attr();
        if !attr.is_file() {
            let from = from.display();
            return Err(Error::Usage(format!(
                "{from} is not a regular file; only regular files can be copied"
            )));
        }
        if let path::Located::Found(target) = path::locate(self, to, true)?
            && target.ino() == source.ino()
        {
            let (from, to) = (from.display(), to.display());
            return Err(Error::Usage(format!("{from} and {to} are the same file")));
        }
        let mut options = OpenOptions::new();
        // A new file is never readable by more users than the original, not even for a moment.
        options.write(true).create(true).truncate(true).mode(attr.mode & 0o700);
        let target = options.open(self, to)?;
        let target = target.inode();
        copy_content(&source, target, attr.size)?;
        copy_attributes(&source, &attr, target)?;
        Ok(attr.size)
    }
}

/// Copies the first `size` bytes, holes left out; the target is empty.
fn copy_content(source: &InodeRef, target: &InodeRef, size: u64) -> Result<()> {
    let mut buf = vec![0; CHUNK_BYTES.min(size) as usize];
    let mut at = 0;
    while at < size {
        let data = match source.seek_data(at) {
            Err(error) if error.is(Errno::NXIO) => break,
            other => other?,
        };
        let end = match source.seek_hole(data) {
            // It was truncated meanwhile.
            Err(error) if error.is(Errno::NXIO) => break,
            other => other?.min(size),
        };
        at = data;
        while at < end {
            let part = &mut buf[..(end - at).min(CHUNK_BYTES) as usize];
            let count = source.read(at, part)?;
            if count == 0 {
                break;
            }
            write_all_at(target, at, &part[..count])?;
            at += count as u64;
        }
        at = at.max(end);
    }
    if target.attr().size < size {
        let change = crate::SetAttr { size: Some(size), ..Default::default() };
        target.set_attr(&change, &crate::Cred::root())?;
    }
    Ok(())
}

fn copy_attributes(source: &InodeRef, attr: &Attr, target: &InodeRef) -> Result<()> {
    let owned = target.attr();
    let keeps_privileges = (owned.uid, owned.gid) == (attr.uid, attr.gid);
    let names = source.list_xattr()?;
    if !names.iter().any(|name| name == ACCESS_LIST) {
        // One that the file had, or that its directory gave it.
        match target.remove_xattr(ACCESS_LIST) {
            Err(error) if !error.is(Errno::NODATA) && !error.is(Errno::OPNOTSUPP) => {
                return Err(error);
            }
            _ => {}
        }
    }
    for name in names {
        if name == CAPABILITY && !keeps_privileges {
            continue;
        }
        match source.get_xattr(&name) {
            // It was removed meanwhile.
            Err(error) if error.is(Errno::NODATA) => {}
            value => target.set_xattr(&name, &value?, XattrFlags::empty())?,
        }
    }
    let privileges = if keeps_privileges { 0 } else { S_ISUID | S_ISGID };
    metadata::set_permissions(target, Permissions::from(attr.mode & !privileges))
}
