//! `fjord mount`: serve an image on a directory until it is unmounted.
//!
//! Signals: SIGTERM and SIGINT unmount; a busy mount is waited for, then cut loose, so that the
//! image is clean in any case when the process ends. A second signal cuts at once.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fjord::{Fs, FsyncPolicyKind};
use fjord_fuse::{
    Server,
    mount::{self, MountError, MountHandle},
};
use fjord_mkfs::MkfsOptions;
use parking_lot::Mutex;
use rustix::mount::MountFlags;

use super::mkfs;
use crate::{
    daemon::{self, Side},
    failure::{Context, Failure, Result},
    image, mount_options, size,
};

/// How long a signal waits for a busy mount before it cuts it loose.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);

const HELP: &str = "\
Mount options (-o a,b=c):
  of every file system  ro rw nosuid nodev noexec sync dirsync noatime relatime strictatime;
                        those of fstab (defaults, noauto, user, x-..., ...) are accepted
  of FUSE               allow_other noallow_other max_read=N blksize=N max_threads=N fsname=NAME
                        fuseblk (or fail) nofuseblk writeback_cache low_latency (idle
                        processors poll while the mount is busy: faster, but costs power)
  of ext4               data=ordered|writeback|journal commit=SECONDS acl noacl discard nodiscard
                        barrier nobarrier delalloc nodelalloc grpid nogrpid resuid=N resgid=N
                        noload errors=remount-ro
  of fjord              fsync=POLICY cache_size=SIZE writeback=SECONDS

As root, users other than root may use the mount (noallow_other forbids it), and the mount is of type
fuseblk: sync, syncfs and umount wait until fjord is done. Otherwise use `fjord umount`.

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
    /// What an fsync commits
    #[arg(long, value_name = "POLICY", value_parser = mount_options::fsync_policy)]
    fsync: Option<FsyncPolicyKind>,
    /// Memory for file pages and metadata together
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    cache_size: Option<u64>,
    /// Let the kernel collect writes; faster for small ones, full images show at fsync only
    #[arg(long)]
    writeback_cache: bool,
    /// Change nothing
    #[arg(long)]
    read_only: bool,
    /// Mount options
    #[arg(short, value_name = "LIST")]
    options: Vec<String>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let mut options = mount_options::parse(&args.options)?;
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
            Side::Child(ready) => Some(ready),
        },
    };
    let signals = Signals::listen()?;
    let started = start(&image, &args, &options, &signals);
    let (fs, server, outcome) = match started {
        Ok((fs, server)) => (Some(fs), Some(server), Ok(())),
        Err(e) => (None, None, Err(e)),
    };
    if let Some(ready) = ready {
        ready.announce(&outcome)?;
        if let Err(failure) = &outcome {
            // The parent says why.
            std::process::exit(failure.code.into());
        }
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
    options: &mount_options::Options,
    signals: &Signals,
) -> Result<(Fs, Server)> {
    // The cheap checks first: an image is not to be recovered for a mount that cannot be.
    mount::check_mountpoint(&args.dir)?;
    if let Some(bytes) = args.new {
        make_new(image, bytes)?;
    }
    let fs = image::open(image, &options.engine)?;
    let server = match Server::mount(&fs, image, &args.dir, &options.fuse) {
        Ok(server) => server,
        Err(e) => {
            fs.unmount().context("closing the image failed")?;
            return Err(e.into());
        }
    };
    signals.watch(server.handle());
    if let Some(lost) = server.lost() {
        tracing::warn!("{lost}");
    }
    Ok((fs, server))
}

/// SIGTERM and SIGINT, taken by a thread of their own.
struct Signals {
    /// What to unmount; nothing yet while the image is being opened.
    mount: Arc<Mutex<Option<MountHandle>>>,
}

impl Signals {
    /// Starts to listen. Call it before any other thread is started: they inherit the mask.
    fn listen() -> Result<Signals> {
        let set = signal_set();
        // SAFETY: the set is initialised; the old mask is not asked for.
        let rc =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if rc != 0 {
            return Err(std::io::Error::from_raw_os_error(rc).into());
        }
        let mount = Arc::new(Mutex::new(None));
        let watched = Arc::clone(&mount);
        std::thread::Builder::new().name("fjord-signals".into()).spawn(move || serve(&watched))?;
        Ok(Signals { mount })
    }

    fn watch(&self, handle: MountHandle) {
        *self.mount.lock() = Some(handle);
    }
}

fn signal_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set, sigaddset changes an initialised one.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        set.assume_init()
    }
}

/// Waits for a signal, for ever or for so long. False when none came.
fn wait_for_signal(patience: Option<Duration>) -> bool {
    let set = signal_set();
    let timeout = patience.map(|d| libc::timespec {
        tv_sec: d.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(d.subsec_nanos()),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: set and timeout are valid for the call; information on the signal is not asked for.
    unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), timeout) > 0 }
}

fn serve(mount: &Mutex<Option<MountHandle>>) {
    loop {
        if !wait_for_signal(None) {
            continue;
        }
        let Some(handle) = mount.lock().clone() else {
            // Nothing is served yet, and whatever is on its way to the image is journaled.
            std::process::exit(i32::from(crate::failure::EXIT_FAILURE));
        };
        if let Err(e) = take_down(&handle) {
            eprintln!("fjord: {}", Failure::from(e));
        }
    }
}

fn take_down(handle: &MountHandle) -> Result<(), MountError> {
    let busy = match handle.unmount() {
        Err(MountError::Busy(dir)) => dir,
        done => return done,
    };
    eprintln!(
        "fjord: {} is in use; waiting {} seconds for it, then cutting it loose (signal again to \
         cut now)",
        busy.display(),
        BUSY_PATIENCE.as_secs()
    );
    let step = Duration::from_millis(100);
    let mut left = BUSY_PATIENCE;
    while left > step && !wait_for_signal(Some(step)) {
        match handle.unmount() {
            Err(MountError::Busy(_)) => left -= step,
            done => return done,
        }
    }
    handle.unmount_or_cut(Duration::ZERO)
}
