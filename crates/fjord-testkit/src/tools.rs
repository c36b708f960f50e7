//! The programs of the machine that the tests use: which package has them, and what happens
//! when one is missing.
//!
//! Invariant: a missing program or privilege fails a test and names the Debian package; only what
//! the machine cannot do at all (a kernel without a feature) is skipped, and each skip is recorded.

use std::{
    io::Write,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// A program the tests run.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// Name looked up in PATH and the sbin directories.
    pub program: &'static str,
    /// Debian package that has it.
    pub package: &'static str,
    /// What the tests use it for.
    pub purpose: &'static str,
}

const fn tool(program: &'static str, package: &'static str, purpose: &'static str) -> Tool {
    Tool { program, package, purpose }
}

/// A file of the package with LMDB's library.
pub const LMDB: &str = "/usr/share/doc/liblmdb0/copyright";

/// A file of the package with Ceph's library.
pub const LIBRBD: &str = "/usr/share/doc/librbd1/copyright";

/// Every program used by some test.
pub const TOOLS: &[Tool] = &[
    tool("mke2fs", "e2fsprogs", "makes the images of the feature sets"),
    tool("e2fsck", "e2fsprogs", "judges every image fjord wrote"),
    tool("debugfs", "e2fsprogs", "reads what the kernel cannot mount, writes journals"),
    tool("dumpe2fs", "e2fsprogs", "shows superblocks"),
    tool("tune2fs", "e2fsprogs", "changes features and UUIDs"),
    tool("chattr", "e2fsprogs", "sets inode flags"),
    tool("fsck", "util-linux", "runs fsck.fjord by fstab"),
    tool("losetup", "mount", "attaches images"),
    tool("unshare", "util-linux", "makes mount namespaces"),
    tool("ip", "iproute2", "makes hosts and cables"),
    tool("iptables", "iptables", "loses packets"),
    tool("mount", "mount", "mounts images with the kernel's ext4"),
    tool("umount", "mount", "unmounts them"),
    tool("findmnt", "util-linux", "looks mounts up"),
    tool("lsblk", "util-linux", "lists block devices and their mounts"),
    tool("blkid", "util-linux", "tells labels and UUIDs"),
    tool("partx", "util-linux", "reads partition tables"),
    tool("addpart", "util-linux", "makes partitions of loop devices"),
    tool("delpart", "util-linux", "removes them"),
    tool("nohup", "coreutils", "has a program ignore the end of its terminal"),
    tool("timeout", "coreutils", "ends a program that hangs"),
    tool("setfattr", "attr", "extended attributes through the mount"),
    tool("getfattr", "attr", "extended attributes through the mount"),
    tool("setfacl", "acl", "access control lists through the mount"),
    tool("getfacl", "acl", "access control lists through the mount"),
    tool("mkswap", "util-linux", "makes signatures that mkfs must respect"),
    tool("sfdisk", "fdisk", "makes partition tables"),
    tool("cp", "coreutils", "copies trees"),
    tool("mkfs.xfs", "xfsprogs", "makes signatures that mkfs must respect"),
    tool("gzip", "gzip", "compresses"),
    tool("xz", "xz-utils", "compresses"),
    tool("fakeroot", "fakeroot", "pretends owners and devices"),
    tool("setcap", "libcap2-bin", "gives capabilities to files"),
    tool("fusermount3", "fuse3", "mounts without privilege"),
    tool("fuse2fs", "fuse2fs", "is measured in comparison"),
    tool("setpriv", "util-linux", "runs programs as another user"),
    tool("filefrag", "e2fsprogs", "asks where blocks of files are"),
    tool("cc", "gcc", "compiles programs that use fjord.h"),
    tool("python3", "python3", "runs the Python example, and databases"),
    tool("xfs_io", "xfsprogs", "direct, mapped and copied writes, fallocate"),
    tool("mkfs.xfs", "xfsprogs", "makes a file system that shares blocks"),
    tool("fsfreeze", "util-linux", "stops a disk that is written to"),
    tool("fio", "fio", "writes with verification"),
    tool("sqlite3", "sqlite3", "database workloads"),
    tool(LMDB, "liblmdb0", "a database that syncs nothing"),
    tool("ldb", "rocksdb-tools", "a database that syncs nothing, and its check"),
    tool("ceph", "ceph-common", "tells clusters what to do"),
    tool("ceph-authtool", "ceph-common", "makes keys of clusters"),
    tool("monmaptool", "ceph-common", "makes the first map of a cluster"),
    tool("rbd", "ceph-common", "makes and exports images on clusters"),
    tool("ceph-mon", "ceph-mon", "is a cluster's monitor"),
    tool("ceph-osd", "ceph-osd", "stores a cluster's objects"),
    tool(LIBRBD, "librbd1", "Ceph's library for images"),
    tool("git", "git", "clone and fsck through the mount"),
    tool("time", "time", "tells how much memory a program had"),
    tool("sync", "coreutils", "writes a disk's data before a measurement"),
    tool("tar", "tar", "unpacks real trees"),
    tool("bsdtar", "libarchive-tools", "writes and reads tar streams of libarchive"),
    tool("gzip", "gzip", "compresses tar streams"),
    tool("zstd", "zstd", "compresses tar streams"),
    tool("xz", "xz-utils", "compresses tar streams"),
    tool("chmod", "coreutils", "lets others read"),
    tool("id", "coreutils", "tells the numbers of users"),
    tool("dpkg-deb", "dpkg", "builds the package"),
    tool("dpkg", "dpkg", "installs it"),
    tool("dpkg-shlibdeps", "dpkg-dev", "tells which libraries it needs"),
    tool("dpkg-parsechangelog", "dpkg-dev", "reads its changelog"),
    tool("strip", "binutils", "takes symbols off the packaged program"),
    tool("md5sum", "coreutils", "sums of the package's files"),
    tool("systemd-analyze", "systemd", "checks the units of the package"),
    tool("jq", "jq", "reads JSON in the examples of the manual"),
    tool("mandoc", "mandoc", "checks the manual pages"),
    tool("man", "man-db", "finds the manual pages by their names"),
];

