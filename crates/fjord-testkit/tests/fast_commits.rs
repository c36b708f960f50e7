//! Fast commits left by Linux: fjord, Linux and e2fsck recover the same tree.

use std::collections::HashSet;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use fjord::{Cred, Fallback, Fs, FsyncPolicyKind, MountOptions, XattrFlags};
use fjord_format::jbd2::fast_commit::Record;
use fjord_testkit::dirty::{self, ByLinux};
use fjord_testkit::fast_commits::{self, RECIPES, without_directory_times};
use fjord_testkit::image::{self, KernelMount, Scratch};
use fjord_testkit::manifest::{Compare, Manifest};
use fjord_testkit::{rng, tools};

/// Times of change differ where the replay of one recoverer counts as a change.
const ALIKE: Compare = Compare { ctime: false, ..Compare::SAME_IMAGE };

fn tree(image: &Path) -> Result<Manifest> {
    let mount = KernelMount::new(image, "ro")?;
    let manifest = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    Ok(without_directory_times(manifest))
}

/// What an image had.
struct Checked {
    /// Complete fast commits.
    commits: u32,
    /// e2fsck recovered it too.
    by_e2fsck: bool,
    /// So did Linux, which refuses an inode without a name: [`has_nameless_inode`].
    by_linux: bool,
}

/// Whether an inode without a name is recorded: one that was unlinked while it was open, or while the
/// writeback of another process had it. Linux 6.18 refuses an image with such a fast commit, of its own
/// making: the replay reads the inode as one that must have a name.
fn has_nameless_inode(records: &[Record]) -> bool {
    // i_links_count.
    let links = |bytes: &[u8]| bytes.get(0x1a..0x1c).map(|links| links == [0, 0]);
    records.iter().any(|record| match record {
        Record::Inode { bytes, .. } => links(bytes) == Some(true),
        _ => false,
    })
}

/// Whether a file is deleted: e2fsck 1.47.0 removes its name and leaves the inode to lost+found,
/// or to a new file with the same number.
fn deletes(records: &[Record]) -> bool {
    let mut moved = HashSet::new();
    records.iter().any(|record| match record {
        Record::Link(entry) => {
            moved.insert(entry.ino);
            false
        }
        Record::Unlink(entry) => !moved.remove(&entry.ino),
        _ => false,
    })
}

/// Recovers copies by all three and compares.
fn check(dirty: &Path) -> Result<Checked> {
    check_all(dirty, |records| !deletes(records))
}

/// The same; e2fsck counts when `is_for_e2fsck` says so of the records.
fn check_all(dirty: &Path, is_for_e2fsck: impl Fn(&[Record]) -> bool) -> Result<Checked> {
    let scratch = Scratch::in_memory("recover")?;
    let plan = fjord::inspect::log(dirty)?.context("the image has a journal")?;
    let commits = plan.report().fast_commits;
    let ours = scratch.join("by-fjord.img");
    image::copy_sparse(dirty, &ours)?;
    let fs = Fs::open(&ours, &MountOptions::default()).context("fjord recovering")?;
    fs.unmount().context("fjord unmounting")?;
    image::e2fsck_clean(&ours).context("after fjord's recovery")?;
    let ours = tree(&ours)?;
    let began = SystemTime::now();
    let records = &plan.report().fast_commit_records;
    let by_linux = match dirty::recovered_by_linux(dirty, &scratch)? {
        ByLinux::Refused(_) if has_nameless_inode(records) => false,
        recovered => {
            let linux = recovered.image()?;
            // Its replay leaves link counts of directories to e2fsck.
            image::e2fsck_repair(&linux)?;
            let mut linux = tree(&linux)?;
            linux.take_back_truncation_times(&ours, began);
            linux.diff(&ours, &ALIKE).ok("Linux", "fjord")?;
            true
        }
    };
    let copy = scratch.join("by-e2fsck.img");
    image::copy_sparse(dirty, &copy)?;
    let said = image::e2fsck_repair(&copy)?;
    // 1.47.0 gives the whole log up where the area begins with an older transaction's head.
    let gives_up = said.stderr.contains("while recovering journal");
    if gives_up || !is_for_e2fsck(records) {
        return Ok(Checked { commits, by_e2fsck: false, by_linux });
    }
    tree(&copy)?.diff(&ours, &ALIKE).ok("e2fsck", "fjord")?;
    Ok(Checked { commits, by_e2fsck: true, by_linux })
}

