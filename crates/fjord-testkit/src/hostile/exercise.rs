//! Uses a damaged image with all operations that a user has.
//!
//! Owns the judgement of each outcome: an error is typed and fits the state; damage that an
//! operation met leaves the file system read-only. Invariant: the work is bounded whatever sizes
//! the image claims.

use std::collections::{BTreeMap, HashSet};

use fjord::{
    Cred, Error, FallocMode, FileKind, Fs, InodeNo, InodeRef, RenameFlags, SetAttr, XattrFlags,
};

use super::base;
use super::mutate::Choices;

const ENTRIES_MAX: usize = 2000;
const INODES_MAX: usize = 400;
const READ_BYTES_MAX: u64 = 256 << 10;
const EXTENTS_MAX: usize = 48;

/// Names that every base image has.
const NAMES: [&str; 16] = [
    "small",
    "big",
    "holes",
    "reserved",
    "far",
    "short-link",
    "long-link",
    "device",
    "fifo",
    "flat",
    "tree",
    "attributes",
    "attributes-too",
    "attributes-three",
    "late",
    "flat/file",
];

/// One user of a mounted file system.
pub(super) struct User<'a> {
    fs: &'a Fs,
    /// Print each outcome (`FJORD_TRACE`).
    trace: bool,
    /// Outcomes that must not be.
    pub(super) wrong: Vec<String>,
    /// How often each errno (0: success) came back.
    pub(super) outcomes: BTreeMap<i32, u64>,
}

impl<'a> User<'a> {
    pub(super) fn new(fs: &'a Fs) -> Self {
        User {
            fs,
            trace: std::env::var_os("FJORD_TRACE").is_some(),
            wrong: Vec::new(),
            outcomes: BTreeMap::new(),
        }
    }

    /// Judges an outcome.
    fn note<T>(&mut self, what: &str, result: Result<T, Error>) -> Option<T> {
        let errno = result.as_ref().err().map_or(0, Error::errno);
        if self.trace {
            println!("{what}: {:?}", result.as_ref().err());
        }
        *self.outcomes.entry(errno).or_default() += 1;
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        let stopped = self.fs.is_read_only();
        let bad = match &error {
            Error::Corrupt { .. } if !stopped => Some("damage met, yet still writable"),
            // The device is sound: only an address that was never checked can fail there.
            Error::Io(_) => Some("a request that the device refuses"),
            Error::Journal(_) if !stopped => Some("the journal refuses, yet still writable"),
            Error::Usage(_) | Error::Open(_) => Some("not an error of this operation"),
            _ => None,
        };
        if let Some(bad) = bad {
            self.wrong.push(format!("{what}: {bad}: {error}"));
        }
        None
    }

    /// Reads everything that can be reached.
    pub(super) fn walk(&mut self) {
        let _ = self.fs.statfs();
        let Some(root) = self.note("root", self.fs.root()) else { return };
        let mut seen = HashSet::from([root.ino()]);
        let mut todo = vec![root];
        while let Some(inode) = todo.pop() {
            self.inspect(&inode);
            for (name, ino) in self.entries(&inode) {
                if seen.len() >= INODES_MAX || seen.contains(&ino) {
                    continue;
                }
                if let Some(next) = self.note("lookup", inode.lookup(&name)) {
                    seen.insert(ino);
                    todo.push(next);
                }
            }
        }
        // By number too: what no name leads to.
        for ino in 1..64 {
            if let Some(inode) = self.note("inode", self.fs.inode(InodeNo(ino), None)) {
                self.inspect(&inode);
            }
        }
    }

    fn entries(&mut self, dir: &InodeRef) -> Vec<(Vec<u8>, InodeNo)> {
        let mut found = Vec::new();
        if dir.attr().kind() != FileKind::Directory {
            return found;
        }
        let result = dir.read_dir(0, &mut |entry| {
            found.push((entry.name.to_vec(), entry.ino));
            found.len() < ENTRIES_MAX
        });
        self.note("readdir", result);
        found.retain(|(name, _)| name != b"." && name != b"..");
        found
    }

