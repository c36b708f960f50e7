//! From the making of an image to its end: created, closed, dropped, locked, killed.

use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fjord::{
    Cred, Error, FileDevice, FileOptions, Fs, FsyncPolicyKind, IjournalAreas, MemDevice,
    MkfsOptions, MountOptions, OpenError, OpenOptions, SetAttr, XattrFlags,
};

use crate::{check, e2fsck, image};

/// Names the image that [`holder`] is to hold; set for the child alone.
const HELD: &str = "FJORD_TEST_HELD";
/// The policy that it mounts with.
const POLICY: &str = "FJORD_TEST_POLICY";

fn sized(size_bytes: u64) -> MkfsOptions {
    MkfsOptions { size_bytes: Some(size_bytes), ..MkfsOptions::default() }
}

fn is_in_use(error: &Error) -> bool {
    matches!(error, Error::Open(open) if matches!(**open, OpenError::InUse { .. }))
}

#[test]
fn an_image_is_made_and_opened_in_one_call() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    let fs = Fs::create(&path, &sized(64 << 20), &MountOptions::default()).unwrap();
    fs.write("/hello", "world").unwrap();
    fs.unmount().unwrap();
    drop(fs);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 64 << 20);
    let (code, text) = e2fsck(&path, "-fn");
    assert_eq!(code, Some(0), "{text}");
    let fs = Fs::open(&path, &MountOptions::default()).unwrap();
    assert_eq!(fs.read("/hello").unwrap(), b"world");
    fs.unmount().unwrap();
    // A relative path, and a file that is empty, as of tempfile.
    let file = tempfile::NamedTempFile::new_in(dir.path()).unwrap();
    let fs = Fs::create(file.path(), &sized(8 << 20), &MountOptions::default()).unwrap();
    fs.unmount().unwrap();
}

#[test]
fn what_holds_bytes_is_not_formatted_and_failures_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    std::fs::write(&path, "precious").unwrap();
    let error = Fs::create(&path, &sized(8 << 20), &MountOptions::default()).unwrap_err();
    assert_eq!(std::io::Error::from(error.clone()).kind(), ErrorKind::AlreadyExists, "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let error = Fs::create(dir.path(), &sized(8 << 20), &MountOptions::default()).unwrap_err();
    assert_eq!(std::io::Error::from(error).kind(), ErrorKind::AlreadyExists);
    // It can be formatted, by whoever says so.
    let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
    let fs = Fs::create_on(Arc::new(device), &sized(8 << 20), &MountOptions::default()).unwrap();
    fs.unmount().unwrap();
    drop(fs);

    let path = dir.path().join("new");
    let too_small = sized(4096);
    let no_journal = MkfsOptions { features: "^has_journal".into(), ..sized(8 << 20) };
    let fast = MountOptions { fsync: FsyncPolicyKind::FastCommit, ..MountOptions::default() };
    for (image, options) in [
        (&MkfsOptions::default(), &MountOptions::default()),
        (&too_small, &MountOptions::default()),
        (&no_journal, &fast),
    ] {
        let error = Fs::create(&path, image, options).unwrap_err();
        assert!(matches!(error, Error::Usage(_)), "{error}");
        assert!(!path.exists(), "{error}");
    }
    let path = dir.path().join("no/new");
    let error = Fs::create(&path, &sized(8 << 20), &MountOptions::default()).unwrap_err();
    assert_eq!(std::io::Error::from(error).kind(), ErrorKind::NotFound);
    let device = Arc::new(MemDevice::new(1 << 20));
    Fs::create_on(device, &sized(2 << 20), &MountOptions::default()).unwrap();
}

