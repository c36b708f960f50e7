//! Bad use: each mistake gets a message that says what to do and an exit code of its own, and loses
//! nothing. Needs root for those that mount.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_format::{
    geometry::Geometry,
    ijournal::AreaTable,
    mmp::{MmpBlock, SEQ_FSCK},
    superblock::RawSuperblock,
};
use fjord_testkit::{
    dirty,
    features::{self, image_to_mount},
    fjord_mount::{FjordMount, is_mounted},
    image::{self, KernelMount, Scratch},
    tools,
};

const FAILURE: i32 = 1;
const USAGE: i32 = 2;
const IN_USE: i32 = 3;
const DAMAGED: i32 = 4;
const UNSUPPORTED: i32 = 5;

fn program() -> PathBuf {
    std::env::var_os("FJORD_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_fjord").into()).into()
}

fn fjord() -> Command {
    let mut command = Command::new(program());
    command.stdin(Stdio::null());
    command
}

/// The command must end with this code and say all of these words.
fn expect(output: &Output, code: i32, words: &[&str]) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(code), "ended with {}, said: {said}", output.status);
    for word in words {
        ensure!(said.contains(word), "{word:?} is missing in: {said}");
    }
    ensure!(!said.contains("panicked"), "{said}");
    Ok(())
}

fn mount(image: &Path, dir: &Path) -> Command {
    let mut command = fjord();
    command.arg("mount").arg(image).arg(dir);
    command
}

#[test]
fn image_missing() -> Result<()> {
    let (scratch, _, dir) = image_to_mount("missing")?;
    let absent = scratch.join("absent");
    expect(&mount(&absent, &dir).output()?, FAILURE, &["does not exist", "fjord mkfs"])?;
    for command in ["ls", "info", "recover", "journal", "tree"] {
        expect(&fjord().arg(command).arg(&absent).output()?, FAILURE, &["does not exist"])?;
    }
    Ok(())
}

#[test]
fn image_is_no_ext4() -> Result<()> {
    let (scratch, _, dir) = image_to_mount("noext4")?;
    let img = scratch.join("zeros");
    File::create(&img)?.set_len(16 << 20)?;
    expect(&mount(&img, &dir).output()?, FAILURE, &["not an ext2, ext3 or ext4", "mkfs"])?;
    expect(&fjord().arg("info").arg(&img).output()?, FAILURE, &["not an ext2, ext3 or ext4"])?;
    expect(&mount(&dir, &dir).output()?, USAGE, &["is a directory", "image file"])
}

/// What is neither a file nor a block device is told at once: opening a pipe would wait for ever.
#[test]
fn image_is_a_pipe_or_a_socket_or_a_character_device() -> Result<()> {
    let (scratch, _, dir) = image_to_mount("pipe")?;
    let (pipe, socket) = (scratch.join("pipe"), scratch.join("socket"));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )?;
    let _listener = std::os::unix::net::UnixListener::bind(&socket)?;
    let commands: &[(&[&str], &[&str])] = &[
        (&["mount"], &["DIR"]),
        (&["info"], &[]),
        (&["recover"], &[]),
        (&["recover", "--drop-fsyncs"], &[]),
        (&["journal"], &[]),
        (&["ls"], &[]),
        (&["tree"], &[]),
        (&["stat"], &["/"]),
        (&["cat"], &["/x"]),
        (&["get"], &["/x"]),
        (&["put"], &["/etc/passwd", "/x"]),
        (&["rm"], &["/x"]),
        (&["mkdir"], &["/x"]),
        (&["tune", "--ijournal", "0"], &[]),
        (&["mkfs"], &[]),
        (&["mkfs", "--force", "--size", "16M"], &[]),
    ];
    for (path, what) in [
        (pipe.as_path(), "pipe or socket"),
        (&socket, "pipe or socket"),
        (Path::new("/dev/null"), "character device"),
        (&dir, "directory"),
    ] {
        for (before, after) in commands {
            let mut command = tools::command("timeout")?;
            command.arg("300").arg(program()).args(*before);
            command.arg(path);
            for arg in *after {
                match *arg {
                    "DIR" => command.arg(&dir),
                    arg => command.arg(arg),
                };
            }
            let out = command.stdin(Stdio::null()).output()?;
            expect(&out, USAGE, &[what]).with_context(|| format!("{before:?} {path:?}"))?;
        }
    }
    Ok(())
}

