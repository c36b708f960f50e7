//! Signals of a serving process: SIGTERM, SIGINT and SIGHUP (the terminal is gone, unless nohup(1)
//! had it ignored) unmount; SIGQUIT ends the process at once, with a core. A busy mount is detached
//! after a timeout; the session ends, and the image is closed properly. A second signal detaches at
//! once. If the mount is gone here but a copy of it in another mount namespace is still served,
//! that connection is aborted after the same timeout. A device that answers nothing for long (a cluster
//! that is down) is given up, and a process that cannot end even so is ended.
//!
//! Owns the signals' mask, the thread that takes them, and the one that unmounts.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use fjord::DeviceWatch;
use fjord_block::lock::{Mutex, Rank};
use fjord_fuse::mount::{MountError, MountHandle};

use crate::failure::{Failure, Result};

/// How long a signal waits for a busy mount before it detaches it.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);
/// How long a device may be silent while a signal's unmount waits for it. A cluster that loses one of its OSDs
/// answers nothing for some 15 s.
const SILENCE_PATIENCE: Duration = Duration::from_secs(20);
/// The same after a second signal.
const SILENCE_PATIENCE_AGAIN: Duration = Duration::from_secs(1);
/// How often an unmount under way is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The signals that unmount, taken by a thread of their own.
pub(crate) struct Signals(Arc<Shared>);

/// What the process and the threads of the signals share.
struct Shared {
    state: Mutex<State>,
    /// Whether an unmount that a signal asked for is under way.
    takes_down: AtomicBool,
    /// Signals so far, since an unmount last failed.
    count: AtomicU32,
}

/// State that the signal thread works on.
#[derive(Default)]
struct State {
    /// What to unmount; nothing yet while the image is being opened.
    mount: Option<MountHandle>,
    /// What the mount stands on.
    device: Option<DeviceWatch>,
    /// When the last request was served.
    served: Option<Instant>,
    /// A new image, removed if the process ends before it is mounted.
    new_image: Option<PathBuf>,
}

