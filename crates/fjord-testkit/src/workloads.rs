//! Ordinary programs and hard cases on a mounted directory: fio, SQLite, git, tar, a directory of
//! very many entries, a full file system.
//!
//! Each takes the mount point, so that the kernel's own ext4 can be put to the same test.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, XattrFlags};

use crate::{
    rng::{Rng, mix, pattern_vec},
    tools::{self, Output, command, run},
};

/// fio with checksums in each block: buffered, direct and mapped; each pass reads back all it wrote.
pub fn fio(dir: &Path, megabytes: u32) -> Result<()> {
    for (name, args) in [
        ("buffered", &["--rw=randrw", "--ioengine=psync", "--fsync=32", "--bsrange=512-64k"][..]),
        ("direct", &["--rw=randwrite", "--ioengine=psync", "--direct=1", "--bs=4k"]),
        ("mapped", &["--rw=randwrite", "--ioengine=mmap", "--bs=4k"]),
        ("sequential", &["--rw=write", "--ioengine=psync", "--bs=256k", "--end_fsync=1"]),
    ] {
        run(command("fio")?
            .arg(format!("--name={name}"))
            .arg(format!("--directory={}", dir.display()))
            .arg(format!("--size={megabytes}m"))
            .args([
                "--numjobs=2",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--randseed=7",
                "--verify_state_save=0",
            ])
            .args(["--do_verify=1", "--output-format=terse"])
            .args(args))?
        .ok()
        .with_context(|| format!("fio, {name}"))?;
    }
    Ok(())
}

fn sqlite(database: &Path, sql: &str) -> Result<Output> {
    let mut child = command("sqlite3")?
        .arg("-batch")
        .arg("-bail")
        .arg(database)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("stdin is piped")?;
    // A failing sqlite3 closes its input early; its exit code tells more than that.
    let _ = stdin.write_all(sql.as_bytes());
    drop(stdin);
    let out = child.wait_with_output()?;
    let said = Output {
        command: format!("sqlite3 {}", database.display()),
        code: out.status.code(),
        stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
    };
    said.ok()
}

/// SQLite in its rollback and write-ahead modes, synchronous; the outcome must be that of the same
/// statements in memory.
pub fn sqlite_databases(dir: &Path) -> Result<()> {
    let mut sql = String::from("CREATE TABLE t(k INTEGER PRIMARY KEY, v BLOB, n INT);\n");
    let mut rng = Rng::new(11);
    for transaction in 0..150 {
        sql.push_str("BEGIN;\n");
        for _ in 0..rng.range(1, 20) {
            let (key, len, number) = (rng.below(2000), rng.magnitude(3000), rng.next_u64() >> 1);
            sql.push_str(&match rng.below(5) {
                0 => format!("DELETE FROM t WHERE k={key};\n"),
                1 => format!("UPDATE t SET n={number} WHERE k>{key} AND k<{};\n", key + 20),
                _ => format!("REPLACE INTO t VALUES({key},zeroblob({len}),{number});\n"),
            });
        }
        sql.push_str(if transaction % 10 == 9 { "ROLLBACK;\n" } else { "COMMIT;\n" });
    }
    sql.push_str("CREATE INDEX i ON t(n);\nPRAGMA integrity_check;\n");
    sql.push_str("SELECT count(*), sum(n % 1000003), sum(length(v)) FROM t;\n");
    let expected = sqlite(Path::new(":memory:"), &sql)?.stdout;
    for mode in ["DELETE", "TRUNCATE", "PERSIST", "WAL"] {
        let database = dir.join(format!("{mode}.db"));
        // No memory-mapped index of the log: it needs shared mappings of two processes.
        let setup = format!("PRAGMA journal_mode={mode};\nPRAGMA synchronous=FULL;\n");
        let said =
            sqlite(&database, &(setup + &sql)).with_context(|| format!("mode {mode}"))?.stdout;
        let said = said.split_once('\n').map_or("", |(_, rest)| rest);
        ensure!(said == expected, "mode {mode}: {said:?}, in memory {expected:?}");
        let again = sqlite(&database, "VACUUM; PRAGMA integrity_check;")?.stdout;
        ensure!(again.trim() == "ok", "mode {mode}: integrity_check says {again}");
    }
    Ok(())
}

