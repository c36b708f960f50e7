//! `fjord fsck`, `fsck.fjord`: recover the journal, then have e2fsck check and repair the image.
//!
//! Owns the order of the two steps and the exit codes, which are those of fsck(8). Invariants: with
//! -n nothing is written; e2fsck never gets an image with pending i-transactions; while e2fsck
//! works on an image file, no other fjord process opens it: e2fsck is exec'ed in this process and
//! inherits its lock. An image on a cluster is served to it as a file (`remote`).

mod remote;

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use fjord::{Error, Fs, ImageName, MountOptions};
use fjord_block::FileDevice;
use fjord_format::{
    features::{Compat, Incompat},
    superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES},
};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::{
    failure::{Context, Failure, Result},
    image::{self, RawFile, RawImage},
    in_use,
    output::{self, counted},
    pending::Pending,
};

/// Errors are left uncorrected.
const EXIT_UNCORRECTED: u8 = 4;
/// Operational error.
const EXIT_OPERATIONAL: u8 = 8;
/// Wrong arguments.
pub(crate) const EXIT_USAGE: u8 = 16;

/// Timeout for a lock: a daemon holds it for a moment after its unmount.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

const HELP: &str = "\
A dirty journal is recovered by fjord, whatever fsync policy wrote it; then e2fsck runs with the
options given here. e2fsck alone refuses an image whose journal holds fsynced changes of
fsync=ijournal. Recovery includes the orphans.

With -n nothing is written: a dirty image is reported with exit code 4 and not checked. With -y,
fsynced changes in the journal are discarded if they are damaged and recovery fails, as by
`fjord recover --drop-fsyncs`; without -y they are kept, and the exit code is 4.

Without -p, -y and -n e2fsck asks before each repair, and needs a terminal for that: scripts and
boot give -p (repair what is safe) or -y (repair all).
An undo file (-z) holds the changes of e2fsck, not those of the recovery.

The links fsck.fjord and fsck.fuse.fjord run this command. fsck(8) runs the latter for entries of
type fuse.fjord in fstab whose sixth field is not 0.

Exit codes, a sum of:
  0   no errors
  1   errors corrected
  2   errors corrected, the system should be rebooted
  4   errors left uncorrected, or a dirty image with -n
  8   operational error: image missing, in use or not ext4, e2fsck not installed
  16  wrong arguments
  32  canceled by the user

Examples:
  fjord fsck -p disk.img
  fjord fsck -fn disk.img
  fsck.fjord -fy disk.img";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    #[command(flatten)]
    mode: Mode,
    /// Check even if the image is marked clean
    #[arg(short)]
    force: bool,
    /// Look for bad blocks with badblocks(8); twice: with a non-destructive write test
    #[arg(short = 'c', action = clap::ArgAction::Count)]
    bad_blocks: u8,
    /// Keep the blocks that are in the list of bad blocks (with -c)
    #[arg(short)]
    keep_bad_blocks: bool,
    /// Add the blocks of this file to the list of bad blocks
    #[arg(short = 'l', value_name = "FILE")]
    add_bad_blocks: Option<PathBuf>,
    /// Make the blocks of this file the list of bad blocks
    #[arg(short = 'L', value_name = "FILE", conflicts_with = "add_bad_blocks")]
    set_bad_blocks: Option<PathBuf>,
    /// Write the progress to this file descriptor; 0 shows a bar
    #[arg(short = 'C', value_name = "FD", allow_hyphen_values = true)]
    progress_fd: Option<String>,
    /// Use the superblock in this block
    #[arg(short = 'b', value_name = "BLOCK")]
    superblock: Option<String>,
    /// Block size to look for the superblock with
    #[arg(short = 'B', value_name = "BYTES")]
    block_size: Option<String>,
    /// Extended options of e2fsck(8)
    #[arg(short = 'E', value_name = "LIST")]
    extended: Vec<String>,
    /// Device of the external journal
    #[arg(short = 'j', value_name = "DEVICE")]
    external_journal: Option<PathBuf>,
    /// Save the blocks that e2fsck overwrites to this file
    #[arg(short = 'z', value_name = "FILE")]
    undo_file: Option<PathBuf>,
    /// Optimize directories
    #[arg(short = 'D')]
    optimize_directories: bool,
    /// Flush the buffer cache of the device first
    #[arg(short = 'F')]
    flush: bool,
    /// Print timing statistics; twice: of each pass
    #[arg(short = 't', action = clap::ArgAction::Count)]
    timing: u8,
    /// Print debugging output
    #[arg(short = 'd')]
    debug: bool,
    /// Print more about the check
    #[arg(short = 'v', display_order = 2000, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// Answers to e2fsck's questions.
