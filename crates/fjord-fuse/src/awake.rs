//! Keeps the processors from halting while requests come in quick succession (`-o low_latency`).
//!
//! A caller sleeps while fjord serves its request; its processor halts meanwhile, and waking a
//! halted one takes longer than most requests do, above all in a virtual machine. Linux lets
//! programs forbid that: whoever holds `/dev/cpu_dma_latency` open with a 0 in it makes idle
//! processors poll (Documentation/power/pm_qos_interface). That costs power, and a virtual
//! machine's neighbours processor time, so it is an option, and the hold ends when requests do.
//!
//! Owns the descriptor and the thread that looks at the rate of requests. Invariant: the hold ends
//! within two [`PERIOD`]s of the last busy one, and with the [`Awake`].

use std::{
    fs::File,
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

/// Where Linux takes the wish.
pub(crate) const CPU_DMA_LATENCY: &str = "/dev/cpu_dma_latency";

/// How often the rate is looked at.
const PERIOD: Duration = Duration::from_millis(10);

/// Requests in a period that make it a busy one.
const BUSY_REQUESTS: u64 = 20;

/// Holds the processors awake while its counter grows fast.
#[derive(Debug)]
pub(crate) struct Awake {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Requests so far. Only the difference of two looks means anything.
    requests: AtomicU64,
    /// Set once, at the end.
    ended: Mutex<bool>,
    end: Condvar,
}

impl Awake {
    /// Starts to look.
    ///
    /// # Errors
    /// The file cannot be opened for writing (it is root's), or no thread started.
    pub(crate) fn start() -> io::Result<Awake> {
        hold()?;
        let shared = Arc::<Shared>::default();
        let for_thread = shared.clone();
        let thread = thread::Builder::new()
            .name("fjord-awake".into())
            .spawn(move || watch(&for_thread, hold))?;
        Ok(Awake { shared, thread: Some(thread) })
    }

    /// A request came.
    pub(crate) fn count(&self) {
        self.shared.requests.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        *self.shared.ended.lock() = true;
        self.shared.end.notify_all();
        if let Some(thread) = self.thread.take() {
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

fn watch<H>(shared: &Shared, mut hold: impl FnMut() -> io::Result<H>) {
    let (mut held, mut before) = (None, 0);
    let mut ended = shared.ended.lock();
    while !*ended {
        shared.end.wait_for(&mut ended, PERIOD);
        let now = shared.requests.load(Ordering::Relaxed);
        if now.wrapping_sub(before) < BUSY_REQUESTS {
            held = None;
        } else if held.is_none() {
            held = hold().inspect_err(|e| tracing::warn!("{CPU_DMA_LATENCY}: {e}")).ok();
        }
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Counts those alive.
    struct Held(Arc<AtomicU64>);

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn until(what: impl Fn() -> bool) {
        let since = Instant::now();
        while !what() {
            assert!(since.elapsed() < Duration::from_secs(20), "it never came");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_hold_lasts_as_long_as_requests_come() {
        let (shared, alive) = (Arc::<Shared>::default(), Arc::<AtomicU64>::default());
        let (for_thread, counter) = (shared.clone(), alive.clone());
        let watcher = thread::spawn(move || {
            watch(&for_thread, || {
                counter.fetch_add(1, Ordering::SeqCst);
                Ok(Held(counter.clone()))
            });
        });
        let count = || alive.load(Ordering::SeqCst);
        until(|| {
            shared.requests.fetch_add(BUSY_REQUESTS, Ordering::Relaxed);
            count() == 1
        });
        until(|| count() == 0);
        until(|| {
            shared.requests.fetch_add(BUSY_REQUESTS, Ordering::Relaxed);
            count() == 1
        });
        *shared.ended.lock() = true;
        shared.end.notify_all();
        watcher.join().unwrap();
        assert_eq!(count(), 0);
    }
}
