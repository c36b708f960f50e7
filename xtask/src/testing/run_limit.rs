//! The end of a whole run: by its limit, or by a signal.
//!
//! Owns the descendants of the run. Invariant: a run that ends leaves none of them, and says which were
//! there.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use rustix::process::{Signal, kill_process};

use crate::{
    say,
    supervise::{self, Process, descendants, descendants_outside, end_children, print_stacks},
};

/// Time that supervisors have to take down what is theirs.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time that killed processes have to end.
const ENDED: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(100);

/// A thread that ends the run when its limit is reached or a signal asks for it. Dropped, the run has
/// ended by itself.
pub(crate) struct RunLimit {
    _done: mpsc::Sender<()>,
}

impl RunLimit {
    /// Begins to watch.
    pub(crate) fn start(limit: Duration) -> Result<RunLimit> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let stop = supervise::hear_signals()?;
        let (done, ended) = mpsc::channel();
        let started = Instant::now();
        let watch = move || {
            while ended.recv_timeout(POLL) == Err(mpsc::RecvTimeoutError::Timeout) {
                if stop.load(Ordering::SeqCst) {
                    end("a signal told it to");
                }
                if started.elapsed() >= limit {
                    end(&format!("it reached its limit of {} s", limit.as_secs()));
                }
            }
        };
        std::thread::Builder::new().name("run-limit".into()).spawn(watch)?;
        Ok(RunLimit { _done: done })
    }
}

/// Set when the run ends before its time: nothing new is started.
static ENDS: AtomicBool = AtomicBool::new(false);

/// Whether the run ends before its time.
pub(crate) fn ends() -> bool {
    ENDS.load(Ordering::SeqCst)
}

/// Ends the run, with its supervisors first: they print and take down what is theirs.
fn end(why: &str) -> ! {
    ENDS.store(true, Ordering::SeqCst);
    say!("FAILED: the run ends: {why}; what runs:");
    print_stacks(&descendants_outside(is_supervisor));
    let supervisors = || descendants().into_iter().filter(is_supervisor).collect::<Vec<_>>();
    let started = Instant::now();
    while !supervisors().is_empty() && started.elapsed() < PATIENCE {
        // Also to one that was started just before.
        kill(&supervisors(), Signal::TERM);
        std::thread::sleep(POLL);
    }
    end_children(ENDED);
    say::exit(1)
}

fn is_supervisor(process: &Process) -> bool {
    process.arguments().nth(1) == Some("supervise")
}

fn kill(processes: &[Process], signal: Signal) {
    for process in processes {
        // It may have ended meanwhile.
        let _ = kill_process(process.pid, signal);
    }
}

/// Kills what is left at the end of a run, names it, and says whether there was something.
pub(crate) fn end_leftovers() -> bool {
    let left = end_children(ENDED);
    for process in &left {
        println!("left behind: process {process}");
    }
    !left.is_empty()
}
