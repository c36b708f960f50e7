//! Modelled flash: a device with a queue, a cache, channels and chips, whose time is computed.
//!
//! Owns no state of its own. [`SimCore`] is the model, an event-driven machine without threads or
//! clock; its driver supplies the time:
//! - a loop over virtual time ([`SimCore::advance_to_completion`]): deterministic;
//! - [`SimQueue`]: the same with the epoch scheduler above; [`Contention`]: an experiment with it;
//! - [`SimDevice`]: real time, for the engine and its threads.
//!
//! [`Profile`] holds the constants of a device, [`CutState`] the images that a power cut may
//! leave. `docs/sim.md` describes the model.

mod contention;
mod core;
mod cut;
mod device;
mod log;
mod medium;
mod profile;
mod queue;
mod stats;

pub use self::contention::{Contention, Probe, Waits, Writer};
pub use self::core::{CommandId, Completion, SimCore};
pub use self::cut::{Chooser, CutRule, CutScope, CutState, CutWrite, SeededChooser, Survival};
pub use self::device::SimDevice;
pub use self::profile::{BarrierForm, Medium, Profile, SECTOR_BYTES, TransferOrder, UNIT_BYTES};
pub use self::queue::SimQueue;
pub use self::stats::{Persisted, SimStats, SimTrace, Transferred};
