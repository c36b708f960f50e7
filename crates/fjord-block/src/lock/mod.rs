//! Locks with ranks. Owns the lock types of all crates with locks on I/O paths, and the order in
//! which a thread may take them ([`Rank`]).
//!
//! With the feature `lock-stats` they count what they cost instead ([`lock_stats`]), in all builds.
//!
//! Invariants, checked in debug builds and free of cost in release builds:
//! - a thread takes only locks of a higher rank than all it holds; an attempt (`try_lock`) does not
//!   wait and is exempt, but what it took counts from then on;
//! - several locks of one rank are taken only by [`Mutex::lock_in_order`] and its likes, in rising
//!   order of their keys;
//! - a condition variable is waited for with a lock that is the highest of those held, since it is
//!   taken again afterwards.
//!
//! [`Turn`] and [`Held`] give a rank to locks that are made by hand from a flag and a condition
//! variable. Only `primitive` names the primitives, so that the feature `model` can put those of a
//! model check in their place; what else depends on who runs goes through here too ([`thread_local`],
//! [`pause`], [`point`]).

mod allocations;
mod condvar;
#[cfg(all(debug_assertions, not(feature = "lock-stats")))]
#[path = "checked.rs"]
mod held;
#[cfg(all(not(debug_assertions), not(feature = "lock-stats")))]
#[path = "unchecked.rs"]
mod held;
#[cfg(feature = "lock-stats")]
#[path = "metered.rs"]
mod held;
#[cfg(feature = "model")]
pub mod model;
#[cfg(feature = "model")]
mod model_local;
mod mutex;
mod primitive;
mod rank;
mod rwlock;
mod stats;
mod turn;

#[cfg(feature = "lock-stats")]
pub use allocations::CountingAllocator;
pub use allocations::allocation_count;
pub use condvar::Condvar;
pub use held::Held;
#[cfg(feature = "model")]
pub use model_local::LocalKey;
pub use mutex::{Mutex, MutexGuard};
pub use primitive::{WaitTimeoutResult, now, pause, point, thread_local};
pub use rank::Rank;
pub use rwlock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
pub use stats::{LockStats, lock_stats, reset_lock_stats};
pub use turn::Turn;