/// Every call after the unmount says that it comes too late.
#[test]
fn calls_after_the_unmount_say_closed() {
    for read_only in [false, true] {
        let (device, fs) = image();
        fs.write("/f", "content").unwrap();
        fs.symlink("f", "/link").unwrap();
        fs.unmount().unwrap();
        drop(fs);
        let options = MountOptions { read_only, ..MountOptions::default() };
        let fs = Fs::open_device(device.clone(), &options).unwrap();
        let how = OpenOptions::new().read(true).write(!read_only).open(&fs, "/f");
        let (file, inode) = (how.unwrap(), fs.resolve("/f").unwrap());
        let (root, mut listing) = (fs.root().unwrap(), fs.walk("/").unwrap());
        listing.next();
        fs.unmount().unwrap();
        fs.unmount().unwrap();
        let root_user = Cred::root();
        let none = XattrFlags::empty();
        let write = |file: &fjord::File| file.write_at(b"x", 0).map(drop);
        let calls: Vec<(&str, fjord::Result<()>)> = vec![
            ("root", fs.root().map(drop)),
            ("read", fs.read("/f").map(drop)),
            ("write", fs.write("/f", "x")),
            ("metadata", fs.metadata("/f").map(drop)),
            ("exists", fs.try_exists("/f").map(drop)),
            ("create_dir", fs.create_dir("/d").map(drop)),
            ("create_dir_all", fs.create_dir_all("/d/e").map(drop)),
            ("read_dir", fs.read_dir("/").map(drop)),
            ("walk", fs.walk("/").map(drop)),
            ("next of a walk", listing.next().unwrap().map(drop)),
            ("remove_file", fs.remove_file("/f")),
            ("rename", fs.rename("/f", "/g")),
            ("copy", fs.copy("/f", "/g").map(drop)),
            ("chown", fs.chown("/f", None, None)),
            ("get_xattr", fs.get_xattr("/f", "user.a").map(drop)),
            ("sync", fs.sync()),
            ("read_at", file.read_at(&mut [0; 4], 0).map(drop)),
            ("write_at", if read_only { Err(Error::Closed) } else { write(&file) }),
            ("sync_all", file.sync_all()),
            ("fbarrier", file.fbarrier().map(drop)),
            ("lookup", root.lookup(b"f").map(drop)),
            ("create", root.create(b"new", 0o644, &root_user).map(drop)),
            ("set_attr", inode.set_attr(&SetAttr::default(), &root_user).map(drop)),
            ("set_xattr", inode.set_xattr(b"user.a", b"", none)),
            ("seek_data", inode.seek_data(0).map(drop)),
        ];
        for (call, outcome) in calls {
            let error = outcome.expect_err(call);
            assert!(matches!(error, Error::Closed), "{call}, read-only {read_only}: {error}");
            assert!(error.errno() != rustix::io::Errno::IO.raw_os_error());
            assert!(error.to_string().contains("closed"), "{error}");
        }
        let error = std::io::Read::read(&mut &file, &mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotConnected, "{error}");
        drop((file, inode, root, listing, fs));
        check(&device);
    }
}

/// What the documentation of `Fs` says about an `Fs` that is dropped without an unmount.
#[test]
fn a_dropped_fs_keeps_what_was_synced_and_no_more() {
    let (device, fs) = image();
    fs.write("/synced", "kept").unwrap();
    fs.sync().unwrap();
    fs.write("/not-synced", "lost").unwrap();
    drop(fs);
    let fs = Fs::open_device(device.clone(), &MountOptions::default()).unwrap();
    assert_eq!(fs.read("/synced").unwrap(), b"kept");
    assert!(!fs.try_exists("/not-synced").unwrap());
    fs.unmount().unwrap();
    check(&device);
}

/// Not a test of its own: what the child of other tests does. Holds an image open and keeps
/// fsynced files in it until it is killed.
#[test]
fn holder() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let policy = std::env::var(POLICY).unwrap();
    let fsync = FsyncPolicyKind::from_name(&policy).unwrap();
    let options = MountOptions { fsync, ..MountOptions::default() };
    let fs = Fs::open(path, &options).unwrap();
    for number in 0..10 {
        let file = fs.create_file(format!("/{number}")).unwrap();
        file.write_all_at(b"fsynced", 0).unwrap();
        file.sync_all().unwrap();
    }
    println!("\nheld");
    thread::sleep(Duration::from_secs(600));
}

/// A process that holds an image; killed at the latest when this goes.
struct Holder(Child);

