//! No space in the middle of every operation: nothing is lost, nothing is half done.

use fjord::{Error, Fs, InodeRef, RenameFlags, XattrFlags};
use fjord_testkit::rng::{Rng, seed_from_env};
use rustix::io::Errno;

use crate::support::{Image, finish, names, root_cred};

/// Fills the image with one file, but for about `keep` blocks.
fn fill_up(fs: &Fs, name: &str, keep: u64) {
    let root = fs.root().expect("root");
    let file = root.create(name.as_bytes(), 0o644, &root_cred()).expect("create");
    let stat = fs.statfs();
    let want = stat.blocks_free.saturating_sub(keep) * u64::from(stat.block_size);
    let chunk = vec![7u8; 64 << 10];
    let mut at = 0;
    while at < want {
        let len = chunk.len().min((want - at) as usize);
        match file.write(at, &chunk[..len]) {
            Ok(count) => at += count as u64,
            Err(error) if error.is(Errno::NOSPC) => break,
            Err(error) => panic!("write: {error}"),
        }
    }
    let _ = file.fsync(false);
    // Freed blocks come back with their commit.
    fs.sync().expect("sync");
}

fn step(rng: &mut Rng, dir: &InodeRef, other: &InodeRef, number: u32) -> Result<(), Error> {
    let cred = root_cred();
    let long = "n".repeat(150 + rng.below(90) as usize);
    let name = format!("{number}-{long}").into_bytes();
    let name = &name[..name.len().min(250)];
    match rng.below(9) {
        0 | 1 => dir.create(name, 0o644, &cred).map(drop),
        2 | 3 => dir.mkdir(name, 0o755, &cred).map(drop),
        4 => dir.symlink(name, &[b't'; 300], &cred).map(drop),
        5 => {
            let file = dir.create(name, 0o644, &cred)?;
            file.set_xattr(b"user.big", &[b'v'; 600], XattrFlags::empty())
        }
        6 => {
            let list = names(dir);
            let Some((old, _)) = list.get(rng.below(list.len() as u64) as usize) else {
                return Ok(());
            };
            dir.rename(old, other, name, RenameFlags::WHITEOUT, &cred)
        }
        7 => {
            let list = names(other);
            let Some((old, _)) = list.get(rng.below(list.len() as u64) as usize) else {
                return Ok(());
            };
            other.rename(old, dir, name, RenameFlags::empty(), &cred)
        }
        _ => {
            let list = names(dir);
            let Some((old, _)) = list.get(rng.below(list.len() as u64) as usize) else {
                return Ok(());
            };
            let file = dir.lookup(old)?;
            if file.attr().kind() == fjord::FileKind::Directory {
                return dir.rmdir(old);
            }
            dir.link(&file, name)
        }
    }
}

fn squeeze(mke2fs: &[&str], mib: u64) {
    let seed = seed_from_env("squeeze", 17);
    let mut rng = Rng::new(seed);
    for keep in [0, 1, 2, 3, 5, 8, 20] {
        let image = Image::new(mib, mke2fs);
        let fs = image.open();
        let root = fs.root().expect("root");
        let dir = root.mkdir(b"dir", 0o755, &root_cred()).expect("mkdir");
        let other = root.mkdir(b"other", 0o755, &root_cred()).expect("mkdir");
        fill_up(&fs, "filler", keep);
        let mut refused = 0;
        for number in 0..400 {
            match step(&mut rng, &dir, &other, number) {
                Ok(()) => {}
                Err(error) if error.is(Errno::NOSPC) => refused += 1,
                Err(error) if error.is(Errno::NOTEMPTY) => {}
                Err(error) => panic!("keep {keep}, step {number}: {error}"),
            }
        }
        assert!(refused > 0, "keep {keep}: there was always room");
        let before = (names(&dir), names(&other));
        drop((dir, other, root));
        finish(fs);
        image.check();
        let fs = image.open();
        let root = fs.root().expect("root");
        let dir = root.lookup(b"dir").expect("dir");
        let other = root.lookup(b"other").expect("other");
        assert_eq!((names(&dir), names(&other)), before);
        drop((dir, other, root));
        finish(fs);
    }
}

#[test]
fn squeeze_1k() {
    squeeze(&["-t", "ext4", "-b", "1024", "-N", "4096"], 24);
}

#[test]
fn squeeze_inline() {
    squeeze(&["-t", "ext4", "-b", "1024", "-N", "4096", "-O", "inline_data,ea_inode"], 24);
}

#[test]
fn squeeze_block_maps() {
    squeeze(&["-t", "ext3", "-b", "1024", "-N", "4096"], 24);
}

#[test]
fn no_inodes_left() {
    let image = Image::new(24, &["-t", "ext4", "-b", "1024", "-N", "64"]);
    let fs = image.open();
    let root = fs.root().expect("root");
    let mut made = 0;
    let last = loop {
        match root.create(format!("f{made}").as_bytes(), 0o644, &root_cred()) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert!(last.is(Errno::NOSPC), "{last}");
    assert!(root.mkdir(b"dir", 0o755, &root_cred()).is_err_and(|error| error.is(Errno::NOSPC)));
    let whiteout = root.rename(b"f0", &root, b"g0", RenameFlags::WHITEOUT, &root_cred());
    assert!(whiteout.is_err_and(|error| error.is(Errno::NOSPC)));
    root.lookup(b"f0").expect("the name stayed");
    drop(root);
    finish(fs);
    image.check();
}
