//! Large transfers: one file written or read in sequence, and files read side by side.

use std::io;
use std::sync::Barrier;
use std::time::Instant;

use super::Sample;
use crate::target::{BenchFile, BenchFs};

const CHUNK_BYTES: usize = 1 << 20;
/// Reads of the parallel workload.
const PARALLEL_CHUNK_BYTES: usize = 128 << 10;
/// Size of each file of the parallel workload.
pub(crate) const READ_FILE_BYTES: u64 = 32 << 20;
/// Known to the byte targets as the file with the whole range.
pub(crate) const LARGE_FILE: &str = "large";

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

fn write_file(fs: &dyn BenchFs, name: &str, len: u64) -> io::Result<()> {
    let mut file = fs.create(name)?;
    // Not all alike, so that nothing below compresses or skips it.
    let mut chunk: Vec<u8> = (0..CHUNK_BYTES).map(|i| (i % 251) as u8).collect();
    for offset in (0..len).step_by(CHUNK_BYTES) {
        let take = (len - offset).min(CHUNK_BYTES as u64) as usize;
        chunk[..8].copy_from_slice(&offset.to_le_bytes());
        file.write_at(offset, &chunk[..take])?;
    }
    file.sync(false)
}

fn read_chunks(file: &mut dyn BenchFile, len: u64, chunk_bytes: usize) -> io::Result<()> {
    let mut chunk = vec![0; chunk_bytes];
    for offset in (0..len).step_by(chunk_bytes) {
        let take = (len - offset).min(chunk_bytes as u64) as usize;
        file.read_at(offset, &mut chunk[..take])?;
    }
    Ok(())
}

/// Writes the large file anew, fsync included.
pub(super) fn write(fs: &dyn BenchFs, len: u64) -> io::Result<Sample> {
    let began = Instant::now();
    write_file(fs, LARGE_FILE, len)?;
    Ok(Sample::without_latency(mib(len), began.elapsed()))
}

/// Makes sure that the large file is there.
pub(super) fn prepare_large(fs: &dyn BenchFs, len: u64) -> io::Result<()> {
    prepare(fs, LARGE_FILE, len)
}

fn prepare(fs: &dyn BenchFs, name: &str, len: u64) -> io::Result<()> {
    let complete = |mut file: Box<dyn BenchFile>| file.read_at(len - 4096, &mut [0; 4096]);
    match fs.open(name).and_then(complete) {
        Ok(()) => Ok(()),
        Err(_) => write_file(fs, name, len),
    }
}

/// Reads the large file.
pub(super) fn read(fs: &dyn BenchFs, len: u64) -> io::Result<Sample> {
    let began = Instant::now();
    read_chunks(&mut *fs.open(LARGE_FILE)?, len, CHUNK_BYTES)?;
    Ok(Sample::without_latency(mib(len), began.elapsed()))
}

/// Makes sure that the files of the parallel reads are there.
pub(super) fn prepare_many(fs: &dyn BenchFs, file_count: usize) -> io::Result<()> {
    (0..file_count).try_for_each(|index| prepare(fs, &format!("read-{index}"), READ_FILE_BYTES))
}

/// Each thread reads its file once.
pub(super) fn read_parallel(fs: &dyn BenchFs, thread_count: usize) -> io::Result<Sample> {
    let start = Barrier::new(thread_count + 1);
    let (results, began) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..thread_count)
            .map(|index| {
                let start = &start;
                scope.spawn(move || {
                    let file = fs.open(&format!("read-{index}"));
                    start.wait();
                    read_chunks(&mut *file?, READ_FILE_BYTES, PARALLEL_CHUNK_BYTES)
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        let join = |thread: std::thread::ScopedJoinHandle<'_, io::Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("panic")))
        };
        (threads.into_iter().map(join).collect::<Vec<io::Result<()>>>(), began)
    });
    let elapsed = began.elapsed();
    results.into_iter().collect::<io::Result<()>>()?;
    Ok(Sample::without_latency(mib(READ_FILE_BYTES * thread_count as u64), elapsed))
}
