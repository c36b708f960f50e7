//! Running the tools, and making an image in a file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fjord_block::{FileDevice, FileOptions};
use fjord_mkfs::{MkfsOptions, Report, format};

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

/// Makes an image with fjord.
pub(crate) fn make(dir: &Path, name: &str, options: &MkfsOptions) -> (PathBuf, Report) {
    let path = dir.join(name);
    File::create(&path).expect("the image file can be made");
    let device = FileDevice::open(&path, &FileOptions::default()).expect("the image opens");
    let report = format(&device, options).unwrap_or_else(|e| panic!("{name}: {e}"));
    (path, report)
}

/// The image must be clean for e2fsck.
pub(crate) fn check(path: &Path) {
    run("e2fsck", &["-f", "-n", utf8(path)]);
}
