//! The fsync workloads: 4 KiB written and made durable, again and again; and one that leaves that to the file system.

use std::io;
use std::time::{Duration, Instant};

use super::{Sample, Sequence, run_timed};
use crate::target::{BenchFile, BenchFs};

const BLOCK_BYTES: usize = 4096;
/// Size of each file that is overwritten.
const OVERWRITE_FILE_BYTES: u64 = 16 << 20;
/// Size of the file that is overwritten without syncs.
const RANDOM_FILE_BYTES: u64 = 64 << 20;

/// Appends to a new file per thread, each block followed by fsync.
pub(super) fn append(
    fs: &dyn BenchFs,
    thread_count: usize,
    turn: Duration,
    round: u32,
) -> io::Result<Sample> {
    let name = |thread: usize| format!("append-{round}-{thread}");
    let block = [0x5a; BLOCK_BYTES];
    let start = |thread| {
        let mut file = fs.create(&name(thread))?;
        file.write_at(0, &block)?;
        file.sync(false)?;
        Ok(file)
    };
    let sample = run_timed(thread_count, turn, start, |file: &mut Box<dyn BenchFile>, index| {
        file.write_at((index + 1) * BLOCK_BYTES as u64, &block)?;
        file.sync(false)
    })?;
    (0..thread_count).try_for_each(|thread| fs.remove_file(&name(thread)))?;
    fs.sync()?;
    Ok(sample)
}

/// Creates one file after the other in a directory per thread, each written and fsynced.
pub(super) fn create(
    fs: &dyn BenchFs,
    thread_count: usize,
    turn: Duration,
    round: u32,
) -> io::Result<Sample> {
    let root = format!("create-{round}");
    fs.make_dir(&root)?;
    let block = [0x5a; BLOCK_BYTES];
    let start = |thread| {
        let dir = format!("{root}/{thread}");
        fs.make_dir(&dir)?;
        Ok(dir)
    };
    let sample = run_timed(thread_count, turn, start, |dir: &mut String, index| {
        let mut file = fs.create(&format!("{dir}/{index}"))?;
        file.write_at(0, &block)?;
        file.sync(false)
    })?;
    fs.remove_tree(&root)?;
    fs.sync()?;
    Ok(sample)
}

/// Makes a file of so many bytes, whole MiBs, all written and durable.
pub(crate) fn filled(fs: &dyn BenchFs, path: &str, bytes: u64) -> io::Result<Box<dyn BenchFile>> {
    let mut file = fs.create(path)?;
    let chunk = vec![1; 1 << 20];
    for offset in (0..bytes).step_by(chunk.len()) {
        file.write_at(offset, &chunk)?;
    }
    file.sync(false)?;
    Ok(file)
}

/// Overwrites random blocks of a file per thread, each followed by fdatasync, or by fsync without
/// `data_only`.
pub(crate) fn overwrite(
    fs: &dyn BenchFs,
    thread_count: usize,
    turn: Duration,
    data_only: bool,
) -> io::Result<Sample> {
    let block = [0xa5; BLOCK_BYTES];
    let start = |thread: usize| {
        let name = format!("overwrite-{thread}");
        let file = match fs.open(&name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                filled(fs, &name, OVERWRITE_FILE_BYTES)?
            }
            Err(error) => return Err(error),
        };
        Ok((file, Sequence::new(thread as u64 + 1)))
    };
    run_timed(thread_count, turn, start, |(file, sequence), _| {
        let index = sequence.next() % (OVERWRITE_FILE_BYTES / BLOCK_BYTES as u64);
        file.write_at(index * BLOCK_BYTES as u64, &block)?;
        file.sync(data_only)
    })
}

/// Overwrites random blocks of a file. The sync at the end counts.
pub(super) fn random_write(fs: &dyn BenchFs, turn: Duration) -> io::Result<Sample> {
    let name = "random-write";
    let block = [0xa5; BLOCK_BYTES];
    let mut file = filled(fs, name, RANDOM_FILE_BYTES)?;
    fs.sync()?;
    let mut sequence = Sequence::new(1);
    let began = Instant::now();
    let mut count = 0_u64;
    while count == 0 || began.elapsed() < turn {
        let index = sequence.next() % (RANDOM_FILE_BYTES / BLOCK_BYTES as u64);
        file.write_at(index * BLOCK_BYTES as u64, &block)?;
        count += 1;
    }
    fs.sync()?;
    let sample = Sample::without_latency(count as f64, began.elapsed());
    drop(file);
    fs.remove_file(name)?;
    fs.sync()?;
    Ok(sample)
}
