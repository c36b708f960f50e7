//! Listing while others change the directory: each name that stays is given exactly once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use fjord::InodeRef;
use fjord_testkit::rng::{Rng, seed_from_env};

use crate::support::{Image, Watchdog, finish, root_cred};

/// Lists in portions of `portion`, going on by cookie, and counts each name.
fn list_in_portions(dir: &InodeRef, portion: usize) -> BTreeMap<Vec<u8>, u32> {
    let mut seen = BTreeMap::new();
    let mut cookie = 0;
    loop {
        let mut taken = 0;
        dir.read_dir(cookie, &mut |entry| {
            if taken == portion {
                return false;
            }
            taken += 1;
            assert!(entry.next_cookie > cookie, "cookies rise");
            assert!(i64::try_from(entry.next_cookie).is_ok());
            cookie = entry.next_cookie;
            *seen.entry(entry.name.to_vec()).or_insert(0) += 1;
            true
        })
        .expect("read_dir");
        if taken == 0 {
            return seen;
        }
    }
}

fn stable_names_once(mke2fs: &[&str], stable: u32, passing: u32) {
    let _watchdog = Watchdog::new("listing", 300);
    let seed = seed_from_env("cookies", 5);
    let image = Image::new(64, mke2fs);
    let fs = image.open();
    let root = fs.root().expect("root");
    let file = root.create(b"file", 0o644, &root_cred()).expect("create");
    let dir = root.mkdir(b"dir", 0o755, &root_cred()).expect("mkdir");
    for number in 0..stable {
        dir.link(&file, format!("stays-{number}").as_bytes()).expect("link");
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(seed);
            let mut there = vec![false; passing as usize];
            while !stop.load(Ordering::Relaxed) {
                let number = rng.below(u64::from(passing)) as usize;
                let name = format!("passing-{number}-{}", "p".repeat(number % 90));
                if there[number] {
                    dir.unlink(name.as_bytes()).expect("unlink");
                } else {
                    dir.link(&file, name.as_bytes()).expect("link");
                }
                there[number] = !there[number];
            }
        });
        for round in 0..30 {
            let seen = list_in_portions(&dir, 1 + round % 7);
            for number in 0..stable {
                let name = format!("stays-{number}").into_bytes();
                assert_eq!(seen.get(&name), Some(&1), "round {round}: {number}");
            }
            assert_eq!(seen.get(&b"."[..]), Some(&1));
            assert_eq!(seen.get(&b".."[..]), Some(&1));
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop((dir, file, root));
    finish(fs);
    image.check();
}

#[test]
fn indexed() {
    stable_names_once(&["-t", "ext4", "-b", "1024"], 500, 500);
}

#[test]
fn one_block_becomes_indexed() {
    stable_names_once(&["-t", "ext4"], 60, 300);
}

#[test]
fn linear() {
    stable_names_once(&["-t", "ext4", "-b", "1024", "-O", "^dir_index"], 200, 100);
}

#[test]
fn inline_becomes_block_becomes_indexed() {
    stable_names_once(&["-t", "ext4", "-b", "1024", "-O", "inline_data"], 2, 300);
}

#[test]
fn inline_linear() {
    stable_names_once(&["-t", "ext4", "-O", "inline_data,^dir_index"], 2, 2);
}
