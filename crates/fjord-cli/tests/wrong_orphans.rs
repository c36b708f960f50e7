//! Records of orphans that cannot be right: fjord mounts where Linux mounts, shows the same tree, and
//! leaves no more for e2fsck than Linux does. Needs root.

use std::{
    fs::OpenOptions,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use fjord_format::{
    features::RoCompat,
    superblock::{FsState, RawSuperblock},
};
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools,
};

fn program() -> PathBuf {
    std::env::var_os("FJORD_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_fjord").into()).into()
}

/// What stands where in the images.
struct Numbers {
    /// A file with blocks past its end.
    long: u32,
    /// Two files without names and links.
    nameless: [u32; 2],
    /// Two files with links.
    linked: [u32; 2],
    /// A short symbolic link.
    link: u32,
    /// An inode that nobody uses.
    free: u32,
    /// The last inode.
    last: u32,
}

/// An image with all that the cases need, clean but for two files without names.
fn base(scratch: &Scratch, features: &str) -> Result<(PathBuf, Numbers)> {
    let img = scratch.join("base.img");
    image::make_sparse(&img, 64 << 20)?;
    let mut mke2fs = tools::command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-O", features]);
    tools::run(mke2fs.args(["-E", "lazy_itable_init=0"]).arg(&img))?.ok()?;
    let mount = KernelMount::new(&img, "rw,noinit_itable")?;
    let number = |name: &str| -> Result<u32> {
        use std::os::unix::fs::MetadataExt;
        Ok(u32::try_from(mount.path().join(name).symlink_metadata()?.ino())?)
    };
    for name in ["long", "a", "b", "c", "d", "z"] {
        std::fs::write(mount.path().join(name), vec![b'x'; 20_000])?;
    }
    std::os::unix::fs::symlink("long", mount.path().join("link"))?;
    let long = OpenOptions::new().write(true).open(mount.path().join("long"))?;
    let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&long, keep, 20_000, 400_000)?;
    drop(long);
    let stat = rustix::fs::statvfs(mount.path())?;
    let numbers = Numbers {
        long: number("long")?,
        nameless: [number("a")?, number("b")?],
        linked: [number("c")?, number("d")?],
        link: number("link")?,
        free: number("z")? + 100,
        last: u32::try_from(stat.f_files)?,
    };
    mount.unmount()?;
    let [a, b] = numbers.nameless;
    let requests = ["unlink /a", "unlink /b"].map(str::to_owned).into_iter();
    let cut = [a, b].map(|ino| format!("sif <{ino}> links_count 0"));
    image::debugfs_write(&img, &requests.chain(cut).collect::<Vec<_>>())?;
    Ok((img, numbers))
}

fn superblock(img: &Path) -> Result<RawSuperblock> {
    let mut bytes = [0; 1024];
    std::fs::File::open(img)?.read_exact_at(&mut bytes, 1024)?;
    Ok(RawSuperblock::decode(&bytes)?)
}

/// Whether the superblock has a note of an error.
fn has_error(img: &Path) -> Result<bool> {
    let raw = superblock(img)?;
    Ok(raw.state().contains(FsState::ERROR) && raw.s_error_count.get() > 0)
}

/// What `e2fsck -fn` finds, by the beginnings of its lines.
fn e2fsck(img: &Path) -> Result<(i32, String)> {
    let out = tools::run(tools::command("e2fsck")?.arg("-fn").arg(img))?;
    Ok((out.code.context("e2fsck was killed")?, out.stdout))
}

/// Mounts copies of `img` by Linux and by fjord, changes something, and compares.
fn compare(scratch: &Scratch, img: &Path, case: &str) -> Result<()> {
    let (linux, ours) = (scratch.join("linux.img"), scratch.join("fjord.img"));
    image::copy_sparse(img, &linux)?;
    image::copy_sparse(img, &ours)?;
    let mount = KernelMount::new(&linux, "rw,noinit_itable").context("Linux")?;
    std::fs::write(mount.path().join("later"), "later")?;
    mount.unmount()?;
    let mount = FjordMount::with_program(&program(), &ours, &[]).context("fjord")?;
    std::fs::write(mount.path().join("later"), "later")?;
    mount.unmount()?;
    ensure!(has_error(&ours)? == has_error(&linux)?, "Linux: error {}", has_error(&linux)?);
    ensure!(superblock(&ours)?.s_last_orphan.get() == 0, "the list is still there");
    let (theirs, ours_found) = (e2fsck(&linux)?, e2fsck(&ours)?);
    println!("{case}: e2fsck {} after Linux, {} after fjord", theirs.0, ours_found.0);
    ensure!(ours_found.0 <= theirs.0, "after fjord:\n{}\nafter Linux:\n{}", ours_found.1, theirs.1);
    image::e2fsck_repair(&linux)?;
    image::e2fsck_repair(&ours)?;
    image::e2fsck_clean(&ours)?;
    same_tree(
        &tree_of_linux(KernelMount::new(&linux, "ro")?)?,
        &tree_of_linux(KernelMount::new(&ours, "ro")?)?,
    )
}

