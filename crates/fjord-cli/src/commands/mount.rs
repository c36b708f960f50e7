//! `fjord mount`: serve an image on a directory until it is unmounted.
//!
//! SIGTERM, SIGINT and SIGHUP unmount: see [`crate::signals`].

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use fjord::{Fs, FsyncPolicyKind, ImageName};
use fjord_fuse::{
    ServeError, Server,
    mount::{self, MountError},
};
use fjord_mkfs::MkfsOptions;
use rustix::mount::MountFlags;

use super::mkfs;
use crate::{
    cli::Offset,
    daemon::{self, Side},
    failure::{Context, Failure, Result},
    image, mount_options, remount,
    signals::Signals,
    size, syslog,
};

const HELP: &str = "\
As root the mount type is fuseblk, and other users may use the mount: sync and syncfs return when
everything written is durable, umount when the image is clean. Otherwise the type is fuse: sync and
syncfs do not reach fjord (fsync does), and umount returns early; `fjord umount` waits.

With --new the root directory belongs to the user who mounts. If the mount fails, the new image
is removed.

With --daemon, warnings and errors go to syslog, or else to the kernel's log; `fjord stats`
shows the latest of them.

Mount options of every file system:
  ro, rw             read-only, read-write
  nosuid nodev noexec nosymfollow sync dirsync lazytime
                     as mount(8) describes them
  noatime, relatime, strictatime, nodiratime
                     when access times are updated (default: relatime)
  remount            change ro, rw, nosuid, nodev and noexec of a mounted image
  defaults, noauto, nofail, user, _netdev, x-...
                     accepted, for fstab

Mount options of FUSE:
  allow_other        let other users in (default for root)
  noallow_other      let only the user who mounts in
  fuseblk            mount as type fuseblk, fail if unavailable (needs root)
  nofuseblk          mount as type fuse, also as root
  fsname=NAME        source shown in /proc/mounts (only with nofuseblk)
  writeback_cache    the same as --writeback-cache
  max_read=BYTES     largest read request
  blksize=BYTES      block size of a fuseblk mount: 512, 1024, 2048 or 4096
  max_threads=N      maximum number of worker threads
  io_uring, noio_uring
                     requests come over io_uring instead of /dev/fuse, from the beginning or
                     never (default: once many callers are the rule, if the kernel offers it)
  low_latency        keep processors awake while requests come, fail if unavailable
  nolow_latency      let idle processors halt: slower, but saves power

Mount options of ext4:
  data=MODE          ordered (default), writeback or journal
  commit=SECONDS     commit interval (default: 5)
  noload             do not replay the journal (with ro)
  acl, noacl         POSIX ACLs (access control lists; default: acl)
  discard, nodiscard
                     discard freed blocks in the image (default: nodiscard)
  barrier, nobarrier
                     flush the device's cache at commits (default: barrier)
  delalloc, nodelalloc
                     delayed allocation (default: delalloc)
  grpid, nogrpid     new files get the group of their directory (default: nogrpid)
  bsddf, minixdf     df leaves out what metadata takes, or not (default: bsddf)
  resuid=N, resgid=N
                     who may use the reserved blocks besides root
  errors=remount-ro  the only mode: an error makes the mount read-only
  auto_da_alloc, init_itable, stripe=N, journal_checksum
                     and others of ext4(5): accepted, for fstab; -v says why they change
                     nothing

Mount options of fjord:
  offset=BYTES, sizelimit=BYTES
                     the image is this part of the file; IMAGE@NUMBER names a partition
  fsync=POLICY       the same as --fsync
  cache_size=SIZE    the same as --cache-size
  inline_data_max=SIZE
                     most file data in an i-transaction, the record of an fsync under
                     fsync=ijournal (default: 32K)
  steal              the same as --steal
  order_only, noorder_only
                     fsync and fdatasync only put changes in order, for programs that need
                     no more; the attribute user.fjord.order_only says it for a file, or for
                     what is made in a directory (default: noorder_only)
  writeback=SECONDS  age at which dirty data is written back (default: 5)
  scheduler=NAME     write ordering: epoch, direct or auto (default: auto, which is direct
                     unless FJORD_SCHEDULER says epoch)
  pipeline=NAME      commits one after the other (serial), or each as soon as the one
                     before is dispatched (dual) (default: auto, which is serial unless
                     FJORD_PIPELINE says dual)
  journal_lists=NAME
                     how changes enter a transaction: under a lock (locked) or without
                     (lockfree) (default: lockfree)
  journal_io=NAME    who writes commits and checkpoints: one thread at a time, for commits a
                     thread of the journal (dedicated, with pipeline=serial), or those that
                     wait, together (cooperative) (default: cooperative)

