//! Directories of many names: growth of the index, lookups, listing, removal.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

use fjord::{Fs, InodeRef};
use fjord_testkit::image::{self, KernelMount};
use fjord_testkit::rng::{Rng, seed_from_env};
use rustix::io::Errno;

use crate::support::{Image, errno, finish, names, root_cred};

fn long_name(number: u32) -> Vec<u8> {
    let mut name = format!("{number:08}").into_bytes();
    name.resize(250, b'-');
    name
}

/// Links `count` names to one file, so that the inode table does not matter.
fn fill(dir: &InodeRef, file: &InodeRef, name: impl Fn(u32) -> Vec<u8>, count: u32) -> Option<u32> {
    for number in 0..count {
        match dir.link(file, &name(number)) {
            Ok(()) => {}
            Err(error) if error.is(Errno::NOSPC) => return Some(number),
            Err(error) => panic!("link {number}: {error}"),
        }
    }
    None
}

fn kernel_names(image: &Image, dir: &str) -> BTreeSet<Vec<u8>> {
    let mount = KernelMount::new(image.path(), "ro").expect("kernel mount");
    let listing = std::fs::read_dir(mount.path().join(dir)).expect("read_dir");
    let names = listing.map(|e| e.expect("entry").file_name().as_bytes().to_vec()).collect();
    mount.unmount().expect("unmount");
    names
}

fn many(fs: &Fs, dir: &str) -> (InodeRef, Vec<InodeRef>) {
    let root = fs.root().expect("root");
    let files = (0..4).map(|number| {
        let name = format!("{dir}-{number}");
        root.create(name.as_bytes(), 0o644, &root_cred()).expect("create")
    });
    let files = files.collect();
    (root.mkdir(dir.as_bytes(), 0o755, &root_cred()).expect("mkdir"), files)
}

/// Fills a directory over several files (65,000 links each), checks it, removes at random.
fn grow_and_shrink(mke2fs: &[&str], count: u32) {
    let image = Image::new(256, mke2fs);
    let fs = image.open();
    let (dir, files) = many(&fs, "many");
    let file = |number: u32| &files[number as usize / 60_000];
    for number in 0..count {
        dir.link(file(number), &long_name(number)).expect("link");
    }
    assert_eq!(errno(&dir.link(&files[0], &long_name(7))), Errno::EXIST.raw_os_error());
    for number in (0..count).step_by(97) {
        let found = dir.lookup(&long_name(number)).expect("lookup");
        assert_eq!(found.ino(), file(number).ino());
    }
    assert_eq!(errno(&dir.lookup(&long_name(count))), Errno::NOENT.raw_os_error());
    assert_eq!(names(&dir).len(), count as usize);
    drop((dir, files));
    finish(fs);
    image.check();
    let expected: BTreeSet<Vec<u8>> = (0..count).map(long_name).collect();
    assert!(kernel_names(&image, "many") == expected, "Linux lists other names");

    let seed = seed_from_env("grow_and_shrink", 3);
    let mut rng = Rng::new(seed);
    let fs = image.open();
    let dir = fs.root().expect("root").lookup(b"many").expect("lookup");
    let mut left: BTreeSet<u32> = (0..count).collect();
    for number in 0..count {
        if rng.percent(70) {
            dir.unlink(&long_name(number)).expect("unlink");
            left.remove(&number);
        }
    }
    let expected: BTreeSet<Vec<u8>> = left.iter().copied().map(long_name).collect();
    let listed: BTreeSet<Vec<u8>> = names(&dir).into_iter().map(|(name, _)| name).collect();
    assert!(listed == expected, "other names are left than should be");
    drop(dir);
    finish(fs);
    image.check();
    assert!(kernel_names(&image, "many") == expected, "Linux lists other names");
}

#[test]
fn two_levels() {
    grow_and_shrink(&["-t", "ext4", "-b", "1024"], 5_000);
}

#[test]
fn two_levels_without_checksums_in_4k() {
    grow_and_shrink(&["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"], 12_000);
}

#[test]
fn three_levels_with_large_dir() {
    grow_and_shrink(&["-t", "ext4", "-b", "1024", "-O", "large_dir"], 60_000);
}

