//! `fjord mkfs`: make a new image, empty or with contents.

use std::path::{Path, PathBuf};

use fjord::ImageName;
use fjord_mkfs::{Held, MkfsError, MkfsOptions, Report};
use fjord_tree::{Contents, Populated, Room, Rules, TreeError};

use crate::{
    failure::{Context, Failure, Result},
    image::{self, RawFile, RawImage},
    in_use, size, tree_rules,
};
use input::Input;
use layout::Layout;
use repeat::Repeat;
use target::Target;

mod compat;
mod input;
mod layout;
mod outcome;
mod repeat;
mod target;

#[derive(Debug, clap::Args)]
#[command(after_help = "Defaults are those of mke2fs. Needs no root.\n\n\
With contents, the default size is what the contents need, plus a tenth, plus 4 MiB (or plus \
--extra-space), with the default journal and areas, computed in a first pass over the directory or \
tar file; --shrink makes a smaller image. The default block size is 4 KiB. \
Owners, modes, times, links, holes, devices, extended attributes and ACLs are kept; losses \
are listed, and the exit code is 6. A tar stream from a pipe is first stored in a temporary file \
(TMPDIR) to determine its size, unless --size is given.\n\n\
An existing image file is replaced (with --force) when the new one is complete; on failure it stays \
as it was.\n\nExamples:\n  \
fjord mkfs --size 1G disk.img\n  \
fjord mkfs --size 64M -b 4096 -L data -O orphan_file disk.img\n  \
fjord mkfs --from-dir rootfs disk.img\n  \
fjord mkfs --from-dir . --exclude '*.o' --exclude /build --squash-owner 0:0 disk.img\n  \
docker export box | fjord mkfs --from-tar - disk.img\n  \
fjord mkfs --from-tar base.tar.gz --from-tar app.tar.zst disk.img\n  \
fjord mkfs -q -t ext4 -d rootfs disk.img 512M")]
pub(crate) struct Args {
    /// Image file or image on a cluster (rbd:POOL/IMAGE), made if missing, or block device
    pub(crate) image: PathBuf,
    /// Size in the syntax of mke2fs, instead of --size: a number without a unit counts blocks (of 1
    /// KiB, or of -b)
    #[arg(value_name = "SIZE", conflicts_with = "size")]
    blocks: Option<String>,
    /// Size of the image, such as 512M or 16T [default: what the contents need; without contents,
    /// the size of the file or device]
    #[arg(short, long, value_parser = size::parse)]
    size: Option<u64>,
    /// Overwrite a file that contains data, or a device with recognized content (a file system, an
    /// archive, text, ...). Unrecognized content of a device is overwritten without it, as by mke2fs
    #[arg(short, long, short_alias = 'F')]
    force: bool,
    /// Make the image reproducible, byte for byte: times come from the contents, at most
    /// SOURCE_DATE_EPOCH; UUID and hash seed are derived from the contents (the default if
    /// SOURCE_DATE_EPOCH is set)
    #[arg(long)]
    reproducible: bool,
    /// Print only warnings and errors
    #[arg(short, long)]
    quiet: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    contents: ContentsArgs,
    #[command(flatten)]
    layout: Layout,
}

/// Contents of the image.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Contents")]
struct ContentsArgs {
    /// Fill the image with the contents of this directory
    #[arg(long, value_name = "DIR", conflicts_with = "from_tar")]
    from_dir: Option<PathBuf>,
    /// Fill the image from this tar file, plain or compressed with gzip, zstd or xz; - for standard
    /// input. If repeated, the files are layers, the lowest first
    #[arg(long, value_name = "FILE")]
    from_tar: Vec<PathBuf>,
    /// Treat the tar file as a layer of an OCI image: whiteouts (.wh.NAME) remove entries of lower
    /// layers (always on for several tar files)
    #[arg(long)]
    oci: bool,
    /// Fill the image from this directory or tar file, as mke2fs -d
    #[arg(short = 'd', value_name = "DIR|FILE", conflicts_with_all = ["from_dir", "from_tar"])]
    source: Option<PathBuf>,
    /// Free space in addition to the contents
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[arg(conflicts_with_all = ["size", "blocks"])]
    extra_space: Option<u64>,
    /// Make the smallest image that holds the contents (and --extra-space)
    #[arg(long, conflicts_with_all = ["size", "blocks"])]
    shrink: bool,
    #[command(flatten)]
    rules: tree_rules::TreeArgs,
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
            TreeError::Engine { path, source } => {
                let limit = fjord_tree::limit(&source);
                let Failure { code, message } = Failure::from(source).context(path);
                Failure { code, message: message + limit }
            }
            _ => Failure::new(e.to_string()),
        }
    }
}

/// Block size in bytes of an image with contents, of any size: the fastest for Linux and fjord, and
/// large enough for extended attributes and long symbolic links.
const CONTENTS_BLOCK_SIZE: u32 = 4096;

