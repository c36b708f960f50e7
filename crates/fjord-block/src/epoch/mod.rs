//! The epoch scheduler: storage order without waits.
//!
//! - [`EpochQueue`]: the pure state machine; `rules`: the rules of order, separate from the
//!   mechanism;
//! - `dispatch`, `ready`, `share`, `pace`: the next command; `overlap`: overlapping requests;
//!   `flushes`: durability; `failure`: what a failure stops;
//! - [`EpochDevice`]: the state machine over a [`crate::Device`].
//!
//! The rules are in docs/ordering.md.

mod device;
mod dispatch;
mod failure;
mod flushes;
mod overlap;
mod pace;
mod queue;
mod ready;
mod rules;
mod share;
mod stats;
mod types;

pub use device::EpochDevice;
pub use queue::EpochQueue;
pub use rules::{DeviceTraits, Paper, Progress, Rules};
pub use stats::EpochStats;
pub use types::{Choice, Command, CommandId, Epoch, Io, IoKind, Part, RequestId, Tuning};
