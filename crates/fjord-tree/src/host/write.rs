//! Creates entries on the host.
//!
//! Invariants: an entry is created in an open directory, and no symbolic link there is followed. An
//! existing file is replaced when the new entry is complete; a failed entry leaves nothing behind.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use fjord::{Attr, FileKind};
use fjord_format::acl::{Acl, AclTag};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::sys::{self, Place};
use crate::builder::ACL_XATTRS;
use crate::error::{Result, TreeError};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;

/// Where a copy goes.
#[derive(Clone, Copy)]
pub(crate) struct Spot<'s> {
    pub(crate) dir: &'s OwnedFd,
    pub(crate) name: &'s CStr,
    /// For messages, and for further names of the same file.
    pub(crate) path: &'s Path,
}

/// What an entry gets besides its content.
pub(crate) struct Attributes {
    pub(crate) attr: Attr,
    /// Extended attributes, by their full names.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Owner and group are to be kept.
    pub(crate) owners: bool,
}

pub(crate) fn failed<T>(path: &Path, result: rustix::io::Result<T>) -> Result<T> {
    result.map_err(|errno| TreeError::Target {
        path: path.display().to_string(),
        source: errno.into(),
    })
}

impl Spot<'_> {
    /// Makes an entry by `make` and completes it by `fill`, under a name of its own where this one is
    /// in use. `fill` is told the name.
    pub(crate) fn place<T>(
        &self,
        make: &dyn Fn(&CStr) -> rustix::io::Result<T>,
        fill: &mut dyn FnMut(&T, &CStr) -> Result<()>,
    ) -> Result<()> {
        let made = match make(self.name) {
            Err(Errno::EXIST) => return self.replace(make, fill),
            made => failed(self.path, made)?,
        };
        fill(&made, self.name).inspect_err(|_| {
            // The error is the one that counts.
            let _ = sys::unlink(self.dir.as_fd(), self.name);
        })
    }

    fn replace<T>(
        &self,
        make: &dyn Fn(&CStr) -> rustix::io::Result<T>,
        fill: &mut dyn FnMut(&T, &CStr) -> Result<()>,
    ) -> Result<()> {
        let (beside, made) = self.beside(make)?;
        let filled = fill(&made, &beside).and_then(|()| self.take_name(&beside));
        filled.inspect_err(|_| {
            // The error is the one that counts.
            let _ = sys::unlink(self.dir.as_fd(), &beside);
        })
    }

    /// Makes something under a name that nothing has.
    fn beside<T>(&self, make: &dyn Fn(&CStr) -> rustix::io::Result<T>) -> Result<(CString, T)> {
        for count in 0u32.. {
            let name = format!(".fjord-{}-{count}", std::process::id());
            // It has no zero byte.
            let name = CString::new(name).unwrap_or_default();
            match make(&name) {
                Err(Errno::EXIST) => {}
                made => return Ok((name, failed(self.path, made)?)),
            }
        }
        failed(self.path, Err(Errno::EXIST))
    }

    fn take_name(&self, beside: &CStr) -> Result<()> {
        match sys::rename(self.dir.as_fd(), beside, self.name) {
            Err(Errno::ISDIR | Errno::EXIST | Errno::NOTEMPTY) => {
                let path = self.path.display().to_string();
                Err(TreeError::InTheWay { path, what: "a directory" })
            }
            renamed => failed(self.path, renamed),
        }
    }

    /// Makes this one more name of the file at `first`.
    pub(crate) fn link(&self, first: &Path) -> Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let original = CString::new(first.as_os_str().as_bytes());
        let original = failed(first, original.map_err(|_| Errno::INVAL))?;
        let dir = self.dir.as_fd();
        let is_same = || {
            let there = sys::status_at(dir, self.name).ok()?;
            let parent = first.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = open_dir(parent.unwrap_or(Path::new("."))).ok()?;
            let name = CString::new(first.file_name()?.as_bytes()).ok()?;
            Some(sys::status_at(parent.as_fd(), &name).ok()?.key() == there.key())
        };
        match sys::link(&original, dir, self.name) {
            Err(Errno::EXIST) if is_same() == Some(true) => Ok(()),
            Err(Errno::EXIST) => {
                let (beside, ()) = self.beside(&|name| sys::link(&original, dir, name))?;
                self.take_name(&beside).inspect_err(|_| {
                    // The error is the one that counts.
                    let _ = sys::unlink(dir, &beside);
                })
            }
            linked => failed(self.path, linked),
        }
    }

    /// A new regular file, open for writing.
    pub(crate) fn create(&self, name: &CStr) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        rustix::fs::openat(self.dir, name, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
    }

    /// The directory of this name, made where there is none. Nobody else gets in until it has its
    /// mode.
    pub(crate) fn directory(&self) -> Result<OwnedFd> {
        match sys::make_dir(self.dir.as_fd(), self.name, 0o700) {
            Err(Errno::EXIST) => {}
            made => failed(self.path, made)?,
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(self.dir, self.name, flags, Mode::empty()) {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let path = self.path.display().to_string();
                Err(TreeError::InTheWay { path, what: "something other than a directory" })
            }
            opened => failed(self.path, opened),
        }
    }
}

