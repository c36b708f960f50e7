//! The primitives of a model check (feature `model`): `shuttle` decides which thread runs.
//!
//! Owns the gates. A lock is a gate, which decides who has it, before a lock of `parking_lot`,
//! which holds the value. All threads of a model are coroutines of one thread of the system.
//!
//! Invariants:
//! - a thread loses the processor only where it is about to take a lock, where it waits, and at a
//!   [`point`]. What lies between touches nothing that another thread can see, so no interleaving
//!   is left out. An unlock is no such place: whoever is to run after it may run when this
//!   thread takes its next lock;
//! - a condition variable wakes those that wait, in their order, and nobody else: a lost wake-up
//!   is a deadlock, which `shuttle` reports;
//! - no time passes: a wait with a timeout ends at once;
//! - outside a model (statics, what a test does before and after), gates are open, and only the
//!   locks behind them count. Locks of the whole process ([`process_wide`]) have no gate, since
//!   they outlive a run of the model.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

pub use shuttle;

/// Whether the calling thread is one of a model.
pub fn is_running() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

/// Another thread may run here: before a read of what others change without a lock.
pub fn point() {
    if is_running() {
        // No time passes: only the processor is given up.
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// The time, for waits with an end; it stands still in a model.
pub fn now() -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    if is_running() { *START } else { Instant::now() }
}

/// Sleeps; in a model, lets other threads run first.
pub fn pause(time: Duration) {
    if is_running() { shuttle::thread::yield_now() } else { std::thread::sleep(time) }
}

/// Decides who has a lock.
#[derive(Debug)]
struct Gate(parking_lot::Mutex<Holders>);

#[derive(Debug)]
struct Holders {
    is_written: bool,
    readers: usize,
    waiting: Vec<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Alone,
    Shared,
}

impl Holders {
    fn admit(&mut self, how: Use) -> bool {
        let free = !self.is_written && (how == Use::Shared || self.readers == 0);
        if free {
            match how {
                Use::Alone => self.is_written = true,
                Use::Shared => self.readers += 1,
            }
        }
        free
    }
}

/// A thread of a model has a lock, until this is dropped.
#[derive(Debug)]
struct Pass<'a> {
    gate: &'a Gate,
    how: Use,
}

impl Gate {
    const fn new() -> Gate {
        Gate(parking_lot::Mutex::new(Holders {
            is_written: false,
            readers: 0,
            waiting: Vec::new(),
        }))
    }

    /// Waits for the lock; `None` outside a model.
    fn pass(&self, how: Use) -> Option<Pass<'_>> {
        is_running().then(|| {
            point();
            self.wait(how)
        })
    }

    fn wait(&self, how: Use) -> Pass<'_> {
        shuttle::future::block_on(poll_fn(|context| {
            let mut holders = self.0.lock();
            if holders.admit(how) {
                return Poll::Ready(());
            }
            holders.waiting.push(context.waker().clone());
            Poll::Pending
        }));
        Pass { gate: self, how }
    }

    /// Takes the lock if it is free; outside a model it is.
    fn try_pass(&self, how: Use) -> Option<Option<Pass<'_>>> {
        if !is_running() {
            return Some(None);
        }
        point();
        // A pass that is dropped gives the lock up: there is none before it was admitted.
        let is_admitted = self.0.lock().admit(how);
        is_admitted.then(|| Some(Pass { gate: self, how }))
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut holders = self.gate.0.lock();
        match self.how {
            Use::Alone => holders.is_written = false,
            Use::Shared => holders.readers -= 1,
        }
        holders.waiting.drain(..).for_each(Waker::wake);
    }
}

/// As `parking_lot::Mutex`.
pub(super) struct Mutex<T: ?Sized> {
    /// None for a lock of the whole process.
    gate: Option<Gate>,
    value: parking_lot::Mutex<T>,
}

/// A lock of the whole process.
pub(super) const fn process_wide<T>(value: T) -> Mutex<T> {
    Mutex { gate: None, value: parking_lot::Mutex::new(value) }
}

impl<T> Mutex<T> {
    pub(super) const fn new(value: T) -> Mutex<T> {
        Mutex { gate: Some(Gate::new()), value: parking_lot::Mutex::new(value) }
    }

    pub(super) fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        let pass = self.gate.as_ref().and_then(|gate| gate.pass(Use::Alone));
        MutexGuard { value: self.value.lock(), pass }
    }

    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let pass = match &self.gate {
            Some(gate) => gate.try_pass(Use::Alone)?,
            None => None,
        };
        Some(MutexGuard { value: self.value.try_lock()?, pass })
    }

    pub(super) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// As `parking_lot::MutexGuard`. The value is unlocked before the gate opens.
pub(super) struct MutexGuard<'a, T: ?Sized> {
    value: parking_lot::MutexGuard<'a, T>,
    pass: Option<Pass<'a>>,
}

