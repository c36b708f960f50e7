//! The protocol and the mount against the real kernel, without an engine: one root directory with
//! files in it, whose requests are counted. Needs root and /dev/fuse.

use std::{
    collections::HashMap,
    ffi::CString,
    fs::{self, File},
    io::Write,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fjord_fuse::{
    abi::*,
    mount::{self, FuseOptions, MountError, MountKind},
    reply::Responder,
    request::{Op, Request},
    session::{Handler, Negotiated, Scratch, Session, SessionConfig},
};
use parking_lot::Mutex;

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);

fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[derive(Default)]
struct Seen {
    counts: Mutex<HashMap<u32, u32>>,
    /// Calls of fsync do not return until this is reset.
    holds_fsyncs: AtomicBool,
    held_count: AtomicU32,
    destroyed: AtomicBool,
}

impl Seen {
    fn count(&self, op: Opcode) -> u32 {
        self.counts.lock().get(&(op as u32)).copied().unwrap_or(0)
    }
}

/// Answers for a directory (node 1) and a file `f` (node 3); writes are thrown away.
struct Null {
    seen: Arc<Seen>,
    destroy_takes: Duration,
}

fn attr(nodeid: u64) -> FuseAttr {
    let mode = if nodeid == FUSE_ROOT_ID { 0o40755 } else { 0o100644 };
    FuseAttr { ino: nodeid, mode, nlink: 1, blksize: 4096, ..Default::default() }
}

impl Handler for Null {
    fn init(&self, negotiated: Negotiated) {
        assert!(negotiated.flags.contains(InitFlags::MAX_PAGES | InitFlags::INIT_EXT));
    }

    fn handle(&self, request: &Request<'_>, reply: Responder, _: &mut Scratch) {
        *self.seen.counts.lock().entry(request.header.opcode).or_default() += 1;
        let nodeid = request.header.nodeid;
        match &request.op {
            // The file `f` and any number of `ff`, `fff`, …
            Op::Lookup { name } if name.iter().all(|&b| b == b'f') => reply.value(&EntryOut {
                nodeid: 2 + name.len() as u64,
                entry_valid: 60,
                attr_valid: 60,
                attr: attr(2 + name.len() as u64),
                ..Default::default()
            }),
            Op::Lookup { .. } => reply.error(libc::ENOENT),
            Op::Getattr(_) => {
                reply.value(&AttrOut { attr_valid: 60, attr: attr(nodeid), ..Default::default() });
            }
            Op::Open(_) | Op::Opendir(_) => reply.value(&OpenOut { fh: 7, ..Default::default() }),
            Op::Write { args, data } => {
                assert_eq!(args.size as usize, data.len());
                if args.size >= 4096 {
                    assert_eq!(data.as_ptr() as usize % 4096, 0);
                }
                reply.value(&WriteOut { size: args.size, padding: 0 });
            }
            Op::Fsync(_) => {
                self.seen.held_count.fetch_add(1, Ordering::SeqCst);
                while self.seen.holds_fsyncs.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
                self.seen.held_count.fetch_sub(1, Ordering::SeqCst);
                reply.empty();
            }
            Op::Statfs => reply.value(&StatfsOut { bsize: 4096, ..Default::default() }),
            Op::Release(_) | Op::Releasedir(_) | Op::Syncfs | Op::Flush(_) => reply.empty(),
            Op::Forget { .. } | Op::BatchForget { .. } => reply.none(),
            // Dropping the responder must answer EIO.
            Op::Mkdir { .. } => {}
            _ => reply.error(libc::ENOSYS),
        }
    }

    fn destroy(&self) {
        thread::sleep(self.destroy_takes);
        self.seen.destroyed.store(true, Ordering::SeqCst);
    }
}

struct Served {
    _dir: tempfile::TempDir,
    mountpoint: std::path::PathBuf,
    handle: mount::MountHandle,
    seen: Arc<Seen>,
    server: Option<thread::JoinHandle<()>>,
}

