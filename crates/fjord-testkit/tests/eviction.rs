//! Inodes that left memory and came back keep what was promised about them.

use anyhow::{Context, Result};
use fjord::{Cred, Fs, MountOptions};
use fjord_testkit::{
    features,
    image::{self, Scratch},
};

/// More files than a small cache keeps inodes.
const OTHERS: u32 = 3000;

#[test]
fn an_fsync_counts_for_a_file_that_was_read_again() -> Result<()> {
    let scratch = Scratch::in_memory("eviction")?;
    let (img, copy) = (scratch.join("image"), scratch.join("copy"));
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let options = MountOptions {
        cache_size_bytes: 8 << 20,
        background_threads: false,
        ..MountOptions::default()
    };
    let fs = Fs::open(&img, &options)?;
    let root = fs.root()?;
    root.create(b"promised", 0o644, &Cred::root())?;
    for index in 0..OTHERS {
        root.create(format!("other-{index}").as_bytes(), 0o644, &Cred::root())?;
    }
    // Nothing has been committed; what is to be durable now was done by an earlier inode.
    root.lookup(b"promised")?.fsync(false)?;
    image::copy_sparse(&img, &copy)?;

    let after = Fs::open(&copy, &options)?;
    after.root()?.lookup(b"promised")?;
    after.unmount()?;
    image::e2fsck_clean(&copy)?;
    drop(root);
    fs.unmount()?;
    Ok(())
}
