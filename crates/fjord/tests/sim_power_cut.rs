//! The engine with its threads on modelled devices in real time, until the power goes: what a
//! returned fsync promised is in every image that the device may leave.
//!
//! `fjord-crash` records requests and chooses from them; here the device chooses, with its own cache,
//! order and torn sectors. Images differ by a seed that a failure prints; the moment of the cut
//! depends on the machine's speed.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fjord::{Cred, DataMode, Fs, MountOptions};
use fjord_block::sim::{BarrierForm, CutScope, CutState, Profile, SeededChooser, SimDevice};
use fjord_block::{Device, DeviceExt, MemDevice, MemImage};

const IMAGE_BYTES: u64 = 24 << 20;
const THREAD_COUNT: u64 = 4;
const IMAGE_COUNT: u64 = 24;
/// The power goes after this time, and not before so many files were promised.
const WORK_TIME: Duration = Duration::from_millis(150);
const PROMISED_MIN: u64 = 6;
/// Every so many images e2fsck judges one.
const JUDGED_EVERY: u64 = 6;

fn new_image() -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4"])
        .arg(&path)
        .arg(format!("{}k", IMAGE_BYTES >> 10))
        .output()
        .expect("mke2fs runs (package e2fsprogs)");
    assert!(made.status.success());
    MemImage::from_file(&path).expect("the image is read")
}

/// The content of a file of a thread: as long and as varied as its number says.
fn content(thread: u64, number: u64) -> Vec<u8> {
    let len = 500 + (number * 977 + thread * 131) % 9_000;
    (0..len).map(|at| (at + number * 7 + thread) as u8).collect()
}

/// Writes and fsyncs files until an error; gives how many were promised, and a file that was
/// overwritten in between with the number of its last promised content.
fn work(fs: &Fs, thread: u64, count: &AtomicU64) -> (u64, Option<u64>) {
    let (mut promised, mut rewritten) = (0, None);
    let Ok(root) = fs.root() else { return (0, None) };
    for number in 0.. {
        let made = root.create(format!("t{thread}-{number}").as_bytes(), 0o644, &Cred::root());
        let done = made.and_then(|file| {
            file.write(0, &content(thread, number))?;
            file.fsync(number % 2 == 0)
        });
        if done.is_err() {
            break;
        }
        promised = number + 1;
        count.fetch_add(1, Ordering::Relaxed);
        let name = format!("again{thread}");
        let file = root
            .lookup(name.as_bytes())
            .or_else(|_| root.create(name.as_bytes(), 0o644, &Cred::root()));
        // Of one length, so that each version covers the one before.
        let version = number.to_le_bytes().repeat(512);
        let done = file.and_then(|file| {
            file.write(0, &version)?;
            file.fsync(false)
        });
        if done.is_err() {
            break;
        }
        rewritten = Some(number);
    }
    (promised, rewritten)
}

