//! Damaged logs: Linux, e2fsck and fjord make the same of them, with the exceptions of a table.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use fjord::{Fs, MountOptions};
use fjord_testkit::{
    dirty::{self, ByLinux, RECIPES, WRITTEN, tree_on_linux},
    image::{self, Scratch},
    manifest::Compare,
    rng,
};

/// A damaged log: where Linux mounts, fjord shows the same tree; where Linux refuses, fjord
/// refuses as damaged. The exceptions, by the table in `docs/on-disk.md`: where Linux ends the log
/// before transactions that have committed, and so drops what was promised, fjord refuses (rows 17
/// and 23). Where the last transaction of asynchronous commits has a wrong checksum, which a power cut
/// can leave, Linux may refuse; fjord recovers what Linux recovers without that transaction (row 22).
fn check_damaged(dirty: &Path) -> Result<&'static str> {
    let scratch = Scratch::in_memory("damaged")?;
    let began = SystemTime::now();
    let linux = dirty::recovered_by_linux(dirty, &scratch)?;
    let copy = scratch.join("by-fjord.img");
    image::copy_sparse(dirty, &copy)?;
    let opened = Fs::open(&copy, &MountOptions::default()).and_then(|fs| fs.unmount());
    match (linux, opened) {
        (ByLinux::Recovered(linux), Ok(())) => same_trees(&linux, &copy, began),
        (ByLinux::Refused(reason), Err(error)) => {
            ensure!(error.is_corrupt(), "refused, but not as damaged: {error} (Linux: {reason})");
            Ok("both refuse")
        }
        (ByLinux::Recovered(_), Err(error)) => {
            let is_dropped = error.is_corrupt() && drops_commits(dirty, &error.to_string())?;
            ensure!(is_dropped, "Linux recovers, fjord refuses: {error}");
            Ok("Linux drops committed transactions, fjord refuses")
        }
        (ByLinux::Refused(reason), Ok(())) => {
            let without_last = scratch.join("without-last.img");
            let by_last = || -> Result<()> {
                dirty::without_last_async(dirty, &without_last)?;
                let linux = dirty::recovered_by_linux(&without_last, &scratch)?.image()?;
                same_trees(&linux, &copy, began).map(drop)
            };
            by_last().with_context(|| format!("Linux refuses, fjord recovers: {reason}"))?;
            Ok("Linux refuses a torn asynchronous commit, fjord drops it")
        }
    }
}

/// Two images that recovered: equal trees, or damage in both.
fn same_trees(linux: &Path, fjord: &Path, began: SystemTime) -> Result<&'static str> {
    match (tree_on_linux(linux), tree_on_linux(fjord)) {
        (Ok(mut left), Ok(right)) => {
            left.take_back_truncation_times(&right, began);
            left.diff(&right, &Compare::SAME_IMAGE).ok("Linux", "fjord")?;
            Ok("both recover")
        }
        // The log ends before what was checkpointed already.
        (Err(left), Err(right)) if is_damage(&left) && is_damage(&right) => {
            Ok("both recover, and the tree is damaged")
        }
        (left, right) => {
            left.context("the tree that Linux recovered")?;
            right.context("the tree that fjord recovered")?;
            bail!("one of them cannot be read");
        }
    }
}

/// Whether reading failed because of what the blocks hold.
fn is_damage(error: &anyhow::Error) -> bool {
    let errno = error.downcast_ref::<std::io::Error>().and_then(|error| error.raw_os_error());
    matches!(errno, Some(libc::EBADMSG | libc::EUCLEAN | libc::EIO))
}

/// Whether the log holds a commit block of the transaction that a refusal names, or of a later one.
fn drops_commits(dirty: &Path, refusal: &str) -> Result<bool> {
    let (_, named) = refusal.split_once("at transaction ").context("no transaction is named")?;
    let digits: String = named.chars().take_while(char::is_ascii_digit).collect();
    let named: u32 = digits.parse().context("no number of a transaction")?;
    Ok(dirty::committed(dirty)?.into_iter().any(|tid| tid >= named))
}

