//! `fjord mount` and `fjord umount` as scripts, mount(8) and service managers use them, and what the
//! mount promises to programs. Needs root.

use std::{
    ffi::CString,
    fs::{self, File},
    io::Read,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt, PermissionsExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features::image_to_mount,
    fjord_mount::{FjordMount, is_mounted, table_line},
    image::{self, Scratch},
    tools::{self, Output},
};

/// Runs a command that must succeed.
fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn mounted(name: &str, args: &[&str], test: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (_scratch, img, _) = image_to_mount(name)?;
    let mount = FjordMount::with_program(program(), &img, args)?;
    test(mount.path())?;
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a busy mount is waited for after the first signal.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);

fn ends(child: &mut Child) -> Result<i32> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return status.code().context("ended by a signal");
        }
        ensure!(started.elapsed() < PATIENCE, "still there after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a command that must succeed, again while the mount is busy: a child of another test that has
/// not reached its exec(2) holds a copy of each descriptor.
fn when_free(run: impl Fn() -> Result<Output>) -> Result<Output> {
    let started = Instant::now();
    loop {
        let done = run()?;
        let is_busy = done.code != Some(0) && done.stderr.contains("busy");
        if !is_busy || started.elapsed() > PATIENCE {
            return done.ok();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn umount(dir: &Path) -> Result<Output> {
    when_free(|| tools::run(tools::command("umount")?.arg(dir)))
}

fn signal(child: &Child, number: i32) -> Result<()> {
    // SAFETY: the process is our child and has not been waited for.
    let rc = unsafe { libc::kill(i32::try_from(child.id())?, number) };
    ensure!(rc == 0, "kill failed");
    Ok(())
}

/// Waits until the process has taken the signals that it was sent: two of a kind may be one.
fn wait_until_taken(child: &Child, number: i32) -> Result<()> {
    let started = Instant::now();
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id()))?;
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        let pending = u64::from_str_radix(pending.context("no ShdPnd")?.trim(), 16)?;
        if pending & (1 << (number - 1)) == 0 {
            return Ok(());
        }
        ensure!(started.elapsed() < PATIENCE, "signal {number} is not taken");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a second SIGTERM, unless the process has ended without it: then its patience must be over since
/// the first.
fn signal_again(child: &mut Child, signalled: Instant, what: &str) -> Result<()> {
    match child.try_wait()? {
        None => signal(child, libc::SIGTERM),
        Some(_) => {
            ensure!(signalled.elapsed() >= BUSY_PATIENCE, "{what}");
            Ok(())
        }
    }
}

fn serve(img: &Path, dir: &Path) -> Result<Child> {
    let mut command = Command::new(program());
    tools::hear_signals(&mut command).arg("mount").arg(img).arg(dir);
    let mut child = command.stderr(Stdio::null()).spawn()?;
    while !is_mounted(dir)? {
        ensure!(child.try_wait()?.is_none(), "ended before the mount was complete");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(child)
}

#[test]
fn daemon_and_umount_leave_a_clean_image() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("daemon")?;
    run(Command::new(program()).args(["mount", "--daemon"]).arg(&img).arg(&dir))?;
    ensure!(is_mounted(&dir)?, "returned before it was mounted");
    fs::write(dir.join("a"), vec![1; 1 << 20])?;
    run(Command::new(program()).arg("umount").arg(&dir))?;
    ensure!(!is_mounted(&dir)?);
    image::e2fsck_clean(&img)?;
    // The lock is free at once.
    let cat = run(Command::new(program()).arg("cat").arg(&img).arg("a"))?;
    ensure!(cat.stdout.len() == 1 << 20);
    Ok(())
}

/// On a block device too the mount is `fuseblk`, and both ways to unmount it wait.
#[test]
fn block_devices_are_mounted_like_files() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("device")?;
    let node = run(Command::new("losetup").args(["--find", "--show"]).arg(&img))?.stdout;
    let node = node.trim();
    let fjord = program().to_str().context("a path")?;
    let outcome = (|| {
        for (kind, umount) in [
            ("fuseblk", &[fjord, "umount"][..]),
            ("nofuseblk", &[fjord, "umount"]),
            ("fuseblk", &["umount"]),
        ] {
            run(Command::new(program()).args(["mount", "--daemon", "-o", kind, node]).arg(&dir))?;
            for i in 0..100 {
                fs::write(dir.join(format!("f{i}")), vec![1; 50_000])?;
            }
            run(Command::new(umount[0]).args(&umount[1..]).arg(&dir))?;
            image::e2fsck_clean(&img)?;
        }
        Ok(())
    })();
    run(Command::new("losetup").args(["--detach", node]))?;
    outcome
}

#[test]
fn plain_fuse_is_waited_for_too() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("plain")?;
    run(Command::new(program())
        .args(["mount", "--daemon", "-o", "nofuseblk"])
        .arg(&img)
        .arg(&dir))?;
    for i in 0..200 {
        fs::write(dir.join(format!("f{i}")), vec![1; 50_000])?;
    }
    run(Command::new(program()).arg("umount").arg(&dir))?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn new_makes_the_image() -> Result<()> {
    let scratch = Scratch::new("new")?;
    let (img, dir) = (scratch.join("image"), scratch.join("mnt"));
    fs::create_dir(&dir)?;
    run(Command::new(program()).args(["mount", "--daemon", "--new", "32M"]).arg(&img).arg(&dir))?;
    fs::write(dir.join("a"), b"a")?;
    run(Command::new(program()).arg("umount").arg(&dir))?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// What `--new` made goes again with the mount that failed; what was there before stays.
#[test]
fn a_failed_new_leaves_no_image() -> Result<()> {
    let scratch = Scratch::new("new")?;
    let (img, dir) = (scratch.join("image"), scratch.join("mnt"));
    fs::create_dir(&dir)?;
    let file = scratch.join("file");
    fs::write(&file, b"kept")?;
    let new = |daemon: bool, options: &str, img: &Path, dir: &Path| {
        let mut command = Command::new(program());
        command.args(["mount", "--new", "32M", "-o", options]);
        if daemon {
            command.arg("--daemon");
        }
        tools::run(command.args([img, dir]))
    };
    for daemon in [false, true] {
        // A policy that a new image is not made for, and a mount point that is no directory.
        for (options, dir) in [("fsync=fast-commit", &dir), ("rw", &file)] {
            let failed = new(daemon, options, &img, dir)?.expect_code(&[1])?;
            ensure!(!img.exists(), "{options}: the image is left behind: {failed:?}");
        }
        let refused = new(daemon, "rw", &file, &dir)?.expect_code(&[1])?;
        ensure!(refused.stderr.contains("already exists"), "{refused:?}");
        ensure!(fs::read(&file)? == b"kept");
    }
    Ok(())
}

/// SIGTERM while the image is being made, opened and mounted: neither an image nor a mount without its
/// process is left behind.
#[test]
fn a_signal_while_new_is_at_work_leaves_nothing() -> Result<()> {
    let scratch = Scratch::new("new")?;
    let (img, dir) = (scratch.join("image"), scratch.join("mnt"));
    fs::create_dir(&dir)?;
    let mut ended_early = 0;
    let began = Instant::now();
    for (round, delay_ms) in (0..10).chain([15]).cycle().enumerate() {
        // More of them where this thread is slow.
        if round >= 33 && (ended_early > 0 || began.elapsed() > PATIENCE) {
            break;
        }
        let mut child = Command::new(program())
            .args(["mount", "--new", "4G"])
            .args([&img, &dir])
            .stderr(Stdio::null())
            .spawn()?;
        while !img.exists() {
            ensure!(child.try_wait()?.is_none(), "ended before it had begun");
        }
        std::thread::sleep(Duration::from_millis(delay_ms));
        signal(&child, libc::SIGTERM)?;
        // One that was mounted by then is unmounted, and stays.
        match ends(&mut child)? {
            0 => fs::remove_file(&img)?,
            _ => {
                ensure!(!img.exists(), "after {delay_ms} ms the image is left behind");
                ended_early += 1;
            }
        }
        ensure!(!is_mounted(&dir)?, "after {delay_ms} ms a mount is left behind");
    }
    ensure!(ended_early > 0, "no signal came in time");
    Ok(())
}

#[test]
fn signals_unmount() -> Result<()> {
    for number in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let (_scratch, img, dir) = image_to_mount("signal")?;
        let mut child = serve(&img, &dir)?;
        fs::write(dir.join("a"), b"not fsynced")?;
        // A pipe that nobody reads is no reason to end.
        signal(&child, libc::SIGPIPE)?;
        signal(&child, number)?;
        ensure!(ends(&mut child)? == 0);
        ensure!(!is_mounted(&dir)?);
        image::e2fsck_clean(&img)?;
        let cat = run(Command::new(program()).arg("cat").arg(&img).arg("a"))?;
        ensure!(cat.stdout == "not fsynced", "{:?}", cat.stdout);
    }
    Ok(())
}

#[test]
fn nohup_outlives_the_terminal() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("nohup")?;
    let mut child = tools::command("nohup")?
        .arg(program())
        .arg("mount")
        .args([&img, &dir])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    while !is_mounted(&dir)? {
        ensure!(child.try_wait()?.is_none(), "ended before the mount was complete");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&child, libc::SIGHUP)?;
    // One that ends later than this goes unnoticed.
    std::thread::sleep(Duration::from_millis(300));
    ensure!(child.try_wait()?.is_none() && is_mounted(&dir)?, "ended by a signal to be ignored");
    umount(&dir)?;
    ensure!(ends(&mut child)? == 0);
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Whoever read the messages has gone (`fjord mount ... 2>&1 | head`): signals unmount all the same.
#[test]
fn messages_that_nobody_reads_are_no_obstacle() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("unread")?;
    let (reader, writer) = std::io::pipe()?;
    let mut child = Command::new(program())
        .args(["mount", "-o", "nofuseblk"])
        .args([&img, &dir])
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .spawn()?;
    // With the first message, which is about nofuseblk, its reader goes.
    let mut byte = [0];
    (&reader).read_exact(&mut byte)?;
    drop(reader);
    ensure!(is_mounted(&dir)?, "a message before the mount");
    let file = File::create(dir.join("a"))?;
    file.write_all_at(b"kept", 0)?;
    // The mount is busy, which is told; and again when it is cut loose.
    let signalled = Instant::now();
    signal(&child, libc::SIGTERM)?;
    wait_until_taken(&child, libc::SIGTERM)?;
    signal_again(&mut child, signalled, "did not wait for the user of the mount")?;
    let code = ends(&mut child)?;
    ensure!(code == 0, "status {code}");
    image::e2fsck_clean(&img)?;
    let cat = run(Command::new(program()).arg("cat").arg(&img).arg("a"))?;
    ensure!(cat.stdout == "kept", "{:?}", cat.stdout);
    Ok(())
}

/// A copy of the mount in another mount namespace (a container started meanwhile) keeps the
/// session alive when the mount is gone here; the daemon ends all the same, and loses nothing.
#[test]
fn a_copy_of_the_mount_elsewhere_is_cut_loose() -> Result<()> {
    for options in ["fuseblk", "nofuseblk,writeback_cache"] {
        let (_scratch, img, dir) = image_to_mount("copy")?;
        let mut child = Command::new(program())
            .args(["mount", "-o", options])
            .arg(&img)
            .arg(&dir)
            .stderr(Stdio::null())
            .spawn()?;
        while !is_mounted(&dir)? {
            ensure!(child.try_wait()?.is_none(), "ended before the mount was complete");
            std::thread::sleep(Duration::from_millis(5));
        }
        let unshare = ["-m", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 600"];
        let mut copy = tools::command("unshare")?.args(unshare).stdout(Stdio::piped()).spawn()?;
        let mut ready = [0; 6];
        let copied = copy.stdout.take().context("a pipe")?.read_exact(&mut ready);
        let outcome = (|| {
            copied?;
            fs::write(dir.join("kept"), vec![7; 300_000])?;
            let signalled = Instant::now();
            signal(&child, libc::SIGTERM)?;
            while is_mounted(&dir)? {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Patience is for people; a second signal cuts at once.
            signal_again(&mut child, signalled, "the copy did not keep it alive")?;
            let code = ends(&mut child)?;
            ensure!(code == 0, "status {code}");
            image::e2fsck_clean(&img)?;
            let kept = run(Command::new(program()).arg("cat").arg(&img).arg("kept"))?;
            ensure!(kept.stdout.len() == 300_000, "{} bytes are left", kept.stdout.len());
            Ok(())
        })();
        copy.kill()?;
        copy.wait()?;
        outcome?;
    }
    Ok(())
}

#[test]
fn a_second_signal_cuts_a_busy_mount_loose_and_the_image_is_clean() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("busy")?;
    let mut child = serve(&img, &dir)?;
    let file = File::create(dir.join("a"))?;
    file.write_all_at(b"kept", 0)?;
    let signalled = Instant::now();
    signal(&child, libc::SIGTERM)?;
    wait_until_taken(&child, libc::SIGTERM)?;
    // One that does not wait, but ends later than this, goes unnoticed.
    std::thread::sleep(Duration::from_millis(300));
    signal_again(&mut child, signalled, "did not wait for the user of the mount")?;
    ensure!(ends(&mut child)? == 0);
    ensure!(file.sync_all().is_err());
    image::e2fsck_clean(&img)?;
    let cat = run(Command::new(program()).arg("cat").arg(&img).arg("a"))?;
    ensure!(cat.stdout == "kept", "{:?}", cat.stdout);
    Ok(())
}

/// mount(8) finds helpers in fixed places, so the test runs what it would run.
#[test]
fn as_a_mount_helper() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("helper")?;
    let helper = scratch.join("mount.fuse.fjord");
    std::os::unix::fs::symlink(program(), &helper)?;
    run(Command::new(&helper).arg(&img).arg(&dir).args(["-o", "rw,noatime,nofail,x-a.b"]))?;
    ensure!(is_mounted(&dir)?);
    run(Command::new(program()).arg("umount").arg(&dir))?;
    // As `mount --fake` runs it.
    run(Command::new(&helper).arg(&img).arg(&dir).args(["-f", "-o", "rw"]))?;
    ensure!(!is_mounted(&dir)?, "mounted although it was told not to");
    tools::run(Command::new(&helper).args([&img, &dir]).args(["-f", "-o", "frob"]))?
        .expect_code(&[2])?;
    // As mount.fuse3 runs it for the type fuse.fjord.
    run(Command::new(program()).arg(&img).arg(&dir).args(["-o", "ro,dev,suid"]))?;
    let denied = fs::write(dir.join("a"), b"a").unwrap_err();
    ensure!(denied.raw_os_error() == Some(libc::EROFS), "{denied}");
    run(Command::new(program()).arg("umount").arg(&dir))?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Runs a script in a mount namespace whose /usr/sbin has the helper, so that nothing of the system
/// changes. $1 is a directory of its own, $2 the program, $3 the image, $4 the mount point.
fn with_helper_installed(script: &str, img: &Path, dir: &Path) -> Result<Output> {
    let bin = Path::new("/usr/sbin/mount.fuse.fjord");
    ensure!(!bin.exists(), "the helper is installed on this machine");
    let prelude = "set -e\nmount -t tmpfs none \"$1\"\nmkdir \"$1/up\" \"$1/work\"\nmount -t overlay -o \
                   \"lowerdir=/usr/sbin,upperdir=$1/up,workdir=$1/work\" o /usr/sbin\nln -s \"$2\" \
                   /usr/sbin/mount.fuse.fjord\n";
    let tmp = img.with_file_name("tmp");
    fs::create_dir(&tmp)?;
    run(tools::command("unshare")?
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg(format!("{prelude}{script}"))
        .args([Path::new("sh"), &tmp, program(), img, dir]))
}

#[test]
fn mount_8_by_type() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("mount8")?;
    let script = "mount -t fuse.fjord \"$3\" \"$4\" -o noatime\ntouch \"$4/made\"\numount \"$4\"\n";
    with_helper_installed(script, &img, &dir)?;
    let ls = run(Command::new(program()).arg("ls").arg(&img))?;
    ensure!(ls.stdout.contains("made"), "{ls:?}");
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// What an entry of fstab says about access times is what /proc/mounts shows, also after a remount by
/// the entry, and `mount -a` knows a mount that is there.
#[test]
fn options_of_fstab_show_and_can_be_remounted() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("fstab")?;
    let script = r#"
        # As fstab(5) and /proc/mounts have it.
        escaped() { printf '%s\n' "$1" | sed 's/ /\\040/g'; }
        shown() { grep -F " $(escaped "$4") fuseblk.fjord " /proc/mounts | cut -d" " -f4; }
        for options in noatime relatime strictatime nodiratime noatime,nodiratime; do
            printf '%s %s fuse.fjord %s,nofail 0 0\n' "$(escaped "$3")" "$(escaped "$4")" \
                "$options" >"$1/fstab"
            mount -T "$1/fstab" "$4"; shown "$@"
            mount -T "$1/fstab" -a; [ "$(shown "$@" | wc -l)" = 1 ]
            mount -T "$1/fstab" -o remount,ro "$4"; shown "$@"
            mount -T "$1/fstab" -o remount,rw,nosuid "$4"; shown "$@"
            umount "$4"
        done
    "#;
    let done = with_helper_installed(script, &img, &dir)?;
    let lines: Vec<&str> = done.stdout.lines().collect();
    ensure!(lines.len() == 15, "{done:?}");
    let wanted: [(&[&str], &[&str]); 5] = [
        (&["noatime"], &["relatime", "nodiratime"]),
        (&["relatime"], &["noatime", "nodiratime"]),
        (&[], &["relatime", "noatime", "nodiratime"]),
        (&["relatime", "nodiratime"], &["noatime"]),
        (&["noatime", "nodiratime"], &["relatime"]),
    ];
    for (shown, (there, absent)) in lines.chunks(3).zip(wanted) {
        for (line, state) in shown.iter().zip([&["rw"][..], &["ro"], &["rw", "nosuid"]]) {
            let has = |option: &&str| line.split(',').any(|shown| shown == *option);
            ensure!(there.iter().chain(state).all(has), "{there:?} {state:?}: {line}");
            ensure!(!absent.iter().any(has), "{absent:?}: {line}");
        }
    }
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn dirsync_makes_names_durable_at_once() -> Result<()> {
    for option in ["dirsync", "sync"] {
        let (_scratch, img, _) = image_to_mount("dirsync")?;
        let mut mount = FjordMount::with_program(program(), &img, &["-o", option])?;
        let at = |name: &str| mount.path().join(name);
        fs::create_dir(at("made"))?;
        fs::create_dir(at("removed"))?;
        fs::remove_dir(at("removed"))?;
        File::create(at("before"))?;
        fs::rename(at("before"), at("made/after"))?;
        fs::hard_link(at("made/after"), at("linked"))?;
        std::os::unix::fs::symlink("made", at("soft"))?;
        mount.kill()?;
        mount.detach();
        run(Command::new(program()).arg("recover").arg(&img))?;
        image::e2fsck_clean(&img)?;
        let tree = run(Command::new(program()).arg("tree").arg(&img))?.stdout;
        for name in ["made", "└── after", "linked", "soft -> made"] {
            ensure!(tree.contains(name), "{option}: {name} is gone: {tree}");
        }
        ensure!(!tree.contains("removed") && !tree.contains("before"), "{option}: {tree}");
    }
    Ok(())
}

fn atime(path: &Path) -> Result<(i64, i64)> {
    let meta = fs::metadata(path)?;
    Ok((meta.atime(), meta.atime_nsec()))
}

#[test]
fn relatime_also_when_the_kernel_has_the_pages() -> Result<()> {
    mounted("relatime", &[], |dir| {
        let path = dir.join("a");
        fs::write(&path, b"abc")?;
        let written = atime(&path)?;
        std::thread::sleep(Duration::from_millis(20));
        fs::read(&path)?;
        let first = atime(&path)?;
        ensure!(first > written, "the first read after a write sets the access time");
        std::thread::sleep(Duration::from_millis(20));
        fs::read(&path)?;
        ensure!(atime(&path)? == first, "a second read does not");
        Ok(())
    })?;
    mounted("noatime", &["-o", "noatime"], |dir| {
        let path = dir.join("a");
        fs::write(&path, b"abc")?;
        let written = atime(&path)?;
        std::thread::sleep(Duration::from_millis(20));
        fs::read(&path)?;
        ensure!(atime(&path)? == written);
        Ok(())
    })
}

/// The options of a mount in /proc/mounts.
fn shown_options(dir: &Path) -> Result<Vec<String>> {
    let line = table_line(dir)?;
    let options = line.split(' ').nth(3).context("no options")?;
    Ok(options.split(',').map(str::to_owned).collect())
}

#[test]
fn options_show_in_the_mount_table() -> Result<()> {
    for (given, shown, not_shown) in [
        ("noatime", &["rw", "noatime"][..], "relatime"),
        ("noatime,relatime", &["rw", "relatime"], "noatime"),
        ("strictatime", &["rw"], "relatime"),
        ("noatime,nodiratime,nosuid,nodev", &["noatime", "nodiratime", "nosuid", "nodev"], "suid"),
        ("lazytime,sync", &["lazytime", "sync", "relatime"], "async"),
        ("ro,noatime", &["ro", "noatime"], "rw"),
        ("nofuseblk,noatime,nodiratime", &["rw", "noatime", "nodiratime"], "relatime"),
    ] {
        mounted("shown", &["-o", given], |dir| {
            let options = shown_options(dir)?;
            for option in shown {
                ensure!(options.iter().any(|o| o == option), "{given}: {options:?}");
            }
            ensure!(!options.iter().any(|o| o == not_shown), "{given}: {options:?}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn nodiratime_keeps_those_of_directories() -> Result<()> {
    for (options, dir_moves) in [("strictatime", true), ("strictatime,nodiratime", false)] {
        mounted("nodiratime", &["-o", options], |dir| {
            let (sub, path) = (dir.join("sub"), dir.join("file"));
            fs::create_dir(&sub)?;
            fs::write(&path, b"abc")?;
            let before = (atime(&sub)?, atime(&path)?);
            std::thread::sleep(Duration::from_millis(20));
            fs::read_dir(&sub)?.count();
            fs::read(&path)?;
            ensure!((atime(&sub)? > before.0) == dir_moves, "{options}: the directory");
            ensure!(atime(&path)? > before.1, "{options}: the file");
            Ok(())
        })?;
    }
    Ok(())
}

/// `mount -o remount` as the kernel does it, and as the helper does where there is one.
#[test]
fn remount_changes_what_it_can_and_names_the_rest() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("remount")?;
    let helper = scratch.join("mount.fuse.fjord");
    std::os::unix::fs::symlink(program(), &helper)?;
    let by_helper =
        |options: &str| tools::run(Command::new(&helper).args([&img, &dir]).args(["-o", options]));
    let by_kernel =
        |options: &str| tools::run(tools::command("mount")?.args(["-o", options]).arg(&dir));
    let has =
        |option: &str| Ok::<_, anyhow::Error>(shown_options(&dir)?.iter().any(|o| o == option));
    run(Command::new(&helper).args([&img, &dir]).args(["-o", "noatime"]))?;
    for ways in [&by_helper as &dyn Fn(&str) -> Result<Output>, &by_kernel] {
        fs::write(dir.join("a"), b"before")?;
        when_free(|| ways("remount,ro"))?;
        ensure!(has("ro")? && has("noatime")?, "{:?}", shown_options(&dir)?);
        let denied = fs::write(dir.join("a"), b"b").expect_err("a write");
        ensure!(denied.raw_os_error() == Some(libc::EROFS), "{denied}");
        // All of it is on the device by now.
        let copy = scratch.join("copy");
        image::copy_sparse(&img, &copy)?;
        run(Command::new(program()).arg("recover").arg(&copy))?;
        let cat = run(Command::new(program()).arg("cat").arg(&copy).arg("a"))?;
        ensure!(cat.stdout == "before", "{:?}", cat.stdout);
        ways("remount,rw")?.ok()?;
        ensure!(has("rw")? && has("noatime")?, "{:?}", shown_options(&dir)?);
        fs::remove_file(dir.join("a"))?;
    }
    // What libmount hands over from the mount table and fstab.
    let table = "rw,noatime,user_id=0,group_id=0,default_permissions,allow_other,blksize=4096";
    let said = by_helper(&format!("{table},commit=7,remount,nosuid"))?.ok()?;
    ensure!(said.stderr.contains("unchanged: commit"), "{said:?}");
    ensure!(has("nosuid")? && has("rw")?, "{:?}", shown_options(&dir)?);
    for options in ["remount,relatime", "remount,strictatime", "remount,nodiratime", "remount,sync"]
    {
        let refused = by_helper(options)?;
        ensure!(refused.code == Some(2), "{refused:?}");
        ensure!(refused.stderr.contains("mount it again"), "{refused:?}");
    }
    umount(&dir)?;
    let refused = by_helper("remount,ro")?;
    ensure!(refused.stderr.contains("is not a fjord mount"), "{refused:?}");
    run(Command::new(&helper).args([&img, &dir]).args(["-o", "ro"]))?;
    let refused = by_helper("remount,rw")?;
    ensure!(refused.code == Some(2) && refused.stderr.contains("read-only"), "{refused:?}");
    umount(&dir)?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> Result<()> {
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    let name = CString::new(name)?;
    // SAFETY: both strings end in NUL; the value is as long as said.
    let rc = unsafe {
        libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0)
    };
    ensure!(rc == 0, "setxattr: {}", std::io::Error::last_os_error());
    Ok(())
}

fn has_xattr(path: &Path, name: &str) -> Result<bool> {
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    let name = CString::new(name)?;
    // SAFETY: both strings end in NUL; only the size is asked for.
    Ok(unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) } >= 0)
}

#[test]
fn privileges_go_on_write_truncate_and_chown() -> Result<()> {
    // cap_net_raw+ep, version 2.
    const CAPS: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const NAME: &str = "security.capability";
    mounted("privileges", &[], |dir| {
        let path = dir.join("a");
        for change in ["write", "truncate", "chown"] {
            fs::write(&path, b"abc")?;
            set_xattr(&path, NAME, &CAPS)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4755))?;
            match change {
                "write" => File::options().write(true).open(&path)?.write_all_at(b"x", 0)?,
                "truncate" => File::options().write(true).open(&path)?.set_len(1)?,
                _ => std::os::unix::fs::chown(&path, Some(7), Some(7))?,
            }
            ensure!(!has_xattr(&path, NAME)?, "capabilities stay on {change}");
            let suid = fs::metadata(&path)?.mode() & 0o4000 != 0;
            ensure!(suid == (change != "chown"), "set-user-ID after {change} by root: {suid}");
        }
        // Somebody without CAP_FSETID loses set-user-ID by writing.
        std::os::unix::fs::chown(&path, Some(65534), Some(65534))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777))?;
        let script = format!("printf y >> '{}'", path.display());
        let mut shell = Command::new("setpriv");
        shell.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", &script]);
        // The scratch directory is root's own.
        let above = dir.parent().context("a parent")?;
        fs::set_permissions(above, fs::Permissions::from_mode(0o1777))?;
        run(&mut shell)?;
        ensure!(fs::metadata(&path)?.mode() & 0o6000 == 0, "set-user-ID stays");
        Ok(())
    })
}

