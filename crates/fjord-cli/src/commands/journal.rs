//! `fjord journal`: list the transactions in the log.

use std::path::PathBuf;

use serde::Serialize;

use super::info;
use crate::{failure::Result, image, output, pending::Pending};

#[derive(Debug, clap::Args)]
#[command(after_help = "Shows the complete transactions that a mount would replay. Nothing is \
written.\n\nExample:\n  fjord journal --blocks disk.img")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// List the blocks of each transaction
    #[arg(short, long)]
    blocks: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Log {
    /// Recovery is due.
    dirty: bool,
    blocks: u32,
    block_size: u32,
    first_sequence: u32,
    start: u32,
    uuid: String,
    transactions: Vec<Transaction>,
    fast_commits: usize,
    #[serde(skip)]
    pending: Pending,
    /// I-transactions that recovery would apply, or why it cannot; None without the ijournal mark.
    i_transactions: Option<String>,
    /// Where and why the scan of the log ended or skipped something.
    rules: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Transaction {
    tid: u32,
    start: u32,
    committed_at: String,
    blocks: Vec<Block>,
    revokes: Vec<u64>,
}

#[derive(Debug, Serialize)]
struct Block {
    home: u64,
    at: u32,
    escaped: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let found = image::log(&args.image)?;
    let Some(plan) = found else {
        return match args.json {
            true => output::json(&None::<Log>),
            false => output::print(format!("{}: no journal\n", args.image.display())),
        };
    };
    let sb = plan.superblock();
    let pending = Pending::of(&plan, &info::read_superblock(&args.image)?);
    let log = Log {
        dirty: pending.is_due,
        blocks: sb.s_maxlen,
        block_size: sb.s_blocksize,
        first_sequence: sb.s_sequence.0,
        start: sb.s_start,
        uuid: output::uuid(&sb.s_uuid),
        transactions: plan
            .transactions()
            .iter()
            .map(|t| Transaction {
                tid: t.tid.0,
                start: t.start,
                committed_at: output::seconds(t.committed_at.0 as i64),
                blocks: t
                    .blocks
                    .iter()
                    .map(|b| Block { home: b.home.0, at: b.at, escaped: b.escaped })
                    .collect(),
                revokes: t.revokes.iter().map(|b| b.0).collect(),
            })
            .collect(),
        fast_commits: pending.fast_commits,
        pending,
        i_transactions: plan.superblock().ijournal().map(|_| match plan.i_transactions() {
            Ok(found) => format!("{} to apply", found.len()),
            Err(error) => format!("damaged: {error}"),
        }),
        rules: plan
            .report()
            .cases
            .iter()
            .map(|c| format!("{}: {}", c.number(), c.reason()))
            .collect(),
    };
    if args.json { output::json(&log) } else { output::print(text(&log, args.blocks)) }
}

fn text(log: &Log, blocks: bool) -> String {
    let mut text = format!(
        "Journal:         {} blocks of {} bytes, {}\n\
         Needs recovery:  {}\nUUID:            {}\nFirst sequence:  {}\n\
         Log start:       {}\nTransactions:    {}\n",
        log.blocks,
        log.block_size,
        if log.dirty { "dirty" } else { "clean" },
        log.pending.answer(),
        log.uuid,
        log.first_sequence,
        log.start,
        log.transactions.len(),
    );
    if log.fast_commits > 0 {
        text += &format!("Fast commits:    {} to replay\n", log.fast_commits);
    }
    if let Some(found) = &log.i_transactions {
        text += &format!("I-transactions:  {found}\n");
    }
    for t in &log.transactions {
        text += &format!(
            "  {:>10}  at {:>6}  {} UTC  {} blocks, {} revoked\n",
            t.tid,
            t.start,
            t.committed_at,
            t.blocks.len(),
            t.revokes.len()
        );
        if blocks {
            for b in &t.blocks {
                let escaped = if b.escaped { ", escaped" } else { "" };
                text += &format!("      block {} from {}{escaped}\n", b.home, b.at);
            }
            for b in &t.revokes {
                text += &format!("      revoke {b}\n");
            }
        }
    }
    text
}
