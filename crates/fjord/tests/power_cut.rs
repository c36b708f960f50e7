//! Power cuts through the whole engine: what a returned fsync or sync promised is there after
//! recovery, whatever the device did with writes that no flush had covered.
//!
//! A random workload runs on a recorded device. Each cut keeps all writes that a completed flush
//! covers, and of the others a random subset (some torn at a sector); then the image is opened,
//! the promises are checked, and a sample is judged by e2fsck. Rerun with `FJORD_SEED`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;

use fjord::{Cred, DataMode, FallocMode, Fs, InodeRef, MountOptions, RenameFlags, SetAttr};
use fjord_block::{Device, FaultDevice, MemDevice, MemImage, Record, Request};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const IMAGE_BYTES: u64 = 24 << 20;
const FILES: usize = 12;
const STEPS: usize = 220;
const CUTS: usize = 40;

/// A promise: from this stamp of the device's clock on, `name` has this content (`None`: the
/// name is gone), as long as nothing changed it since.
#[derive(Clone, Debug)]
struct Promise {
    from: u64,
    until: u64,
    name: String,
    content: Option<Vec<u8>>,
}

fn seed() -> u64 {
    std::env::var("FJORD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn image(features: &[&str]) -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4"])
        .args(features)
        .arg(&path)
        .arg(format!("{}k", IMAGE_BYTES >> 10))
        .status()
        .expect("mke2fs runs (package e2fsprogs)");
    assert!(made.success());
    MemDevice::from_file(&path).expect("the image is read").snapshot()
}

struct Run {
    rng: StdRng,
    device: Arc<FaultDevice>,
    fs: Fs,
    root: InodeRef,
    /// What programs see.
    live: BTreeMap<String, Vec<u8>>,
    /// Names whose durable state is known, with the index of the open promise.
    promised: BTreeMap<String, usize>,
    promises: Vec<Promise>,
    /// Names given by a rename that nothing has made durable yet: fdatasync does not promise
    /// them, as with Linux.
    renamed: BTreeSet<String>,
}

impl Run {
    /// `name` is about to change: its promise ends.
    fn touch(&mut self, name: &str) {
        if let Some(index) = self.promised.remove(name) {
            self.promises[index].until = self.device.stamp();
        }
    }

    fn promise(&mut self, name: &str) {
        self.touch(name);
        let content = self.live.get(name).cloned();
        let from = self.device.stamp();
        self.promised.insert(name.into(), self.promises.len());
        self.promises.push(Promise { from, until: u64::MAX, name: name.into(), content });
    }

    fn file(&mut self, name: &str) -> InodeRef {
        if !self.live.contains_key(name) {
            self.touch(name);
            self.live.insert(name.into(), Vec::new());
            return self.root.create(name.as_bytes(), 0o644, &Cred::root()).expect("create");
        }
        self.root.lookup(name.as_bytes()).expect("lookup")
    }

    fn step(&mut self) {
        let name = format!("f{}", self.rng.random_range(0..FILES));
        let file = self.file(&name);
        match self.rng.random_range(0..100) {
            0..45 => self.write(&name, &file),
            45..55 => self.resize(&name, &file),
            55..60 => self.punch(&name, &file),
            60..66 => {
                self.touch(&name);
                drop(file);
                self.root.unlink(name.as_bytes()).expect("unlink");
                self.live.remove(&name);
            }
            66..72 => self.rename(&name),
            72..95 => {
                let datasync = self.rng.random_bool(0.4) && !self.renamed.contains(&name);
                file.fsync(datasync).expect("fsync");
                self.renamed.remove(&name);
                self.promise(&name);
            }
            _ => {
                self.fs.sync().expect("sync");
                self.renamed.clear();
                for index in 0..FILES {
                    self.promise(&format!("f{index}"));
                }
            }
        }
    }

    fn write(&mut self, name: &str, file: &InodeRef) {
        self.touch(name);
        let content = self.live.get_mut(name).expect("a live file");
        let append = self.rng.random_bool(0.6);
        let offset = if append { content.len() } else { self.rng.random_range(0..40_000) };
        let len = self.rng.random_range(1..20_000);
        let byte = self.rng.random_range(1..=255u8);
        content.resize(content.len().max(offset + len), 0);
        content[offset..offset + len].fill(byte);
        let data = vec![byte; len];
        assert_eq!(file.write(offset as u64, &data).expect("write"), len);
    }

    fn resize(&mut self, name: &str, file: &InodeRef) {
        self.touch(name);
        let size = self.rng.random_range(0..60_000usize);
        self.live.get_mut(name).expect("a live file").resize(size, 0);
        let change = SetAttr { size: Some(size as u64), ..SetAttr::default() };
        file.set_attr(&change, &Cred::root()).expect("truncate");
    }

    fn punch(&mut self, name: &str, file: &InodeRef) {
        self.touch(name);
        let content = self.live.get_mut(name).expect("a live file");
        let start = self.rng.random_range(0..30_000usize);
        let len = self.rng.random_range(1..20_000usize);
        let end = (start + len).min(content.len());
        if start < end {
            content[start..end].fill(0);
        }
        let mode = FallocMode::PUNCH_HOLE | FallocMode::KEEP_SIZE;
        file.fallocate(mode, start as u64, len as u64).expect("punch");
    }

    fn rename(&mut self, name: &str) {
        let target = format!("f{}", self.rng.random_range(0..FILES));
        if target == *name {
            return;
        }
        self.touch(name);
        self.touch(&target);
        let (from, to) = (name.as_bytes(), target.as_bytes());
        self.root
            .rename(from, &self.root, to, RenameFlags::empty(), &Cred::root())
            .expect("rename");
        let content = self.live.remove(name).expect("a live file");
        self.live.insert(target.clone(), content);
        self.renamed.insert(target);
    }
}

