//! `fjord sim`: serve a modelled device as a file, cut its power, read its counts.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use fjord_block::{
    MemImage,
    sim::{Profile, SimDevice},
};
use fjord_fuse::{
    mount::{self, MountError},
    sim::{CONTROL, DISK, IMAGE, STATS, SimReport, SimServer},
};
use rustix::fs::FlockOperation;

use crate::{
    daemon::{self, Side},
    failure::{Context, Failure, Result},
    output,
    signals::Signals,
    size, syslog,
};

/// Size of a device without --size and without an image.
const SIZE_BYTES: u64 = 1 << 30;

const HELP: &str = "\
Profiles:
  ufs           mobile storage: queue of 16, 1 channel, barriers by in-order recovery
  plain-ssd     SATA: queue of 32, 8 channels, barriers by transactional writeback
  supercap-ssd  SATA: queue of 32, 8 channels, power-loss protection
  nvme          PCIe: queue of 64, 8 channels, barriers by transactional writeback
  p3700         PCIe: queue of 64, 18 channels, power-loss protection
  disk          7,200 rpm, write cache, no queue, no barriers

DIR then contains `disk`, the device: give it to mkfs, fjord mount or losetup. Its contents are in
memory; an fsync of it is a flush command. With --image FILE it starts with the contents of FILE,
which are replaced when DIR is unmounted with the power on.

After --cut every request fails. It writes an image that a power cut at that moment may have left:
everything flushed, and a subset of the rest that the device may have kept, chosen by the seed.
Another cut with another seed gives another image of the same moment.

Examples:
  fjord sim --profile ufs --size 512M --daemon /tmp/ufs
  fjord mkfs /tmp/ufs/disk && fjord mount --daemon /tmp/ufs/disk /mnt
  losetup --direct-io=on --find --show /tmp/ufs/disk
  fjord sim --stats /tmp/ufs
  fjord sim --cut /tmp/ufs --out after.img --seed 7 && fjord recover after.img
  fjord umount /tmp/ufs";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Directory to serve the device in
    #[arg(required_unless_present_any = ["cut", "stats"], conflicts_with_all = ["cut", "stats"])]
    dir: Option<PathBuf>,
    /// Device to simulate
    #[arg(short, long, value_name = "NAME", value_parser = profile)]
    #[arg(required_unless_present_any = ["cut", "stats"], conflicts_with_all = ["cut", "stats"])]
    profile: Option<&'static Profile>,
    /// Size of the device [default: that of the image, or 1G]
    #[arg(short, long, value_name = "SIZE", value_parser = size::parse, requires = "dir")]
    size: Option<u64>,
    /// File with the contents, read at the start and replaced at unmount
    #[arg(short, long, value_name = "FILE", requires = "dir")]
    image: Option<PathBuf>,
    /// Return once it is mounted, and serve in the background
    #[arg(long, requires = "dir")]
    daemon: bool,
    /// Cut the power of the device served in this directory
    #[arg(long, value_name = "DIR", requires = "out", conflicts_with = "stats")]
    cut: Option<PathBuf>,
    /// File for the image
    #[arg(long, value_name = "FILE", requires = "cut")]
    out: Option<PathBuf>,
    /// Seed that chooses one of the images that the cut may leave
    #[arg(long, value_name = "NUMBER", requires = "cut")]
    seed: Option<u64>,
    /// Show the counters of the device served in this directory
    #[arg(long, value_name = "DIR")]
    stats: Option<PathBuf>,
    /// Print JSON
    #[arg(long, requires = "stats")]
    json: bool,
}

fn profile(name: &str) -> Result<&'static Profile, String> {
    Profile::from_name(name).ok_or_else(|| {
        let known = Profile::ALL.map(|profile| profile.name).join(", ");
        format!("unknown profile {name:?}; known: {known}")
    })
}

pub(crate) fn run(args: Args) -> Result<()> {
    match (&args.cut, &args.out, &args.stats, &args.dir, args.profile) {
        (Some(dir), Some(out), ..) => cut(dir, out, args.seed.unwrap_or(0)),
        (_, _, Some(dir), ..) => show_stats(dir, args.json),
        (_, _, _, Some(dir), Some(profile)) => serve(&args, dir, profile),
        _ => Err(Failure::usage("give a profile and a directory; see fjord sim --help")),
    }
}

