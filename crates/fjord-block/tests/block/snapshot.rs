//! Snapshots of a file that is being written: they are of one moment, whoever writes how.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fjord_block::epoch::EpochDevice;
use fjord_block::{
    Buf, Class, Device, DeviceExt, FileDevice, FileOptions, MemDevice, Order, Reflink, Request,
    SnapshotError, SnapshotOptions, SnapshotReport,
};

use crate::backends::{BACKENDS, make_image, options};
use crate::loop_device::Loop;

const SIZE: u64 = 48 << 20;
/// Where a writer writes: blocks of 4096 bytes, far from each other.
const SLOTS: u64 = 400;
const WRITERS: u64 = 3;

/// The place of the `number`th write of a writer.
fn slot(writer: u64, number: u64) -> u64 {
    // A step that shares no factor with the count of slots goes through all of them.
    let slot = number * 149 % SLOTS;
    writer * (SIZE / WRITERS) / 4096 * 4096 + slot * 36 * 1024 / 4096 * 4096
}

fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(512)
}

/// The number in a block that is whole.
fn number_in(block: &[u8]) -> u64 {
    let (first, _) = block.split_first_chunk::<8>().unwrap();
    assert!(block.chunks(8).all(|part| part == first), "a torn block");
    u64::from_le_bytes(*first)
}

/// Writes one number after the other, each when the one before is done, and tells how far it is.
fn keep_writing(device: &dyn Device, writer: u64, completed: &AtomicU64, stop: &AtomicBool) {
    for number in 1.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let class = [Class::Sync, Class::Async, Class::Background][(writer % 3) as usize];
        let write = Request::Write {
            offset: slot(writer, number),
            bufs: vec![Buf::from_slice(&block(number))],
            order: if writer == 1 { Order::Barrier } else { Order::Orderless },
            fua: number % 64 == 0,
            class,
        };
        device.submit_one(write).wait().unwrap();
        completed.store(number, Ordering::SeqCst);
        if number % 97 == 0 {
            device.flush().unwrap();
        }
    }
}