fn read(fs: &Fs, name: &str) -> Vec<u8> {
    let file = fs.root().and_then(|root| root.lookup(name.as_bytes()));
    let file = file.unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut bytes = vec![0; file.attr().size as usize];
    let count = file.read(0, &mut bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    bytes.truncate(count);
    bytes
}

fn check(image: &MemImage, promises: &[(u64, Option<u64>)], options: &MountOptions, judge: bool) {
    let device = Arc::new(MemDevice::from_image(image));
    let fs = Fs::open_device(device.clone(), options).expect("recovery succeeds");
    for (thread, (promised, rewritten)) in (0..).zip(promises) {
        for number in 0..*promised {
            let name = format!("t{thread}-{number}");
            assert!(read(&fs, &name) == content(thread, number), "{name}");
        }
        if let Some(number) = rewritten {
            let bytes = read(&fs, &format!("again{thread}"));
            for word in bytes.chunks(8) {
                let word = u64::from_le_bytes(word.try_into().expect("whole words"));
                assert!((*number..=number + 1).contains(&word), "again{thread}: {word}");
            }
        }
    }
    fs.unmount().expect("unmount");
    if judge {
        let left = device.snapshot();
        fjord_testkit::image::e2fsck_clean_in_memory(&left).expect("e2fsck finds nothing");
    }
}

fn run(profile: &Profile, data: DataMode) {
    let options = MountOptions { data, ..MountOptions::default() };
    let device = Arc::new(SimDevice::with_contents(profile, new_image()));
    let fs = Fs::open_device(device.clone() as Arc<dyn Device>, &options).expect("open");
    let count = AtomicU64::new(0);
    let (promises, state): (Vec<_>, CutState) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREAD_COUNT)
            .map(|thread| {
                let (fs, count) = (&fs, &count);
                scope.spawn(move || work(fs, thread, count))
            })
            .collect();
        let started = Instant::now();
        while started.elapsed() < WORK_TIME || count.load(Ordering::Relaxed) < PROMISED_MIN {
            assert!(started.elapsed() < Duration::from_secs(300), "no fsync returns");
            std::thread::sleep(Duration::from_millis(5));
        }
        let state = device.cut(CutScope::Contract);
        (workers.into_iter().map(|w| w.join().expect("no panic")).collect(), state)
    });
    assert!(fs.unmount().is_err(), "the device was gone");
    let total: u64 = promises.iter().map(|(promised, _)| promised).sum();
    println!(
        "{} {data:?}: {total} files promised, {} writes open",
        profile.name,
        state.writes.len()
    );
    for seed in 0..IMAGE_COUNT {
        println!("{} {data:?}: seed {seed}", profile.name);
        let image = state.image(&mut SeededChooser::new(seed));
        check(&image, &promises, &options, seed % JUDGED_EVERY == 0);
    }
}

#[test]
fn every_profile_keeps_what_fsync_promised() {
    for profile in Profile::ALL {
        run(profile, DataMode::Ordered);
    }
}

#[test]
fn every_data_mode_does() {
    for data in [DataMode::Writeback, DataMode::Journal] {
        run(&Profile::PLAIN_SSD, data);
    }
}

/// The least that a device may promise: no barrier, a volatile cache of some size, any order.
#[test]
fn every_form_of_the_barrier_and_none_do() {
    let forms = [None, Some(BarrierForm::InOrderWriteback), Some(BarrierForm::InOrderRecovery)];
    for barrier in forms {
        run(&Profile { barrier, ..Profile::PLAIN_SSD }, DataMode::Ordered);
    }
}

/// Nothing of an image that is unmounted is in a cache.
#[test]
fn an_unmounted_image_is_clean() {
    /// `INCOMPAT_RECOVER` of the superblock: its byte, and its bit there.
    const RECOVER: (u64, u8) = (1024 + 0x60, 4);
    for profile in Profile::ALL {
        let device = Arc::new(SimDevice::with_contents(profile, new_image()));
        let fs = Fs::open_device(device.clone() as Arc<dyn Device>, &MountOptions::default());
        let fs = fs.expect("open");
        let root = fs.root().expect("root");
        let file = root.create(b"t0-0", 0o644, &Cred::root()).expect("create");
        file.write(0, &content(0, 0)).expect("write");
        drop((file, root));
        fs.unmount().expect("unmount");
        let state = device.cut(CutScope::Contract);
        for seed in 0..IMAGE_COUNT {
            let image = state.image(&mut SeededChooser::new(seed));
            let mut byte = [0];
            let device = MemDevice::from_image(&image);
            device.read_exact_at(RECOVER.0, &mut byte).expect("the superblock");
            assert_eq!(byte[0] & RECOVER.1, 0, "{}, seed {seed}: in use", profile.name);
            let judge = seed % JUDGED_EVERY == 0;
            check(&image, &[(1, None)], &MountOptions::default(), judge);
        }
    }
}
