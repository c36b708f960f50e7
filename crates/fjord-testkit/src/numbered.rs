//! Writers of numbered records, each made durable before the next, and what a copy of one moment
//! must hold of them.
//!
//! The numbers live in the test's process. Before a copy is asked for, [`Writers::promised`] tells what every
//! fsync has promised so far; after it, [`Writers::attempted`] what can be in it at most. A copy is right when
//! [`verify`] finds each writer's tree between the two.

use std::sync::Arc;
use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::{self, JoinHandle},
};

use anyhow::{Result, ensure};

use crate::rng::{mix, pattern_vec};

/// Bytes of a record of a log.
const RECORD: usize = 700;
/// Blocks of the file that is overwritten.
const BLOCKS: u64 = 64;
const BLOCK: usize = 4096;

/// What one writer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Appends to a file, fsync.
    Append,
    /// Makes a file, fsync of it; each seventh time removes an older one, fsync of the directory.
    Create,
    /// Writes aside, fsync, renames over, fsync of the directory.
    Replace,
    /// Overwrites a block in place, fdatasync.
    Overwrite,
}

const KINDS: [Kind; 4] = [Kind::Append, Kind::Create, Kind::Replace, Kind::Overwrite];

/// How far each writer is.
pub type Numbers = [u64; KINDS.len()];

#[derive(Debug, Default)]
struct State {
    stop: AtomicBool,
    attempted: [AtomicU64; KINDS.len()],
    promised: [AtomicU64; KINDS.len()],
}

/// Threads at work below a directory, and one that writes and removes without fsyncs besides.
#[derive(Debug)]
pub struct Writers {
    state: Arc<State>,
    threads: Vec<JoinHandle<Result<()>>>,
}

fn numbers(from: &[AtomicU64; KINDS.len()]) -> Numbers {
    std::array::from_fn(|index| from[index].load(Ordering::SeqCst))
}

impl Writers {
    /// Starts them in new directories below `root`.
    pub fn start(root: &Path) -> Result<Writers> {
        let state = Arc::<State>::default();
        let mut threads = Vec::new();
        for (index, kind) in KINDS.into_iter().enumerate() {
            let dir = root.join(format!("{kind:?}"));
            fs::create_dir(&dir)?;
            File::open(root)?.sync_all()?;
            let state = state.clone();
            threads.push(thread::spawn(move || {
                for number in 1.. {
                    if state.stop.load(Ordering::SeqCst) {
                        break;
                    }
                    state.attempted[index].store(number, Ordering::SeqCst);
                    write(kind, &dir, number)?;
                    state.promised[index].store(number, Ordering::SeqCst);
                }
                Ok(())
            }));
        }
        let (noise, noise_state) = (root.join("noise"), state.clone());
        threads.push(thread::spawn(move || make_noise(&noise, &noise_state.stop)));
        Ok(Writers { state, threads })
    }

    /// The last record of each writer whose fsync has returned.
    pub fn promised(&self) -> Numbers {
        numbers(&self.state.promised)
    }

    /// The last record that each writer has begun.
    pub fn attempted(&self) -> Numbers {
        numbers(&self.state.attempted)
    }

