//! Makes scripts: one section for each kind of operation, then random steps over what is there.

use std::collections::BTreeSet;

use super::{Op, Path, Script};
use crate::{
    manifest::{Kind, Stamp},
    rng::Rng,
};

/// A unit that is a whole number of blocks at every block size up to 64 KiB.
const UNIT: u64 = 64 << 10;

/// What a script should contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Files of the large directory.
    pub large_directory: u32,
    /// Random steps at the end.
    pub random_steps: u32,
    /// Depth of the deep directory.
    pub depth: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Shape { large_directory: 3200, random_steps: 800, depth: 60 }
    }
}

impl Script {
    /// The varied script of a seed.
    pub fn varied(seed: u64) -> Script {
        Script::with_shape(seed, Shape::default())
    }

    /// The varied script of a seed, in another size.
    pub fn with_shape(seed: u64, shape: Shape) -> Script {
        let mut maker = Maker { rng: Rng::new(seed), ops: Vec::new() };
        maker.sizes();
        maker.sparse_and_truncated();
        maker.fallocated();
        maker.links_and_specials();
        maker.directories(shape);
        maker.renames();
        maker.xattrs();
        maker.acls();
        maker.owners_and_modes();
        maker.unnamed();
        maker.random(shape.random_steps);
        maker.stamped_and_flagged(seed);
        Script { seed, ops: maker.ops }
    }
}

struct Maker {
    rng: Rng,
    ops: Vec<Op>,
}

fn path(text: &str) -> Path {
    text.into()
}

impl Maker {
    fn mkdir(&mut self, at: &str) {
        self.ops.push(Op::Mkdir { path: path(at), mode: 0o755 });
    }

    fn create(&mut self, at: &str) {
        self.ops.push(Op::Create { path: path(at), mode: 0o644 });
    }

    fn write(&mut self, at: &str, offset: u64, len: u64) {
        let seed = self.rng.next_u64();
        self.ops.push(Op::Write { path: path(at), offset, len, seed });
    }

    fn file(&mut self, at: &str, len: u64) {
        self.create(at);
        if len > 0 {
            self.write(at, 0, len);
        }
    }

    fn truncate(&mut self, at: &str, size: u64) {
        self.ops.push(Op::Truncate { path: path(at), size });
    }

    fn fallocate(&mut self, at: &str, mode: i32, offset: u64, len: u64) {
        self.ops.push(Op::Fallocate { path: path(at), mode: mode as u32, offset, len });
    }

    fn rename(&mut self, from: &str, to: &str, flags: u32) {
        self.ops.push(Op::Rename { from: path(from), to: path(to), flags });
    }

    fn xattr(&mut self, at: &str, name: &str, len: usize) {
        let value: Vec<u8> = (0..len).map(|_| self.rng.next_u64() as u8).collect();
        self.ops.push(Op::SetXattr {
            path: path(at),
            name: path(name),
            value: value.into(),
            flags: 0,
        });
    }

    fn sizes(&mut self) {
        self.mkdir("sizes");
        let fixed = [
            0, 1, 59, 60, 61, 100, 150, 160, 161, 511, 512, 513, 1023, 1024, 1025, 2048, 4095,
            4096, 4097, 12_288, 12_289, 65_535, 65_536, 65_537, 300_000, 1_048_576, 5_000_001,
        ];
        for len in fixed {
            self.file(&format!("sizes/exact-{len}"), len);
        }
        for index in 0..40 {
            let len = self.rng.magnitude(200_000);
            self.file(&format!("sizes/random-{index}"), len);
        }
        for index in 0..10 {
            let name = format!("sizes/appended-{index}");
            self.create(&name);
            for _ in 0..12 {
                let (len, seed) = (self.rng.magnitude(20_000), self.rng.next_u64());
                self.ops.push(Op::Append { path: path(&name), len, seed });
            }
        }
        for index in 0..4 {
            let name = format!("sizes/overwritten-{index}");
            self.file(&name, 200_000);
            for _ in 0..20 {
                let (offset, len) = (self.rng.below(180_000), self.rng.magnitude(40_000));
                self.write(&name, offset, len);
            }
        }
    }

