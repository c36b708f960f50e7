//! The path interface against `std::fs`: one script ([`script`]), run on a directory of the host and
//! on an image in memory ([`side`]), must have the same outcomes, errors by their number. What the
//! host cannot show has tests of its own: copies and walks ([`trees`]), images that are made, closed,
//! locked or left behind by a killed process ([`life`]).

mod life;
mod script;
mod side;
mod trees;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};

use side::{Host, Image, Side};

pub(crate) fn image() -> (Arc<MemDevice>, Fs) {
    let device = Arc::new(MemDevice::new(64 << 20));
    let fs =
        Fs::create_on(device.clone(), &MkfsOptions::default(), &MountOptions::default()).unwrap();
    // Only the root of an image has it.
    fs.remove_dir("/lost+found").unwrap();
    (device, fs)
}

/// The image must be clean for e2fsck.
pub(crate) fn check(device: &MemDevice) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    device.snapshot().write_to_file(&path).unwrap();
    let (code, text) = e2fsck(&path, "-fn");
    assert_eq!(code, Some(0), "{text}");
}

pub(crate) fn e2fsck(path: &Path, how: &str) -> (Option<i32>, String) {
    let output = Command::new("e2fsck").arg(how).arg(path).env("LC_ALL", "C").output();
    let output = output.expect("e2fsck runs; install e2fsprogs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

fn compare(script: fn(&dyn Side) -> Vec<String>) {
    assert!(rustix::process::geteuid().is_root(), "chown and trusted.* need root: run as root");
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let expected = script(&Host(tempfile::tempdir().unwrap()));
    let (device, fs) = image();
    let image = Image(fs);
    let found = script(&image);
    let differences: Vec<String> = expected
        .iter()
        .zip(&found)
        .filter(|(expected, found)| expected != found)
        .map(|(expected, found)| format!("std::fs  {expected}\nfjord    {found}"))
        .collect();
    assert!(differences.is_empty(), "\n{}", differences.join("\n"));
    assert_eq!(expected.len(), found.len());
    image.0.unmount().unwrap();
    check(&device);
}

#[test]
fn names_and_content_as_std() {
    compare(script::names_and_content);
}

#[test]
fn moves_and_removals_as_std() {
    compare(script::moves_and_removals);
}

#[test]
fn attributes_as_std() {
    compare(script::attributes);
}

#[test]
fn copies_as_std() {
    compare(script::copies);
}
