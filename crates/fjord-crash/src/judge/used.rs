//! Uses a recovered file system as programs do.
//!
//! Owns [`Judge::used`]: files grow, and new ones are created and deleted. Invariant: old data in
//! unused space (the rest of a last block, freed blocks) is never visible afterwards.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use fjord::{Cred, FileKind, Fs, InodeRef, SetAttr};
use rustix::io::Errno;

use super::{Failure, Judge, Recovered};
use crate::check::{Kind, Problem};
use crate::record::{DeviceKind, RecordingDevice};

/// Files that grow, at most.
const FILES_MAX: usize = 64;
/// By so many bytes: to the end of any last block, and beyond.
const GROWTH_BYTES: u64 = 70_000;
/// Contents of the new file, which takes blocks that were free.
const NEW_BYTES: usize = 30_000;

impl Judge {
    /// Uses the recovered file system, unmounts it and runs e2fsck.
    ///
    /// # Errors
    /// Outer: the tools do not run. Inner: the problem.
    pub fn used(&mut self, recovered: &Recovered) -> Result<Result<(), Problem>> {
        self.stats.used += 1;
        let kind = DeviceKind::Volatile;
        let device = Arc::new(RecordingDevice::plain(recovered.image.clone(), kind));
        let foreign = match self.mounted(&device, use_files) {
            Ok(foreign) => foreign,
            Err(Failure::Mount(text) | Failure::Later(text)) => {
                let text = format!("used after recovery: {text}");
                return Ok(Err(Problem::new(Kind::RecoveryFailed, text)));
            }
        };
        if let Some(text) = foreign {
            return Ok(Err(Problem::new(Kind::ForeignBytes, text)));
        }
        let said = self.fsck(&device.image())?;
        let problem = |said| Problem::new(Kind::Fsck, format!("used after recovery: {said}"));
        Ok(said.map_or(Ok(()), |said| Err(problem(said))))
    }
}

/// Lets files grow and makes one; tells of bytes that are not zero where nobody wrote.
fn use_files(fs: &Fs) -> Result<Option<String>> {
    let root = fs.root()?;
    let mut files = Vec::new();
    gather(&root, &mut files)?;
    for file in files {
        if let Some(at) = grow(&file).with_context(|| format!("inode {} grows", file.ino().0))? {
            let text = format!("inode {} has old bytes at {at}, behind its end", file.ino().0);
            return Ok(Some(text));
        }
    }
    let made = root.create(b"made after recovery", 0o600, &Cred::root());
    match made {
        Ok(file) => {
            let _ = allowed(file.write(0, &[7; NEW_BYTES]))?;
            root.unlink(b"made after recovery")?;
        }
        Err(error) => allowed(Err(error))?.unwrap_or(()),
    }
    Ok(None)
}

fn gather(dir: &InodeRef, files: &mut Vec<InodeRef>) -> Result<()> {
    let mut names = Vec::new();
    dir.read_dir(0, &mut |entry| {
        names.push(entry.name.to_vec());
        true
    })?;
    for name in names.iter().filter(|name| *name != b"." && *name != b"..") {
        let inode = dir.lookup(name)?;
        match inode.attr().kind() {
            FileKind::Regular if files.len() < FILES_MAX => files.push(inode),
            FileKind::Directory => gather(&inode, files)?,
            _ => {}
        }
    }
    Ok(())
}

/// Makes a file longer and reads what is new. Returns where a byte is not zero.
fn grow(file: &InodeRef) -> Result<Option<u64>> {
    let size = file.attr().size;
    let longer = SetAttr { size: Some(size + GROWTH_BYTES), ..SetAttr::default() };
    if allowed(file.set_attr(&longer, &Cred::root()))?.is_none() {
        return Ok(None);
    }
    let mut bytes = vec![0; GROWTH_BYTES as usize];
    let mut read = 0;
    while read < bytes.len() {
        match file.read(size + read as u64, &mut bytes[read..])? {
            0 => bail!("the file ends {read} bytes behind its old size"),
            count => read += count,
        }
    }
    Ok(bytes.iter().position(|byte| *byte != 0).map(|at| size + at as u64))
}

/// What an operation gave; none where there was no room.
fn allowed<T>(outcome: fjord::Result<T>) -> Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is(Errno::NOSPC) || error.is(Errno::FBIG) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