    fn sparse_and_truncated(&mut self) {
        self.mkdir("sparse");
        // Past the direct, indirect and double-indirect ranges of a block map with 1 KiB blocks.
        for (index, offset) in
            [20_000u64, 300_000, 3_000_000, 80_000_000, 3_000_000_000].iter().enumerate()
        {
            let name = format!("sparse/far-{index}");
            self.create(&name);
            self.write(&name, *offset, 5000);
            self.write(&name, offset / 2, 100);
        }
        self.create("sparse/many-pieces");
        for index in 0..400 {
            self.write("sparse/many-pieces", index * 3 * UNIT, 700);
        }
        self.create("sparse/only-size");
        self.truncate("sparse/only-size", 10_000_000);
        for (index, size) in [0u64, 1, 4000, 4096, 65_536, 100_001, 299_999].iter().enumerate() {
            let name = format!("sparse/cut-{index}");
            self.file(&name, 300_000);
            self.truncate(&name, *size);
            let regrown = format!("sparse/regrown-{index}");
            self.file(&regrown, 300_000);
            self.truncate(&regrown, *size);
            self.truncate(&regrown, 400_000);
            self.write(&regrown, 350_000, 10);
        }
        self.file("sparse/emptied-and-refilled", 2_000_000);
        self.truncate("sparse/emptied-and-refilled", 0);
        self.write("sparse/emptied-and-refilled", 1_000_000, 3000);
    }

    fn fallocated(&mut self) {
        use libc::{
            FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE, FALLOC_FL_KEEP_SIZE,
            FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE,
        };
        let punch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        self.mkdir("falloc");
        self.create("falloc/plain");
        self.fallocate("falloc/plain", 0, 0, 20 * UNIT);
        self.create("falloc/part-written");
        self.fallocate("falloc/part-written", 0, 0, 40 * UNIT);
        for _ in 0..6 {
            let offset = self.rng.below(38 * UNIT);
            let len = self.rng.magnitude(UNIT);
            self.write("falloc/part-written", offset, len);
        }
        self.file("falloc/kept-size", 5000);
        self.fallocate("falloc/kept-size", FALLOC_FL_KEEP_SIZE, 0, 10 * UNIT);
        self.file("falloc/kept-size-then-grown", 5000);
        self.fallocate("falloc/kept-size-then-grown", FALLOC_FL_KEEP_SIZE, 0, 10 * UNIT);
        self.truncate("falloc/kept-size-then-grown", 6 * UNIT);
        for (index, (offset, len)) in
            [(0, UNIT), (UNIT, 3 * UNIT), (1000, 100), (70_000, 200_000), (9 * UNIT, 100 * UNIT)]
                .into_iter()
                .enumerate()
        {
            for (kind, mode) in [
                ("punched", punch),
                ("zeroed", FALLOC_FL_ZERO_RANGE),
                ("zeroed-kept", FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE),
            ] {
                let name = format!("falloc/{kind}-{index}");
                self.file(&name, 10 * UNIT + 333);
                self.fallocate(&name, mode, offset, len);
            }
        }
        for (index, (offset, len)) in
            [(0, UNIT), (2 * UNIT, 3 * UNIT), (UNIT, 1000), (9 * UNIT, 5 * UNIT), (5 * UNIT, UNIT)]
                .into_iter()
                .enumerate()
        {
            for (kind, mode) in
                [("collapsed", FALLOC_FL_COLLAPSE_RANGE), ("inserted", FALLOC_FL_INSERT_RANGE)]
            {
                let name = format!("falloc/{kind}-{index}");
                self.file(&name, 10 * UNIT + 333);
                self.fallocate(&name, punch, 4 * UNIT, UNIT);
                self.fallocate(&name, mode, offset, len);
            }
        }
        self.create("falloc/bad");
        self.fallocate("falloc/bad", 0, 0, 0);
        self.fallocate("falloc/bad", FALLOC_FL_PUNCH_HOLE, 0, UNIT);
    }