Examples:
  fjord mount disk.img /mnt
  fjord mount --new 1G new.img /mnt
  fjord mount --daemon -o ro,noatime disk.img /mnt
  mount -t fuse.fjord disk.img /mnt -o commit=30

Example of a block device in /etc/fstab:
  LABEL=data  /mnt  fuse.fjord  noatime  0  2

Example of an image file in /etc/fstab, checked by systemd before it is mounted:
  /srv/disk.img  /mnt  fuse.fjord  noatime,x-systemd.requires=fjord-fsck@srv-disk.img.service  0  0";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Mount point
    dir: PathBuf,
    /// Create the image first, with this size; it must not exist
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "read_only")]
    new: Option<u64>,
    /// Return when it is mounted, and serve in the background
    #[arg(long)]
    daemon: bool,
    /// Fsync policy: auto (by the image's features), compound, group, fast-commit, ijournal
    #[arg(long, value_name = "POLICY", value_parser = mount_options::fsync_policy)]
    fsync: Option<FsyncPolicyKind>,
    /// Memory for the page cache and the metadata cache together, at least 8M [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = mount_options::cache_size)]
    cache_size: Option<u64>,
    /// Use the kernel's writeback cache: faster small writes; ENOSPC is reported by fsync only
    #[arg(long)]
    writeback_cache: bool,
    /// Mount read-only; a dirty journal is replayed first, unless -o noload is given
    #[arg(short, long, visible_alias = "ro")]
    read_only: bool,
    /// Take an image on a cluster from another host that has it mounted, which can write nothing
    /// to it any more
    #[arg(long)]
    steal: bool,
    /// Check the arguments and the directory, but do not mount; for the mount helper
    #[arg(long, hide = true)]
    fake: bool,
    /// Mount options, separated by commas: a,b=c
    #[arg(short, value_name = "LIST")]
    options: Vec<String>,
}

/// Mount options that come before those of the command line.
const OPTIONS_VARIABLE: &str = "FJORD_MOUNT_OPTIONS";

pub(crate) fn run(args: Args) -> Result<()> {
    let mut options = mount_options::parse(&args.options)?;
    if options.fuse.remount {
        return remount::run(&args.dir, &args.options);
    }
    if let Ok(first) = std::env::var(OPTIONS_VARIABLE) {
        let all = std::iter::once(&first).chain(&args.options).cloned().collect::<Vec<_>>();
        options = mount_options::parse(&all)?;
    }
    if args.fake {
        return mount::check_mountpoint(&args.dir).map(drop).map_err(Failure::from);
    }
    if args.read_only {
        options.fuse.flags.insert(MountFlags::RDONLY);
    }
    options.engine.steal |= args.steal;
    options.fuse.writeback_cache |= args.writeback_cache;
    if let Some(policy) = args.fsync {
        options.engine.fsync = policy;
    }
    if let Some(bytes) = args.cache_size {
        options.engine.cache_size_bytes = bytes;
    }
    mount_options::settle(&mut options);
    // The daemon changes its directory, and the mount table should show an absolute path.
    let mut image = ImageName::absolute(&args.image)?;
    if options.offset_bytes.or(options.size_bytes).is_some() {
        let offset_bytes = options.offset_bytes.unwrap_or(0);
        Offset::apply(offset_bytes, options.size_bytes, &mut image).map_err(Failure::usage)?;
    }
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
    if let Some(ready) = ready
        && let Err(untold) = ready.announce(&outcome)
    {
        // The waiting process was killed: its caller takes the mount for failed.
        return Err(server.map_or(Ok(()), withdraw).err().unwrap_or(untold));
    }
    outcome?;
    let (Some(fs), Some(server)) = (fs, server) else { return Ok(()) };
    let served = server.run().context("unmounting");
    signals.settle();
    // Nothing else may open the image before it is closed.
    drop(fs);
    served
}

/// Takes down a mount that nobody was told of, and closes the image.
fn withdraw(server: Server) -> Result<()> {
    let handle = server.handle();
    let unmounting = std::thread::spawn(move || handle.unmount_or_cut(Duration::ZERO));
    let served = server.run().context("unmounting");
    // A panic there has been told.
    if let Ok(unmounted) = unmounting.join() {
        unmounted?;
    }
    served
}