/// The inode of the journal is gone, or another.
#[test]
fn journal_inode_is_unusable() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("nojournal")?;
    for (request, why) in [
        ("clri <8>", "inode 8 is not in use"),
        ("ssv journal_inum 11", "inode 11 is not a file"),
        ("ssv journal_inum 200", "inode 200 is not in use"),
        ("ssv journal_inum 4000000", "inode 4000000"),
        ("ssv journal_inum 0", "no inode"),
        ("sif <8> links_count 0", "inode 8 is not a file"),
    ] {
        let broken = scratch.join("broken");
        image::copy_sparse(&img, &broken)?;
        image::debugfs_write(&broken, &[request.to_owned()])?;
        let words = ["journal inode", why, "e2fsck -fy", "lost"];
        for command in ["recover", "journal"] {
            let out = fjord().arg(command).arg(&broken).output()?;
            expect(&out, DAMAGED, &words).with_context(|| format!("{command}, {request}"))?;
        }
        expect(&mount(&broken, &dir).output()?, DAMAGED, &words).context(request)?;
        expect(&fjord().arg("info").arg(&broken).output()?, 0, &[]).context(request)?;
        // The advice helps.
        image::e2fsck_repair(&broken).context(request)?;
        expect(&fjord().arg("recover").arg(&broken).output()?, 0, &[]).context(request)?;
        image::e2fsck_clean(&broken).context(request)?;
    }
    Ok(())
}

/// How long a command waits for a detached mount.
const DETACHED_PATIENCE: Duration = Duration::from_secs(5);

/// Runs a command beside a detached mount, which a program leaves meanwhile or not. False where the
/// machine is so slow that the command has waited as long as it may.
fn next_to_a_detached_mount(
    img: &Path,
    dir: &Path,
    next: &str,
    is_left: bool,
    code: i32,
) -> Result<bool> {
    let mut mounted = FjordMount::with_program(&program(), img, &[])?;
    fs::write(mounted.path().join("file"), "content")?;
    let mut holder = Command::new("sleep").arg("600").current_dir(mounted.path()).spawn()?;
    mounted.kill()?;
    let detached = tools::run(tools::command("umount")?.arg("-l").arg(mounted.path()));
    let mut command = match next {
        "recover" => fjord(),
        _ => mount(img, dir),
    };
    match next {
        "recover" => command.arg("recover").arg(img),
        _ => command.arg("--daemon"),
    };
    let began = Instant::now();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    if is_left {
        // By then it waits; one that does not, and is slower than this, goes unnoticed.
        std::thread::sleep(Duration::from_millis(500));
        holder.kill()?;
    }
    let out = child.wait_with_output();
    let took = began.elapsed();
    holder.kill()?;
    holder.wait()?;
    detached?.ok()?;
    let out = out?;
    mounted.detach();
    if is_left && out.status.code() == Some(IN_USE) && took >= DETACHED_PATIENCE {
        return Ok(false);
    }
    let words: &[&str] = if code == 0 { &[] } else { &["detached", "umount -l", "/dev/loop"] };
    expect(&out, code, words)?;
    if next == "mount" {
        image::unmount(dir)?;
    }
    Ok(true)
}

/// A mount whose daemon was killed and that was detached while a program was on it lives on for a
/// moment, and so does its loop device.
#[test]
fn a_detached_mount_is_waited_for() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("detached")?;
    for (next, is_left, code) in
        [("recover", true, 0), ("mount", true, 0), ("recover", false, IN_USE)]
    {
        let began = Instant::now();
        while !next_to_a_detached_mount(&img, &dir, next, is_left, code)
            .with_context(|| format!("{next}, left: {is_left}"))?
        {
            ensure!(began.elapsed() < Duration::from_secs(120), "too slow each time");
        }
    }
    ensure!(fjord().arg("recover").arg(&img).status()?.success());
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn image_too_small() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("small")?;
    let tiny = scratch.join("tiny");
    fs::write(&tiny, b"tiny")?;
    expect(&mount(&tiny, &dir).output()?, FAILURE, &["too few", "mkfs"])?;
    expect(&fjord().arg("info").arg(&tiny).output()?, FAILURE, &["too small"])?;
    let len = fs::metadata(&img)?.len();
    File::options().write(true).open(&img)?.set_len(len / 2)?;
    expect(&mount(&img, &dir).output()?, FAILURE, &["is truncated", "resize2fs"])
}

