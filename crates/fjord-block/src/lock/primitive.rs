//! The primitives below the ranked locks.

pub use parking_lot::WaitTimeoutResult;
pub(super) use parking_lot::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
