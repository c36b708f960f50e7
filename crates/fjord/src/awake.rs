//! Low latency: keeps processors from halting during a rapid sequence of calls.
//!
//! A thread sleeps in fsync while the device writes, and in a system call while the mount serves
//! it. Its processor halts meanwhile, and waking a halted processor often takes longer than the
//! wait itself, above all in a virtual machine. A program that keeps `/dev/cpu_dma_latency` open
//! with value 0 makes idle processors poll instead (Documentation/power/pm_qos_interface; the
//! kernel's flash drivers do the same during requests). Polling costs power, and other virtual
//! machines' processor time, so the hold begins only after many calls in a short time and ends with
//! them.
//!
//! Owns the descriptor and the thread that closes it. Invariant: the hold ends within two
//! `PERIOD`s of the last busy one, and with the [`Awake`]; while nothing is held, nothing runs.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fjord_block::lock::{Condvar, Mutex, Rank};
use rustix::fs::{Access, access};

/// The PM QoS device.
pub const CPU_DMA_LATENCY: &str = "/dev/cpu_dma_latency";

/// [`BUSY_CALLS`] in this period begin a hold; a period without them ends it.
const PERIOD: Duration = Duration::from_millis(30);

/// Calls in a period that make it a busy one.
const BUSY_CALLS: u64 = 20;

/// Fsyncs at shorter intervals do not wait for a device: their callers do not sleep, and a polling
/// processor would only take time from its sibling.
pub(crate) const FSYNC_TIME_MIN: Duration = Duration::from_micros(30);

/// Whether idle processors may be kept from halting while calls come in quick succession.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LowLatency {
    /// If this process is permitted (root).
    #[default]
    Auto,
    /// Always; an error if not permitted.
    Always,
    /// No.
    Never,
}

impl LowLatency {
    /// Opens the hold, for calls that take at least `time_min` if their callers sleep.
    ///
    /// # Errors
    /// `Always`, and the file cannot be written (it is root's).
    pub fn start(self, time_min: Duration) -> io::Result<Option<Awake>> {
        match self {
            LowLatency::Never => Ok(None),
            LowLatency::Auto => Ok(Awake::new(time_min).ok()),
            LowLatency::Always => Awake::new(time_min).map(Some),
        }
    }
}

/// Holds the processors awake while its counter grows fast.
#[derive(Debug)]
pub struct Awake {
    shared: Arc<Shared>,
    /// The thread that ends the hold; started by the first busy period.
    thread: Mutex<Option<JoinHandle<()>>>,
    hold: fn() -> io::Result<File>,
}

#[derive(Debug)]
struct Shared {
    began: Instant,
    /// [`BUSY_CALLS`] in less time are too fast for their callers to have slept.
    fast_ns: u64,
    /// Calls so far.
    calls: AtomicU64,
    /// When [`BUSY_CALLS`] more had come last, in ns since `began`.
    counted_ns: AtomicU64,
    /// When a busy period ended last, in the same way.
    busy_ns: AtomicU64,
    /// The thread is running, or has ended: no wake-up is needed. Changed with `state`.
    is_up: AtomicBool,
    state: Mutex<State>,
    /// Signalled, with `state`, when there is something for the thread to do.
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_busy: bool,
    ended: bool,
}

