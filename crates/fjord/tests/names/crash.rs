//! The image as it is at some moment, recovered by fjord, by Linux and by e2fsck: whole, and
//! with everything that was synced.

use std::path::Path;

use fjord::{
    AreaLayout, Error, Fs, FsyncPolicyKind, InodeRef, MountOptions, RenameFlags, SetAttr,
    XattrFlags,
};
use fjord_testkit::image::{self, KernelMount};
use fjord_testkit::manifest::{Compare, Manifest};
use fjord_testkit::rng::{Rng, seed_from_env};
use fjord_testkit::tools;

use crate::support::{Image, finish, names, root_cred};

/// One random operation below the root's directories; refusals do not matter.
fn step(fs: &Fs, rng: &mut Rng) -> Result<(), Error> {
    let cred = root_cred();
    let root = fs.root()?;
    let pick = |rng: &mut Rng| -> Result<InodeRef, Error> {
        let mut dir = root.lookup(format!("top{}", rng.below(3)).as_bytes())?;
        for _ in 0..rng.below(3) {
            let list = names(&dir);
            let Some((name, _)) = list.get(rng.below(list.len() as u64) as usize) else { break };
            let below = dir.lookup(name)?;
            if below.attr().kind() == fjord::FileKind::Directory {
                dir = below;
            }
        }
        Ok(dir)
    };
    let (dir, other) = (pick(rng)?, pick(rng)?);
    let name = |rng: &mut Rng| {
        let number = rng.below(60);
        format!("n{number}-{}", "x".repeat((number * 4) as usize)).into_bytes()
    };
    let (old, new) = (name(rng), name(rng));
    match rng.below(12) {
        0..3 => {
            let file = dir.create(&old, 0o644, &cred)?;
            file.write(0, &vec![b'd'; rng.below(3000) as usize]).map(drop)
        }
        3 | 4 => dir.mkdir(&old, 0o755, &cred).map(drop),
        5 => dir.unlink(&old).or_else(|_| dir.rmdir(&old)),
        6 => dir.lookup(&old).and_then(|file| other.link(&file, &new)),
        7 => dir.symlink(&old, &vec![b't'; 1 + rng.below(200) as usize], &cred).map(drop),
        8 => {
            let value = vec![b'v'; rng.below(700) as usize];
            dir.lookup(&old)?.set_xattr(b"user.x", &value, XattrFlags::empty())
        }
        kind => {
            let flags = match kind {
                9 => RenameFlags::EXCHANGE,
                10 => RenameFlags::WHITEOUT,
                _ => RenameFlags::empty(),
            };
            dir.rename(&old, &other, &new, flags, &cred)
        }
    }
}

/// Recovers a copy by fjord and another by Linux; both must be whole and, where `expected` is
/// given, show that tree.
fn judge(image: &Path, scratch: &Path, expected: Option<&Manifest>) {
    let (ours, theirs) = (scratch.join("ours"), scratch.join("theirs"));
    for copy in [&ours, &theirs] {
        image::copy_sparse(image, copy).expect("copy");
    }
    let fs = Fs::open(&ours, &MountOptions::default()).expect("fjord recovers");
    finish(fs);
    image::e2fsck_clean(&ours).expect("whole after fjord's recovery");
    let mount = KernelMount::new(&theirs, "rw").expect("Linux recovers");
    mount.unmount().expect("unmount");
    image::e2fsck_clean(&theirs).expect("whole after Linux's recovery");
    let read = |path: &Path| {
        let mount = KernelMount::new(path, "ro").expect("kernel mount");
        let manifest = Manifest::from_directory(mount.path()).expect("manifest");
        mount.unmount().expect("unmount");
        manifest
    };
    let ours = read(&ours);
    // Reading the tree touched access times after the sync.
    let compare = Compare { atime: false, ..Compare::SAME_IMAGE };
    ours.diff(&read(&theirs), &compare).ok("fjord", "Linux").expect("the same tree");
    if let Some(expected) = expected {
        expected.diff(&ours, &compare).ok("synced", "recovered").expect("nothing was lost");
    }
}

