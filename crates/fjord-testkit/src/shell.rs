//! Programs of the machine, for tests that panic instead of returning errors.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs a program.
///
/// # Panics
/// If it is not there.
pub fn output(program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("cannot run {program} ({e}); install e2fsprogs and util-linux"))
}

/// Runs a program that must succeed, and gives its standard output.
///
/// # Panics
/// If it fails.
pub fn run(program: &str, args: &[&str]) -> String {
    let output = output(program, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {} {text}{errors}", output.status);
    text
}

/// A path for these.
///
/// # Panics
/// If it is not UTF-8.
pub fn utf8(path: &Path) -> &str {
    path.to_str().expect("a path of a test is UTF-8")
}

/// e2fsck must find nothing in the image.
///
/// # Panics
/// If it does.
pub fn check(image: &Path) {
    run("e2fsck", &["-f", "-n", utf8(image)]);
}
