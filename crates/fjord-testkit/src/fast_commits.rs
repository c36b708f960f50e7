//! Images whose fast-commit area holds something, made by the kernel's ext4.
//!
//! The kernel works on a loop device with the feature on; the image is copied while it is
//! mounted and quiet, which is what a power cut would leave of it.
//!
//! Invariant: the operations of a seed are the same on every run.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::dirty::copy_quiet;
use crate::image::{self, KernelMount};
use crate::manifest::{Kind, Manifest, Stamp};
use crate::rng::{Rng, pattern_vec};
use crate::tools;

/// Bytes of the images.
const SIZE: u64 = 64 << 20;

/// How an image is made, and what is done to it.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// Name in reports.
    pub name: &'static str,
    /// mke2fs arguments.
    pub mke2fs: &'static [&'static str],
    /// Directories are made and removed too.
    pub directories: bool,
    /// Several files change between two fsyncs.
    pub many: bool,
}

/// Images that Linux, e2fsck and fjord must recover alike.
pub const RECIPES: &[Recipe] = &[
    Recipe { name: "4k", mke2fs: &["-b", "4096"], directories: false, many: false },
    Recipe { name: "1k", mke2fs: &["-b", "1024"], directories: false, many: true },
    Recipe { name: "plain", mke2fs: &["-O", "^metadata_csum"], directories: false, many: true },
    Recipe { name: "128", mke2fs: &["-I", "128"], directories: false, many: false },
    Recipe { name: "directories", mke2fs: &["-b", "4096"], directories: true, many: true },
];

/// An image, mounted by Linux so that only fsyncs commit: the timers are kept out.
fn mounted(live: &Path, recipe: &Recipe) -> Result<KernelMount> {
    image::make_sparse(live, SIZE)?;
    let mut mke2fs = tools::command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit", "-J", "size=8"]);
    mke2fs.args(["-E", "lazy_itable_init=0"]).args(recipe.mke2fs);
    tools::run(mke2fs.arg(live))?.ok()?;
    KernelMount::new(live, "commit=300,noinit_itable")
}

/// An image with a fast commit of Linux in which a file without a name is: unlinked while it was open.
pub fn make_with_nameless_inode(dir: &Path) -> Result<PathBuf> {
    let (live, copy) = (dir.join("live.img"), dir.join("nameless.img"));
    let mount = mounted(&live, &RECIPES[0])?;
    let device = mount.loop_name()?;
    for name in ["unlinked", "other"] {
        std::fs::write(mount.path().join(name), [1; 5000])?;
    }
    rustix::fs::syncfs(File::open(mount.path())?)?;
    let unlinked = OpenOptions::new().write(true).open(mount.path().join("unlinked"))?;
    unlinked.write_all_at(&[2; 9000], 0)?;
    std::fs::remove_file(mount.path().join("unlinked"))?;
    let other = OpenOptions::new().append(true).open(mount.path().join("other"))?;
    other.write_all_at(&[3; 4000], 5000)?;
    other.sync_all()?;
    copy_quiet(&live, &copy, &device)?;
    drop((unlinked, other));
    mount.unmount()?;
    Ok(copy)
}

/// Lets Linux work on an image and copies it after some of the fsyncs.
pub fn make(recipe: &Recipe, seed: u64, rounds: u64, dir: &Path) -> Result<Vec<PathBuf>> {
    let live = dir.join(format!("{}-live.img", recipe.name));
    let mount = mounted(&live, recipe)?;
    let device = mount.loop_name()?;
    let mut worker = Worker { root: mount.path().to_owned(), rng: Rng::new(seed), round: 0 };
    worker.begin()?;
    let mut copies = Vec::new();
    for round in 0..rounds {
        worker.round = round;
        worker.work(recipe)?;
        let copy = dir.join(format!("{}-{round}.img", recipe.name));
        copy_quiet(&live, &copy, &device)?;
        copies.push(copy);
        if worker.rng.percent(12) {
            // A full commit, without which the area fills.
            rustix::fs::syncfs(File::open(mount.path())?)?;
        }
    }
    mount.unmount()?;
    std::fs::remove_file(live)?;
    Ok(copies)
}

struct Worker {
    root: PathBuf,
    rng: Rng,
    round: u64,
}

