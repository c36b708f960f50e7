//! A block device: a loop device over a file. Needs root; says so and passes otherwise.

use std::path::PathBuf;
use std::process::Command;

use fjord_block::{
    Buf, Device, DeviceExt, Engine, FileDevice, FileOptions, OpenError, Request, Ticket,
};

/// A loop device that goes away with this value.
pub(crate) struct Loop(pub(crate) PathBuf);

impl Loop {
    pub(crate) fn new(image: &std::path::Path) -> Option<Loop> {
        Loop::with(image, &[])
    }

    fn with(image: &std::path::Path, arguments: &[&str]) -> Option<Loop> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: no loop device");
            return None;
        }
        let output =
            Command::new("losetup").args(["--find", "--show"]).args(arguments).arg(image).output();
        let output = output.unwrap();
        assert!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        Some(Loop(String::from_utf8(output.stdout).unwrap().trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn block_device_reads_writes_discards_and_locks() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let Some(device_node) = Loop::new(&image) else { return };
    for (engine, direct) in [(Engine::Uring, true), (Engine::Plain, true), (Engine::Plain, false)] {
        let options = FileOptions { engine, direct, ..FileOptions::default() };
        let device = FileDevice::open(&device_node.0, &options).unwrap();
        assert!(device.is_block_device());
        assert_eq!((device.is_direct(), device.size_bytes()), (direct, 8 << 20));
        let writes = (0..8u8).map(|i| {
            Request::write(
                u64::from(i) * 65536,
                vec![Buf::from_slice(&[i + 1; 4096]), Buf::from_slice(&[i; 4096])],
            )
        });
        Ticket::wait_all(&device.submit(writes.collect())).unwrap();
        device.flush().unwrap();
        let on_disk = std::fs::read(&image).unwrap();
        assert!(
            (0..8usize)
                .all(|i| on_disk[i * 65536] == i as u8 + 1 && on_disk[i * 65536 + 4096] == i as u8)
        );
        device.submit_one(Request::Discard { offset: 0, len: 65536 }).wait().unwrap();
        device.submit_one(Request::WriteZeroes { offset: 65536, len: 65536 }).wait().unwrap();
        let zeroes = device.read_buf(0, 131_072).unwrap();
        assert!(zeroes.iter().all(|byte| *byte == 0));
        assert!(device.set_size(4 << 20).is_err());
        let error = FileDevice::open(&device_node.0, &options).unwrap_err();
        assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    }
}

#[test]
fn an_image_mounted_by_the_kernel_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (image, mount) = (dir.path().join("image"), dir.path().join("mount"));
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    std::fs::create_dir(&mount).unwrap();
    assert!(
        Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-F"])
            .arg(&image)
            .status()
            .unwrap()
            .success()
    );
    let Some(device_node) = Loop::new(&image) else { return };
    assert!(Command::new("mount").arg(&device_node.0).arg(&mount).status().unwrap().success());
    let by_file = FileDevice::open(&image, &FileOptions::default()).unwrap_err();
    let by_node = FileDevice::open(&device_node.0, &FileOptions::default()).unwrap_err();
    assert!(Command::new("umount").arg(&mount).status().unwrap().success());
    let name = device_node.0.display().to_string();
    assert!(by_file.to_string().contains(&name), "{by_file}");
    assert!(by_node.to_string().contains(&mount.display().to_string()), "{by_node}");
    FileDevice::open(&image, &FileOptions::default()).unwrap();
}

/// One image by two names: whoever comes second is refused.
#[test]
fn a_file_and_a_loop_device_over_it_are_one_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let (Some(one), Some(two)) = (Loop::new(&image), Loop::new(&image)) else { return };
    let names = [&image, &one.0, &two.0];
    for first in names {
        let held = FileDevice::open(first, &FileOptions::default()).unwrap();
        for second in names {
            let error = FileDevice::open(second, &FileOptions::default()).unwrap_err();
            assert!(matches!(error, OpenError::InUse { .. }), "{first:?}, {second:?}: {error}");
        }
        drop(held);
    }
    let readers = FileOptions { read_only: true, ..FileOptions::default() };
    let readers = names.map(|name| FileDevice::open(name, &readers).unwrap());
    drop(readers);
}

/// Loop devices over parts of one file, as for the partitions of a disk image.
#[test]
fn parts_of_a_file_are_images_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let part = |offset: &str| Loop::with(&image, &["--offset", offset, "--sizelimit", "4194304"]);
    let (Some(one), Some(two), Some(same)) = (part("0"), part("4194304"), part("0")) else {
        return;
    };
    let open = |name: &std::path::Path| FileDevice::open(name, &FileOptions::default());
    let held = open(&one.0).unwrap();
    open(&two.0).unwrap();
    let error = open(&same.0).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    let error = open(&image).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    drop(held);
}

/// mount(2) claims a device as any program does; the lock against other instances of fjord stays.
#[test]
fn the_claim_of_a_device_is_given_up_and_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let Some(node) = Loop::new(&image) else { return };
    let claim = || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL;
        rustix::fs::open(&node.0, flags, rustix::fs::Mode::empty())
    };
    let readers = FileOptions { read_only: true, ..FileOptions::default() };
    let device = FileDevice::open(&node.0, &FileOptions::default()).unwrap();
    assert_eq!(claim().unwrap_err(), rustix::io::Errno::BUSY);
    device.claim(false).unwrap();
    let others = claim().unwrap();
    for options in [&FileOptions::default(), &readers] {
        let error = FileDevice::open(&node.0, options).unwrap_err();
        assert!(matches!(error, OpenError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("with fjord"), "{error}");
    }
    let error = device.claim(true).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    drop(others);
    device.claim(true).unwrap();
    assert_eq!(claim().unwrap_err(), rustix::io::Errno::BUSY);
    drop(device);
    // Readers claim nothing, and keep writers out.
    let reader = FileDevice::open(&node.0, &readers).unwrap();
    FileDevice::open(&node.0, &readers).unwrap();
    claim().unwrap();
    FileDevice::open(&node.0, &FileOptions::default()).unwrap_err();
    drop(reader);
    FileDevice::open(&node.0, &FileOptions::default()).unwrap();
}
