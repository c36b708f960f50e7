//! The same steps on a fjord mount and on the kernel's ext4 must tell the same: access lists,
//! attributes, project IDs, holes, unnamed files, access times, statfs. Needs root.

use std::{
    fmt::Write as _,
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    side_by_side::{self, shell},
    tools,
};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, SeekFrom};

/// How long a state that must come is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `steps` on both; what they tell must be equal.
fn same(
    set: &str,
    fjord_args: &[&str],
    linux_options: &str,
    steps: impl Fn(&Path) -> Result<String>,
) -> Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    side_by_side::same(program, set, fjord_args, linux_options, steps)
}

/// An image of the set, mounted by fjord.
fn fjord(set: &str) -> Result<(Scratch, FjordMount)> {
    let scratch = Scratch::in_memory("like-linux")?;
    let img = scratch.join("image");
    features::by_name(set).context("a set of the table")?.make(&img)?;
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    Ok((scratch, FjordMount::with_program(program, &img, &[])?))
}

#[test]
fn access_lists() -> Result<()> {
    same("default", &[], "acl", |dir| {
        shell(
            dir,
            r#"
            show() { tell getfacl -n -c "$@"; tell stat -c '%n %a %u %g %F' "$@"; }
            umask 027
            mkdir d; tell setfacl -d -m u:1234:rwx,g:77:r-x,o::--- d; show d
            touch d/f; mkdir d/sub; mknod d/p p; ln -s f d/l; show d/f d/sub d/p
            tell stat -c '%n %a %F' d/l
            mkdir -m 700 d/narrow; install -m 604 /dev/null d/made; show d/narrow d/made
            chmod 640 d/f; show d/f; chmod 077 d/sub; show d/sub; mkdir d/sub/below; show d/sub/below
            tell setfacl -m m::r d/f; show d/f; tell setfacl -m u:5:x d/f; show d/f
            tell setfacl -b d/f; show d/f; tell setfacl -k d; touch d/g; show d d/g
            tell setfacl -d -m u:5:x d/g
            umask 0; touch plain; mkdir wide; show plain wide
            echo content > plain; chmod 600 plain; tell as 1234 1234 cat plain
            setfacl -m u:1234:r plain; tell as 1234 1234 cat plain; tell as 1235 1235 cat plain
            tell as 1234 1234 sh -c 'echo x >> plain'; setfacl -m g:99:rw plain
            tell as 1235 99 sh -c 'echo more >> plain'; tell cat plain; chmod 600 plain
            tell as 1234 1234 cat plain; tell as 1234 1234 setfacl -m o::rwx plain
            "#,
        )
    })
}

/// What setting lists and modes does to set-group-ID, by members and others, and root.
#[test]
fn set_group_id_goes_as_on_linux() -> Result<()> {
    same("default", &[], "acl", |dir| {
        shell(
            dir,
            r#"
            mkdir d; touch f; chown 1000:50 d f
            for mode in 2775 2755 6775; do for groups in 1000 50; do for file in d f; do
                chmod $mode $file
                tell as 1000 $groups setfacl -d -m u:5:rx $file; tell stat -c %a $file
                tell as 1000 $groups setfacl -m u:5:rx $file; tell stat -c %a $file
                chmod $mode $file
                tell as 1000 $groups setfacl -b $file; tell stat -c %a $file
                chmod $mode $file
                tell as 1000 $groups chmod $mode $file; tell stat -c %a $file
                tell as 1000 $groups chgrp 1000 $file; tell stat -c '%a %g' $file
                chown 1000:50 $file; chmod $mode $file; tell stat -c %a $file
                tell setfacl -m u:5:rwx $file; tell stat -c %a $file
            done; done; done
            chmod 2777 d; setfacl -b -k d; umask 0
            tell as 1001 1001 touch d/theirs; tell as 1001 1001 mkdir d/sub
            tell stat -c '%a %u %g' d/theirs d/sub
            tell as 1001 1001 sh -c 'umask 0; install -m 2775 /dev/null d/exec'; tell stat -c '%a %g' d/exec
            tell as 1001 50 sh -c 'umask 0; install -m 2775 /dev/null d/member'; tell stat -c '%a %g' d/member
            "#,
        )
    })
}