#[test]
fn damaged_journals() -> Result<()> {
    let seed = rng::seed_from_env("damaged_journals", 1);
    for name in ["v3-4k", "v3-1k", "v1", "v3-async", "v3-data-journal"] {
        let recipe = RECIPES.iter().find(|recipe| recipe.name == name).context("a recipe")?;
        let scratch = Scratch::in_memory("dirty")?;
        let images = dirty::make(recipe, seed, scratch.path())?;
        for number in 0..fjord_testkit::size::pick(3, 10, 20) {
            let damaged = scratch.join("damaged.img");
            let from = &images[number as usize % images.len()];
            dirty::damage_log(from, &damaged, rng::mix(seed ^ number))?;
            let outcome = check_damaged(&damaged)
                .with_context(|| format!("{name}, damage {number} of {}", from.display()))
                .with_context(|| kept(&damaged))?;
            println!("{name} {number}: {outcome}");
        }
    }
    Ok(())
}

/// Keeps an image that the seed alone does not make again, because the kernel works at its own pace.
fn kept(damaged: &Path) -> String {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("damaged-journal.img");
    match image::copy_sparse(damaged, &to) {
        Ok(()) => format!("the image is kept: {}", to.display()),
        Err(error) => format!("the image could not be kept: {error:#}"),
    }
}

/// A place of a log.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Of the first commit block.
    FirstCommit,
    /// Of the last commit block.
    LastCommit,
    /// Of the last committed descriptor.
    LastDescriptor,
    /// Of the last copy in the last committed transaction.
    LastCopy,
}

impl Place {
    fn journal_block(self, image: &Path) -> Result<usize> {
        let headers = dirty::log_headers(image)?;
        let commits = headers.iter().filter(|header| header.commit);
        let last = commits.clone().next_back().context("nothing is committed")?.journal_block;
        let first = commits.map(|header| header.journal_block).next();
        let found = match self {
            Place::FirstCommit => first,
            Place::LastCommit => Some(last),
            Place::LastCopy => Some(last - 1),
            Place::LastDescriptor => headers
                .iter()
                .rfind(|header| !header.commit && header.journal_block < last)
                .map(|header| header.journal_block),
        };
        found.context("the log has no such place")
    }
}

#[test]
fn damage_at_chosen_places() -> Result<()> {
    const DROPS: &str = "Linux drops committed transactions, fjord refuses";
    const TORN: &str = "Linux refuses a torn asynchronous commit, fjord drops it";
    let seed = rng::seed_from_env("damage_at_chosen_places", 1);
    // Place, offset, what happens with synchronous and with asynchronous commits.
    let cases = [
        (Place::LastCopy, 100, "both refuse", TORN),
        (Place::LastDescriptor, 4000, "both refuse", TORN),
        (Place::LastCommit, 16, "both refuse", "both recover"),
        // Padding of the kernel's structure, then the part that it has no structure for.
        (Place::LastCommit, 60, "both refuse", "both recover"),
        (Place::FirstCommit, 63, "both refuse", DROPS),
        (Place::FirstCommit, 64, "both recover", "both recover"),
    ];
    for written in WRITTEN.iter().filter(|written| written.checksum >= 2) {
        let scratch = Scratch::in_memory("dirty")?;
        let whole = dirty::make_with_debugfs(written, seed, scratch.path())?;
        for (place, offset, synchronous, asynchronous) in cases {
            for (is_async, expected) in [(false, synchronous), (true, asynchronous)] {
                let damaged = scratch.join("damaged.img");
                image::copy_sparse(&whole, &damaged)?;
                if is_async {
                    dirty::make_async(&damaged)?;
                }
                let block = place.journal_block(&damaged)?;
                dirty::change_log(&damaged, block, offset, |[byte]| *byte ^= 0x40)?;
                let what = format!("{written:?}, {place:?} + {offset}, async: {is_async}");
                let outcome = check_damaged(&damaged)
                    .with_context(|| what.clone())
                    .with_context(|| kept(&damaged))?;
                ensure!(
                    outcome == expected,
                    "{what}: {outcome}, not: {expected}; {}",
                    kept(&damaged)
                );
                println!("{what}: {outcome}");
            }
        }
    }
    Ok(())
}
