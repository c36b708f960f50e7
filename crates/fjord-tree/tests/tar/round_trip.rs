//! A tree with every kind of entry through real tar programs: the image must be, for Linux, what
//! the program itself makes of the same stream on Linux's ext4.

use std::fs;
use std::path::Path;
use std::process::Command;

use fjord_testkit::image::{KernelMount, Scratch, make_sparse};
use fjord_testkit::manifest::{Compare, Holes, Manifest};
use fjord_testkit::tools;
use fjord_tree::TarOptions;

use crate::support::{fill, view};

/// Everything that a tree on Linux's ext4 can have.
const MAKE_TREE: &str = r#"
set -e
cd "$1"
mkdir -p a/b/c many empty-dir default
printf text > a/file; : > empty; seq 1 300000 > a/large
ln a/large a/b/hard; ln a/file a/b/c/hard2; ln -s ../file a/link; ln -s nowhere dangling; ln dangling dangling2
ln -s $(printf 'long/%.0s' $(seq 300)) long-link
for i in $(seq 200); do printf $i > many/$i; done
printf first > sparse; printf end | dd of=sparse bs=1 seek=4000000 conv=notrunc status=none; truncate -s 5000000 sparse
truncate -s 9663676416 hole
mkfifo pipe; mknod null c 1 3; mknod disk b 259 70000
printf '#!' > a/suid; chown 3000000:4000000 a/suid; chmod 6755 a/suid; chmod 1777 a/b; chmod 2750 many; chmod 000 empty
chown -h 1000:70000 a/link; chown 5:6 null
p=$(printf 'deep-name-%.0s' $(seq 15)); mkdir -p $p/$p; printf x > $p/$p/file
touch $(printf 'n%.0s' $(seq 255)); touch 'odd name
with lines' $(printf '\xff\xfe')
setfacl -m u:1234:rw,g:77:r,m::rw a/file; setfacl -m u:daemon:r a/large; setfacl -d -m u:5:rwx,g::r-x default
setfacl -m u:1234:--- many/7; printf inherits > default/not
python3 - <<END
import os
os.setxattr('a/file', 'user.text', b'value'); os.setxattr('a/b', 'user.dir', b'v')
os.setxattr('a/file', 'user.binary', bytes(range(256)) * 4 + b'\n5 a=b\n')
os.setxattr('empty', 'trusted.mark', b'')
os.setxattr('a/suid', 'security.capability', b'\x01\x00\x00\x02\x00\x0a\x00\x00' + b'\x00' * 12)
END
touch -h -d '1999-12-31 23:59:59.123456789 UTC' a/link a/file default
touch -d '1930-01-01 00:00:00 UTC' many/3; touch -d '2200-01-01 00:00:00.5 UTC' many/4
touch -d '2001-02-03 04:05:06 UTC' a a/b .
"#;

fn shell(script: &str, dir: &Path) {
    let mut command = Command::new("sh");
    tools::run(command.args(["-c", script, "sh"]).arg(dir))
        .and_then(tools::Output::ok)
        .expect("runs");
}

fn mounted(scratch: &Scratch, name: &str) -> KernelMount {
    let image = scratch.join(name);
    make_sparse(&image, 128 << 20).expect("made");
    let mut make = tools::command("mke2fs").expect("installed");
    tools::run(make.args(["-q", "-t", "ext4", "-b", "4096"]).arg(&image))
        .and_then(tools::Output::ok)
        .expect("made");
    KernelMount::new(&image, "rw").expect("mounts")
}

/// How a program writes a stream, how it reads it, and what the two keep.
struct Way {
    program: &'static str,
    write: &'static [&'static str],
    read: &'static [&'static str],
    compare: Compare,
    /// Files that the format cannot hold.
    without: &'static [&'static str],
}

/// Extraction sets access times as it likes.
const ALL: Compare = Compare { atime: false, ..Compare::SAME_SCRIPT };
/// Whole seconds, no attributes.
const LITTLE: Compare = Compare { xattrs: false, holes: Holes::Ignored, ..ALL };
const GNU_READ: &[&str] =
    &["-x", "-p", "--same-owner", "--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*"];
const BSD_READ: &[&str] = &["-x", "-p", "--same-owner", "--numeric-owner", "--acls", "--xattrs"];

