//! Small files that are written back together: what lies beside each other is one request, and a bad block costs
//! no file but its own.

use std::sync::Arc;

use fjord::{Device, Fs, MemDevice, MkfsOptions, MountOptions, Result, Scheduler};
use fjord_block::{Buf, FaultDevice, IoOp, Request};

const FILES: usize = 50;
/// Five blocks of a kilobyte each.
const BYTES: usize = 5000;

fn path(number: usize) -> String {
    format!("/dir/file-{number}")
}

fn write_all(fs: &Fs, content: u8) -> Result<()> {
    (0..FILES).try_for_each(|number| fs.write(path(number), vec![content; BYTES]))
}

fn options() -> MountOptions {
    let scheduler = Scheduler::Direct;
    MountOptions { background_threads: false, scheduler, ..MountOptions::default() }
}

/// With so many small files, on disk.
fn made() -> Result<(Arc<MemDevice>, Arc<FaultDevice>, Fs)> {
    let memory = Arc::new(MemDevice::new(64 << 20));
    let device = Arc::new(FaultDevice::new(memory.clone()));
    let fs = Fs::create_on(device.clone(), &MkfsOptions::default(), &options())?;
    fs.create_dir("/dir")?;
    Ok((memory, device, fs))
}

/// The lengths of the writes whose every byte is `content`.
fn data_writes(device: &FaultDevice, content: u8) -> Vec<usize> {
    let written = device.take_recording().into_iter().filter_map(|record| match record.request {
        Request::Write { bufs, .. } => Some(bufs),
        _ => None,
    });
    let is_data = |buf: &Buf| buf.iter().take(100).all(|byte| *byte == content);
    let data = written.filter(|bufs| bufs.iter().all(is_data));
    data.map(|bufs| bufs.iter().map(|buf| buf.len()).sum()).collect()
}

#[test]
fn neighbours_share_a_request() -> Result<()> {
    let (_, device, fs) = made()?;
    // New files, and the same rewritten in place.
    for content in [7, 8] {
        write_all(&fs, content)?;
        device.start_recording();
        fs.sync()?;
        let writes = data_writes(&device, content);
        assert_eq!(writes.iter().sum::<usize>(), FILES * 5120, "{writes:?}");
        assert!(writes.len() < FILES / 5, "{writes:?}");
        assert!(writes.iter().all(|bytes| *bytes <= 1 << 20), "{writes:?}");
    }
    fs.unmount()
}

#[test]
fn a_bad_block_costs_one_file() -> Result<()> {
    let (memory, device, fs) = made()?;
    write_all(&fs, 7)?;
    fs.sync()?;
    let bad = fs.open_file(path(20))?.inode().fiemap(0, u64::MAX)?[0].physical;
    write_all_in_place(&fs, 8)?;
    device.start_recording();
    device.faults().fail_range(Some(IoOp::Write), bad..bad + 4096, libc::EIO);
    let said = fs.sync().expect_err("it is told");
    assert_eq!(said.errno(), libc::EIO, "{said}");
    let events = fs.stats().events;
    assert!(events.iter().any(|e| e.message.contains("was written again")), "{events:?}");
    drop(fs);

    let fs = Fs::open_device(memory as Arc<dyn Device>, &options())?;
    for number in 0..FILES {
        let content = fs.read(path(number))?;
        let wanted = if number == 20 { 7 } else { 8 };
        assert!(content[..4096].iter().all(|byte| *byte == wanted), "file {number}");
    }
    fs.unmount()
}

/// Without new blocks.
fn write_all_in_place(fs: &Fs, content: u8) -> Result<()> {
    (0..FILES).try_for_each(|number| {
        let file = fjord::OpenOptions::new().write(true).open(fs, path(number))?;
        file.write_all_at(&vec![content; BYTES], 0)
    })
}
