//! Threads against each other: one winner per name, no deadlock, no cycle.

use std::sync::atomic::{AtomicU32, Ordering};

use fjord::{InodeRef, RenameFlags};
use fjord_testkit::rng::{Rng, seed_from_env};
use rustix::io::Errno;

use crate::support::{Image, Watchdog, finish, names, root_cred};

#[test]
fn one_creator_wins() {
    let _watchdog = Watchdog::new("creators", 300);
    let image = Image::new(64, &["-t", "ext4"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let wins = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (root, wins) = (&root, &wins);
            scope.spawn(move || {
                for number in 0..500 {
                    let name = format!("name-{number}");
                    let made = match thread % 2 {
                        0 => root.create(name.as_bytes(), 0o644, &root_cred()),
                        _ => root.mkdir(name.as_bytes(), 0o755, &root_cred()),
                    };
                    match made {
                        Ok(_) => {
                            wins.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => assert!(error.is(Errno::EXIST), "{error}"),
                    }
                    root.lookup(name.as_bytes()).expect("somebody made it");
                }
            });
        }
    });
    assert_eq!(wins.load(Ordering::Relaxed), 500);
    drop(root);
    finish(fs);
    image.check();
}

/// Directories that are moved into each other by several threads, with removals and lookups.
#[test]
fn renames_never_make_a_cycle() {
    let _watchdog = Watchdog::new("renames", 300);
    let seed = seed_from_env("renames", 11);
    let image = Image::new(64, &["-t", "ext4", "-O", "inline_data"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let random_dir = |rng: &mut Rng| -> InodeRef {
        let mut dir = root.clone();
        for _ in 0..rng.below(5) {
            let name = format!("d{}", rng.below(6));
            match dir.lookup(name.as_bytes()) {
                Ok(below) if below.attr().kind() == fjord::FileKind::Directory => dir = below,
                Ok(_) | Err(_) => break,
            }
        }
        dir
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let random_dir = &random_dir;
            scope.spawn(move || {
                let mut rng = Rng::new(seed + thread);
                for _ in 0..4000 {
                    let (from, to) = (random_dir(&mut rng), random_dir(&mut rng));
                    let old = format!("d{}", rng.below(6));
                    let new = format!("d{}", rng.below(6));
                    let result = match rng.below(10) {
                        0..3 => from.mkdir(old.as_bytes(), 0o755, &root_cred()).map(drop),
                        3 => from.create(old.as_bytes(), 0o644, &root_cred()).map(drop),
                        4 => from.rmdir(old.as_bytes()),
                        5 => from.unlink(old.as_bytes()),
                        6 => from.read_dir(0, &mut |_| true),
                        kind => {
                            let flags = match kind {
                                7 => RenameFlags::EXCHANGE,
                                _ => RenameFlags::empty(),
                            };
                            from.rename(old.as_bytes(), &to, new.as_bytes(), flags, &root_cred())
                        }
                    };
                    if let Err(error) = result {
                        assert!(!error.is_corrupt(), "{error}");
                    }
                }
            });
        }
    });
    drop(root);
    finish(fs);
    image.check();
}

/// Links, unlinks and renames of the same few files from several threads.
#[test]
fn links_are_counted_right() {
    let _watchdog = Watchdog::new("links", 300);
    let seed = seed_from_env("links", 13);
    let image = Image::new(64, &["-t", "ext4", "-b", "1024"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    for dir in ["a", "b"] {
        root.mkdir(dir.as_bytes(), 0o755, &root_cred()).expect("mkdir");
    }
    let dirs = [root.lookup(b"a").expect("a"), root.lookup(b"b").expect("b")];
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let dirs = &dirs;
            scope.spawn(move || {
                let mut rng = Rng::new(seed + thread);
                for _ in 0..4000 {
                    let (from, to) = (&dirs[rng.below(2) as usize], &dirs[rng.below(2) as usize]);
                    let old = format!("f{}", rng.below(8));
                    let new = format!("f{}", rng.below(8));
                    let result = match rng.below(6) {
                        0 => from.create(old.as_bytes(), 0o644, &root_cred()).map(drop),
                        1 => from.unlink(old.as_bytes()),
                        2 => from
                            .lookup(old.as_bytes())
                            .and_then(|file| to.link(&file, new.as_bytes())),
                        3 => from.tmpfile(0o600, &root_cred()).and_then(|file| {
                            file.write(0, b"content")?;
                            to.link(&file, new.as_bytes())
                        }),
                        _ => {
                            let flags = RenameFlags::from_bits_truncate(rng.below(5) as u32);
                            from.rename(old.as_bytes(), to, new.as_bytes(), flags, &root_cred())
                        }
                    };
                    if let Err(error) = result {
                        assert!(!error.is_corrupt(), "{error}");
                    }
                }
            });
        }
    });
    for dir in &dirs {
        for (name, _) in names(dir) {
            dir.lookup(&name).expect("a listed name is found");
        }
    }
    drop((dirs, root));
    finish(fs);
    image.check();
}