    fn links_and_specials(&mut self) {
        self.mkdir("links");
        self.mkdir("links/far");
        self.file("links/a", 10_000);
        for (from, to) in
            [("a", "b"), ("b", "far/c"), ("a", "far/d"), ("missing", "x"), ("a", "b"), ("far", "y")]
        {
            self.ops.push(Op::Link {
                from: path(&format!("links/{from}")),
                to: path(&format!("links/{to}")),
            });
        }
        self.ops.push(Op::Unlink { path: path("links/a") });
        for len in [1usize, 20, 58, 59, 60, 61, 200, 1000, 1023, 1024, 2000, 4095] {
            let mut target: Vec<u8> = b"../".iter().copied().cycle().take(len).collect();
            *target.last_mut().expect("len > 0") = b'x';
            self.ops.push(Op::Symlink {
                path: path(&format!("links/symlink-{len}")),
                target: target.into(),
            });
        }
        for (name, kind, rdev) in [
            ("fifo", Kind::Fifo, (0, 0)),
            ("socket", Kind::Socket, (0, 0)),
            ("null", Kind::CharDevice, (1, 3)),
            ("big-char", Kind::CharDevice, (300, 70_000)),
            ("block", Kind::BlockDevice, (8, 17)),
            ("big-block", Kind::BlockDevice, (259, 1_000_000)),
        ] {
            self.ops.push(Op::Mknod {
                path: path(&format!("links/{name}")),
                kind,
                mode: 0o620,
                rdev,
            });
        }
    }

    fn directories(&mut self, shape: super::generate::Shape) {
        self.mkdir("large");
        for index in 0..shape.large_directory {
            self.create(&format!("large/{}", large_name(index)));
        }
        for index in (0..shape.large_directory).step_by(3) {
            self.ops.push(Op::Unlink { path: path(&format!("large/{}", large_name(index))) });
        }
        for index in 0..shape.large_directory / 8 {
            self.create(&format!("large/again-{index}"));
        }
        self.mkdir("emptied");
        for index in 0..400 {
            self.create(&format!("emptied/{index}"));
        }
        for index in 0..400 {
            self.ops.push(Op::Unlink { path: path(&format!("emptied/{index}")) });
        }
        let mut deep = "deep".to_owned();
        self.mkdir(&deep);
        for level in 0..shape.depth {
            deep.push_str(&format!("/level-{level}"));
            self.mkdir(&deep);
        }
        self.file(&format!("{deep}/bottom"), 3000);
        self.mkdir("subdirs");
        for index in 0..150 {
            self.mkdir(&format!("subdirs/{index}"));
        }
        for index in (0..150).step_by(2) {
            self.ops.push(Op::Rmdir { path: path(&format!("subdirs/{index}")) });
        }
        self.ops.push(Op::Rmdir { path: path("subdirs") });
        self.ops.push(Op::Rmdir { path: path("links/b") });
        self.ops.push(Op::Unlink { path: path("subdirs") });
        self.mkdir("names");
        for name in [
            "ü",
            "日本語のファイル",
            "emoji-🦀",
            "space at end ",
            " lead",
            "-dash",
            "new\nline",
            "tab\t",
            "\\back",
            "*?[]",
            "...",
            ".hidden",
        ] {
            self.file(&format!("names/{name}"), 50);
        }
        self.file(&format!("names/{}", "n".repeat(255)), 70);
        self.create(&format!("names/{}", "n".repeat(256)));
        self.mkdir(&format!("names/{}", "d".repeat(255)));
        let mut raw = path("names/");
        raw.0.extend_from_slice(&[0xff, 0xfe, 0x80, b'z']);
        self.ops.push(Op::Create { path: raw, mode: 0o600 });
    }