impl Shared {
    fn new(time_min: Duration) -> Shared {
        let fast_ns = u64::try_from(time_min.as_nanos()).unwrap_or(u64::MAX);
        Shared {
            began: Instant::now(),
            fast_ns: fast_ns.saturating_mul(BUSY_CALLS),
            calls: AtomicU64::new(0),
            counted_ns: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            is_up: AtomicBool::new(false),
            state: Mutex::new(Rank::AwakeState, State::default()),
            wake: Condvar::new(),
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Counts a call; returns whether the thread must be woken.
    fn count(&self) -> bool {
        let calls = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if !calls.is_multiple_of(BUSY_CALLS) {
            return false;
        }
        let now_ns = self.now_ns();
        let before_ns = self.counted_ns.swap(now_ns, Ordering::Relaxed);
        let took_ns = now_ns.saturating_sub(before_ns);
        if took_ns < self.fast_ns || took_ns >= PERIOD.as_nanos() as u64 {
            return false;
        }
        self.busy_ns.store(now_ns, Ordering::Relaxed);
        !self.is_up.load(Ordering::Relaxed)
    }

    /// Whether a period has passed since the last busy one.
    fn is_quiet(&self) -> bool {
        let busy_ns = self.busy_ns.load(Ordering::Relaxed);
        self.now_ns().saturating_sub(busy_ns) >= PERIOD.as_nanos() as u64
    }

    /// Holds while it is busy, sleeps while it is not.
    fn watch<H>(&self, mut hold: impl FnMut() -> io::Result<H>) {
        let mut state = self.state.lock();
        loop {
            while !state.is_busy && !state.ended {
                self.is_up.store(false, Ordering::Relaxed);
                self.wake.wait(&mut state);
            }
            if state.ended {
                return;
            }
            let held = match hold() {
                Ok(held) => held,
                Err(error) => {
                    // It could be opened before; without it calls are only slower.
                    tracing::warn!("{CPU_DMA_LATENCY}: {error}");
                    return;
                }
            };
            while !state.ended && !self.is_quiet() {
                self.wake.wait_for(&mut state, PERIOD);
            }
            state.is_busy = false;
            drop(held);
        }
    }
}

impl Awake {
    /// One that holds nothing yet.
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub fn new(time_min: Duration) -> io::Result<Awake> {
        access(CPU_DMA_LATENCY, Access::WRITE_OK)?;
        Ok(Awake {
            shared: Arc::new(Shared::new(time_min)),
            thread: Mutex::new(Rank::AwakeThread, None),
            hold,
        })
    }

    /// A call came.
    pub fn count(&self) {
        if self.shared.count() {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let mut thread = self.thread.lock();
        let mut state = self.shared.state.lock();
        if self.shared.is_up.swap(true, Ordering::Relaxed) {
            return;
        }
        state.is_busy = true;
        self.shared.wake.notify_one();
        drop(state);
        if thread.is_none() {
            let (shared, hold) = (self.shared.clone(), self.hold);
            let name = "fjord-awake".to_owned();
            let spawned = thread::Builder::new().name(name).spawn(move || shared.watch(hold));
            *thread = spawned.inspect_err(|error| tracing::warn!("fjord-awake: {error}")).ok();
        }
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.lock().take() {
            // It does not panic; if it did, the descriptor is closed all the same.
            let _ = thread.join();
        }
    }
}

/// Forbids halting as long as the file is open.
fn hold() -> io::Result<File> {
    let mut file = File::options().write(true).open(CPU_DMA_LATENCY)?;
    file.write_all(&0_i32.to_ne_bytes())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Those alive.
    static HELD: AtomicUsize = AtomicUsize::new(0);
    /// All there ever were.
    static HOLDS: AtomicUsize = AtomicUsize::new(0);

    fn until(what: impl Fn() -> bool) {
        let since = Instant::now();
        while !what() {
            assert!(since.elapsed() < Duration::from_secs(120), "it never came");
            thread::sleep(Duration::from_millis(1));
        }
    }

    struct Held;

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn held() -> io::Result<Held> {
        HELD.fetch_add(1, Ordering::SeqCst);
        HOLDS.fetch_add(1, Ordering::SeqCst);
        Ok(Held)
    }

    #[test]
    fn the_hold_lasts_as_long_as_calls_come() {
        let shared = Arc::new(Shared::new(Duration::ZERO));
        let (is_held, holds) =
            (|| HELD.load(Ordering::SeqCst) == 1, || HOLDS.load(Ordering::SeqCst));
        let for_thread = shared.clone();
        let watcher = thread::spawn(move || for_thread.watch(held));
        let burst = || {
            for _ in 0..2 * BUSY_CALLS {
                if shared.count() {
                    let mut state = shared.state.lock();
                    shared.is_up.store(true, Ordering::Relaxed);
                    state.is_busy = true;
                    shared.wake.notify_one();
                }
            }
        };
        for round in 1..=3 {
            until(|| {
                burst();
                is_held()
            });
            let began = Instant::now();
            while began.elapsed() < 5 * PERIOD {
                burst();
                assert!(holds() >= round);
            }
            until(|| !is_held());
        }
        // Few calls hold nothing, once the thread has seen the last of the many.
        until(|| {
            let before = holds();
            for _ in 0..3 * BUSY_CALLS {
                assert!(!shared.count());
                thread::sleep(PERIOD / 10);
            }
            holds() == before
        });
        until(|| {
            burst();
            is_held()
        });
        shared.state.lock().ended = true;
        shared.wake.notify_one();
        watcher.join().unwrap();
        assert!(!is_held());
    }

    #[test]
    fn calls_that_nobody_sleeps_in_hold_nothing() {
        let shared = Shared::new(PERIOD);
        assert!((0..1000 * BUSY_CALLS).all(|_| !shared.count()));
    }

    #[test]
    fn nothing_runs_until_it_is_busy_and_the_end_ends_it() {
        let awake = Awake {
            shared: Arc::new(Shared::new(Duration::ZERO)),
            thread: Mutex::new(Rank::AwakeThread, None),
            hold: || File::open("/dev/null"),
        };
        awake.count();
        assert!(awake.thread.lock().is_none());
        until(|| {
            (0..2 * BUSY_CALLS).for_each(|_| awake.count());
            awake.thread.lock().is_some()
        });
        drop(awake);
    }
}
