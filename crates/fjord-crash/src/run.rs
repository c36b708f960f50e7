//! Running operations on an engine while the model keeps step.
//!
//! Owns [`Runner`]. Invariant: an operation that the engine refuses as POSIX allows leaves the
//! model as it is; any other failure ends the run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fjord::resize::NewSize;
use fjord::{Cred, FileKind, Fs, FsyncPolicyKind, InodeRef, RenameFlags, SetAttr, XattrFlags};
use fjord_testkit::rng::{mix, pattern_vec};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::model::{Made, Model, Scope};
use crate::ops::{Op, leaf, parent};
use crate::tree;

/// Outcomes that a workload may meet: the operation does not fit the tree or the features.
const REFUSALS: [Errno; 12] = [
    Errno::NODEV,
    Errno::EXIST,
    Errno::NOENT,
    Errno::NOTEMPTY,
    Errno::NOTDIR,
    Errno::ISDIR,
    Errno::INVAL,
    Errno::OPNOTSUPP,
    Errno::NODATA,
    Errno::NOSPC,
    Errno::FBIG,
    Errno::PERM,
];

/// How long a thread has to tell the model what it has made.
const MAKER_PATIENCE: Duration = Duration::from_secs(10);

/// Carries out operations and tells the model. Runners of several threads share a model, each
/// with a directory of its own, and none calls `sync`.
pub struct Runner<'a> {
    fs: &'a Fs,
    /// The model that keeps step; a leaf lock, never held over a call of the engine.
    model: &'a Mutex<Model>,
    clock: &'a dyn Fn() -> u64,
    held: Vec<InodeRef>,
}

/// What is known of an inode, for the model.
pub fn made(inode: &InodeRef) -> Made {
    let attr = inode.attr();
    Made {
        ino: u64::from(inode.ino().0),
        generation: attr.generation,
        kind: attr.kind(),
        attrs: tree::attrs(inode),
    }
}

impl<'a> Runner<'a> {
    /// A runner on a mounted file system whose tree is the model's; `clock` stamps.
    pub fn new(fs: &'a Fs, model: &'a Mutex<Model>, clock: &'a dyn Fn() -> u64) -> Self {
        Runner { fs, model, clock, held: Vec::new() }
    }

    fn resolve(&self, path: &str) -> fjord::Result<InodeRef> {
        let names = path.split('/').filter(|name| !name.is_empty());
        names.fold(self.fs.root(), |dir, name| dir?.lookup(name.as_bytes()))
    }

    /// Carries out one operation; false when it was refused.
    ///
    /// # Errors
    /// Failures of the engine: I/O, damage, or an outcome that no workload may meet.
    pub fn step(&mut self, op: &Op) -> Result<bool> {
        let start = (self.clock)();
        let mark = self.model.lock().mark(op, self.scope());
        match self.perform(op, start) {
            Ok(()) => {}
            Err(fjord::Error::Posix(errno)) if REFUSALS.contains(&errno) => return Ok(false),
            Err(
                fjord::Error::Incompatible { .. }
                | fjord::Error::Usage(_)
                | fjord::Error::Resize(_),
            ) => return Ok(false),
            Err(error) => bail!("{op}: {error}"),
        }
        if op.is_sync() {
            let stamp = (self.clock)();
            self.model.lock().promise_marked(stamp, op, mark.as_ref());
        } else {
            self.refresh(op, start).with_context(|| format!("after {op}"))?;
        }
        Ok(true)
    }

    /// How far a sync of a directory reaches under the mount's policy.
    fn scope(&self) -> Scope {
        match self.fs.options().fsync {
            FsyncPolicyKind::Group => Scope::Own,
            _ => Scope::Everything,
        }
    }

    /// Tells the model the attributes of what the operation may have changed.
    fn refresh(&mut self, op: &Op, start: u64) -> Result<()> {
        let Some(target) = op.target() else { return Ok(()) };
        let mut paths = vec![target, parent(target)];
        paths.extend(op.source().into_iter().flat_map(|from| [from, parent(from)]));
        for path in paths {
            if self.model.lock().resolve(path).is_some() {
                let inode = self.resolve(path).with_context(|| format!("/{path} is not there"))?;
                let attrs = tree::attrs(&inode);
                self.model.lock().attrs(start, path, attrs);
            }
        }
        Ok(())
    }