    /// Waits until each writer has made `count` records more, or has failed.
    pub fn wait_for(&self, count: u64) {
        let before = self.promised();
        let is_behind = || (0..KINDS.len()).any(|i| self.promised()[i] < before[i] + count);
        while is_behind() && !self.threads.iter().any(JoinHandle::is_finished) {
            thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// Stops them; an error is one of the file system.
    pub fn stop(mut self) -> Result<()> {
        self.state.stop.store(true, Ordering::SeqCst);
        let join = |thread: JoinHandle<Result<()>>| thread.join().expect("a writer panicked");
        self.threads.drain(..).try_for_each(join)
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
    }
}

fn seed(kind: Kind, number: u64) -> u64 {
    mix(kind as u64) ^ mix(number)
}

/// The contents of a made or replaced file.
fn content(kind: Kind, number: u64) -> Vec<u8> {
    pattern_vec(seed(kind, number), 0, 1 + (mix(number) % 9000) as usize)
}

fn write(kind: Kind, dir: &Path, number: u64) -> Result<()> {
    match kind {
        Kind::Append => {
            let mut log = File::options().create(true).append(true).open(dir.join("log"))?;
            log.write_all(&pattern_vec(seed(kind, number), 0, RECORD))?;
            log.sync_all()?;
        }
        Kind::Create => {
            let mut file = File::create_new(dir.join(number.to_string()))?;
            file.write_all(&content(kind, number))?;
            file.sync_all()?;
            if number.is_multiple_of(7) {
                fs::remove_file(dir.join((number / 7).to_string()))?;
                File::open(dir)?.sync_all()?;
            }
        }
        Kind::Replace => {
            let aside = dir.join("aside");
            let mut file = File::create(&aside)?;
            file.write_all(&number.to_le_bytes())?;
            file.write_all(&content(kind, number))?;
            file.sync_all()?;
            fs::rename(aside, dir.join("current"))?;
            File::open(dir)?.sync_all()?;
        }
        Kind::Overwrite => {
            let path = dir.join("blocks");
            let file = File::options().create(true).truncate(false).write(true).open(path)?;
            let mut block = pattern_vec(seed(kind, number), 0, BLOCK);
            block[..8].copy_from_slice(&number.to_le_bytes());
            file.write_all_at(&block, number % BLOCKS * BLOCK as u64)?;
            file.sync_data()?;
        }
    }
    Ok(())
}

/// Large files that come, change and go without an fsync.
fn make_noise(dir: &Path, stop: &AtomicBool) -> Result<()> {
    fs::create_dir(dir)?;
    for round in 0_u64.. {
        if stop.load(Ordering::SeqCst) {
            break;
        }
        let path = dir.join((round % 5).to_string());
        let mut file =
            File::options().create(true).truncate(round % 3 == 0).write(true).open(path)?;
        file.seek(SeekFrom::Start(mix(round) % (1 << 20)))?;
        file.write_all(&pattern_vec(round, 0, 300_000))?;
        if round % 4 == 3 {
            fs::remove_file(dir.join(((round - 1) % 5).to_string()))?;
        }
        thread::sleep(std::time::Duration::from_millis(3));
    }
    Ok(())
}

/// Checks a tree: everything up to `promised` is there, and nothing after `attempted`.
pub fn verify(root: &Path, promised: &Numbers, attempted: &Numbers) -> Result<()> {
    for (index, kind) in KINDS.into_iter().enumerate() {
        let (dir, promised, attempted) =
            (root.join(format!("{kind:?}")), promised[index], attempted[index]);
        ensure!(promised > 0, "{kind:?} had no time");
        match kind {
            Kind::Append => verify_log(&dir, promised, attempted)?,
            Kind::Create => verify_made(&dir, promised, attempted)?,
            Kind::Replace => {
                let found = fs::read(dir.join("current"))?;
                let (number, rest) = found.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
                let number = u64::from_le_bytes(*number);
                let is_whole = rest == content(kind, number);
                ensure!(
                    is_whole && (promised..=attempted).contains(&number),
                    "replaced: {number}, whole: {is_whole}; {promised} promised, {attempted} begun"
                );
            }
            Kind::Overwrite => verify_blocks(&dir, promised, attempted)?,
        }
    }
    Ok(())
}

fn verify_log(dir: &Path, promised: u64, attempted: u64) -> Result<()> {
    let found = fs::read(dir.join("log"))?;
    let (low, high) = (promised as usize * RECORD, attempted as usize * RECORD);
    let len = found.len();
    ensure!((low..=high).contains(&len), "log: {len} bytes, {low} promised, {high} begun");
    for number in 1..=promised {
        let at = (number as usize - 1) * RECORD;
        let record = &found[at..at + RECORD];
        ensure!(record == pattern_vec(seed(Kind::Append, number), 0, RECORD), "log: {number}");
    }
    Ok(())
}

fn verify_made(dir: &Path, promised: u64, attempted: u64) -> Result<()> {
    for number in 1..=promised {
        let found = fs::read(dir.join(number.to_string())).ok();
        match found {
            Some(found) => {
                ensure!(found == content(Kind::Create, number), "made: {number} is another");
                ensure!(number * 7 > promised, "made: {number} was removed before {promised}");
            }
            None => ensure!(number * 7 <= attempted, "made: {number} of {promised} is missing"),
        }
    }
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u64>().ok());
        ensure!(number.is_some_and(|number| number <= attempted), "made: {name:?}");
    }
    Ok(())
}

fn verify_blocks(dir: &Path, promised: u64, attempted: u64) -> Result<()> {
    let found = fs::read(dir.join("blocks"))?;
    for index in 0..BLOCKS.min(promised + 1) {
        // The last promised number of this block.
        let Some(low) = (promised.saturating_sub(BLOCKS - 1)..=promised)
            .find(|number| number % BLOCKS == index && *number > 0)
        else {
            continue;
        };
        let block = found.get(index as usize * BLOCK..).unwrap_or_default();
        let Some(first) = block.first_chunk::<8>() else { anyhow::bail!("block {index} is gone") };
        let number = u64::from_le_bytes(*first);
        let whole = pattern_vec(seed(Kind::Overwrite, number), 0, BLOCK);
        ensure!(
            (low..=attempted).contains(&number)
                && number % BLOCKS == index
                && block.get(8..BLOCK) == Some(&whole[8..]),
            "block {index}: {number}; {low} promised, {attempted} begun"
        );
    }
    Ok(())
}
