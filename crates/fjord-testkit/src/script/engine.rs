//! Runs steps through fjord's library.
//!
//! What the kernel checks before it asks a file system (open flags, fallocate arguments) is
//! checked here likewise, so that outcomes compare with system calls.

use fjord::{
    Cred, FallocMode, FileKind, Fs, InodeRef, RenameFlags, SetAttr, SetTime, Timespec,
    WriteOptions, XattrFlags,
};

use super::{Errno, Executor, Op, Outcome, stamp_of};
use crate::{
    manifest::{Kind, Stamp},
    rng,
};

/// FS_APPEND_FL.
const APPEND_ONLY: u32 = 0x20;
/// FS_IMMUTABLE_FL.
const IMMUTABLE: u32 = 0x10;

/// Carries out steps on a mounted [`Fs`].
pub struct EngineExecutor {
    fs: Fs,
    cred: Cred,
}

impl std::fmt::Debug for EngineExecutor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineExecutor").finish_non_exhaustive()
    }
}

impl From<fjord::Error> for Errno {
    fn from(error: fjord::Error) -> Self {
        Errno(error.errno())
    }
}

/// Device number as the engine takes it (Linux `new_encode_dev`).
fn encode_dev((major, minor): (u32, u32)) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The inverse: (major, minor).
pub(crate) fn decode_dev(dev: u32) -> (u32, u32) {
    ((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xfff00))
}

fn time(stamp: Stamp) -> SetTime {
    SetTime::At(Timespec { sec: stamp.sec, nsec: stamp.nsec })
}

impl EngineExecutor {
    /// Works on the whole file system, as root.
    pub fn new(fs: &Fs) -> Self {
        EngineExecutor { fs: fs.clone(), cred: Cred::root() }
    }