fn crash_at_random(mke2fs: &[&str]) {
    let seed = seed_from_env("crash", 29);
    let mut rng = Rng::new(seed);
    let image = Image::new(48, mke2fs);
    let fs = image.open();
    let root = fs.root().expect("root");
    for number in 0..3 {
        root.mkdir(format!("top{number}").as_bytes(), 0o755, &root_cred()).expect("mkdir");
    }
    drop(root);
    let scratch = fjord_testkit::image::Scratch::in_memory("crash").expect("scratch");
    for round in 0..12 {
        for _ in 0..150 + rng.below(300) {
            if let Err(error) = step(&fs, &mut rng) {
                assert!(!error.is_corrupt(), "round {round}: {error}");
            }
        }
        if round % 2 == 0 {
            fs.sync().expect("sync");
            let expected = Manifest::from_fjord(&fs).expect("manifest");
            judge(image.path(), scratch.path(), Some(&expected));
        } else {
            judge(image.path(), scratch.path(), None);
        }
    }
    finish(fs);
    image.check();
}

/// Where the second sector of the superblock begins and ends in an image, in bytes.
const SECOND_SECTOR: std::ops::Range<usize> = 1536..2048;

fn second_sector(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("the image")[SECOND_SECTOR].to_vec()
}

/// A file that is open and has no name any more, so that the superblock has changed, and is in the log.
fn with_orphan(image: &Image, look: impl FnOnce(&Image)) {
    let fs = image.open();
    let root = fs.root().expect("root");
    let file = root.create(b"open", 0o644, &root_cred()).expect("create");
    root.unlink(b"open").expect("unlink");
    fs.sync().expect("sync");
    look(image);
    drop((file, root));
    finish(fs);
    image.check();
}

/// One sector is whole after a power cut, two are not.
#[test]
fn the_superblock_changes_in_its_first_sector() {
    for features in ["^orphan_file", "orphan_file", "^metadata_csum"] {
        let image = Image::new(48, &["-t", "ext4", "-b", "1024", "-O", features]);
        let before = second_sector(image.path());
        with_orphan(&image, |image| {
            assert_eq!(second_sector(image.path()), before, "{features}, mounted");
        });
        assert_eq!(second_sector(image.path()), before, "{features}, unmounted");
        let mount = KernelMount::new(image.path(), "rw").expect("Linux mounts it");
        mount.unmount().expect("unmount");
        image.check();
    }
}

/// `e2fsck -p` leaves the numbers of deleted orphans in the orphan file; Linux, too, and says that it is
/// empty.
#[test]
fn an_orphan_file_that_e2fsck_emptied_is_empty() {
    emptied_by_e2fsck(|_| ());
    emptied_by_e2fsck(|preened| {
        KernelMount::new(preened, "rw").and_then(KernelMount::unmount).expect("Linux mounts it");
    });
}

fn emptied_by_e2fsck(then: impl FnOnce(&Path)) {
    let scratch = fjord_testkit::image::Scratch::in_memory("preened").expect("scratch");
    let preened = scratch.join("preened");
    // Of one group: where there is a backup of the superblock, it differs, and all is checked.
    let image = Image::new(48, &["-t", "ext4", "-b", "4096", "-O", "orphan_file"]);
    with_orphan(&image, |image| image::copy_sparse(image.path(), &preened).expect("copy"));
    let mut e2fsck = tools::command("e2fsck").expect("e2fsck");
    let said = tools::run(e2fsck.arg("-p").arg(&preened)).expect("it runs");
    said.expect_code(&[0, 1]).expect("e2fsck -p");
    let slots = || {
        let mut debugfs = tools::command("debugfs").expect("debugfs");
        let dump = tools::run(debugfs.args(["-R", "cat <12>"]).arg(&preened)).expect("debugfs");
        dump.stdout.bytes().take(16).filter(|&byte| byte != 0).count()
    };
    assert_ne!(slots(), 0, "this e2fsck clears them: the test has lost its point");
    then(&preened);
    let fs = Fs::open(&preened, &MountOptions::default()).expect("fjord mounts it");
    // With the number of the orphan that was.
    let root = fs.root().expect("root");
    let file = root.create(b"new", 0o644, &root_cred()).expect("create");
    file.write(0, b"content").expect("write");
    fs.sync().expect("sync");
    drop((file, root));
    finish(fs);
    assert_eq!(slots(), 0);
    image::e2fsck_clean(&preened).expect("whole");
}

