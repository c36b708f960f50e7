//! Memory stays within the cache budget and a fixed allowance, whatever the size, the shape and the
//! count of files. One test, alone in its process: the peak of resident memory is the process's.
//!
//! `FJORD_MEMORY_MIB` sets the size of the large file (4096 for a long run).

use anyhow::{Context, Result, ensure};
use fjord::{Cred, Fs, InodeRef, MountOptions};
use fjord_testkit::{
    features::{self, FeatureSet},
    image::Scratch,
};

const CACHE_BYTES: u64 = 32 << 20;
/// What may come on top of the cache: code, stacks, tables, the pool's free buffers.
const ALLOWANCE_BYTES: u64 = 64 << 20;
const CHUNK_BYTES: usize = 1 << 20;

fn status_bytes(key: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix(key)).context("no such line")?;
    Ok(line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>()? << 10)
}

/// Checks the peak since the last call, and starts anew.
fn check_peak(what: &str) -> Result<()> {
    let (peak, now) = (status_bytes("VmHWM:")?, status_bytes("VmRSS:")?);
    eprintln!("{what}: peak {} MiB, now {} MiB", peak >> 20, now >> 20);
    ensure!(peak <= CACHE_BYTES + ALLOWANCE_BYTES, "{what}: peak of {peak} bytes");
    std::fs::write("/proc/self/clear_refs", "5")?;
    Ok(())
}

fn write_large(file: &InodeRef, len: u64) -> Result<()> {
    let chunk: Vec<u8> = (0..CHUNK_BYTES).map(|i| (i % 251) as u8).collect();
    for offset in (0..len).step_by(CHUNK_BYTES) {
        file.write(offset, &chunk)?;
    }
    Ok(file.fsync(false)?)
}

fn read_large(file: &InodeRef, len: u64, step: usize) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    for offset in (0..len).step_by(step) {
        let count = file.read(offset, &mut chunk[..step.min(CHUNK_BYTES)])?;
        ensure!(count > 0, "nothing at {offset}");
    }
    Ok(())
}

/// Every other block, so that each is an extent of its own.
fn write_fragmented(file: &InodeRef, len: u64, stride: u64) -> Result<()> {
    for offset in (0..len).step_by(stride as usize) {
        file.write(offset, &[7; 4096])?;
    }
    Ok(file.fsync(false)?)
}

fn run(set: &str, large: u64, file_count: u32) -> Result<()> {
    let scratch = Scratch::new("memory")?;
    let img = scratch.join("image");
    let fragments = large / 4;
    let size = large * 2 + u64::from(file_count) * 8192 + (64 << 20);
    let set = features::by_name(set).context("a set of the table")?;
    FeatureSet { size_bytes: size, ..*set }.make(&img)?;
    let options = MountOptions { cache_size_bytes: CACHE_BYTES, ..Default::default() };
    let fs = Fs::open(&img, &options)?;
    let root = fs.root()?;
    check_peak("open")?;

    let file = root.create(b"large", 0o644, &Cred::root())?;
    write_large(&file, large)?;
    check_peak("sequential write")?;
    read_large(&file, large, CHUNK_BYTES)?;
    check_peak("sequential read")?;
    // One page in each chunk of the page cache.
    read_large(&file, large, 256 << 10)?;
    check_peak("sparse read")?;

    let file = root.create(b"fragmented", 0o644, &Cred::root())?;
    write_fragmented(&file, fragments, 8192)?;
    check_peak("fragmented write")?;
    read_large(&file, fragments - 4096, 4096)?;
    check_peak("fragmented read")?;

    for dir in 0..file_count.div_ceil(1000) {
        let parent = root.mkdir(format!("dir-{dir}").as_bytes(), 0o755, &Cred::root())?;
        for index in 0..1000 {
            let name = format!("a-file-with-a-name-{index}");
            parent.create(name.as_bytes(), 0o644, &Cred::root())?.write(0, b"small")?;
        }
    }
    check_peak("small files")?;
    // A few pages that come and go do not fill the cache, nor make it look for room.
    for round in 0..file_count {
        let name = format!("short-{round}");
        let file = root.create(name.as_bytes(), 0o644, &Cred::root())?;
        file.write(0, b"short")?;
        root.unlink(name.as_bytes())?;
    }
    check_peak("short-lived files")?;
    drop((file, root));
    fs.unmount()?;
    drop(fs);
    eprintln!("after the unmount: {} MiB", status_bytes("VmRSS:")? >> 20);
    Ok(())
}

#[test]
fn memory_stays_within_the_budget() -> Result<()> {
    let mib = std::env::var("FJORD_MEMORY_MIB").ok().and_then(|text| text.parse().ok());
    let large = mib.unwrap_or(256) << 20;
    let file_count = u32::try_from(large >> 14)?;
    run("default", large, file_count)?;
    run("block-1k", large / 4, file_count / 4)
}
