//! Background threads: writeback, commit timer, checkpoint, MMP heartbeat.
//!
//! Owns their start, wake-up and stop. Invariant: a thread holds no strong reference to
//! the file system while it sleeps, and all have ended when [`Threads::stop`] returns.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fjord_block::Class;
use fjord_block::lock::{Condvar, Mutex, Rank};

use crate::file::background::{self, Want};
use crate::file::carry;
use crate::fs::FsInner;

/// Longest sleep between looks at the clock.
const TICK: Duration = Duration::from_millis(500);

/// The log is emptied in the background from one part in this many on.
const CHECKPOINT_SHARE: u32 = 4;
/// Blocks of one background checkpoint.
pub(crate) const CHECKPOINT_BLOCKS: usize = 4096;

#[derive(Default)]
struct Signal {
    stop: bool,
    /// By thread: it was woken since it last looked.
    woken: [bool; Who::COUNT],
}

/// Handles of the background threads.
pub(crate) struct Threads {
    signal: Arc<(Mutex<Signal>, Condvar)>,
    /// An early commit is requested.
    wants_commit: AtomicBool,
    joins: Mutex<Vec<JoinHandle<()>>>,
}

impl Default for Threads {
    fn default() -> Threads {
        Threads {
            signal: Arc::new((Mutex::new(Rank::ThreadSignal, Signal::default()), Condvar::new())),
            wants_commit: AtomicBool::new(false),
            joins: Mutex::new(Rank::ThreadJoins, Vec::new()),
        }
    }
}

/// The threads there are.
#[derive(Clone, Copy)]
pub(crate) enum Who {
    Writeback,
    Commit,
}

impl Who {
    const COUNT: usize = 2;

    fn name(self) -> &'static str {
        match self {
            Who::Writeback => "fjord-writeback",
            Who::Commit => "fjord-commit",
        }
    }

    /// What it does each time it wakes.
    fn work(self, fs: &Arc<FsInner>) {
        match self {
            Who::Writeback => write_back(fs),
            Who::Commit => commit_old(fs),
        }
    }
}

impl Threads {
    /// Starts the threads that `fs` wants.
    pub(crate) fn start(fs: &Arc<FsInner>) {
        if !fs.options.background_threads || fs.options.read_only {
            return;
        }
        for who in [Who::Writeback, Who::Commit] {
            let weak = Arc::downgrade(fs);
            let signal = fs.threads.signal.clone();
            let spawned = std::thread::Builder::new()
                .name(who.name().into())
                .spawn(move || run(&weak, &signal, who));
            match spawned {
                Ok(join) => fs.threads.joins.lock().push(join),
                // Without the thread, fsync, sync and unmount still do all the work.
                Err(error) => fs.warn(format_args!("cannot start {}: {error}", who.name())),
            }
        }
    }

    /// Wakes a thread before its time, or lets it look again if it is at work.
    pub(crate) fn wake(&self, who: Who) {
        let (lock, condvar) = &*self.signal;
        if !std::mem::replace(&mut lock.lock().woken[who as usize], true) {
            condvar.notify_all();
        }
    }

    /// Asks the commit thread for a commit soon.
    pub(crate) fn want_commit(&self) {
        if !self.wants_commit.swap(true, Ordering::AcqRel) {
            self.wake(Who::Commit);
        }
    }

    /// Ends all threads and waits for them.
    pub(crate) fn stop(&self) {
        let (lock, condvar) = &*self.signal;
        lock.lock().stop = true;
        condvar.notify_all();
        let me = std::thread::current().id();
        for join in self.joins.lock().drain(..) {
            if join.thread().id() != me && join.join().is_err() {
                tracing::error!("a background thread had panicked");
            }
        }
    }
}

fn run(fs: &Weak<FsInner>, signal: &(Mutex<Signal>, Condvar), who: Who) {
    let (lock, condvar) = signal;
    loop {
        {
            let mut state = lock.lock();
            let until = Instant::now() + TICK;
            while !state.stop && !state.woken[who as usize] {
                if condvar.wait_until(&mut state, until).timed_out() {
                    break;
                }
            }
            if state.stop {
                return;
            }
            state.woken[who as usize] = false;
        }
        let Some(fs) = fs.upgrade() else { return };
        who.work(&fs);
    }
}

/// Looks at the device; writes pages that are old, or any while more than the background share is dirty.
fn write_back(fs: &Arc<FsInner>) {
    if let Err(error) = fs.device.check() {
        return fs.stop_at_once(&error.into());
    }
    fs.retry_room();
    let class = Class::Background;
    let old = Want::Older(fs.options.writeback_interval);
    background::write_old(fs, old, class, || fs.status.is_read_only());
    // A dirty inode stays in memory, if only for its access time.
    let inodes_max = fs.inodes.capacity();
    if fs.dirty_inodes.len() > inodes_max {
        background::write_old(fs, Want::Any, class, || {
            fs.status.is_read_only() || fs.dirty_inodes.len() <= inodes_max / 2
        });
    }
    let lru = &fs.page_lru;
    let limit = lru.background_threshold_bytes();
    if lru.dirty_bytes() > limit {
        background::write_old(fs, Want::Bulk, class, || {
            fs.status.is_read_only() || lru.dirty_bytes() <= limit / 2
        });
    }
}

/// Commits a running transaction that has waited long enough, and empties the log ahead
/// of need.
fn commit_old(fs: &Arc<FsInner>) {
    if fs.status.is_read_only() {
        return;
    }
    let journal = fs.journal();
    if let Err(error) = journal.submit_barriers() {
        fs.note_write_error(&error.into());
    }
    let wanted = fs.threads.wants_commit.swap(false, Ordering::AcqRel);
    let is_old = |age| wanted || age >= fs.options.commit_interval;
    let is_due = journal.running_age().is_some_and(is_old);
    let committed =
        if is_due { journal.commit_running().map(drop) } else { journal.finish_commits() };
    if is_due {
        // What was wanted meanwhile has been done; whoever wants more asks again.
        fs.threads.wants_commit.store(false, Ordering::Release);
    }
    if let Err(error) = committed {
        fs.note_write_error(&error.into());
    }
    carry::reap_all(fs);
    let (used, len) = journal.log_usage_blocks();
    let log_fills = used > len / CHECKPOINT_SHARE || journal.fast_commits_follow_others();
    if (log_fills || fs.meta.is_over_budget())
        && let Err(error) = journal.checkpoint_some(CHECKPOINT_BLOCKS)
    {
        fs.note_write_error(&error.into());
    }
}