    fn perform(&mut self, op: &Op, start: u64) -> fjord::Result<()> {
        let mut bytes = Vec::new();
        match op {
            Op::Create(_) | Op::Mkdir(_) | Op::Symlink(..) => return self.make(op, start),
            Op::Link(from, to) => {
                let file = self.resolve(from)?;
                self.resolve(parent(to))?.link(&file, leaf(to).as_bytes())?;
            }
            Op::Unlink(path) => self.resolve(parent(path))?.unlink(leaf(path).as_bytes())?,
            Op::Rmdir(path) => self.resolve(parent(path))?.rmdir(leaf(path).as_bytes())?,
            Op::Rename(from, to) => self.rename(from, to, RenameFlags::empty())?,
            Op::Exchange(from, to) => self.rename(from, to, RenameFlags::EXCHANGE)?,
            Op::Truncate(path, size) => self.set(path, |set| set.size = Some(*size))?,
            Op::Chmod(path, mode) => self.set(path, |set| set.mode = Some(*mode))?,
            Op::Chown(path, id) => {
                self.set(path, |set| (set.uid, set.gid) = (Some(*id), Some(*id)))?
            }
            Op::Append(path, len) => {
                let file = self.resolve(path)?;
                bytes = self.write(&file, file.attr().size, *len, &[])?;
            }
            Op::Write(path, offset, len) => {
                bytes = self.write(&self.resolve(path)?, *offset, *len, &[])?;
            }
            Op::Magic(path, offset) => {
                let magic = fjord_format::jbd2::MAGIC.to_be_bytes();
                bytes = self.write(&self.resolve(path)?, *offset, 4096, &magic)?;
            }
            Op::Fallocate(path, mode, offset, len) => {
                self.resolve(path)?.fallocate(*mode, *offset, *len)?;
            }
            Op::SetXattr(path, name, len) => {
                bytes = pattern_vec(self.next_seed(), 0, *len);
                let inode = self.resolve(path)?;
                inode.set_xattr(name.as_bytes(), &bytes, XattrFlags::empty())?;
            }
            Op::RemoveXattr(path, name) => self.resolve(path)?.remove_xattr(name.as_bytes())?,
            Op::Hold(path) => {
                let inode = self.resolve(path)?;
                self.held.push(inode);
            }
            Op::Fsync(path) => self.resolve(path)?.fsync(false)?,
            Op::Fdatasync(path) => self.resolve(path)?.fsync(true)?,
            Op::Fbarrier(path) => self.resolve(path)?.barrier(false).map(drop)?,
            Op::Fdatabarrier(path) => self.resolve(path)?.barrier(true).map(drop)?,
            Op::Writeback(path) => self.resolve(path)?.write_back()?,
            Op::Sync => self.fs.sync()?,
            Op::Grow(bytes) => {
                self.fs.resize(NewSize::Plus(*bytes))?;
            }
        }
        self.model.lock().apply(start, op, &bytes);
        Ok(())
    }

    fn make(&mut self, op: &Op, start: u64) -> fjord::Result<()> {
        let cred = Cred::root();
        let path = op.target().unwrap_or_default();
        let (dir, name) = (self.resolve(parent(path))?, leaf(path).as_bytes());
        let mut target = None;
        let inode = match op {
            Op::Mkdir(_) => dir.mkdir(name, 0o755, &cred)?,
            Op::Symlink(_, len) => {
                let digit = b'a' + (self.next_seed() % 26) as u8;
                let text = target.insert(vec![digit; (*len).max(1)]);
                dir.symlink(name, text, &cred)?
            }
            _ => dir.create(name, 0o644, &cred)?,
        };
        let made = made(&inode);
        self.wait_until_known(parent(path));
        self.model.lock().made(start, path, &made, target);
        Ok(())
    }

    /// Who made the directory may not have told the model yet, though others see it already: its
    /// thread is about to.
    fn wait_until_known(&self, dir: &str) {
        let until = Instant::now() + MAKER_PATIENCE;
        while self.model.lock().resolve(dir).is_none() && Instant::now() < until {
            std::thread::yield_now();
        }
    }

    fn rename(&self, from: &str, to: &str, flags: RenameFlags) -> fjord::Result<()> {
        let (old, new) = (self.resolve(parent(from))?, self.resolve(parent(to))?);
        old.rename(leaf(from).as_bytes(), &new, leaf(to).as_bytes(), flags, &Cred::root())
    }

    fn set(&self, path: &str, change: impl FnOnce(&mut SetAttr)) -> fjord::Result<()> {
        let mut set = SetAttr::default();
        change(&mut set);
        self.resolve(path)?.set_attr(&set, &Cred::root()).map(drop)
    }

    /// The seed of the next pattern, unlike all others of the run.
    fn next_seed(&self) -> u64 {
        let mut model = self.model.lock();
        model.write_count += 1;
        mix(model.write_count)
    }

    /// Writes a pattern of this write's own that begins with `head`; no byte of it is zero.
    fn write(&self, file: &InodeRef, offset: u64, len: u64, head: &[u8]) -> fjord::Result<Vec<u8>> {
        if file.attr().kind() != FileKind::Regular {
            return Err(Errno::INVAL.into());
        }
        let mut bytes = pattern_vec(self.next_seed(), offset, len as usize);
        bytes[..head.len()].copy_from_slice(head);
        let written = file.write(offset, &bytes)?;
        bytes.truncate(written);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use fjord::MountOptions;

    use super::*;
    use crate::base::{Base, FEATURES};
    use crate::ops;
    use crate::record::{DeviceKind, RecordingDevice};

    /// A directory that the engine has and the model does not know yet: a file in it, which its
    /// maker's thread met there, was kept by the model without its name.
    #[test]
    fn a_file_keeps_its_name_in_a_directory_of_another_thread() {
        let base = Base::get(FEATURES[0], &[]).expect("an image");
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        let device = RecordingDevice::plain(base.image.clone(), DeviceKind::Volatile);
        let fs = Fs::open_device(Arc::new(device), &options).expect("it mounts");
        let model = Mutex::new(base.model.clone());
        let stamp = AtomicU64::new(1);
        let clock = || stamp.fetch_add(1, Ordering::Relaxed);
        let start = clock();
        let dir =
            fs.root().expect("a root").mkdir(b"d", 0o755, &Cred::root()).expect("a directory");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The step waits by then; if it comes later, the model knows the directory already.
                std::thread::sleep(Duration::from_millis(50));
                model.lock().made(start, "d", &made(&dir), None);
            });
            let create = ops::parse("create /d/f").expect("an operation");
            let mut runner = Runner::new(&fs, &model, &clock);
            assert!(runner.step(&create[0]).expect("it runs"));
        });
        assert!(model.lock().resolve("d/f").is_some());
    }
}