#[test]
fn every_hash() {
    for hash in ["legacy", "half_md4", "tea"] {
        let image = Image::new(64, &["-t", "ext4", "-b", "1024"]);
        let tune = fjord_testkit::tools::command("tune2fs").expect("tune2fs");
        let mut tune = tune;
        tune.args(["-E", &format!("hash_alg={hash}")]).arg(image.path());
        fjord_testkit::tools::run(&mut tune).expect("tune2fs").ok().expect("tune2fs");
        let fs = image.open();
        let (dir, files) = many(&fs, "many");
        // Bytes over 0x7f tell signed hashes from unsigned ones.
        let name = |number: u32| {
            let mut name = number.to_string().into_bytes();
            name.iter_mut().for_each(|byte| *byte |= 0x80);
            name
        };
        assert_eq!(fill(&dir, &files[0], name, 20_000), None);
        for number in (0..20_000).step_by(31) {
            dir.lookup(&name(number)).expect("lookup");
        }
        assert_eq!(names(&dir).len(), 20_000, "{hash}");
        drop((dir, files));
        finish(fs);
        image.check();
    }
}

/// A tree of two levels that is full gives ENOSPC and stays whole.
#[test]
fn full_index_is_enospc() {
    let image = Image::new(256, &["-t", "ext4", "-b", "1024"]);
    let fs = image.open();
    let (dir, files) = many(&fs, "many");
    let mut stopped = None;
    for number in 0..120_000u32 {
        match dir.link(&files[number as usize / 60_000], &long_name(number)) {
            Ok(()) => {}
            Err(error) if error.is(Errno::NOSPC) => {
                stopped = Some(number);
                break;
            }
            Err(error) => panic!("link {number}: {error}"),
        }
    }
    let stopped = stopped.expect("two levels of 1 KiB blocks hold less than that");
    assert_eq!(names(&dir).len(), stopped as usize);
    drop((dir, files));
    finish(fs);
    image.check();
}

/// What Linux made, fjord reads and goes on with.
#[test]
fn goes_on_with_what_linux_made() {
    let image = Image::new(128, &["-t", "ext4", "-b", "1024"]);
    let mount = KernelMount::new(image.path(), "rw").expect("kernel mount");
    std::fs::create_dir(mount.path().join("many")).expect("mkdir");
    std::fs::write(mount.path().join("file"), b"x").expect("write");
    for number in 0..3000 {
        let path = mount.path().join("many").join(format!("linux-{number}"));
        std::fs::hard_link(mount.path().join("file"), path).expect("link");
    }
    mount.unmount().expect("unmount");
    let fs = image.open();
    let root = fs.root().expect("root");
    let (dir, file) = (root.lookup(b"many").expect("dir"), root.lookup(b"file").expect("file"));
    assert_eq!(names(&dir).len(), 3000);
    for number in 0..3000 {
        dir.lookup(format!("linux-{number}").as_bytes()).expect("lookup");
        dir.link(&file, format!("fjord-{number}").as_bytes()).expect("link");
    }
    for number in (0..3000).step_by(2) {
        dir.unlink(format!("linux-{number}").as_bytes()).expect("unlink");
    }
    assert_eq!(names(&dir).len(), 4500);
    drop((root, dir, file));
    finish(fs);
    image.check();
    assert_eq!(kernel_names(&image, "many").len(), 4500);
}

#[test]
fn two_hundred_thousand_files() {
    const COUNT: u32 = 200_000;
    let image = Image::new(512, &["-t", "ext4", "-N", "220000"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let dir = root.mkdir(b"many", 0o755, &root_cred()).expect("mkdir");
    let name = |number: u32| format!("file-{number:07}").into_bytes();
    let timed = |what: &str, run: &mut dyn FnMut()| {
        let start = Instant::now();
        run();
        let micros = start.elapsed().as_micros() as f64 / f64::from(COUNT);
        println!("{what}: {micros:.2} µs each");
    };
    timed("create", &mut || {
        for number in 0..COUNT {
            dir.create(&name(number), 0o644, &root_cred()).expect("create");
        }
    });
    timed("lookup", &mut || {
        for number in 0..COUNT {
            dir.lookup(&name(number)).expect("lookup");
        }
    });
    timed("read_dir", &mut || assert_eq!(names(&dir).len(), COUNT as usize));
    drop((dir, root));
    finish(fs);
    image.check();
    let fs = image.open();
    let dir = fs.root().expect("root").lookup(b"many").expect("lookup");
    timed("unlink", &mut || {
        for number in 0..COUNT {
            dir.unlink(&name(number)).expect("unlink");
        }
    });
    drop(dir);
    fs.root().expect("root").rmdir(b"many").expect("rmdir");
    finish(fs);
    image.check();
    let empty = image::debugfs(image.path(), "ls /").expect("debugfs");
    assert!(!empty.contains("many"));
}