#[test]
fn trusted_attributes_are_for_administrators() -> Result<()> {
    same("default", &[], "acl", |dir| {
        shell(
            dir,
            r#"
            touch f; chmod 666 f; ln -s f l
            tell setfattr -n trusted.a -v 1 f; tell setfattr -n user.b -v 2 f
            tell setfattr -h -n trusted.l -v 3 l; tell setfattr -n security.x -v 4 f
            list() { tell "$@" getfattr -d -m - f; tell "$@" getfattr -h -d -m - l; }
            list; list as 1000 1000
            list setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin
            tell as 1000 1000 getfattr -n trusted.a f; tell as 1000 1000 setfattr -n trusted.c -v 1 f
            tell as 1000 1000 setfattr -x trusted.a f; tell as 1000 1000 setfattr -n user.c -v 1 f
            tell as 1000 1000 setfattr -n security.y -v 1 f; tell setfattr -h -n user.l -v 1 l
            tell setfattr -x user.none f; tell setfattr -n bad.name -v 1 f; tell setfattr -n user. -v 1 f
            "#,
        )
    })
}

/// What Linux tells of the steps of [`project_ids`] where it knows project IDs.
const TOLD: &str = r"
$ chattr -p 42 a
= 0
$ chattr +P a
= 0
$ lsattr -pd a
   42 --------------e----P-- a
= 0
$ lsattr -pd a/before a/f a/sub
    0 --------------e------- a/before
   42 --------------e------- a/f
   42 --------------e----P-- a/sub
= 0
$ chattr -p 7 b
= 0
$ chattr +P b
= 0
$ ln f a/link
ln: failed to create hard link 'a/link' => 'f': Invalid cross-device link
= 1
$ mv f a/moved
= 0
$ ln a/f b/link
ln: failed to create hard link 'b/link' => 'a/f': Invalid cross-device link
= 1
$ ln a/before link
= 0
$ lsattr -pd a/moved
   42 --------------e------- a/moved
= 0
$ chattr -P a
= 0
$ chattr -p 43 a
= 0
$ lsattr -pd a a/after
   43 --------------e------- a
    0 --------------e------- a/after
= 0
$ chattr +P a/f
chattr: Operation not supported while setting flags on a/f
= 1
$ chattr +i a/f
= 0
$ chattr -p 5 a/f
chattr: Operation not permitted while setting project on a/f
= 1
$ chattr -i a/f
= 0
$ as 1000 1000 chattr -p 9 a/f
= 0
$ as 1000 1000 chattr +A a/f
= 0
$ as 1001 1001 chattr +A a/f
chattr: Operation not permitted while setting flags on a/f
= 1
$ as 1000 1000 chattr +i a/f
chattr: Operation not permitted while setting flags on a/f
= 1
$ lsattr -pd a/f
    9 -------A------e------- a/f
= 0
";

#[test]
fn project_ids() -> Result<()> {
    const STEPS: &str = r#"
        mkdir a b; touch f a/before
        tell chattr -p 42 a; tell chattr +P a; tell lsattr -pd a
        touch a/f; mkdir a/sub; tell lsattr -pd a/before a/f a/sub
        tell chattr -p 7 b; tell chattr +P b; tell ln f a/link; tell mv f a/moved
        tell ln a/f b/link; tell ln a/before link; tell lsattr -pd a/moved
        tell chattr -P a; tell chattr -p 43 a; touch a/after; tell lsattr -pd a a/after
        tell chattr +P a/f; tell chattr +i a/f; tell chattr -p 5 a/f; tell chattr -i a/f
        chown 1000 a/f; tell as 1000 1000 chattr -p 9 a/f; tell as 1000 1000 chattr +A a/f
        tell as 1001 1001 chattr +A a/f; tell as 1000 1000 chattr +i a/f; tell lsattr -pd a/f
    "#;
    same("default", &[], "acl", |dir| shell(dir, STEPS))?;
    if features::by_name("project").context("a set of the table")?.kernel_mounts()? {
        return same("project", &[], "acl", |dir| shell(dir, STEPS));
    }
    // Linux without quota does not mount such an image for writing; what it would tell is known.
    let (scratch, mount) = fjord("project")?;
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o755))?;
    let told = shell(mount.path(), STEPS)?;
    mount.unmount()?;
    image::e2fsck_clean(&scratch.join("image"))?;
    ensure!(told.trim() == TOLD.trim(), "{told}");
    Ok(())
}