fn tree_of_linux(mount: KernelMount) -> Result<Manifest> {
    let tree = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    Ok(tree)
}

fn same_tree(linux: &Manifest, ours: &Manifest) -> Result<()> {
    // Linux gives a file that it truncates new times.
    let compare = Compare { atime: false, mtime: false, ctime: false, ..Compare::SAME_IMAGE };
    linux.diff(ours, &compare).ok("Linux", "fjord")
}

/// Mounts copies of `img` read-only, which both complete orphans for.
fn compare_read_only(scratch: &Scratch, img: &Path, case: &str) -> Result<()> {
    let (linux, ours) = (scratch.join("linux.img"), scratch.join("fjord.img"));
    image::copy_sparse(img, &linux)?;
    image::copy_sparse(img, &ours)?;
    let theirs = tree_of_linux(KernelMount::recovering_read_only(&linux)?)?;
    let mount = FjordMount::with_program(&program(), &ours, &["-o", "ro"]).context("fjord")?;
    let found = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    same_tree(&theirs, &found)?;
    ensure!(has_error(&ours)? == has_error(&linux)?, "Linux: error {}", has_error(&linux)?);
    let (theirs, found) = (e2fsck(&linux)?, e2fsck(&ours)?);
    println!("{case}, read-only: e2fsck {} after Linux, {} after fjord", theirs.0, found.0);
    ensure!(found.0 <= theirs.0, "after fjord:\n{}\nafter Linux:\n{}", found.1, theirs.1);
    Ok(())
}

#[test]
fn lists() -> Result<()> {
    let scratch = Scratch::in_memory("lists")?;
    let (img, n) = base(&scratch, "^orphan_file")?;
    let ([a, b], [c, d], [long, free]) = (n.nameless, n.linked, [n.long, n.free]);
    let links = |pairs: &[(u32, u32)]| -> Vec<String> {
        pairs.iter().map(|(from, to)| format!("sif <{from}> dtime @{to}")).collect()
    };
    let cut = |ino: u32| vec![format!("sif <{ino}> block[0] 0x1234")];
    // The head, and what follows what.
    let cases: [(&str, u32, Vec<String>); 19] = [
        ("the bad blocks", 1, vec![]),
        ("the journal", 8, vec![]),
        ("lost+found", 11, vec![]),
        ("past the last", n.last + 1, vec![]),
        ("far past the last", u32::MAX, vec![]),
        ("not in use", free, vec![]),
        ("a short symbolic link", n.link, vec![]),
        ("sound", a, links(&[(a, b), (b, long)])),
        ("a file with links", long, vec![]),
        ("one that leads nowhere", a, links(&[(a, n.last + 1)])),
        ("one with links that leads nowhere", c, links(&[(c, n.last + 1)])),
        ("the second not in use", a, links(&[(a, free)])),
        ("the third reserved", a, links(&[(a, c), (c, 2)])),
        ("a loop of itself", a, links(&[(a, a)])),
        ("a loop of two", a, links(&[(a, b), (b, a)])),
        ("a loop of two with links", c, links(&[(c, d), (d, c)])),
        ("a damaged map", a, cut(a)),
        ("a damaged map behind a sound one", b, [links(&[(b, a)]), cut(a)].concat()),
        ("a mixed loop", a, links(&[(a, c), (c, a)])),
    ];
    for (case, head, mut requests) in cases {
        let broken = scratch.join("broken.img");
        image::copy_sparse(&img, &broken)?;
        requests.push(format!("ssv last_orphan {head}"));
        image::debugfs_write(&broken, &requests)?;
        ensure!(superblock(&broken)?.s_last_orphan.get() == head, "{case}: debugfs did not");
        compare(&scratch, &broken, case).context(case)?;
        compare_read_only(&scratch, &broken, case).context(case)?;
    }
    Ok(())
}