#[test]
fn fast_commits_of_linux_recover_alike() -> Result<()> {
    let seed = rng::seed_from_env("fast_commits_of_linux_recover_alike", 1);
    let mut all_by_e2fsck = 0;
    let (mut bad, mut images, mut all, mut refused_by_linux) = (Vec::new(), 0, 0, 0);
    for (number, recipe) in RECIPES.iter().enumerate() {
        let scratch = Scratch::in_memory("fast-commits")?;
        let (mut commits, mut by_e2fsck) = (0, 0);
        let seed = rng::mix(seed ^ number as u64);
        for dirty in fast_commits::make(recipe, seed, 12, scratch.path())? {
            images += 1;
            match check(&dirty) {
                Ok(checked) => {
                    commits += checked.commits;
                    refused_by_linux += u32::from(!checked.by_linux);
                    by_e2fsck += u32::from(checked.by_e2fsck);
                }
                Err(error) => bad.push(format!("{}: {error:#}", dirty.display())),
            }
        }
        println!("{}: {commits} fast commits; {by_e2fsck} images by e2fsck too", recipe.name);
        all += commits;
        all_by_e2fsck += by_e2fsck;
    }
    println!("{refused_by_linux} images with an inode without a name, which Linux refuses");
    ensure!(refused_by_linux * 10 < images, "Linux refuses {refused_by_linux} of {images}");
    ensure!(all > 40 && all_by_e2fsck > 10, "only {all} fast commits, {all_by_e2fsck} by e2fsck");
    ensure!(bad.is_empty(), "{} of {images} images:\n{}", bad.len(), bad.join("\n"));
    Ok(())
}

/// Linux records the inode of a file that was unlinked while it was open, and then refuses the image.
/// fjord takes it.
#[test]
fn a_nameless_inode_of_linux_is_recovered() -> Result<()> {
    let scratch = Scratch::in_memory("fast-commits")?;
    let dirty = fast_commits::make_with_nameless_inode(scratch.path())?;
    let plan = fjord::inspect::log(&dirty)?.context("the image has a journal")?;
    ensure!(has_nameless_inode(&plan.report().fast_commit_records), "Linux records no such inode");
    let checked = check(&dirty)?;
    println!("recovered by Linux: {}, by e2fsck: {}", checked.by_linux, checked.by_e2fsck);
    Ok(())
}

/// fjord writes nothing that Linux refuses so: files that are unlinked while they are open are fsynced, and
/// others beside them.
#[test]
fn a_nameless_inode_of_fjord_is_recovered_by_all() -> Result<()> {
    let scratch = Scratch::in_memory("fast-commits")?;
    let image = made(&scratch, "fast_commit")?;
    let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
    let (root, cred) = (fs.root()?, Cred::root());
    let [old, other] = [root.create(b"old", 0o644, &cred)?, root.create(b"other", 0o644, &cred)?];
    fs.sync()?;
    let new = root.create(b"new", 0o644, &cred)?;
    new.write(0, &[1; 5000])?;
    new.fsync(false)?;
    for file in [&old, &new] {
        file.write(0, &[2; 9000])?;
    }
    root.unlink(b"old")?;
    root.unlink(b"new")?;
    for (step, file) in [&other, &old, &new, &other].into_iter().enumerate() {
        file.write(9000 * step as u64, &[3; 9000])?;
        file.fsync(false)?;
    }
    drop(root);
    fs.shutdown(fjord::ShutdownMode::NoLogFlush)?;
    drop((old, new, other, fs));
    let checked = check_all(&image, |_| true)?;
    ensure!(checked.by_linux && checked.by_e2fsck, "it is not recovered by all");
    ensure!(checked.commits > 0, "no fast commit");
    Ok(())
}

fn made(dir: &Scratch, features: &str) -> Result<std::path::PathBuf> {
    let image = dir.join("image");
    image::make_sparse(&image, 512 << 20)?;
    let mut mke2fs = tools::command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=64", "-O", features]);
    tools::run(mke2fs.arg(&image))?.ok()?;
    Ok(image)
}

fn with_policy() -> MountOptions {
    MountOptions { fsync: FsyncPolicyKind::FastCommit, ..MountOptions::default() }
}