#[derive(Debug, clap::Args)]
struct Mode {
    /// Repair without questions what can be repaired safely
    #[arg(short, visible_short_alias = 'a', conflicts_with_all = ["no_changes", "yes"])]
    preen: bool,
    /// Change nothing; report only
    #[arg(short, conflicts_with = "yes")]
    no_changes: bool,
    /// Answer yes to all questions
    #[arg(short)]
    yes: bool,
    /// Ask questions (default)
    #[arg(short = 'r', hide = true)]
    interactive: bool,
}

impl Args {
    /// The command line of e2fsck.
    fn e2fsck_args(&self, device: OsString) -> Vec<OsString> {
        let flags = [
            ("-p", u8::from(self.mode.preen)),
            ("-n", u8::from(self.mode.no_changes)),
            ("-y", u8::from(self.mode.yes)),
            ("-f", u8::from(self.force)),
            ("-c", self.bad_blocks),
            ("-k", u8::from(self.keep_bad_blocks)),
            ("-D", u8::from(self.optimize_directories)),
            ("-F", u8::from(self.flush)),
            ("-t", self.timing),
            ("-d", u8::from(self.debug)),
            ("-v", self.verbose),
        ];
        let values = [
            ("-l", self.add_bad_blocks.clone().map(OsString::from)),
            ("-L", self.set_bad_blocks.clone().map(OsString::from)),
            ("-C", self.progress_fd.clone().map(OsString::from)),
            ("-b", self.superblock.clone().map(OsString::from)),
            ("-B", self.block_size.clone().map(OsString::from)),
            ("-j", self.external_journal.clone().map(OsString::from)),
            ("-z", self.undo_file.clone().map(OsString::from)),
        ];
        let mut out = Vec::new();
        for (flag, count) in flags {
            out.extend((0..count).map(|_| OsString::from(flag)));
        }
        for (flag, value) in values {
            out.extend(value.into_iter().flat_map(|value| [flag.into(), value]));
        }
        out.extend(self.extended.iter().flat_map(|list| ["-E".into(), list.into()]));
        out.extend(["--".into(), device]);
        out
    }

    /// What e2fsck calls a file, or a part of one.
    fn device(&self, raw: &RawFile) -> OsString {
        let mut device = OsString::from(ImageName::parse(&self.image).path());
        if let Some(range) = &raw.range {
            // The form of its I/O manager.
            device.push(format!("?offset={}", range.start));
        }
        device
    }
}

/// Does not return when e2fsck has been run.
pub(crate) fn run(args: &Args) -> Result<()> {
    let e2fsck = find_e2fsck().ok_or_else(|| {
        operational(Failure::new("e2fsck is not installed: install the package e2fsprogs"))
    })?;
    let raw = image::open_raw(&args.image).map_err(operational)?;
    in_use::check(&args.image, args.mode.no_changes).map_err(operational)?;
    if is_dirty(&raw) {
        if args.mode.no_changes {
            return Err(uncorrected(format!(
                "{}: the journal is dirty{}, and nothing is written with -n; run `fsck.fjord -p \
                 {0}` to recover it, if no other host has it mounted{}",
                args.image.display(),
                pending(&args.image).map(|text| format!(" ({text})")).unwrap_or_default(),
                match ImageName::parse(&args.image).is_remote() {
                    true => " (a snapshot is recovered in a copy, by `fjord snapshot`)",
                    false => "",
                }
            )));
        }
        recover(args)?;
    }
    let raw = match raw {
        RawImage::File(raw) => raw,
        RawImage::Remote(device) => {
            drop(device);
            // Flushes this process's output before e2fsck's.
            let _ = io::stdout().flush();
            std::process::exit(remote::check(args, &e2fsck)?);
        }
    };
    let e2fsck_args = args.e2fsck_args(args.device(&raw));
    lock_for_good(&args.image, raw, args.mode.no_changes)?;
    // Flushes this process's output before e2fsck's.
    let _ = io::stdout().flush();
    let failed = Command::new(&e2fsck).args(e2fsck_args).exec();
    Err(operational(Failure::new(format!("{} cannot be run: {failed}", e2fsck.display()))))
}

fn operational(failure: Failure) -> Failure {
    Failure { code: EXIT_OPERATIONAL, ..failure }
}