    fn inspect(&mut self, inode: &InodeRef) {
        let attr = inode.attr();
        if let Some(names) = self.note("listxattr", inode.list_xattr()) {
            for name in names {
                self.note("getxattr", inode.get_xattr(&name));
            }
        }
        self.note("getxattr", inode.get_xattr(b"user.absent"));
        self.note("getxattr", inode.get_xattr(b"system.posix_acl_access"));
        match attr.kind() {
            FileKind::Symlink => drop(self.note("readlink", inode.read_link())),
            FileKind::Regular => self.read_file(inode, attr.size),
            FileKind::Directory => {
                self.note("lookup", inode.lookup(b"no such name"));
                self.note("lookup", inode.lookup(b".."));
            }
            _ => {}
        }
        self.note("fiemap", inode.fiemap(0, u64::MAX));
        let _ = inode.flags();
    }

    fn read_file(&mut self, inode: &InodeRef, size: u64) {
        let mut chunk = vec![0; 32 << 10];
        let mut at = 0;
        while at < size.min(READ_BYTES_MAX) {
            match self.note("read", inode.read(at, &mut chunk)) {
                Some(count) if count > 0 => at += count as u64,
                _ => break,
            }
        }
        self.note("read", inode.read(size.saturating_sub(5000), &mut chunk));
        self.note("seek", inode.seek_data(0));
        self.note("seek", inode.seek_hole(0));
        let extents = self.note("fiemap", inode.fiemap(0, u64::MAX)).unwrap_or_default();
        for extent in extents.iter().take(EXTENTS_MAX) {
            self.note("read", inode.read(extent.logical, &mut chunk[..4096]));
        }
    }

    /// The named inode, by lookups alone.
    fn find(&mut self, path: &str) -> Option<InodeRef> {
        let mut at = self.note("root", self.fs.root())?;
        for name in path.split('/') {
            at = self.note("lookup", at.lookup(name.as_bytes()))?;
        }
        Some(at)
    }

    /// Changes all kinds of things, in an order that `choices` gives.
    pub(super) fn change(&mut self, choices: &mut dyn Choices, rounds: usize) {
        for round in 0..rounds {
            let path = NAMES[choices.below(NAMES.len() as u64) as usize];
            let Some(inode) = self.find(path) else { continue };
            if self.trace {
                println!("round {round}: {path} is inode {}", inode.ino());
            }
            let Some(root) = self.note("root", self.fs.root()) else { return };
            match inode.attr().kind() {
                FileKind::Directory => self.change_dir(&inode, &root, choices, round),
                FileKind::Regular => self.change_file(&inode, choices),
                _ => {}
            }
            self.change_attributes(&inode, choices);
            self.change_names(&root, path, &inode, choices, round);
            if choices.percent(20) {
                self.note("sync", self.fs.sync());
            }
        }
    }

    fn change_file(&mut self, inode: &InodeRef, choices: &mut dyn Choices) {
        let block = u64::from(self.fs.statfs().block_size);
        let size = inode.attr().size;
        let data = vec![b'd'; 3 * block as usize + 7];
        for _ in 0..3 {
            let at = choices.below(size.min(1 << 30) + 2 * block);
            let from = at / block * block;
            let span = block * (1 + choices.below(40));
            let keep = FallocMode::KEEP_SIZE;
            match choices.below(10) {
                0 => drop(self.note("write", inode.write(at, &data))),
                1 => drop(self.note("write", inode.write(size, &data[..100]))),
                2 => drop(self.note("write", inode.write(block * 700_000, &data[..9]))),
                3 | 4 => {
                    let change = SetAttr { size: Some(at), ..SetAttr::default() };
                    self.note("truncate", inode.set_attr(&change, &Cred::root()));
                }
                5 => self.allocate(inode, keep | FallocMode::PUNCH_HOLE, from, span),
                6 => self.allocate(inode, keep | FallocMode::ZERO_RANGE, at, span),
                7 => self.allocate(inode, FallocMode::COLLAPSE_RANGE, from, span),
                8 => self.allocate(inode, FallocMode::INSERT_RANGE, from, span),
                _ => self.allocate(inode, FallocMode::empty(), from, span),
            }
        }
        if choices.percent(50) {
            self.note("fsync", inode.open().fsync(choices.percent(50)));
        }
    }