    fn renames(&mut self) {
        use libc::{RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT};
        self.mkdir("ren");
        for dir in ["a", "b", "a/sub", "b/full", "b/empty", "b/empty2"] {
            self.mkdir(&format!("ren/{dir}"));
        }
        for file in
            ["a/1", "a/2", "a/3", "a/4", "a/5", "a/6", "b/full/x", "a/sub/deep", "b/over", "b/ex"]
        {
            self.file(&format!("ren/{file}"), 3000);
        }
        self.ops.push(Op::Symlink { path: path("ren/a/sym"), target: path("nowhere") });
        for (from, to, flags) in [
            ("a/1", "a/1-renamed", 0),
            ("a/2", "b/2-moved", 0),
            ("a/3", "b/over", 0),
            ("a/4", "b/over", RENAME_NOREPLACE),
            ("a/4", "b/fresh", RENAME_NOREPLACE),
            ("a/5", "b/ex", RENAME_EXCHANGE),
            ("a/sub", "b/ex", RENAME_EXCHANGE),
            ("b/full", "b/empty", 0),
            ("b/empty2", "a/gone-dir", 0),
            ("a/gone-dir", "b/empty", 0),
            ("a", "a/inside-itself", 0),
            ("missing", "b/none", 0),
            ("a/6", "a/6-left-whiteout", RENAME_WHITEOUT),
            ("a/sym", "b/sym", 0),
            ("b/2-moved", "b/empty", 0),
            ("b/empty", "b/2-moved", 0),
            ("a/missing", "b/over", RENAME_EXCHANGE),
            ("a/1-renamed", "a/1-renamed", 0),
            ("b", "top-b", 0),
        ] {
            self.rename(&format!("ren/{from}"), &format!("ren/{to}"), flags);
        }
        self.ops.push(Op::Link { from: path("ren/top-b/over"), to: path("ren/top-b/over2") });
        self.rename("ren/top-b/over", "ren/top-b/over2", 0);
    }

    fn xattrs(&mut self) {
        self.mkdir("xattr");
        for (index, len) in
            [0usize, 1, 10, 40, 80, 100, 300, 900, 1900, 3000, 3900].into_iter().enumerate()
        {
            let name = format!("xattr/one-{index}");
            self.file(&name, 20);
            self.xattr(&name, "user.value", len);
        }
        self.create("xattr/many");
        for index in 0..25 {
            let len = self.rng.magnitude(60) as usize;
            self.xattr("xattr/many", &format!("user.name-{index}"), len);
        }
        for index in (0..25).step_by(2) {
            self.ops.push(Op::RemoveXattr {
                path: path("xattr/many"),
                name: path(&format!("user.name-{index}")),
            });
        }
        self.create("xattr/changed");
        for len in [10, 2000, 30, 800, 0, 500] {
            self.xattr("xattr/changed", "user.value", len);
        }
        self.xattr("xattr/many", "trusted.key", 30);
        self.xattr("xattr/many", "security.test", 30);
        self.xattr("xattr", "user.on-directory", 30);
        self.xattr("links/symlink-20", "trusted.on-symlink", 12);
        self.xattr("links/symlink-200", "trusted.on-symlink", 12);
        self.xattr("links/fifo", "trusted.on-fifo", 12);
        self.xattr("links/fifo", "user.not-on-fifo", 12);
        for index in 0..6 {
            // Equal values: the kernel shares the block between the inodes.
            let name = format!("xattr/shared-{index}");
            self.create(&name);
            self.ops.push(Op::SetXattr {
                path: path(&name),
                name: path("user.same"),
                value: vec![7; 600].into(),
                flags: 0,
            });
        }
        self.xattr("xattr/shared-3", "user.other", 20);
        self.ops.push(Op::Unlink { path: path("xattr/shared-4") });
        self.create("xattr/large");
        for len in [5000, 20_000, 60_000] {
            self.xattr("xattr/large", &format!("user.large-{len}"), len);
        }
        let missing = path("user.missing");
        self.ops.push(Op::RemoveXattr { path: path("xattr/many"), name: missing.clone() });
        let at = path("xattr/many");
        self.ops.push(Op::SetXattr {
            path: at.clone(),
            name: missing,
            value: vec![1].into(),
            flags: 2,
        });
        self.ops.push(Op::SetXattr {
            path: at,
            name: path("user.name-1"),
            value: vec![1].into(),
            flags: 1,
        });
    }