impl<T: ?Sized> MutexGuard<'_, T> {
    pub(super) fn unlocked<R>(guard: &mut Self, unlocked: impl FnOnce() -> R) -> R {
        let MutexGuard { value, pass } = guard;
        parking_lot::MutexGuard::unlocked(value, || {
            let gate = pass.take().map(|pass| pass.gate);
            let result = unlocked();
            *pass = gate.and_then(|gate| gate.pass(Use::Alone));
            result
        })
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// As `parking_lot::Condvar`.
#[derive(Debug, Default)]
pub(super) struct Condvar {
    /// For threads outside a model.
    outside: parking_lot::Condvar,
    sleepers: parking_lot::Mutex<VecDeque<Arc<Sleeper>>>,
}

#[derive(Debug, Default)]
struct Sleeper {
    is_woken: AtomicBool,
    waker: parking_lot::Mutex<Option<Waker>>,
}

impl Sleeper {
    fn wake(&self) {
        self.is_woken.store(true, Ordering::Relaxed);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

/// As `parking_lot::WaitTimeoutResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the wait ended without a signal.
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    pub(super) const fn new() -> Condvar {
        Condvar {
            outside: parking_lot::Condvar::new(),
            sleepers: parking_lot::Mutex::new(VecDeque::new()),
        }
    }

    pub(super) fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        let MutexGuard { value, pass } = guard;
        let Some(gate) = pass.as_ref().map(|pass| pass.gate) else {
            return self.outside.wait(value);
        };
        let sleeper = Arc::<Sleeper>::default();
        self.sleepers.lock().push_back(sleeper.clone());
        parking_lot::MutexGuard::unlocked(value, || {
            // Nobody runs between the unlock and the sleep.
            drop(pass.take());
            shuttle::future::block_on(poll_fn(|context| {
                if sleeper.is_woken.load(Ordering::Relaxed) {
                    return Poll::Ready(());
                }
                *sleeper.waker.lock() = Some(context.waker().clone());
                Poll::Pending
            }));
            *pass = Some(gate.wait(Use::Alone));
        });
    }

    pub(super) fn wait_for<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        if guard.pass.is_none() {
            return WaitTimeoutResult(self.outside.wait_for(&mut guard.value, timeout).timed_out());
        }
        MutexGuard::unlocked(guard, shuttle::thread::yield_now);
        WaitTimeoutResult(true)
    }

    pub(super) fn wait_until<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> WaitTimeoutResult {
        self.wait_for(guard, deadline.saturating_duration_since(Instant::now()))
    }

    pub(super) fn notify_one(&self) -> bool {
        let woken = self.wake(1);
        self.outside.notify_one() || woken > 0
    }

    pub(super) fn notify_all(&self) -> usize {
        self.outside.notify_all() + self.wake(usize::MAX)
    }

    fn wake(&self, count_max: usize) -> usize {
        if self.sleepers.lock().is_empty() {
            return 0;
        }
        point();
        let mut sleepers = self.sleepers.lock();
        let count = sleepers.len().min(count_max);
        sleepers.drain(..count).for_each(|sleeper| sleeper.wake());
        count
    }
}

/// As `parking_lot::RwLock`.
pub(super) struct RwLock<T: ?Sized> {
    gate: Gate,
    value: parking_lot::RwLock<T>,
}

impl<T> RwLock<T> {
    pub(super) const fn new(value: T) -> RwLock<T> {
        RwLock { gate: Gate::new(), value: parking_lot::RwLock::new(value) }
    }

    pub(super) fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T: ?Sized> RwLock<T> {
    pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
        let pass = self.gate.pass(Use::Shared);
        RwLockReadGuard { value: self.value.read(), _pass: pass }
    }

    pub(super) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        let pass = self.gate.try_pass(Use::Shared)?;
        Some(RwLockReadGuard { value: self.value.try_read()?, _pass: pass })
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, T> {
        let pass = self.gate.pass(Use::Alone);
        RwLockWriteGuard { value: self.value.write(), _pass: pass }
    }

    pub(super) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        let pass = self.gate.try_pass(Use::Alone)?;
        Some(RwLockWriteGuard { value: self.value.try_write()?, _pass: pass })
    }

    pub(super) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// As `parking_lot::RwLockReadGuard`.
pub(super) struct RwLockReadGuard<'a, T: ?Sized> {
    value: parking_lot::RwLockReadGuard<'a, T>,
    _pass: Option<Pass<'a>>,
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// As `parking_lot::RwLockWriteGuard`.
pub(super) struct RwLockWriteGuard<'a, T: ?Sized> {
    value: parking_lot::RwLockWriteGuard<'a, T>,
    _pass: Option<Pass<'a>>,
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