fn serve(args: &Args, dir: &Path, profile: &Profile) -> Result<()> {
    let dir = std::path::absolute(dir)?;
    // The daemon changes its directory.
    let image = args.image.as_ref().map(std::path::absolute).transpose()?;
    let ready = match args.daemon {
        false => None,
        true => match daemon::fork()? {
            Side::Parent => return Ok(()),
            Side::Child(ready) => {
                syslog::start(source(image.as_deref(), profile), &dir);
                Some(ready)
            }
        },
    };
    let signals = Signals::listen()?;
    let (started, outcome) = match start(args, &dir, image.as_deref(), profile, &signals) {
        Ok(started) => (Some(started), Ok(())),
        Err(e) => (None, Err(e)),
    };
    if let Some(ready) = ready {
        ready.announce(&outcome)?;
    }
    outcome?;
    let Some(Started { server, device, kept }) = started else { return Ok(()) };
    let served = server.run();
    signals.settle();
    served?;
    match kept {
        Some(kept) if device.is_powered() => kept.save(&device.contents()),
        _ => Ok(()),
    }
}

struct Started {
    server: SimServer,
    device: Arc<SimDevice>,
    /// None without --image.
    kept: Option<Kept>,
}

fn start(
    args: &Args,
    dir: &Path,
    image: Option<&Path>,
    profile: &Profile,
    signals: &Signals,
) -> Result<Started> {
    mount::check_mountpoint(dir)?;
    let (kept, contents) = match image {
        Some(path) => {
            let (kept, contents) = Kept::open(path, args.size)?;
            (Some(kept), contents)
        }
        None => (None, MemImage::new(checked_size(args.size.unwrap_or(SIZE_BYTES))?)),
    };
    let device = Arc::new(SimDevice::with_contents(profile, contents));
    let mount = || SimServer::mount(Arc::clone(&device), &source(image, profile), dir);
    let server = signals.watch(None, mount, SimServer::handle)?;
    Ok(Started { server, device, kept })
}

/// Name in the mount table and in messages.
fn source(image: Option<&Path>, profile: &Profile) -> String {
    image.map_or_else(|| profile.name.to_owned(), |path| path.display().to_string())
}

fn checked_size(bytes: u64) -> Result<u64> {
    // Larger files cannot be addressed by read(2) and write(2).
    if bytes == 0 || !bytes.is_multiple_of(4096) || i64::try_from(bytes).is_err() {
        return Err(Failure::usage(format!(
            "invalid size of {bytes} bytes; give a multiple of 4K, such as 512M"
        )));
    }
    Ok(bytes)
}

/// The file of --image, locked as long as the device runs.
struct Kept {
    path: PathBuf,
    _lock: File,
}

impl Kept {
    fn open(path: &Path, size: Option<u64>) -> Result<(Kept, MemImage)> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .context(path.display())?;
        if !file.metadata()?.is_file() {
            return Err(Failure::new(format!("{} is not a regular file", path.display())));
        }
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Failure::in_use(format!(
                "{} is in use by another process; unmount it there first",
                path.display()
            )));
        }
        let len = file.metadata()?.len();
        if len == 0 {
            file.set_len(checked_size(size.unwrap_or(SIZE_BYTES))?)?;
        } else if let Some(size) = size.filter(|size| *size != len) {
            return Err(Failure::usage(format!(
                "{} has {len} bytes, not {size}; omit --size",
                path.display()
            )));
        } else {
            checked_size(len)?;
        }
        let contents = MemImage::from_file(path).context(path.display())?;
        Ok((Kept { path: path.to_owned(), _lock: file }, contents))
    }

    /// Replaces the file, so that a failure leaves the old one.
    fn save(&self, contents: &MemImage) -> Result<()> {
        let mut name = self.path.as_os_str().to_owned();
        name.push(".new");
        let new = PathBuf::from(name);
        contents
            .write_to_file(&new)
            .and_then(|()| File::open(&new)?.sync_all())
            .and_then(|()| fs::rename(&new, &self.path))
            .inspect_err(|_| discard(&new))
            .context(format!("writing {}", self.path.display()))
    }
}