    fn acls(&mut self) {
        self.mkdir("acl");
        self.create("acl/file");
        let access = acl(&[(1, 6, !0), (2, 4, 1000), (4, 4, !0), (16, 6, !0), (32, 0, !0)]);
        let default =
            acl(&[(1, 7, !0), (2, 5, 1001), (4, 5, !0), (8, 7, 50), (16, 7, !0), (32, 1, !0)]);
        let set = |at: &str, name: &str, value: Vec<u8>| Op::SetXattr {
            path: path(at),
            name: path(name),
            value: value.into(),
            flags: 0,
        };
        self.ops.push(set("acl/file", "system.posix_acl_access", access));
        self.ops.push(set("acl", "system.posix_acl_default", default.clone()));
        self.ops.push(Op::Create { path: path("acl/inherits"), mode: 0o666 });
        self.ops.push(Op::Mkdir { path: path("acl/inherits-dir"), mode: 0o777 });
        self.ops.push(Op::Create { path: path("acl/inherits-dir/below"), mode: 0o640 });
        self.ops.push(Op::Chmod { path: path("acl/inherits"), mode: 0o700 });
        self.ops.push(set("acl/file2", "system.posix_acl_access", default.clone()));
        self.ops.push(set("acl/file", "system.posix_acl_default", default));
        self.create("acl/minimal");
        self.ops.push(set(
            "acl/minimal",
            "system.posix_acl_access",
            acl(&[(1, 6, !0), (4, 4, !0), (32, 0, !0)]),
        ));
        self.ops.push(Op::RemoveXattr {
            path: path("acl/inherits-dir"),
            name: path("system.posix_acl_default"),
        });
    }

    fn owners_and_modes(&mut self) {
        self.mkdir("owners");
        for (index, (uid, gid, mode)) in [
            (0, 0, 0o000),
            (1000, 1000, 0o644),
            (65_534, 65_535, 0o755),
            (65_536, 70_000, 0o4755),
            (4_000_000_000, 3_000_000_000, 0o2750),
            (1, 2, 0o1777),
            (5, 6, 0o7777),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("owners/{index}");
            self.file(&name, 10);
            self.ops.push(Op::Chmod { path: path(&name), mode });
            self.ops.push(Op::Chown { path: path(&name), uid, gid });
            if index % 2 == 0 {
                self.ops.push(Op::Chmod { path: path(&name), mode });
            }
        }
        self.mkdir("owners/setgid");
        self.ops.push(Op::Chown { path: path("owners/setgid"), uid: 7, gid: 4242 });
        self.ops.push(Op::Chmod { path: path("owners/setgid"), mode: 0o2775 });
        self.create("owners/setgid/file");
        self.mkdir("owners/setgid/dir");
        self.ops.push(Op::Symlink { path: path("owners/setgid/link"), target: path("x") });
        self.ops.push(Op::Chown { path: path("owners/setgid/link"), uid: 9, gid: 9 });
    }

    fn unnamed(&mut self) {
        self.mkdir("unnamed");
        for (index, len) in [0, 100, 200_000].into_iter().enumerate() {
            let seed = self.rng.next_u64();
            let link = Some(path(&format!("unnamed/linked-{index}")));
            self.ops.push(Op::Tmpfile { dir: path("unnamed"), link, len, seed });
            self.ops.push(Op::Tmpfile { dir: path("unnamed"), link: None, len, seed });
            let name = format!("unnamed/lost-{index}");
            self.file(&name, len);
            self.ops.push(Op::WriteUnlinked { path: path(&name), len: 50_000, seed });
        }
        self.mkdir("project");
        self.ops.push(Op::SetProject { path: path("project"), project: 4711 });
        self.ops.push(Op::SetFlags { path: path("project"), set: 0x2000_0000, clear: 0 });
        self.create("project/inherits");
        self.mkdir("project/dir");
        self.create("project/dir/inherits");
        self.create("project-file");
        self.ops.push(Op::SetProject { path: path("project-file"), project: 3_000_000_000 });
    }

