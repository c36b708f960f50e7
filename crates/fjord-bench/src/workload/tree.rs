//! Many small files: unpacked as tar does, and created only to be unlinked.

use std::io;
use std::time::Instant;

use super::{Sample, Sequence, new_histogram};
use crate::target::BenchFs;

const FILES_PER_DIR: u32 = 100;

/// A size as in a source tree: most below 8 KiB, a few up to 64 KiB.
fn file_bytes(sequence: &mut Sequence) -> usize {
    let bits = 7 + sequence.next() % 7;
    let base = 1u64 << bits;
    let large = if sequence.next().is_multiple_of(50) { 4 } else { 1 };
    ((base + sequence.next() % base) * large) as usize
}

/// Creates directories and files with their contents, then syncs the file system.
pub(super) fn untar(fs: &dyn BenchFs, file_count: u32, round: u32) -> io::Result<Sample> {
    let root = format!("tree-{round}");
    let data: Vec<u8> = (0..128 << 10).map(|i: u32| (i % 249) as u8).collect();
    let mut sequence = Sequence::new(7);
    let mut latency = new_histogram();
    let began = Instant::now();
    fs.make_dir(&root)?;
    for index in 0..file_count {
        let dir = format!("{root}/{:04}", index / FILES_PER_DIR);
        if index % FILES_PER_DIR == 0 {
            fs.make_dir(&dir)?;
        }
        let before = Instant::now();
        let mut file = fs.create(&format!("{dir}/file-{index}.txt"))?;
        file.write_at(0, &data[..file_bytes(&mut sequence)])?;
        drop(file);
        latency.saturating_record(before.elapsed().as_nanos() as u64);
    }
    fs.sync()?;
    let elapsed = began.elapsed();
    fs.remove_tree(&root)?;
    fs.sync()?;
    Ok(Sample { latency, ..Sample::without_latency(f64::from(file_count), elapsed) })
}

/// Creates and unlinks one file after the other in one directory.
pub(super) fn create_unlink(fs: &dyn BenchFs, file_count: u32, round: u32) -> io::Result<Sample> {
    let root = format!("unlink-{round}");
    fs.make_dir(&root)?;
    let mut latency = new_histogram();
    let began = Instant::now();
    for index in 0..file_count {
        let before = Instant::now();
        let name = format!("{root}/file-{index}");
        drop(fs.create(&name)?);
        fs.remove_file(&name)?;
        latency.saturating_record(before.elapsed().as_nanos() as u64);
    }
    let elapsed = began.elapsed();
    fs.remove_tree(&root)?;
    Ok(Sample { latency, ..Sample::without_latency(f64::from(file_count), elapsed) })
}
