//! An fsync whose commit is under way already: the flush of that commit may be over, and then it
//! does not cover data that was written in place since.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fjord::{Cred, Fs, FsyncPolicyKind, MountOptions};
use fjord_block::{MemDevice, MemImage, Request};
use fjord_testkit::gate_device::{Cache, GateDevice};

fn new_image() -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let mut mke2fs = Command::new("mke2fs");
    let made =
        mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit"]).arg(&path).arg("16M").output();
    assert!(made.expect("mke2fs runs (package e2fsprogs)").status.success());
    MemDevice::from_file(&path).expect("the image is read").snapshot()
}

/// Whether a request writes a page of this byte.
fn writes(request: &Request, byte: u8) -> bool {
    matches!(request, Request::Write { bufs, .. } if bufs[0][0] == byte)
}

#[test]
fn data_written_behind_the_flush_of_a_commit_gets_its_own() {
    for fsync in [FsyncPolicyKind::Compound, FsyncPolicyKind::Group, FsyncPolicyKind::FastCommit] {
        let device = Arc::new(GateDevice::new(&new_image(), Cache::Volatile));
        let options = MountOptions { fsync, background_threads: false, ..MountOptions::default() };
        let fs = Fs::open_device(device.clone(), &options).expect("mounted");
        let root = fs.root().expect("a root");
        let file = root.create(b"file", 0o644, &Cred::root()).expect("a file");
        file.write(0, &[1; 4096]).expect("written");
        file.fsync(false).expect("on the device");
        // Extents of the second block commit, and the commit block is held up.
        file.write(4096, &[2; 4096]).expect("written");
        device.hold(|request| matches!(request, Request::Write { fua: true, .. }));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| file.fsync(false));
            device.wait_until_held();
            file.write(0, &[77; 4096]).expect("written");
            let second = scope.spawn(|| file.fsync(true));
            // It comes to wait for the commit; if it is slower, it comes after the commit.
            std::thread::sleep(Duration::from_millis(30));
            device.release_all();
            first.join().expect("no panic").expect("on the device");
            second.join().expect("no panic").expect("on the device");
        });
        let requests: Vec<Request> =
            device.records().into_iter().map(|record| record.request).collect();
        let written = requests.iter().rposition(|request| writes(request, 77));
        let written = written.expect("the data was written before fdatasync returned");
        let is_flush = |request: &Request| matches!(request, Request::Flush { .. });
        assert!(
            requests[written..].iter().any(is_flush),
            "{}: no flush after the write: {:?}",
            fsync.name(),
            requests[written..].iter().map(Request::extent).collect::<Vec<_>>()
        );
        fs.unmount().expect("unmounted");
    }
}
