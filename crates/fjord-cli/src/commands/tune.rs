//! `fjord tune`: change the parameters of an image that is not mounted.

use std::path::PathBuf;

use fjord::AreaLayout;
use serde::Serialize;

use crate::{
    failure::{Context, Failure, Result},
    image, output, size,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Areas hold the i-transactions that fsync writes under --fsync ijournal: each is the \
                  record of one fsync, with the changes of one file. Areas are in the journal after \
                  the log, where Linux and e2fsck ignore them, and take space in the image.\n\nExamples:\n  fjord tune --ijournal 4x2M disk.img\n  fjord tune \
                  --ijournal 0 disk.img\n  fjord tune --fast-commit on disk.img"
)]
pub(crate) struct Args {
    /// Number and size of the areas for i-transactions, such as 4x2M; 0 removes them
    #[arg(long, value_name = "NxSIZE|0", value_parser = parse_areas)]
    ijournal: Option<Areas>,
    /// Set or clear the feature fast_commit, which the policy --fsync fast-commit needs
    #[arg(long, value_name = "on|off", value_parser = parse_switch)]
    fast_commit: Option<bool>,
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
}

/// Argument of `--ijournal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Areas {
    None,
    Some { count: u32, area_bytes: u64 },
}

/// Reads `NxSIZE` or `0`.
pub(super) fn parse_areas(text: &str) -> Result<Areas, String> {
    if matches!(text, "0" | "none") {
        return Ok(Areas::None);
    }
    let wrong =
        || "expected the number of areas and the size of each, such as 4x2M, or 0".to_owned();
    let (count, bytes) = text.split_once(['x', 'X', '×']).ok_or_else(wrong)?;
    let count = count.parse().map_err(|_| wrong())?;
    Ok(Areas::Some { count, area_bytes: size::parse(bytes)? })
}

#[derive(Debug, Serialize)]
struct Outcome {
    ijournal_areas: u32,
    ijournal_area_bytes: u64,
    fast_commit: bool,
}

/// Reads `on` or `off`.
fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".into()),
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.ijournal.is_none() && args.fast_commit.is_none() {
        return Err(Failure::usage("nothing to change; give --ijournal or --fast-commit"));
    }
    if let Some(areas) = args.ijournal {
        let layout = match areas {
            Areas::None => None,
            Areas::Some { count, area_bytes } => Some(AreaLayout { count, area_bytes }),
        };
        image::change(&args.image, |fs| {
            fs.set_ijournal_areas(layout).context("changing the areas of the journal failed")
        })?;
    }
    if let Some(on) = args.fast_commit {
        image::change(&args.image, |fs| {
            fs.set_fast_commit(on).context("changing the feature fast_commit failed")
        })?;
    }
    let (now, fast_commit) =
        image::change(&args.image, |fs| Ok((fs.ijournal_areas(), fs.has_fast_commit())))?;
    let outcome = Outcome {
        fast_commit,
        ijournal_areas: now.map_or(0, |areas| areas.count),
        ijournal_area_bytes: now.map_or(0, |areas| areas.area_bytes),
    };
    if args.json {
        return output::json(&outcome);
    }
    let image = args.image.display();
    let areas = match now {
        Some(areas) => format!("{} areas of {}", areas.count, size::show(areas.area_bytes)),
        None => "no areas".into(),
    };
    output::print(if args.fast_commit.is_some() {
        let switch = if fast_commit { "on" } else { "off" };
        format!("{image}: {areas}, fast_commit {switch}\n")
    } else {
        format!("{image}: {areas}\n")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas() {
        assert_eq!(parse_areas("0"), Ok(Areas::None));
        let areas = Areas::Some { count: 4, area_bytes: 2 << 20 };
        assert_eq!(parse_areas("4x2M"), Ok(areas));
        assert_eq!(parse_areas("4×2M"), Ok(areas));
        for wrong in ["", "4", "x2M", "4x", "ax2M", "4x2Q"] {
            assert!(parse_areas(wrong).is_err(), "{wrong}");
        }
    }
}