    fn stamped_and_flagged(&mut self, seed: u64) {
        self.mkdir("times");
        self.mkdir("flags");
        for name in ["immutable", "append", "nodump", "noatime", "sync"] {
            self.file(&format!("flags/{name}"), 100);
        }
        self.mkdir("flags/dirsync");
        self.mkdir("flags/topdir");
        let extremes: [i64; 8] =
            [-(1 << 31), -1, 0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 10_737_418_239];
        for index in 0..extremes.len() {
            self.create(&format!("times/{index}"));
        }
        self.ops.push(Op::Fsync { path: path("times/0") });
        self.ops.push(Op::Fsync { path: path("times") });
        self.ops.push(Op::StampAll { seed });
        for (index, sec) in extremes.into_iter().enumerate() {
            let atime = Stamp { sec, nsec: 999_999_999 };
            let mtime = Stamp { sec, nsec: 1 };
            self.ops.push(Op::SetTimes { path: path(&format!("times/{index}")), atime, mtime });
        }
        for (name, set) in [
            ("immutable", 0x10),
            ("append", 0x20),
            ("nodump", 0x40),
            ("noatime", 0x80),
            ("sync", 0x8),
            ("dirsync", 0x1_0000),
            ("topdir", 0x2_0000),
        ] {
            self.ops.push(Op::SetFlags { path: path(&format!("flags/{name}")), set, clear: 0 });
        }
        for name in ["immutable", "append"] {
            self.write(&format!("flags/{name}"), 0, 10);
            self.ops.push(Op::Unlink { path: path(&format!("flags/{name}")) });
            self.ops.push(Op::Chmod { path: path(&format!("flags/{name}")), mode: 0o600 });
            self.rename(&format!("flags/{name}"), "flags/renamed", 0);
        }
    }

    /// Steps over random names in a few directories; many fail, and must fail alike.
    fn random(&mut self, steps: u32) {
        let dirs = ["rnd", "rnd/a", "rnd/b", "rnd/a/c"];
        for dir in dirs {
            self.mkdir(dir);
        }
        // Modes of directories stay searchable and no step leaves flags behind.
        let mut used: BTreeSet<String> = BTreeSet::new();
        for _ in 0..steps {
            let name = format!("{}/{}", self.rng.pick(&dirs), self.rng.below(25));
            used.insert(name.clone());
            let other = self.rng.pick(&used.iter().cloned().collect::<Vec<_>>()).clone();
            let seed = self.rng.next_u64();
            let (offset, len) = (self.rng.magnitude(600_000), self.rng.magnitude(150_000));
            let op = match self.rng.below(20) {
                0..=3 => {
                    Op::Create { path: path(&name), mode: (self.rng.next_u64() & 0o777) as u32 }
                }
                4..=6 => Op::Write { path: path(&name), offset, len, seed },
                7 => Op::Append { path: path(&name), len, seed },
                8 => Op::Truncate { path: path(&name), size: offset },
                9 | 10 => self.random_fallocate(&name, offset, len),
                11 => Op::Link { from: path(&other), to: path(&name) },
                12 => Op::Unlink { path: path(&name) },
                13..=15 => Op::Rename {
                    from: path(&other),
                    to: path(&name),
                    flags: *self.rng.pick(&[0, 0, 1, 2, 4, 3]),
                },
                16 => Op::SetXattr {
                    path: path(&name),
                    name: format!("user.{}", self.rng.below(4)).as_str().into(),
                    value: vec![b'v'; self.rng.magnitude(700) as usize].into(),
                    flags: 0,
                },
                17 => Op::Symlink {
                    path: path(&name),
                    target: format!("target-{seed}").as_str().into(),
                },
                18 => Op::Mkdir { path: path(&name), mode: 0o755 },
                _ => Op::Rmdir { path: path(&name) },
            };
            self.ops.push(op);
        }
    }

    fn random_fallocate(&mut self, name: &str, offset: u64, len: u64) -> Op {
        let aligned = self.rng.percent(60);
        let round = |value: u64| if aligned { value / UNIT * UNIT } else { value };
        let mode = *self.rng.pick(&[0u32, 1, 3, 16, 17, 8, 32, 3]);
        Op::Fallocate { path: path(name), mode, offset: round(offset), len: round(len).max(1) }
    }
}

/// Names of uneven length.
fn large_name(index: u32) -> String {
    format!("entry-{index}-{}", "x".repeat((index % 23) as usize))
}

/// The value of a POSIX ACL attribute: entries of (tag, permissions, id).
pub fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&perm.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}