#[test]
fn unnamed_files_flags_and_ioctls() -> Result<()> {
    const FS_IMMUTABLE_FL: libc::c_int = 0x10;
    mounted("ioctl", &[], |dir| {
        let here = CString::new(dir.as_os_str().as_encoded_bytes())?;
        // SAFETY: the path ends in NUL.
        let fd = unsafe { libc::open(here.as_ptr(), libc::O_TMPFILE | libc::O_RDWR, 0o600) };
        ensure!(fd >= 0, "O_TMPFILE: {}", std::io::Error::last_os_error());
        let (from, to) = (CString::new(format!("/proc/self/fd/{fd}"))?, dir.join("named"));
        let to = CString::new(to.as_os_str().as_encoded_bytes())?;
        // SAFETY: both paths end in NUL; the descriptor is closed once.
        let rc = unsafe {
            let rc = libc::linkat(
                libc::AT_FDCWD,
                from.as_ptr(),
                libc::AT_FDCWD,
                to.as_ptr(),
                libc::AT_SYMLINK_FOLLOW,
            );
            libc::close(fd);
            rc
        };
        ensure!(rc == 0 && dir.join("named").exists(), "an unnamed file cannot be named");

        let file = File::open(dir.join("named"))?;
        let mut flags: libc::c_int = FS_IMMUTABLE_FL;
        // SAFETY: the ioctl reads one int (FS_IOC_SETFLAGS) through a valid pointer.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), 0x4008_6602, &raw mut flags) };
        ensure!(rc == 0, "SETFLAGS: {}", std::io::Error::last_os_error());
        let denied = File::options().write(true).open(dir.join("named")).unwrap_err();
        ensure!(denied.raw_os_error() == Some(libc::EPERM), "{denied}");
        ensure!(fs::remove_file(dir.join("named")).is_err(), "an immutable file was removed");
        flags = 0;
        // SAFETY: as above.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), 0x4008_6602, &raw mut flags) };
        ensure!(rc == 0, "SETFLAGS: {}", std::io::Error::last_os_error());

        let mut range = [0u64, u64::MAX, 0];
        let top = File::open(dir)?;
        // SAFETY: FITRIM reads and writes three u64 through a valid pointer.
        let rc = unsafe { libc::ioctl(top.as_raw_fd(), 0xc018_5879, range.as_mut_ptr()) };
        ensure!(rc == 0 && range[1] > 0, "FITRIM: {}", std::io::Error::last_os_error());
        Ok(())
    })
}

