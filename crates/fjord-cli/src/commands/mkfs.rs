//! `fjord mkfs`: make a new image.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use fjord_block::{FileDevice, FileOptions};
use fjord_mkfs::{JournalSize, MkfsError, MkfsOptions, Report};
use serde::Serialize;

use super::info;
use crate::{
    failure::{Context, Failure, Result},
    image, in_use, output, size,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "What is not given is chosen as mke2fs does. Needs no root.\n\nExamples:\n  \
fjord mkfs --size 1G disk.img\n  fjord mkfs --size 64M -b 4096 -L data -O orphan_file disk.img"
)]
pub(crate) struct Args {
    /// Image file (made if it does not exist) or block device
    image: PathBuf,
    /// Size of the image, such as 512M or 16T; that of the file or device when not given
    #[arg(short, long, value_parser = size::parse)]
    size: Option<u64>,
    /// Make it even if the image holds a file system already
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    layout: Layout,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
}

/// The parameters of the file system.
#[derive(Debug, clap::Args)]
struct Layout {
    /// Block size in bytes
    #[arg(short, long, value_name = "BYTES")]
    block_size: Option<u32>,
    /// Volume name, at most 16 bytes
    #[arg(short = 'L', long, value_name = "NAME")]
    label: Option<String>,
    /// Features to add, or with ^ to leave out
    #[arg(short = 'O', long, value_name = "LIST", allow_hyphen_values = true)]
    features: Option<String>,
    /// UUID instead of a random one
    #[arg(short = 'U', long, value_parser = parse_uuid)]
    uuid: Option<[u8; 16]>,
    /// Number of inodes
    #[arg(short = 'N', long, value_name = "COUNT")]
    inodes: Option<u32>,
    /// One inode for this many bytes
    #[arg(short = 'i', long, value_name = "BYTES", conflicts_with = "inodes")]
    inode_ratio: Option<u32>,
    /// Size of an inode in bytes
    #[arg(short = 'I', long, value_name = "BYTES")]
    inode_size: Option<u16>,
    /// Percentage of blocks kept for root
    #[arg(short = 'm', long, value_name = "PERCENT", default_value_t = 5.0)]
    reserved: f64,
    /// Size of the journal, or none
    #[arg(short = 'J', long, value_name = "SIZE|none", value_parser = parse_journal)]
    journal: Option<JournalSize>,
    /// Owner of the root directory
    #[arg(long, value_name = "UID:GID", value_parser = super::put::parse_owner)]
    owner: Option<(u32, u32)>,
}

impl Layout {
    fn options(&self) -> MkfsOptions {
        MkfsOptions {
            block_size: self.block_size,
            inode_size: self.inode_size,
            inode_ratio: self.inode_ratio,
            inode_count: self.inodes,
            label: self.label.clone().unwrap_or_default().into_bytes(),
            uuid: self.uuid,
            features: self.features.clone().unwrap_or_default(),
            reserved_percent: self.reserved,
            root_owner: self.owner.unwrap_or_default(),
            journal: self.journal.unwrap_or_default(),
            ..MkfsOptions::default()
        }
    }
}

fn parse_uuid(text: &str) -> Result<[u8; 16], String> {
    let hex: String = text.chars().filter(|c| *c != '-').collect();
    if hex.len() != 32 || !hex.is_ascii() {
        return Err("a UUID has 32 hexadecimal digits".into());
    }
    u128::from_str_radix(&hex, 16).map(u128::to_be_bytes).map_err(|e| e.to_string())
}

fn parse_journal(text: &str) -> Result<JournalSize, String> {
    match text {
        "none" => Ok(JournalSize::None),
        _ => size::parse(text).map(JournalSize::Bytes),
    }
}

impl From<MkfsError> for Failure {
    fn from(e: MkfsError) -> Failure {
        match e {
            MkfsError::Usage(_) => Failure::usage(e.to_string()),
            _ => Failure::new(e.to_string()),
        }
    }
}

#[derive(Debug, Serialize)]
struct Made {
    block_size: u32,
    block_count: u64,
    inode_count: u32,
    group_count: u32,
    journal_blocks: u32,
    features: Vec<String>,
    uuid: String,
    bytes_written: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    in_use::check(&args.image, false)?;
    let existed = args.image.exists();
    if existed && !args.force && info::read_superblock(&args.image).is_ok() {
        return Err(Failure::new(format!(
            "{} holds an ext file system already; use --force to replace it and lose what is on it",
            args.image.display()
        )));
    }
    if !existed && args.size.is_none() {
        return Err(Failure::usage(format!(
            "{} does not exist: say how large it is to be, such as --size 1G",
            args.image.display()
        )));
    }
    let options = MkfsOptions { size_bytes: args.size, ..args.layout.options() };
    let report = make(&args.image, &options)?;
    let made = Made {
        block_size: report.block_size,
        block_count: report.block_count,
        inode_count: report.inode_count,
        group_count: report.group_count,
        journal_blocks: report.journal_blocks,
        features: report.features,
        uuid: output::uuid(&report.uuid),
        bytes_written: report.bytes_written,
    };
    if args.json {
        return output::json(&made);
    }
    output::print(format!(
        "{}: {} blocks of {} bytes ({}), {} inodes, journal of {} blocks\nUUID {}\nFeatures {}\n",
        args.image.display(),
        made.block_count,
        made.block_size,
        size::show(made.block_count * u64::from(made.block_size)),
        made.inode_count,
        made.journal_blocks,
        made.uuid,
        made.features.join(" "),
    ))
}

/// Makes a file system on `image`, which is made if it does not exist, and removed again if that
/// fails.
pub(super) fn make(image: &Path, options: &MkfsOptions) -> Result<Report> {
    let created = match File::create_new(image) {
        Ok(_) => true,
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => false,
        Err(e) => return Err(Failure::from(e).context(format!("making {}", image.display()))),
    };
    let open = || {
        FileDevice::open(image, &FileOptions::default())
            .map_err(|e| fjord::Error::Open(std::sync::Arc::new(e)))
    };
    let made = image::patiently(open).map_err(|e| crate::failure::open_failed(image, e)).and_then(
        |device| {
            fjord_mkfs::format(&device, options)
                .context(format!("making a file system on {}", image.display()))
        },
    );
    if made.is_err() && created {
        // The message of the failure is the one that counts.
        let _ = fs::remove_file(image);
    }
    made
}
