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

/// Whether the file's blocks are allocated, as writeback does, within `time_max`.
fn is_written_within(time_max: Duration, file: &InodeRef) -> bool {
    let deadline = Instant::now() + time_max;
    while Instant::now() < deadline {
        let extents = file.fiemap(0, u64::MAX).expect("a map");
        if !extents.is_empty() && extents.iter().all(|extent| !extent.delalloc) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

#[test]
fn content_that_replaces_other_content_is_written_at_close() {
    let fs = mounted();
    let file = fs.root().unwrap().create(b"config", 0o644, &Cred::root()).unwrap();
    let open = file.open();
    file.write(0, &[1; FILE_BYTES]).unwrap();
    drop(open);
    let moment = Duration::from_millis(300);
    assert!(!is_written_within(moment, &file), "a new file is written when it is old");
    let open = file.open();
    let empty = SetAttr { size: Some(0), ..SetAttr::default() };
    file.set_attr(&empty, &Cred::root()).unwrap();
    file.write(0, &[2; FILE_BYTES]).unwrap();
    drop(open);
    assert!(is_written_within(Duration::from_secs(5), &file));
    fs.unmount().unwrap();
}