/// `FS_IOC_SETFSLABEL` and `FS_IOC_GETFSLABEL`, as xfs_io and e2label(8) make them.
#[test]
fn the_label_is_read_and_set() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("label")?;
    let mut child = serve(&img, &dir)?;
    let top = File::open(&dir)?;
    let call = |number: libc::c_ulong, label: &mut [u8; 256]| {
        // SAFETY: both ioctls read or write 256 bytes through a pointer that is valid for the call.
        let rc = unsafe { libc::ioctl(top.as_raw_fd(), number as _, label.as_mut_ptr()) };
        if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    let named = |name: &str| {
        let mut label = [0; 256];
        label[..name.len()].copy_from_slice(name.as_bytes());
        label
    };
    call(0x4100_9432, &mut named("sixteen bytes ok"))?;
    let too_long = call(0x4100_9432, &mut named("seventeen bytes !")).unwrap_err();
    ensure!(too_long.raw_os_error() == Some(libc::EINVAL), "{too_long}");
    let mut found = [0xff; 256];
    call(0x8100_9431, &mut found)?;
    ensure!(found == named("sixteen bytes ok"), "{found:?}");
    drop(top);
    umount(&dir)?;
    ends(&mut child)?;
    image::e2fsck_clean(&img)?;
    let told = run(tools::command("dumpe2fs")?.arg("-h").arg(&img))?.stdout;
    ensure!(told.contains("sixteen bytes ok"), "{told}");
    Ok(())
}

#[test]
fn shutdown_keeps_what_was_fsynced() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("shutdown")?;
    let mut child = serve(&img, &dir)?;
    let file = File::create(dir.join("kept"))?;
    file.write_all_at(b"kept", 0)?;
    file.sync_all()?;
    fs::write(dir.join("lost"), b"lost")?;
    let mode: u32 = 2;
    // SAFETY: XFS_IOC_GOINGDOWN reads one u32 through a valid pointer.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), 0x8004_587d, &raw const mode) };
    ensure!(rc == 0, "GOINGDOWN: {}", std::io::Error::last_os_error());
    ensure!(file.sync_all().is_err(), "fsync after shutdown");
    drop(file);
    umount(&dir)?;
    ends(&mut child)?;
    run(Command::new(program()).arg("recover").arg(&img))?;
    image::e2fsck_clean(&img)?;
    let cat = run(Command::new(program()).arg("cat").arg(&img).arg("kept"))?;
    ensure!(cat.stdout == "kept");
    Ok(())
}
