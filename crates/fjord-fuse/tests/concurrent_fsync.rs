//! Hundreds of concurrent fsyncs through the kernel, served by a few workers. Needs root and
//! /dev/fuse.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fjord::{AreaLayout, CommitPipeline, Fs, FsyncPolicyKind, MountOptions, Scheduler};
use fjord_block::MemDevice;
use fjord_fuse::Server;
use fjord_fuse::mount::{FuseOptions, MountError, MountHandle, MountKind};
use fjord_testkit::gate_device::{Cache, GateDevice, is_durable};
use parking_lot::{Mutex, MutexGuard};

const FILE_COUNT: usize = 256;
const WORKERS_MAX: usize = 8;
/// Workers that are left of any number when nothing but commits goes on: those that commit, those
/// that may stay idle, and one more.
const WORKERS_AT_REST: usize = 3 + 4 + 1;
/// Ends a test that would hang.
const LONG: Duration = Duration::from_secs(120);

/// Workers are counted by their name, so one mount at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Opens the gate when it is dropped by a panic.
struct Opens<'a>(&'a GateDevice);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.release_all();
        }
    }
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The thread numbers of the workers of the daemon, which is this process; also of ending ones.
fn workers() -> BTreeSet<OsString> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let is_worker = |task: &fs::DirEntry| {
        // A thread may have ended meanwhile.
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        name.trim_end() == "fjord-fuse"
    };
    tasks.filter_map(Result::ok).filter(is_worker).map(|task| task.file_name()).collect()
}

fn worker_count() -> usize {
    workers().len()
}

/// How often a thread has gone to sleep.
fn sleep_count(worker: &OsString) -> Option<u64> {
    let path = Path::new("/proc/self/task").join(worker).join("status");
    let status = fs::read_to_string(path).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line?.trim().parse().ok()
}

