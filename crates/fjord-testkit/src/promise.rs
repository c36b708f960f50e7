//! A mixed workload with fsyncs, and a ledger of what each returned fsync promised.
//!
//! The ledger lives outside the file system under test, so that it survives its death. After
//! recovery [`Ledger::verify`] looks at the tree: each name must be in one of the states it had
//! since its last promise, each append-only file must hold at least what was promised and after
//! that only its own bytes or zeros, each block of an overwritten file one whole version at least as new as promised.
//!
//! Not verified: that the unsynced states of different names come from one moment.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Result, bail, ensure};

use crate::rng::{Rng, mix, pattern_vec};

const BLOCK: usize = 4096;
const BLOCKS: usize = 48;
const NAMES: usize = 12;
const LOGS: usize = 3;

/// What a name may be after a crash.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Absent,
    /// A file with the pattern of the seed; not durable: any prefix of it, with zeros for
    /// what is missing.
    File {
        seed: u64,
        len: u64,
        durable: bool,
        tag: Option<u8>,
    },
    Directory,
}

impl State {
    /// The same file, whatever its attributes.
    fn same_file(&self, other: &State) -> bool {
        match (self, other) {
            (State::File { seed, len, .. }, State::File { seed: seed2, len: len2, .. }) => {
                (seed, len) == (seed2, len2)
            }
            _ => self == other,
        }
    }
}

/// States of a name since the last promise; the last is the current one.
#[derive(Debug, Clone)]
struct Name {
    history: Vec<State>,
}

#[derive(Debug, Clone, Default)]
struct Log {
    created: bool,
    /// The name was promised.
    promised_name: bool,
    promised: u64,
    attempted: u64,
}

#[derive(Debug, Clone, Default)]
struct Blocks {
    promised: Vec<u64>,
    attempted: Vec<u64>,
}

/// What one worker did and was promised.
#[derive(Debug, Clone)]
pub struct Ledger {
    worker: u32,
    seed: u64,
    dir: String,
    /// The worker's directory itself was promised.
    promised_dir: bool,
    names: Vec<Name>,
    logs: Vec<Log>,
    blocks: Blocks,
    /// Successful fsyncs.
    pub fsyncs: u64,
    /// Successful operations.
    pub operations: u64,
}

struct Worker<'a> {
    ledger: Ledger,
    root: PathBuf,
    rng: Rng,
    stop: &'a AtomicBool,
}

/// Runs `workers` threads below `root` until `stop` is set or the file system dies; returns their
/// ledgers. An error before `stop` is set is a failure of the file system.
pub fn run(
    root: &Path,
    name: &str,
    seed: u64,
    workers: u32,
    stop: &AtomicBool,
) -> Result<Vec<Ledger>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|number| scope.spawn(move || work(root, name, seed, number, stop)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a worker panicked")).collect()
    })
}

/// Runs `workers` threads below `root` while `act` runs, and returns their ledgers and its result. `act` sets the
/// flag before anything makes operations fail.
pub fn under_load<T>(
    root: &Path,
    seed: u64,
    workers: u32,
    act: impl FnOnce(&AtomicBool) -> Result<T>,
) -> Result<(Vec<Ledger>, T)> {
    let stop = AtomicBool::new(false);
    let (ledgers, done) = std::thread::scope(|scope| {
        let stop = &stop;
        let running = scope.spawn(move || run(root, "load", seed, workers, stop));
        let done = act(stop);
        stop.store(true, Ordering::SeqCst);
        (running.join().expect("the workload does not panic"), done)
    });
    let (ledgers, done) = (ledgers?, done?);
    let fsyncs: u64 = ledgers.iter().map(|ledger| ledger.fsyncs).sum();
    ensure!(fsyncs > 0, "the workload has no promise");
    Ok((ledgers, done))
}

