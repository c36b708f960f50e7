//! Mounts with `sync` and `dirsync`, files and directories with chattr +S and +D, O_SYNC: what is
//! durable when a call returns. Wherever Linux's ext4 is, fjord is. Needs root.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    side_by_side::shell,
    tools,
};

/// Calls in a directory with the files `f`, `g`, `gone` and `over`, the directories `d`, `e` and
/// `d/empty`, each made durable before the next.
const CALLS: &[(&str, &str)] = &[
    ("append", "printf more >>d/f"),
    ("overwrite", "printf over | dd of=d/f conv=notrunc status=none"),
    ("direct write", "xfs_io -d -c 'pwrite -q -S 7 4096 4096' d/f"),
    ("write, O_SYNC", "xfs_io -s -c 'pwrite -q -S 8 90 90' d/g"),
    ("write, RWF_DSYNC", "xfs_io -c 'pwrite -q -V 1 -D -S 9 0 9000' d/g"),
    ("truncate", "truncate -s 5000 d/f"),
    ("extend", "truncate -s 70000 d/f"),
    ("fallocate", "xfs_io -c 'falloc 0 100000' d/f"),
    ("fallocate, keep size", "xfs_io -c 'falloc -k 0 200000' d/f"),
    ("fallocate, O_SYNC", "xfs_io -s -c 'falloc 0 300000' d/f"),
    ("punch", "xfs_io -c 'fpunch 0 4096' d/f"),
    ("zero range", "xfs_io -c 'fzero 4096 90' d/f"),
    ("O_TRUNC", ": >d/f"),
    ("setxattr", "setfattr -n user.a -v value d/f"),
    ("setxattr again", "setfattr -n user.a -v other d/f"),
    ("setxattr of a directory", "setfattr -n user.a -v value d"),
    ("removexattr", "setfattr -x user.a d/f"),
    ("set an ACL", "setfacl -m u:5:rwx d/f"),
    ("chmod", "chmod 640 d/f"),
    ("chown", "chown 5:6 d/f"),
    ("utimes", "touch -d '2001-02-03' d/f"),
    ("set flags", "chattr +d d/f"),
    ("create", ": >d/new"),
    ("mkdir", "mkdir d/sub"),
    ("mknod", "mknod d/pipe p"),
    ("symlink", "ln -s target d/link"),
    ("link", "ln d/f d/f2"),
    ("link to elsewhere", "ln e/k d/k2"),
    ("rename", "mv d/f2 d/f3"),
    ("rename over", "mv d/f3 d/over"),
    ("rename out", "mv d/g e/g"),
    ("rename in", "mv e/g d/g"),
    ("rename a directory", "mv d/sub e/sub"),
    ("unlink", "rm d/gone"),
    ("unlink one of two", "rm d/k2"),
    ("rmdir", "rmdir d/empty"),
];

const MAKE: &str = "mkdir d e d/empty; for f in d/f d/g d/gone d/over e/k; do \
                    head -c 20000 /dev/zero | tr '\\0' a >$f; done";

/// Changes that calls ask to be durable without the times.
const DATA_ONLY: &[&str] = &["overwrite", "direct write", "write, RWF_DSYNC"];

/// Calls after which the kernel sets the times itself where it has a write cache, and sends them later
/// (docs/mounting.md). They differ from the server's when its clock has ticked in between.
const TIMES_OF_THE_KERNEL: [&str; 3] = ["fallocate", "punch", "zero range"];

/// Whether this call's times may come to the server later.
fn has_late_times(call: &str) -> bool {
    let options = std::env::var("FJORD_MOUNT_OPTIONS").unwrap_or_default();
    options.contains("writeback_cache")
        && TIMES_OF_THE_KERNEL.iter().any(|name| call.starts_with(name))
}

const STATE: &str = "find . -mindepth 1 -name lost+found -prune -o -mindepth 1 \
     -printf '%p %y %m %U:%G %n %s %b %T@ %l\\n' | sort; find d e -type f | sort | xargs md5sum; \
     getfattr -R --absolute-names -d -m - d e 2>/dev/null; lsattr -R d e | sort";

/// One that Linux or fjord has mounted.
trait Mounted {
    fn dir(&self) -> &Path;
    /// Brings a copy, made while it was mounted, into order.
    fn recover(&self, copy: &Path) -> Result<()>;
}

impl Mounted for KernelMount {
    fn dir(&self) -> &Path {
        self.path()
    }

    fn recover(&self, copy: &Path) -> Result<()> {
        image::e2fsck_repair(copy).map(drop)
    }
}

impl Mounted for FjordMount {
    fn dir(&self) -> &Path {
        self.path()
    }

    fn recover(&self, copy: &Path) -> Result<()> {
        let program = env!("CARGO_BIN_EXE_fjord");
        tools::run(Command::new(program).arg("recover").arg(copy))?.ok()?;
        image::e2fsck_clean(copy).map(drop)
    }
}

/// The calls whose effect a copy of the image has that is made when they return.
fn durable(mounted: &dyn Mounted, img: &Path, flags: &str) -> Result<Vec<&'static str>> {
    let (dir, copy) = (mounted.dir(), img.with_extension("copy"));
    shell(dir, &format!("{MAKE}; {flags}"))?;
    let mut kept = Vec::new();
    for (name, call) in CALLS {
        rustix::fs::syncfs(File::open(dir)?)?;
        let is_timeless = DATA_ONLY.contains(name) || has_late_times(name);
        let state = if is_timeless { STATE.replace("%T@", "") } else { STATE.into() };
        let before = shell(dir, &state)?;
        shell(dir, call).with_context(|| format!("{name}: {call}"))?;
        image::copy_sparse(img, &copy)?;
        let expected = shell(dir, &state)?;
        ensure!(before != expected, "{name} changed nothing: {call}");
        mounted.recover(&copy)?;
        let linux = KernelMount::new(&copy, "ro")?;
        let found = shell(linux.path(), &state)?;
        linux.unmount()?;
        if found == expected {
            kept.push(*name);
        }
    }
    Ok(kept)
}

