//! Outcomes that the random comparison with Linux cannot reach.

use fjord::{Cred, RenameFlags, SetAttr};
use rustix::io::Errno;

use crate::support::{Image, errno, finish, root_cred};

fn code(errno: Errno) -> i32 {
    errno.raw_os_error()
}

#[test]
fn names_that_cannot_be() {
    let image = Image::new(64, &["-t", "ext4"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let cred = root_cred();
    for name in [&b"a/b"[..], b"/", b"a\0b"] {
        assert_eq!(errno(&root.create(name, 0o644, &cred)), code(Errno::INVAL));
        assert_eq!(errno(&root.lookup(name)), code(Errno::INVAL));
    }
    assert_eq!(errno(&root.lookup(b"")), code(Errno::NOENT));
    assert_eq!(errno(&root.mkdir(&[b'a'; 256], 0o755, &cred)), code(Errno::NAMETOOLONG));
    root.mkdir(&[b'a'; 255], 0o755, &cred).expect("255 bytes are allowed");
    assert_eq!(errno(&root.mkdir(b"..", 0o755, &cred)), code(Errno::EXIST));
    assert_eq!(errno(&root.symlink(b"l", b"", &cred)), code(Errno::NOENT));
    assert_eq!(errno(&root.symlink(b"l", &[b'a'; 4096], &cred)), code(Errno::NAMETOOLONG));
    assert_eq!(root.lookup(b"..").expect("..").ino(), root.ino());
    let file = root.create(b"file", 0o644, &cred).expect("create");
    assert_eq!(errno(&file.lookup(b"x")), code(Errno::NOTDIR));
    assert_eq!(errno(&file.create(b"x", 0o644, &cred)), code(Errno::NOTDIR));
    assert_eq!(errno(&file.read_link()), code(Errno::INVAL));
    assert_eq!(errno(&file.read_dir(0, &mut |_| true)), code(Errno::NOTDIR));
    drop((file, root));
    finish(fs);
    image.check();
}

/// A directory that is removed while somebody is in it.
#[test]
fn removed_directory() {
    let image = Image::new(64, &["-t", "ext4"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let cred = root_cred();
    let dir = root.mkdir(b"dir", 0o755, &cred).expect("mkdir");
    let file = root.create(b"file", 0o644, &cred).expect("create");
    root.rmdir(b"dir").expect("rmdir");
    assert_eq!(errno(&dir.create(b"x", 0o644, &cred)), code(Errno::NOENT));
    assert_eq!(errno(&dir.lookup(b"x")), code(Errno::NOENT));
    assert_eq!(errno(&dir.link(&file, b"x")), code(Errno::NOENT));
    assert_eq!(errno(&dir.tmpfile(0o644, &cred)), code(Errno::NOENT));
    let none = RenameFlags::empty();
    assert_eq!(errno(&root.rename(b"file", &dir, b"x", none, &cred)), code(Errno::NOENT));
    assert_eq!(dir.attr().nlink, 0);
    dir.read_dir(0, &mut |_| panic!("nothing is in it")).expect("read_dir");
    drop((dir, root, file));
    finish(fs);
    image.check();
}

#[test]
fn tmpfile_can_be_linked_and_a_deleted_file_cannot() {
    for features in ["^orphan_file", "orphan_file"] {
        let image = Image::new(64, &["-t", "ext4", "-O", features]);
        let fs = image.open();
        let root = fs.root().expect("root");
        let cred = root_cred();
        let tmpfile = root.tmpfile(0o644, &cred).expect("tmpfile");
        assert_eq!(tmpfile.attr().nlink, 0);
        tmpfile.write(0, b"content").expect("write");
        root.link(&tmpfile, b"linked").expect("link");
        assert_eq!(tmpfile.attr().nlink, 1);
        let gone = root.create(b"gone", 0o644, &cred).expect("create");
        root.unlink(b"gone").expect("unlink");
        assert_eq!(errno(&root.link(&gone, b"back")), code(Errno::NOENT));
        let kept = root.tmpfile(0o644, &cred).expect("tmpfile");
        drop((tmpfile, gone, kept, root));
        finish(fs);
        image.check();
    }
}

#[test]
fn subdirectories_beyond_the_link_count() {
    let image = Image::new(512, &["-t", "ext4", "-b", "1024", "-N", "70000"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let cred = root_cred();
    let dir = root.mkdir(b"dir", 0o755, &cred).expect("mkdir");
    for number in 0..65_010u32 {
        dir.mkdir(format!("d{number}").as_bytes(), 0o755, &cred).expect("mkdir");
        if number == 64_997 {
            assert_eq!(dir.attr().nlink, 65_000);
        }
    }
    assert_eq!(dir.attr().nlink, 1);
    for number in 0..20u32 {
        dir.rmdir(format!("d{number}").as_bytes()).expect("rmdir");
    }
    assert_eq!(dir.attr().nlink, 1);
    drop((dir, root));
    finish(fs);
    image.check();
}

#[test]
fn link_counts_end() {
    let image = Image::new(64, &["-t", "ext4", "-O", "^dir_nlink"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let file = root.create(b"file", 0o644, &root_cred()).expect("create");
    for number in 1..65_000u32 {
        root.link(&file, format!("l{number}").as_bytes()).expect("link");
    }
    assert_eq!(file.attr().nlink, 65_000);
    assert_eq!(errno(&root.link(&file, b"more")), code(Errno::MLINK));
    drop((file, root));
    finish(fs);
    image.check();
}

#[test]
fn set_group_id_directories() {
    let image = Image::new(64, &["-t", "ext4"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let dir = root.mkdir(b"dir", 0o2775, &Cred { gid: 50, ..root_cred() }).expect("mkdir");
    assert_eq!(dir.attr().mode & 0o7777, 0o775, "mkdir(2) does not take the bit");
    let change = SetAttr { mode: Some(0o2775), ..SetAttr::default() };
    dir.set_attr(&change, &root_cred()).expect("chmod");
    let user = Cred { uid: 1000, gid: 1000, ..root_cred() };
    let file = dir.create(b"file", 0o2755, &user).expect("create");
    let below = dir.mkdir(b"below", 0o755, &user).expect("mkdir");
    assert_eq!((file.attr().uid, file.attr().gid), (1000, 50));
    assert_eq!(file.attr().mode & 0o7777, 0o755, "not a member of the group");
    assert_eq!((below.attr().gid, below.attr().mode & 0o7777), (50, 0o2755));
    drop((file, below, dir, root));
    finish(fs);
    image.check();
}