/// What a writer had written at the moment of the copy: all up to a number, and nothing newer.
fn check_writer(copy: &[u8], writer: u64, promised: u64, newest: u64) {
    let found: Vec<u64> = (0..SLOTS)
        .map(|number| {
            let at = slot(writer, number) as usize;
            number_in(&copy[at..at + 4096])
        })
        .collect();
    let last = found.iter().copied().max().unwrap_or(0);
    assert!((promised..=newest + 1).contains(&last), "{promised} promised, {newest} done, {last}");
    for (index, found) in found.into_iter().enumerate() {
        // The last number up to `last` with this slot.
        let want = (0..=last).rev().take(SLOTS as usize).find(|n| n % SLOTS == index as u64);
        assert_eq!(found, want.unwrap_or(0), "slot {index} at {last} of writer {writer}");
    }
}

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until each writer has written `more` times.
fn wait_for_writers(completed: &[AtomicU64], more: u64) {
    let began = Instant::now();
    let all = || completed.iter().map(|number| number.load(Ordering::SeqCst));
    let before: Vec<u64> = all().collect();
    while all().zip(&before).any(|(now, before)| now < before + more) {
        assert!(began.elapsed() < PATIENCE, "the writers do not go on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Takes a snapshot, during whose copy, if there is one, all writers must go on. Another one where
/// the machine is so slow that the limits of time end it.
fn snapshot_beside_writers(
    device: &dyn Device,
    path: &Path,
    reflink: Reflink,
    completed: &[AtomicU64],
) -> (SnapshotReport, Vec<u64>) {
    let first = Instant::now();
    loop {
        let (began, count) = (Instant::now(), AtomicU64::new(0));
        let until_sweep = Mutex::new(None);
        let ask = || {
            // The second time, the pause is over and nothing has been copied.
            if count.fetch_add(1, Ordering::SeqCst) == 1 {
                *until_sweep.lock().unwrap() = Some(began.elapsed());
                wait_for_writers(completed, 1);
            }
            false
        };
        let out = File::create(path).unwrap();
        let promised = completed.iter().map(|number| number.load(Ordering::SeqCst)).collect();
        let options = SnapshotOptions { reflink, is_cancelled: Some(&ask) };
        match device.snapshot_to(&out, &options) {
            Err(SnapshotError::SlowCopy(_) | SnapshotError::SlowPause(_))
                if first.elapsed() < PATIENCE => {}
            report => {
                let report = report.unwrap();
                let until_sweep = until_sweep.into_inner().unwrap();
                assert_eq!(until_sweep.is_some(), !report.reflinked);
                assert!(until_sweep.is_none_or(|time| report.pause <= time), "{report:?}");
                return (report, promised);
            }
        }
    }
}

struct Taken {
    report: SnapshotReport,
    copy: PathBuf,
}

/// Ends the writers when dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Takes a snapshot while all write, and checks it.
fn taken_under_load(device: &Arc<dyn Device>, dir: &Path, reflink: Reflink) -> Taken {
    let stop = AtomicBool::new(false);
    let completed: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    let all = || -> Vec<u64> { completed.iter().map(|n| n.load(Ordering::SeqCst)).collect() };
    let path = dir.join("copy");
    std::thread::scope(|scope| {
        for (writer, completed) in (0..).zip(&completed) {
            let stop = &stop;
            scope.spawn(move || keep_writing(&**device, writer, completed, stop));
        }
        // Also if a check fails.
        let _stop = Stop(&stop);
        wait_for_writers(&completed, 30);
        let (report, promised) = snapshot_beside_writers(&**device, &path, reflink, &completed);
        let newest = all();
        wait_for_writers(&completed, 1);
        stop.store(true, Ordering::SeqCst);
        let copy = std::fs::read(&path).unwrap();
        assert_eq!(copy.len() as u64, device.size_bytes());
        for writer in 0..WRITERS {
            let of = |all: &[u64]| all[writer as usize];
            check_writer(&copy, writer, of(&promised), of(&newest));
        }
        Taken { report, copy: path }
    })
}

#[test]
fn a_copy_under_load_is_of_one_moment() {
    let dir = tempfile::tempdir().unwrap();
    for backend in BACKENDS.iter().filter(|backend| **backend != "mem") {
        for scheduled in [false, true] {
            let path = dir.path().join("image");
            make_image(&path, SIZE);
            let device: Arc<dyn Device> =
                Arc::new(FileDevice::open(&path, &options(backend)).unwrap());
            let device = match scheduled {
                true => Arc::new(EpochDevice::new(device)),
                false => device,
            };
            // Something to copy besides.
            device.write_all_at(SIZE - (1 << 20), &vec![8; 1 << 20]).unwrap();
            let Taken { report, copy } = taken_under_load(&device, dir.path(), Reflink::Never);
            println!("{backend} scheduled {scheduled}: {report:?}");
            assert!(!report.reflinked && report.copied_bytes >= 1 << 20, "{report:?}");
            let found = std::fs::metadata(&copy).unwrap();
            // Holes are kept: 400 slots of each writer lie 36 KiB apart.
            assert!(found.blocks() * 512 < SIZE, "{} of {SIZE}", found.blocks() * 512);
            drop(device);
        }
    }
}

#[test]
fn holes_and_odd_ends_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let size = (1 << 30) + 1234;
    make_image(&path, size);
    let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
    device.write_all_at(300 << 20, &[1; 100_000]).unwrap();
    device.write_all_at(size - 34, &[2; 34]).unwrap();
    // Zeroes that take blocks are holes in the copy.
    device.write_all_at(700 << 20, &vec![0; 8 << 20]).unwrap();
    let copy = dir.path().join("copy");
    let out = File::create(&copy).unwrap();
    let options = SnapshotOptions { reflink: Reflink::Never, ..SnapshotOptions::default() };
    let report = device.snapshot_to(&out, &options).unwrap();
    assert_eq!(report.size_bytes, size);
    assert_eq!(report.image, std::fs::metadata(&path).map(|m| (m.dev(), m.ino())).unwrap());
    assert!(report.copied_bytes < 200_000, "{report:?}");
    let found = std::fs::metadata(&copy).unwrap();
    assert_eq!(found.len(), size);
    assert!(found.blocks() * 512 < 1 << 20, "{}", found.blocks() * 512);
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&copy).unwrap());
}

/// A disk image on XFS in a loop device, unmounted when dropped.
struct Xfs(tempfile::TempDir);

impl Xfs {
    fn new(reflink: bool) -> Xfs {
        assert!(rustix::process::geteuid().is_root(), "run the tests as root: they mount XFS");
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("below");
        make_image(&below, 400 << 20);
        let reflink = format!("reflink={}", u8::from(reflink));
        run(Command::new("mkfs.xfs").args(["-q", "-m", &reflink]).arg(&below));
        std::fs::create_dir(dir.path().join("mnt")).unwrap();
        let mount = Xfs(dir);
        run(Command::new("mount").args(["-o", "loop"]).arg(&below).arg(mount.path()));
        mount
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mnt")
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.path()));
    }
}

fn run(command: &mut Command) {
    assert!(command.status().expect("util-linux, xfsprogs").success(), "{command:?}");
}