#[test]
fn image_damaged_or_with_an_unknown_feature() -> Result<()> {
    use std::os::unix::fs::FileExt;
    let (scratch, img, dir) = image_to_mount("damaged")?;
    let copy = scratch.join("copy");
    fs::copy(&img, &copy)?;
    // A bit of the superblock's free count: the checksum no longer fits.
    File::options().write(true).open(&copy)?.write_all_at(&[0xff], 1024 + 12)?;
    expect(&mount(&copy, &dir).output()?, DAMAGED, &["checksum", "e2fsck"])?;
    let set = features::by_name("bigalloc").context("a set of the table")?;
    let bigalloc = scratch.join("bigalloc");
    set.make(&bigalloc)?;
    expect(&mount(&bigalloc, &dir).output()?, UNSUPPORTED, &["bigalloc"])
}

/// An image as a power cut leaves it, with a fsynced file that is in an area of the journal alone.
fn with_an_i_transaction(scratch: &Scratch) -> Result<PathBuf> {
    let (img, cut) = (scratch.join("areas"), scratch.join("cut"));
    let made = fjord().args(["mkfs", "-s", "64M", "--ijournal", "2x1M"]).arg(&img).output()?;
    expect(&made, 0, &[])?;
    dirty::fsync_into_area(&img, &cut)?;
    Ok(cut)
}

#[test]
fn areas_that_are_damaged_can_be_given_up() -> Result<()> {
    use std::os::unix::fs::FileExt;
    let (scratch, _, dir) = image_to_mount("areas")?;
    let cut = with_an_i_transaction(&scratch)?;
    let whole = scratch.join("whole");
    fs::copy(&cut, &whole)?;
    expect(&fjord().arg("recover").arg(&whole).output()?, 0, &[])?;
    let read = fjord().arg("cat").arg(&whole).arg("/synced").output()?;
    ensure!(read.stdout == b"what was synced", "{read:?}");

    let bytes = fs::read(&cut)?;
    let table = bytes.chunks(1024).position(AreaTable::is_table).context("no table")?;
    File::options().write(true).open(&cut)?.write_all_at(&[0xff; 4], table as u64 * 1024)?;
    let wants = ["magic", "recover --drop-fsyncs"];
    expect(&fjord().arg("recover").arg(&cut).output()?, DAMAGED, &wants)?;
    expect(&mount(&cut, &dir).output()?, DAMAGED, &wants)?;
    for command in ["info", "journal"] {
        let out = fjord().arg(command).arg(&cut).output()?;
        let said = String::from_utf8_lossy(&out.stdout);
        ensure!(said.contains("damaged") && said.contains("magic"), "{command}: {said}");
    }
    ensure!(image::e2fsck_repair(&cut).is_err(), "e2fsck takes an image with the mark");
    let given_up = fjord().args(["recover", "--drop-fsyncs"]).arg(&cut).output()?;
    expect(&given_up, 0, &[])?;
    let said = String::from_utf8_lossy(&given_up.stdout);
    ensure!(said.contains("discarded") && said.contains("clean"), "{said}");
    image::e2fsck_clean(&cut)?;
    let listed = fjord().arg("ls").arg(&cut).arg("/").output()?;
    ensure!(!String::from_utf8_lossy(&listed.stdout).contains("synced"), "{listed:?}");
    Ok(())
}

/// A wrong checksum in the journal's superblock: the mark goes, so that e2fsck can repair the rest.
#[test]
fn a_damaged_journal_superblock_with_the_mark_can_be_repaired() -> Result<()> {
    use std::os::unix::fs::FileExt;
    let (scratch, _, _) = image_to_mount("marked")?;
    let made = with_an_i_transaction(&scratch)?;
    let journal = fs::read(&made)?
        .chunks(1024)
        .position(|block| block.starts_with(&[0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 4]))
        .context("no journal")?;
    for (command, codes) in [(&["recover", "--drop-fsyncs"][..], [DAMAGED]), (&["fsck", "-y"], [1])]
    {
        let cut = scratch.join(command[0]);
        fs::copy(&made, &cut)?;
        let file = File::options().write(true).open(&cut)?;
        file.write_all_at(&[1, 2, 3, 4], journal as u64 * 1024 + 0xfc)?;
        let wants = ["checksum", "recover --drop-fsyncs"];
        expect(&fjord().arg("recover").arg(&cut).output()?, DAMAGED, &wants)?;
        let given_up = fjord().args(command).arg(&cut).output()?;
        ensure!(codes.map(Some).contains(&given_up.status.code()), "{given_up:?}");
        let told = [&given_up.stdout[..], &given_up.stderr].concat();
        ensure!(String::from_utf8_lossy(&told).contains("discarded"), "{given_up:?}");
        image::e2fsck_repair(&cut)?;
        image::e2fsck_clean(&cut)?;
    }
    Ok(())
}