/// Where data and holes are said to be, from every 512th byte on.
fn map_of(file: &File) -> Result<String> {
    let size = file.metadata()?.len();
    let mut told = format!("size {size}\n");
    for at in (0..=size + 1024).step_by(512) {
        let data = rustix::fs::seek(file, SeekFrom::Data(at));
        let hole = rustix::fs::seek(file, SeekFrom::Hole(at));
        writeln!(told, "{at} {data:?} {hole:?}")?;
    }
    Ok(told)
}

#[test]
fn data_and_holes() -> Result<()> {
    for set in ["default", "no-extents"] {
        same(set, &[], "acl", |dir| {
            let mut told = String::new();
            let file =
                File::options().read(true).write(true).create_new(true).open(dir.join("f"))?;
            told += &map_of(&file)?;
            file.write_all_at(&[1; 5000], 20_000)?;
            file.sync_all()?;
            told += &map_of(&file)?;
            file.write_all_at(b"x", 100_000)?;
            file.set_len(200_001)?;
            file.sync_all()?;
            told += &map_of(&file)?;
            let keep = FallocateFlags::KEEP_SIZE;
            let reserve = rustix::fs::fallocate(&file, FallocateFlags::empty(), 60_000, 9000);
            let punch = keep | FallocateFlags::PUNCH_HOLE;
            let punched = rustix::fs::fallocate(&file, punch, 20_480, 4096);
            file.sync_all()?;
            writeln!(told, "{reserve:?} {punched:?}\n{}", map_of(&file)?)?;
            let end = rustix::fs::seek(&file, SeekFrom::Data(u64::from(u32::MAX)));
            writeln!(told, "{end:?}")?;
            Ok(told)
        })?;
    }
    Ok(())
}

#[test]
fn unnamed_files() -> Result<()> {
    same("default", &[], "acl", |dir| {
        let mut told = String::new();
        let open = |flags| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
            rustix::fs::open(dir, flags, Mode::from_raw_mode(0o666)).map(File::from)
        };
        let link = |file: &File, name: &str| {
            use std::os::fd::AsRawFd;
            let from = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::linkat(
                rustix::fs::CWD,
                from,
                rustix::fs::CWD,
                dir.join(name),
                AtFlags::SYMLINK_FOLLOW,
            )
        };
        let file = open(OFlags::empty())?;
        file.write_all_at(b"content", 0)?;
        let tell = |file: &File, told: &mut String| -> Result<()> {
            let meta = file.metadata()?;
            writeln!(told, "links {} size {} mode {:o}", meta.nlink(), meta.len(), meta.mode())?;
            Ok(())
        };
        tell(&file, &mut told)?;
        writeln!(told, "{:?} {:?}", link(&file, "first"), link(&file, "second"))?;
        writeln!(told, "{:?}", link(&file, "second"))?;
        tell(&file, &mut told)?;
        fs::remove_file(dir.join("first"))?;
        tell(&file, &mut told)?;
        writeln!(told, "{:?}", fs::read_to_string(dir.join("second"))?)?;
        let closed = open(OFlags::EXCL)?;
        writeln!(told, "{:?}", link(&closed, "third"))?;
        let unlinked = File::create(dir.join("gone"))?;
        fs::remove_file(dir.join("gone"))?;
        writeln!(told, "{:?}", link(&unlinked, "back"))?;
        tell(&unlinked, &mut told)?;
        Ok(told)
    })
}

