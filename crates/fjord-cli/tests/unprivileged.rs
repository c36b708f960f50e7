//! A mount by somebody who is not root, through fusermount3.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, chown},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    image::{self, Scratch},
    tools::{self, Output},
};

const NOBODY: u32 = 65534;

/// In a mount namespace of its own, where everybody may open /dev/fuse, as distributions have it:
/// `fjord` runs the program as nobody, `nobody` any other. $1 is the image, $2 the mount point.
const PRELUDE: &str = r#"
set -e
nobody() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
fjord() { nobody "$0.d/fjord" "$@"; }
fails() { if "$@"; then echo "$* should fail"; exit 1; fi; }
# A place that everybody reaches, wherever the scratch directory is.
mount --bind "$PLACE" /srv
mount -t tmpfs -o mode=755 none "$0.d/dev"
mknod -m 666 "$0.d/dev/fuse" c 10 229
mount --bind "$0.d/dev/fuse" /dev/fuse
"#;

/// Everybody may write to the directory of the image in a test of new images: `$3`.
fn as_nobody_making_images(script: &str) -> Result<Option<Output>> {
    as_nobody(&format!(
        "install -d -o 65534 -g 65534 \"$0.d/own\"; set -- \"$1\" \"$2\" \"$0.d/own\"\n{script}"
    ))
}