    fn allocate(&mut self, inode: &InodeRef, mode: FallocMode, offset: u64, len: u64) {
        self.note("fallocate", inode.fallocate(mode, offset, len));
    }

    fn change_attributes(&mut self, inode: &InodeRef, choices: &mut dyn Choices) {
        let value = vec![b'v'; [3, 90, 700, 5000][choices.below(4) as usize]];
        let names = [&b"user.short"[..], b"user.middle", b"user.large", b"user.new"];
        let name = names[choices.below(4) as usize];
        if choices.percent(70) {
            self.note("setxattr", inode.set_xattr(name, &value, XattrFlags::empty()));
        } else {
            self.note("removexattr", inode.remove_xattr(name));
        }
        let change = SetAttr { mode: Some(0o640), uid: Some(70_000), ..SetAttr::default() };
        if choices.percent(30) {
            self.note("setattr", inode.set_attr(&change, &Cred::root()));
        }
    }

    fn change_dir(
        &mut self,
        dir: &InodeRef,
        root: &InodeRef,
        choices: &mut dyn Choices,
        round: usize,
    ) {
        let cred = Cred::root();
        for number in 0..6 {
            let old = base::long_name(choices.below(640) as usize).into_bytes();
            let new = format!("c{round}-{number}-{}", "z".repeat(choices.below(200) as usize));
            let new = new.as_bytes();
            match choices.below(9) {
                0 | 1 => drop(self.note("unlink", dir.unlink(&old))),
                2 | 3 => {
                    let made = dir.create(new, 0o600, &cred);
                    if let Some(file) = self.note("create", made) {
                        self.note("write", file.write(0, b"fresh content"));
                    }
                }
                4 => drop(self.note("mkdir", dir.mkdir(new, 0o700, &cred))),
                5 => drop(self.note("symlink", dir.symlink(new, &[b's'; 200], &cred))),
                6 => {
                    let flags = RenameFlags::empty();
                    self.note("rename", dir.rename(&old, root, new, flags, &cred));
                }
                7 => drop(self.note("rmdir", dir.rmdir(b"inner"))),
                _ => {
                    if let Some(file) = self.note("tmpfile", dir.tmpfile(0o600, &cred)) {
                        self.note("write", file.write(0, b"nameless"));
                    }
                }
            }
        }
    }

    fn change_names(
        &mut self,
        root: &InodeRef,
        path: &str,
        inode: &InodeRef,
        choices: &mut dyn Choices,
        round: usize,
    ) {
        let cred = Cred::root();
        let name = path.as_bytes();
        let new = format!("renamed-{round}");
        let new = new.as_bytes();
        let flat = root.lookup(b"flat").unwrap_or_else(|_| root.clone());
        match choices.below(10) {
            0 => drop(self.note("link", flat.link(inode, new))),
            1 => {
                self.note("rename", root.rename(name, &flat, new, RenameFlags::empty(), &cred));
            }
            2 => {
                let flags = RenameFlags::EXCHANGE;
                self.note("rename", root.rename(name, &flat, b"below", flags, &cred));
            }
            3 => {
                let flags = RenameFlags::WHITEOUT;
                self.note("rename", root.rename(name, root, new, flags, &cred));
            }
            4 | 5 => drop(self.note(&format!("unlink {path}"), root.unlink(name))),
            6 => drop(self.note("rmdir", root.rmdir(name))),
            7 => drop(self.note("rmdir", flat.rmdir(b"below"))),
            _ => {}
        }
    }
}