impl Signals {
    /// Starts to listen. Call it before any other thread is started: they inherit the mask.
    pub(crate) fn listen() -> Result<Signals> {
        block()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(Rank::Signals, State::default()),
            takes_down: AtomicBool::new(false),
            count: AtomicU32::new(0),
        });
        // Both from the beginning: a process that may start no more threads can be ended, too.
        let (asks, asked) = mpsc::channel();
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("fjord-unmount".into());
        thread.spawn(move || asked.into_iter().for_each(|handle| unmount(&handle, &of_thread)))?;
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("fjord-signals".into());
        thread.spawn(move || serve(&of_thread, &asks))?;
        Ok(Signals(shared))
    }

    /// Call it when the session has ended: waits until the unmount that a signal asked for has returned,
    /// so that the process leaves no mount. Not for ever, since the kernel may hold it up.
    pub(crate) fn settle(&self) {
        let now = Instant::now();
        self.0.state.lock().served = Some(now);
        let until = now + BUSY_PATIENCE;
        while self.0.takes_down.load(Ordering::SeqCst) && Instant::now() < until {
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
        device: Option<DeviceWatch>,
        mount: impl FnOnce() -> Result<S, E>,
        handle: impl FnOnce(&S) -> MountHandle,
    ) -> Result<S, E> {
        let mut state = self.0.state.lock();
        let server = mount()?;
        state.mount = Some(handle(&server));
        state.device = device;
        Ok(server)
    }

    /// Creates a file. Until [`Signals::forget`], a signal that ends the process removes it.
    ///
    /// # Errors
    /// Those of [`File::create_new`].
    pub(crate) fn create_removable(&self, image: &Path) -> io::Result<()> {
        // No signal is served between the two.
        let mut state = self.0.state.lock();
        File::create_new(image)?;
        state.new_image = Some(image.to_owned());
        Ok(())
    }

    /// From now on signals remove no file.
    pub(crate) fn forget(&self) {
        self.0.state.lock().new_image = None;
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

fn serve(shared: &Shared, asks: &mpsc::Sender<MountHandle>) {
    let mut given_up = None;
    loop {
        let is_under_way = shared.count.load(Ordering::SeqCst) > 0;
        if wait_for_signal(is_under_way.then_some(LOOK_INTERVAL)) {
            shared.count.fetch_add(1, Ordering::SeqCst);
            begin_unmount(shared, asks);
        }
        if shared.count.load(Ordering::SeqCst) > 0 {
            end_without_device(shared, &mut given_up);
        }
    }
}

/// Has the other thread unmount, unless that is under way.
fn begin_unmount(shared: &Shared, asks: &mpsc::Sender<MountHandle>) {
    let state = shared.state.lock();
    let Some(handle) = state.mount.clone() else {
        if let Some(image) = &state.new_image {
            // A file is left, which can be removed by hand.
            let _ = fs::remove_file(image);
        }
        // Nothing is served yet, and changes in flight are journaled.
        end_process();
    };
    if shared.takes_down.swap(true, Ordering::SeqCst) {
        return;
    }
    drop(state);
    // The thread ends only with the process.
    let _ = asks.send(handle);
}

/// Takes a mount down for a signal.
fn unmount(handle: &MountHandle, shared: &Shared) {
    let done = take_down(handle, &shared.count);
    shared.takes_down.store(false, Ordering::SeqCst);
    if let Err(e) = done.and_then(|()| end_elsewhere(handle, &shared.count)) {
        shared.count.store(0, Ordering::SeqCst);
        tracing::error!("{}", Failure::from(e));
    }
}

/// Gives the device up that answers nothing, and ends the process if that does not.
fn end_without_device(shared: &Shared, given_up: &mut Option<Instant>) {
    let (device, served) = {
        let state = shared.state.lock();
        (state.device.clone(), state.served)
    };
    let patience = match shared.count.load(Ordering::SeqCst) {
        0 | 1 => SILENCE_PATIENCE,
        _ => SILENCE_PATIENCE_AGAIN,
    };
    let silence = device.as_ref().map_or(Duration::ZERO, DeviceWatch::silence);
    if let (None, Some(device)) = (&given_up, device)
        && silence >= patience
    {
        tracing::warn!(
            "the device has not answered for {} s; ending without it: what fsync has promised is in the image",
            silence.as_secs()
        );
        device.give_up();
        *given_up = Some(Instant::now());
    }
    let cannot_end = |since: Option<Instant>, patience| {
        since.is_some_and(|since: Instant| since.elapsed() >= patience)
    };
    // A second signal must not cut short what `settle` waits for.
    if cannot_end(*given_up, BUSY_PATIENCE) || cannot_end(served, SILENCE_PATIENCE) {
        end_process();
    }
}

/// Ends the process, whatever its libraries wait for.
fn end_process() -> ! {
    // SAFETY: it runs no destructors, and what is in the image is journaled.
    unsafe { libc::_exit(i32::from(crate::failure::EXIT_FAILURE)) }
}

/// The process ends with the session; if the session does not end, another mount namespace has a
/// copy of the mount.
fn end_elsewhere(handle: &MountHandle, count: &AtomicU32) -> Result<(), MountError> {
    let (until, before) = (Instant::now() + BUSY_PATIENCE, count.load(Ordering::SeqCst));
    while Instant::now() < until && count.load(Ordering::SeqCst) == before {
        std::thread::sleep(LOOK_INTERVAL);
    }
    tracing::warn!(
        "{} is unmounted here, but still in use in another mount namespace or being \
         written; detaching it",
        handle.mountpoint().display()
    );
    handle.cut_copies(BUSY_PATIENCE)
}

fn take_down(handle: &MountHandle, count: &AtomicU32) -> Result<(), MountError> {
    let before = count.load(Ordering::SeqCst);
    let why = match handle.unmount() {
        Err(MountError::Busy(dir)) => format!("{} is in use", dir.display()),
        Err(why @ MountError::NoProcess(_)) => why.to_string(),
        done => return done,
    };
    tracing::warn!(
        "{why}; waiting {} seconds for it, then detaching it (signal again to detach now)",
        BUSY_PATIENCE.as_secs()
    );
    let until = Instant::now() + BUSY_PATIENCE;
    while Instant::now() < until && count.load(Ordering::SeqCst) == before {
        std::thread::sleep(LOOK_INTERVAL);
        match handle.unmount() {
            Err(MountError::Busy(_) | MountError::NoProcess(_)) => (),
            done => return done,
        }
    }
    handle.unmount_or_cut(Duration::ZERO)
}
