//! A server that is killed while it unmounts itself ends, and its mount with it. Needs root and
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
use fjord_fuse::mount::{FuseOptions, MountKind, mount_at};
use fjord_testkit::gate_device::{Cache, GateDevice};
use fjord_testkit::size::pick;

/// The directory of the image and the mount point, for the process that serves.
const DIR: &str = "FJORD_KILLED_SERVER_DIR";
/// Set if it is a `fuseblk` mount.
const IS_FUSEBLK: &str = "FJORD_KILLED_SERVER_FUSEBLK";
const IN_UMOUNT: &str = "the umount waits for the device";
const LONG: Duration = Duration::from_secs(120);

/// Serves a mount and unmounts it while the device does not answer.
fn serve(dir: &Path) {
    let (image, mountpoint) = (dir.join("image"), dir.join("mnt"));
    let memory = MemDevice::from_file(&image).unwrap();
    let gate = Arc::new(GateDevice::new(&memory.snapshot(), Cache::Volatile));
    let options = MountOptions { background_threads: false, ..MountOptions::default() };
    let fs = Fs::open_device(gate.clone(), &options).unwrap();
    let is_fuseblk = std::env::var_os(IS_FUSEBLK).is_some();
    let kind = if is_fuseblk { MountKind::Fuseblk } else { MountKind::Fuse };
    let fuse = FuseOptions { kind, ..FuseOptions::default() };
    let server = Server::mount(&fs, &image, &mountpoint, &fuse).unwrap();
    let handle = server.handle();
    let serving = thread::spawn(move || server.run());
    fs::write(mountpoint.join("file"), b"content").unwrap();
    gate.hold(|_| true);
    let unmounting = thread::spawn(move || handle.unmount());
    gate.wait_until_held();
    println!("\n{IN_UMOUNT}");
    unmounting.join().unwrap().unwrap();
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

/// Starts `test` again as the process that serves, kills it, and looks at what it leaves.
fn kill(test: &str, is_fuseblk: bool) {
    let dir = tempfile::tempdir().unwrap();
    let (image, mountpoint) = (dir.path().join("image"), dir.path().join("mnt"));
    fs::create_dir(&mountpoint).unwrap();
    let mut mke2fs = Command::new("mke2fs");
    let made = mke2fs.args(["-q", "-F", "-t", "ext4"]).arg(&image).arg("64M").status();
    assert!(made.expect("e2fsprogs").success());
    let mut server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(DIR, dir.path())
        .envs(is_fuseblk.then_some((IS_FUSEBLK, "1")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let has_begun = lines.any(|line| line.unwrap() == IN_UMOUNT);
    server.kill().unwrap();
    assert!(has_begun, "the server ended before its umount");
    let stays = "the server is in its umount for ever: echo 1 >/sys/fs/fuse/connections/N/abort";
    assert_eq!(ends(&mut server).expect(stays).signal(), Some(libc::SIGKILL));
    let began = Instant::now();
    while mount_at(&mountpoint).unwrap().is_some() {
        assert!(began.elapsed() < LONG, "the umount of the child does not end");
        thread::sleep(Duration::from_millis(5));
    }
    // The lock of the image is free.
    Fs::open(&image, &MountOptions::default()).unwrap().unmount().unwrap();
}

/// Runs as the test and, with [`DIR`], as the process that it kills.
fn killed(test: &str, is_fuseblk: bool) {
    match std::env::var_os(DIR) {
        Some(dir) => serve(Path::new(&dir)),
        None => (0..pick(1, 4, 25)).for_each(|_| kill(test, is_fuseblk)),
    }
}

#[test]
fn a_server_killed_in_its_umount_ends() {
    killed("a_server_killed_in_its_umount_ends", true);
}

#[test]
fn a_server_killed_after_the_umount_of_plain_fuse_ends() {
    killed("a_server_killed_after_the_umount_of_plain_fuse_ends", false);
}