/// An image that `--new` made; removed on drop, unless it was kept.
struct NewImage<'a> {
    image: &'a Path,
    signals: &'a Signals,
    kept: bool,
}

impl NewImage<'_> {
    /// Makes the image. Its root directory belongs to the user who mounts it.
    fn make<'a>(image: &'a Path, bytes: u64, signals: &'a Signals) -> Result<NewImage<'a>> {
        if ImageName::parse(image).is_part() {
            return Err(Failure::usage(format!(
                "{} is a part of a file: make the file system with `fjord mkfs`, and mount it \
                 without --new",
                image.display()
            )));
        }
        if ImageName::parse(image).is_remote() {
            return Err(Failure::usage(format!(
                "--new makes files; make {0} with `fjord mkfs --size SIZE {0}`, and mount it without --new",
                image.display()
            )));
        }
        match signals.create_removable(image) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Failure::new(format!(
                    "{} already exists; mount it without --new, or give another name",
                    image.display()
                )));
            }
            Err(e) => return Err(Failure::from(e).context(format!("making {}", image.display()))),
        }
        let new = NewImage { image, signals, kept: false };
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let options =
            MkfsOptions { size_bytes: Some(bytes), root_owner: owner, ..MkfsOptions::default() };
        mkfs::make(image, &options)?;
        Ok(new)
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for NewImage<'_> {
    fn drop(&mut self) {
        self.signals.forget();
        if !self.kept {
            // The original failure is reported.
            let _ = fs::remove_file(self.image);
        }
    }
}

fn start(
    image: &Path,
    args: &Args,
    options: &mut mount_options::Options,
    signals: &Signals,
) -> Result<(Fs, Server)> {
    // The cheap checks first: a mount that must fail does not recover the image.
    mount::check_mountpoint(&args.dir)?;
    let new = args.new.map(|bytes| NewImage::make(image, bytes, signals)).transpose()?;
    let fs = image::open_for_mount(image, options)?;
    let mount = || Server::mount(&fs, image, &args.dir, &options.fuse);
    let server = match signals.watch(Some(fs.device_watch()), mount, Server::handle) {
        Ok(server) => server,
        Err(ServeError::Mount(e @ MountError::Engine(_))) => {
            // Fails again, with the same error.
            let _ = fs.unmount();
            return Err(e.into());
        }
        Err(e) => {
            fs.unmount().context("closing the image failed")?;
            return Err(e.into());
        }
    };
    if let Some(new) = new {
        new.keep();
    }
    Ok((fs, server))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of options in the help: what stands left of the meanings.
    fn options() -> Vec<String> {
        let blocks = HELP.split("\n\n").filter(|block| block.starts_with("Mount options of "));
        let lines = blocks.flat_map(|block| block.lines().skip(1));
        let terms = lines.filter(|line| !line.starts_with("   ")).map(|line| {
            let line = line.trim_start();
            line.split_once("  ").map_or(line, |(term, _)| term)
        });
        terms.flat_map(|term| term.split([',', ' '])).map(str::to_owned).collect()
    }

    #[test]
    fn the_options_of_the_help_are_known() {
        let named: Vec<String> = options().into_iter().filter(|name| !name.is_empty()).collect();
        assert!(named.len() > 50, "{named:?}");
        for name in named {
            let option = match name.split_once('=') {
                None => name.replace("x-...", "x-systemd.automount"),
                Some((name, "POLICY")) => format!("{name}=group"),
                Some((name, "MODE")) => format!("{name}=ordered"),
                Some((name, "NAME")) if name == "scheduler" => format!("{name}=direct"),
                Some(("cache_size", "SIZE")) => "cache_size=8M".to_owned(),
                Some((name, "NAME")) if name == "pipeline" => format!("{name}=dual"),
                Some((name, "NAME")) if name == "journal_lists" => format!("{name}=locked"),
                Some((name, "NAME")) if name == "journal_io" => format!("{name}=dedicated"),
                Some((name, "BYTES" | "SIZE")) => format!("{name}=4096"),
                Some((name, "SECONDS" | "N")) => format!("{name}=7"),
                Some(_) => name,
            };
            assert!(mount_options::parse(std::slice::from_ref(&option)).is_ok(), "{option}");
        }
    }
}
