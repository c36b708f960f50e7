//! Sixteen threads that fsync files of their own in private and in shared directories, rename and
//! remove them in between, while commits are forced at random; then the power goes. What each
//! returned fsync promised is in every image that the modelled device may leave, under each policy.
//!
//! The choices come from a seed that is printed (`FJORD_SEED` reruns it); how the threads interleave
//! and when the power goes depends on the machine.

use std::collections::HashMap;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fjord::{AreaLayout, Cred, Fs, FsyncPolicyKind, InodeRef, MountOptions, RenameFlags, Result};
use fjord_block::sim::{CutScope, CutState, Profile, SeededChooser, SimDevice};
use fjord_block::{Device, MemDevice, MemImage};
use fjord_testkit::rng::{Rng, mix, pattern_vec, seed_from_env};

const THREAD_COUNT: usize = 16;
const SHARED_COUNT: usize = 3;
/// Names of a thread in each of its directories: few, so that they come back.
const NAME_COUNT: usize = 3;
const IMAGE_COUNT: u64 = 8;
/// The power goes when so many fsyncs have returned.
const PROMISED_MIN: u64 = 600;
/// Every so many images e2fsck judges one.
const JUDGED_EVERY: u64 = 4;
/// What a file begins with: its number, twice.
const LABEL_BYTES: u64 = 16;

/// A directory and a name in it.
type Slot = (String, String);

/// What a thread did with one file.
#[derive(Debug)]
struct History {
    id: u64,
    /// Bytes that an fsync promised.
    promised_bytes: u64,
    /// Bytes that were ever written, or tried.
    written_bytes: u64,
    /// Names that it may have: the last promised one and those since.
    names: Vec<Slot>,
    /// It was removed or replaced, or that was tried.
    may_be_gone: bool,
}

fn content(id: u64, len: u64) -> Vec<u8> {
    let mut bytes = pattern_vec(id, 0, len as usize);
    let label = [id.to_le_bytes(), id.to_le_bytes()].concat();
    let known = bytes.len().min(label.len());
    bytes[..known].copy_from_slice(&label[..known]);
    bytes
}

/// One thread: its directories, its files, its dice.
struct Worker<'a> {
    thread: usize,
    dirs: Vec<(String, InodeRef)>,
    live: HashMap<Slot, (usize, InodeRef)>,
    /// Open files that were removed.
    nameless: Vec<InodeRef>,
    histories: Vec<History>,
    rng: Rng,
    returned: &'a AtomicU64,
}

