//! Attributes and access lists, compared with what Linux makes of the image.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use fjord::{FileKind, SetAttr, XattrFlags};
use fjord_testkit::image::KernelMount;
use fjord_testkit::rng::{Rng, pattern_vec, seed_from_env};
use fjord_testkit::script::acl;
use rustix::io::Errno;

use crate::support::{Image, errno, finish, root_cred};

const SETS: &[&[&str]] = &[
    &["-t", "ext4"],
    &["-t", "ext4", "-b", "1024", "-I", "512"],
    &["-t", "ext4", "-b", "1024", "-O", "ea_inode"],
    &["-t", "ext4", "-I", "128"],
    &["-t", "ext4", "-O", "inline_data,ea_inode"],
    &["-t", "ext2", "-b", "1024"],
];

fn kernel_value(path: &std::path::Path, name: &[u8]) -> Vec<u8> {
    let mut value = vec![0u8; 65536];
    let used =
        rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).expect("getxattr");
    value.truncate(used);
    value
}

/// Random sets and removals against a map, and in the end against Linux.
#[test]
fn against_a_model() {
    let seed = seed_from_env("xattrs", 19);
    for mke2fs in SETS {
        let mut rng = Rng::new(seed);
        let image = Image::new(64, mke2fs);
        let fs = image.open();
        let root = fs.root().expect("root");
        let mut files = Vec::new();
        for number in 0..6 {
            let name = format!("f{number}");
            let file = root.create(name.as_bytes(), 0o644, &root_cred()).expect("create");
            files.push((name, file, BTreeMap::<Vec<u8>, Vec<u8>>::new()));
        }
        for step in 0..1200 {
            let at = rng.below(6) as usize;
            let (_, file, model) = &mut files[at];
            let prefix = *rng.pick(&["user", "trusted", "security"]);
            let name = format!("{prefix}.name{}", rng.below(5)).into_bytes();
            if rng.percent(30) {
                let expected = if model.remove(&name).is_some() { 0 } else { 61 };
                assert_eq!(errno(&file.remove_xattr(&name)), expected, "step {step}");
            } else {
                let len = *rng.pick(&[0, 1, 4, 30, 100, 400, 900, 3000, 5000, 30_000]);
                let value = pattern_vec(seed ^ step, 0, len);
                match file.set_xattr(&name, &value, XattrFlags::empty()) {
                    Ok(()) => {
                        model.insert(name, value);
                    }
                    Err(error) => assert!(error.is(Errno::NOSPC), "step {step}: {error}"),
                }
            }
            for (name, value) in model.iter() {
                let got = file.get_xattr(name).expect("get");
                assert!(got == *value, "step {step}: another value");
            }
            let mut listed = file.list_xattr().expect("list");
            listed.sort();
            assert_eq!(listed, model.keys().cloned().collect::<Vec<_>>(), "step {step}");
        }
        let expected: Vec<_> = files.into_iter().map(|(name, _, model)| (name, model)).collect();
        drop(root);
        finish(fs);
        image.check();
        let mount = KernelMount::new(image.path(), "ro").expect("kernel mount");
        for (file, model) in &expected {
            for (name, value) in model {
                assert!(kernel_value(&mount.path().join(file), name) == *value);
            }
        }
        mount.unmount().expect("unmount");
        // Deleting gives everything back.
        let fs = image.open();
        for (file, _) in &expected {
            fs.root().expect("root").unlink(file.as_bytes()).expect("unlink");
        }
        finish(fs);
        image.check();
    }
}

/// Blocks that Linux shares between inodes are copied before they change.
#[test]
fn shared_blocks() {
    for mke2fs in SETS {
        let image = Image::new(64, mke2fs);
        let mount = KernelMount::new(image.path(), "rw").expect("kernel mount");
        let value = [b'v'; 700];
        for number in 0..5 {
            let path = mount.path().join(format!("f{number}"));
            std::fs::write(&path, b"").expect("write");
            rustix::fs::setxattr(&path, "user.same", &value, rustix::fs::XattrFlags::empty())
                .expect("setxattr");
        }
        mount.unmount().expect("unmount");
        let fs = image.open();
        let root = fs.root().expect("root");
        let flags = XattrFlags::empty();
        root.lookup(b"f0").expect("f0").set_xattr(b"user.same", &[b'w'; 700], flags).expect("set");
        root.lookup(b"f1").expect("f1").set_xattr(b"user.more", b"more", flags).expect("set");
        root.lookup(b"f2").expect("f2").remove_xattr(b"user.same").expect("remove");
        root.unlink(b"f3").expect("unlink");
        let f4 = root.lookup(b"f4").expect("f4");
        assert_eq!(f4.get_xattr(b"user.same").expect("get"), value);
        drop((f4, root));
        finish(fs);
        image.check();
        let mount = KernelMount::new(image.path(), "ro").expect("kernel mount");
        let get = |file: &str, name: &str| kernel_value(&mount.path().join(file), name.as_bytes());
        assert_eq!(get("f0", "user.same"), [b'w'; 700]);
        assert_eq!(
            (get("f1", "user.same"), get("f1", "user.more")),
            (value.to_vec(), b"more".to_vec())
        );
        assert_eq!(get("f4", "user.same"), value);
        mount.unmount().expect("unmount");
    }
}