/// With areas for i-transactions, which mke2fs does not make.
const IJOURNAL: &[&str] = &["ijournal"];

fn place(mkfs: &[&str]) -> Result<(Scratch, PathBuf)> {
    let scratch = Scratch::in_memory("sync-calls")?;
    let img = scratch.join("image");
    if mkfs == IJOURNAL {
        let mut made = Command::new(env!("CARGO_BIN_EXE_fjord"));
        tools::run(made.args(["mkfs", "--size", "64M"]).arg(&img))?.ok()?;
        return Ok((scratch, img));
    }
    image::make_sparse(&img, 48 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-t", "ext4"]).args(mkfs).arg(&img))?.ok()?;
    Ok((scratch, img))
}

fn on_linux(options: &str, flags: &str) -> Result<Vec<&'static str>> {
    let (_scratch, img) = place(&[])?;
    let linux = KernelMount::new(&img, &format!("acl,commit=600,{options}"))?;
    let kept = durable(&linux, &img, flags)?;
    linux.unmount()?;
    Ok(kept)
}

fn on_fjord(mkfs: &[&str], options: &str, flags: &str) -> Result<Vec<&'static str>> {
    let (_scratch, img) = place(mkfs)?;
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    let options = format!("commit=600,{options}");
    let fjord = FjordMount::with_program(program, &img, &["-o", &options])?;
    let kept = durable(&fjord, &img, flags)?;
    fjord.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(kept)
}

/// What Linux happens to keep and does not promise: the device may have a cache of its own.
const NOT_PROMISED: &str = "direct write";

/// All that Linux keeps fjord keeps.
fn no_weaker(options: &str, flags: &str) -> Result<()> {
    let linux = on_linux(options, flags)?;
    let fjord = on_fjord(&[], options, flags)?;
    for (name, _) in CALLS {
        let word = |kept: &[&str]| if kept.contains(name) { "durable" } else { "-" };
        println!("{name:26}{:10}{}", word(&linux), word(&fjord));
    }
    let promised = linux.iter().filter(|name| **name != NOT_PROMISED || options == "sync");
    let lost: Vec<_> = promised.filter(|name| !fjord.contains(name)).collect();
    ensure!(lost.is_empty(), "durable on Linux and not on fjord: {lost:?}");
    Ok(())
}

#[test]
fn sync_mount() -> Result<()> {
    no_weaker("sync", ":")
}

#[test]
fn dirsync_mount() -> Result<()> {
    no_weaker("dirsync", ":")
}

#[test]
fn sync_flag() -> Result<()> {
    no_weaker("rw", "chattr -R +S d e")
}

#[test]
fn dirsync_flag_of_one_directory() -> Result<()> {
    no_weaker("rw", "chattr +D d")
}

/// Under each way of making a file durable every call is, of a mount with `sync`.
#[test]
fn every_fsync_policy() -> Result<()> {
    for (mkfs, policy) in
        [(&[][..], "group"), (&["-O", "fast_commit"], "fast-commit"), (IJOURNAL, "ijournal")]
    {
        let kept = on_fjord(mkfs, &format!("sync,fsync={policy}"), ":")?;
        let lost: Vec<_> = CALLS.iter().filter(|(name, _)| !kept.contains(name)).collect();
        ensure!(lost.is_empty(), "{policy}: not durable: {lost:?}");
    }
    Ok(())
}

/// `EXT4_IOC_CHECKPOINT`: afterwards there is nothing to replay.
#[test]
fn a_checkpoint_leaves_nothing_to_replay() -> Result<()> {
    use std::os::fd::AsRawFd;
    let scratch = Scratch::new("checkpoint")?;
    let (img, copy, dir) = (scratch.join("image"), scratch.join("copy"), scratch.join("mnt"));
    image::make_sparse(&img, 64 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&img))?.ok()?;
    std::fs::create_dir(&dir)?;
    let program = env!("CARGO_BIN_EXE_fjord");
    let mut mount = Command::new(program);
    mount.args(["mount", "--daemon", "-o", "commit=300"]);
    tools::run(mount.arg(&img).arg(&dir))?.ok()?;
    let file = File::create(dir.join("file"))?;
    file.sync_all()?;
    let call = |flags: u32| {
        // SAFETY: the ioctl reads one u32 through a pointer that is valid for the call.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), 0x4004_662b, &raw const flags) };
        if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    let recovered = || -> Result<String> {
        image::copy_sparse(&img, &copy)?;
        Ok(tools::run(Command::new(program).arg("recover").arg(&copy))?.ok()?.stdout)
    };
    call(4)?;
    let before = recovered()?;
    ensure!(before.contains("1 transaction"), "{before}");
    call(0)?;
    let after = recovered()?;
    ensure!(after.contains("0 transactions"), "{after}");
    for (flags, errno) in [(8, libc::EINVAL), (3, libc::EINVAL), (1, libc::EOPNOTSUPP)] {
        let refused = call(flags).unwrap_err();
        ensure!(refused.raw_os_error() == Some(errno), "{flags}: {refused}");
    }
    drop(file);
    // It waits where the kernel still lets go of the file.
    tools::run(Command::new(program).arg("umount").arg(&dir))?.ok()?;
    image::e2fsck_clean(&img).map(drop)
}