#[test]
fn blocks_are_shared_where_they_can_be() {
    let xfs = Xfs::new(true);
    let image = xfs.path().join("image");
    make_image(&image, SIZE);
    let device: Arc<dyn Device> =
        Arc::new(FileDevice::open(&image, &FileOptions::default()).unwrap());
    let Taken { report, .. } = taken_under_load(&device, &xfs.path(), Reflink::Always);
    println!("{report:?}");
    assert!(report.reflinked && report.copied_bytes == 0, "{report:?}");
    // Onto another file system: copied, or refused where sharing was demanded.
    let other = tempfile::tempdir().unwrap();
    let always = SnapshotOptions { reflink: Reflink::Always, ..SnapshotOptions::default() };
    let out = File::create(other.path().join("refused")).unwrap();
    let refused = device.snapshot_to(&out, &always).unwrap_err();
    assert!(matches!(refused, SnapshotError::NoReflink(_)), "{refused}");
    // The writers begin anew.
    device.submit_one(Request::WriteZeroes { offset: 0, len: SIZE }).wait().unwrap();
    let Taken { report, .. } = taken_under_load(&device, other.path(), Reflink::Auto);
    assert!(!report.reflinked && report.copied_bytes > 0, "{report:?}");
    drop(device);
    // XFS that has none.
    let plain = Xfs::new(false);
    let image = plain.path().join("image");
    make_image(&image, SIZE);
    let device: Arc<dyn Device> =
        Arc::new(FileDevice::open(&image, &FileOptions::default()).unwrap());
    let Taken { report, .. } = taken_under_load(&device, &plain.path(), Reflink::Auto);
    assert!(!report.reflinked, "{report:?}");
}

/// What ends a snapshot early, and that writing goes on.
#[test]
fn failed_snapshots_hold_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make_image(&path, SIZE);
    let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
    device.write_all_at(0, &vec![1; SIZE as usize]).unwrap();
    let copy = || File::create(dir.path().join("copy")).unwrap();
    let snapshot = |out: &File, ask: Option<&(dyn Fn() -> bool + Sync)>| {
        device.snapshot_to(out, &SnapshotOptions { reflink: Reflink::Never, is_cancelled: ask })
    };
    let write = |byte| device.write_all_at(0, &vec![byte; SIZE as usize]).unwrap();
    // Cancelled in the middle.
    let count = Mutex::new(0);
    let ask = || {
        let mut count = count.lock().unwrap();
        *count += 1;
        *count > 10
    };
    let failed = snapshot(&copy(), Some(&ask)).unwrap_err();
    assert!(matches!(failed, SnapshotError::Cancelled), "{failed}");
    write(2);
    // A disk that is full.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let failed = snapshot(&full, None).unwrap_err();
    assert!(matches!(failed, SnapshotError::Write(_)), "{failed}");
    write(3);
    let read_only = File::open(dir.path().join("copy")).unwrap();
    let failed = snapshot(&read_only, None).unwrap_err();
    assert!(matches!(failed, SnapshotError::Write(_)), "{failed}");
    write(4);
    // The image is truncated below, or by its user.
    let shorter = || {
        File::options().write(true).open(&path).unwrap().set_len(SIZE / 2).unwrap();
        false
    };
    let failed = snapshot(&copy(), Some(&shorter)).unwrap_err();
    assert!(matches!(failed, SnapshotError::Read(_)), "{failed}");
    File::options().write(true).open(&path).unwrap().set_len(SIZE).unwrap();
    let (count, resized) = (AtomicU64::new(0), &device);
    let ask = || {
        if count.fetch_add(1, Ordering::SeqCst) == 5 {
            resized.set_size(SIZE - 4096).unwrap();
        }
        false
    };
    let failed = snapshot(&copy(), Some(&ask)).unwrap_err();
    assert!(matches!(failed, SnapshotError::Resized), "{failed}");
    device.set_size(SIZE).unwrap();
    write(5);
    // Its user is done with it.
    let (count, released) = (AtomicU64::new(0), &device);
    let ask = || {
        if count.fetch_add(1, Ordering::SeqCst) == 5 {
            released.release();
        }
        false
    };
    let failed = snapshot(&copy(), Some(&ask)).unwrap_err();
    assert!(matches!(failed, SnapshotError::Closed), "{failed}");
    snapshot(&copy(), None).unwrap();
    let memory = MemDevice::new(SIZE);
    let failed = memory.snapshot_to(&copy(), &SnapshotOptions::default()).unwrap_err();
    assert!(matches!(failed, SnapshotError::Unsupported), "{failed}");
}

#[test]
fn read_only_images_and_block_devices_are_copied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make_image(&path, SIZE);
    {
        let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
        device.write_all_at(5 << 20, &vec![7; 3 << 20]).unwrap();
    }
    let read_only = FileOptions { read_only: true, ..FileOptions::default() };
    let Some(node) = Loop::new(&path) else { return };
    for image in [&path, &node.0] {
        let device = FileDevice::open(image, &read_only).unwrap();
        let copy = dir.path().join("copy");
        let out = File::create(&copy).unwrap();
        let report = device.snapshot_to(&out, &SnapshotOptions::default()).unwrap();
        assert!(report.copied_bytes == 3 << 20, "{report:?}");
        assert!(std::fs::read(&path).unwrap() == std::fs::read(&copy).unwrap());
        let blocks = std::fs::metadata(&copy).unwrap().blocks();
        assert!(blocks * 512 < 4 << 20, "{blocks}");
    }
}
