//! The epoch scheduler: storage order without waiting for it.
//!
//! - [`EpochQueue`]: the pure state machine; `rules`: what order demands, apart from the mechanism;
//! - `dispatch`, `ready`, `share`, `pace`: what leaves next; `overlap`: same bytes; `flushes`: durability;
//! - [`EpochDevice`]: the state machine over a [`crate::Device`].
//!
//! The rules are in docs/ordering.md.

mod device;
mod dispatch;
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