pub(crate) fn run(args: &Args) -> Result<()> {
    in_use::check(&args.image, false)?;
    let held = held(&args.image)?;
    if !args.force {
        refuse_held(&args.image, held)?;
    }
    let repeat = Repeat::wanted(args.reproducible)?;
    // User names of this machine are not part of the contents.
    let mut input = Input::of(&args.contents, repeat.is_none())?;
    let target = Target::new(&args.image, held == Held::Nothing)?;
    let plan = Plan::new(args, input.as_mut(), &target, repeat.as_ref())?;
    args.layout.warn();
    let (report, populated) = target.build(plan.options.size_bytes, |device| {
        let build = |options: &MkfsOptions| {
            let report = fjord_mkfs::format(&*device, options)?;
            let Some(input) = &input else { return Ok((report, Populated::default())) };
            let contents = plan.contents.as_ref();
            let populated = input.put_in(&device, contents, &plan.rules, args.quiet)?;
            Ok((report, populated))
        };
        let built = match args.contents.shrink {
            true => fjord_tree::shrink(&plan.open, &plan.options, extra_bytes(args), build),
            false => build(&plan.options),
        };
        built.map_err(Failure::from)
    })?;
    outcome::tell(args, report, input.is_some().then_some(populated))
}

/// Source and parameters of the new image.
struct Plan {
    rules: Rules,
    /// Result of the first pass over the contents; `None` without one.
    contents: Option<Contents>,
    /// The options, without those that depend on the contents.
    open: MkfsOptions,
    options: MkfsOptions,
}

impl Plan {
    fn new(
        args: &Args,
        input: Option<&mut Input>,
        target: &Target,
        repeat: Option<&Repeat>,
    ) -> Result<Plan> {
        let has_contents = input.is_some();
        let mut open = open_options(args, target, has_contents)?;
        let mut rules = rules(args)?;
        if let Some(repeat) = repeat {
            repeat.ask(&args.layout, &mut rules);
        }
        let needs_no_look = open.size_bytes.is_some() && repeat.is_none();
        let contents = match input {
            Some(input) => input.measure(needs_no_look, &rules)?,
            None => None,
        };
        if let Some(repeat) = repeat {
            repeat.fix(contents.as_ref(), &mut rules, &mut open);
        }
        let options = match &contents {
            Some(contents) => contents.fit(&open, room(args))?,
            None if open.size_bytes.is_none() => {
                return Err(Failure::usage(format!(
                    "give the size of {}, such as --size 1G",
                    args.image.display()
                )));
            }
            None => open.clone(),
        };
        Ok(Plan { rules, contents, open, options })
    }
}

/// The options that do not depend on the contents.
fn open_options(args: &Args, target: &Target, has_contents: bool) -> Result<MkfsOptions> {
    let shrinks = args.contents.shrink;
    let mut options = args.layout.options(shrinks);
    if has_contents {
        options.block_size = options.block_size.or(Some(CONTENTS_BLOCK_SIZE));
    } else if args.contents.extra_space.is_some() || shrinks {
        return Err(Failure::usage(
            "--extra-space and --shrink need contents; without contents, \
                                   give --size",
        ));
    }
    if shrinks {
        options = fjord_tree::small(&options);
    }
    options.size_bytes = match asked_bytes(args)? {
        None if shrinks => target.device_bytes(),
        None => target.usual_bytes(has_contents),
        asked => asked,
    };
    Ok(options)
}

/// Rules for entries on their way into the image.
fn rules(args: &Args) -> Result<Rules> {
    Ok(Rules {
        root_owner: args.layout.root_owner(),
        without_xattrs: args.layout.no_copy_xattrs(),
        ..args.contents.rules.rules()?
    })
}

/// The requested size.
fn asked_bytes(args: &Args) -> Result<Option<u64>> {
    let Some(blocks) = &args.blocks else { return Ok(args.size) };
    compat::parse_blocks(blocks, args.layout.block_size()).map(Some).map_err(Failure::usage)
}

fn room(args: &Args) -> Room {
    args.contents.extra_space.map_or(Room::Usual, Room::Bytes)
}

fn extra_bytes(args: &Args) -> u64 {
    args.contents.extra_space.unwrap_or(0)
}

/// Content that the path of the image already has.
fn held(image: &Path) -> Result<Held> {
    let name = ImageName::parse(image);
    let found = match name.is_remote() {
        true => target::look_at_remote(&name)?.map(RawImage::Remote),
        false if name.path().exists() => Some(image::open_raw(image)?),
        false => None,
    };
    let Some(raw) = found else { return Ok(Held::Nothing) };
    let (size_bytes, is_fixed) = raw.size().context(image.display())?;
    if let RawImage::File(RawFile { file, range: None }) = &raw {
        return fjord_mkfs::held(file, size_bytes, is_fixed).context(image.display());
    }
    // A part is as a device is: not blank, as a rule.
    let known =
        fjord_mkfs::held::known(size_bytes, &mut |offset, bytes| raw.read_exact_at(bytes, offset));
    Ok(known.context(image.display())?.map_or(Held::Nothing, Held::Known))
}

fn refuse_held(image: &Path, held: Held) -> Result<()> {
    let what = match held {
        Held::Nothing => return Ok(()),
        Held::Known(what) => what,
        Held::Data => "data",
    };
    Err(Failure::new(format!(
        "{} already contains {what}; use --force to overwrite it",
        image.display()
    )))
}

/// Makes a file system on `image`, which contains nothing. If that fails, the path is unchanged.
pub(super) fn make(image: &Path, options: &MkfsOptions) -> Result<Report> {
    Target::new(image, true)?.build(options.size_bytes, |device| {
        fjord_mkfs::format(&*device, options)
            .context(format!("making a file system on {}", image.display()))
    })
}
