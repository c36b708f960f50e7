//! Copies and walks, and paths that try to leave the image.

use std::process::Command;

use fjord::{Error, FileKind, Fs, MountOptions, XattrFlags};

use crate::{check, image};

/// What std::fs::copy does not do: keep holes, access lists and attributes, refuse to empty the
/// original, and give no privileges away.
#[test]
fn copies_keep_holes_and_attributes() {
    let (device, fs) = image();
    let file = fs.create_file("/sparse").unwrap();
    file.write_all_at(b"first", 0).unwrap();
    file.write_all_at(&[9; 70_000], 8 << 20).unwrap();
    file.set_len(1 << 30).unwrap();
    drop(file);
    // user::rw-, user:1000:r--, group::r--, mask::rw-, other::---
    let list = acl(&[
        (1, 6, u32::MAX),
        (2, 4, 1000),
        (4, 4, u32::MAX),
        (16, 6, u32::MAX),
        (32, 0, u32::MAX),
    ]);
    let access = "system.posix_acl_access";
    let none = XattrFlags::empty();
    fs.set_xattr("/sparse", access, &list, none).unwrap();
    fs.set_xattr("/sparse", "user.kept", b"yes", none).unwrap();
    assert_eq!(fs.metadata("/sparse").unwrap().permissions().mode(), 0o660);
    assert_eq!(fs.copy("/sparse", "/copy").unwrap(), 1 << 30);
    let copy = fs.metadata("/copy").unwrap();
    assert_eq!((copy.len(), copy.permissions().mode()), (1 << 30, 0o660));
    assert!(copy.blocks() * 512 < 200_000, "{copy:?}");
    assert_eq!(fs.get_xattr("/copy", access).unwrap(), Some(list.clone()));
    assert_eq!(fs.get_xattr("/copy", "user.kept").unwrap().as_deref(), Some(&b"yes"[..]));
    let inode = fs.resolve("/copy").unwrap();
    let mut end = vec![0; 70_001];
    inode.read(8 << 20, &mut end).unwrap();
    assert_eq!((&end[..70_000], end[70_000]), (&[9; 70_000][..], 0));
    drop(inode);
    // A list that the original has not goes.
    fs.write("/plain", "").unwrap();
    fs.set_permissions("/plain", 0o640).unwrap();
    fs.copy("/plain", "/copy").unwrap();
    assert_eq!(fs.get_xattr("/copy", access).unwrap(), None);
    assert_eq!(fs.metadata("/copy").unwrap().permissions().mode(), 0o640);
    // The same file, by whatever name.
    fs.hard_link("/plain", "/same").unwrap();
    fs.symlink("plain", "/link").unwrap();
    fs.write("/plain", "precious").unwrap();
    for name in ["/plain", "/same", "/link"] {
        let error = fs.copy("/plain", name).unwrap_err();
        assert!(error.to_string().contains("same file"), "{error}");
    }
    assert_eq!(fs.read("/plain").unwrap(), b"precious");
    // Privileges go with the owner that they were given with.
    let capability = b"\x01\0\0\x02\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for (owner, mode, has) in [(0, 0o4755, true), (1000, 0o755, false)] {
        fs.chown("/plain", Some(owner), None).unwrap();
        fs.set_permissions("/plain", 0o4755).unwrap();
        fs.set_xattr("/plain", "security.capability", capability, none).unwrap();
        let _ = fs.remove_file("/program");
        fs.copy("/plain", "/program").unwrap();
        assert_eq!(fs.metadata("/program").unwrap().permissions().mode(), mode, "of {owner}");
        let found = fs.get_xattr("/program", "security.capability").unwrap();
        assert_eq!(found.is_some(), has, "of {owner}");
    }
    fs.unmount().unwrap();
    check(&device);
}

