//! e2fsck on an image that is no file: it is served as one while e2fsck runs.
//!
//! Invariants: the image is open, and locked, from before e2fsck starts until after it ends; as root the mount is in
//! a namespace of this process, and so is gone with it, however it ends.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder},
    io,
    os::unix::{fs::DirBuilderExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicI32, Ordering},
    thread,
    time::Duration,
};

use fjord::ImageName;
use fjord_block::FileOptions;
use fjord_fuse::device_file::DeviceServer;
use rustix::{
    io::Errno,
    mount::{MountPropagationFlags, mount_change},
    process::{Pid, WaitId, WaitIdOptions, waitid},
    thread::{UnshareFlags, unshare_unsafe},
};

use super::{Args, operational};
use crate::failure::{self, Context, Failure, Result};

/// How long the mount may be busy after e2fsck has ended.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);
/// Added to the number of a signal that ended e2fsck, as a shell has it.
const EXIT_SIGNAL: i32 = 128;

/// Runs e2fsck on the image, and returns its exit code.
pub(super) fn check(args: &Args, e2fsck: &Path) -> Result<i32> {
    let options = FileOptions { read_only: args.mode.no_changes, ..FileOptions::default() };
    let opened = ImageName::parse(&args.image).open(&options, false);
    let device = opened.map_err(|e| operational(failure::open_failed(&args.image, e)))?;
    leave_namespace().map_err(operational)?;
    let dir = OwnDir::make().map_err(operational)?;
    let name = file_name(&args.image);
    let source = args.image.display().to_string();
    let server = DeviceServer::mount(device.clone(), &source, &dir.0, &name);
    let server = server.map_err(|e| operational(e.into()))?;
    let handle = server.handle();
    let serving = thread::Builder::new().name("fjord-device".into()).spawn(move || server.run());
    let serving = match serving {
        Ok(serving) => serving,
        Err(error) => {
            // The first error is the one to tell.
            let _ = handle.cut();
            return Err(operational(Failure::from(error).context("starting a thread")));
        }
    };
    let status = run(e2fsck, args.e2fsck_args(dir.0.join(&name).into()));
    // e2fsck has ended, so only others can keep it busy.
    let unmounted = handle.unmount_or_cut(BUSY_PATIENCE);
    // A panic of it has been told.
    let served = serving.join().unwrap_or(Ok(()));
    device.release();
    let code = status.context(e2fsck.display()).map_err(operational)?;
    unmounted.map_err(|e| operational(e.into()))?;
    served.map_err(|e| operational(e.into()))?;
    Ok(code)
}

/// The running e2fsck; 0 for none.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// Hands a signal on to e2fsck, which ends in its own way; then so does this process.
extern "C" fn hand_on(signal: libc::c_int) {
    let child = CHILD.load(Ordering::Relaxed);
    if child > 0 {
        // SAFETY: kill is async-signal-safe. The child is waited for only after it is no longer noted.
        unsafe { libc::kill(child, signal) };
    }
}

fn run(e2fsck: &Path, arguments: Vec<OsString>) -> io::Result<i32> {
    let mut child = Command::new(e2fsck).args(arguments).spawn()?;
    CHILD.store(child.id() as i32, Ordering::Relaxed);
    let handler: extern "C" fn(libc::c_int) = hand_on;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: the handler only loads an atomic and sends a signal.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
    }
    // The child stays until it is reaped, so its number is nobody else's meanwhile.
    let pid = Pid::from_child(&child);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
    CHILD.store(0, Ordering::Relaxed);
    let status = child.wait()?;
    Ok(status.code().unwrap_or_else(|| EXIT_SIGNAL + status.signal().unwrap_or(0)))
}

/// As root: has what is mounted from now on end with this process.
fn leave_namespace() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    // SAFETY: only mounts are no longer shared; no descriptor or memory is.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
        .and_then(|()| {
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        })
        .map_err(|errno| Failure::from(io::Error::from(errno)).context("making a mount namespace"))
}

/// The last part of a URL's path: e2fsck's messages have it.
fn file_name(image: &Path) -> String {
    let url = image.display().to_string();
    let path = url.split(['?', '@']).next().unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default();
    if name.is_empty() { "image".into() } else { name.into() }
}

/// An empty directory; removed when dropped.
struct OwnDir(PathBuf);

impl OwnDir {
    fn make() -> Result<OwnDir> {
        let dir = std::env::temp_dir().join(format!("fjord-fsck.{}", std::process::id()));
        // One that an earlier process left is as good, if it is empty.
        let _ = fs::remove_dir(&dir);
        DirBuilder::new().mode(0o700).create(&dir).context(dir.display())?;
        Ok(OwnDir(dir))
    }
}

impl Drop for OwnDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