/// Runs the script on a new image that is nobody's; the image must be clean after it. `None` where
/// the machine cannot do such mounts.
fn as_nobody(script: &str) -> Result<Option<Output>> {
    tools::require_root()?;
    tools::require(&["fusermount3"])?;
    let helper = tools::find("fusermount3").context("looked up just now")?;
    if fs::metadata(&helper)?.permissions().mode() & 0o4000 == 0 {
        tools::skipped("mounts without privilege", "fusermount3 is not set-user-ID root");
        return Ok(None);
    }
    let scratch = Scratch::new("nobody")?;
    let (img, dir) = (scratch.join("image"), scratch.join("mnt"));
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let owner = ["uid", "gid"].map(|field| format!("sif / {field} {NOBODY}"));
    image::debugfs_write(&img, &owner)?;
    fs::create_dir(&dir)?;
    fs::create_dir_all(scratch.join("x.d/dev"))?;
    // Where the tests are built others may not be let in.
    fs::copy(env!("CARGO_BIN_EXE_fjord"), scratch.join("x.d/fjord"))?;
    for path in [scratch.path(), &scratch.join("x.d"), &scratch.join("x.d/fjord")] {
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
    }
    for path in [&img, &dir] {
        chown(path, Some(NOBODY), Some(NOBODY))?;
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c"]);
    command.arg(format!("{PRELUDE}{script}")).args(["/srv/x", "/srv/image", "/srv/mnt"]);
    command.env("PLACE", scratch.path());
    let done = tools::run(command.current_dir("/"))?.ok()?;
    image::e2fsck_clean(&img)?;
    Ok(Some(done))
}

#[test]
fn nobody_mounts_works_and_unmounts() -> Result<()> {
    let script = r#"
        fjord mount --daemon "$1" "$2"
        grep " $2 " /proc/self/mounts
        nobody sh -e -c 'cd "$1"; mkdir d; for i in $(seq 200); do echo $i > d/$i; done
            dd if=/dev/zero of=big bs=1M count=20 conv=fsync 2>/dev/null; ln big same
            ln -s d/7 link; cat link; stat -c "%u %h" same; sync -f .; rm big' sh "$2"
        # The mount is its owner's alone: not even root looks in.
        fails ls "$2" 2>/dev/null
        mkfifo -m 666 "$0.d/there" "$0.d/go"
        nobody sh -c 'cd "$1"; echo >"$2"; read line <"$3"' sh "$2" "$0.d/there" "$0.d/go" &
        read line <"$0.d/there"
        fails fjord umount "$2" 2>/dev/null
        echo >"$0.d/go"
        wait
        fjord umount "$2"
        fails grep " $2 " /proc/self/mounts
        # The lock is free at once, and everything is there.
        fjord cat "$1" /d/200
    "#;
    let Some(done) = as_nobody(script)? else { return Ok(()) };
    let lines: Vec<&str> = done.stdout.lines().collect();
    let [mount, link, stat, last] = lines[..] else { anyhow::bail!("{done:?}") };
    for word in ["fuse.fjord", "nosuid", "nodev", "user_id=65534"] {
        ensure!(mount.contains(word), "{word} is not in {mount}");
    }
    ensure!((link, stat, last) == ("7", "65534 2", "200"), "{done:?}");
    Ok(())
}

#[test]
fn nobody_takes_a_snapshot_of_their_own_mount() -> Result<()> {
    let script = r#"
        mkdir -m 777 "$0.d/open"
        fjord mount --daemon "$1" "$2"
        nobody sh -c 'echo kept > "$1/f"; sync "$1/f"' sh "$2"
        fjord snapshot "$2" "$0.d/open/copy"
        fails fjord snapshot "$2" "$0.d/copy"
        # Not even root looks in; the image is as good a name, for them.
        fails "$0.d/fjord" snapshot "$2" "$0.d/open/roots"
        fjord snapshot --force "$1" "$0.d/open/copy" > /dev/null
        fjord umount "$2"
        e2fsck -fn "$0.d/open/copy" > /dev/null
        fjord cat "$0.d/open/copy" /f
        stat -c "%u %h" "$0.d/open/copy"
        ls -A "$0.d/open"
    "#;
    let Some(done) = as_nobody(script)? else { return Ok(()) };
    let lines: Vec<&str> = done.stdout.lines().collect();
    let [told, kept, stat, listed] = lines[..] else { anyhow::bail!("{done:?}") };
    ensure!(told.contains("snapshot of") && told.contains("writes paused for"), "{done:?}");
    ensure!((kept, stat, listed) == ("kept", "65534 1", "copy"), "{done:?}");
    Ok(())
}

#[test]
fn signals_and_options_work_for_nobody_too() -> Result<()> {
    let script = r#"
        fjord mount --daemon -o ro,noexec "$1" "$2"
        fails nobody touch "$2/x"
        fjord umount "$2"
        # Not theirs to have.
        fails fjord mount -o fuseblk "$1" "$2"
        fails fjord mount -o allow_other "$1" "$2"
        fails grep " $2 " /proc/self/mounts
        fjord mount "$1" "$2" & daemon=$!
        until grep -q " $2 " /proc/self/mounts; do sleep 0.05; done
        nobody sh -c 'echo kept > "$1/f"' sh "$2"
        # The shell's child runs setpriv, which becomes the daemon.
        pkill -TERM -P $daemon || kill -TERM $daemon
        wait $daemon
        fails grep " $2 " /proc/self/mounts
        fjord cat "$1" /f
    "#;
    let Some(done) = as_nobody(script)? else { return Ok(()) };
    ensure!(done.stdout == "kept\n", "{done:?}");
    for words in ["Read-only file system", "fuseblk mount needs root", "allow_other"] {
        ensure!(done.stderr.contains(words), "{words}: {done:?}");
    }
    Ok(())
}

#[test]
fn a_new_image_belongs_to_who_mounts_it() -> Result<()> {
    let script = r#"
        fjord mount --daemon --new 32M "$3/new.img" "$2"
        nobody sh -e -c 'stat -c "%u:%g" "$1"; mkdir "$1/d"; echo made >"$1/d/f"' sh "$2"
        fjord umount "$2"
        e2fsck -fn "$3/new.img" >/dev/null
        fjord cat "$3/new.img" /d/f
        # One that cannot be mounted is not left behind.
        fails fjord mount --new 32M -o fuseblk "$3/failed.img" "$2"
        fails fjord mount --daemon --new 32M -o fuseblk "$3/failed.img" "$2"
        fails fjord mount --new 32M -o allow_other "$3/failed.img" "$2"
        ls "$3"
    "#;
    let Some(done) = as_nobody_making_images(script)? else { return Ok(()) };
    ensure!(done.stdout == "65534:65534\nmade\nnew.img\n", "{done:?}");
    Ok(())
}

/// fusermount3 sets the flags; what it does not know is told, and the mount stands.
#[test]
fn nobody_mounts_with_the_access_times_of_fstab() -> Result<()> {
    let script = r#"
        for options in noatime relatime noatime,nodiratime nodiratime; do
            fjord mount --daemon -o "$options,nofail,x-test" "$1" "$2"
            grep " $2 " /proc/self/mounts | cut -d" " -f4
            fjord umount "$2"
        done
        # In effect, whatever the table shows.
        fjord mount --daemon -o strictatime,nodiratime "$1" "$2"
        nobody sh -e -c 'mkdir -p "$1/d"; echo >"$1/f"; before=$(stat -c %x "$1/d" "$1/f")
            sleep 0.1; ls "$1/d"; cat "$1/f" >/dev/null
            [ "$(stat -c %x "$1/d")" = "$(echo "$before" | head -1)" ]
            [ "$(stat -c %x "$1/f")" != "$(echo "$before" | tail -1)" ]' sh "$2"
        fjord umount "$2"
    "#;
    let Some(done) = as_nobody(script)? else { return Ok(()) };
    let lines: Vec<&str> = done.stdout.lines().collect();
    let [noatime, relatime, both, nodiratime] = lines[..] else { anyhow::bail!("{done:?}") };
    let has = |line: &str, option: &str| line.split(',').any(|shown| shown == option);
    ensure!(has(noatime, "noatime") && !has(noatime, "relatime"), "{noatime}");
    ensure!(has(relatime, "relatime") && !has(relatime, "noatime"), "{relatime}");
    ensure!(has(both, "noatime"), "{both}");
    let told = done.stderr.contains("nodiratime, which this fusermount3 does not support");
    ensure!(has(nodiratime, "nodiratime") != told, "{nodiratime} {}", done.stderr);
    Ok(())
}