const WAYS: &[Way] = &[
    Way {
        program: "tar",
        write: &["-c", "-S", "--format=pax", "--acls", "--xattrs", "--xattrs-include=*"],
        read: GNU_READ,
        compare: ALL,
        without: &[],
    },
    // Access lists as text alone, and other maps of holes.
    Way {
        program: "tar",
        write: &["-c", "-S", "--sparse-version=0.1", "--format=pax", "--acls", "--xattrs"],
        read: GNU_READ,
        compare: ALL,
        without: &[],
    },
    Way {
        program: "tar",
        write: &["-c", "-S", "--format=gnu"],
        read: GNU_READ,
        compare: ALL,
        without: &[],
    },
    // Names and sizes that ustar has no room for.
    Way {
        program: "tar",
        write: &["-c", "--format=ustar"],
        read: GNU_READ,
        compare: LITTLE,
        without: &["hole", "sparse", "long-link", "n*", "deep-*", "suid", "many/3"],
    },
    Way {
        program: "bsdtar",
        write: &["-c", "--format=pax", "--acls", "--xattrs"],
        read: BSD_READ,
        compare: ALL,
        without: &[],
    },
    Way {
        program: "bsdtar",
        write: &["-c", "--format=gnutar", "--no-read-sparse"],
        read: BSD_READ,
        compare: LITTLE,
        without: &["hole", "sparse"],
    },
];

#[test]
fn every_kind_of_entry_goes_through_each_program() {
    let scratch = Scratch::in_memory("tar").expect("a directory");
    let source = mounted(&scratch, "source");
    shell(MAKE_TREE, source.path());
    for way in WAYS {
        let archive = scratch.join("archive");
        let mut write = tools::command(way.program).expect("installed");
        write.args(way.write).arg("-f").arg(&archive).arg("-C").arg(source.path());
        write.args(way.without.iter().map(|name| format!("--exclude={name}")));
        let written = tools::run(write.args(["--exclude=lost+found", "."])).expect("runs");
        written.ok().expect("a stream");
        let target = mounted(&scratch, "target");
        let mut read = tools::command(way.program).expect("installed");
        read.args(way.read).arg("-f").arg(&archive).arg("-C").arg(target.path());
        tools::run(&mut read).and_then(tools::Output::ok).expect("extracted");
        // bsdtar leaves the directory that it extracts to as it was.
        shell("touch -d '2001-02-03 04:05:06 UTC' \"$1\"", target.path());
        let expected = Manifest::from_directory(target.path()).expect("readable");
        target.unmount().expect("unmounts");
        let image = scratch.join("image");
        let bytes = fs::read(&archive).expect("written");
        let options = TarOptions::default();
        let done = fill(&image, &[&bytes], &options)
            .unwrap_or_else(|error| panic!("{} {:?}: {error}", way.program, way.write));
        let unkept = done.skipped.iter().chain(&done.unkept).collect::<Vec<_>>();
        assert!(unkept.is_empty(), "{} {:?}: {unkept:?}", way.program, way.write);
        let difference = expected.without_lost_found().diff(&view(&image), &way.compare);
        let name = format!("{} {:?}", way.program, way.write);
        difference.ok(&name, "fjord").expect("the same for Linux");
    }
    source.unmount().expect("unmounts");
}

/// Python's tarfile and a stream like star's, judged by what went in.
#[test]
fn streams_of_python() {
    const WRITE: &str = r"
import io, sys, tarfile
with tarfile.open(sys.argv[1], 'w', format=getattr(tarfile, sys.argv[2])) as tar:
    def add(name, data=b'', **more):
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = len(data), 1700000000, 0o640
        for key, value in more.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data))
    add('dir', type=tarfile.DIRTYPE, mode=0o750)
    add('dir/' + 'name' * 40, b'long', uid=3000000, gid=4)
    add('link', type=tarfile.SYMTYPE, linkname='to/' * 60)
    add('hard', type=tarfile.LNKTYPE, linkname='dir/' + 'name' * 40)
    add('null', type=tarfile.CHRTYPE, devmajor=1, devminor=3)
    add('pipe', type=tarfile.FIFOTYPE)
    if sys.argv[2] == 'PAX_FORMAT':
        add('f\u00fcnf \u2764', b'five', mtime=1700000000.25,
            pax_headers={'SCHILY.xattr.user.x': 'y'})
";
    let scratch = Scratch::in_memory("tar").expect("a directory");
    for format in ["PAX_FORMAT", "GNU_FORMAT"] {
        let archive = scratch.join("archive");
        let mut python = Command::new("python3");
        python.args(["-c", WRITE]).arg(&archive).arg(format);
        tools::run(&mut python).and_then(tools::Output::ok).expect("runs");
        let outcome = crate::support::Outcome::plain(&fs::read(&archive).expect("written"));
        assert!(outcome.done.skipped.is_empty(), "{:?}", outcome.done.skipped);
        let long = "dir/".to_owned() + &"name".repeat(40);
        outcome.assert_content(&long, b"long");
        assert_eq!((outcome.entry(&long).uid, outcome.entry("hard").nlink), (3_000_000, 2));
        assert_eq!(outcome.entry("link").target, b"to/".repeat(60));
        assert_eq!(outcome.entry("null").rdev, (1, 3));
        assert_eq!(outcome.entry("dir").mode, 0o750);
        if format == "PAX_FORMAT" {
            let five = outcome.entry("f\u{fc}nf \u{2764}");
            assert_eq!((five.mtime.nsec, five.xattrs.len()), (250_000_000, 1));
        }
    }
}
