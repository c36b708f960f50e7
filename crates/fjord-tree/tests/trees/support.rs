//! Running the tools, and mounting an image with Linux.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Runs a command; a command that is not there ends the test.
pub(crate) fn output(program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("cannot run {program} ({e}); install e2fsprogs and util-linux"))
}

/// Runs a command that must succeed and gives its standard output.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output = output(program, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {} {text}{errors}", output.status);
    text
}

pub(crate) fn utf8(path: &Path) -> &str {
    path.to_str().expect("a temporary path is UTF-8")
}

/// The image must be clean for e2fsck.
pub(crate) fn check(path: &Path) {
    run("e2fsck", &["-f", "-n", utf8(path)]);
}

/// A mounted loop device; unmounts when it goes.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Mounted {
    pub(crate) fn new(image: &Path, dir: &Path) -> Mounted {
        assert!(rustix::process::geteuid().is_root(), "loop mounts need root: run as root");
        fs::create_dir_all(dir).expect("a mount point");
        run("mount", &["-t", "ext4", "-o", "loop", utf8(image), utf8(dir)]);
        Mounted(dir.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &[utf8(&self.0)]);
    }
}
