//! The block layer: order separate from durability, asynchronous tickets, file and memory backends.
//!
//! Knows no ext4; addresses are byte offsets. Layers, from the caller down:
//! - [`Device`]: submit requests, get tickets ([`Request`], [`Ticket`], [`ReadTicket`]);
//! - wrappers: [`epoch`] (order, priorities, merging), [`FaultDevice`] (errors, latency,
//!   recording);
//! - backends: [`FileDevice`] (files and block devices), [`MemDevice`], [`sim::SimDevice`] (a model
//!   of flash devices and a disk);
//! - buffers: [`AlignedBuf`], [`Buf`] and their pool.

mod buf;
mod counter;
mod deferred;
mod device;
pub mod epoch;
mod error;
mod fault;
mod file;
pub mod lock;
mod mem;
pub mod mountinfo;
pub mod plant;
mod pool;
mod quasi_async;
mod remote;
pub mod sim;
mod snapshot;
mod stats;
mod sticky;
mod ticket;

pub use buf::{AlignedBuf, Buf};
pub use deferred::DeferredWrites;
pub use device::{Capabilities, Class, Device, DeviceExt, Order, Request};
pub use error::{IoError, IoErrorKind, IoOp, OpenError};
pub use fault::{FaultAction, FaultDevice, FaultMatch, FaultPlan, FaultRule, Record, SparseRoom};
pub use file::{Engine, FileDevice, FileOptions, LOCK_TIMEOUT};
pub use mem::{MemDevice, MemImage};
pub use pool::{PoolStats, pool_stats};
pub use quasi_async::{PromoteGuard, QuasiAsyncWrites};
pub use remote::{Remote, RemoteOptions};
pub use snapshot::{Reflink, SnapshotError, SnapshotOptions, SnapshotReport};
pub use stats::{DeviceStats, OpStats, StatCounters};
pub use ticket::{
    Completer, Driver, ErrorSink, IoResult, ReadSlot, ReadTicket, Ticket, TicketCore,
};
