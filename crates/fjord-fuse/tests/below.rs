//! An image on a FUSE file system that does not look at O_DSYNC: only an FSYNC makes writes stay.
//! The server counts them and loses the rest, as a power cut does. Needs root and /dev/fuse.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use fjord::{Cred, Fs, FsyncPolicyKind, MountOptions};
use fjord_block::{Device, DeviceExt, FileDevice, FileOptions, Request as DeviceRequest};
use fjord_fuse::{
    abi::*,
    mount::{self, FuseOptions, MountKind},
    reply::Responder,
    request::{Op, Request},
    session::{Handler, Negotiated, Scratch, Session, SessionConfig},
};
use parking_lot::Mutex;

const FILE: u64 = 3;

/// What a file holds now, and what a power cut leaves of it.
#[derive(Default)]
struct Disk {
    cached: Mutex<Vec<u8>>,
    durable: Mutex<Vec<u8>>,
    fsync_count: AtomicU32,
}

/// One file, `f`, that is read and written past the kernel's cache.
struct Forgetful(Arc<Disk>);

impl Forgetful {
    fn attr(&self, nodeid: u64) -> FuseAttr {
        let (mode, size) = match nodeid {
            FUSE_ROOT_ID => (0o40755, 0),
            _ => (0o100644, self.0.cached.lock().len() as u64),
        };
        FuseAttr { ino: nodeid, mode, nlink: 1, blksize: 4096, size, ..Default::default() }
    }
}

impl Handler for Forgetful {
    fn init(&self, _: Negotiated) {}

    fn handle(&self, request: &Request<'_>, reply: Responder, _: &mut Scratch) {
        let nodeid = request.header.nodeid;
        match &request.op {
            Op::Lookup { name } if *name == b"f" => {
                reply.value(&EntryOut { nodeid: FILE, attr: self.attr(FILE), ..Default::default() })
            }
            Op::Lookup { .. } => reply.error(libc::ENOENT),
            Op::Getattr(_) => {
                reply.value(&AttrOut { attr: self.attr(nodeid), ..Default::default() });
            }
            Op::Open(_) => {
                let open_flags = OpenReplyFlags::DIRECT_IO.bits();
                reply.value(&OpenOut { open_flags, ..Default::default() });
            }
            Op::Opendir(_) => reply.value(&OpenOut::default()),
            Op::Read(args) => {
                let cached = self.0.cached.lock();
                let start = (args.offset as usize).min(cached.len());
                let end = (start + args.size as usize).min(cached.len());
                reply.bytes(&cached[start..end]);
            }
            Op::Write { args, data } => {
                let mut cached = self.0.cached.lock();
                let start = args.offset as usize;
                cached[start..start + data.len()].copy_from_slice(data);
                reply.value(&WriteOut { size: args.size, padding: 0 });
            }
            Op::Fsync(_) => {
                let cached = self.0.cached.lock();
                self.0.durable.lock().copy_from_slice(&cached);
                self.0.fsync_count.fetch_add(1, Ordering::SeqCst);
                reply.empty();
            }
            Op::Statfs => reply.value(&StatfsOut { bsize: 4096, ..Default::default() }),
            Op::Release(_) | Op::Releasedir(_) | Op::Flush(_) => reply.empty(),
            Op::Forget { .. } | Op::BatchForget { .. } => reply.none(),
            _ => reply.error(libc::ENOSYS),
        }
    }

    fn destroy(&self) {}
}

struct Served {
    dir: tempfile::TempDir,
    handle: mount::MountHandle,
    disk: Arc<Disk>,
    server: Option<thread::JoinHandle<()>>,
}