impl Holder {
    fn new(path: &Path, policy: FsyncPolicyKind) -> Holder {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "life::holder", "--nocapture", "--test-threads", "1"])
            .env(HELD, path)
            .env(POLICY, policy.name())
            .env_remove("FJORD_FSYNC")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let holder = Holder(child);
        assert!(lines.map_while(Result::ok).any(|line| line == "held"), "the child has ended");
        holder
    }

    /// Sends SIGKILL and does not wait for its end.
    fn kill(&mut self) {
        self.0.kill().unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn new_image(dir: &Path, options: &MkfsOptions) -> PathBuf {
    let path = dir.join("image");
    Fs::create(&path, options, &MountOptions::default()).unwrap().unmount().unwrap();
    path
}

#[test]
fn the_lock_of_a_killed_process_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = new_image(dir.path(), &sized(32 << 20));
    // Killed while somebody waits.
    let mut holder = Holder::new(&path, FsyncPolicyKind::Auto);
    let killer = thread::spawn(move || {
        // If it takes longer until the other thread waits, the kill comes before.
        thread::sleep(Duration::from_millis(200));
        let killed_at = Instant::now();
        holder.kill();
        (holder, killed_at)
    });
    let patient =
        MountOptions { lock_timeout: Duration::from_secs(600), ..MountOptions::default() };
    let fs = Fs::open(&path, &patient).unwrap();
    let opened_at = Instant::now();
    let (_holder, killed_at) = killer.join().unwrap();
    assert!(opened_at > killed_at, "it was not held at all");
    for number in 0..10 {
        assert_eq!(fs.read(format!("/{number}")).unwrap(), b"fsynced");
    }
    fs.unmount().unwrap();
    drop(fs);
    // Killed right before, many times. The second of the defaults may not be enough for a process to
    // end on a busy machine.
    for _ in 0..5 {
        let mut holder = Holder::new(&path, FsyncPolicyKind::Auto);
        holder.kill();
        Fs::open(&path, &patient).unwrap().unmount().unwrap();
    }
    let (code, text) = e2fsck(&path, "-fn");
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn the_wait_for_a_lock_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = new_image(dir.path(), &sized(32 << 20));
    let _holder = Holder::new(&path, FsyncPolicyKind::Auto);
    assert_eq!(MountOptions::default().lock_timeout, Duration::from_secs(1));
    for (lock_timeout, read_only) in [(0, false), (300, false), (300, true)] {
        let lock_timeout = Duration::from_millis(lock_timeout);
        let options = MountOptions { lock_timeout, read_only, ..MountOptions::default() };
        // On a busy machine a call may take long; but one of many does not.
        let began = Instant::now();
        while refused_after(&path, &options) >= lock_timeout + Duration::from_millis(250) {
            assert!(began.elapsed() < Duration::from_secs(120), "it waits for longer each time");
        }
    }
}

/// How long it takes until the open is refused.
fn refused_after(path: &Path, options: &MountOptions) -> Duration {
    let started = Instant::now();
    let error = Fs::open(path, options).unwrap_err();
    let waited = started.elapsed();
    assert!(is_in_use(&error), "{error}");
    assert_eq!(std::io::Error::from(error).kind(), ErrorKind::ResourceBusy);
    assert!(waited >= options.lock_timeout, "{waited:?} of {:?}", options.lock_timeout);
    waited
}

/// What the documentation of `Fs::open` says about images after a crash.
#[test]
fn after_a_crash_e2fsck_waits_for_fjord_under_ijournal_only() {
    let without_areas = MkfsOptions { ijournal: IjournalAreas::None, ..sized(32 << 20) };
    for (image, policy, needs_fjord) in [
        (sized(32 << 20), FsyncPolicyKind::Auto, true),
        (sized(32 << 20), FsyncPolicyKind::Compound, false),
        (without_areas, FsyncPolicyKind::Auto, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = new_image(dir.path(), &image);
        drop(Holder::new(&path, policy));
        let copy = dir.path().join("copy");
        std::fs::copy(&path, &copy).unwrap();
        let (code, text) = e2fsck(&copy, "-fp");
        if needs_fjord {
            assert!(code.is_some_and(|code| code & 4 != 0), "{policy:?}: {code:?} {text}");
            assert!(text.contains("unknown incompatible feature"), "{text}");
            let fs = Fs::open(&path, &MountOptions::default()).unwrap();
            fs.unmount().unwrap();
        } else {
            assert!(code.is_some_and(|code| code & 4 == 0), "{policy:?}: {code:?} {text}");
            std::fs::rename(&copy, &path).unwrap();
        }
        let (code, text) = e2fsck(&path, "-fn");
        assert_eq!(code, Some(0), "{text}");
        let fs = Fs::open(&path, &MountOptions::default()).unwrap();
        for number in 0..10 {
            assert_eq!(fs.read(format!("/{number}")).unwrap(), b"fsynced", "{policy:?}");
        }
        fs.unmount().unwrap();
    }
}

#[expect(dead_code, reason = "the example's own main")]
#[path = "../../examples/embed.rs"]
mod embed;
#[expect(dead_code, reason = "the example's own main")]
#[path = "../../examples/memory.rs"]
mod memory;

#[test]
fn the_examples_do_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("measurements.img");
    for count in 1..=3 {
        assert_eq!(embed::record(&path, "21.5 °C").unwrap(), count);
    }
    let (code, text) = e2fsck(&path, "-fn");
    assert_eq!(code, Some(0), "{text}");
    let path = dir.path().join("rootfs.img");
    memory::build(&path).unwrap();
    let (code, text) = e2fsck(&path, "-fn");
    assert_eq!(code, Some(0), "{text}");
    let fs = Fs::open(&path, &MountOptions::default()).unwrap();
    assert_eq!(fs.read_to_string("/bin/hi").unwrap(), "#!/bin/sh\necho hello\n");
    assert_eq!(fs.metadata("/home/alice").unwrap().uid(), 1000);
}
