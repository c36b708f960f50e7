//! The page mount.fuse.fjord(8): fjord as mount(8), fstab and systemd know it.

use clap::Command;
use clap_mangen::roff::{bold, italic, roman};

use super::{head, text};

const NAME: &str = "mount.fuse.fjord";

const DESCRIPTION: &str = "\
`mount.fuse.fjord` is a link to `fjord`. mount(8) runs it for the type fuse.fjord, on the command line
and in fstab. It mounts the image, or the block device, on the directory, and returns when the mount is
complete; fjord then serves it in the background until it is unmounted. A dirty journal is recovered
before.

Mounted by root, the type that /proc/mounts shows is fuseblk.fjord, and its source is the block device,
or the loop device that fjord attaches to an image file. umount(8) returns when the image is clean. The
image may be named instead of the directory: `umount IMAGE`.

Mounted by an ordinary user, the type is fuse.fjord, and umount(8) returns earlier; `fjord umount` waits
until the image is clean. Ordinary users need the program fusermount3, from the package fuse3.

Options:
  -o LIST  mount options, separated by commas; see below
  -r       the same as -o ro
  -f       check the options and the directory, but do not mount
  -n -s -v -w, -t TYPE
           ignored";

const FSTAB: &str = "\
Fstab:
  first field   image file or block device; a device also as LABEL= or UUID=
  second field  directory
  third field   fuse.fjord
  fourth field  mount options, separated by commas
  fifth field   0
  sixth field   2 for a block device: fsck(8) runs fsck.fuse.fjord at boot; 0 for an image file, and
                where no check is wanted

With 0 in the sixth field, the journal is still recovered when the image is mounted. At boot systemd
checks block devices only, whatever the sixth field says. For an image file, the mount option
`x-systemd.requires=fjord-fsck@PATH.service` has it checked before it is mounted; PATH is the path of the
image as `systemd-escape --path` writes it.

`mount -o remount` changes ro, rw, nosuid, nodev and noexec. A mount made with ro cannot become rw. All
other options are left as they are, with a warning, or an error where /proc/mounts would show what is not
in effect.

Exit codes:
  0  mounted
  1  failed; the message says what to do
  2  wrong arguments, or an unknown mount option
  3  the image or the directory is in use
  4  the image is damaged; run fsck.fjord
  5  the image has a feature that is not supported

Files:
  /usr/sbin/mount.fuse.fjord
                  the helper of mount(8)
  /usr/sbin/fsck.fuse.fjord
                  the helper of fsck(8)
  /dev/log  where warnings and errors go; see `FJORD_SYSLOG` in fjord(1)
  /usr/share/doc/fjord/examples
                  a unit of systemd that mounts an image

Examples:
  mount -t fuse.fjord /srv/disk.img /mnt -o noatime
  mount -o remount,ro /mnt
  umount /srv/disk.img

Example of an image file in /etc/fstab, checked by systemd before it is mounted:
  /srv/disk.img  /mnt  fuse.fjord  noatime,x-systemd.requires=fjord-fsck@srv-disk.img.service  0  0

Example of a block device in /etc/fstab, checked at boot:
  LABEL=data  /mnt  fuse.fjord  noatime,nofail  0  2";

/// The page; the mount options are those of `fjord mount`.
pub(super) fn page(cli: &Command) -> String {
    let mut roff = head(NAME, "8", NAME, "Mount an ext4 image or block device with fjord");
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([
        bold("mount -t fuse.fjord"),
        roman(" [-o "),
        italic("LIST"),
        roman("] "),
        italic("IMAGE DIR"),
    ]);
    roff.control("br", []);
    roff.text([bold(NAME), roman(" "), italic("IMAGE DIR"), roman(" [OPTIONS]")]);
    roff.control("SH", ["DESCRIPTION"]);
    for block in text::blocks(DESCRIPTION) {
        text::render(&mut roff, &block);
    }
    let mount = cli.find_subcommand("mount").and_then(Command::get_after_help);
    let help = mount.map(ToString::to_string).unwrap_or_default();
    for block in text::blocks(&help) {
        if matches!(block, text::Block::Section(heading, _) if heading.starts_with("Mount options"))
        {
            text::render(&mut roff, &block);
        }
    }
    for block in text::blocks(FSTAB) {
        text::render(&mut roff, &block);
    }
    roff.control("SH", ["SEE ALSO"]);
    let others = ["fjord(1)", "fjord-mount(1)", "fsck.fjord(8)", "mount(8)", "fstab(5)"];
    roff.text([roman(others.join(", "))]);
    roff.render()
}
