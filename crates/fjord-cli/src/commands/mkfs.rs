//! `fjord mkfs`: make a new image, empty or with contents.

use std::{
    io::{self, IsTerminal, Seek},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use fjord_block::FileDevice;
use fjord_mkfs::{Held, IjournalAreas, JournalSize, MkfsError, MkfsOptions, Report};
use fjord_tree::{Contents, Populated, Room, Rules, Source, TarInput, TarOptions, TreeError};
use serde::Serialize;

use super::tune;
use crate::{
    failure::{Context, Failure, Result},
    image, in_use, output, size, tree_rules, users,
};
use target::Target;

mod target;

#[derive(Debug, clap::Args)]
#[command(after_help = "What is not given is chosen as mke2fs does. Needs no root.\n\n\
The size of a new image with contents, when not given, is the smallest that holds them, a tenth \
more and 4 MiB: the directory, or the tar file, is looked through first. Owners, modes, times, \
links, holes, devices, attributes and access lists are kept; what cannot be is listed. A tar \
stream that comes through a pipe is kept in a temporary file (TMPDIR) until its size is known, \
unless --size is given.\n\nExamples:\n  \
fjord mkfs --size 1G disk.img\n  fjord mkfs --size 64M -b 4096 -L data -O orphan_file disk.img\n  \
fjord mkfs --from-dir rootfs disk.img\n  \
docker export box | fjord mkfs --from-tar - disk.img\n  \
fjord mkfs --from-tar base.tar.gz --from-tar app.tar.zst disk.img")]
pub(crate) struct Args {
    /// Image file (made if it does not exist) or block device
    image: PathBuf,
    /// Size of the image, such as 512M or 16T; when not given, what the contents need, or without
    /// contents that of the file or device
    #[arg(short, long, value_parser = size::parse)]
    size: Option<u64>,
    /// Put in what is in this directory
    #[arg(long, value_name = "DIR", conflicts_with = "from_tar")]
    from_dir: Option<PathBuf>,
    /// Put in what is in this tar file, plain or compressed with gzip, zstd or xz; - for standard
    /// input; given several times, the files are layers, the lowest first
    #[arg(long, value_name = "FILE")]
    from_tar: Vec<PathBuf>,
    /// The tar file is a layer of an OCI image: whiteouts (.wh.NAME) remove what lower layers have;
    /// several tar files always are
    #[arg(long, requires = "from_tar")]
    oci: bool,
    /// Make it even if the file or device holds something already
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    rules: tree_rules::TreeArgs,
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
    /// Number and size of the areas for i-transactions, such as 4x2M, or none; when not given,
    /// one for each core, of a size that goes with the journal's
    #[arg(long, value_name = "NxSIZE|none", value_parser = tune::parse_areas)]
    ijournal: Option<tune::Areas>,
    /// Owner of the root directory
    #[arg(long, value_name = "USER:GROUP", value_parser = users::owner)]
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
            ijournal: match self.ijournal {
                None => IjournalAreas::Auto,
                Some(tune::Areas::None) => IjournalAreas::None,
                Some(tune::Areas::Some { count, area_bytes }) => {
                    IjournalAreas::Areas { count, area_bytes }
                }
            },
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
            MkfsError::Usage(_) | MkfsError::TooSmall(_) => Failure::usage(e.to_string()),
            _ => Failure::new(e.to_string()),
        }
    }
}

impl From<TreeError> for Failure {
    fn from(e: TreeError) -> Failure {
        match e {
            TreeError::Usage(_) => Failure::usage(e.to_string()),
            TreeError::Mkfs(e) => e.into(),
            TreeError::Engine { path, source } => Failure::from(source).context(path),
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
    ijournal_areas: u32,
    ijournal_area_blocks: u32,
    features: Vec<String>,
    uuid: String,
    bytes_written: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    contents: Option<PutIn>,
}

/// The contents that a new image got.
#[derive(Debug, Serialize)]
struct PutIn {
    entries: u64,
    bytes: u64,
    skipped: Vec<String>,
    not_kept: Vec<String>,
}

/// Bytes of a block of an image with contents, whatever its size: what Linux and fjord are fastest
/// with, and what a file's attributes or a long symbolic link need.
const CONTENTS_BLOCK_SIZE: u32 = 4096;

/// Skipped things that are named one by one for people; scripts get all.
const SKIPPED_SHOWN: usize = 20;

pub(crate) fn run(args: &Args) -> Result<()> {
    in_use::check(&args.image, false)?;
    let held = held(&args.image)?;
    if !args.force {
        refuse_held(&args.image, held)?;
    }
    let mut input = Input::of(args)?;
    let rules = Rules { root_owner: args.layout.owner, ..args.rules.rules()? };
    let target = Target::new(&args.image, held == Held::Nothing)?;
    let mut options = args.layout.options();
    options.size_bytes = args.size.or_else(|| target.usual_bytes(input.is_some()));
    if input.is_some() {
        options.block_size = options.block_size.or(Some(CONTENTS_BLOCK_SIZE));
    }
    let contents = match &mut input {
        Some(input) => input.measure(options.size_bytes.is_some(), &rules)?,
        None => None,
    };
    match &contents {
        Some(contents) => options = contents.fit(&options, Room::Usual)?,
        None if options.size_bytes.is_none() => {
            return Err(Failure::usage(format!(
                "say how large {} is to be, such as --size 1G",
                args.image.display()
            )));
        }
        None => {}
    }
    let (report, populated) = format(&args.image, target, &options, |device| match input {
        Some(input) => input.put_in(device, contents.as_ref(), &rules).map(Some),
        None => Ok(None),
    })?;
    tell(args, report, populated)
}

/// What is at the path of an image already.
fn held(image: &Path) -> Result<Held> {
    if !image.exists() {
        return Ok(Held::Nothing);
    }
    let mut file = image::open_raw(image)?;
    let is_device = file.metadata().context(image.display())?.file_type().is_block_device();
    let size_bytes = file.seek(io::SeekFrom::End(0)).context(image.display())?;
    fjord_mkfs::held(&file, size_bytes, is_device).context(image.display())
}

fn refuse_held(image: &Path, held: Held) -> Result<()> {
    let what = match held {
        Held::Nothing => return Ok(()),
        Held::Known(what) => what,
        Held::Data => "data",
    };
    Err(Failure::new(format!(
        "{} holds {what} already; use --force to replace it and lose what is on it",
        image.display()
    )))
}

fn tell(args: &Args, report: Report, populated: Option<Populated>) -> Result<()> {
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
            "Journal areas {} of {} blocks\n",
            made.ijournal_areas, made.ijournal_area_blocks
        );
    }
    if let Some(contents) = &made.contents {
        text += &format!("Contents {} entries, {}\n", contents.entries, size::show(contents.bytes));
        for what in contents.skipped.iter().take(SKIPPED_SHOWN) {
            eprintln!("fjord: left out: {what}");
        }
        if let Some(more) = contents.skipped.len().checked_sub(SKIPPED_SHOWN).filter(|n| *n > 0) {
            eprintln!("fjord: left out: {more} more (--json lists all)");
        }
    }
    output::print(text)?;
    output::unkept(&not_kept)
}