/// Create, write, fsync, and append, fsync: never a commit of everything, also where the area and
/// the directory fill up and no commit thread runs.
#[test]
fn appends_and_new_files_need_no_full_commit() -> Result<()> {
    let scratch = Scratch::in_memory("fast-commit")?;
    let image = made(&scratch, "fast_commit")?;
    let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
    let (root, cred) = (fs.root()?, Cred::root());
    let (dir, grown) = (root.mkdir(b"dir", 0o755, &cred)?, root.create(b"grown", 0o644, &cred)?);
    fs.sync()?;
    for number in 0..150u32 {
        let file = dir.create(format!("f{number}").as_bytes(), 0o644, &cred)?;
        file.write(0, &[1; 10_000])?;
        file.fsync(false)?;
    }
    for number in 0..600u64 {
        grown.write(number * 4096, &[2; 4096])?;
        grown.fsync(number % 2 == 0)?;
    }
    let stats = fs.stats();
    println!("{:?}, {:?}", stats.fsync, stats.journal);
    ensure!(stats.fsync.fallbacks.is_empty(), "{:?}", stats.fsync);
    ensure!(stats.fsync.policy == 750, "{:?}", stats.fsync);
    ensure!(stats.journal.commits > 2, "the area was not full: {:?}", stats.journal);
    drop((dir, grown, root));
    fs.unmount()?;
    image::e2fsck_clean(&image).map(drop)
}

/// A directory has grown before its blocks are full, so that new names fit what the last commit
/// has: linear, then indexed, with `dir_index` and without.
#[test]
fn growing_directories_need_no_full_commit() -> Result<()> {
    for features in ["fast_commit", "fast_commit,^dir_index"] {
        let scratch = Scratch::in_memory("fast-commit")?;
        let image = made(&scratch, features)?;
        let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
        let dir = fs.root()?.mkdir(b"dir", 0o755, &Cred::root())?;
        fs.sync()?;
        for number in 0..1500u32 {
            let name = format!("a name of some length {number}");
            dir.create(name.as_bytes(), 0o644, &Cred::root())?.fsync(false)?;
            if number % 4 == 3 {
                // Another name goes, which makes room that replay does not have.
                let name = format!("a name of some length {}", number - 2);
                dir.unlink(name.as_bytes())?;
            }
            if number % 16 == 15 {
                // What the commit thread does when it is asked.
                fs.sync()?;
            }
        }
        let stats = fs.stats();
        ensure!(stats.fsync.fallbacks.is_empty(), "{features}: {:?}", stats.fsync);
        ensure!(dir.attr().size >= 10 * 4096, "{features}: it has not grown");
        drop(dir);
        fs.unmount()?;
        image::e2fsck_clean(&image)?;
    }
    Ok(())
}

/// Names that come back: what had them is removed by records, and all three recoverers delete it.
#[test]
fn names_that_come_back_recover_alike() -> Result<()> {
    let seed = rng::seed_from_env("names_that_come_back_recover_alike", 1);
    let mut commits = 0;
    for round in 0..8 {
        let mut rng = fjord_testkit::rng::Rng::new(rng::mix(seed ^ round));
        let scratch = Scratch::in_memory("fast-commits")?;
        let image = made(&scratch, "fast_commit")?;
        let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
        let (root, cred) = (fs.root()?, Cred::root());
        // Enough inodes that those of interest lie in a block of their own.
        for number in 0..24 {
            root.create(format!("old{number}").as_bytes(), 0o644, &cred)?;
        }
        let dirs = [root.mkdir(b"d", 0o755, &cred)?, root];
        for step in 0..60 {
            let (dir, name) = (&dirs[rng.below(2) as usize], format!("n{}", rng.below(4)));
            match dir.unlink(name.as_bytes()) {
                Err(error) if error.is(rustix::io::Errno::NOENT) => {}
                other => drop(other?),
            }
            let file = dir.create(name.as_bytes(), 0o644, &cred)?;
            for _ in 0..rng.below(3) {
                let (at, len) = (rng.below(200_000), 1 + rng.below(30_000) as usize);
                file.write(at, &vec![step as u8 + 1; len])?;
            }
            if rng.below(4) > 0 {
                file.fsync(false)?;
            }
            if rng.below(16) == 0 {
                fs.sync()?;
            }
        }
        let reused = fs.stats().fsync.fallbacks.iter().any(|(why, _)| *why == Fallback::NameReuse);
        ensure!(!reused, "{:?}", fs.stats().fsync);
        let last = dirs[0].create(b"last", 0o644, &cred)?;
        last.fsync(false)?;
        drop((last, dirs));
        fs.shutdown(fjord::ShutdownMode::NoLogFlush)?;
        drop(fs);
        let checked = check_all(&image, |_| true).with_context(|| format!("round {round}"))?;
        ensure!(checked.by_e2fsck, "round {round}: e2fsck gave up");
        commits += checked.commits;
    }
    ensure!(commits > 40, "only {commits} fast commits");
    Ok(())
}