/// Which reads move the access time.
fn access_times(dir: &Path) -> Result<String> {
    let mut told = String::new();
    let path = dir.join("f");
    let atime = |path: &Path| -> Result<(i64, i64)> {
        let meta = fs::symlink_metadata(path)?;
        Ok((meta.atime(), meta.atime_nsec()))
    };
    let pause = || std::thread::sleep(Duration::from_millis(20));
    let mut read = |what: &str, path: &Path| -> Result<()> {
        pause();
        let before = atime(path)?;
        if path.is_symlink() {
            fs::read_link(path)?;
        } else if path.is_dir() {
            fs::read_dir(path)?.for_each(drop);
        } else {
            fs::read(path)?;
        }
        writeln!(told, "{what}: {}", if atime(path)? == before { "same" } else { "moved" })?;
        Ok(())
    };
    let old = |path: &Path, flag: &str, date: &str| -> Result<()> {
        tools::run(Command::new("touch").args(["-h", flag, "-d", date]).arg(path))?.ok().map(drop)
    };
    fs::write(&path, b"abc")?;
    read("after a write", &path)?;
    read("again", &path)?;
    fs::write(&path, b"abcd")?;
    read("after another write", &path)?;
    old(&path, "-a", "3 days ago")?;
    old(&path, "-m", "4 days ago")?;
    read("after touch", &path)?;
    read("once more", &path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    read("after chmod", &path)?;
    read("after that", &path)?;
    let sub = dir.join("sub");
    fs::create_dir(&sub)?;
    read("a new directory", &sub)?;
    read("the directory again", &sub)?;
    File::create(sub.join("entry"))?;
    read("a changed directory", &sub)?;
    read("it again", &sub)?;
    let link = dir.join("link");
    std::os::unix::fs::symlink("f", &link)?;
    read("a new link", &link)?;
    read("the link again", &link)?;
    let mut chattr = tools::command("chattr")?;
    tools::run(chattr.arg("+A").arg(&path))?.ok()?;
    read("with the flag", &path)?;
    Ok(told)
}

#[test]
fn relatime() -> Result<()> {
    same("default", &[], "relatime", access_times)
}

#[test]
fn strictatime_and_noatime() -> Result<()> {
    same("default", &["-o", "strictatime"], "strictatime", access_times)?;
    same("default", &["-o", "noatime"], "noatime", access_times)
}

/// The blocks that users may have, of the first line.
fn available(numbers: &str) -> Result<u64> {
    let mut words = numbers.split(' ').skip_while(|word| *word != "avail");
    Ok(words.nth(1).context("a number")?.parse()?)
}

/// The numbers of one and the same image.
#[test]
fn free_space() -> Result<()> {
    let names = ["default", "block-1k", "block-4k", "ext3", "ext2", "meta_bg", "no-flex_bg"];
    for name in names.into_iter().chain(["uninit_bg", "no-journal", "orphan_file", "large_dir"]) {
        let scratch = Scratch::in_memory("like-linux")?;
        let img = scratch.join("image");
        features::by_name(name).context("a set of the table")?.make(&img)?;
        let numbers = |dir: &Path| -> Result<String> {
            let mut stat = Command::new("stat");
            stat.args(["-f", "-c", "bs %s %S blocks %b free %f avail %a files %c %d name %l"]);
            Ok(tools::run(stat.arg(dir))?.ok()?.stdout)
        };
        let linux = KernelMount::new(&img, "noinit_itable")?;
        let mut expected = numbers(linux.path())?;
        fs::create_dir(linux.path().join("d"))?;
        fs::write(linux.path().join("d/f"), vec![1; 3_000_000])?;
        rustix::fs::syncfs(File::open(linux.path())?)?;
        expected += &numbers(linux.path())?;
        linux.unmount()?;
        // The same again, by fjord, on what Linux made; then as Linux left it.
        let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
        let fjord = FjordMount::with_program(program, &img, &[])?;
        let full = numbers(fjord.path())?;
        fs::remove_file(fjord.path().join("d/f"))?;
        fs::remove_dir(fjord.path().join("d"))?;
        rustix::fs::syncfs(File::open(fjord.path())?)?;
        // The kernel lets go of a removed file a moment after the call.
        let mut empty = numbers(fjord.path())?;
        let deadline = Instant::now() + PATIENCE;
        while empty == full && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
            empty = numbers(fjord.path())?;
        }
        let found = empty + &full;
        fjord.unmount()?;
        if matches!(name, "ext3" | "ext2") {
            // fjord keeps room for the metadata of delayed data there too, and says so.
            let (expected, found) = (available(&expected)?, available(&found)?);
            let kept = expected.saturating_sub(found);
            ensure!(kept > 0 && kept <= 4096, "{name}: Linux {expected}, fjord {found}");
        } else {
            ensure!(expected == found, "{name}:\nLinux {expected}fjord {found}");
        }
        image::e2fsck_clean(&img)?;
    }
    Ok(())
}