#[test]
fn refusals() {
    let image = Image::new(64, &["-t", "ext4", "-b", "1024"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let file = root.create(b"file", 0o644, &root_cred()).expect("create");
    let link = root.symlink(b"link", b"target", &root_cred()).expect("symlink");
    let none = XattrFlags::empty();
    let code = |errno: Errno| errno.raw_os_error();
    assert_eq!(errno(&file.set_xattr(b"user.a", &[0; 70_000], none)), code(Errno::TOOBIG));
    assert_eq!(errno(&file.set_xattr(b"user.a", &[0; 2000], none)), code(Errno::NOSPC));
    assert_eq!(errno(&file.set_xattr(b"user.a", b"", XattrFlags::REPLACE)), code(Errno::NODATA));
    file.set_xattr(b"user.a", b"1", XattrFlags::CREATE).expect("create");
    assert_eq!(errno(&file.set_xattr(b"user.a", b"", XattrFlags::CREATE)), code(Errno::EXIST));
    assert_eq!(errno(&file.set_xattr(b"nothing.a", b"", none)), code(Errno::OPNOTSUPP));
    assert_eq!(errno(&file.set_xattr(b"user.", b"", none)), code(Errno::INVAL));
    assert_eq!(errno(&file.set_xattr(&[b'u'; 300], b"", none)), code(Errno::RANGE));
    assert_eq!(errno(&file.get_xattr(b"user.b")), code(Errno::NODATA));
    assert_eq!(errno(&file.remove_xattr(b"user.b")), code(Errno::NODATA));
    assert_eq!(errno(&file.get_xattr(b"system.data")), code(Errno::OPNOTSUPP));
    assert_eq!(errno(&link.set_xattr(b"user.a", b"", none)), code(Errno::PERM));
    link.set_xattr(b"trusted.a", b"1", none).expect("trusted on a link");
    drop((file, link, root));
    finish(fs);
    image.check();
}

const NOBODY: u32 = u32::MAX;

#[test]
fn access_lists() {
    let image = Image::new(64, &["-t", "ext4"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let dir = root.mkdir(b"dir", 0o755, &root_cred()).expect("mkdir");
    let default =
        acl(&[(1, 7, NOBODY), (2, 6, 1000), (4, 5, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)]);
    let none = XattrFlags::empty();
    dir.set_xattr(b"system.posix_acl_default", &default, none).expect("set");
    let mut cred = root_cred();
    cred.umask = 0o077;
    let file = dir.create(b"file", 0o666, &cred).expect("create");
    let below = dir.mkdir(b"below", 0o777, &cred).expect("mkdir");
    // With a default list the umask does not count.
    assert_eq!(file.attr().mode & 0o777, 0o660);
    let plain = root.create(b"plain", 0o666, &cred).expect("create");
    assert_eq!(plain.attr().mode & 0o777, 0o600);
    assert_eq!(below.get_xattr(b"system.posix_acl_default").expect("get"), default);
    file.set_attr(&SetAttr { mode: Some(0o640), ..SetAttr::default() }, &cred).expect("chmod");
    assert_eq!(
        errno(&file.set_xattr(b"system.posix_acl_default", &default, none)),
        Errno::ACCESS.raw_os_error()
    );
    assert_eq!(
        errno(&file.set_xattr(b"system.posix_acl_access", b"nonsense", none)),
        Errno::OPNOTSUPP.raw_os_error()
    );
    // A list that a mode can express is not kept.
    let simple = acl(&[(1, 6, NOBODY), (4, 4, NOBODY), (32, 4, NOBODY)]);
    plain.set_xattr(b"system.posix_acl_access", &simple, none).expect("set");
    assert_eq!(plain.attr().mode & 0o777, 0o644);
    assert_eq!(errno(&plain.get_xattr(b"system.posix_acl_access")), Errno::NODATA.raw_os_error());
    let mode = file.attr().mode;
    let list = file.get_xattr(b"system.posix_acl_access").expect("get");
    assert_eq!(below.attr().kind(), FileKind::Directory);
    drop((root, dir, file, below, plain));
    finish(fs);
    image.check();
    let mount = KernelMount::new(image.path(), "ro").expect("kernel mount");
    let path = mount.path().join("dir/file");
    assert_eq!(kernel_value(&path, b"system.posix_acl_access"), list);
    let stat = rustix::fs::lstat(&path).expect("stat");
    assert_eq!(stat.st_mode & 0o7777, u32::from(mode & 0o7777));
    let below = kernel_value(&mount.path().join("dir/below"), b"system.posix_acl_default");
    assert_eq!(below, default);
    mount.unmount().expect("unmount");
}