    /// The inode of a path; links are not followed.
    fn find(&self, path: &[u8]) -> Result<InodeRef, Errno> {
        let mut at = self.fs.root()?;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            at = at.lookup(name)?;
        }
        Ok(at)
    }

    fn parent<'p>(&self, path: &'p [u8]) -> Result<(InodeRef, &'p [u8]), Errno> {
        let split = path.iter().rposition(|byte| *byte == b'/');
        let (dir, name) = split.map_or((&path[..0], path), |at| (&path[..at], &path[at + 1..]));
        Ok((self.find(dir)?, name))
    }

    /// What open(2) with O_NOFOLLOW gives, for writing or reading.
    fn open(&self, path: &[u8], write: bool, append: bool) -> Result<InodeRef, Errno> {
        let inode = self.find(path)?;
        let attr = inode.attr();
        match attr.kind() {
            FileKind::Symlink => return Err(Errno(libc::ELOOP)),
            // The script's devices, whiteouts among them, have no driver.
            FileKind::Socket | FileKind::CharDevice | FileKind::BlockDevice => {
                return Err(Errno(libc::ENXIO));
            }
            FileKind::Directory if write => return Err(Errno(libc::EISDIR)),
            _ => {}
        }
        let barred = attr.flags & IMMUTABLE != 0 || (attr.flags & APPEND_ONLY != 0 && !append);
        if write && barred {
            return Err(Errno(libc::EPERM));
        }
        Ok(inode)
    }

    fn write(&self, inode: &InodeRef, seed: u64, offset: u64, from: u64, len: u64) -> Outcome {
        const STEP_BYTES: u64 = 1 << 20;
        let mut done = 0;
        while done < len {
            let count = STEP_BYTES.min(len - done);
            let data = rng::pattern_vec(seed, from + done, count as usize);
            let wrote = inode.write(offset + done, &data)? as u64;
            if wrote == 0 {
                return Err(Errno(libc::EIO));
            }
            done += wrote;
        }
        Ok(())
    }

    fn append(&self, inode: &InodeRef, data: &[u8]) -> Outcome {
        let mut done = 0;
        while done < data.len() {
            let options = WriteOptions { append: true, ..WriteOptions::default() };
            done += inode.write_with(0, &data[done..], options)?;
        }
        Ok(())
    }

    fn content(&self, op: &Op) -> Outcome {
        match op {
            Op::Write { path, offset, len, seed } => {
                let inode = self.open(path, true, false)?;
                self.write(&inode, *seed, *offset, *offset, *len)
            }
            Op::Append { path, len, seed } => {
                let inode = self.open(path, true, true)?;
                let end = inode.attr().size;
                self.append(&inode, &rng::pattern_vec(*seed, end, *len as usize))
            }
            Op::Truncate { path, size } => {
                let inode = self.open(path, true, false)?;
                let change = SetAttr { size: Some(*size), ..SetAttr::default() };
                inode.set_attr(&change, &self.cred)?;
                Ok(())
            }
            Op::Fallocate { path, mode, offset, len } => {
                let inode = self.open(path, true, false)?;
                let mode = FallocMode::from_bits_retain(*mode);
                Ok(inode.fallocate(mode, *offset, *len)?)
            }
            Op::Tmpfile { dir, link, len, seed } => {
                let dir = self.find(dir)?;
                let inode = dir.tmpfile(0o640, &self.cred)?;
                self.write(&inode, *seed, 0, 0, *len)?;
                if let Some(path) = link {
                    let (parent, name) = self.parent(path)?;
                    parent.link(&inode, name)?;
                }
                Ok(())
            }
            Op::WriteUnlinked { path, len, seed } => {
                let inode = self.open(path, true, true)?;
                let (parent, name) = self.parent(path)?;
                parent.unlink(name)?;
                self.append(&inode, &rng::pattern_vec(*seed, 0, *len as usize))
            }
            Op::Fsync { path } => Ok(self.open(path, false, false)?.fsync(false)?),
            _ => self.names(op),
        }
    }

    fn names(&self, op: &Op) -> Outcome {
        match op {
            Op::Mkdir { path, mode } => {
                let (dir, name) = self.parent(path)?;
                dir.mkdir(name, *mode as u16, &self.cred)?;
            }
            Op::Create { path, mode } => {
                let (dir, name) = self.parent(path)?;
                dir.create(name, *mode as u16, &self.cred)?;
            }
            Op::Link { from, to } => {
                let target = self.find(from)?;
                let (dir, name) = self.parent(to)?;
                dir.link(&target, name)?;
            }
            Op::Symlink { path, target } => {
                let (dir, name) = self.parent(path)?;
                dir.symlink(name, target, &self.cred)?;
            }
            Op::Mknod { path, kind, mode, rdev } => {
                let (dir, name) = self.parent(path)?;
                let kind = match kind {
                    Kind::Fifo => FileKind::Fifo,
                    Kind::Socket => FileKind::Socket,
                    Kind::CharDevice => FileKind::CharDevice,
                    Kind::BlockDevice => FileKind::BlockDevice,
                    Kind::File | Kind::Directory | Kind::Symlink => FileKind::Regular,
                };
                dir.mknod(name, kind.mode_bits() | *mode as u16, encode_dev(*rdev), &self.cred)?;
            }
            Op::Unlink { path } => {
                let (dir, name) = self.parent(path)?;
                dir.unlink(name)?;
            }
            Op::Rmdir { path } => {
                let (dir, name) = self.parent(path)?;
                dir.rmdir(name)?;
            }
            Op::Rename { from, to, flags } => {
                let ((from_dir, from), (to_dir, to)) = (self.parent(from)?, self.parent(to)?);
                let flags = RenameFlags::from_bits_retain(*flags);
                from_dir.rename(from, &to_dir, to, flags, &self.cred)?;
            }
            _ => self.attributes(op)?,
        }
        Ok(())
    }

    fn attributes(&self, op: &Op) -> Outcome {
        match op {
            Op::SetXattr { path, name, value, flags } => {
                let flags = XattrFlags::from_bits_retain(*flags);
                self.find(path)?.set_xattr(name, value, flags)?;
            }
            Op::RemoveXattr { path, name } => self.find(path)?.remove_xattr(name)?,
            Op::Chmod { path, mode } => {
                let change = SetAttr { mode: Some(*mode as u16), ..SetAttr::default() };
                self.find(path)?.set_attr(&change, &self.cred)?;
            }
            Op::Chown { path, uid, gid } => {
                // chown(2) asks for the privilege bits to be dropped, on anything but directories.
                let inode = self.find(path)?;
                let change = SetAttr {
                    uid: Some(*uid),
                    gid: Some(*gid),
                    kill_privileges: inode.attr().kind() != FileKind::Directory,
                    ..SetAttr::default()
                };
                inode.set_attr(&change, &self.cred)?;
            }
            Op::SetTimes { path, atime, mtime } => self.set_times(path, *atime, *mtime)?,
            Op::SetFlags { path, set, clear } => {
                let inode = self.open(path, false, false)?;
                inode.set_flags(inode.flags() & !clear | set)?;
            }
            Op::SetProject { path, project } => {
                self.open(path, false, false)?.set_project(*project)?
            }
            Op::StampAll { seed } => {
                let mut paths = vec![Vec::new()];
                let mut next = 0;
                while next < paths.len() {
                    let path = paths[next].clone();
                    next += 1;
                    self.children(&path, &mut paths)?;
                }
                paths.sort();
                for path in &paths {
                    let (atime, mtime) = stamp_of(*seed, path);
                    self.set_times(path, atime, mtime)?;
                }
            }
            _ => unreachable!("all other steps are handled before"),
        }
        Ok(())
    }

    fn set_times(&self, path: &[u8], atime: Stamp, mtime: Stamp) -> Outcome {
        let change =
            SetAttr { atime: Some(time(atime)), mtime: Some(time(mtime)), ..SetAttr::default() };
        self.find(path)?.set_attr(&change, &self.cred)?;
        Ok(())
    }

    /// Adds the children of a directory, without `lost+found`.
    fn children(&self, path: &[u8], out: &mut Vec<Vec<u8>>) -> Outcome {
        let inode = self.find(path)?;
        if inode.attr().kind() != FileKind::Directory {
            return Ok(());
        }
        for (_, name) in list(&inode)? {
            let below = join(path, &name);
            if below != b"lost+found" {
                out.push(below);
            }
        }
        Ok(())
    }
}

/// A path one level deeper.
pub(crate) fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut below = path.to_vec();
    if !below.is_empty() {
        below.push(b'/');
    }
    below.extend_from_slice(name);
    below
}

/// All entries of a directory but `.` and `..`: inode number and name.
pub(crate) fn list(dir: &InodeRef) -> fjord::Result<Vec<(u64, Vec<u8>)>> {
    let mut entries = Vec::new();
    dir.read_dir(0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            entries.push((u64::from(entry.ino.0), entry.name.to_vec()));
        }
        true
    })?;
    Ok(entries)
}

impl Executor for EngineExecutor {
    fn apply(&mut self, op: &Op) -> Outcome {
        self.content(op)
    }

    fn read_file(&mut self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let inode = self.open(path, false, false)?;
        if inode.attr().kind() != FileKind::Regular {
            return Err(Errno(libc::EINVAL));
        }
        let mut content = vec![0; inode.attr().size as usize];
        let mut done = 0;
        while done < content.len() {
            match inode.read(done as u64, &mut content[done..])? {
                0 => break,
                got => done += got,
            }
        }
        content.truncate(done);
        Ok(content)
    }
}
