//! The compound commit: makes the running transaction durable.
//!
//! Steps, and what a crash after each leaves:
//!
//! 1. freeze: lock the transaction, wait for its handles, freeze its buffers (nothing on disk);
//! 2. dispatch: run the commit's script ([`script`]), which writes revoke, descriptor, data and
//!    commit blocks in the order that the device needs (a torn log tail, which recovery ignores,
//!    or all of the transaction);
//! 3. settle: wait until it is durable ([`settle`]);
//! 4. retire: queue the versions for the checkpoint, call the callbacks, wake the waiters ([`retire`]).
//!
//! The next transaction starts at the end of step 1. A partial commit ([`partial`]) differs in step
//! 1 only: it freezes the contents of some parts, and the transaction keeps running.
//!
//! Invariant: one thread dispatches at a time, in order of sequences (the commit lock,
//! [`crate::roles`]).

mod build;
mod calls;
mod dispatch;
mod failure;
mod lock;
mod log_start;
mod partial;
mod pieces;
mod protocol;
mod retire;
mod room;
mod round;
mod script;
mod settle;
mod switch;
mod turn;
mod wrap;

pub(crate) use turn::{Next, Turn};
