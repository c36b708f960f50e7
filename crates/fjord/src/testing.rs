//! Real images for unit tests: made by mke2fs, mounted in memory, judged by e2fsck.
//!
//! Invariant: a test that cannot get its image fails; it never passes by skipping.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use fjord_block::{Device, MemDevice};
use fjord_format::InodeNo;
use fjord_format::types::BlockNo;
use tempfile::TempDir;

use crate::attr::Cred;
use crate::fs::FsInner;
use crate::fs::mount;
use crate::inode::{Inode, table};
use crate::namei;
use crate::options::MountOptions;

/// A mounted image in memory.
pub(crate) struct TestFs {
    pub(crate) fs: Arc<FsInner>,
    pub(crate) device: Arc<MemDevice>,
    dir: TempDir,
}

/// Options under which only calls do work.
pub(crate) fn quiet_options() -> MountOptions {
    MountOptions { background_threads: false, ..MountOptions::default() }
}

/// Makes an image with mke2fs and returns it as a device.
pub(crate) fn make_image(dir: &TempDir, args: &[&str], size_mib: u32) -> Arc<MemDevice> {
    let path = dir.path().join("image");
    let output = Command::new("mke2fs")
        .args(["-q", "-F"])
        .args(args)
        .arg(&path)
        .arg(format!("{size_mib}M"))
        .output()
        .expect("mke2fs runs");
    assert!(output.status.success(), "mke2fs: {}", String::from_utf8_lossy(&output.stderr));
    Arc::new(MemDevice::from_file(&path).expect("the image can be read"))
}

impl TestFs {
    /// An image with mke2fs's `args`, mounted.
    pub(crate) fn new(args: &[&str], size_mib: u32) -> TestFs {
        Self::with_options(args, size_mib, &quiet_options())
    }

    /// The same with other options.
    pub(crate) fn with_options(args: &[&str], size_mib: u32, options: &MountOptions) -> TestFs {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let device = make_image(&dir, args, size_mib);
        let fs = mount::open_device(device.clone(), options).expect("the image mounts");
        TestFs { fs, device, dir }
    }

    /// Creates a regular file in the root.
    pub(crate) fn create(&self, name: &str) -> Arc<Inode> {
        let root = table::get(&self.fs, InodeNo::ROOT).expect("there is a root");
        let created = namei::create(&self.fs, &root, name.as_bytes(), 0o644, &Cred::root());
        let ino = created.expect("the file can be created").ino();
        table::get(&self.fs, ino).expect("the file is there")
    }

    /// Commits the running transaction.
    pub(crate) fn commit(&self) {
        self.fs.journal().commit_running().expect("the commit succeeds");
    }

    fn write_out(&self) -> PathBuf {
        let path = self.dir.path().join("image");
        self.device.snapshot().write_to_file(&path).expect("the image can be written");
        path
    }

    /// Unmounts, and demands that e2fsck finds nothing.
    pub(crate) fn finish(self) {
        self.fs.unmount().expect("unmount succeeds");
        let path = self.write_out();
        let output = Command::new("e2fsck").args(["-fn"]).arg(&path).output().expect("e2fsck runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "e2fsck -fn: {text}");
    }

    /// What debugfs says.
    pub(crate) fn debugfs(&self, request: &str) -> String {
        let path = self.write_out();
        let output = Command::new("debugfs")
            .args(["-R", request])
            .arg(&path)
            .output()
            .expect("debugfs runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Overwrites bytes of a block behind the engine's back.
    pub(crate) fn damage(&self, block: BlockNo, offset: u64, bytes: &[u8]) {
        use fjord_block::DeviceExt;
        let at = self.fs.byte_offset(block) + offset;
        let device: &dyn Device = &*self.device;
        device.write_all_at(at, bytes).expect("the device takes the bytes");
    }
}
