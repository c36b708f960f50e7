//! fjord under other names: as the helper of mount(8), fsck(8) and mkfs(8).
//!
//! Owns the way from a program's name to a command; the names are links to fjord.
//!
//! `mount -t fuse.fjord IMAGE DIR` looks for `mount.fuse.fjord` and runs it as
//! `mount.fuse.fjord IMAGE DIR [-sfnv] [-o LIST] [-t TYPE]`. Without that link it runs
//! `mount.fuse3`, which runs `fjord IMAGE DIR -o LIST`. Both become
//! `fjord mount --daemon -o LIST IMAGE DIR`. `fsck.fjord` is `fjord fsck`, `mkfs.fjord` is `fjord mkfs`.

use std::{ffi::OsString, path::Path};

use clap::CommandFactory;

use crate::{cli::Cli, commands::fsck, failure::EXIT_USAGE};

/// Names under which mount(8) runs a helper.
const MOUNT_NAMES: [&str; 3] = ["mount.fuse.fjord", "mount.fuseblk.fjord", "mount.fjord"];
/// Names under which fsck(8) does, by the type in fstab.
const FSCK_NAMES: [&str; 3] = ["fsck.fuse.fjord", "fsck.fuseblk.fjord", "fsck.fjord"];
/// The name under which mkfs(8) does.
const MKFS_NAME: &str = "mkfs.fjord";

/// Turns a helper's arguments into those of a command; leaves all others alone.
pub(crate) fn translate(args: Vec<OsString>) -> Vec<OsString> {
    let Some((program, rest)) = args.split_first() else { return args };
    let name = Path::new(program).file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let command = |command: &str| {
        let start = ["fjord", command].map(OsString::from);
        start.into_iter().chain(rest.iter().cloned()).collect()
    };
    match name {
        MKFS_NAME => command("mkfs"),
        _ if FSCK_NAMES.contains(&name) => command("fsck"),
        _ if MOUNT_NAMES.contains(&name) || looks_like_mount(rest) => mount(rest),
        _ => args,
    }
}

/// What a process ends with whose arguments, as [`translate`] gives them, are wrong.
pub(crate) fn usage_code(args: &[OsString]) -> u8 {
    let flag = |arg: &&OsString| arg.to_str().is_some_and(|arg| arg.starts_with('-'));
    match args.iter().skip(1).find(|arg| !flag(arg)) {
        Some(command) if command == "fsck" => fsck::EXIT_USAGE,
        _ => EXIT_USAGE,
    }
}

/// The arguments of `fjord mount` for those of a mount helper.
fn mount(rest: &[OsString]) -> Vec<OsString> {
    let mut out: Vec<OsString> = ["fjord", "mount", "--daemon"].map(OsString::from).to_vec();
    let mut rest = rest.iter();
    while let Some(arg) = rest.next() {
        match arg.to_str() {
            // The type is known by now; nothing else follows from it.
            Some("-t") => {
                rest.next();
            }
            Some("-o") => {
                out.push(arg.clone());
                out.extend(rest.next().cloned());
            }
            Some("-r") => out.push("--read-only".into()),
            Some("-f") => out.push("--fake".into()),
            // sloppy, no mtab, verbose, read-write
            Some("-s" | "-n" | "-v" | "-w") => {}
            _ => out.push(arg.clone()),
        }
    }
    out
}

/// Whether these are `IMAGE DIR -o LIST` rather than a command with its arguments.
fn looks_like_mount(rest: &[OsString]) -> bool {
    let [image, dir, option, _list] = rest else { return false };
    let known = |name: &OsString| {
        Cli::command().get_subcommands().any(|c| name.to_str() == Some(c.get_name()))
    };
    let flag = |arg: &OsString| arg.to_str().is_some_and(|a| a.starts_with('-'));
    option.to_str() == Some("-o") && !flag(image) && !flag(dir) && !known(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(args: &[&str]) -> Vec<String> {
        let args = translate(args.iter().map(OsString::from).collect());
        args.into_iter().map(|a| a.into_string().unwrap()).collect()
    }

    #[test]
    fn helper_calls_become_daemon_mounts() {
        let wanted = ["fjord", "mount", "--daemon", "a.img", "/mnt", "-o", "ro,dev"];
        assert_eq!(translated(&["/usr/bin/fjord", "a.img", "/mnt", "-o", "ro,dev"]), wanted);
        assert_eq!(
            translated(&["mount.fuse.fjord", "a.img", "/mnt", "-n", "-o", "ro,dev", "-t", "fuse"]),
            wanted
        );
        assert_eq!(translated(&["mount.fuse.fjord", "a", "b"])[2..], ["--daemon", "a", "b"]);
    }

    #[test]
    fn other_names_are_commands() {
        for name in ["fsck.fjord", "/usr/sbin/fsck.fuse.fjord"] {
            assert_eq!(translated(&[name, "-a", "x.img"]), ["fjord", "fsck", "-a", "x.img"]);
        }
        assert_eq!(
            translated(&["mkfs.fjord", "-s", "1G", "x"]),
            ["fjord", "mkfs", "-s", "1G", "x"]
        );
        let code = |args: &[&str]| usage_code(&args.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(code(&["fjord", "-v", "fsck", "-q"]), 16);
        assert_eq!(code(&["fjord", "mount", "fsck"]), 2);
        assert_eq!(code(&["fjord"]), 2);
    }

    #[test]
    fn commands_stay_commands() {
        let args = ["fjord", "mount", "x", "-o", "ro"];
        assert_eq!(translated(&args), args);
        assert_eq!(translated(&["fjord", "ls", "x"]), ["fjord", "ls", "x"]);
        assert_eq!(translated(&["fjord"]), ["fjord"]);
    }
}
