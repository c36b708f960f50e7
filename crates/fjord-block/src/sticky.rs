//! Sticky errors. Owns the rule "after a failed flush, or a failed write whose result was never
//! read, every later flush fails": the kernel reports a lost write only once, and a later flush
//! must not succeed.

use crate::error::{IoError, IoErrorKind, IoOp};
use crate::lock::{Mutex, Rank};
use crate::ticket::{ErrorSink, IoResult};

/// Remembers the first errno that makes later flushes fail.
#[derive(Debug)]
pub(crate) struct Sticky(Mutex<Option<i32>>);

impl Default for Sticky {
    fn default() -> Sticky {
        Sticky(Mutex::new(Rank::Sticky, None))
    }
}

impl Sticky {
    /// The error that a flush must report now, if any.
    pub(crate) fn check(&self) -> IoResult {
        match *self.0.lock() {
            Some(errno) => Err(IoError::new(IoErrorKind::Earlier(errno), IoOp::Flush, 0, 0)),
            None => Ok(()),
        }
    }

    /// Records a failure; the first one stays.
    pub(crate) fn set(&self, error: &IoError) {
        self.0.lock().get_or_insert(error.errno());
    }
}

impl ErrorSink for Sticky {
    fn unseen_error(&self, error: &IoError) {
        // A failed read does not affect flushes.
        if error.op != IoOp::Read {
            self.set(error);
        }
    }
}