fn work(root: &Path, name: &str, seed: u64, number: u32, stop: &AtomicBool) -> Result<Ledger> {
    let seed = mix(seed ^ mix(u64::from(number)));
    let ledger = Ledger {
        worker: number,
        seed,
        dir: format!("{name}-{number}"),
        promised_dir: false,
        names: vec![Name { history: vec![State::Absent] }; NAMES],
        logs: vec![Log::default(); LOGS],
        blocks: Blocks { promised: vec![0; BLOCKS], attempted: vec![0; BLOCKS] },
        fsyncs: 0,
        operations: 0,
    };
    let mut worker = Worker { ledger, root: root.to_owned(), rng: Rng::new(seed), stop };
    let outcome = worker.run();
    // Read after the outcome: the killer sets the flag before it kills.
    if let Err(error) = outcome
        && !stop.load(Ordering::SeqCst)
    {
        bail!("worker {number}: {error} while the file system should be alive");
    }
    Ok(worker.ledger)
}

impl Worker<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(&self.ledger.dir).join(name)
    }

    fn run(&mut self) -> io::Result<()> {
        std::fs::create_dir(self.path(""))?;
        File::open(&self.root)?.sync_all()?;
        self.ledger.promised_dir = true;
        while !self.stop.load(Ordering::SeqCst) {
            match self.rng.below(16) {
                0..=4 => self.append()?,
                5..=7 => self.overwrite()?,
                8 | 9 => self.create()?,
                10 => self.replace()?,
                11 => self.remove()?,
                12 => self.rename()?,
                13 => self.attribute()?,
                14 => self.directory()?,
                _ => self.sync_directory()?,
            }
            self.ledger.operations += 1;
        }
        Ok(())
    }

    /// An fsync of one kind or the other.
    fn sync(&mut self, file: &File) -> io::Result<()> {
        if self.rng.percent(50) {
            file.sync_data()?
        } else {
            file.sync_all()?
        }
        self.ledger.fsyncs += 1;
        Ok(())
    }

    fn append(&mut self) -> io::Result<()> {
        let index = self.rng.below(LOGS as u64) as usize;
        let seed = mix(self.ledger.seed ^ index as u64);
        let len = self.rng.range(1, 9000);
        self.ledger.logs[index].created = true;
        let path = self.path(&format!("log-{index}"));
        let file = File::options().append(true).create(true).open(path)?;
        let offset = self.ledger.logs[index].attempted;
        self.ledger.logs[index].attempted = offset + len;
        io::Write::write_all(&mut &file, &pattern_vec(seed, offset, len as usize))?;
        if self.rng.percent(60) {
            self.sync(&file)?;
            let log = &mut self.ledger.logs[index];
            log.promised = log.attempted;
            log.promised_name = true;
        }
        Ok(())
    }

    fn overwrite(&mut self) -> io::Result<()> {
        let file =
            File::options().write(true).create(true).truncate(false).open(self.path("blocks"))?;
        for _ in 0..self.rng.range(1, 6) {
            let block = self.rng.below(BLOCKS as u64) as usize;
            let version = self.ledger.blocks.attempted[block] + 1;
            self.ledger.blocks.attempted[block] = version;
            let data = block_content(self.ledger.seed, block, version);
            file.write_all_at(&data, (block * BLOCK) as u64)?;
        }
        if self.rng.percent(60) {
            self.sync(&file)?;
            self.ledger.blocks.promised.clone_from(&self.ledger.blocks.attempted);
        }
        Ok(())
    }

    fn pick_name(&mut self) -> (usize, PathBuf) {
        let index = self.rng.below(NAMES as u64) as usize;
        (index, self.path(&format!("name-{index}")))
    }

    fn push(&mut self, index: usize, state: State) {
        self.ledger.names[index].history.push(state);
    }

    fn current(&self, index: usize) -> &State {
        self.ledger.names[index].history.last().expect("a history is never empty")
    }

    /// The current state was fsynced: earlier ones cannot come back.
    fn promise(&mut self, index: usize) {
        let mut last = self.current(index).clone();
        if let State::File { durable, .. } = &mut last {
            *durable = true;
        }
        self.ledger.names[index].history = vec![last];
    }

    /// States of a name since it last came to name another file: an fsync of the directory says
    /// which file a name means, not which attributes that file has.
    fn alternatives(&self, index: usize) -> Vec<State> {
        let history = &self.ledger.names[index].history;
        let last = self.current(index);
        let start = history.iter().rposition(|state| !state.same_file(last)).map_or(0, |at| at + 1);
        history[start..].to_vec()
    }

    fn create(&mut self) -> io::Result<()> {
        let (index, path) = self.pick_name();
        if *self.current(index) != State::Absent {
            return Ok(());
        }
        let (seed, len) = (self.rng.next_u64(), self.rng.magnitude(40_000));
        self.push(index, State::File { seed, len, durable: false, tag: None });
        let file = File::options().write(true).create_new(true).mode(0o640).open(path)?;
        file.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
        if self.rng.percent(60) {
            self.sync(&file)?;
            self.promise(index);
        }
        Ok(())
    }

    /// Write aside, fsync, rename over, fsync the directory.
    fn replace(&mut self) -> io::Result<()> {
        let (index, path) = self.pick_name();
        if *self.current(index) == State::Directory {
            return Ok(());
        }
        let (seed, len) = (self.rng.next_u64(), self.rng.magnitude(40_000));
        let aside = self.path("aside");
        let file = File::options().write(true).create(true).truncate(true).open(&aside)?;
        file.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
        self.sync(&file)?;
        self.push(index, State::File { seed, len, durable: true, tag: None });
        std::fs::rename(aside, path)?;
        self.sync_directory()
    }

    fn remove(&mut self) -> io::Result<()> {
        let (index, path) = self.pick_name();
        match self.current(index) {
            State::Absent => return Ok(()),
            State::Directory => {
                self.push(index, State::Absent);
                std::fs::remove_dir(path)?;
            }
            State::File { .. } => {
                self.push(index, State::Absent);
                std::fs::remove_file(path)?;
            }
        }
        if self.rng.percent(50) { self.sync_directory() } else { Ok(()) }
    }

    fn rename(&mut self) -> io::Result<()> {
        let (from, from_path) = self.pick_name();
        let (to, to_path) = self.pick_name();
        let moved = self.alternatives(from);
        if from == to
            || !matches!(self.current(from), State::File { .. })
            || *self.current(to) == State::Directory
        {
            return Ok(());
        }
        self.push(from, State::Absent);
        self.ledger.names[to].history.extend(moved);
        std::fs::rename(from_path, to_path)?;
        if self.rng.percent(50) { self.sync_directory() } else { Ok(()) }
    }

    fn attribute(&mut self) -> io::Result<()> {
        let (index, path) = self.pick_name();
        let State::File { seed, len, durable, .. } = *self.current(index) else { return Ok(()) };
        let tag = self.rng.next_u64() as u8;
        self.push(index, State::File { seed, len, durable, tag: Some(tag) });
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&path, "user.tag", &[tag; 40], flags)?;
        if self.rng.percent(60) {
            File::open(&path)?.sync_all()?;
            self.ledger.fsyncs += 1;
            self.promise(index);
        }
        Ok(())
    }

    fn directory(&mut self) -> io::Result<()> {
        let (index, path) = self.pick_name();
        if *self.current(index) != State::Absent {
            return Ok(());
        }
        self.push(index, State::Directory);
        std::fs::create_dir(&path)?;
        if self.rng.percent(50) {
            File::open(&path)?.sync_all()?;
            self.ledger.fsyncs += 1;
            self.promise(index);
        }
        Ok(())
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        File::open(self.path(""))?.sync_all()?;
        self.ledger.fsyncs += 1;
        for index in 0..NAMES {
            self.ledger.names[index].history = self.alternatives(index);
        }
        Ok(())
    }
}