/// A directory of this machine with some thousand files of all sorts: the sources that cargo built
/// this test from.
pub fn real_tree() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        PathBuf::from,
    );
    let dir = home.join("registry/src");
    ensure!(dir.is_dir(), "{} is missing, where cargo keeps the sources it builds", dir.display());
    Ok(dir)
}

/// Packs a part of the real tree, unpacks it on the mount, compares; returns the archive for a
/// comparison after a remount.
pub fn tar_tree(dir: &Path, archive: &Path) -> Result<()> {
    let tree = real_tree()?;
    // A few thousand files are enough and keep the time bounded.
    let mut packages: Vec<PathBuf> = Vec::new();
    for registry in std::fs::read_dir(&tree)? {
        for package in std::fs::read_dir(registry?.path())? {
            packages.push(package?.path());
        }
    }
    packages.sort();
    packages.retain(|path| mix(path.as_os_str().len() as u64).is_multiple_of(3));
    packages.truncate(60);
    // Names of cargo's directories may begin with a dash, which tar would take for options.
    let relative = packages.iter().filter_map(|path| path.strip_prefix(&tree).ok());
    let relative = relative.map(|path| Path::new(".").join(path));
    run(command("tar")?.arg("-cf").arg(archive).arg("-C").arg(&tree).args(relative))?.ok()?;
    run(command("tar")?.arg("-xpf").arg(archive).arg("-C").arg(dir))?.ok()?;
    tar_compare(dir, archive)
}

/// Compares an unpacked tree with its archive.
pub fn tar_compare(dir: &Path, archive: &Path) -> Result<()> {
    run(command("tar")?.arg("--compare").arg("-f").arg(archive).arg("-C").arg(dir))?.ok()?;
    Ok(())
}

/// A repository made, filled, cloned, packed and checked on the mount.
pub fn git(dir: &Path) -> Result<()> {
    let (origin, clone) = (dir.join("origin"), dir.join("clone"));
    std::fs::create_dir(&origin)?;
    let git = |at: &Path, args: &[&str]| -> Result<Output> {
        let identity = ["-c", "user.name=fjord", "-c", "user.email=fjord@localhost"];
        run(Command::new("git").args(identity).arg("-C").arg(at).args(args))?.ok()
    };
    tools::require(&["git"])?;
    git(&origin, &["init", "-q"])?;
    let mut rng = Rng::new(5);
    for commit in 0..8u64 {
        for file in 0..60 {
            let path = origin.join(format!("dir-{}", rng.below(12)));
            std::fs::create_dir_all(&path)?;
            let len = rng.magnitude(20_000) as usize;
            let content = pattern_vec(mix(commit) ^ file, 0, len);
            std::fs::write(path.join(format!("file-{}", rng.below(100))), content)?;
        }
        git(&origin, &["add", "-A"])?;
        git(&origin, &["commit", "-q", "-m", "step"])?;
    }
    let origin_text = origin.to_str().context("a plain path")?;
    git(dir, &["clone", "-q", "--no-hardlinks", origin_text, "clone"])?;
    git(&clone, &["fsck", "--full", "--strict"])?;
    git(&clone, &["gc", "-q", "--aggressive", "--prune=now"])?;
    git(&clone, &["fsck", "--full", "--strict"])?;
    git(&origin, &["gc", "-q"])?;
    let changed = git(&clone, &["status", "--porcelain"])?.stdout;
    ensure!(changed.is_empty(), "the work tree changed by itself: {changed}");
    Ok(())
}