/// Removes the incomplete file; errors are ignored.
fn discard(path: &Path) {
    let _ = fs::remove_file(path);
}

/// Whether the device served in a directory has power.
pub(super) fn is_powered(dir: &Path) -> Result<bool> {
    Ok(report(&fs::read_to_string(dir.join(STATS)).context(dir.display())?)?.powered)
}

fn report(text: &str) -> Result<SimReport> {
    let report = serde_json::from_str(text);
    report.map_err(|e| std::io::Error::new(ErrorKind::InvalidData, e)).context("its counts")
}

/// The directory, if a modelled device is served there.
fn served(dir: &Path) -> Result<PathBuf> {
    let dir = fs::canonicalize(dir).context(dir.display())?;
    match mount::mount_at(&dir).context("/proc/self/mountinfo")? {
        Some(entry) if entry.is_sim() => Ok(dir),
        Some(_) => Err(Failure::new(format!(
            "{} is not a simulated device but another mount; give the directory named to fjord sim",
            dir.display()
        ))),
        None => Err(MountError::NotMounted(dir).into()),
    }
}

/// Creates the file for an image of this size, all zero, or empties an existing one.
fn new_image(path: &Path, len: u64) -> Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path);
    let file = file.context(path.display())?;
    if !file.metadata().context(path.display())?.is_file() {
        return Err(Failure::new(format!(
            "{} is not a regular file; give a regular file or a new path for the image",
            path.display()
        )));
    }
    file.set_len(0).and_then(|()| file.set_len(len)).context(path.display())?;
    Ok(file)
}

fn cut(dir: &Path, out: &Path, seed: u64) -> Result<()> {
    let dir = served(dir)?;
    let disk = dir.join(DISK);
    let len = fs::metadata(&disk).context(disk.display())?.len();
    // Before the power cut: with a bad path the device keeps running.
    let file = new_image(out, len)?;
    let control = File::options().write(true).open(dir.join(CONTROL));
    control
        .and_then(|control| control.write_at(format!("cut {seed}\n").as_bytes(), 0))
        .context("cutting the power")?;
    copy_image(&dir, &file, out, len).inspect_err(|_| discard(out))
}

/// Copies the image of the cut to `file`, which lies at `out` and is all zeroes.
fn copy_image(dir: &Path, file: &File, out: &Path, len: u64) -> Result<()> {
    let mut image = File::open(dir.join(IMAGE)).context("reading the image")?;
    let mut chunk = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        let want = chunk.len().min((len - at) as usize);
        image.read_exact(&mut chunk[..want]).context("reading the image")?;
        for (index, block) in chunk[..want].chunks(4096).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(block, at + index as u64 * 4096)
                    .context(format!("writing {}", out.display()))?;
            }
        }
        at += want as u64;
    }
    Ok(())
}

fn show_stats(dir: &Path, json: bool) -> Result<()> {
    let path = served(dir)?.join(STATS);
    let text = fs::read_to_string(&path).context(path.display())?;
    if json {
        return output::print(text);
    }
    let report = report(&text)?;
    let seconds = |ns: u64| ns as f64 / 1e9;
    let power = if report.powered { "on" } else { "cut" };
    let mut table = String::new();
    for (name, value) in [
        ("profile", report.profile),
        ("size", size::show(report.size_bytes)),
        ("power", power.into()),
        ("running", format!("{:.3} s", seconds(report.elapsed_ns))),
        ("writes", format!("{} ({})", report.write_count, size::show(report.write_bytes))),
        ("  with FUA", report.fua_count.to_string()),
        ("reads", format!("{} ({})", report.read_count, size::show(report.read_bytes))),
        ("flushes", report.flush_count.to_string()),
        ("discards", report.discard_count.to_string()),
        ("programs", format!("{} of {} units", report.program_count, report.programmed_units)),
        ("waits for cache", format!("{:.3} s", seconds(report.cache_stall_ns))),
        (
            "queue depth",
            format!("{:.2} mean, {} max", report.queue_depth_mean, report.queue_depth_max),
        ),
    ] {
        table.push_str(&format!("{name:<18}{value}\n"));
    }
    output::print(table)
}