/// A block of the overwritten file; version 0 was never written.
fn block_content(seed: u64, block: usize, version: u64) -> Vec<u8> {
    pattern_vec(mix(seed ^ mix((block as u64) << 32 | version)), 0, BLOCK)
}

impl Ledger {
    /// Its number among the workers.
    pub fn worker(&self) -> u32 {
        self.worker
    }

    /// Compares a recovered tree with the promises.
    pub fn verify(&self, root: &Path) -> Result<()> {
        let dir = root.join(&self.dir);
        if !dir.exists() {
            ensure!(!self.promised_dir, "{}: the promised directory is gone", self.dir);
            return Ok(());
        }
        let mut wrong = Vec::new();
        for (index, log) in self.logs.iter().enumerate() {
            self.verify_log(&dir, index, log, &mut wrong)?;
        }
        self.verify_blocks(&dir, &mut wrong)?;
        for (index, name) in self.names.iter().enumerate() {
            self.verify_name(&dir, index, name, &mut wrong)?;
        }
        ensure!(wrong.is_empty(), "worker {}: {}", self.worker, wrong.join("\n  "));
        Ok(())
    }

    fn verify_log(
        &self,
        dir: &Path,
        index: usize,
        log: &Log,
        wrong: &mut Vec<String>,
    ) -> Result<()> {
        let path = dir.join(format!("log-{index}"));
        if !path.exists() {
            if log.promised_name {
                wrong.push(format!("log-{index} is gone, {} bytes were promised", log.promised));
            }
            return Ok(());
        }
        let found = std::fs::read(path)?;
        let len = found.len() as u64;
        if !log.created || len < log.promised || len > log.attempted {
            let (low, high) = (log.promised, log.attempted);
            wrong.push(format!("log-{index}: {len} bytes, promised {low}, written {high}"));
        }
        let expected = pattern_vec(mix(self.seed ^ index as u64), 0, found.len());
        // The size may run ahead of unpromised data; what is not there yet reads as zeros.
        let wrong_at = |at: &usize| {
            found[*at] != expected[*at] && ((*at as u64) < log.promised || found[*at] != 0)
        };
        if let Some(at) = (0..found.len()).find(wrong_at) {
            let zeros = found[at..].iter().take_while(|byte| **byte == 0).count();
            wrong.push(format!(
                "log-{index}: wrong at byte {at} of {len} (promised {}), {zeros} zeros there",
                log.promised
            ));
        }
        Ok(())
    }

