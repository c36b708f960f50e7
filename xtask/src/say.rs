//! Standard output that nobody has to read.
//!
//! Owns a queue of what is still to be printed and the thread that prints it. Invariants: nothing here
//! waits for the reader, but [`drain`], which gives up; lines come out whole and in order; what is printed
//! in other ways (`println!`) has no place in that order.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Condvar, Mutex, MutexGuard, OnceLock},
    time::{Duration, Instant},
};

/// What may wait until [`has_room`] says no, in bytes.
const ROOM_BYTES: usize = 1 << 20;
/// A part that is written at once: progress is seen for each.
const PART_BYTES: usize = 4096;
/// How long a reader may take for one part, and for all of them.
const PART_PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);

/// Prints a line.
macro_rules! say {
    ($($part:tt)*) => {
        $crate::say::line(format_args!($($part)*))
    };
}

#[derive(Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// A part that the thread is writing.
    is_writing: bool,
    /// Nobody can read it any more.
    is_lost: bool,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

static QUEUE: OnceLock<Queue> = OnceLock::new();

impl Queue {
    /// Each step leaves the queue whole, so that a panic elsewhere does not matter.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    fn wait<'a>(
        &self,
        waiting: MutexGuard<'a, Waiting>,
        patience: Duration,
    ) -> MutexGuard<'a, Waiting> {
        let waited = self.changed.wait_timeout(waiting, patience);
        waited.unwrap_or_else(|poison| poison.into_inner()).0
    }

    fn print_all(&self) {
        let mut waiting = self.lock();
        loop {
            if waiting.bytes.is_empty() {
                waiting = self.wait(waiting, Duration::from_secs(3600));
                continue;
            }
            let length = waiting.bytes.len().min(PART_BYTES);
            let part: Vec<u8> = waiting.bytes.drain(..length).collect();
            waiting.is_writing = true;
            drop(waiting);
            let written = write_all(&part);
            waiting = self.lock();
            waiting.is_writing = false;
            if written.is_err() {
                waiting.is_lost = true;
                waiting.bytes.clear();
            }
            self.changed.notify_all();
        }
    }
}

/// Past the buffer and the lock of std's output, which another thread may hold for ever.
fn write_all(mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stdout(), bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn queue() -> &'static Queue {
    QUEUE.get_or_init(|| {
        let print = || QUEUE.wait().print_all();
        // Without a thread there is no output; the work goes on.
        let _ = std::thread::Builder::new().name("output".into()).spawn(print);
        Queue::default()
    })
}

/// Prints `text` and a line end.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    bytes(format!("{text}\n").as_bytes());
}

/// Prints bytes as they are.
pub(crate) fn bytes(bytes: &[u8]) {
    let mut waiting = queue().lock();
    if !waiting.is_lost {
        waiting.bytes.extend(bytes);
        queue().changed.notify_all();
    }
}

/// Whether so little waits that more should be printed.
pub(crate) fn has_room() -> bool {
    queue().lock().bytes.len() < ROOM_BYTES
}

/// Waits until all is printed, or nobody reads it.
pub(crate) fn drain() {
    let started = Instant::now();
    let mut waiting = queue().lock();
    let mut progress = (waiting.bytes.len(), Instant::now());
    while (!waiting.bytes.is_empty() || waiting.is_writing)
        && progress.1.elapsed() < PART_PATIENCE
        && started.elapsed() < PATIENCE
    {
        waiting = queue().wait(waiting, PART_PATIENCE);
        if waiting.bytes.len() != progress.0 {
            progress = (waiting.bytes.len(), Instant::now());
        }
    }
}

/// Ends this process at once. That of std would wait for a reader of its own output.
pub(crate) fn exit(code: i32) -> ! {
    drain();
    // SAFETY: it takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}
