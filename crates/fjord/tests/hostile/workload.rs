//! A fixed workload that notes what was promised, and the check of the promises.
//!
//! It goes on after errors, as a stubborn program does, and believes every success: whatever
//! fsync, sync or unmount said is durable has to be there afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use fjord::{Cred, Error, Fs, InodeRef, MountOptions, RenameFlags, SetAttr, XattrFlags};
use fjord_block::Device;
use fjord_testkit::rng::pattern_vec;

/// What must be at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Promise {
    /// Nothing.
    Absent,
    /// A file whose sectors each have the content of one of these.
    File(Vec<Vec<u8>>),
    /// An attribute of this value.
    Attribute(&'static [u8], Vec<u8>),
}

/// Promises by path.
pub(crate) type Promises = BTreeMap<String, Promise>;

/// Options that make a run repeatable.
pub(crate) fn options() -> MountOptions {
    MountOptions { background_threads: false, ..MountOptions::default() }
}

/// One run.
pub(crate) struct Run<'a> {
    fs: &'a Fs,
    pub(crate) promises: Promises,
    pub(crate) errors: Vec<Error>,
    /// Short log for a failed test.
    pub(crate) log: Vec<String>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(fs: &'a Fs) -> Self {
        Run { fs, promises: Promises::new(), errors: Vec::new(), log: Vec::new() }
    }

    fn ok<T>(&mut self, what: &str, result: fjord::Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.log.push(what.to_owned());
                Some(value)
            }
            Err(error) => {
                self.log.push(format!("{what}: {error}"));
                self.errors.push(error);
                None
            }
        }
    }

    /// The name is about to change: what was promised before holds no longer.
    fn forget(&mut self, path: &str) {
        self.promises.remove(path);
    }

    fn promise(&mut self, path: &str, promise: Promise) {
        self.promises.insert(path.to_owned(), promise);
    }

    fn write_file(&mut self, dir: &InodeRef, path: &str, seed: u64, len: usize, datasync: bool) {
        let name = path.rsplit('/').next().unwrap_or(path);
        let Some(file) = self.ok("create", dir.create(name.as_bytes(), 0o644, &Cred::root()))
        else {
            return;
        };
        let open = file.open();
        let content = pattern_vec(seed, 0, len);
        if self.ok("write", file.write(0, &content)).is_none() {
            return;
        }
        if self.ok(&format!("fsync {path}"), open.fsync(datasync)).is_some() {
            self.promise(path, Promise::File(vec![content]));
        }
    }

    /// The whole workload on one of the base images.
    pub(crate) fn all(&mut self) {
        let Some(root) = self.ok("root", self.fs.root()) else { return };
        for number in 0..5_u64 {
            let len = [1, 900, 5000, 20_000, 70_000][number as usize];
            self.write_file(&root, &format!("file-{number}"), number, len, number % 2 == 1);
        }
        if let Some(dir) = self.ok("mkdir", root.mkdir(b"d", 0o755, &Cred::root())) {
            self.write_file(&dir, "d/below", 7, 3000, false);
            self.rename(&root, &dir);
        }
        self.overwrite(&root);
        self.shrink(&root);
        self.attribute(&root);
        self.unlink(&root);
        // Enough commits to go round the log and to bring blocks home from it.
        for number in 0..40_u64 {
            self.write_file(&root, &format!("many-{number}"), 50 + number, 300, false);
        }
        self.batch(&root);
    }

    fn rename(&mut self, root: &InodeRef, dir: &InodeRef) {
        let before = self.promises.get("file-0").cloned();
        self.forget("file-0");
        let flags = RenameFlags::empty();
        let renamed = root.rename(b"file-0", dir, b"moved", flags, &Cred::root());
        if self.ok("rename", renamed).is_none() {
            return;
        }
        if self.ok("sync", self.fs.sync()).is_some() {
            self.promise("file-0", Promise::Absent);
            if let Some(promise) = before {
                self.promise("d/moved", promise);
            }
        }
    }

    fn overwrite(&mut self, root: &InodeRef) {
        let Some(file) = self.ok("lookup", root.lookup(b"big")) else { return };
        let mut old = vec![0; file.attr().size as usize];
        if self.ok("read", file.read(0, &mut old)).is_none() {
            return;
        }
        let open = file.open();
        let mut new = old.clone();
        let block = self.fs.statfs().block_size as usize;
        new[block..3 * block].copy_from_slice(&pattern_vec(99, 0, 2 * block));
        self.promise("big", Promise::File(vec![old.clone(), new.clone()]));
        if self.ok("overwrite", file.write(block as u64, &new[block..3 * block])).is_some()
            && self.ok("fdatasync big", open.fsync(true)).is_some()
        {
            self.promise("big", Promise::File(vec![new]));
        }
    }

    fn shrink(&mut self, root: &InodeRef) {
        let Some(file) = self.ok("lookup", root.lookup(b"far")) else { return };
        let change = SetAttr { size: Some(100), ..SetAttr::default() };
        if self.ok("truncate", file.set_attr(&change, &Cred::root())).is_some()
            && self.ok("fsync far", file.open().fsync(false)).is_some()
        {
            self.promise("far", Promise::File(vec![vec![0; 100]]));
        }
    }

    fn attribute(&mut self, root: &InodeRef) {
        let Some(file) = self.ok("lookup", root.lookup(b"attributes")) else { return };
        let value = vec![b'n'; 200];
        if self.ok("setxattr", file.set_xattr(b"user.new", &value, XattrFlags::empty())).is_some()
            && self.ok("fsync attributes", file.open().fsync(false)).is_some()
        {
            self.promise("attributes", Promise::Attribute(b"user.new", value));
        }
    }

    fn unlink(&mut self, root: &InodeRef) {
        self.forget("file-1");
        let gone = self.ok("unlink", root.unlink(b"file-1")).is_some();
        // Many metadata blocks: revokes.
        let holes = self.ok("unlink", root.unlink(b"holes")).is_some();
        if self.ok("sync", self.fs.sync()).is_none() {
            return;
        }
        for (path, gone) in [("file-1", gone), ("holes", holes)] {
            if gone {
                self.promise(path, Promise::Absent);
            }
        }
    }

    /// Files of many short extents, whose maps take blocks of their own when they are written out.
    pub(crate) fn fragments(&mut self) {
        let Some(root) = self.ok("root", self.fs.root()) else { return };
        let block = self.fs.statfs().block_size as usize;
        for number in 0..4_u64 {
            let name = format!("fragments-{number}");
            let made = root.create(name.as_bytes(), 0o600, &Cred::root());
            let Some(file) = self.ok("create", made) else { continue };
            let mut content = pattern_vec(300 + number, 0, 41 * block);
            for at in (1..40).step_by(2) {
                content[at * block..(at + 1) * block].fill(0);
            }
            let mut pieces = content.chunks(block).enumerate().step_by(2);
            let written: fjord::Result<()> =
                pieces.try_for_each(|(at, piece)| file.write((at * block) as u64, piece).map(drop));
            if self.ok("write", written).is_none() {
                continue;
            }
            let durable = match number % 2 {
                0 => file.open().fsync(false),
                _ => self.fs.sync(),
            };
            if self.ok(&format!("{name} to disk"), durable).is_some() {
                self.promise(&name, Promise::File(vec![content]));
            }
        }
    }

    /// Files that one sync makes durable together.
    fn batch(&mut self, root: &InodeRef) {
        let mut written = Vec::new();
        for number in 0..20_u64 {
            let name = format!("batch-{number}");
            let content = pattern_vec(200 + number, 0, 700 * number as usize + 1);
            let made = root.create(name.as_bytes(), 0o600, &Cred::root());
            let Some(file) = self.ok("create", made) else { continue };
            if self.ok("write", file.write(0, &content)).is_some() {
                written.push((name, content));
            }
        }
        if self.ok("last sync", self.fs.sync()).is_some() {
            for (name, content) in written {
                self.promise(&name, Promise::File(vec![content]));
            }
        }
    }
}

/// Opens what is left on the device, which recovers it, and looks for every promise.
pub(crate) fn check(device: Arc<dyn Device>, promises: &Promises) -> Result<()> {
    let fs = Fs::open_device(device, &options()).context("reopening")?;
    for (path, promise) in promises {
        keep(&fs, path, promise).with_context(|| format!("{path} was promised"))?;
    }
    fs.unmount().context("unmounting after the check")
}

fn keep(fs: &Fs, path: &str, promise: &Promise) -> Result<()> {
    match promise {
        Promise::Absent => ensure!(!fs.try_exists(path)?, "it came back"),
        Promise::Attribute(name, value) => {
            ensure!(fs.resolve(path)?.get_xattr(name)? == *value, "another value");
        }
        Promise::File(versions) => {
            let found = fs.read(path)?;
            let len = versions.first().map_or(0, Vec::len);
            ensure!(found.len() == len, "{} bytes, not {len}", found.len());
            for (number, block) in found.chunks(512).enumerate() {
                let at = number * 512;
                let fits = |version: &Vec<u8>| version.get(at..at + block.len()) == Some(block);
                if !versions.iter().any(fits) {
                    bail!("other content at byte {at}");
                }
            }
        }
    }
    Ok(())
}