/// As Linux does, whoever makes the first file of 2 GiB.
#[test]
fn a_large_file_is_announced() {
    const SIZE: u64 = 6 << 30;
    for &policy in FsyncPolicyKind::ALL {
        let features = "^large_file,^resize_inode,fast_commit";
        let image = Image::new(48, &["-t", "ext4", "-b", "4096", "-O", features]);
        let large_file = || {
            let bytes = std::fs::read(image.path()).expect("the image");
            bytes[1024 + 0x64] & 2 != 0
        };
        assert!(!large_file());
        if policy == FsyncPolicyKind::Ijournal {
            let fs = image.open();
            fs.set_ijournal_areas(Some(AreaLayout { count: 1, area_bytes: 1 << 20 }))
                .expect("there is room");
            finish(fs);
        }
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        let options = MountOptions { fsync: policy, ..options };
        let fs = Fs::open(image.path(), &options).expect("the image opens");
        let root = fs.root().expect("root");
        let file = root.create(b"large", 0o644, &root_cred()).expect("create");
        fs.sync().expect("sync");
        let change = SetAttr { size: Some(SIZE), ..SetAttr::default() };
        file.set_attr(&change, &root_cred()).expect("truncate");
        file.fsync(false).expect("fsync");
        let scratch = fjord_testkit::image::Scratch::in_memory("large").expect("scratch");
        if policy == FsyncPolicyKind::Ijournal {
            let copy = scratch.join("copy");
            image::copy_sparse(image.path(), &copy).expect("copy");
            finish(Fs::open(&copy, &MountOptions::default()).expect("fjord recovers"));
            image::e2fsck_clean(&copy).expect("whole after fjord's recovery");
        } else {
            judge(image.path(), scratch.path(), None);
        }
        drop((file, root));
        finish(fs);
        assert!(large_file(), "{policy:?}");
        image.check();
    }
}

/// Replay of a log of Linux, whose superblock has another checksum, keeps to the first sector too.
#[test]
fn the_superblock_of_another_is_replayed_in_its_first_sector() {
    let scratch = fjord_testkit::image::Scratch::in_memory("theirs").expect("scratch");
    for block_size in ["1024", "4096"] {
        let dirty = scratch.join(block_size);
        let image = Image::new(48, &["-t", "ext4", "-b", block_size, "-O", "^orphan_file"]);
        let mount = KernelMount::new(image.path(), "rw").expect("kernel mount");
        let name = mount.path().join("open");
        let file = std::fs::File::create(&name).expect("create");
        std::fs::remove_file(name).expect("unlink");
        // Unlike syncfs, this leaves the superblock in the log.
        file.sync_all().expect("fsync");
        image::copy_sparse(image.path(), &dirty).expect("copy");
        drop(file);
        mount.unmount().expect("unmount");
        let before = second_sector(&dirty);
        let fs = Fs::open(&dirty, &MountOptions::default()).expect("fjord recovers");
        assert_eq!(fs.superblock().s_last_orphan.get(), 0, "completed");
        assert_eq!(second_sector(&dirty), before, "{block_size}, replayed");
        finish(fs);
        assert_eq!(second_sector(&dirty), before, "{block_size}, unmounted");
        image::e2fsck_clean(&dirty).expect("whole after fjord's recovery");
    }
}

/// Others write both sectors, and may tear them.
#[test]
fn a_torn_superblock_is_found_whole_in_the_log() {
    let scratch = fjord_testkit::image::Scratch::in_memory("torn").expect("scratch");
    let torn = scratch.join("torn");
    let image = Image::new(48, &["-t", "ext4", "-b", "1024", "-O", "^orphan_file"]);
    with_orphan(&image, |image| {
        let mut bytes = std::fs::read(image.path()).expect("the image");
        bytes[SECOND_SECTOR.end - 1] ^= 0xff;
        std::fs::write(&torn, bytes).expect("a copy");
    });
    let read_only = MountOptions { read_only: true, ..MountOptions::default() };
    let error = Fs::open(&torn, &read_only).expect_err("nothing is replayed");
    assert!(error.is_corrupt(), "{error}");
    finish(Fs::open(&torn, &MountOptions::default()).expect("fjord recovers"));
    image::e2fsck_clean(&torn).expect("whole after fjord's recovery");
}

#[test]
fn default_features() {
    crash_at_random(&["-t", "ext4", "-b", "1024"]);
}

#[test]
fn inline_data_and_value_inodes() {
    crash_at_random(&["-t", "ext4", "-b", "1024", "-O", "inline_data,ea_inode,orphan_file"]);
}

#[test]
fn ext3() {
    crash_at_random(&["-t", "ext3", "-b", "1024"]);
}
