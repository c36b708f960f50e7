//! A file that is cut to nothing, written anew and closed goes to the device soon, fsync or not
//! (ext4's `auto_da_alloc`); any other file is written when it is old.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord::{Cred, Fs, InodeRef, MountOptions, SetAttr};
use fjord_block::{Device, MemDevice};
use fjord_testkit::image::Scratch;
use fjord_testkit::tools;

const FILE_BYTES: usize = 64 << 10;

fn mounted() -> Fs {
    let scratch = Scratch::in_memory("replaced").expect("a directory");
    let image = scratch.join("image");
    let mke2fs: &mut Command = &mut tools::command("mke2fs").expect("mke2fs");
    let made = tools::run(mke2fs.args(["-q", "-t", "ext4"]).arg(&image).arg("32M"));
    made.and_then(|output| output.ok()).expect("an image");
    let device: Arc<dyn Device> = Arc::new(MemDevice::from_file(&image).expect("its bytes"));
    let hour = Duration::from_secs(3600);
    let options = MountOptions { writeback_interval: hour, ..MountOptions::default() };
    Fs::open_device(device, &options).expect("it mounts")
}

/// Whether the file's blocks are allocated, as writeback does.
fn is_written(file: &InodeRef) -> bool {
    let extents = file.fiemap(0, u64::MAX).expect("a map");
    !extents.is_empty() && extents.iter().all(|extent| !extent.delalloc)
}

fn wait_until_written(file: &InodeRef) {
    let began = Instant::now();
    while !is_written(file) {
        assert!(began.elapsed() < Duration::from_secs(120), "it is not written");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn written_and_closed(file: &InodeRef, value: u8) {
    let open = file.open();
    file.write(0, &[value; FILE_BYTES]).unwrap();
    drop(open);
}

fn replaced(file: &InodeRef, value: u8) {
    let open = file.open();
    let empty = SetAttr { size: Some(0), ..SetAttr::default() };
    file.set_attr(&empty, &Cred::root()).unwrap();
    file.write(0, &[value; FILE_BYTES]).unwrap();
    drop(open);
}

#[test]
fn content_that_replaces_other_content_is_written_at_close() {
    let fs = mounted();
    let root = fs.root().unwrap();
    let create = |name: &[u8]| root.create(name, 0o644, &Cred::root()).unwrap();
    let (new, other) = (create(b"new"), create(b"config"));
    written_and_closed(&new, 1);
    written_and_closed(&other, 1);
    replaced(&other, 2);
    wait_until_written(&other);
    // It was closed before, so it would have been written before.
    assert!(!is_written(&new), "a new file is written when it is old");
    replaced(&new, 2);
    wait_until_written(&new);
    fs.unmount().unwrap();
}