impl Served {
    fn new(content: Vec<u8>) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let mountpoint = dir.path().join("mnt");
        std::fs::create_dir(&mountpoint).unwrap();
        let options = FuseOptions { kind: MountKind::Fuse, ..Default::default() };
        let source = dir.path().join("source");
        File::create(&source).unwrap().set_len(1 << 20).unwrap();
        let mounted = mount::mount(&source, &mountpoint, &options, 4096, None).unwrap();
        let disk = Arc::new(Disk::default());
        *disk.durable.lock() = content.clone();
        *disk.cached.lock() = content;
        let forgetful = Forgetful(disk.clone());
        let session = Session::new(mounted.transport(), forgetful, SessionConfig::default());
        session.init().unwrap();
        let handle = mounted.handle();
        let server = thread::spawn(move || session.run().unwrap());
        Served { dir, handle, disk, server: Some(server) }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("mnt").join("f")
    }

    /// What a power cut would leave now, in a file.
    fn after_power_cut(&self) -> PathBuf {
        let path = self.dir.path().join("cut");
        std::fs::write(&path, &*self.disk.durable.lock()).unwrap();
        path
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.handle.unmount_or_cut(Duration::from_secs(1));
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }
}

#[test]
fn fua_is_followed_by_an_fsync() {
    let served = Served::new(vec![0; 1 << 20]);
    let device = FileDevice::open(&served.path(), &FileOptions::default()).unwrap();
    assert!(!device.capabilities().fua);
    for (number, offset) in [(1, 4096), (2, 1000)] {
        let fua = DeviceRequest::Write {
            offset,
            bufs: vec![fjord_block::Buf::from_slice(&[number; 512])],
            order: fjord_block::Order::Orderless,
            fua: true,
            class: fjord_block::Class::Sync,
        };
        device.submit_one(fua).wait().unwrap();
        let durable = served.disk.durable.lock();
        assert_eq!(durable[offset as usize..][..512], [number; 512]);
    }
    assert_eq!(served.disk.fsync_count.load(Ordering::SeqCst), 2);
    // One after the other, several at a time.
    let batch = (0..8_u64).map(|at| DeviceRequest::Write {
        offset: 8192 + at * 4096,
        bufs: vec![fjord_block::Buf::from_slice(&[9; 4096])],
        order: fjord_block::Order::Orderless,
        fua: true,
        class: fjord_block::Class::Async,
    });
    device.submit(batch.collect()).iter().for_each(|ticket| ticket.wait().unwrap());
    assert_eq!(served.disk.durable.lock()[8192..][..8 * 4096], [9; 8 * 4096]);
}

fn run(command: &mut Command) {
    let output = command.output().expect("e2fsprogs");
    assert!(output.status.success(), "{command:?}: {output:?}");
}

/// An image with what the policy needs.
fn image(dir: &Path, policy: FsyncPolicyKind) -> Vec<u8> {
    let path = dir.join("image");
    File::create(&path).unwrap().set_len(32 << 20).unwrap();
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit", "-J", "size=4"]);
    run(mke2fs.arg(&path));
    if policy == FsyncPolicyKind::Ijournal {
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        let fs = Fs::open(&path, &options).unwrap();
        let layout = fjord::AreaLayout { count: 2, area_bytes: 256 << 10 };
        fs.set_ijournal_areas(Some(layout)).unwrap();
        fs.unmount().unwrap();
    }
    std::fs::read(&path).unwrap()
}

#[test]
fn an_fsync_survives_the_servers_power_cut() {
    for &policy in FsyncPolicyKind::ALL {
        let scratch = tempfile::tempdir().unwrap();
        let served = Served::new(image(scratch.path(), policy));
        let options =
            MountOptions { fsync: policy, background_threads: false, ..MountOptions::default() };
        let fs = Fs::open(served.path(), &options).unwrap();
        let root = fs.root().unwrap();
        for number in 0..5_usize {
            let name = format!("file-{number}");
            let file = root.create(name.as_bytes(), 0o644, &Cred::root()).unwrap();
            file.write(0, &vec![number as u8; 3000 + 9000 * number]).unwrap();
            file.open().fsync(false).unwrap();
            drop(file);
            let cut = served.after_power_cut();
            let found = Fs::open(&cut, &options).unwrap();
            for number in 0..=number {
                let content = found.read(format!("file-{number}"));
                let content = content.unwrap_or_else(|error| {
                    panic!("{}: file-{number} of {name}: {error}", policy.name())
                });
                assert_eq!(content, vec![number as u8; 3000 + 9000 * number]);
            }
            found.unmount().unwrap();
            drop(found);
            run(Command::new("e2fsck").args(["-fn"]).arg(&cut));
        }
        drop(root);
        fs.unmount().unwrap();
    }
}
