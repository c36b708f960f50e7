//! Runs the same steps on a fjord mount and on the kernel's ext4, with equal output.
//!
//! Owns the comparison and the shell that scripts run in. Both mounts start as copies of one image.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{
    features,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    tools,
};

/// Runs `steps` on an image of `set`, mounted by Linux with `linux_options` and by `program` with
/// `fjord_args`; their output must be equal.
pub fn same(
    program: &Path,
    set: &str,
    fjord_args: &[&str],
    linux_options: &str,
    steps: impl Fn(&Path) -> Result<String>,
) -> Result<()> {
    let scratch = Scratch::in_memory("side-by-side")?;
    let (ours, theirs) = (scratch.join("fjord.img"), scratch.join("linux.img"));
    let set = features::by_name(set).context("a set of the table")?;
    set.make(&theirs)?;
    image::copy_sparse(&theirs, &ours)?;
    let linux = KernelMount::new(&theirs, linux_options)?;
    fs::set_permissions(linux.path(), fs::Permissions::from_mode(0o755))?;
    let expected = steps(linux.path()).context("on Linux")?;
    linux.unmount()?;
    let fjord = FjordMount::with_program(program, &ours, fjord_args)?;
    fs::set_permissions(fjord.path(), fs::Permissions::from_mode(0o755))?;
    let found = steps(fjord.path()).context("on fjord")?;
    fjord.unmount()?;
    image::e2fsck_clean(&ours)?;
    let (expected, found): (Vec<_>, Vec<_>) = (expected.lines().collect(), found.lines().collect());
    let equal = expected.iter().zip(&found).take_while(|(expected, found)| expected == found);
    let equal = equal.count();
    // What led there, and what comes after.
    let around = |lines: &[&str]| {
        lines[equal.saturating_sub(8).min(lines.len())..(equal + 4).min(lines.len())].join("\n")
    };
    let (linux, fjord) = (around(&expected), around(&found));
    ensure!(expected == found, "from line {equal} on, Linux:\n{linux}\n\nfjord:\n{fjord}");
    println!("{equal} equal lines");
    Ok(())
}

/// Runs a shell script in the mount and gives all it said. `as UID GROUPS COMMAND...` runs a
/// command as somebody else, `tell COMMAND...` shows how it ended.
pub fn shell(dir: &Path, script: &str) -> Result<String> {
    const PRELUDE: &str = "umask 022; as() { u=$1; g=$2; shift 2; setpriv --reuid=$u --regid=$u --groups=$g \
                           \"$@\"; }\ntell() { echo \"$ $*\"; \"$@\" 2>&1; echo \"= $?\"; }\n";
    tools::require(&["setfacl", "getfacl", "setfattr", "getfattr", "chattr", "setpriv", "xfs_io"])?;
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{PRELUDE}{script}")).current_dir(dir).env("LC_ALL", "C");
    Ok(tools::run(&mut command)?.ok()?.stdout)
}