/// Damage that shows only while an orphan's blocks are being freed.
#[test]
fn an_orphan_that_cannot_be_freed() -> Result<()> {
    let scratch = Scratch::in_memory("unfreed")?;
    let (img, n) = base(&scratch, "^orphan_file")?;
    let a = n.nameless[0];
    let blocks = image::debugfs(&img, &format!("blocks <{a}>"))?;
    let block = blocks.split_whitespace().nth(1).context("a block")?;
    image::debugfs_write(&img, &[format!("freeb {block}"), format!("ssv last_orphan {a}")])?;
    let linux = scratch.join("linux.img");
    image::copy_sparse(&img, &linux)?;
    let theirs = tree_of_linux(KernelMount::new(&linux, "rw,noinit_itable")?)?;
    let mount = FjordMount::with_program(&program(), &img, &[]).context("fjord")?;
    let found = Manifest::from_directory(mount.path())?;
    let written = std::fs::write(mount.path().join("new"), "new");
    let ended = mount.unmount();
    same_tree(&theirs, &found)?;
    ensure!(has_error(&linux)? && has_error(&img)?, "no note of the error");
    ensure!(written.is_err() && ended.is_err(), "nobody is told of the damage");
    image::e2fsck_repair(&img)?;
    image::e2fsck_clean(&img).map(drop)
}

#[test]
fn slots() -> Result<()> {
    let scratch = Scratch::in_memory("slots")?;
    // Without checksums the slots can be written as they are.
    let (img, n) = base(&scratch, "orphan_file,^metadata_csum")?;
    let file = superblock(&img)?.s_orphan_file_inum.get();
    let blocks = image::debugfs(&img, &format!("blocks <{file}>"))?;
    let block: u64 = blocks.split_whitespace().next().context("a block")?.parse()?;
    let [a, b] = n.nameless;
    for (case, slots) in [
        ("sound", vec![a, n.long, b]),
        ("reserved", vec![1, a]),
        ("the orphan file", vec![file, a]),
        ("past the last", vec![n.last + 1, a, u32::MAX]),
        ("a short symbolic link", vec![a, n.link]),
        ("twice", vec![a, a]),
        ("twice with links", vec![n.long, b, n.long]),
    ] {
        let broken = scratch.join("broken.img");
        image::copy_sparse(&img, &broken)?;
        let bytes: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        let mut raw = superblock(&broken)?;
        let mut features = raw.features();
        features.ro_compat.insert(RoCompat::ORPHAN_PRESENT);
        raw.set_features(&features);
        let device = OpenOptions::new().write(true).open(&broken)?;
        device.write_all_at(&bytes, block * 4096)?;
        device.write_all_at(raw.as_bytes(), 1024)?;
        drop(device);
        compare(&scratch, &broken, case).context(case)?;
    }
    Ok(())
}

/// An inode in the list and in the file.
#[test]
fn a_list_and_slots() -> Result<()> {
    let scratch = Scratch::in_memory("both")?;
    let (img, n) = base(&scratch, "orphan_file,^metadata_csum")?;
    let file = superblock(&img)?.s_orphan_file_inum.get();
    let blocks = image::debugfs(&img, &format!("blocks <{file}>"))?;
    let block: u64 = blocks.split_whitespace().next().context("a block")?.parse()?;
    for (case, ino) in [("a nameless one", n.nameless[0]), ("one with links", n.long)] {
        let broken = scratch.join("broken.img");
        image::copy_sparse(&img, &broken)?;
        let mut raw = superblock(&broken)?;
        let mut features = raw.features();
        features.ro_compat.insert(RoCompat::ORPHAN_PRESENT);
        raw.set_features(&features);
        raw.s_last_orphan.set(ino);
        let device = OpenOptions::new().write(true).open(&broken)?;
        device.write_all_at(&ino.to_le_bytes(), block * 4096)?;
        device.write_all_at(raw.as_bytes(), 1024)?;
        drop(device);
        compare(&scratch, &broken, case).context(case)?;
    }
    Ok(())
}