impl<'a> Worker<'a> {
    fn new(fs: &Fs, thread: usize, seed: u64, returned: &'a AtomicU64) -> Result<Worker<'a>> {
        let root = fs.root()?;
        let names = (0..SHARED_COUNT).map(|n| format!("shared{n}")).chain([format!("own{thread}")]);
        let dirs = names
            .map(|name| root.lookup(name.as_bytes()).map(|dir| (name, dir)))
            .collect::<Result<_>>()?;
        let rng = Rng::new(mix(seed ^ thread as u64));
        let (live, nameless, histories) = Default::default();
        Ok(Worker { thread, dirs, live, nameless, histories, rng, returned })
    }

    fn slot(&mut self) -> (Slot, usize) {
        let dir = self.rng.below(self.dirs.len() as u64) as usize;
        let name = format!("{}-{}", self.thread, self.rng.below(NAME_COUNT as u64));
        ((self.dirs[dir].0.clone(), name), dir)
    }

    /// Goes on until the device fails.
    fn run(mut self) -> Vec<History> {
        while self.step().is_ok() {}
        self.histories
    }

    fn step(&mut self) -> Result<()> {
        let (slot, dir) = self.slot();
        match self.rng.below(100) {
            0..10 => self.unlink(&slot, dir),
            10..25 => self.rename(&slot, dir),
            _ => self.write(&slot, dir),
        }
    }

    fn write(&mut self, slot: &Slot, dir: usize) -> Result<()> {
        if !self.live.contains_key(slot) {
            let id = (self.thread as u64 + 1) << 32 | self.histories.len() as u64;
            self.histories.push(History {
                id,
                promised_bytes: 0,
                written_bytes: 0,
                names: vec![slot.clone()],
                may_be_gone: false,
            });
            let file = self.dirs[dir].1.create(slot.1.as_bytes(), 0o644, &Cred::root())?;
            self.live.insert(slot.clone(), (self.histories.len() - 1, file));
        }
        let (index, file) = &self.live[slot];
        let history = &mut self.histories[*index];
        let from = history.written_bytes;
        let len = if from == 0 { LABEL_BYTES } else { 1 } + self.rng.magnitude(40_000);
        let bytes = content(history.id, from + len);
        history.written_bytes += len;
        file.write(from, &bytes[from as usize..])?;
        if self.rng.below(100) < 75 {
            let datasync = self.rng.below(3) == 0;
            file.fsync(datasync)?;
            history.promised_bytes = history.written_bytes;
            if !datasync {
                history.names = vec![slot.clone()];
            }
            self.returned.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn unlink(&mut self, slot: &Slot, dir: usize) -> Result<()> {
        let Some((index, file)) = self.live.remove(slot) else { return Ok(()) };
        self.histories[index].may_be_gone = true;
        // Some stay open for a while without a name.
        if self.rng.below(2) == 0 {
            self.nameless.push(file);
        }
        if self.nameless.len() > 2 {
            self.nameless.clear();
        }
        self.dirs[dir].1.unlink(slot.1.as_bytes())
    }

    fn rename(&mut self, from: &Slot, dir: usize) -> Result<()> {
        let (to, new_dir) = self.slot();
        if to == *from || !self.live.contains_key(from) {
            return Ok(());
        }
        if let Some((replaced, _)) = self.live.remove(&to) {
            self.histories[replaced].may_be_gone = true;
        }
        let Some((index, file)) = self.live.remove(from) else { return Ok(()) };
        self.histories[index].names.push(to.clone());
        let (old, new) = (&self.dirs[dir].1, &self.dirs[new_dir].1);
        let (flags, cred) = (RenameFlags::empty(), Cred::root());
        old.rename(from.1.as_bytes(), new, to.1.as_bytes(), flags, &cred)?;
        if self.rng.below(3) == 0 {
            file.fsync(false)?;
            let history = &mut self.histories[index];
            history.promised_bytes = history.written_bytes;
            history.names = vec![to.clone()];
            self.returned.fetch_add(1, Ordering::Relaxed);
        }
        self.live.insert(to, (index, file));
        Ok(())
    }
}

/// What recovery found: each file with its names and its bytes.
fn found(fs: &Fs) -> HashMap<u64, Vec<(Slot, Vec<u8>)>> {
    let mut found: HashMap<u64, Vec<(Slot, Vec<u8>)>> = HashMap::new();
    for dir in fs.read_dir("/").expect("the root") {
        let dir = dir.expect("an entry").file_name().to_str().expect("our names").to_owned();
        if dir == "lost+found" {
            continue;
        }
        for entry in fs.read_dir(format!("/{dir}")).expect("a directory") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().to_str().expect("our names").to_owned();
            let bytes = fs.read(format!("/{dir}/{name}")).expect("its bytes");
            let label = bytes
                .get(..8)
                .map_or(0, |id| u64::from_le_bytes(id.try_into().expect("eight bytes")));
            if label != 0 {
                found.entry(label).or_default().push(((dir.clone(), name), bytes));
            }
        }
    }
    found
}

fn check(image: &MemImage, histories: &[History], options: &MountOptions, judge: bool) {
    let device = Arc::new(MemDevice::from_image(image));
    let fs = Fs::open_device(device.clone(), options).expect("recovery succeeds");
    let mut found = found(&fs);
    for history in histories {
        let here = found.remove(&history.id).unwrap_or_default();
        assert!(here.len() < 2, "two names: {history:?}");
        let Some((slot, bytes)) = here.into_iter().next() else {
            let is_promised = history.promised_bytes > 0 && !history.may_be_gone;
            assert!(!is_promised, "lost: {history:?}");
            continue;
        };
        assert!(history.names.contains(&slot), "{slot:?} came back: {history:?}");
        let len = bytes.len() as u64;
        assert!(len <= history.written_bytes, "{len} bytes: {history:?}");
        if !history.may_be_gone {
            assert!(len >= history.promised_bytes, "{len} bytes: {history:?}");
        }
        let wanted = content(history.id, len);
        for (at, (byte, wanted)) in bytes.iter().zip(&wanted).enumerate() {
            let is_hole = *byte == 0 && at as u64 >= history.promised_bytes;
            assert!(byte == wanted || is_hole, "byte {at}: {history:?}");
        }
    }
    assert!(found.is_empty(), "files of nobody: {:?}", found.keys());
    fs.unmount().expect("unmount");
    if judge {
        let left = device.snapshot();
        fjord_testkit::image::e2fsck_clean_in_memory(&left).expect("e2fsck finds nothing");
    }
}

/// An image with the directories, that has what the policy needs.
fn image(policy: FsyncPolicyKind) -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-g", "2048", "-J", "size=16"]);
    if policy == FsyncPolicyKind::FastCommit {
        mke2fs.args(["-O", "fast_commit"]);
    }
    let made = mke2fs.arg(&path).arg("96M").output().expect("mke2fs runs (package e2fsprogs)");
    assert!(made.status.success());
    let device = MemDevice::from_image(&MemImage::from_file(&path).expect("the image is read"));
    let device = Arc::new(device);
    let fs = Fs::open_device(device.clone(), &MountOptions::default()).expect("it mounts");
    if policy == FsyncPolicyKind::Ijournal {
        let layout = AreaLayout { count: 2, area_bytes: 1 << 20 };
        fs.set_ijournal_areas(Some(layout)).expect("there is room");
    }
    for name in (0..SHARED_COUNT).map(|n| format!("shared{n}")) {
        fs.create_dir(format!("/{name}")).expect("a directory");
    }
    for thread in 0..THREAD_COUNT {
        fs.create_dir(format!("/own{thread}")).expect("a directory");
    }
    fs.unmount().expect("the image is clean");
    device.snapshot()
}

/// Runs the threads until the power goes. Returns what they were promised.
fn work(fs: &Fs, device: &SimDevice, seed: u64) -> (Vec<History>, CutState) {
    let (returned, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREAD_COUNT)
            .map(|thread| {
                let worker = Worker::new(fs, thread, seed, &returned).expect("the directories");
                scope.spawn(move || worker.run())
            })
            .collect();
        let commits = scope.spawn(|| {
            let mut rng = Rng::new(mix(seed));
            while !over.load(Ordering::Relaxed) && fs.sync().is_ok() {
                std::thread::sleep(Duration::from_micros(2_000 + rng.magnitude(80_000)));
            }
        });
        let started = Instant::now();
        while returned.load(Ordering::Relaxed) < PROMISED_MIN {
            assert!(started.elapsed() < Duration::from_secs(300), "fsyncs do not return");
            std::thread::sleep(Duration::from_millis(1));
        }
        let state = device.cut(CutScope::Contract);
        over.store(true, Ordering::Relaxed);
        let histories = workers.into_iter().flat_map(|worker| worker.join().expect("no panic"));
        let histories = histories.collect();
        commits.join().expect("no panic");
        (histories, state)
    })
}