/// FITRIM gives what was freed back to the file system below, to root only.
#[test]
fn trimming() -> Result<()> {
    let (scratch, fjord) = fjord("default")?;
    let img = scratch.join("image");
    let bytes_below = || -> Result<u64> { Ok(fs::metadata(&img)?.blocks() * 512) };
    fs::write(fjord.path().join("big"), vec![1; 40 << 20])?;
    fs::write(fjord.path().join("kept"), vec![2; 5 << 20])?;
    rustix::fs::syncfs(File::open(fjord.path())?)?;
    let full = bytes_below()?;
    fs::remove_file(fjord.path().join("big"))?;
    rustix::fs::syncfs(File::open(fjord.path())?)?;
    ensure!(bytes_below()? >= full, "nothing was to be given back yet");
    fs::set_permissions(fjord.path(), fs::Permissions::from_mode(0o755))?;
    let trim = |before: &[&str]| -> Result<tools::Output> {
        let mut command = Command::new("env");
        tools::run(command.args(before).args(["fstrim", "-v"]).arg(fjord.path()))
    };
    let refused = trim(&["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"])?;
    ensure!(refused.code != Some(0), "fstrim by a user: {refused:?}");
    let done = trim(&[])?.ok()?;
    ensure!(bytes_below()? + (39 << 20) <= full, "{} of {full}: {done:?}", bytes_below()?);
    ensure!(fs::read(fjord.path().join("kept"))? == vec![2; 5 << 20]);
    fjord.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// After filling the image, removing the file and sync, df shows what it showed before, at once.
#[test]
fn what_was_removed_is_free_after_sync() -> Result<()> {
    let rounds = |dir: &Path, count: u8| -> Result<String> {
        let mut told = String::new();
        let free = || rustix::fs::statvfs(dir).map(|found| found.f_bfree);
        File::create(dir.join("first"))?.sync_all()?;
        let before = free()?;
        for round in 0..count {
            let mut file = File::create(dir.join("fill"))?;
            let piece = vec![round; 1 << 20];
            while std::io::Write::write_all(&mut file, &piece).is_ok() {}
            drop(file);
            fs::remove_file(dir.join("fill"))?;
            if round % 2 == 0 {
                rustix::fs::syncfs(File::open(dir)?)?;
            }
            // Without a sync, the kernel may tell a busy server a little later.
            let deadline = Instant::now() + PATIENCE;
            while round % 2 == 1 && free()? != before && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            writeln!(told, "round {round}: {} blocks less", before - free()?)?;
        }
        Ok(told)
    };
    same("default", &[], "", |dir| rounds(dir, 10))?;
    same("default", &["-o", "nofuseblk"], "", |dir| rounds(dir, 4))
}
