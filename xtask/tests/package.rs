//! The Debian package: what is in it, and that an installed one serves an fstab. It has the debug
//! program that the tests use. Needs root.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    fjord_mount::fjord_program,
    image::Scratch,
    tools::{self, Output},
};

fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

/// Builds the package in a directory; its path.
fn build(out: &Path) -> Result<PathBuf> {
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
    // Little is to be gained by a small package that is thrown away.
    xtask.env("DPKG_DEB_COMPRESSOR_LEVEL", "0");
    xtask.args(["deb", "--program"]).arg(fjord_program()?).arg("--out").arg(out);
    let said = run(&mut xtask)?.stdout;
    Ok(PathBuf::from(said.lines().last().context("a path")?))
}

/// A field of the package.
fn field(deb: &Path, name: &str) -> Result<String> {
    let mut dpkg = tools::command("dpkg-deb")?;
    Ok(run(dpkg.arg("--field").arg(deb).arg(name))?.stdout.trim_end().to_owned())
}

const FILES: [&str; 17] = [
    "usr/bin/fjord",
    "usr/include/fjord.h",
    "usr/lib/systemd/system/fjord-fsck@.service",
    "usr/share/bash-completion/completions/fjord",
    "usr/share/doc/fjord/changelog.gz",
    "usr/share/doc/fjord/copyright",
    "usr/share/doc/fjord/examples/barrier.c",
    "usr/share/doc/fjord/examples/barrier.py",
    "usr/share/doc/fjord/examples/srv-data.mount",
    "usr/share/fish/vendor_completions.d/fjord.fish",
    "usr/share/man/man1/fjord-fsck.1.gz",
    "usr/share/man/man1/fjord-mount.1.gz",
    "usr/share/man/man1/fjord.1.gz",
    "usr/share/man/man8/fsck.fjord.8.gz",
    "usr/share/man/man8/mkfs.fjord.8.gz",
    "usr/share/man/man8/mount.fuse.fjord.8.gz",
    "usr/share/zsh/vendor-completions/_fjord",
];
const LINKS: [&str; 4] = ["mount.fuse.fjord", "fsck.fuse.fjord", "fsck.fjord", "mkfs.fjord"];

#[test]
fn it_holds_what_it_should_and_is_reproducible() -> Result<()> {
    let scratch = Scratch::new("deb")?;
    let deb = build(&scratch.join("out"))?;
    for (name, wanted) in [
        ("Package", "fjord"),
        ("Version", env!("CARGO_PKG_VERSION")),
        ("Section", "admin"),
        ("Recommends", "e2fsprogs, fuse3"),
    ] {
        ensure!(field(&deb, name)? == wanted, "{name}: {}", field(&deb, name)?);
    }
    let arch = run(tools::command("dpkg")?.arg("--print-architecture"))?.stdout;
    ensure!(field(&deb, "Architecture")? == arch.trim());
    ensure!(field(&deb, "Depends")?.contains("libc6 (>= "), "{}", field(&deb, "Depends")?);
    let description = field(&deb, "Description")?;
    ensure!(description.lines().count() > 5 && description.contains("\n .\n"), "{description}");

    // Into a root that has nothing else, with the owners of the archive.
    let root = scratch.join("root");
    run(tools::command("dpkg-deb")?.arg("--extract").args([&deb, &root]))?;
    for file in FILES {
        let meta = fs::symlink_metadata(root.join(file)).with_context(|| file.to_owned())?;
        let mode = if file == "usr/bin/fjord" { 0o755 } else { 0o644 };
        ensure!(meta.is_file() && meta.permissions().mode() & 0o7777 == mode, "{file}: {meta:?}");
        ensure!((meta.uid(), meta.gid()) == (0, 0), "{file} belongs to {}", meta.uid());
    }
    for link in LINKS {
        let path = root.join("usr/sbin").join(link);
        ensure!(fs::canonicalize(&path)? == root.join("usr/bin/fjord"), "{link}");
    }
    let commands = run(Command::new(root.join("usr/bin/fjord")).arg("--help"))?.stdout;
    ensure!(commands.contains("fsck"), "{commands}");
    let img = scratch.join("image");
    run(Command::new(root.join("usr/sbin/mkfs.fjord")).args(["--size", "16M"]).arg(&img))?;
    run(Command::new(root.join("usr/sbin/fsck.fjord")).arg("-fn").arg(&img))?;
    // Sums of all files, and scripts that their shells take.
    run(tools::command("dpkg-deb")?.arg("--control").args([&deb, &scratch.join("control")]))?;
    let sums = scratch.join("control/md5sums");
    let checked = run(tools::command("md5sum")?.current_dir(&root).arg("--check").arg(&sums))?;
    ensure!(checked.stdout.lines().count() >= FILES.len(), "{checked:?}");
    let bash = root.join("usr/share/bash-completion/completions/fjord");
    run(Command::new("bash").arg("-n").arg(bash))?;

    let again = build(&scratch.join("again"))?;
    ensure!(fs::read(&deb)? == fs::read(&again)?, "the same program makes another package");
    Ok(())
}

/// A copy of the machine's root that is written to memory, in mount and process namespaces of its own;
/// the package is in /srv.
const ROOT: &str = r#"
set -e
umask 022
mount -t tmpfs none "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" o "$1/root"
for dir in dev sys; do mount --rbind "/$dir" "$1/root/$dir"; done
mount -t proc proc "$1/root/proc"
for dir in run srv tmp; do mount -t tmpfs none "$1/root/$dir"; done
cp "$2" "$1/root/srv/fjord.deb"
printf '%s' "$3" >"$1/root/srv/script"
chroot "$1/root" /bin/sh -e /srv/script
"#;