/// Fills a directory with `count` empty files and removes every fifth; [`large_directory_check`]
/// tells whether the rest is there.
pub fn large_directory(dir: &Path, count: u32) -> Result<()> {
    let large = dir.join("large");
    std::fs::create_dir(&large)?;
    for index in 0..count {
        let mode = Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(CWD, large.join(entry(index)), FileType::RegularFile, mode, 0)
            .with_context(|| format!("entry {index}"))?;
    }
    for index in (0..count).step_by(5) {
        std::fs::remove_file(large.join(entry(index)))?;
    }
    large_directory_check(dir, count)
}

fn entry(index: u32) -> String {
    format!("entry-{index:06}-{}", "y".repeat((index % 17) as usize))
}

/// Lists the directory and looks some names up.
pub fn large_directory_check(dir: &Path, count: u32) -> Result<()> {
    let large = dir.join("large");
    let mut seen = vec![0u8; count as usize];
    for child in std::fs::read_dir(&large)? {
        let name = child?.file_name();
        let name = name.to_str().context("an entry with a plain name")?;
        let index: u32 =
            name.get(6..12).and_then(|digits| digits.parse().ok()).context("a number")?;
        ensure!(name == entry(index), "unexpected entry {name}");
        seen[index as usize] += 1;
    }
    for (index, times) in seen.iter().enumerate() {
        let expected = u8::from(index % 5 != 0);
        ensure!(*times == expected, "entry {index} listed {times} times, expected {expected}");
    }
    let mut rng = Rng::new(3);
    for _ in 0..2000 {
        let index = rng.below(count.into()) as u32;
        let there = large.join(entry(index)).try_exists()?;
        ensure!(there != index.is_multiple_of(5), "lookup of entry {index} gives {there}");
    }
    Ok(())
}

/// Files that must survive a full file system, by name: seed and length.
#[derive(Debug, Clone, Default)]
pub struct Survivors(BTreeMap<PathBuf, (u64, usize)>);

impl Survivors {
    fn write(&mut self, path: PathBuf, seed: u64, len: usize) -> std::io::Result<()> {
        let file = File::create(&path)?;
        let outcome = file.write_all_at(&pattern_vec(seed, 0, len), 0);
        if outcome.is_ok() {
            // A write that was accepted has its space: its fsync must not run out of it.
            file.sync_all().map_err(|error| {
                std::io::Error::other(format!("fsync of an accepted write: {error}"))
            })?;
            self.0.insert(path, (seed, len));
        }
        outcome
    }

    fn rebased(&self, from: &Path, to: &Path) -> Survivors {
        let move_one = |path: &Path| to.join(path.strip_prefix(from).unwrap_or(path));
        Survivors(self.0.iter().map(|(path, what)| (move_one(path), *what)).collect())
    }

    fn check(&self) -> Result<()> {
        for (path, (seed, len)) in &self.0 {
            let found = std::fs::read(path).with_context(|| format!("{}", path.display()))?;
            ensure!(found == pattern_vec(*seed, 0, *len), "{} changed", path.display());
        }
        Ok(())
    }

    /// Checks the survivors on another mount of the same image.
    pub fn check_at(&self, from: &Path, to: &Path) -> Result<()> {
        self.rebased(from, to).check()
    }
}

/// An operation that takes space, for number `index`.
type Filler = fn(&Path, u64, &mut Survivors) -> std::io::Result<()>;

