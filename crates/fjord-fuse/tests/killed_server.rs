//! A server that is killed while it waits for its own answer ends, and its connection with it. Needs root and
//! /dev/fuse.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fjord::{Fs, MountOptions};
use fjord_block::MemDevice;
use fjord_fuse::Server;
use fjord_fuse::mount::{FuseOptions, MountKind, is_dead, mount_at, remount, unmount_dir};
use fjord_testkit::gate_device::{Cache, GateDevice};
use fjord_testkit::size::pick;
use rustix::mount::MountFlags;

/// The directory of the image and the mount point, for the process that serves.
const DIR: &str = "FJORD_KILLED_SERVER_DIR";
/// Set if it is a `fuseblk` mount.
const IS_FUSEBLK: &str = "FJORD_KILLED_SERVER_FUSEBLK";
const READY: &str = "the device does not answer";
const LONG: Duration = Duration::from_secs(120);

/// What a thread of the server waits for when the server is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Umount,
    Remount,
    /// A notification about a page that a READ of another process holds.
    Notification,
}

/// Serves a mount, and makes a call that waits for the device, which does not answer.
fn serve(dir: &Path, wait: Wait) {
    let (image, mountpoint) = (dir.join("image"), dir.join("mnt"));
    let memory = MemDevice::from_file(&image).unwrap();
    let gate = Arc::new(GateDevice::new(&memory.snapshot(), Cache::Volatile));
    let options = MountOptions { background_threads: false, ..MountOptions::default() };
    let fs = Fs::open_device(gate.clone(), &options).unwrap();
    let is_fuseblk = std::env::var_os(IS_FUSEBLK).is_some();
    let kind = if is_fuseblk { MountKind::Fuseblk } else { MountKind::Fuse };
    let mut fuse = FuseOptions { kind, ..FuseOptions::default() };
    // Each open that may read is followed by one that reaches the server.
    fuse.parse("strictatime").unwrap();
    let server = Server::mount(&fs, &image, &mountpoint, &fuse).unwrap();
    let handle = server.handle();
    let serving = thread::spawn(move || server.run());
    fs::write(mountpoint.join("file"), b"content").unwrap();
    // Its inode is in memory after this.
    fs::metadata(mountpoint.join("old")).unwrap();
    gate.hold(|_| true);
    gate.hold_reads();
    let waiting = thread::spawn(move || match wait {
        Wait::Umount => handle.unmount().unwrap(),
        // The release of the file may be under way.
        Wait::Remount => while remount(&mountpoint, MountFlags::RDONLY).is_err() {},
        Wait::Notification => {}
    });
    if wait != Wait::Notification {
        gate.wait_until_held();
    }
    println!("\n{READY}");
    waiting.join().unwrap();
    // An umount of plain `fuse` returns before the image is written.
    let _ = serving.join().unwrap();
}

/// Waits for the end of the process, for a while.
fn ends(server: &mut Child) -> Option<ExitStatus> {
    let began = Instant::now();
    while began.elapsed() < LONG {
        if let Some(status) = server.try_wait().unwrap() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Makes an image with a file of some age in `dir`.
fn make_image(dir: &Path) {
    let source = dir.join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("old"), vec![1; 1 << 16]).unwrap();
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-d"]).arg(&source).arg(dir.join("image")).arg("64M");
    assert!(mke2fs.status().expect("e2fsprogs").success());
}

/// Starts `test` again as the process that serves.
fn start(test: &str, dir: &Path, is_fuseblk: bool) -> Child {
    let mut server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(DIR, dir)
        .envs(is_fuseblk.then_some((IS_FUSEBLK, "1")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    if !lines.any(|line| line.unwrap() == READY) {
        server.kill().unwrap();
        panic!("the server ended before its wait");
    }
    server
}

/// Opens the old file twice: the first open reads a page, which no request of the second must wait for in
/// the server. Returns when the server has had the time to; the openers end with the server.
fn open_twice(server: &Child, mountpoint: &Path) {
    let old = mountpoint.join("old");
    for _ in 0..2 {
        let old = old.clone();
        thread::spawn(move || fs::read(old));
        // For the READ of the first; too short a time makes this test easier to pass.
        thread::sleep(Duration::from_millis(100));
    }
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        for thread in fs::read_dir(format!("/proc/{}/task", server.id())).unwrap().flatten() {
            let wchan = fs::read_to_string(thread.path().join("wchan")).unwrap_or_default();
            if wchan.contains("folio") || wchan.contains("page") {
                return;
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a server in `wait`, and looks at what it leaves.
fn kill(test: &str, is_fuseblk: bool, wait: Wait) {
    let dir = tempfile::tempdir().unwrap();
    let (image, mountpoint) = (dir.path().join("image"), dir.path().join("mnt"));
    fs::create_dir(&mountpoint).unwrap();
    make_image(dir.path());
    let mut server = start(test, dir.path(), is_fuseblk);
    if wait == Wait::Notification {
        open_twice(&server, &mountpoint);
    }
    server.kill().unwrap();
    let stays = "the server waits for itself for ever: echo 1 >/sys/fs/fuse/connections/N/abort";
    assert_eq!(ends(&mut server).expect(stays).signal(), Some(libc::SIGKILL));
    if wait != Wait::Umount {
        assert!(is_dead(&mountpoint));
        unmount_dir(&mountpoint, true).unwrap();
    }
    let began = Instant::now();
    while mount_at(&mountpoint).unwrap().is_some() {
        assert!(began.elapsed() < LONG, "the umount of the child does not end");
        thread::sleep(Duration::from_millis(5));
    }
    // The lock of the image is free.
    Fs::open(&image, &MountOptions::default()).unwrap().unmount().unwrap();
}

/// Runs as the test and, with [`DIR`], as the process that it kills.
fn killed(test: &str, is_fuseblk: bool, wait: Wait) {
    match std::env::var_os(DIR) {
        Some(dir) => serve(Path::new(&dir), wait),
        None => (0..pick(1, 4, 25)).for_each(|_| kill(test, is_fuseblk, wait)),
    }
}

#[test]
fn a_server_killed_in_its_umount_ends() {
    killed("a_server_killed_in_its_umount_ends", true, Wait::Umount);
}

#[test]
fn a_server_killed_after_the_umount_of_plain_fuse_ends() {
    killed("a_server_killed_after_the_umount_of_plain_fuse_ends", false, Wait::Umount);
}

#[test]
fn a_server_killed_in_its_remount_ends() {
    killed("a_server_killed_in_its_remount_ends", true, Wait::Remount);
}

#[test]
fn a_server_killed_in_a_notification_ends() {
    killed("a_server_killed_in_a_notification_ends", true, Wait::Notification);
}
