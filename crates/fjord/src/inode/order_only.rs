//! Files whose fsync orders only.
//!
//! Owns the attribute that asks for it, and what an inode in memory knows of its own. The attribute lies with the
//! file, like any that a user sets; new files and directories get it from their directory. Invariant: what is
//! known is what the attribute says; it is stored under the inode's state lock, for reading or writing.

use std::sync::atomic::{AtomicU8, Ordering};

/// Name in the namespace `user.` of the attribute that makes fsync of a file order only, with the value `1`. With any
/// other, what programs ask for stays as strong as they ask.
pub(crate) const NAME: &[u8] = b"fjord.order_only";

/// What an inode knows of its attribute [`NAME`].
#[derive(Debug, Default)]
pub(crate) struct OrderOnly(AtomicU8);

const UNKNOWN: u8 = 0;
const NO: u8 = 1;
const YES: u8 = 2;

impl OrderOnly {
    /// Whether fsync orders only; `None` if the attribute has not been read yet.
    pub(crate) fn get(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            UNKNOWN => None,
            known => Some(known == YES),
        }
    }

    /// The attribute has this value; `None`: there is none. Returns whether fsync orders only.
    pub(crate) fn learn(&self, value: Option<&[u8]>) -> bool {
        let orders_only = value == Some(b"1");
        self.0.store(if orders_only { YES } else { NO }, Ordering::Release);
        orders_only
    }
}
