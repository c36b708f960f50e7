//! `fjord mount`: serve an image on a directory until it is unmounted.
//!
//! SIGTERM, SIGINT and SIGHUP unmount: see [`crate::signals`].

use std::path::{Path, PathBuf};

use fjord::{Fs, FsyncPolicyKind};
use fjord_fuse::{
    ServeError, Server,
    mount::{self, MountError},
};
use fjord_mkfs::MkfsOptions;
use rustix::mount::MountFlags;

use super::mkfs;
use crate::{
    daemon::{self, Side},
    failure::{Context, Failure, Result},
    image, mount_options, remount,
    signals::Signals,
    size, syslog,
};

const HELP: &str = "\
Mount options (-o a,b=c):
  of every file system  ro rw nosuid nodev noexec sync dirsync noatime relatime strictatime
                        nodiratime lazytime; those of fstab (defaults, noauto, user, x-..., ...)
                        are accepted; remount changes ro, rw, nosuid, nodev and noexec
  of FUSE               allow_other noallow_other max_read=N blksize=N max_threads=N fsname=NAME
                        (shown by nofuseblk) fuseblk (or fail) nofuseblk writeback_cache nolow_latency (let
                        idle processors halt while the mount is busy: slower, but saves
                        power) low_latency (fail where they cannot be kept from it)
  of ext4               data=ordered|writeback|journal commit=SECONDS acl noacl discard nodiscard
                        barrier nobarrier delalloc nodelalloc grpid nogrpid resuid=N resgid=N
                        noload errors=remount-ro
  of fjord              fsync=POLICY inline_data_max=SIZE (ijournal) cache_size=SIZE
                        writeback=SECONDS scheduler=epoch|direct|auto

As root, users other than root may use the mount (noallow_other forbids it), and the mount is of type
fuseblk: sync, syncfs and umount wait until fjord is done. Otherwise use `fjord umount`.

A daemon sends warnings and errors to syslog, or else to the kernel's log; `fjord stats` has them too.

Examples:
  fjord mount disk.img /mnt
  fjord mount --new 1G disk.img /mnt
  fjord mount --daemon -o ro,noatime disk.img /mnt
  mount -t fuse.fjord disk.img /mnt -o commit=30
  /etc/fstab:  /srv/disk.img  /mnt  fuse.fjord  noatime,nofail  0 0";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Directory to mount it on
    dir: PathBuf,
    /// Make the image first, of this size; it must not exist
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "read_only")]
    new: Option<u64>,
    /// Return when it is mounted, and serve in the background
    #[arg(long)]
    daemon: bool,
    /// What an fsync commits: auto (what the image is made for), compound, group, fast-commit,
    /// ijournal
    #[arg(long, value_name = "POLICY", value_parser = mount_options::fsync_policy)]
    fsync: Option<FsyncPolicyKind>,
    /// Memory for file pages and metadata together
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    cache_size: Option<u64>,
    /// Let the kernel collect writes; faster for small ones, full images show at fsync only
    #[arg(long)]
    writeback_cache: bool,
    /// Change nothing; a dirty journal is replayed first, unless -o noload is given
    #[arg(long)]
    read_only: bool,
    /// Mount options
    #[arg(short, value_name = "LIST")]
    options: Vec<String>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let mut options = mount_options::parse(&args.options)?;
    if options.fuse.remount {
        return remount::run(&args.dir, &args.options);
    }
    if args.read_only {
        options.fuse.flags.insert(MountFlags::RDONLY);
    }
    options.fuse.writeback_cache |= args.writeback_cache;
    if let Some(policy) = args.fsync {
        options.engine.fsync = policy;
    }
    if let Some(bytes) = args.cache_size {
        options.engine.cache_size_bytes = bytes;
    }
    mount_options::settle(&mut options);
    // The daemon changes its directory, and the mount table should show a whole path.
    let image = std::path::absolute(&args.image)?;
    let ready = match args.daemon {
        false => None,
        true => match daemon::fork()? {
            Side::Parent => return Ok(()),
            Side::Child(ready) => {
                syslog::start(image.display(), &std::path::absolute(&args.dir)?);
                Some(ready)
            }
        },
    };
    let signals = Signals::listen()?;
    let started = start(&image, &args, &mut options, &signals);
    let (fs, server, outcome) = match started {
        Ok((fs, server)) => (Some(fs), Some(server), Ok(())),
        Err(e) => (None, None, Err(e)),
    };
    if let Some(ready) = ready {
        ready.announce(&outcome)?;
    }
    outcome?;
    let (Some(fs), Some(server)) = (fs, server) else { return Ok(()) };
    let served = server.run().context("unmounting");
    // Not before the image is closed may anything else open it.
    drop(fs);
    served
}

fn make_new(image: &Path, bytes: u64) -> Result<()> {
    if image.exists() {
        return Err(Failure::new(format!(
            "{} exists already; mount it without --new, or give another name",
            image.display()
        )));
    }
    let options = MkfsOptions { size_bytes: Some(bytes), ..MkfsOptions::default() };
    mkfs::make(image, &options, |_| Ok(())).map(drop)
}

fn start(
    image: &Path,
    args: &Args,
    options: &mut mount_options::Options,
    signals: &Signals,
) -> Result<(Fs, Server)> {
    // The cheap checks first: an image is not to be recovered for a mount that cannot be.
    mount::check_mountpoint(&args.dir)?;
    if let Some(bytes) = args.new {
        make_new(image, bytes)?;
    }
    let fs = image::open_for_mount(image, options)?;
    let server = match Server::mount(&fs, image, &args.dir, &options.fuse) {
        Ok(server) => server,
        Err(ServeError::Mount(e @ MountError::Engine(_))) => {
            // Fails in any case, and says the same.
            let _ = fs.unmount();
            return Err(e.into());
        }
        Err(e) => {
            fs.unmount().context("closing the image failed")?;
            return Err(e.into());
        }
    };
    signals.watch(server.handle());
    Ok((fs, server))
}
