//! `fjord recover`: make a dirty image clean.

use std::path::{Path, PathBuf};

use fjord::Fs;
use serde::Serialize;

use crate::{
    failure::{Context, EXIT_DAMAGED, Failure, Result},
    image, in_use,
    output::{self, counted},
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Replays the journal, completes interrupted deletions and truncations, and \
marks the image clean. A second run changes nothing.\n\nAn i-transaction is the record of one fsync \
under --fsync ijournal: the changes of one file, in fjord's own part of the journal, which Linux and \
e2fsck do not read.\n\nExamples:\n  \
fjord recover disk.img && e2fsck -fn disk.img\n  fjord recover --drop-fsyncs disk.img"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// If recovery fails because the i-transactions (fsynced changes since the last commit) or the
    /// log cannot be read, discard what cannot be read; e2fsck can then run. If recovery works,
    /// nothing is discarded
    #[arg(long)]
    drop_fsyncs: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Outcome {
    was_dirty: bool,
    dropped_fsyncs: bool,
    transactions: u32,
    replayed_blocks: usize,
    revoked_blocks: usize,
    fast_commits: u32,
    i_transactions: usize,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    in_use::check(&args.image, false)?;
    let (outcome, fs) = match open(&args.image) {
        Err(failure) if args.drop_fsyncs => discard_and_open(&args.image, failure)?,
        opened => opened?,
    };
    fs.unmount().context("closing the image failed")?;
    if args.json {
        return output::json(&outcome);
    }
    tell(args, &outcome)
}

/// Opens an image, which recovers it.
fn open(image: &Path) -> Result<(Outcome, Fs)> {
    let fs = image::open_to_write(image)?;
    let report = fs.recovery().cloned().unwrap_or_default();
    let outcome = Outcome {
        was_dirty: report.was_dirty || report.i_transactions > 0,
        dropped_fsyncs: false,
        transactions: report.transactions,
        replayed_blocks: report.replayed_blocks,
        revoked_blocks: report.revoked_blocks,
        fast_commits: report.fast_commits,
        i_transactions: report.i_transactions,
    };
    Ok((outcome, fs))
}

/// After a failed recovery: discards the i-transactions if damage is the reason and the ijournal
/// mark is set, and opens the image. Other failures stay as they are.
fn discard_and_open(image: &Path, failure: Failure) -> Result<(Outcome, Fs)> {
    let is_damage = failure.code == EXIT_DAMAGED;
    if !is_damage || !image::is_marked(image).unwrap_or(false) {
        return Err(failure);
    }
    let dropped_fsyncs = image::drop_fsyncs(image)?;
    let discarded = "the fsynced changes since the last commit are discarded";
    let opened = open(image);
    let (outcome, fs) = if dropped_fsyncs { opened.context(discarded)? } else { opened? };
    let was_dirty = outcome.was_dirty || dropped_fsyncs;
    Ok((Outcome { was_dirty, dropped_fsyncs, ..outcome }, fs))
}

fn tell(args: &Args, outcome: &Outcome) -> Result<()> {
    let name = args.image.display();
    let applied = |count: usize, what: &str| match count {
        0 => String::new(),
        count => format!(", {} applied", counted(count, what)),
    };
    let done = if outcome.was_dirty || outcome.i_transactions > 0 {
        let fsyncs = applied(outcome.fast_commits as usize, "fast commit")
            + &applied(outcome.i_transactions, "i-transaction");
        format!(
            "recovered: {}, {} replayed{fsyncs}; clean",
            counted(outcome.transactions as usize, "transaction"),
            counted(outcome.replayed_blocks, "block")
        )
    } else {
        "the journal was empty; clean".to_owned()
    };
    output::print(match (args.drop_fsyncs, outcome.dropped_fsyncs) {
        (_, true) => format!(
            "{name}: discarded the fsynced changes since the last commit, which cannot be read\n\
             {name}: {done}\n"
        ),
        (true, false) => format!("{name}: {done}; nothing had to be discarded\n"),
        (false, false) => format!("{name}: {done}\n"),
    })
}