/// A bad sector in an i-transaction looks as a power cut in its fsync does: it is left out, with a warning.
#[test]
fn an_i_transaction_that_is_not_whole_is_told() -> Result<()> {
    use std::os::unix::fs::FileExt;
    let (scratch, _, _) = image_to_mount("not-whole")?;
    let cut = with_an_i_transaction(&scratch)?;
    let bytes = fs::read(&cut)?;
    let at = bytes.chunks(1024).position(|block| block.starts_with(b"fjIT")).context("no area")?;
    let file = File::options().write(true).open(&cut)?;
    file.write_all_at(b"zzzz", at as u64 * 1024 + 200)?;
    let done = fjord().arg("recover").arg(&cut).output()?;
    expect(&done, 0, &["not whole", "not applied", &cut.to_string_lossy()])?;
    Ok(())
}

/// What recovery can read is never discarded, whatever is asked for.
#[test]
fn areas_that_are_sound_are_not_given_up() -> Result<()> {
    let (scratch, _, _) = image_to_mount("sound")?;
    let cut = with_an_i_transaction(&scratch)?;
    let copy = scratch.join("copy");
    fs::copy(&cut, &copy)?;
    let kept = fjord().args(["recover", "--drop-fsyncs"]).arg(&cut).output()?;
    expect(&kept, 0, &[])?;
    let said = String::from_utf8_lossy(&kept.stdout);
    let wanted = "1 i-transaction applied; clean; nothing had to be discarded";
    ensure!(said.contains(wanted), "{said}");
    let kept = fjord().args(["recover", "--drop-fsyncs", "--json"]).arg(&copy).output()?;
    let said: serde_json::Value = serde_json::from_slice(&kept.stdout)?;
    ensure!(said["dropped_fsyncs"] == false && said["i_transactions"] == 1, "{said}");
    ensure!(said["was_dirty"] == true, "{said}");
    for img in [&cut, &copy] {
        let read = fjord().arg("cat").arg(img).arg("/synced").output()?;
        ensure!(read.stdout == b"what was synced", "{read:?}");
        image::e2fsck_clean(img)?;
    }
    Ok(())
}

#[test]
fn a_policy_that_the_image_is_not_made_for_is_refused() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("policy")?;
    for (policy, tune) in [("ijournal", "tune --ijournal"), ("fast-commit", "tune --fast-commit")] {
        let out = mount(&img, &dir).args(["--fsync", policy]).output()?;
        expect(&out, FAILURE, &[tune, "compound"])?;
    }
    Ok(())
}

#[test]
fn already_mounted_by_fjord() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("byfjord")?;
    let mounted = FjordMount::with_program(&program(), &img, &[])?;
    let at = mounted.path().display().to_string();
    expect(&mount(&img, &dir).output()?, IN_USE, &["mounted by fjord", &at, "fjord umount"])?;
    expect(&fjord().arg("ls").arg(&img).output()?, IN_USE, &["mounted by fjord", &at])?;
    expect(&fjord().arg("recover").arg(&img).output()?, IN_USE, &["mounted by fjord"])?;
    expect(&fjord().args(["mkfs", "--force"]).arg(&img).output()?, IN_USE, &["mounted by fjord"])?;
    let info = fjord().arg("info").arg(&img).output()?;
    ensure!(info.status.success(), "info works on images in use");
    let link = scratch.join("link");
    std::os::unix::fs::symlink(&img, &link)?;
    expect(&mount(&link, &dir).output()?, IN_USE, &["mounted by fjord"])?;
    mounted.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn already_mounted_by_linux() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("bylinux")?;
    let kernel = KernelMount::new(&img, "")?;
    let at = kernel.path().display().to_string();
    expect(&mount(&img, &dir).output()?, IN_USE, &["mounted by Linux", &at, "umount"])?;
    expect(&fjord().arg("cat").arg(&img).arg("/x").output()?, IN_USE, &["mounted by Linux"])?;
    kernel.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn held_by_another_node() -> Result<()> {
    let scratch = Scratch::new("mmp")?;
    let img = scratch.join("image");
    let dir = scratch.join("mnt");
    fs::create_dir(&dir)?;
    let mut mke2fs = tools::command("mke2fs")?;
    let made =
        mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "mmp"]).arg(&img).arg("16M").status()?;
    ensure!(made.success());
    // What e2fsck leaves in the block while it runs.
    let mut bytes = fs::read(&img)?;
    let sb = RawSuperblock::decode(&bytes[1024..2048])?;
    let geometry = Geometry::from_superblock(&sb)?;
    let at = usize::try_from(sb.s_mmp_block.get() * u64::from(geometry.block_size))?;
    let block = &mut bytes[at..at + geometry.block_size as usize];
    let mmp = MmpBlock { seq: SEQ_FSCK, ..MmpBlock::decode(block, &geometry)? };
    mmp.encode(block, &geometry)?;
    fs::write(&img, &bytes)?;
    let out = mount(&img, &dir).output()?;
    ensure!(!out.status.success() && !is_mounted(&dir)?, "mounted although it is held");
    expect(&out, FAILURE, &["e2fsck"])
}

