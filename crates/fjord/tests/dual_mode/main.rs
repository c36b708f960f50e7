//! Dual mode over a device that stalls or fails.
//!
//! Verifies, for each kind of device, in compound commits with ordered data and with journal data,
//! and in group commits:
//! - [`stall`]: with flushes stalled, commits are dispatched up to the bound, barrier calls return,
//!   readers and writers go on, and nothing is reported durable;
//! - [`failure`]: with one request failed, at every position in turn, the fsyncs of the commits
//!   before it return `Ok`, and all behind it fail.
//!
//! Either way, what a returned fsync promised is in every image that a power cut may leave.

mod failure;
mod log;
mod rig;
mod stall;
