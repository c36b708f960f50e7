//! An fsync whose commit is under way already: the flush of that commit may be over, and then it
//! does not cover data that was written in place since.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fjord::{Cred, Fs, FsyncPolicyKind, MountOptions};
use fjord_block::{
    AlignedBuf, Capabilities, Class, Device, MemDevice, ReadTicket, Request, Ticket,
};
use parking_lot::{Condvar, Mutex};

/// A device that holds up durable writes, which commit blocks are, while its gate is shut, and
/// notes what it was asked.
#[derive(Debug)]
struct Gate {
    device: MemDevice,
    is_shut: Mutex<bool>,
    opened: Condvar,
    somebody_waits: AtomicBool,
    /// The first byte of each write, `None` for a flush.
    requests: Mutex<Vec<Option<u8>>>,
}

impl Gate {
    fn set_shut(&self, shut: bool) {
        *self.is_shut.lock() = shut;
        self.opened.notify_all();
    }
}

impl Device for Gate {
    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        for request in &batch {
            let noted = match request {
                Request::Write { bufs, fua, .. } => {
                    let mut is_shut = self.is_shut.lock();
                    while *fua && *is_shut {
                        self.somebody_waits.store(true, Ordering::SeqCst);
                        self.opened.wait(&mut is_shut);
                    }
                    Some(bufs[0][0])
                }
                Request::Flush { .. } => None,
                _ => continue,
            };
            self.requests.lock().push(noted);
        }
        self.device.submit(batch)
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.device.submit_read(offset, bufs, class)
    }
}

fn new_image() -> MemDevice {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let mut mke2fs = Command::new("mke2fs");
    let made =
        mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit"]).arg(&path).arg("16M").output();
    assert!(made.expect("mke2fs runs (package e2fsprogs)").status.success());
    MemDevice::from_file(&path).expect("the image is read")
}

#[test]
fn data_written_behind_the_flush_of_a_commit_gets_its_own() {
    for fsync in [FsyncPolicyKind::Compound, FsyncPolicyKind::Group, FsyncPolicyKind::FastCommit] {
        let device = Arc::new(Gate {
            device: new_image(),
            is_shut: Mutex::new(false),
            opened: Condvar::new(),
            somebody_waits: AtomicBool::new(false),
            requests: Mutex::default(),
        });
        let options = MountOptions { fsync, background_threads: false, ..MountOptions::default() };
        let fs = Fs::open_device(device.clone(), &options).expect("mounted");
        let root = fs.root().expect("a root");
        let file = root.create(b"file", 0o644, &Cred::root()).expect("a file");
        file.write(0, &[1; 4096]).expect("written");
        file.fsync(false).expect("on the device");
        // Extents of the second block commit, and the commit block is held up.
        file.write(4096, &[2; 4096]).expect("written");
        device.set_shut(true);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| file.fsync(false));
            while !device.somebody_waits.load(Ordering::SeqCst) && !first.is_finished() {
                std::thread::yield_now();
            }
            file.write(0, &[77; 4096]).expect("written");
            let second = scope.spawn(|| file.fsync(true));
            std::thread::sleep(Duration::from_millis(30));
            device.set_shut(false);
            first.join().expect("no panic").expect("on the device");
            second.join().expect("no panic").expect("on the device");
        });
        let requests = device.requests.lock().clone();
        let written = requests.iter().rposition(|first_byte| *first_byte == Some(77));
        let written = written.expect("the data was written before fdatasync returned");
        assert!(
            requests[written..].contains(&None),
            "{}: no flush after the write: {:?}",
            fsync.name(),
            &requests[written..]
        );
        fs.unmount().expect("unmounted");
    }
}