    fn verify_blocks(&self, dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
        let path = dir.join("blocks");
        let found = if path.exists() { std::fs::read(path)? } else { Vec::new() };
        for block in 0..BLOCKS {
            let (promised, attempted) = (self.blocks.promised[block], self.blocks.attempted[block]);
            let start = (block * BLOCK).min(found.len());
            let content = &found[start..(start + BLOCK).min(found.len())];
            // Version 0: a hole or nothing.
            let matches = |version: u64| match version {
                0 => content.iter().all(|byte| *byte == 0),
                _ => content == block_content(self.seed, block, version),
            };
            if !(promised..=attempted).any(matches) {
                let older = (0..promised).rev().find(|version| matches(*version));
                wrong.push(format!(
                    "block {block}: promised version {promised}, written {attempted}, found {}",
                    older.map_or("none of its versions".to_owned(), |v| format!("version {v}"))
                ));
            }
        }
        Ok(())
    }

    fn verify_name(
        &self,
        dir: &Path,
        index: usize,
        name: &Name,
        wrong: &mut Vec<String>,
    ) -> Result<()> {
        let path = dir.join(format!("name-{index}"));
        let found = match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => Some(other?),
        };
        let content = match &found {
            Some(meta) if meta.is_file() => Some(std::fs::read(&path)?),
            _ => None,
        };
        let mut tag = [0u8; 64];
        let tag = match rustix::fs::getxattr(&path, "user.tag", &mut tag[..]) {
            Ok(len) => Some((tag[0], len == 40 && tag[..40].iter().all(|byte| *byte == tag[0]))),
            Err(_) => None,
        };
        let fits = |state: &State| match (state, &found, &content) {
            (State::Absent, None, _) => true,
            (State::Directory, Some(meta), _) => meta.is_dir(),
            (State::File { seed, len, durable, tag: want }, _, Some(content)) => {
                let found_len = content.len() as u64;
                let expected = pattern_vec(*seed, 0, content.len());
                let right = if *durable {
                    found_len == *len && *content == expected
                } else {
                    let each = content.iter().zip(&expected);
                    found_len <= *len
                        && each.clone().all(|(found, want)| found == want || *found == 0)
                };
                right && want.map(|tag| (tag, true)) == tag
            }
            _ => false,
        };
        if !name.history.iter().any(fits) {
            let is = found.map_or("absent".to_owned(), |meta| {
                format!("{:?}, {} bytes, tag {tag:?}", meta.file_type(), meta.len())
            });
            wrong.push(format!("name-{index} is {is}; possible: {:?}", name.history));
        }
        Ok(())
    }
}
