//! `fjord snapshot`: a copy of an image as it is at one moment, whether it is mounted or not.
//!
//! The process that serves the mount, or this one, copies to an unnamed file; this process recovers
//! the copy and gives it its name when it is durable.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use fjord::ImageName;
use fjord::snapshot::{self, Reflink, SnapshotOptions, SnapshotReport};
use fjord_block::{FileDevice, FileOptions, OpenError};
use fjord_fuse::mount::lies_on;
use rustix::process::umask;
use serde::Serialize;

use crate::{
    failure::{self, Context, Failure, Result},
    image,
    in_use::{self, Found},
    output,
    pending_file::PendingFile,
    size,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The copy includes everything written to the mount before the call. It is recovered, so that Linux,
e2fsck and fjord find it clean. Writes pause for some milliseconds, which the output tells; where blocks are not shared, the first
write to each 64 KiB of the image also waits until these have been read. Holes stay holes. UUID and
label are those of the image.

Only root and the user who mounted an image can take a snapshot of its mount. The copy must lie
outside of the mount.

Examples:
  fjord snapshot /mnt backup.img
  fjord snapshot --force disk.img /srv/backup/disk.img
  fjord snapshot --reflink=never /mnt /srv/images/monday.img")]
pub(crate) struct Args {
    /// Directory on a fjord mount, or an image file, block device or image on a cluster (rbd:POOL/IMAGE), mounted or
    /// not
    pub(crate) source: PathBuf,
    /// File for the copy
    out: PathBuf,
    /// Replace OUT if it exists
    #[arg(short, long)]
    force: bool,
    /// Share blocks with the image, as cp --reflink does: auto, always (fail if unsupported), never
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = reflink)]
    reflink: Reflink,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
}

fn reflink(text: &str) -> Result<Reflink, String> {
    Reflink::from_name(text).ok_or_else(|| format!("{text:?} is not auto, always or never"))
}

#[derive(Debug, Serialize)]
struct Outcome<'a> {
    source: &'a Path,
    out: &'a Path,
    size_bytes: u64,
    copied_bytes: u64,
    reflinked: bool,
    mounted: bool,
    pause_us: u128,
    held_writes: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let source = in_use::find(&args.source)?;
    check_out(args, &source)?;
    let new = PendingFile::create(&args.out, args.force)?;
    let report = match &source {
        Found::Mount(dir) => {
            // Dirty pages of the kernel; the daemon's own sync reports an error of this one.
            let _ = rustix::fs::syncfs(dir);
            fjord_fuse::snapshot::ask(dir, new.file(), args.reflink)
                .context(args.source.display())?
        }
        Found::Image => copy(args, &new)?,
    };
    check_is_other(args, &report)?;
    snapshot::settle(new.path()).map_err(|e| {
        // The path exists in this process only.
        Failure::from(e).context(format!("recovering the copy {}", args.out.display()))
    })?;
    if matches!(source, Found::Mount(_)) && report.reflinked {
        warn_of_room(&args.source, new.file())?;
    }
    // As cp(1): the image's bits, less those of the umask. No execute bits.
    let masked = umask(rustix::fs::Mode::empty());
    umask(masked);
    new.take_place(report.mode & 0o666 & !masked.bits())?;
    tell(args, &report, matches!(source, Found::Mount(_)))
}

/// Refuses an output file on the mount itself or on what lies on it, which would deadlock, and one that
/// is an image in use.
fn check_out(args: &Args, source: &Found) -> Result<()> {
    let out = args.out.display();
    let parent = match args.out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = fs::metadata(parent).context(parent.display())?;
    if let Found::Mount(dir) = source
        && lies_on(parent.dev(), dir.metadata().context(args.source.display())?.dev())
    {
        return Err(Failure::usage(format!(
            "{out} is on the mount that it would copy; give a path on another file system"
        )));
    }
    let Ok(found) = fs::metadata(&args.out) else { return Ok(()) };
    if !found.is_file() || !args.force {
        // Reported when the file is created.
        return Ok(());
    }
    let source = ImageName::parse(&args.source);
    let image = match source.is_remote() {
        true => None,
        false => Some(fs::metadata(source.path()).context(args.source.display())?),
    };
    if image.is_some_and(|image| (image.dev(), image.ino()) == (found.dev(), found.ino())) {
        return Err(Failure::usage(format!("{out} is the image itself; give another name")));
    }
    in_use::check(&args.out, false)?;
    match FileDevice::open(&args.out, &FileOptions::default()) {
        Err(e @ OpenError::InUse { .. }) => Err(Failure::in_use(e.to_string())),
        _ => Ok(()),
    }
}

/// Only the serving process knows the image of a mount for certain.
fn check_is_other(args: &Args, report: &SnapshotReport) -> Result<()> {
    match fs::metadata(&args.out) {
        Ok(found) if (found.dev(), found.ino()) == report.image => Err(Failure::usage(format!(
            "{} is the image itself; give another name",
            args.out.display()
        ))),
        _ => Ok(()),
    }
}

/// Copies an image that is not mounted.
fn copy(args: &Args, new: &PendingFile) -> Result<SnapshotReport> {
    let options = SnapshotOptions { reflink: args.reflink, ..SnapshotOptions::default() };
    let copied =
        image::patiently(&args.source, || snapshot::copy_image(&args.source, new.file(), &options));
    copied.map_err(|e| failure::open_failed(&args.source, e))
}

/// Shared blocks need space when they are overwritten.
fn warn_of_room(source: &Path, copy: &File) -> Result<()> {
    let stat = rustix::fs::fstatvfs(copy).map_err(std::io::Error::from)?;
    let free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    let shared_bytes = copy.metadata()?.blocks().saturating_mul(512);
    if free_bytes < shared_bytes {
        tracing::warn!(
            "the copy shares {} with the image: each block that {} overwrites needs space on that \
             file system, which has {} left; free space there, or the mount may turn read-only",
            size::show(shared_bytes),
            source.display(),
            size::show(free_bytes)
        );
    }
    Ok(())
}

fn tell(args: &Args, report: &SnapshotReport, mounted: bool) -> Result<()> {
    if args.json {
        return output::json(&Outcome {
            source: &args.source,
            out: &args.out,
            size_bytes: report.size_bytes,
            copied_bytes: report.copied_bytes,
            reflinked: report.reflinked,
            mounted,
            pause_us: report.pause.as_micros(),
            held_writes: report.held_count,
        });
    }
    let how = match report.reflinked {
        true => "blocks shared".to_owned(),
        false => format!("{} copied", size::show(report.copied_bytes)),
    };
    let pause = match mounted {
        true => format!("; writes paused for {:.1} ms", report.pause.as_secs_f64() * 1e3),
        false => String::new(),
    };
    output::print(format!(
        "{}: snapshot of {}, {}, {how}{pause}\n",
        args.out.display(),
        args.source.display(),
        size::show(report.size_bytes)
    ))
}
