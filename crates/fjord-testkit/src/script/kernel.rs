//! Runs steps through system calls below a directory.
//!
//! Invariant: the process's umask is zero while it runs (set once, for all threads), so that
//! modes are those of the script.

use std::{
    ffi::OsStr,
    fs::File,
    io::{Read, Write},
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::{Path as FsPath, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, FallocateFlags, FileType, Gid, IFlags, Mode, OFlags, RenameFlags, Timespec,
        Timestamps, Uid, XattrFlags,
    },
    io::Errno as Sys,
};

use super::{Errno, Executor, Op, Outcome, fsxattr, stamp_of};
use crate::{
    manifest::{Kind, Stamp},
    rng,
};

/// Carries out steps below a directory of any mounted file system.
#[derive(Debug)]
pub struct KernelExecutor {
    root: PathBuf,
}

impl From<Sys> for Errno {
    fn from(error: Sys) -> Self {
        Errno(error.raw_os_error())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl KernelExecutor {
    /// Works below `root`. Sets the process's umask to zero.
    pub fn new(root: &FsPath) -> Self {
        rustix::process::umask(Mode::empty());
        KernelExecutor { root: root.to_owned() }
    }

    fn at(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() { self.root.clone() } else { self.root.join(OsStr::from_bytes(path)) }
    }

    fn open(&self, path: &[u8], flags: OFlags, mode: u32) -> Result<File, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::open(self.at(path), flags, Mode::from_raw_mode(mode))?))
    }

    fn content(&self, op: &Op) -> Outcome {
        match op {
            Op::Write { path, offset, len, seed } => {
                let file = self.open(path, OFlags::WRONLY, 0)?;
                write_pattern(&file, *seed, *offset, *len)
            }
            Op::Append { path, len, seed } => {
                let mut file = self.open(path, OFlags::WRONLY | OFlags::APPEND, 0)?;
                let end = file.metadata()?.len();
                Ok(file.write_all(&rng::pattern_vec(*seed, end, *len as usize))?)
            }
            Op::Truncate { path, size } => {
                Ok(self.open(path, OFlags::WRONLY, 0)?.set_len(*size)?)
            }
            Op::Fallocate { path, mode, offset, len } => {
                let file = self.open(path, OFlags::RDWR, 0)?;
                let mode = FallocateFlags::from_bits_retain(*mode);
                Ok(rustix::fs::fallocate(&file, mode, *offset, *len)?)
            }
            Op::Tmpfile { dir, link, len, seed } => {
                let file = self.open(dir, OFlags::TMPFILE | OFlags::RDWR, 0o640)?;
                write_pattern(&file, *seed, 0, *len)?;
                if let Some(name) = link {
                    use std::os::fd::AsRawFd;
                    let fd = format!("/proc/self/fd/{}", file.as_raw_fd());
                    let to = self.at(name);
                    rustix::fs::linkat(CWD, fd, CWD, to, AtFlags::SYMLINK_FOLLOW)?;
                }
                Ok(())
            }
            Op::WriteUnlinked { path, len, seed } => {
                let mut file = self.open(path, OFlags::RDWR | OFlags::APPEND, 0)?;
                rustix::fs::unlink(self.at(path))?;
                Ok(file.write_all(&rng::pattern_vec(*seed, 0, *len as usize))?)
            }
            Op::Fsync { path } => {
                let flags = if self.at(path).is_dir() { OFlags::DIRECTORY } else { OFlags::RDONLY };
                Ok(self.open(path, flags, 0)?.sync_all()?)
            }
            _ => self.names(op),
        }
    }

    fn names(&self, op: &Op) -> Outcome {
        match op {
            Op::Mkdir { path, mode } => {
                rustix::fs::mkdir(self.at(path), Mode::from_raw_mode(*mode))?;
            }
            Op::Create { path, mode } => {
                self.open(path, OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY, *mode)?;
            }
            Op::Link { from, to } => {
                rustix::fs::linkat(CWD, self.at(from), CWD, self.at(to), AtFlags::empty())?;
            }
            Op::Symlink { path, target } => {
                rustix::fs::symlink(OsStr::from_bytes(target), self.at(path))?;
            }
            Op::Mknod { path, kind, mode, rdev } => {
                let file_type = match kind {
                    Kind::Fifo => FileType::Fifo,
                    Kind::Socket => FileType::Socket,
                    Kind::CharDevice => FileType::CharacterDevice,
                    Kind::BlockDevice => FileType::BlockDevice,
                    Kind::File | Kind::Directory | Kind::Symlink => FileType::RegularFile,
                };
                let dev = rustix::fs::makedev(rdev.0, rdev.1);
                let mode = Mode::from_raw_mode(*mode);
                rustix::fs::mknodat(CWD, self.at(path), file_type, mode, dev)?;
            }
            Op::Unlink { path } => rustix::fs::unlink(self.at(path))?,
            Op::Rmdir { path } => rustix::fs::rmdir(self.at(path))?,
            Op::Rename { from, to, flags } => {
                let flags = RenameFlags::from_bits_retain(*flags);
                rustix::fs::renameat_with(CWD, self.at(from), CWD, self.at(to), flags)?;
            }
            _ => self.attributes(op)?,
        }
        Ok(())
    }

    fn attributes(&self, op: &Op) -> Outcome {
        match op {
            Op::SetXattr { path, name, value, flags } => {
                let flags = XattrFlags::from_bits_retain(*flags);
                rustix::fs::lsetxattr(self.at(path), OsStr::from_bytes(name), value, flags)?;
            }
            Op::RemoveXattr { path, name } => {
                rustix::fs::lremovexattr(self.at(path), OsStr::from_bytes(name))?;
            }
            Op::Chmod { path, mode } => {
                let mode = Mode::from_raw_mode(*mode);
                rustix::fs::chmodat(CWD, self.at(path), mode, AtFlags::empty())?;
            }
            Op::Chown { path, uid, gid } => {
                let (uid, gid) = (Uid::from_raw(*uid), Gid::from_raw(*gid));
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(CWD, self.at(path), Some(uid), Some(gid), flags)?;
            }
            Op::SetTimes { path, atime, mtime } => self.set_times(path, *atime, *mtime)?,
            Op::SetFlags { path, set, clear } => {
                let file = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
                let old = rustix::fs::ioctl_getflags(&file)?.bits();
                rustix::fs::ioctl_setflags(&file, IFlags::from_bits_retain(old & !clear | set))?;
            }
            Op::SetProject { path, project } => {
                let file = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
                let mut attr = fsxattr::get(&file)?;
                attr.project = *project;
                fsxattr::set(&file, attr)?;
            }
            Op::StampAll { seed } => {
                let mut paths = Vec::new();
                self.collect(Vec::new(), &mut paths)?;
                // Sorted, so that of several links to one file the same one decides.
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
        let spec = |stamp: Stamp| Timespec { tv_sec: stamp.sec, tv_nsec: stamp.nsec.into() };
        let times = Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
        Ok(rustix::fs::utimensat(CWD, self.at(path), &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// All paths at and below `path`, without `lost+found`.
    fn collect(&self, path: Vec<u8>, out: &mut Vec<Vec<u8>>) -> Outcome {
        for child in std::fs::read_dir(self.at(&path))? {
            let child = child?;
            let mut below = path.clone();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(child.file_name().as_bytes());
            if below == b"lost+found" {
                continue;
            }
            if child.file_type()?.is_dir() { self.collect(below, out)? } else { out.push(below) }
        }
        out.push(path);
        Ok(())
    }
}

impl Executor for KernelExecutor {
    fn apply(&mut self, op: &Op) -> Outcome {
        self.content(op)
    }

    fn read_file(&mut self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut file = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
        if !file.metadata()?.is_file() {
            return Err(Errno(libc::EINVAL));
        }
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        Ok(content)
    }
}

/// Writes a pattern in pieces of at most 1 MiB.
fn write_pattern(file: &File, seed: u64, offset: u64, len: u64) -> Outcome {
    const STEP_BYTES: u64 = 1 << 20;
    let mut done = 0;
    while done < len {
        let count = STEP_BYTES.min(len - done);
        file.write_all_at(&rng::pattern_vec(seed, offset + done, count as usize), offset + done)?;
        done += count;
    }
    Ok(())
}
