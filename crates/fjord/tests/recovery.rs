//! What a recovery reads: the log as far as it is used, the areas, and what their changes touch; never the
//! whole image.

use std::sync::Arc;

use fjord::{
    Device, FileDevice, FileOptions, Fs, FsyncPolicyKind, MkfsOptions, MountOptions, Result,
    ShutdownMode, inspect,
};

/// Sparse: its bitmaps and tables are never all read.
const IMAGE_BYTES: u64 = 30 << 30;
const FSYNCS: u64 = 302;

fn fsyncs(path: &std::path::Path, fsync: FsyncPolicyKind) -> Result<()> {
    let options = MountOptions { fsync, background_threads: false, ..MountOptions::default() };
    let fs = Fs::open(path, &options)?;
    for dir in 0..10 {
        fs.create_dir(format!("/dir-{dir}"))?;
    }
    fs.sync()?;
    for number in 0..FSYNCS {
        let path = format!("/dir-{}/file-{number}", number % 10);
        fs.write(&path, vec![number as u8; 5000])?;
        fs.open_file(&path)?.sync_all()?;
    }
    fs.shutdown(ShutdownMode::NoLogFlush)
}

#[test]
fn it_reads_the_log_the_areas_and_what_they_touch() -> Result<()> {
    for fsync in [
        FsyncPolicyKind::Compound,
        FsyncPolicyKind::Group,
        FsyncPolicyKind::FastCommit,
        FsyncPolicyKind::Ijournal,
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("image");
        std::fs::File::create(&path).and_then(|file| file.set_len(IMAGE_BYTES)).expect("a file");
        let made = MkfsOptions { features: "fast_commit".to_owned(), ..MkfsOptions::default() };
        let device = FileDevice::open(&path, &FileOptions::default()).expect("it opens");
        Fs::create_on(Arc::new(device), &made, &MountOptions::default())?.unmount()?;
        fsyncs(&path, fsync)?;

        let plan = inspect::log(&path)?.expect("a journal");
        let report = plan.report();
        let records = report.fast_commit_records.len() as u64;
        let i_transactions = plan.i_transactions()?.len() as u64;
        let areas = plan.area_table()?.map_or(0, |areas| areas.total_blocks() * 4096);
        let replayed = report.replayed_blocks as u64;
        let changes = u64::from(report.transactions) + records + i_transactions;
        assert!(changes >= FSYNCS, "{fsync:?}: {report:?}");
        let log_blocks = u64::from(plan.log_end() - plan.superblock().s_start.min(plan.log_end()));
        drop(plan);

        let device = FileDevice::open(&path, &FileOptions::default()).expect("it opens");
        let device = Arc::new(device);
        let options = MountOptions {
            read_only: true,
            recover_before_read_only: true,
            ..MountOptions::default()
        };
        let fs = Fs::open_device(device.clone(), &options)?;
        let read = device.stats().reads_total();
        assert_eq!(fs.read(format!("/dir-1/file-{}", FSYNCS - 1))?, vec![(FSYNCS - 1) as u8; 5000]);
        fs.unmount()?;

        let block = 4096;
        // The log and the homes of its blocks; of a fast commit or an i-transaction: inode, directory, bitmaps,
        // descriptor.
        let touched = (2 * log_blocks + replayed + 8 * (records + i_transactions)) * block;
        let fast_commits = if fsync == FsyncPolicyKind::FastCommit { 256 * block } else { 0 };
        // Superblock, descriptors of 240 groups, the table of the areas, some inodes.
        let fixed = 1 << 20;
        let bound = touched + areas + fast_commits + fixed;
        println!("{fsync:?}: {} bytes in {} reads, bound {bound}", read.bytes, read.request_count);
        assert!(
            read.bytes > 0 && read.bytes <= bound,
            "{fsync:?}: {} bytes, not {bound}",
            read.bytes
        );
    }
    Ok(())
}