fn uncorrected(message: String) -> Failure {
    Failure { code: EXIT_UNCORRECTED, message }
}

/// e2fsck in PATH, or in the sbin directories, which PATH often lacks.
fn find_e2fsck() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join("e2fsck"))
        .find(|file| file.is_file())
}

/// Whether the superblock says that the journal needs replay. An unreadable superblock is left to
/// e2fsck.
fn is_dirty(image: &RawImage) -> bool {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    if image.read_exact_at(&mut bytes, SUPERBLOCK_OFFSET_BYTES).is_err() {
        return false;
    }
    RawSuperblock::decode(&bytes).is_ok_and(|raw| {
        let features = raw.features();
        features.compat.contains(Compat::HAS_JOURNAL)
            && features.incompat.contains(Incompat::RECOVER)
    })
}

/// Description of what recovery will replay, as far as it is known before.
fn pending(image: &Path) -> Option<String> {
    let plan = image::log(image).ok()??;
    let blocks = counted(plan.report().replayed_blocks, "block");
    let pending = Pending::of(&plan, &super::info::read_superblock(image).ok()?);
    Some(match pending.counts() {
        none if none.is_empty() => "nothing to replay".to_owned(),
        counts if pending.transactions > 0 => format!("{counts}; {blocks}"),
        counts => counts,
    })
}

/// Recovers the journal, or leaves that to e2fsck if e2fsck can do it.
fn recover(args: &Args) -> Result<()> {
    let image = &args.image;
    let name = ImageName::parse(image);
    if !name.is_remote()
        && let Err(error) = File::options().write(true).open(name.path())
    {
        return Err(operational(Failure::new(format!(
            "{}: the journal is dirty, and the image cannot be written ({error}); make it writable",
            image.display()
        ))));
    }
    let text = pending(image);
    // Only what belongs to a recovery: no mount count, no mount time.
    let options =
        MountOptions { read_only: true, recover_before_read_only: true, ..MountOptions::default() };
    let open = || Fs::open(image, &options).and_then(|fs| fs.unmount());
    let error = match image::patiently(image, open) {
        Ok(()) => {
            let text = text.map(|text| format!(": {text}")).unwrap_or_default();
            return output::print(format!("{}: journal recovered{text}\n", image.display()));
        }
        Err(error @ (Error::Open(_) | Error::Io(_) | Error::NoRoom(_))) => {
            return Err(operational(crate::failure::open_failed(image, error)));
        }
        Err(error) => error,
    };
    let name = image.display();
    // If the journal is unreadable, e2fsck reports it.
    if !image::is_marked(image).unwrap_or(false) {
        output::complain(format!("{name}: recovery is left to e2fsck: {error}"));
        return Ok(());
    }
    // Only damage is a reason to discard them.
    if !error.is_corrupt() {
        return Err(operational(crate::failure::open_failed(image, error)));
    }
    if !args.mode.yes {
        return Err(uncorrected(format!(
            "{name}: the fsynced changes in the journal cannot be applied: {error}; e2fsck refuses \
             the image until they are discarded: `fsck.fjord -y {name}` does that and repairs the \
             rest"
        )));
    }
    image::drop_fsyncs(image).map_err(operational)?;
    output::print(format!(
        "{name}: discarded the fsynced changes since the last commit, which cannot be applied: \
         {error}\n"
    ))
}

/// Locks an image file; the lock stays until e2fsck, exec'ed in this process, ends. e2fsck itself
/// opens a block device exclusively.
fn lock_for_good(image: &Path, raw: RawFile, read_only: bool) -> Result<()> {
    let RawFile { file, range } = raw;
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Ok(());
    }
    // An exclusive lock of a part needs a descriptor for writing.
    let file = match (&range, read_only) {
        (Some(_), false) => {
            File::options().read(true).write(true).open(ImageName::parse(image).path())
        }
        _ => Ok(file),
    };
    let file = file.context(image.display()).map_err(operational)?;
    let started = Instant::now();
    while !FileDevice::lock(&file, range.as_ref(), read_only) {
        if started.elapsed() >= LOCK_PATIENCE {
            return Err(operational(Failure::new(format!(
                "{} is in use by another process; end it, or wait for it",
                image.display()
            ))));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    fcntl_setfd(&file, FdFlags::empty()).map_err(|e| operational(io::Error::from(e).into()))?;
    // Closed when e2fsck ends.
    std::mem::forget(file);
    Ok(())
}