/// An access control list as its extended attribute holds it: tags, permissions, IDs.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn a_walk_goes_in_order_and_follows_no_link() {
    let (_device, fs) = image();
    for dir in ["/t/b/deep/er", "/t/a", "/t/b.x", "/elsewhere"] {
        fs.create_dir_all(dir).unwrap();
    }
    for file in ["/t/z", "/t/b/file", "/t/a/1", "/t/a/10", "/t/a/2", "/elsewhere/no"] {
        fs.write(file, file).unwrap();
    }
    fs.symlink("../elsewhere", "/t/link").unwrap();
    fs.symlink("/t", "/t/b/deep/up").unwrap();
    let seen = |start: &str| -> Vec<String> {
        let entry = |entry: Result<fjord::WalkEntry, Error>| {
            let entry = entry.unwrap();
            let names = entry.path().strip_prefix(start).unwrap().components().count();
            assert_eq!(names, entry.depth(), "{entry:?}");
            assert_eq!(entry.metadata().kind(), entry.file_type());
            entry.into_path().display().to_string()
        };
        fs.walk(start).unwrap().map(entry).collect()
    };
    let expected = "/t /t/a /t/a/1 /t/a/10 /t/a/2 /t/b /t/b/deep /t/b/deep/er /t/b/deep/up \
         /t/b/file /t/b.x /t/link /t/z";
    assert_eq!(seen("/t"), expected.split_whitespace().collect::<Vec<_>>());
    assert_eq!(seen("/t"), {
        let host = tempfile::tempdir().unwrap();
        for entry in fs.walk("/t").unwrap() {
            let entry = entry.unwrap();
            let path = host.path().join(entry.path().strip_prefix("/").unwrap());
            match entry.file_type() {
                FileKind::Directory => std::fs::create_dir(path).unwrap(),
                _ => std::fs::write(path, "").unwrap(),
            }
        }
        // find(1) sees as much; sorted by the names of each level.
        let found = Command::new("find").current_dir(host.path()).arg("t").output().unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        let mut found: Vec<Vec<&str>> =
            found.lines().map(|line| line.split('/').collect()).collect();
        found.sort();
        found.iter().map(|names| format!("/{}", names.join("/"))).collect::<Vec<_>>()
    });
    assert_eq!(seen("/t/z"), ["/t/z"]);
    // A link at the end of the path is followed, as for a listing.
    assert_eq!(seen("/t/link").len(), 2);
    assert!(fs.walk("/no").is_err());
    // A directory can be left out; what goes meanwhile is no error.
    let mut walk = fs.walk("/t").unwrap();
    let mut names = Vec::new();
    while let Some(entry) = walk.next() {
        let entry = entry.unwrap();
        match entry.file_name().to_str() {
            Some("a") => {
                walk.skip_dir();
                fs.remove_dir_all("/t/b").unwrap();
                fs.remove_file("/t/z").unwrap();
            }
            name => names.push(name.unwrap().to_owned()),
        }
    }
    assert_eq!(names, ["t", "b.x", "link"]);
    fs.unmount().unwrap();
}

/// Absolute links lead to the root of the image, and nothing leads out of it.
#[test]
fn paths_stay_inside() {
    let (_device, fs) = image();
    fs.create_dir("/etc").unwrap();
    fs.write("/etc/passwd", "the image's").unwrap();
    fs.symlink("/etc/passwd", "/absolute").unwrap();
    fs.symlink("../../../../etc/passwd", "/relative").unwrap();
    for path in ["/absolute", "relative", "/../../etc/passwd", "etc/./passwd", "etc//passwd"] {
        assert_eq!(fs.read_to_string(path).unwrap(), "the image's", "{path}");
    }
    let root = fs.metadata("/").unwrap();
    assert_eq!((root.ino(), root.is_dir()), (2, true));
    assert_eq!(fs.metadata("").unwrap(), root);
    for error in [
        fs.remove_dir_all("/").unwrap_err(),
        fs.remove_dir("/").unwrap_err(),
        fs.rename("/", "/x").unwrap_err(),
    ] {
        assert!(error.is(rustix::io::Errno::BUSY), "{error}");
    }
    assert!(fs.try_exists("/etc/passwd").unwrap());
    fs.unmount().unwrap();
}

/// Two directories that a damaged image holds within each other.
#[test]
fn a_directory_within_itself_ends_the_walk() {
    let (device, fs) = image();
    fs.create_dir_all("/a/b/c").unwrap();
    let (a, c) = (fs.resolve("/a").unwrap().ino(), fs.resolve("/a/b/c").unwrap().ino());
    fs.unmount().unwrap();
    drop(fs);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    device.snapshot().write_to_file(&path).unwrap();
    let request = format!("link <{a}> /a/b/c/again");
    let output = Command::new("debugfs").args(["-w", "-R", &request]).arg(&path).output();
    assert!(output.expect("debugfs runs; install e2fsprogs").status.success());
    assert_ne!(a, c);
    let fs = Fs::open(&path, &MountOptions { read_only: true, ..MountOptions::default() }).unwrap();
    let outcomes: Vec<_> = fs.walk("/").unwrap().take(100).collect();
    let errors: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(errors.len(), 1, "{outcomes:?}");
    assert!(errors[0].is_corrupt() && errors[0].to_string().contains("contains itself"));
    fs.unmount().unwrap();
    drop(fs);
    let fs = Fs::open(&path, &MountOptions::default()).unwrap();
    let error = fs.remove_dir_all("/a").unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains("contains itself"), "{error}");
}