fn keeps_promises(policy: FsyncPolicyKind) {
    let seed = seed_from_env(&format!("sixteen threads, {}", policy.name()), 1);
    let options = MountOptions { fsync: policy, ..MountOptions::default() };
    let (histories, state) = run(&options, seed);
    for number in 0..IMAGE_COUNT {
        let image = state.image(&mut SeededChooser::new(mix(seed) ^ number));
        check(&image, &histories, &options, number % JUDGED_EVERY == 0);
    }
}

fn run(options: &MountOptions, seed: u64) -> (Vec<History>, CutState) {
    let device = Arc::new(SimDevice::with_contents(&Profile::UFS, image(options.fsync)));
    let fs = Fs::open_device(device.clone() as Arc<dyn Device>, options).expect("it mounts");
    let (histories, state) = work(&fs, &device, seed);
    let stats = fs.stats();
    drop(fs);
    let promised = histories.iter().filter(|history| history.promised_bytes > 0).count();
    println!("{promised} files promised, {} writes open, {:?}", state.writes.len(), stats.fsync);
    assert!(stats.fsync.policy > 0, "the policy served nothing: {:?}", stats.fsync);
    (histories, state)
}

/// Without flushes promises must be lost: the check bites.
#[test]
fn without_flushes_promises_are_lost() {
    let seed = seed_from_env("sixteen threads without flushes", 1);
    let fsync = FsyncPolicyKind::Compound;
    let (histories, state) =
        run(&MountOptions { fsync, barrier: false, ..MountOptions::default() }, seed);
    let lost = (0..IMAGE_COUNT).any(|number| {
        let image = state.image(&mut SeededChooser::new(mix(seed) ^ number));
        std::panic::catch_unwind(|| check(&image, &histories, &MountOptions::default(), false))
            .is_err()
    });
    assert!(lost, "every image has all that was promised");
}

