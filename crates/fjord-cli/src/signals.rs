//! Signals of a serving process: SIGTERM, SIGINT and SIGHUP (the terminal is gone, unless nohup(1)
//! had it ignored) unmount; SIGQUIT ends the process at once, with a core. A busy mount is detached
//! after a timeout; the session ends, and the image is closed properly. A second signal detaches at
//! once. If the mount is gone here but a copy of it in another mount namespace is still served,
//! that connection is aborted after the same timeout.
//!
//! Owns the signals' mask and the thread that takes them.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fjord_block::lock::{Mutex, Rank};
use fjord_fuse::mount::{MountError, MountHandle};

use crate::failure::{Failure, Result};

/// How long a signal waits for a busy mount before it detaches it.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);

/// The signals that unmount, taken by a thread of their own.
pub(crate) struct Signals {
    state: Arc<Mutex<State>>,
    /// Whether the thread is in an unmount.
    takes_down: Arc<AtomicBool>,
}

/// State that the signal thread works on.
#[derive(Default)]
struct State {
    /// What to unmount; nothing yet while the image is being opened.
    mount: Option<MountHandle>,
    /// A new image, removed if the process ends before it is mounted.
    new_image: Option<PathBuf>,
}

impl Signals {
    /// Starts to listen. Call it before any other thread is started: they inherit the mask.
    pub(crate) fn listen() -> Result<Signals> {
        block()?;
        let state = Arc::new(Mutex::new(Rank::Signals, State::default()));
        let takes_down = Arc::new(AtomicBool::new(false));
        let (watched, tells) = (Arc::clone(&state), Arc::clone(&takes_down));
        let thread = std::thread::Builder::new().name("fjord-signals".into());
        thread.spawn(move || serve(&watched, &tells))?;
        Ok(Signals { state, takes_down })
    }

    /// Call it when the session has ended: waits until the unmount that a signal asked for has returned,
    /// so that the process leaves no mount. Not for ever, since the kernel may hold it up.
    pub(crate) fn settle(&self) {
        let until = Instant::now() + BUSY_PATIENCE;
        while self.takes_down.load(Ordering::SeqCst) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Mounts; from then on a signal takes the mount down. A signal during the call is delayed, so
    /// that no mount is left without its process.
    ///
    /// # Errors
    /// Those of `mount`.
    pub(crate) fn watch<S, E>(
        &self,
        mount: impl FnOnce() -> Result<S, E>,
        handle: impl FnOnce(&S) -> MountHandle,
    ) -> Result<S, E> {
        let mut state = self.state.lock();
        let server = mount()?;
        state.mount = Some(handle(&server));
        Ok(server)
    }

    /// Creates a file. Until [`Signals::forget`], a signal that ends the process removes it.
    ///
    /// # Errors
    /// Those of [`File::create_new`].
    pub(crate) fn create_removable(&self, image: &Path) -> io::Result<()> {
        // No signal is served between the two.
        let mut state = self.state.lock();
        File::create_new(image)?;
        state.new_image = Some(image.to_owned());
        Ok(())
    }

    /// From now on signals remove no file.
    pub(crate) fn forget(&self) {
        self.state.lock().new_image = None;
    }
}

/// Runs `act` on a signal that ends the process, before it ends. Call it before any
/// other thread is started.
pub(crate) fn before_end(act: impl FnOnce() + Send + 'static) -> Result<()> {
    block()?;
    std::thread::Builder::new().name("fjord-signals".into()).spawn(move || {
        while !wait_for_signal(None) {}
        act();
        std::process::exit(i32::from(crate::failure::EXIT_FAILURE));
    })?;
    Ok(())
}

/// Keeps the exit status of child processes, also where the parent process had SIGCHLD ignored: the kernel
/// would reap them, and each wait for one would fail.
pub(crate) fn keep_child_status() {
    // SAFETY: the default action is valid for the signal. It cannot fail for this signal.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Blocks the signals, for sigwait.
fn block() -> Result<()> {
    let set = signal_set();
    // SAFETY: the set is initialised; the old mask is not asked for.
    let rc =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if rc != 0 {
        return Err(io::Error::from_raw_os_error(rc).into());
    }
    Ok(())
}

fn signal_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set, sigaddset changes an initialised one.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        if !is_ignored(libc::SIGHUP) {
            libc::sigaddset(set.as_mut_ptr(), libc::SIGHUP);
        }
        set.assume_init()
    }
}

/// Whether the parent process had set a signal to be ignored. Without this check, sigwait would
/// still receive it, as it is blocked.
fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call fills `action`, which is valid for its time, and changes nothing; all
    // zeroes, which stay if it fails, are a `sigaction` as well.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}

/// Waits for a signal, at most for `patience` if given. False when it expired.
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

fn serve(state: &Mutex<State>, takes_down: &AtomicBool) {
    loop {
        if !wait_for_signal(None) {
            continue;
        }
        let found = state.lock();
        let Some(handle) = found.mount.clone() else {
            if let Some(image) = &found.new_image {
                // A file is left, which can be removed by hand.
                let _ = fs::remove_file(image);
            }
            // Nothing is served yet, and changes in flight are journaled.
            std::process::exit(i32::from(crate::failure::EXIT_FAILURE));
        };
        takes_down.store(true, Ordering::SeqCst);
        drop(found);
        let taken_down = take_down(&handle);
        takes_down.store(false, Ordering::SeqCst);
        if let Err(e) = taken_down.and_then(|()| end_elsewhere(&handle)) {
            tracing::error!("{}", Failure::from(e));
        }
    }
}

/// The process ends with the session; if the session does not end, another mount namespace has a
/// copy of the mount.
fn end_elsewhere(handle: &MountHandle) -> Result<(), MountError> {
    wait_for_signal(Some(BUSY_PATIENCE));
    tracing::warn!(
        "{} is unmounted here, but still in use in another mount namespace or being \
         written; detaching it",
        handle.mountpoint().display()
    );
    handle.cut_copies(BUSY_PATIENCE)
}

fn take_down(handle: &MountHandle) -> Result<(), MountError> {
    let why = match handle.unmount() {
        Err(MountError::Busy(dir)) => format!("{} is in use", dir.display()),
        Err(why @ MountError::NoProcess(_)) => why.to_string(),
        done => return done,
    };
    tracing::warn!(
        "{why}; waiting {} seconds for it, then detaching it (signal again to detach now)",
        BUSY_PATIENCE.as_secs()
    );
    let step = Duration::from_millis(100);
    let until = Instant::now() + BUSY_PATIENCE;
    while Instant::now() < until && !wait_for_signal(Some(step)) {
        match handle.unmount() {
            Err(MountError::Busy(_) | MountError::NoProcess(_)) => (),
            done => return done,
        }
    }
    handle.unmount_or_cut(Duration::ZERO)
}
