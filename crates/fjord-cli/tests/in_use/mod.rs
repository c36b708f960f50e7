//! What the tests of commands on mounts in use share: the program, images, mounts under load.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
};

use anyhow::{Result, ensure};
use fjord::FsyncPolicyKind;
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    tools::{self, Output},
};
use serde_json::Value;

/// A test for each policy: a function that takes it.
macro_rules! each_policy {
    ($test:path) => {
        #[test]
        fn compound() -> anyhow::Result<()> {
            $test(fjord::FsyncPolicyKind::Compound)
        }

        #[test]
        fn group() -> anyhow::Result<()> {
            $test(fjord::FsyncPolicyKind::Group)
        }

        #[test]
        fn fast_commit() -> anyhow::Result<()> {
            $test(fjord::FsyncPolicyKind::FastCommit)
        }

        #[test]
        fn ijournal() -> anyhow::Result<()> {
            $test(fjord::FsyncPolicyKind::Ijournal)
        }

        #[test]
        fn no_policy_is_left_out() {
            assert_eq!(fjord::FsyncPolicyKind::ALL.len(), 4);
        }
    };
}
pub(crate) use each_policy;

pub(crate) fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

pub(crate) fn fjord(args: &[&str], paths: &[&Path]) -> Result<Output> {
    tools::run(Command::new(program()).args(args).args(paths))
}

/// Runs a program of the machine, which must succeed.
pub(crate) fn run(program: &str, args: &[&str], paths: &[&Path]) -> Result<Output> {
    tools::run(tools::command(program)?.args(args).args(paths))?.ok()
}

/// A new image with what every policy needs.
pub(crate) fn make(image: &Path, size_bytes: u64, options: &[&str]) -> Result<()> {
    image::make_sparse(image, size_bytes)?;
    fjord(&[&["mkfs", "-O", "fast_commit"], options].concat(), &[image])?.ok()?;
    Ok(())
}

pub(crate) fn mounted(image: &Path, options: &[&str]) -> Result<FjordMount> {
    FjordMount::with_program(program(), image, options)
}

/// Runs a command with `--json`, which must succeed; what it told.
pub(crate) fn told(args: &[&str], paths: &[&Path]) -> Result<Value> {
    let (command, args) = args.split_at(1);
    let said = fjord(&[command, &["--json"], args].concat(), paths)?.ok()?;
    Ok(serde_json::from_str(&said.stdout)?)
}

/// Runs a command that must fail with this code and these words.
pub(crate) fn must_fail(args: &[&str], paths: &[&Path], code: i32, words: &str) -> Result<()> {
    let said = fjord(args, paths)?;
    ensure!(said.code == Some(code) && said.stderr.contains(words), "{code} {words}: {said:?}");
    Ok(())
}

/// Has Linux mount an image and unmount it after `check`.
pub(crate) fn on_linux<T>(
    image: &Path,
    how: &str,
    check: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let linux = KernelMount::new(image, how)?;
    let checked = check(linux.path())?;
    linux.unmount()?;
    Ok(checked)
}

/// The program as a user who is not the one who mounted. The mount and the directory of the image are
/// opened to everybody.
pub(crate) fn as_nobody(scratch: &Scratch, mount: &FjordMount) -> Result<Command> {
    for dir in [mount.path(), scratch.path()] {
        fs::set_permissions(dir, Permissions::from_mode(0o755))?;
    }
    let bin = scratch.join("fjord");
    fs::copy(program(), &bin)?;
    let mut nobody = tools::command("setpriv")?;
    nobody.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(bin);
    Ok(nobody)
}

/// A place for the images of a test, and the options of a mount: with this policy, under each scheduler.
pub(crate) fn with_each_scheduler(
    name: &str,
    policy: FsyncPolicyKind,
    test: impl Fn(&Scratch, &[&str]) -> Result<()>,
) -> Result<()> {
    for scheduler in ["scheduler=direct", "scheduler=epoch"] {
        println!("{} {scheduler}", policy.name());
        test(&Scratch::new(name)?, &["--fsync", policy.name(), "-o", scheduler])?;
    }
    Ok(())
}