impl Worker {
    /// Directories and files that have been committed.
    fn begin(&mut self) -> Result<()> {
        for name in ["a", "b"] {
            std::fs::create_dir(self.root.join(name))?;
        }
        for number in 0..6 {
            let path = self.path(number % 3, number);
            std::fs::write(path, pattern_vec(number, 0, 5000 * number as usize))?;
        }
        rustix::fs::syncfs(File::open(&self.root)?)?;
        Ok(())
    }

    fn path(&self, dir: u64, number: u64) -> PathBuf {
        self.root.join(["", "a", "b"][dir as usize % 3]).join(format!("f{number}"))
    }

    fn any_path(&mut self) -> PathBuf {
        let (dir, number) = (self.rng.below(3), self.rng.below(6));
        self.path(dir, number)
    }

    /// A few changes, then an fsync of a file.
    fn work(&mut self, recipe: &Recipe) -> Result<()> {
        let count = if recipe.many { self.rng.range(1, 6) } else { 1 };
        let mut last = None;
        for _ in 0..count {
            if recipe.directories && self.rng.percent(25) {
                self.change_directory()?;
            }
            last = Some(self.change()?);
        }
        let path = last.filter(|path| path.exists());
        let path = path.unwrap_or_else(|| self.root.join("fallback"));
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        file.sync_all().with_context(|| format!("fsync of {}", path.display()))
    }

    fn change_directory(&mut self) -> Result<()> {
        let path = self.root.join("b").join(format!("new{}", self.rng.below(40)));
        if !path.exists() {
            std::fs::create_dir(&path)?;
            std::fs::write(path.join("inside"), pattern_vec(self.round, 0, 3000))?;
        }
        Ok(())
    }

    /// One change; returns the file that it was made to.
    fn change(&mut self) -> Result<PathBuf> {
        let path = self.any_path();
        match self.rng.below(12) {
            0..=4 => self.write(&path)?,
            5 => {
                let size = self.rng.below(60_000);
                self.open(&path)?.set_len(size)?;
            }
            6 | 7 => self.allocate(&path)?,
            8 => {
                let fresh = self.root.join("a").join(format!("made{}", self.round));
                self.write(&fresh)?;
                return Ok(fresh);
            }
            9 if path.exists() => {
                let to = self.any_path();
                std::fs::rename(&path, &to)?;
                return Ok(to);
            }
            10 if path.exists() => std::fs::remove_file(&path)?,
            11 if path.exists() => {
                let to = self.root.join("b").join(format!("link{}", self.round));
                if !to.exists() {
                    std::fs::hard_link(&path, &to)?;
                }
                return Ok(to);
            }
            _ => self.write(&path)?,
        }
        Ok(path)
    }

    fn open(&self, path: &Path) -> Result<File> {
        Ok(OpenOptions::new().create(true).write(true).truncate(false).open(path)?)
    }

    fn write(&mut self, path: &Path) -> Result<()> {
        let file = self.open(path)?;
        let end = file.metadata()?.len();
        let at = if self.rng.percent(50) { end } else { self.rng.below(80_000) };
        let len = 1 + self.rng.magnitude(30_000) as usize;
        let bytes = pattern_vec(self.rng.next_u64(), at, len);
        file.write_all_at(&bytes, at)?;
        Ok(())
    }

    fn allocate(&mut self, path: &Path) -> Result<()> {
        let file = self.open(path)?;
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let punch = keep | libc::FALLOC_FL_PUNCH_HOLE;
        let mode = *self.rng.pick(&[0, keep, punch, punch, keep | libc::FALLOC_FL_ZERO_RANGE]);
        let (at, len) = (self.rng.below(60_000) as i64, 1 + self.rng.below(40_000) as i64);
        // SAFETY: the call takes numbers only; the descriptor is open.
        let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, at, len) };
        ensure!(done == 0, "fallocate {mode:#x}: {}", std::io::Error::last_os_error());
        Ok(())
    }
}

/// A tree without what recoverers may do as they like: Linux gives directories that it adds
/// entries to the time of the recovery, and their layout is everybody's own.
pub fn without_directory_times(mut tree: Manifest) -> Manifest {
    tree.entries.retain(|path, _| path != b"lost+found");
    for entry in tree.entries.values_mut().filter(|entry| entry.kind == Kind::Directory) {
        (entry.mtime, entry.ctime, entry.atime) = Default::default();
        entry.btime = Some(Stamp::default());
        (entry.size, entry.blocks_512b, entry.flags) = (0, 0, 0);
    }
    tree
}