/// Where the contents of a new image come from.
enum Input {
    Directory(PathBuf),
    Tars(Vec<TarInput>, TarOptions),
}

impl Input {
    /// What the arguments name, opened as far as that can be done before an image is made.
    fn of(args: &Args) -> Result<Option<Input>> {
        if let Some(dir) = &args.from_dir {
            return Ok(Some(Input::Directory(dir.clone())));
        }
        if args.from_tar.is_empty() {
            return Ok(None);
        }
        let is_stdin = |path: &&PathBuf| path.as_os_str() == "-";
        if args.from_tar.iter().filter(is_stdin).count() > 1 {
            return Err(Failure::usage("standard input (-) can be given once only"));
        }
        let open = |path: &PathBuf| match is_stdin(&path) {
            false => Ok(TarInput::open(path)?),
            true if io::stdin().is_terminal() => {
                Err(Failure::usage("standard input is a terminal; a tar stream is expected"))
            }
            true => Ok(TarInput::stdin()?),
        };
        let inputs = args.from_tar.iter().map(open).collect::<Result<Vec<_>>>()?;
        let layers = args.oci || inputs.len() > 1;
        Ok(Some(Input::Tars(inputs, TarOptions { layers, ..TarOptions::default() })))
    }

    /// What is there to put in; `None` where finding that out would cost more than it gives: a pipe
    /// is kept in a temporary file only when the image's size depends on it.
    fn measure(&mut self, has_size: bool, rules: &Rules) -> Result<Option<Contents>> {
        match self {
            Input::Directory(dir) => Ok(Some(Contents::of_directory(dir, rules)?)),
            Input::Tars(inputs, _) if has_size && !inputs.iter().all(TarInput::can_seek) => {
                Ok(None)
            }
            Input::Tars(inputs, _) => Ok(Some(Contents::of_tars(inputs, rules)?)),
        }
    }

    fn put_in(
        self,
        device: FileDevice,
        contents: Option<&Contents>,
        rules: &Rules,
    ) -> Result<Populated> {
        let bar = match contents {
            Some(contents) => output::byte_progress(contents.bytes, "copying"),
            None => output::byte_counter("copying"),
        };
        let mut show = |so_far: &Populated| bar.set_position(so_far.bytes);
        let device = Arc::new(device);
        let mut put =
            |source: Source<'_>| fjord_tree::populate(device.clone(), source, rules, &mut show);
        let populated = match self {
            Input::Directory(dir) => put(Source::Directory(&dir)),
            Input::Tars(inputs, options) => put(Source::Tars(&inputs, &options)),
        };
        bar.finish_and_clear();
        Ok(populated?)
    }
}

/// Makes a file system on `image`, which holds nothing. If that or filling it fails, the path is as
/// it was.
pub(super) fn make<T>(
    image: &Path,
    options: &MkfsOptions,
    fill: impl FnOnce(FileDevice) -> Result<T>,
) -> Result<(Report, T)> {
    format(image, Target::new(image, true)?, options, fill)
}

fn format<T>(
    image: &Path,
    target: Target,
    options: &MkfsOptions,
    fill: impl FnOnce(FileDevice) -> Result<T>,
) -> Result<(Report, T)> {
    target.build(options.size_bytes, |device| {
        let report = fjord_mkfs::format(&device, options)
            .context(format!("making a file system on {}", image.display()))?;
        Ok((report, fill(device)?))
    })
}