/// A new inode in a block of the inode table that was in use before, and then not at all, in an earlier
/// mount and in this one: what is left there on disk is no part of it, for any of the three.
#[test]
fn new_inodes_do_not_get_what_older_ones_left() -> Result<()> {
    let scratch = Scratch::in_memory("fast-commits")?;
    let image = made(&scratch, "fast_commit")?;
    let names: Vec<String> = (0..64).map(|number| format!("old{number}")).collect();
    let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
    let root = fs.root()?;
    for name in &names {
        let file = root.create(name.as_bytes(), 0o644, &Cred::root())?;
        file.set_xattr(b"user.left", b"what is left", XattrFlags::CREATE)?;
    }
    drop(root);
    fs.unmount()?;
    let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
    let root = fs.root()?;
    for name in &names {
        root.unlink(name.as_bytes())?;
    }
    drop(root);
    fs.unmount()?;
    let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
    let root = fs.root()?;
    for name in &names[..40] {
        let file = root.create(name.as_bytes(), 0o644, &Cred::root())?;
        file.write(0, b"new")?;
        file.fsync(false)?;
    }
    let stats = fs.stats().fsync;
    ensure!(stats.fallbacks == [(Fallback::Attributes, 40)], "{stats:?}");
    drop(root);
    fs.shutdown(fjord::ShutdownMode::NoLogFlush)?;
    drop(fs);
    check(&image).map(drop)
}

/// e2fsck does not make the first block of a directory.
#[test]
fn files_in_new_directories_need_a_full_commit() -> Result<()> {
    let scratch = Scratch::in_memory("fast-commits")?;
    let image = made(&scratch, "fast_commit")?;
    let fs = Fs::open(&image, &MountOptions { background_threads: false, ..with_policy() })?;
    let dir = fs.root()?.mkdir(b"dir", 0o755, &Cred::root())?;
    for name in ["first", "second"] {
        let file = dir.create(name.as_bytes(), 0o644, &Cred::root())?;
        file.write(0, b"fjord")?;
        file.fsync(false)?;
    }
    let stats = fs.stats().fsync;
    ensure!(stats.fallbacks == [(Fallback::NewDirectory, 1)], "{stats:?}");
    ensure!(stats.policy == 1, "{stats:?}");
    drop(dir);
    fs.shutdown(fjord::ShutdownMode::NoLogFlush)?;
    drop(fs);
    let checked = check(&image)?;
    ensure!(checked.by_e2fsck && checked.commits > 0, "{} commits", checked.commits);
    Ok(())
}

#[test]
fn the_feature_is_needed_and_can_be_switched() -> Result<()> {
    let scratch = Scratch::in_memory("fast-commit")?;
    let image = made(&scratch, "^fast_commit")?;
    let said = Fs::open(&image, &with_policy()).map(drop).unwrap_err().to_string();
    ensure!(said.contains("fjord tune --fast-commit on"), "{said}");
    let fs = Fs::open(&image, &MountOptions::default())?;
    fs.set_fast_commit(true)?;
    fs.unmount()?;
    image::e2fsck_clean(&image)?;
    let fs = Fs::open(&image, &with_policy())?;
    let file = fs.root()?.create(b"file", 0o644, &Cred::root())?;
    file.write(0, b"fjord")?;
    file.fsync(false)?;
    ensure!(fs.stats().fsync.policy == 1, "{:?}", fs.stats().fsync);
    drop(file);
    fs.unmount()?;
    // Linux takes the area as it is.
    let mount = KernelMount::new(&image, "rw")?;
    std::fs::File::open(mount.path().join("file"))?.sync_all()?;
    mount.unmount()?;
    let fs = Fs::open(&image, &MountOptions::default())?;
    fs.set_fast_commit(false)?;
    fs.unmount()?;
    image::e2fsck_clean(&image)?;
    ensure!(Fs::open(&image, &with_policy()).is_err(), "the feature is still there");
    Ok(())
}