const FILLERS: &[(&str, Filler)] = &[
    ("small files", |dir, index, keep| keep.write(dir.join(format!("small-{index}")), index, 3000)),
    ("large files", |dir, index, keep| {
        keep.write(dir.join(format!("large-{index}")), index, 400_000)
    }),
    ("append", |dir, index, _| {
        let file = File::options().append(true).create(true).open(dir.join("append"))?;
        (&file).write_all(&pattern_vec(index, 0, 5000))
    }),
    ("empty files", |dir, index, _| File::create(dir.join(format!("empty-{index}"))).map(drop)),
    ("long names", |dir, index, _| {
        std::fs::hard_link(dir.join("base"), dir.join(format!("{index}-{}", "l".repeat(230))))
    }),
    ("directories", |dir, index, _| std::fs::create_dir(dir.join(format!("dir-{index}")))),
    ("symlinks", |dir, index, _| {
        std::os::unix::fs::symlink("s".repeat(900), dir.join(format!("symlink-{index}")))
    }),
    ("attributes", |dir, index, _| {
        let path = dir.join(format!("attribute-{index}"));
        File::create(&path)?;
        let value = pattern_vec(index, 0, 800);
        Ok(rustix::fs::setxattr(&path, "user.big", &value, XattrFlags::empty())?)
    }),
    ("preallocation", |dir, index, _| {
        let file = File::create(dir.join(format!("allocated-{index}")))?;
        Ok(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 200_000)?)
    }),
    ("holes", |dir, index, _| {
        let path = dir.join("sparse");
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        file.write_all_at(&pattern_vec(index, 0, 100), index * 40_960)
    }),
    ("renames", |dir, index, _| {
        let from = dir.join("rename-source");
        File::create(&from)?;
        Ok(rustix::fs::renameat(CWD, &from, CWD, dir.join(format!("{index}-{}", "r".repeat(240))))?)
    }),
    ("unnamed", |dir, index, keep| {
        let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
        let file = File::from(rustix::fs::open(dir, flags, Mode::from_raw_mode(0o600))?);
        file.write_all_at(&pattern_vec(index, 0, 20_000), 0)?;
        file.sync_all()?;
        use std::os::fd::AsRawFd;
        let fd = format!("/proc/self/fd/{}", file.as_raw_fd());
        let to = dir.join(format!("unnamed-{index}"));
        rustix::fs::linkat(CWD, fd, CWD, &to, AtFlags::SYMLINK_FOLLOW)?;
        keep.0.insert(to, (index, 20_000));
        Ok(())
    }),
];

/// Fills a small file system by each operation in turn until it says ENOSPC, and checks after each
/// that everything accepted before is there. `settle` runs when room has been made, before it is used
/// again. Returns what must be there after a remount.
pub fn fill_up(dir: &Path, settle: impl Fn() -> Result<()>) -> Result<Survivors> {
    const MAX_STEPS: u64 = 60_000;
    let mut base = Survivors::default();
    let keep = dir.join("keep");
    std::fs::create_dir(&keep)?;
    for index in 0..20 {
        base.write(keep.join(format!("{index}")), mix(index), 1000 + 2000 * index as usize)?;
    }
    for (round, (name, filler)) in FILLERS.iter().enumerate() {
        let full = dir.join(format!("full-{round}"));
        std::fs::create_dir(&full)?;
        File::create(full.join("base"))?;
        let mut filled = Survivors::default();
        let mut steps = 0;
        let error = loop {
            match filler(&full, steps, &mut filled) {
                Ok(()) => steps += 1,
                Err(error) => break error,
            }
            ensure!(steps < MAX_STEPS, "{name}: not full after {steps} steps");
        };
        if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
            // Block maps have no unwritten blocks.
            std::fs::remove_dir_all(&full)?;
            continue;
        }
        let full_kinds = [ErrorKind::StorageFull, ErrorKind::TooManyLinks];
        ensure!(full_kinds.contains(&error.kind()), "{name}: step {steps}: {error}");
        base.check().with_context(|| format!("{name}: what was there before"))?;
        filled.check().with_context(|| format!("{name}: what was accepted"))?;
        // Room again, and it must be usable.
        std::fs::remove_dir_all(&full).with_context(|| format!("{name}: removing"))?;
        settle()?;
        let again = dir.join(format!("again-{round}"));
        base.write(again, mix(round as u64), 30_000)
            .with_context(|| format!("{name}: writing after room was made"))?;
    }
    Ok(base)
}

/// Makes a small image for [`fill_up`].
pub fn make_small(image: &Path, mke2fs: &[&str]) -> Result<()> {
    crate::image::make_sparse(image, 12 << 20)?;
    run(command("mke2fs")?
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-N", "512", "-m", "0"])
        .args(mke2fs)
        .arg(image))?
    .ok()?;
    Ok(())
}