#[test]
fn mountpoint_missing_or_not_a_directory_or_busy() -> Result<()> {
    let (scratch, img, _) = image_to_mount("mountpoint")?;
    let before = fs::read(&img)?;
    expect(&mount(&img, &scratch.join("no")).output()?, FAILURE, &["does not exist", "mkdir"])?;
    expect(&mount(&img, &img).output()?, FAILURE, &["not a directory"])?;
    ensure!(fs::read(&img)? == before, "a mount that cannot be must not touch the image");
    let (_other_scratch, other, _) = image_to_mount("other")?;
    let mounted = FjordMount::with_program(&program(), &other, &[])?;
    expect(&mount(&img, mounted.path()).output()?, IN_USE, &["busy", "unmount it first"])?;
    mounted.unmount()
}

#[test]
fn umount_of_what_is_busy_or_no_mount() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("umount")?;
    expect(&fjord().arg("umount").arg(&dir).output()?, FAILURE, &["nothing is mounted"])?;
    expect(&fjord().arg("umount").arg("/proc").output()?, FAILURE, &["not of fjord"])?;
    let mounted = FjordMount::with_program(&program(), &img, &[])?;
    let file = File::create(mounted.path().join("open"))?;
    let out = fjord().arg("umount").arg(mounted.path()).output()?;
    expect(&out, IN_USE, &["in use", "fuser"])?;
    drop(file);
    mounted.unmount()?;
    drop(scratch);
    Ok(())
}

#[test]
fn a_dead_mount_is_told_and_taken_down() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("dead")?;
    let mut mounted = FjordMount::with_program(&program(), &img, &[])?;
    let file = File::create(mounted.path().join("kept"))?;
    file.sync_all()?;
    drop(file);
    // From then on the kernel opens directories without asking fjord.
    ensure!(std::fs::read_dir(mounted.path())?.count() > 0);
    mounted.kill()?;
    expect(&mount(&img, mounted.path()).output()?, IN_USE, &["has died", "fjord umount"])?;
    expect(&mount(&img, &dir).output()?, IN_USE, &["has died", "fjord umount"])?;
    let out = fjord().arg("umount").arg(mounted.path()).output()?;
    expect(&out, FAILURE, &["had died", "fjord recover"])?;
    ensure!(fjord().arg("recover").arg(&img).status()?.success());
    image::e2fsck_clean(&img)?;
    let ls = fjord().arg("ls").arg(&img).output()?;
    ensure!(String::from_utf8_lossy(&ls.stdout).contains("kept"), "an fsynced file is gone");
    Ok(())
}

#[test]
fn no_dev_fuse() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("nodev")?;
    // In a mount namespace of its own, where an empty directory covers /dev.
    let script = "mount -t tmpfs none /dev && exec \"$0\" mount \"$1\" \"$2\"";
    let out = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .arg(program())
        .arg(&img)
        .arg(&dir)
        .output()?;
    expect(&out, FAILURE, &["/dev/fuse is missing", "modprobe fuse"])?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn no_permission() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    let (scratch, img, dir) = image_to_mount("noperm")?;
    let mut everybody = fs::metadata(scratch.join("."))?.permissions();
    everybody.set_mode(0o755);
    fs::set_permissions(scratch.join("."), everybody)?;
    // The target directory may be closed to others.
    let copy = scratch.join("fjord");
    fs::copy(program(), &copy)?;
    fs::set_permissions(&img, fs::Permissions::from_mode(0o600))?;
    let out =
        Command::new(&copy).arg("mount").arg(&img).arg(&dir).uid(NOBODY).gid(NOBODY).output()?;
    expect(&out, FAILURE, &["no permission"])?;
    fs::set_permissions(&img, fs::Permissions::from_mode(0o444))?;
    let mut put = Command::new(&copy);
    put.arg("put").arg(&copy).arg(&img).arg("/x").uid(NOBODY).gid(NOBODY);
    expect(&put.output()?, FAILURE, &["cannot be written", "chmod", "read-only"])
}

