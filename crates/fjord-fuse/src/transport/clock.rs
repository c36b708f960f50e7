//! The time since a connection began. It is the machine's; a unit test may have one that stands
//! still, and move it.

use std::time::Instant;

#[derive(Debug)]
pub(super) struct Clock {
    start: Instant,
    #[cfg(test)]
    stopped_ns: Option<std::sync::atomic::AtomicU64>,
}

impl Clock {
    pub(super) fn new() -> Clock {
        Clock {
            start: Instant::now(),
            #[cfg(test)]
            stopped_ns: None,
        }
    }

    /// Nanoseconds since the start.
    pub(super) fn now_ns(&self) -> u64 {
        #[cfg(test)]
        if let Some(stopped_ns) = &self.stopped_ns {
            return stopped_ns.load(std::sync::atomic::Ordering::SeqCst);
        }
        self.start.elapsed().as_nanos() as u64
    }
}

#[cfg(test)]
impl Clock {
    /// One that stands still.
    pub(super) fn stopped() -> Clock {
        Clock { stopped_ns: Some(1.into()), ..Clock::new() }
    }

    pub(super) fn advance(&self, time: std::time::Duration) {
        let stopped_ns = self.stopped_ns.as_ref().expect("it stands still");
        stopped_ns.fetch_add(time.as_nanos() as u64, std::sync::atomic::Ordering::SeqCst);
    }
}