/// What somebody does who installs it.
const INSIDE: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
umask 022
fails() { if "$@"; then echo "$* should fail"; exit 1; fi; }
code() { want=$1; shift; got=0; "$@" || got=$?; [ $got = $want ] || { echo "$*: $got"; exit 1; }; }
crash() {
    for process in /proc/[0-9]*; do
        if [ "$(readlink $process/exe)" = /usr/bin/fjord ]; then kill -9 ${process#/proc/}; fi
    done
    while grep -q ' /data fuse' /proc/mounts; do umount -l /data; done
}
dpkg --force-unsafe-io --no-triggers -i /srv/fjord.deb
dpkg -s fjord | grep -q '^Status: install ok installed'
for page in fjord fjord-mount fjord-fsck mount.fuse.fjord fsck.fuse.fjord mkfs.fjord; do
    man -w $page >/dev/null
done
cp /usr/share/doc/fjord/examples/srv-data.mount /etc/systemd/system
systemd-analyze verify /etc/systemd/system/srv-data.mount fjord-fsck@srv-disk.img.service

echo '== mount, use, unmount'
mkfs -t fjord --size 64M -J 16M /srv/disk.img
mkdir /data
echo '/srv/disk.img /data fuse.fjord noatime 0 2' >/etc/fstab
mount /data
grep ' /data fuseblk.fjord rw,noatime' /proc/mounts
mkdir /data/dir
echo kept >/data/dir/file
mount -a
[ $(grep -c ' /data fuse' /proc/mounts) = 1 ]
mount -o remount,ro /data
fails touch /data/new
mount -o remount,rw /data
umount /data
e2fsck -fn /srv/disk.img

echo '== check by the sixth field'
fsck -A -T -a
mount /data
[ "$(cat /data/dir/file)" = kept ]
echo synced | dd of=/data/synced conv=fsync
code 8 fsck -A -T -a
crash
fails e2fsck -fn /srv/disk.img
code 4 fsck -A -T -n
fsck -A -T -a | grep 'journal recovered'
e2fsck -fn /srv/disk.img
mount /data
[ "$(cat /data/synced)" = synced ]
umount /srv/disk.img
debugfs -w -R 'set_inode_field /synced links_count 7' /srv/disk.img
code 1 fsck -A -T -a -f
e2fsck -fn /srv/disk.img
# Without it, mounting recovers.
echo '/srv/disk.img /data fuse.fjord noatime,nofail 0 0' >/etc/fstab
mount /data
echo again | dd of=/data/again conv=fsync
crash
mount /data
[ "$(cat /data/again)" = again ]
umount /data

@BY_A_USER@
echo '== as the unit of systemd does'
unit=/usr/lib/systemd/system/fjord-fsck@.service
$(sed -n 's/^ExecStart=\(.*\) %f$/\1/p' $unit) /srv/disk.img | grep 'clean'

echo '== removed'
dpkg --force-unsafe-io --no-triggers -P fjord
for file in /usr/bin/fjord /usr/sbin/mount.fuse.fjord /usr/sbin/fsck.fjord /usr/share/doc/fjord; do
    [ ! -e $file ]
done
fails mount /data
"#;

/// What an ordinary user does with an entry of fstab that lets users mount.
const BY_A_USER: &str = r#"
echo '== by an ordinary user'
nobody() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
mknod -m 666 /srv/fuse c 10 229
mount --bind /srv/fuse /dev/fuse
mkfs.fjord --size 32M --owner 65534:65534 /srv/user.img
mkdir /srv/user
chown 65534:65534 /srv/user.img /srv/user
echo '/srv/user.img /srv/user fuse.fjord user,noauto,noatime 0 2' >/etc/fstab
chmod 755 /srv
nobody mount /srv/user
grep ' /srv/user fuse.fjord rw,nosuid,nodev,noexec,noatime' /proc/mounts
nobody touch /srv/user/file
nobody fjord umount /srv/user
e2fsck -fn /srv/user.img
# The daemon may still be on its way out.
until umount /dev/fuse; do sleep 0.05; done
"#;

#[test]
fn installed_it_serves_an_fstab() -> Result<()> {
    tools::require_root()?;
    tools::require(&[
        "dpkg",
        "unshare",
        "e2fsck",
        "debugfs",
        "fsck",
        "man",
        "systemd-analyze",
        "fusermount3",
        "setpriv",
    ])?;
    ensure!(!Path::new("/usr/sbin/mount.fuse.fjord").exists(), "fjord is installed here");
    let scratch = Scratch::new("deb")?;
    let deb = build(&scratch.join("out"))?;
    let root = scratch.join("root");
    fs::create_dir(&root)?;
    let mut shell = tools::command("timeout")?;
    shell.args(["300", "unshare", "--mount", "--propagation", "private", "--pid", "--fork"]);
    let fusermount = fs::metadata(tools::find("fusermount3").context("looked up just now")?)?;
    let by_a_user = match fusermount.permissions().mode() & 0o4000 {
        0 => {
            tools::skipped("an fstab for users", "fusermount3 is not set-user-ID root");
            ""
        }
        _ => BY_A_USER,
    };
    let inside = INSIDE.replace("@BY_A_USER@", by_a_user);
    shell.args(["--kill-child", "sh", "-c", ROOT, "sh"]).args([&root, &deb]).arg(inside);
    let done = run(&mut shell)?;
    ensure!(done.stdout.contains("journal recovered"), "{done:?}");
    Ok(())
}