/// The image after a cut at `cut`: covered writes in full, a random part of the others.
fn after_cut(base: &MemImage, records: &[Record], cut: u64, rng: &mut StdRng) -> MemImage {
    let done = |r: &Record| r.completed_at.is_some_and(|at| at < cut) && r.error.is_none();
    let flushed = records
        .iter()
        .filter(|r| matches!(r.request, Request::Flush { .. }) && done(r))
        .map(|r| r.submitted_at)
        .max()
        .unwrap_or(0);
    let chance = *[0.0, 0.3, 0.7, 1.0].choose(rng).expect("not empty");
    let mut image = base.clone();
    for record in records.iter().filter(|r| r.submitted_at < cut) {
        let Request::Write { offset, bufs, fua, .. } = &record.request else { continue };
        let durable = done(record) && (*fua || record.completed_at.is_some_and(|at| at < flushed));
        let mut at = *offset;
        for buf in bufs {
            for (index, sector) in buf.chunks(512).enumerate() {
                // A request is torn only now and then.
                let kept = durable || rng.random_bool(chance);
                if kept {
                    image.write_at(at + index as u64 * 512, sector).expect("inside the image");
                }
            }
            at += buf.len() as u64;
        }
    }
    image
}

fn read_all(file: &InodeRef) -> Vec<u8> {
    let mut content = vec![0; file.attr().size as usize];
    let mut done = 0;
    while done < content.len() {
        let count = file.read(done as u64, &mut content[done..]).expect("read");
        assert!(count > 0, "the file ends before its size");
        done += count;
    }
    content
}

fn check(image: &MemImage, cut: u64, promises: &[Promise], options: &MountOptions, judge: bool) {
    let device = Arc::new(MemDevice::from_image(image));
    let fs = Fs::open_device(device.clone(), options).expect("recovery succeeds");
    {
        let root = fs.root().expect("root");
        for promise in promises.iter().filter(|p| p.from < cut && cut <= p.until) {
            let found = root.lookup(promise.name.as_bytes());
            match (&promise.content, found) {
                (None, Err(_)) => {}
                (Some(content), Ok(file)) => {
                    let now = read_all(&file);
                    let differ = now.iter().zip(content).position(|(a, b)| a != b);
                    assert!(
                        now == *content,
                        "cut {cut}: {} has {} bytes, promised {}; first difference at {differ:?} \
                         (promised at {})",
                        promise.name,
                        now.len(),
                        content.len(),
                        promise.from,
                    );
                }
                (want, found) => panic!(
                    "cut {cut}: {}: promised {:?} bytes, found {:?}",
                    promise.name,
                    want.as_ref().map(Vec::len),
                    found.map(|f| f.attr().size),
                ),
            }
        }
    }
    fs.unmount().expect("unmount");
    if judge {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("image");
        device.snapshot().write_to_file(&path).expect("written out");
        let fsck = Command::new("e2fsck").args(["-fn"]).arg(&path).output().expect("e2fsck runs");
        assert!(fsck.status.success(), "cut {cut}: {}", String::from_utf8_lossy(&fsck.stdout));
    }
}

fn campaign(features: &[&str], options: &MountOptions) {
    let seed = seed();
    println!("power cuts: seed {seed} (rerun with FJORD_SEED={seed})");
    let base = image(features);
    let memory = Arc::new(MemDevice::from_image(&base));
    // What no flush covers may be lost: a device with a volatile cache.
    let device = FaultDevice::new(memory).claiming(|has| has.volatile_cache = true);
    let device = Arc::new(device);
    device.start_recording();
    let options = MountOptions { background_threads: false, ..options.clone() };
    let fs = Fs::open_device(device.clone() as Arc<dyn Device>, &options).expect("open");
    let root = fs.root().expect("root");
    let mut run = Run {
        rng: StdRng::seed_from_u64(seed),
        device: device.clone(),
        fs: fs.clone(),
        root,
        live: BTreeMap::new(),
        promised: BTreeMap::new(),
        promises: Vec::new(),
        renamed: BTreeSet::new(),
    };
    for _ in 0..STEPS {
        run.step();
    }
    let end = device.stamp();
    let promises = std::mem::take(&mut run.promises);
    drop(run);
    let records = device.take_recording();
    let mut rng = StdRng::seed_from_u64(seed ^ 0x5eed);
    for index in 0..CUTS {
        let cut = rng.random_range(1..=end);
        let image = after_cut(&base, &records, cut, &mut rng);
        check(&image, cut, &promises, &options, index % 4 == 0);
    }
}

#[test]
fn ordered() {
    campaign(&[], &MountOptions::default());
}

#[test]
fn ordered_1k_blocks() {
    campaign(&["-b", "1024"], &MountOptions::default());
}

#[test]
fn block_map_with_journal() {
    campaign(&["-O", "^extents,^64bit,^metadata_csum"], &MountOptions::default());
}

#[test]
fn data_journal() {
    campaign(&[], &MountOptions { data: DataMode::Journal, ..MountOptions::default() });
}

#[test]
fn inline_data_and_orphan_file() {
    campaign(&["-O", "inline_data,orphan_file"], &MountOptions::default());
}

/// Without flushes the same cuts must find lost promises: the check bites.
#[test]
fn without_barriers_promises_are_lost() {
    let options = MountOptions { barrier: false, ..MountOptions::default() };
    let kept = std::panic::catch_unwind(|| campaign(&[], &options));
    assert!(kept.is_err(), "no promise was lost although nothing was ever flushed");
}
