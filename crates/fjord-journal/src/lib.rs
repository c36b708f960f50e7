//! The log mechanism: handles, transactions, commit, checkpoint, revoke, recovery. Knows no ext4.
//!
//! A caller modifies metadata blocks ([`Buffer`]) under a [`Handle`]; all handles that are open
//! together belong to the running transaction. A commit freezes that transaction's buffers (copy on
//! write, so the next transaction starts at once), writes them to the log, and ends with a commit
//! block; only then may a checkpoint write them to their home locations. [`Journal::open`] replays
//! a dirty log. [`Journal::commit_parts`] commits some parts of the running transaction before the
//! rest, as a separate transaction in the log.
//!
//! The journal has no threads ([`JournalIo::Dedicated`] apart). A caller of [`Journal::commit`] commits in its own thread unless
//! another thread does; timers and background checkpoints are threads of the engine, which call
//! [`Journal::commit_running`] and [`Journal::checkpoint_some`]. [`Journal::commit_then`] takes a
//! callback instead of waiting: a few of its callers commit for all.
//!
//! The order of its locks is `fjord_block::lock::Rank` (`docs/locking.md`, section "Journal"). No
//! lock held over I/O is needed to start a handle unless the log or the transaction is full.
//!
//! # Modules
//!
//! They depend downward only, which a test checks; [`Journal`] has its methods where they belong:
//!
//! | layer | modules |
//! |---|---|
//! | calls | `open`, `close`, `requests`, `admission` (handles that start), `fast_commit` |
//! | commits | `commit` |
//! | mechanisms | `part`, `last_changes`, `handle`, `reservation`, `open_handles`, `checkpoint`, `area_writer`, `barriers`, `barrier_writes`, `roles` |
//! | what they share | `journal` |
//! | data | `state`, `pipeline`, `transaction`, `gate`, `buffer`, `live_buffers`, `checkpoint_writes`, `checkpoint_claims`, `request_queue`, `wanted_parts`, `fast_commit_area`, `area`, `part_set`, `commit_pieces`, `journal_thread`, `log`, `map`, `stats`, `options`, `sequence`, `error` |
//!
//! [`recovery`] needs the log and the areas only.

#![forbid(unsafe_code)]

mod admission;
mod area;
mod area_writer;
mod barrier_writes;
mod barriers;
mod buffer;
mod checkpoint;
mod checkpoint_claims;
mod checkpoint_writes;
mod close;
mod commit;
mod commit_pieces;
mod error;
mod fast_commit;
mod fast_commit_area;
mod gate;
mod handle;
mod journal;
mod journal_thread;
mod last_changes;
mod late_joiners;
mod live_buffers;
mod log;
mod map;
mod open;
mod open_handles;
mod options;
mod part;
mod part_set;
mod pipeline;
pub mod recovery;
mod request_queue;
mod requests;
mod reservation;
mod roles;
mod sequence;
mod state;
mod stats;
mod transaction;
mod waiters;
mod wanted_parts;

pub use admission::room_waits_of_this_thread;
pub use area::{AreaStats, UnplacedITransaction, write_table};
pub use area_writer::{AreaWrite, AreaWriter, Submitted};
pub use barriers::{BARRIER_BYTES_MAX, PlacedBarrier};
pub use buffer::{Buffer, BufferKind, ReadGuard, WriteGuard};
pub use error::{JournalError, Result};
pub use fast_commit_area::{DataNeeds, FastCommitOutcome, FastCommitRequest, FastCommitTicket};
pub use handle::Handle;
pub use journal::Journal;
pub use last_changes::LastChanges;
pub use map::{JournalExtent, JournalMap};
pub use options::{FitReplayed, JournalIo, JournalLists, JournalOptions, PipelineMode};
pub use part::Parts;
pub use part_set::{Part, PartSet, WholeReason};
pub use recovery::{RecoveryReport, recover};
pub use stats::JournalStats;
pub use transaction::Phase;
pub use wanted_parts::{ChangesUpTo, PartialCommit};
