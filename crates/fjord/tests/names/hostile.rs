//! Damaged directories and attributes: typed errors, never a panic, never a hang.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use fjord::{Fs, MountOptions, RenameFlags, XattrFlags};
use fjord_testkit::image;
use fjord_testkit::rng::{Rng, seed_from_env};

use crate::support::{Image, Watchdog, finish, root_cred};

const BLOCK_BYTES: u64 = 1024;

fn prepare(mke2fs: &[&str]) -> (Image, Vec<u64>) {
    let image = Image::new(32, mke2fs);
    let fs = image.open();
    let root = fs.root().expect("root");
    let file = root.create(b"file", 0o644, &root_cred()).expect("create");
    let dir = root.mkdir(b"dir", 0o755, &root_cred()).expect("mkdir");
    for number in 0..900 {
        dir.link(&file, format!("name-{number}-{}", "x".repeat(number % 100)).as_bytes())
            .expect("link");
    }
    let flat = root.mkdir(b"flat", 0o755, &root_cred()).expect("mkdir");
    flat.mkdir(b"below", 0o755, &root_cred()).expect("mkdir");
    flat.link(&file, b"link").expect("link");
    file.set_xattr(b"user.one", &[b'1'; 50], XattrFlags::empty()).expect("set");
    file.set_xattr(b"user.two", &[b'2'; 500], XattrFlags::empty()).expect("set");
    drop((root, file, dir, flat));
    finish(fs);
    let mut blocks = Vec::new();
    for path in ["/", "/dir", "/flat"] {
        let list = image::debugfs(image.path(), &format!("blocks {path}")).expect("debugfs");
        blocks.extend(list.split_whitespace().filter_map(|word| word.parse::<u64>().ok()));
    }
    let stat = image::debugfs(image.path(), "stat /file").expect("debugfs");
    let acl = stat.split("File ACL:").nth(1).and_then(|rest| rest.split_whitespace().next());
    blocks.extend(acl.and_then(|word| word.parse::<u64>().ok()).filter(|block| *block != 0));
    blocks.retain(|block| *block != 0);
    (image, blocks)
}

/// Everything that reads or changes names; results do not matter.
fn exercise(fs: &Fs, rng: &mut Rng) {
    let cred = root_cred();
    let Ok(root) = fs.root() else { return };
    let _ = root.read_dir(0, &mut |_| true);
    for name in [&b"dir"[..], b"flat", b"file", b"flat/below"] {
        let Ok(dir) = root.lookup(name) else { continue };
        let mut count = 0u32;
        let _ = dir.read_dir(0, &mut |_| {
            count += 1;
            count < 100_000
        });
        let _ = dir.lookup(b"..");
        for number in 0..20u64 {
            let number = if number < 10 { rng.below(900) } else { number };
            let name = format!("name-{number}-{}", "x".repeat(number as usize % 100));
            let _ = dir.lookup(name.as_bytes());
            let _ = dir.create(format!("new-{number}").as_bytes(), 0o644, &cred);
            let _ = dir.unlink(name.as_bytes());
        }
        let _ = dir.rename(b"below", &root, b"moved", RenameFlags::empty(), &cred);
        let _ = root.rename(b"moved", &dir, b"below", RenameFlags::EXCHANGE, &cred);
        let _ = dir.rmdir(b"below");
        let _ = dir.list_xattr();
        let _ = dir.get_xattr(b"user.two");
        let _ = dir.set_xattr(b"user.two", b"2", XattrFlags::empty());
    }
    let _ = root.rename(b"flat", &root, b"dir", RenameFlags::empty(), &cred);
    let _ = root.rmdir(b"flat");
    let _ = root.unlink(b"file");
}

fn mutate(mke2fs: &[&str], rounds: u32) {
    let _watchdog = Watchdog::new("mutations", 600);
    let seed = seed_from_env("hostile names", 23);
    let mut rng = Rng::new(seed);
    let (image, blocks) = prepare(mke2fs);
    assert!(!blocks.is_empty());
    let good = std::fs::read(image.path()).expect("read");
    let file = OpenOptions::new().write(true).open(image.path()).expect("open");
    for round in 0..rounds {
        // Whatever the last round did, the image is whole again.
        file.write_all_at(&good, 0).expect("write");
        for _ in 0..1 + rng.below(3) {
            let block = *rng.pick(&blocks);
            // Heads of blocks hold what matters most.
            let span = if rng.percent(60) { 64 } else { BLOCK_BYTES };
            let at = block * BLOCK_BYTES + rng.below(span);
            let values = [rng.next_u64() as u8, 0, 0xff, 1, 0x80];
            file.write_all_at(&[*rng.pick(&values)], at).expect("write");
        }
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        let Ok(fs) = Fs::open(image.path(), &options) else { continue };
        exercise(&fs, &mut rng);
        if round % 5 == 0 {
            let _ = fs.sync();
        }
        let _ = fs.unmount();
    }
}

#[test]
fn mutated_directories() {
    mutate(&["-t", "ext4", "-b", "1024", "-N", "512", "-O", "^metadata_csum"], 150);
}

#[test]
fn mutated_directories_with_checksums() {
    mutate(&["-t", "ext4", "-b", "1024", "-N", "512"], 40);
}

#[test]
fn mutated_linear_directories() {
    mutate(&["-t", "ext2", "-b", "1024", "-N", "512", "-O", "^dir_index"], 80);
}
