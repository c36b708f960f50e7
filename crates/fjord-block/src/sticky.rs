//! The memory of failures. Owns the rule "a failed flush, or a failed write nobody looked at,
//! fails every later flush": the kernel reports a lost write once, and a file system that flushes
//! again after it must not be told that all is well.

use parking_lot::Mutex;

use crate::error::{IoError, IoErrorKind, IoOp};
use crate::ticket::{ErrorSink, IoResult};

/// Remembers the first errno that makes later flushes fail.
#[derive(Debug, Default)]
pub(crate) struct Sticky(Mutex<Option<i32>>);

impl Sticky {
    /// The error that a flush must report now, if any.
    pub(crate) fn check(&self) -> IoResult {
        match *self.0.lock() {
            Some(errno) => Err(IoError::new(IoErrorKind::Earlier(errno), IoOp::Flush, 0, 0)),
            None => Ok(()),
        }
    }

    /// Remembers a failure; the first one stays.
    pub(crate) fn set(&self, error: &IoError) {
        self.0.lock().get_or_insert(error.errno());
    }
}

impl ErrorSink for Sticky {
    fn unseen_error(&self, error: &IoError) {
        // A lost read harms no flush.
        if error.op != IoOp::Read {
            self.set(error);
        }
    }
}