impl Served {
    fn new(kind: MountKind, destroy_takes: Duration) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let mountpoint = dir.path().join("mnt");
        fs::create_dir(&mountpoint).unwrap();
        let options = FuseOptions { kind, ..Default::default() };
        let mounted = mount::mount(&image, &mountpoint, &options, 4096, None).unwrap();
        let seen = Arc::new(Seen::default());
        let null = Null { seen: Arc::clone(&seen), destroy_takes };
        let session = Session::new(mounted.transport(), null, SessionConfig::default());
        session.init().unwrap();
        mounted.set_readahead(1 << 20);
        let handle = mounted.handle();
        let server = thread::spawn(move || session.run().unwrap());
        Served { _dir: dir, mountpoint, handle, seen, server: Some(server) }
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(self.mountpoint.join("f")).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.handle.unmount_or_cut(Duration::ZERO);
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "whoever kills a test ends its connection")]
fn fuseblk_waits_for_destroy_and_passes_syncfs_on() {
    let s = Served::new(MountKind::Fuseblk, Duration::from_millis(300));
    let entry = mount::mount_at(&s.mountpoint).unwrap().unwrap();
    assert_eq!(entry.fs_type, "fuseblk.fjord");
    assert!(entry.is_fjord() && entry.source.starts_with("/dev"));
    rustix::fs::syncfs(File::open(&s.mountpoint).unwrap()).unwrap();
    assert_eq!(s.seen.count(Opcode::Syncfs), 1);
    s.handle.unmount().unwrap();
    // An umount that does not wait goes unnoticed if it takes longer than DESTROY.
    assert!(s.seen.destroyed.load(Ordering::SeqCst), "umount returned before DESTROY was served");
    s.handle.unmount().unwrap();
    // The loop device goes with the mount.
    let device = entry.source;
    let backing = || mount::loop_backings().into_iter().find(|b| b.device == device);
    wait_until("the loop device goes", || {
        backing().is_none_or(|backing| !backing.file.starts_with(s._dir.path()))
    });
}

#[test]
fn plain_fuse_ends_with_destroy_too() {
    let mut s = Served::new(MountKind::Fuse, Duration::from_millis(50));
    assert_eq!(mount::mount_at(&s.mountpoint).unwrap().unwrap().fs_type, "fuse.fjord");
    s.handle.unmount().unwrap();
    s.server.take().unwrap().join().unwrap();
    assert!(s.seen.destroyed.load(Ordering::SeqCst));
}

#[test]
fn requests_are_served_and_refused_with_the_right_errno() {
    let s = Served::new(MountKind::Auto, Duration::ZERO);
    let errno = |r: std::io::Result<()>| r.unwrap_err().raw_os_error();
    let at = |name: &str| s.mountpoint.join(name);
    assert_eq!(errno(fs::metadata(at("absent")).map(drop)), Some(libc::ENOENT));
    assert_eq!(errno(fs::create_dir(at(&"n".repeat(256)))), Some(libc::ENAMETOOLONG));
    assert_eq!(errno(fs::create_dir(at("d"))), Some(libc::EIO), "unanswered means EIO");
    let mut f = s.file();
    f.write_all(&vec![1; 3 << 20]).unwrap();
    assert!(s.seen.count(Opcode::Write) <= 4, "writes are not large");
    f.write_all_at(b"x", 1).unwrap();
    f.sync_all().unwrap();
    assert_eq!(f.metadata().unwrap().mode(), 0o100644);
    drop(f);
    let path = CString::new(s.mountpoint.join("f").as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the path is a C string; a null value of length 0 only asks for the size.
    let rc = unsafe { libc::getxattr(path.as_ptr(), c"user.a".as_ptr(), std::ptr::null_mut(), 0) };
    assert_eq!(rc, -1);
}

#[test]
fn sleeping_workers_hold_nobody_up() {
    const COUNT: usize = 16;
    let s = Served::new(MountKind::Auto, Duration::ZERO);
    s.seen.holds_fsyncs.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let _opens = Opens(&s.seen);
        // Files of their own: the kernel lets only one fsync per file through at a time.
        for n in 1..=COUNT {
            let path = s.mountpoint.join("f".repeat(n));
            scope.spawn(|| File::open(path).unwrap().sync_all().unwrap());
        }
        let held = || s.seen.held_count.load(Ordering::SeqCst) as usize;
        wait_until("all fsyncs are served at a time", || held() == COUNT);
        let path = s.mountpoint.join("other");
        let other = scope.spawn(|| fs::metadata(path).is_err());
        wait_until("a lookup beside them", || other.is_finished());
        assert!(other.join().unwrap());
        assert_eq!(held(), COUNT);
    });
}

/// Lets the fsyncs return when dropped.
struct Opens<'a>(&'a Seen);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        self.0.holds_fsyncs.store(false, Ordering::SeqCst);
    }
}

#[test]
fn a_busy_mount_is_told_and_can_be_cut() {
    let s = Served::new(MountKind::Auto, Duration::ZERO);
    let f = s.file();
    assert!(matches!(s.handle.unmount(), Err(MountError::Busy(_))));
    s.handle.unmount_or_cut(Duration::from_millis(100)).unwrap();
    assert!(f.sync_all().is_err());
    wait_until("the session ends", || s.seen.destroyed.load(Ordering::SeqCst));
}

#[test]
fn bad_mountpoints_are_told_apart() {
    let s = Served::new(MountKind::Auto, Duration::ZERO);
    assert!(matches!(
        mount::check_mountpoint(&s.mountpoint),
        Err(MountError::AlreadyMounted { .. })
    ));
    let absent = Path::new("/nonexistent/fjord");
    assert!(matches!(mount::check_mountpoint(absent), Err(MountError::NoMountpoint(_))));
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(matches!(mount::check_mountpoint(file.path()), Err(MountError::NotADirectory(_))));
}
