//! Room below sparse images: holes get blocks, data stays, a full disk says so.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use fjord_block::{Device, DeviceExt, FileDevice, FileOptions, IoErrorKind, Request};

const CHUNK: u64 = 64 << 10;

/// A small file system, unmounted when it is dropped.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    fn new(args: &[&OsStr]) -> Small {
        let dir = tempfile::tempdir().unwrap();
        let mount = dir.path().join("small");
        std::fs::create_dir(&mount).unwrap();
        run(Command::new("mount").args(args).arg(&mount));
        Small { dir }
    }

    fn tmpfs(size: &str) -> Small {
        let size = format!("size={size}");
        Small::new(&["-t", "tmpfs", "-o", &size, "none"].map(OsStr::new))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("small").join(name)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.dir.path().join("small")));
    }
}

fn run(command: &mut Command) {
    assert!(command.status().expect("util-linux, e2fsprogs").success(), "{command:?}");
}

fn open(path: &Path, size_bytes: u64) -> FileDevice {
    super::backends::make_image(path, size_bytes);
    FileDevice::open(path, &FileOptions::default()).unwrap()
}

fn blocks_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

fn needs_root() {
    assert!(rustix::process::geteuid().is_root(), "run the tests as root: they mount tmpfs");
}

/// Holes get blocks around what is there; a full disk is told before anything is written, and
/// what has its blocks needs nothing more.
#[test]
fn holes_get_blocks_and_a_full_disk_says_so() {
    needs_root();
    let small = Small::tmpfs("1m");
    let path = small.path("image");
    let device = open(&path, 64 << 20);
    device.write_all_at(3 * 4096, &[7; 4096]).unwrap();
    device.ensure_room(5 * 4096, 10).unwrap();
    assert_eq!(blocks_bytes(&path), CHUNK);
    assert_eq!(device.size_bytes(), 64 << 20);
    let mut read = vec![1; CHUNK as usize];
    device.read_exact_at(0, &mut read).unwrap();
    assert!(read[..3 * 4096].iter().all(|&byte| byte == 0));
    assert!(read[3 * 4096..4 * 4096].iter().all(|&byte| byte == 7));
    assert!(read[4 * 4096..].iter().all(|&byte| byte == 0));

    let error = device.ensure_room(1 << 20, 4 << 20).unwrap_err();
    assert!(error.is_no_space(), "{error}");
    assert!(error.to_string().contains("free space"), "{error}");
    // All that there is, the last of it in a chunk that does not fit as a whole.
    std::fs::write(small.path("other"), vec![1; 40 << 10]).unwrap();
    let mut at = 1 << 20;
    while device.ensure_room(at, 4096).is_ok() {
        at += 4096;
    }
    assert_eq!(at, (2 << 20) - CHUNK - (40 << 10));
    device.ensure_room(1 << 20, at - (1 << 20)).unwrap();
    device.write_all_at(1 << 20, &vec![5; (at - (1 << 20)) as usize]).unwrap();
    // Flushing works on: nothing has failed.
    device.flush().unwrap();

    // A discard makes holes, which need room again.
    device.submit_one(Request::Discard { offset: 1 << 20, len: CHUNK }).wait().unwrap();
    device.ensure_room(8 << 20, CHUNK).unwrap();
    let error = device.ensure_room(1 << 20, 4096).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Os(libc::ENOSPC));
    drop(device);
    // Whoever opens it again finds what has blocks.
    let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
    device.ensure_room(8 << 20, CHUNK).unwrap();
    device.ensure_room(0, CHUNK).unwrap();
    assert!(device.ensure_room(1 << 20, 4096).is_err());
}

/// A look for holes tells of all data up to the next one, and of nothing behind it.
#[test]
fn a_hole_behind_data_is_found_after_a_look_at_the_data() {
    needs_root();
    let small = Small::tmpfs("2m");
    let path = small.path("image");
    let device = open(&path, 64 << 20);
    device.write_all_at(0, &vec![7; 4 * CHUNK as usize]).unwrap();
    device.write_all_at(5 * CHUNK, &vec![7; CHUNK as usize]).unwrap();
    device.ensure_room(0, 1).unwrap();
    assert_eq!(blocks_bytes(&path), 5 * CHUNK);
    device.ensure_room(CHUNK, 2 * CHUNK).unwrap();
    assert_eq!(blocks_bytes(&path), 5 * CHUNK);
    device.ensure_room(4 * CHUNK, 1).unwrap();
    assert_eq!(blocks_bytes(&path), 6 * CHUNK);
    device.ensure_room(5 * CHUNK, CHUNK + 1).unwrap();
    assert_eq!(blocks_bytes(&path), 7 * CHUNK);
}

/// Where the file system below has no fallocate (files with block maps on ext4), holes are
/// written full of zeroes, and data is left alone.
#[test]
fn holes_get_blocks_without_fallocate() {
    needs_root();
    let outer = tempfile::tempdir().unwrap();
    let below = outer.path().join("below");
    super::backends::make_image(&below, 8 << 20);
    run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext3", "-J", "size=1"]).arg(&below));
    let small = Small::new(&[OsStr::new("-oloop"), below.as_os_str()]);
    let path = small.path("image");
    let device = open(&path, 64 << 20);
    device.write_all_at(3 * 4096, &[7; 4096]).unwrap();
    device.ensure_room(5 * 4096, 10).unwrap();
    assert!(blocks_bytes(&path) >= CHUNK, "{}", blocks_bytes(&path));
    let mut read = vec![1; CHUNK as usize];
    device.read_exact_at(0, &mut read).unwrap();
    assert!(read[..3 * 4096].iter().all(|&byte| byte == 0));
    assert!(read[3 * 4096..4 * 4096].iter().all(|&byte| byte == 7));
    let error = device.ensure_room(1 << 20, 32 << 20).unwrap_err();
    assert!(error.is_no_space(), "{error}");
    device.flush().unwrap();
}

/// A file system below that wants room before it looks whether it needs some (XFS): what was
/// given blocks and not written counts when the image is opened again on a full disk.
#[test]
fn unwritten_blocks_count_on_a_full_disk() {
    needs_root();
    let outer = tempfile::tempdir().unwrap();
    let below = outer.path().join("below");
    super::backends::make_image(&below, 320 << 20);
    run(Command::new("mkfs.xfs").args(["-q", "-f"]).arg(&below));
    let small = Small::new(&[OsStr::new("-oloop"), below.as_os_str()]);
    let path = small.path("image");
    open(&path, 64 << 20).ensure_room(1 << 20, 1 << 20).unwrap();
    let filler = std::fs::File::create(small.path("filler")).unwrap();
    let (mut at, mut step) = (0, 16 << 20);
    while step >= 4096 {
        let flags = rustix::fs::FallocateFlags::empty();
        match rustix::fs::fallocate(&filler, flags, at, step) {
            Ok(()) => at += step,
            Err(_) => step /= 2,
        }
    }
    let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
    device.ensure_room(1 << 20, 1 << 20).unwrap();
    assert!(device.ensure_room(32 << 20, 1 << 20).unwrap_err().is_no_space());
}