/// Opens a directory that the caller of this program named; links are followed.
pub(crate) fn open_dir(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    failed(path, rustix::fs::open(path, flags, Mode::empty()))
}

/// Sets attributes on one entry; what this process may not set, or the file system there does not
/// know, is listed in `unkept`.
pub(crate) struct Setter<'s> {
    pub(crate) place: Place<'s>,
    pub(crate) path: &'s Path,
    pub(crate) unkept: &'s mut Vec<String>,
}

impl Setter<'_> {
    fn note(&mut self, what: impl std::fmt::Display, why: impl std::fmt::Display) {
        self.unkept.push(format!("{}: {what}: {why}", self.path.display()));
    }

    /// Sets all of them. The mode comes late, since it may take the permission to do the rest; the
    /// times come last.
    pub(crate) fn set_all(&mut self, wanted: &Attributes) {
        let attr = &wanted.attr;
        let is_link = attr.kind() == FileKind::Symlink;
        let mut mode = u32::from(attr.mode & 0o7777) & !self.bits_of_lost_owner(wanted);
        if !is_link {
            mode = self.set_lists(wanted, mode);
        }
        for (name, value) in &wanted.xattrs {
            if !ACL_XATTRS.contains(&&name[..]) {
                self.set_xattr(name, value);
            }
        }
        if !is_link && let Err(errno) = sys::chmod(self.place, mode) {
            self.note(format_args!("mode {mode:o}"), errno);
        }
        if let Err(errno) = sys::set_times(self.place, attr.atime, attr.mtime) {
            self.note("times", errno);
        }
    }

    /// Sets owner and group. Gives the bits of the mode that must go where they are not those of
    /// the image: they would lend the rights of somebody else.
    fn bits_of_lost_owner(&mut self, wanted: &Attributes) -> u32 {
        let attr = &wanted.attr;
        let mode = u32::from(attr.mode);
        let is_file = attr.kind() == FileKind::Regular;
        if wanted.owners {
            match sys::chown(self.place, attr.uid, attr.gid) {
                Ok(()) => return 0,
                Err(errno) => self.note(format_args!("owner {}:{}", attr.uid, attr.gid), errno),
            }
        }
        let mut bits = 0;
        if is_file && attr.uid != sys::effective_uid() {
            bits |= SET_USER_ID;
        }
        if is_file && attr.gid != sys::effective_gid() {
            bits |= SET_GROUP_ID;
        }
        if mode & bits != 0 && !wanted.owners {
            let owner = format_args!("the file has another owner than {}:{}", attr.uid, attr.gid);
            self.note("set-user-ID and set-group-ID", owner);
        }
        bits
    }

    /// Sets access control lists and gives the mode to set after them. A list that cannot be kept
    /// must not grant permissions: the mode has its mask instead of the group's permissions.
    fn set_lists(&mut self, wanted: &Attributes, mode: u32) -> u32 {
        let mut mode = mode;
        for name in ACL_XATTRS {
            let value = wanted.xattrs.iter().find(|(have, _)| have == name).map(|(_, value)| value);
            let Some(value) = value else {
                // One that is inherited from the directory, or was there before.
                if let Ok(name) = CString::new(name) {
                    let _ = sys::remove_xattr(self.place, &name);
                }
                continue;
            };
            let is_kept = self.set_xattr(name, value);
            if !is_kept && name == ACL_XATTRS[0] {
                mode = without_list(value, mode);
            }
        }
        mode
    }

    /// Whether the attribute is set.
    fn set_xattr(&mut self, name: &[u8], value: &[u8]) -> bool {
        let shown = crate::builder::shown(name);
        let set = CString::new(name)
            .map_err(|_| Errno::INVAL)
            .and_then(|name| sys::set_xattr(self.place, &name, value));
        if let Err(errno) = set {
            self.note(format_args!("attribute {shown}"), errno);
        }
        set.is_ok()
    }
}

/// The mode of a file whose access control list is lost: the group's own rights, as far as the
/// list's mask lets it have them.
fn without_list(list: &[u8], mode: u32) -> u32 {
    let Ok(Some(list)) = Acl::from_xattr(list) else { return mode };
    let of = |tag| list.entries().iter().find(|entry| entry.tag == tag).map(|entry| entry.perm);
    let group = of(AclTag::GroupObj).unwrap_or(0) & of(AclTag::Mask).unwrap_or(7);
    mode & !0o070 | u32::from(group) << 3
}

#[cfg(test)]
mod tests {
    use super::*;
    use fjord_format::acl::AclEntry;

    #[test]
    fn a_lost_list_widens_nothing() {
        let entry = |tag, perm| AclEntry { tag, perm };
        let list = Acl::new(vec![
            entry(AclTag::UserObj, 6),
            entry(AclTag::User(1000), 7),
            entry(AclTag::GroupObj, 4),
            entry(AclTag::Mask, 7),
            entry(AclTag::Other, 0),
        ]);
        let list = list.expect("a valid list").to_xattr();
        assert_eq!(without_list(&list, 0o2670), 0o2640);
        assert_eq!(without_list(b"no list", 0o670), 0o670);
    }
}
