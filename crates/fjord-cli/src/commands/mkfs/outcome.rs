//! The report of mkfs, as text or JSON.

use fjord_mkfs::Report;
use fjord_tree::Populated;
use serde::Serialize;

use super::Args;
use crate::{failure::Result, output, size};

#[derive(Debug, Serialize)]
struct Made {
    block_size: u32,
    block_count: u64,
    inode_count: u32,
    group_count: u32,
    journal_blocks: u32,
    ijournal_areas: u32,
    ijournal_area_blocks: u32,
    features: Vec<String>,
    uuid: String,
    bytes_written: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    contents: Option<PutIn>,
}

/// Contents of the new image.
#[derive(Debug, Serialize)]
struct PutIn {
    entries: u64,
    bytes: u64,
    skipped: Vec<String>,
    not_kept: Vec<String>,
}

/// Limit of the list of skipped entries in text output; JSON has all.
const SKIPPED_SHOWN: usize = 20;

/// Prints the parameters of the image and lists entries and attributes that were skipped.
pub(super) fn tell(args: &Args, report: Report, populated: Option<Populated>) -> Result<()> {
    let made = Made {
        block_size: report.block_size,
        block_count: report.block_count,
        inode_count: report.inode_count,
        group_count: report.group_count,
        journal_blocks: report.journal_blocks,
        ijournal_areas: report.area_count,
        ijournal_area_blocks: report.area_blocks,
        features: report.features,
        uuid: output::uuid(&report.uuid),
        bytes_written: report.bytes_written,
        contents: populated.map(|p| PutIn {
            entries: p.entries,
            bytes: p.bytes,
            skipped: p.skipped,
            not_kept: p.unkept,
        }),
    };
    let not_kept = made.contents.as_ref().map_or_else(Vec::new, |put_in| put_in.not_kept.clone());
    if args.json {
        output::json(&made)?;
        return output::unkept(&not_kept);
    }
    for_people(args, &made)?;
    output::unkept(&not_kept)
}

fn for_people(args: &Args, made: &Made) -> Result<()> {
    let mut text = format!(
        "{}: {} blocks of {} bytes ({}), {} inodes, journal of {} blocks\nUUID {}\nFeatures {}\n",
        args.image.display(),
        made.block_count,
        made.block_size,
        size::show(made.block_count * u64::from(made.block_size)),
        made.inode_count,
        made.journal_blocks,
        made.uuid,
        made.features.join(" "),
    );
    if made.ijournal_areas > 0 {
        text += &format!(
            "I-transaction areas {} of {} blocks\n",
            made.ijournal_areas, made.ijournal_area_blocks
        );
    }
    if let Some(contents) = &made.contents {
        tell_skipped(&contents.skipped);
        text += &format!("Contents {} entries, {}\n", contents.entries, size::show(contents.bytes));
    }
    if args.quiet { Ok(()) } else { output::print(text) }
}

fn tell_skipped(skipped: &[String]) {
    for what in skipped.iter().take(SKIPPED_SHOWN) {
        output::complain(format_args!("left out: {what}"));
    }
    if let Some(more) = skipped.len().checked_sub(SKIPPED_SHOWN).filter(|more| *more > 0) {
        output::complain(format_args!("left out: {more} more (--json lists all)"));
    }
}