#[test]
fn wrong_arguments() -> Result<()> {
    let (_scratch, img, dir) = image_to_mount("usage")?;
    for (list, word) in [("rw,frobnicate", "frobnicate"), ("blksize=3", "blksize=3")] {
        expect(&mount(&img, &dir).args(["-o", list]).output()?, USAGE, &[word])?;
    }
    expect(&fjord().args(["mount"]).output()?, USAGE, &["IMAGE"])?;
    expect(&fjord().args(["frobnicate"]).output()?, USAGE, &["frobnicate"])?;
    expect(&mount(&img, &dir).args(["--cache-size", "many"]).output()?, USAGE, &["64M"])?;
    let least = ["cache", "at least 8M"];
    expect(&mount(&img, &dir).args(["--cache-size", "1"]).output()?, USAGE, &least)?;
    expect(&mount(&img, &dir).args(["-o", "cache_size=7M"]).output()?, USAGE, &least)?;
    expect(&mount(&img, &dir).args(["--new", "1G"]).output()?, FAILURE, &["already exists"])?;
    expect(&fjord().args(["mkfs"]).arg(&img).output()?, FAILURE, &["--force"])?;
    expect(&fjord().args(["mkfs"]).arg(dir.join("new")).output()?, USAGE, &["--size"])?;
    ensure!(!is_mounted(&dir)?);
    Ok(())
}

#[test]
fn the_daemon_tells_its_failure() -> Result<()> {
    let (scratch, img, dir) = image_to_mount("daemon")?;
    let out = mount(&scratch.join("absent"), &dir).arg("--daemon").output()?;
    expect(&out, FAILURE, &["does not exist"])?;
    let out = mount(&img, &scratch.join("absent")).arg("--daemon").output()?;
    expect(&out, FAILURE, &["does not exist", "mkdir"])
}

#[test]
fn disk_below_full() -> Result<()> {
    let scratch = Scratch::new("below")?;
    let below = scratch.join("below");
    fs::create_dir(&below)?;
    let mut tmpfs = tools::command("mount")?;
    ensure!(tmpfs.args(["-t", "tmpfs", "-o", "size=12M", "none"]).arg(&below).status()?.success());
    let outcome = write_until_the_disk_is_full(&scratch, &below);
    let mut unmount = tools::command("umount")?;
    ensure!(unmount.arg("-l").arg(&below).status()?.success());
    outcome
}

/// The image is sparse and larger than the disk that holds it.
fn write_until_the_disk_is_full(scratch: &Scratch, below: &Path) -> Result<()> {
    use std::io::Write;
    let img = below.join("image");
    let made = fjord().args(["mkfs", "--size", "64M", "-J", "1M"]).arg(&img).output()?;
    expect(&made, 0, &[])?;
    let log = scratch.join("log");
    let dir = scratch.join("mnt");
    fs::create_dir(&dir)?;
    let mut daemon = mount(&img, &dir).stderr(File::create(&log)?).spawn()?;
    while !is_mounted(&dir)? {
        ensure!(daemon.try_wait()?.is_none(), "{}", fs::read_to_string(&log)?);
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut promised = File::create(dir.join("promised"))?;
    promised.write_all(b"kept")?;
    promised.sync_all()?;
    drop(promised);
    let mut big = File::create(dir.join("big"))?;
    let written =
        (0..64).try_for_each(|_| big.write_all(&vec![7; 1 << 20]).and_then(|()| big.sync_data()));
    ensure!(written.is_err(), "more fits than the disk has");
    drop(big);
    let mut umount = tools::command("umount")?;
    ensure!(umount.arg(&dir).status()?.success());
    let status = daemon.wait()?;
    ensure!(status.code() == Some(FAILURE), "the daemon hides that data found no room: {status}");
    let said = fs::read_to_string(&log)?;
    ensure!(said.contains("that no fsync had made durable are lost"), "{said}");
    // The image itself is clean, and what was promised is there.
    image::e2fsck_clean(&img)?;
    let rescued = scratch.join("rescued");
    fs::copy(&img, &rescued)?;
    ensure!(fjord().arg("recover").arg(&rescued).status()?.success());
    let cat = fjord().arg("cat").arg(&rescued).arg("/promised").output()?;
    ensure!(cat.stdout == b"kept");
    Ok(())
}
