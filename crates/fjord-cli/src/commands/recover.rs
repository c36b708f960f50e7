//! `fjord recover`: bring an image that was in use when the power went to a clean state.

use std::path::PathBuf;

use fjord::Error;
use serde::Serialize;

use crate::{
    failure::{Context, Result},
    image, in_use, output,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Replays the journal, completes interrupted deletions and truncations, and \
marks the image clean. Running it again changes nothing.\n\nExample:\n  \
fjord recover disk.img && e2fsck -fn disk.img"
)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Discard what was fsynced since the last commit (policy ijournal) if it is damaged and cannot
    /// be read; afterwards e2fsck can be run
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
    let dropped_fsyncs = args.drop_fsyncs && image::drop_fsyncs(&args.image)?;
    if dropped_fsyncs && !args.json {
        let name = args.image.display();
        output::print(format!("{name}: discarded what was fsynced since the last commit\n"))?;
    }
    let found = image::log(&args.image)?;
    let report = found.as_ref().map(|plan| plan.report());
    let outcome = Outcome {
        was_dirty: report.is_some_and(|r| r.was_dirty),
        dropped_fsyncs,
        transactions: report.map_or(0, |r| r.transactions),
        replayed_blocks: report.map_or(0, |r| r.replayed_blocks),
        revoked_blocks: report.map_or(0, |r| r.revoked_blocks),
        fast_commits: report.map_or(0, |r| r.fast_commits),
        i_transactions: found.as_ref().map_or(Ok(0), |plan| {
            let found = plan.i_transactions().map_err(Error::from);
            found.map(|found| found.len()).context(args.image.display())
        })?,
    };
    drop(found);
    let fs = image::open_to_write(&args.image)?;
    fs.unmount().context("closing the image failed")?;
    if args.json {
        return output::json(&outcome);
    }
    output::print(if outcome.was_dirty || outcome.i_transactions > 0 {
        let applied = |count: usize, what: &str| match count {
            0 => String::new(),
            count => format!(", {count} {what} applied"),
        };
        let fsyncs = applied(outcome.fast_commits as usize, "fast commits")
            + &applied(outcome.i_transactions, "i-transactions");
        format!(
            "{}: recovered: {} transactions, {} blocks replayed{fsyncs}; clean\n",
            args.image.display(),
            outcome.transactions,
            outcome.replayed_blocks
        )
    } else {
        format!("{}: the journal was empty; clean\n", args.image.display())
    })
}