/// The number of workers without those that are ending. If there are too many, they are watched until
/// some are gone, or all have slept so often that they do not only wait for a processor to end on. So
/// many have when `done` says that the others no longer will.
fn staying_worker_count(done: impl Fn() -> bool) -> usize {
    const SLEEPS: u64 = 20;
    let first: Vec<_> =
        workers().into_iter().filter_map(|id| Some((sleep_count(&id)?, id))).collect();
    loop {
        let there = workers();
        let staying = || first.iter().filter(|(_, id)| there.contains(id));
        let has_served = |(before, id): &&(u64, OsString)| {
            sleep_count(id).is_some_and(|now| now >= before + SLEEPS)
        };
        let served = staying().filter(has_served).count();
        if staying().count() <= WORKERS_MAX || served == staying().count() {
            return staying().count();
        }
        if done() {
            return served;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// How many threads of a process, else of this one, sleep in fsync(2).
fn in_fsync(process: Option<u32>) -> usize {
    let process = process.map_or_else(|| "self".to_owned(), |process| process.to_string());
    let fsync = format!("{} ", libc::SYS_fsync);
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { return 0 };
    let sleeps = |task: &fs::DirEntry| {
        let call = fs::read_to_string(task.path().join("syscall"));
        call.is_ok_and(|call| call.starts_with(&fsync))
    };
    tasks.filter_map(Result::ok).filter(sleeps).count()
}

/// In what mounts differ.
#[derive(Clone, Copy, Debug)]
struct Setup {
    fsync: FsyncPolicyKind,
    pipeline: CommitPipeline,
    threads_max: Option<usize>,
}

impl Setup {
    fn new(fsync: FsyncPolicyKind, pipeline: CommitPipeline) -> Setup {
        Setup { fsync, pipeline, threads_max: None }
    }
}

struct Mounted {
    dir: tempfile::TempDir,
    gate: Arc<GateDevice>,
    fs: Option<Fs>,
    handle: MountHandle,
    server: Option<thread::JoinHandle<Result<(), fjord_fuse::ServeError>>>,
    _alone: MutexGuard<'static, ()>,
}

impl Mounted {
    fn new(setup: Setup) -> Mounted {
        let alone = ALONE.lock();
        println!("{setup:?}");
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit", "-J", "size=8"]);
        run(mke2fs.arg(&image).arg("64M"));
        let memory = Arc::new(MemDevice::from_file(&image).unwrap());
        let options = MountOptions {
            fsync: setup.fsync,
            pipeline: setup.pipeline,
            scheduler: match setup.pipeline {
                CommitPipeline::Dual => Scheduler::Epoch,
                _ => Scheduler::Direct,
            },
            background_threads: false,
            ..MountOptions::default()
        };
        if setup.fsync == FsyncPolicyKind::Ijournal {
            let plain = MountOptions { background_threads: false, ..MountOptions::default() };
            let fs = Fs::open_device(memory.clone(), &plain).unwrap();
            fs.set_ijournal_areas(Some(AreaLayout { count: 2, area_bytes: 1 << 20 })).unwrap();
            fs.unmount().unwrap();
        }
        let gate = Arc::new(GateDevice::new(&memory.snapshot(), Cache::Volatile));
        let fs = Fs::open_device(gate.clone(), &options).unwrap();
        let mountpoint = dir.path().join("mnt");
        fs::create_dir(&mountpoint).unwrap();
        let fuse = FuseOptions {
            kind: MountKind::Fuse,
            threads_max: setup.threads_max,
            ..FuseOptions::default()
        };
        let server = Server::mount(&fs, &image, &mountpoint, &fuse).unwrap();
        let handle = server.handle();
        let server = Some(thread::spawn(move || server.run()));
        Mounted { dir, gate, fs: Some(fs), handle, server, _alone: alone }
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join("mnt").join(name)
    }

    fn files(&self) -> Vec<File> {
        let open = |number: usize| {
            let options = File::options().read(true).write(true).create(true).clone();
            options.open(self.path(format!("file-{number}"))).unwrap()
        };
        (0..FILE_COUNT).map(open).collect()
    }

    /// Ends the mount; the result of the server.
    fn end(&mut self) -> Result<(), fjord_fuse::ServeError> {
        self.handle.unmount().unwrap();
        self.server.take().unwrap().join().unwrap()
    }

    /// What e2fsck and a new mount say about the image.
    fn check(&mut self, content: impl Fn(usize) -> Vec<u8>) {
        self.fs = None;
        let image = self.dir.path().join("after");
        let left = self.gate.completed_image();
        left.write_to_file(&image).unwrap();
        run(Command::new("e2fsck").args(["-fn"]).arg(&image));
        let fs = Fs::open_device(Arc::new(MemDevice::from_image(&left)), &MountOptions::default())
            .unwrap();
        for number in 0..FILE_COUNT {
            assert_eq!(fs.read(format!("/file-{number}")).unwrap(), content(number), "{number}");
        }
        fs.unmount().unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.gate.release_all();
        if let Some(server) = self.server.take() {
            let _ = self.handle.unmount_or_cut(Duration::ZERO);
            let _ = server.join();
        }
    }
}

fn run(command: &mut Command) {
    let output = command.output().expect("e2fsprogs");
    assert!(output.status.success(), "{command:?}: {output:?}");
}

fn page(number: usize, round: usize) -> Vec<u8> {
    format!("{number:08}{round:08}").repeat(256).into_bytes()
}

/// Appends a page to each file and calls fsync, from a thread for each, round after round.
fn append_and_fsync(files: &[File], rounds: usize) {
    thread::scope(|scope| {
        for (number, file) in files.iter().enumerate() {
            scope.spawn(move || {
                for round in 0..rounds {
                    file.write_all_at(&page(number, round), round as u64 * 4096).unwrap();
                    match round % 2 {
                        0 => file.sync_all().unwrap(),
                        _ => file.sync_data().unwrap(),
                    }
                }
            });
        }
    });
}

/// Every policy, serial and dual: 256 callers, eight workers.
#[test]
fn eight_workers_serve_hundreds_of_callers() {
    const ROUNDS: usize = 4;
    for &fsync in FsyncPolicyKind::ALL {
        for pipeline in [CommitPipeline::Serial, CommitPipeline::Dual] {
            let setup = Setup { threads_max: Some(WORKERS_MAX), ..Setup::new(fsync, pipeline) };
            let mut mounted = Mounted::new(setup);
            let files = mounted.files();
            let done = AtomicBool::new(false);
            let most = thread::scope(|scope| {
                let watch = scope.spawn(|| {
                    let mut most = 0;
                    while !done.load(Ordering::Relaxed) {
                        most = most.max(staying_worker_count(|| done.load(Ordering::Relaxed)));
                        thread::sleep(Duration::from_millis(1));
                    }
                    most
                });
                append_and_fsync(&files, ROUNDS);
                done.store(true, Ordering::Relaxed);
                watch.join().unwrap()
            });
            assert!((1..=WORKERS_MAX).contains(&most), "{setup:?}: {most} workers");
            let stats = mounted.fs.as_ref().unwrap().stats().fsync;
            assert_eq!(stats.calls(), (FILE_COUNT * ROUNDS) as u64, "{setup:?}: {stats:?}");
            drop(files);
            mounted.end().unwrap();
            mounted.check(|number| (0..ROUNDS).flat_map(|round| page(number, round)).collect());
        }
    }
}

/// The policies whose fsyncs wait without a worker, with the pipelines in which a device that does
/// not answer holds up nothing else.
const SUSPENDING: [(FsyncPolicyKind, CommitPipeline); 5] = [
    (FsyncPolicyKind::Compound, CommitPipeline::Serial),
    (FsyncPolicyKind::Group, CommitPipeline::Serial),
    (FsyncPolicyKind::FastCommit, CommitPipeline::Serial),
    (FsyncPolicyKind::Compound, CommitPipeline::Dual),
    (FsyncPolicyKind::Group, CommitPipeline::Dual),
];

/// Shuts the gate, and has an fsync of each file wait behind it while `then` runs.
fn suspended(mounted: &Mounted, files: &[File], then: impl FnOnce()) -> Vec<std::io::Result<()>> {
    let begun = AtomicUsize::new(0);
    // A fast commit has its worker wait for the transaction before: none is in flight then.
    mounted.fs.as_ref().unwrap().sync().unwrap();
    mounted.gate.hold(is_durable);
    thread::scope(|scope| {
        // The callers are waited for also if a check fails.
        let _opens = Opens(&mounted.gate);
        let callers: Vec<_> = files
            .iter()
            .enumerate()
            .map(|(number, file)| {
                let begun = &begun;
                scope.spawn(move || {
                    file.write_all_at(&page(number, 0), 0)?;
                    begun.fetch_add(1, Ordering::SeqCst);
                    file.sync_all()
                })
            })
            .collect();
        wait_until("all callers are there", || begun.load(Ordering::SeqCst) == files.len());
        mounted.gate.wait_until_held();
        wait_until("all callers are in their fsync", || in_fsync(None) == files.len());
        wait_until("the workers come to rest", || worker_count() <= WORKERS_AT_REST);
        // They do not only seem to; a worker that comes back later than this goes unnoticed.
        thread::sleep(Duration::from_millis(100));
        wait_until("the workers are at rest", || worker_count() <= WORKERS_AT_REST);
        assert!(callers.iter().all(|caller| !caller.is_finished()));
        then();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    })
}

#[test]
fn suspended_fsyncs_hold_no_workers() {
    for (fsync, pipeline) in SUSPENDING {
        let setup = Setup::new(fsync, pipeline);
        let mut mounted = Mounted::new(setup);
        let files = mounted.files();
        let other = File::create(mounted.path("other")).unwrap();
        let outcomes = suspended(&mounted, &files, || {
            // There is always a worker for other requests.
            assert!(fs::metadata(mounted.path("absent")).is_err());
            other.write_all_at(b"written", 0).unwrap();
            assert!(matches!(mounted.handle.unmount(), Err(MountError::Busy(_))));
            mounted.gate.release_all();
        });
        assert!(outcomes.iter().all(Result::is_ok), "{setup:?}: {outcomes:?}");
        drop((files, other));
        mounted.end().unwrap();
        mounted.check(|number| page(number, 0));
    }
}

/// The connection is cut while fsyncs wait: their callers are told, and the server ends, cleanly,
/// when the device answers.
#[test]
fn a_cut_mount_ends_when_its_fsyncs_have() {
    for (fsync, pipeline) in SUSPENDING {
        let mut mounted = Mounted::new(Setup::new(fsync, pipeline));
        let files = mounted.files();
        let outcomes = suspended(&mounted, &files, || {
            mounted.handle.unmount_or_cut(Duration::ZERO).unwrap();
            assert!(!mounted.server.as_ref().unwrap().is_finished());
        });
        assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
        mounted.gate.release_all();
        drop(files);
        mounted.server.take().unwrap().join().unwrap().unwrap();
        mounted.check(|number| page(number, 0));
    }
}

/// The journal's device fails while fsyncs wait: each caller gets EIO.
#[test]
fn a_failure_reaches_all_suspended_fsyncs() {
    for (fsync, pipeline) in SUSPENDING {
        let setup = Setup::new(fsync, pipeline);
        let mut mounted = Mounted::new(setup);
        let files = mounted.files();
        let outcomes = suspended(&mounted, &files, || {
            mounted.gate.fail_all();
            mounted.gate.release_all();
        });
        for (number, outcome) in outcomes.iter().enumerate() {
            let errno = outcome.as_ref().unwrap_err().raw_os_error();
            assert_eq!(errno, Some(libc::EIO), "{setup:?}: file {number}");
        }
        drop(files);
        assert!(mounted.end().is_err(), "{setup:?}: the image is not clean");
    }
}

/// A caller is killed while its fsync waits.
#[test]
fn a_killed_caller_leaves_the_others_alone() {
    for (fsync, pipeline) in SUSPENDING {
        let mut mounted = Mounted::new(Setup::new(fsync, pipeline));
        let files = mounted.files();
        let killed = mounted.path("killed");
        File::create(&killed).unwrap().write_all(b"first").unwrap();
        let outcomes = suspended(&mounted, &files, || {
            let mut victim = Command::new("dd")
                .args(["if=/dev/zero", "bs=4096", "count=1", "conv=fsync,notrunc"])
                .arg(format!("of={}", killed.display()))
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            wait_until("it waits for its fsync", || in_fsync(Some(victim.id())) == 1);
            victim.kill().unwrap();
            // So that the kernel interrupts the request; if it does so later, that goes untested.
            thread::sleep(Duration::from_millis(20));
            mounted.gate.release_all();
            assert_eq!(victim.wait().unwrap().signal(), Some(libc::SIGKILL));
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        // Its file is as usable as before.
        File::options().write(true).open(&killed).unwrap().sync_all().unwrap();
        drop(files);
        mounted.end().unwrap();
        mounted.check(|number| page(number, 0));
    }
}