/// The directory entry of `program` in PATH, /usr/sbin or /sbin.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// The tools of [`TOOLS`] that this machine lacks.
pub fn missing() -> Vec<&'static Tool> {
    TOOLS.iter().filter(|tool| find(tool.program).is_none()).collect()
}

/// Fails, naming the package, unless all of `programs` are there.
pub fn require(programs: &[&str]) -> Result<()> {
    for program in programs {
        if find(program).is_none() {
            let package =
                TOOLS.iter().find(|t| t.program == *program).map_or(*program, |t| t.package);
            bail!(
                "{program} is not installed: apt-get install {package} (or cargo xtask test --install)"
            );
        }
    }
    Ok(())
}

/// Fails unless the process is root, which loop mounts need.
pub fn require_root() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "loop mounts need root: run the tests as root");
    Ok(())
}

/// Records that something was left out because this machine cannot do it.
///
/// The line is printed and, when `FJORD_SKIP_LOG` names a file, appended to it; `cargo xtask test`
/// counts the lines.
pub fn skipped(what: &str, why: &str) {
    println!("skipped: {what}: {why}");
    if let Some(log) = std::env::var_os("FJORD_SKIP_LOG") {
        let line = format!("{what}: {why}\n");
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&log);
        if let Err(error) = file.and_then(|mut f| f.write_all(line.as_bytes())) {
            panic!("cannot append to the skip log {}: {error}", log.display());
        }
    }
}

/// Has the program take SIGHUP, SIGINT, SIGQUIT and SIGTERM in the default way, though this process may
/// have been started with them ignored (nohup(1), a shell's background job) or blocked.
pub fn hear_signals(command: &mut Command) -> &mut Command {
    let reset = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
            // SAFETY: the default action is valid for each of these signals.
            if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
                return Err(std::io::Error::last_os_error());
            }
        }
        // SAFETY: a signal set is plain data, and the pointers are valid.
        unsafe {
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: signal(2) and sigprocmask(2) are async-signal-safe, and the closure does nothing else.
    unsafe { command.pre_exec(reset) }
}

/// Gives this process, and what it starts, the usual umask of 022: for tests whose outcome has the modes of
/// files that they make.
pub fn usual_umask() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
}

/// What a finished program said.
#[derive(Debug, Clone)]
pub struct Output {
    /// The command line, for messages.
    pub command: String,
    /// Exit code; None when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Fails with the whole output unless the exit code is one of `codes`.
    pub fn expect_code(self, codes: &[i32]) -> Result<Output> {
        ensure!(
            self.code.is_some_and(|code| codes.contains(&code)),
            "{} ended with {:?}, expected {codes:?}\n{}{}",
            self.command,
            self.code,
            tail(&self.stdout),
            tail(&self.stderr)
        );
        Ok(self)
    }

    /// Fails unless the exit code is 0.
    pub fn ok(self) -> Result<Output> {
        self.expect_code(&[0])
    }
}

/// The last 12,000 bytes of a long output: the end is where the reason stands.
fn tail(text: &str) -> String {
    let mut start = text.len().saturating_sub(12_000);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text[start..].to_owned()
}

/// Runs a command to its end, without standard input, and collects what it said.
pub fn run(command: &mut Command) -> Result<Output> {
    let line = format!("{command:?}").replace('"', "");
    let out = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {line}; is it installed?"))?;
    Ok(Output {
        command: line,
        code: out.status.code(),
        stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
    })
}

/// A command for `program`, found also in the sbin directories.
pub fn command(program: &str) -> Result<Command> {
    require(&[program])?;
    let mut command = Command::new(find(program).context("looked up just now")?);
    command.env("LC_ALL", "C");
    Ok(command)
}
