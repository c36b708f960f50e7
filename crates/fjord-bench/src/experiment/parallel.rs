//! The workloads of *High-Performance Transaction Processing in Journaling File Systems* (parallel journaling,
//! FAST '18): many threads, and few or no calls that wait for the device.
//!
//! What is left in memory at the end of a turn is synced, and that counts; the files of its beginning are durable
//! before it.

use std::io;
use std::time::Instant;

use super::plan::Plan;
use crate::target::{BenchFile, BenchFs};
use crate::workload::{MAIL_BYTES, Sample, Sequence, filled, run_timed, sync_after_last, varmail};

/// What the threads do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parallel {
    /// Tokubench: files of 4 KiB are created, each thread in directories of its own.
    Create,
    /// Sysbench's random writes: blocks of a file per thread, with an fsync each 100, its default.
    RandomWrite,
    /// Filebench's varmail.
    Varmail,
    /// Filebench's fileserver: a file is created and written, one appended to, one read, one deleted.
    Fileserver,
}

impl Parallel {
    /// Bytes written by an operation, for MB/s.
    pub(super) fn unit_bytes(self) -> usize {
        match self {
            Parallel::Create | Parallel::RandomWrite => BLOCK_BYTES,
            Parallel::Varmail => 2 * MAIL_BYTES as usize,
            Parallel::Fileserver => FILE_BYTES + APPEND_BYTES,
        }
    }

    /// Runs `thread_count` threads for a turn.
    pub(super) fn run(
        self,
        fs: &dyn BenchFs,
        thread_count: usize,
        plan: &Plan,
    ) -> io::Result<Sample> {
        let root = format!("parallel-{thread_count}");
        fs.make_dir(&root)?;
        let began = Instant::now();
        let mut sample = match self {
            Parallel::Create => create(fs, &root, thread_count, plan),
            Parallel::RandomWrite => random_write(fs, &root, thread_count, plan),
            Parallel::Varmail => varmail(fs, &root, thread_count, plan.turn, plan.quick),
            Parallel::Fileserver => fileserver(fs, &root, thread_count, plan),
        }?;
        let prepared = began.elapsed().saturating_sub(sample.elapsed);
        fs.sync()?;
        sample.elapsed = began.elapsed() - prepared;
        fs.remove_tree(&root)?;
        fs.sync()?;
        Ok(sample)
    }
}

const BLOCK_BYTES: usize = 4096;
/// Files of one directory.
const DIR_FILE_COUNT: u64 = 1_000;
/// Size of a thread's file of random writes.
const RANDOM_FILE_BYTES: u64 = 16 << 20;
/// `--file-fsync-freq` of sysbench.
const FSYNC_EVERY: u64 = 100;
/// Files of each thread of the file server, their size, and what is appended.
const FILE_COUNT: u64 = 40;
const FILE_BYTES: usize = 128 << 10;
const APPEND_BYTES: usize = 16 << 10;

fn create(fs: &dyn BenchFs, root: &str, thread_count: usize, plan: &Plan) -> io::Result<Sample> {
    let block = [0x5a; BLOCK_BYTES];
    let start = |thread: usize| {
        let dir = format!("{root}/{thread}");
        fs.make_dir(&dir)?;
        Ok(dir)
    };
    run_timed(thread_count, plan.turn, start, |dir: &mut String, index| {
        let inner = format!("{dir}/{}", index / DIR_FILE_COUNT);
        if index % DIR_FILE_COUNT == 0 {
            fs.make_dir(&inner)?;
        }
        fs.create(&format!("{inner}/{index}"))?.write_at(0, &block)
    })
}

fn random_write(
    fs: &dyn BenchFs,
    root: &str,
    thread_count: usize,
    plan: &Plan,
) -> io::Result<Sample> {
    let block = [0xa5; BLOCK_BYTES];
    let start = |thread: usize| {
        let file = filled(fs, &format!("{root}/{thread}"), RANDOM_FILE_BYTES)?;
        Ok((file, Sequence::new(thread as u64 + 1)))
    };
    type State = (Box<dyn BenchFile>, Sequence);
    run_timed(thread_count, plan.turn, start, |(file, sequence): &mut State, index| {
        let place = sequence.next() % (RANDOM_FILE_BYTES / BLOCK_BYTES as u64);
        file.write_at(place * BLOCK_BYTES as u64, &block)?;
        if index % FSYNC_EVERY == FSYNC_EVERY - 1 { file.sync(false) } else { Ok(()) }
    })
}

/// A thread's files and their sizes.
struct Files {
    dir: String,
    sizes: Vec<u64>,
    sequence: Sequence,
}

impl Files {
    fn new(
        fs: &dyn BenchFs,
        dir: String,
        count: u64,
        data: &[u8],
        seed: usize,
    ) -> io::Result<Files> {
        fs.make_dir(&dir)?;
        for index in 0..count {
            fs.create(&format!("{dir}/{index}"))?.write_at(0, data)?;
        }
        let sizes = vec![data.len() as u64; count as usize];
        Ok(Files { dir, sizes, sequence: Sequence::new(seed as u64 + 1) })
    }

    fn pick(&mut self) -> usize {
        (self.sequence.next() % self.sizes.len() as u64) as usize
    }

    fn path(&self, index: usize) -> String {
        format!("{}/{index}", self.dir)
    }

    fn read(&self, fs: &dyn BenchFs, index: usize) -> io::Result<Box<dyn BenchFile>> {
        let mut file = fs.open(&self.path(index))?;
        file.read_at(0, &mut vec![0; self.sizes[index] as usize])?;
        Ok(file)
    }
}

fn fileserver(
    fs: &dyn BenchFs,
    root: &str,
    thread_count: usize,
    plan: &Plan,
) -> io::Result<Sample> {
    let data = vec![0x5a; FILE_BYTES];
    let count = if plan.quick { 2 } else { FILE_COUNT };
    let start = |thread: usize| {
        let files = Files::new(fs, format!("{root}/{thread}"), count, &data, thread)?;
        sync_after_last(fs, thread, thread_count)?;
        Ok(files)
    };
    run_timed(thread_count, plan.turn, start, |files: &mut Files, _| {
        let (gone, old, read) = (files.pick(), files.pick(), files.pick());
        fs.remove_file(&files.path(gone))?;
        fs.create(&files.path(gone))?.write_at(0, &data)?;
        files.sizes[gone] = data.len() as u64;
        if files.sizes[old] < 4 * FILE_BYTES as u64 {
            fs.open(&files.path(old))?.write_at(files.sizes[old], &data[..APPEND_BYTES])?;
            files.sizes[old] += APPEND_BYTES as u64;
        }
        files.read(fs, read).map(drop)
    })
}