#[test]
fn compound_keeps_promises() {
    keeps_promises(FsyncPolicyKind::Compound);
}

#[test]
fn group_keeps_promises() {
    keeps_promises(FsyncPolicyKind::Group);
}

#[test]
fn fast_commit_keeps_promises() {
    keeps_promises(FsyncPolicyKind::FastCommit);
}

#[test]
fn ijournal_keeps_promises() {
    keeps_promises(FsyncPolicyKind::Ijournal);
}

/// A shutdown in the middle of writes, fsyncs and commits is no error of the image: later mounts have
/// nothing to warn of, and e2fsck nothing to check.
#[test]
fn a_shutdown_that_was_asked_for_is_no_error() {
    let seed = seed_from_env("a_shutdown_that_was_asked_for_is_no_error", 1);
    let mut rng = Rng::new(seed);
    for &policy in FsyncPolicyKind::ALL {
        let image = image(policy);
        for round in 0..fjord_testkit::size::pick(4, 12, 60) {
            let device = Arc::new(MemDevice::from_image(&image));
            let options = MountOptions {
                fsync: policy,
                commit_interval: Duration::from_millis(1),
                writeback_interval: Duration::from_millis(1),
                ..MountOptions::default()
            };
            let fs = Fs::open_device(device.clone(), &options).expect("it mounts");
            let mode = *rng.pick(&[
                fjord::ShutdownMode::Default,
                fjord::ShutdownMode::LogFlush,
                fjord::ShutdownMode::NoLogFlush,
            ]);
            let delay = Duration::from_micros(rng.below(4000));
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (fs, path) = (&fs, format!("/own{thread}/file"));
                    scope.spawn(move || while keep_busy(fs, &path, thread).is_ok() {});
                }
                std::thread::sleep(delay);
                fs.shutdown(mode).expect("what was written before is on the device");
            });
            assert!(
                fs.first_error().is_none(),
                "{policy:?}, round {round}: {:?}",
                fs.first_error()
            );
            // As umount(2) does; there is nothing left to write.
            fs.unmount().expect("no error");
            drop(fs);
            let fs = Fs::open_device(device, &MountOptions::default()).expect("it mounts");
            let superblock = fs.superblock();
            let errors = superblock.s_error_count.get();
            let has_error = superblock.state().contains(fjord_format::superblock::FsState::ERROR);
            assert!(!has_error && errors == 0, "{policy:?}, round {round}: {errors} errors");
        }
    }
}

/// Makes, writes, syncs, cuts and removes a file until the file system is shut down.
fn keep_busy(fs: &Fs, path: &str, thread: usize) -> Result<()> {
    let file = fs.create_file(path)?;
    file.write_all_at(&[thread as u8; 20_000], 0)?;
    file.sync_all()?;
    file.write_all_at(&[thread as u8; 9_000], 30_000)?;
    file.sync_data()?;
    file.set_len(5_000)?;
    fs.remove_file(path)?;
    if thread == 0 { fs.sync() } else { Ok(()) }
}
