//! The mounted file system.
//!
//! Owns [`FsInner`], the shared state of a mount, and its life cycle: formatting ([`create`]),
//! mount ([`mount`], [`recover`]), the superblock ([`superblock`]), health ([`status`],
//! [`events`]), space on the host ([`room`]), background threads ([`threads`]), snapshots
//! ([`snapshot`]), growth ([`resize`]), sync and unmount ([`sync`]).
//!
//! Invariants: there is no lock that all reads, writes or fsyncs take; after corruption or a failed
//! write, nothing on the device is changed any more; the image is marked clean only after
//! everything is checkpointed and flushed.

pub(crate) mod create;
pub(crate) mod dirty;
pub(crate) mod events;
pub(crate) mod geo;
pub(crate) mod mmp;
pub(crate) mod mount;
mod recover;
pub(crate) mod resize;
pub(crate) mod room;
pub(crate) mod snapshot;
pub(crate) mod status;
pub(crate) mod superblock;
pub(crate) mod sync;
pub(crate) mod threads;

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use fjord_block::epoch::EpochDevice;
use fjord_block::lock::Mutex;
use fjord_block::{DeferredWrites, Device, DeviceExt};
use fjord_format::BlockNo;
use fjord_format::features::Compat;
use fjord_format::geometry::GOOD_OLD_INODE_BYTES;
use fjord_format::time::{SECONDS_MAX, SECONDS_MAX_32BIT, SECONDS_MIN};
use fjord_journal::{Handle, Journal, RecoveryReport};
use rustix::io::Errno;

use crate::alloc::{GroupParts, Groups};
use crate::attr::Timespec;
use crate::awake::Awake;
use crate::cache::meta::MetaCache;
use crate::cache::page::PageLru;
use crate::error::{Error, Result};
use crate::file::carry::Carriers;
use crate::file::data_device::DataDevice;
use crate::file::pace::Pace;
use crate::fs::geo::Geo;
use crate::fsync::FsyncPolicy;
use crate::fsync::epochs::Epochs;
use crate::fsync::hazards::ReplayHazards;
use crate::fsync::stats::FsyncCounters;
use crate::inode::InodeState;
use crate::inode::table::InodeTable;
use crate::options::MountOptions;
use crate::orphan::OrphanTable;

/// Everything that belongs to one mounted file system.
pub(crate) struct FsInner {
    /// The block device; knows no ext4.
    pub(crate) device: Arc<dyn Device>,
    /// The epoch scheduler in it, if the mount uses one.
    pub(crate) scheduler: Option<Arc<EpochDevice>>,
    /// `fbarrier` was called: from then on all data writes are ordered. Never cleared.
    pub(crate) data_in_order: AtomicBool,
    /// What barrier calls have ordered and is perhaps not durable.
    pub(crate) epochs: Epochs,
    /// Limits of writeback in flight.
    pub(crate) pace: Arc<Pace>,
    /// Bytes of data writes in flight that no fsync waits for.
    pub(crate) unawaited_bytes: AtomicU64,
    /// Layout; grows.
    pub(crate) geo: Arc<Geo>,
    /// How it was mounted.
    pub(crate) options: MountOptions,
    /// Metadata blocks.
    pub(crate) meta: MetaCache,
    /// Budget of file pages.
    pub(crate) page_lru: Arc<PageLru>,
    /// Inodes in memory.
    pub(crate) inodes: InodeTable,
    /// Writes of pages that i-transactions carry.
    pub(crate) deferred: DeferredWrites,
    /// The device for file data.
    pub(crate) data_device: Arc<DataDevice>,
    /// Inodes with such pages.
    pub(crate) carriers: Carriers,
    /// Inodes with something to write, oldest first.
    pub(crate) dirty_inodes: dirty::DirtyList,
    /// Block groups: descriptors, bitmaps, counters.
    pub(crate) groups: Groups,
    /// The superblock.
    pub(crate) sb: superblock::SuperState,
    /// What the superblock says about directories; fixed.
    pub(crate) dir_params: crate::dir::DirParams,
    /// Inodes that are deleted or being truncated.
    pub(crate) orphans: OrphanTable,
    /// Waits for the blocks of removed files.
    pub(crate) releases: sync::Releases,
    /// Held while the file system grows; taken before all other locks.
    pub(crate) resize_lock: Mutex<()>,
    /// Serialises renames between directories (`s_vfs_rename_mutex`).
    pub(crate) rename_lock: Mutex<()>,
    /// How an fsync commits.
    pub(crate) fsync_policy: Box<dyn FsyncPolicy>,
    /// Changes that the replay of fast commits by others would undo.
    pub(crate) hazards: ReplayHazards,
    /// Whether the disk that holds the image is full.
    pub(crate) room: room::Room,
    /// Read-only, shut down, damaged?
    pub(crate) status: status::Status,
    /// Warnings and errors so far.
    pub(crate) events: events::Events,
    /// Statistics of fsync.
    pub(crate) fsync_counters: FsyncCounters,
    /// Other counters for users.
    pub(crate) stats: Counters,
    /// Background threads and their wake-ups.
    pub(crate) threads: threads::Threads,
    /// What keeps processors from halting. Set by mount, where this process may do that.
    pub(crate) awake: OnceLock<Awake>,
    /// Multi-mount protection, while it is held.
    pub(crate) mmp: Arc<mmp::Mmp>,
    /// Set once, at the end of mount, where groups commit alone.
    pub(crate) parts: OnceLock<Arc<GroupParts>>,
    /// Set once, at the end of mount.
    journal: OnceLock<Journal>,
    /// What the mount has replayed; without the records of fast commits. Set once, where the mount has read a log.
    pub(crate) recovery: OnceLock<RecoveryReport>,
}

/// Counters of a mounted file system.
#[derive(Default)]
pub(crate) struct Counters {
    /// fbarrier and fdatabarrier calls that gave order without durability.
    pub(crate) barriers: AtomicU64,
    /// Those that were served as fsync.
    pub(crate) barriers_as_fsync: AtomicU64,
    /// fsync and fdatasync calls that were to order only.
    pub(crate) fsyncs_order_only: AtomicU64,
    /// A warning has said that files ask for it.
    pub(crate) order_only_is_told: AtomicBool,
}

impl FsInner {
    /// The journal (or its stand-in on an image without one).
    ///
    /// Mount sets it before any reference to the file system leaves it.
    pub(crate) fn journal(&self) -> &Journal {
        self.journal
            .get_or_init(|| Journal::without_log(self.device.clone(), self.geo.block_size as usize))
    }

    /// Sets the journal; only mount does, once.
    pub(crate) fn set_journal(&self, journal: Journal) {
        // A second call would be a bug of mount itself; the first journal stays.
        self.data_device.set_journal(journal.clone());
        let _ = self.journal.set(journal);
    }

    /// Whether the device keeps order: writes are ordered, without waits in between.
    pub(crate) fn keeps_order(&self) -> bool {
        self.journal().keeps_order()
    }

    /// Whether changes go through a log.
    pub(crate) fn has_log(&self) -> bool {
        self.geo.features.compat.contains(Compat::HAS_JOURNAL) && !self.options.read_only
    }

    /// Opens a handle for an operation that dirties up to `credits` metadata blocks.
    ///
    /// # Errors
    /// `EROFS` on a read-only file system, `Closed` after the unmount, `EIO` after shutdown,
    /// journal errors.
    pub(crate) fn start(&self, credits: u32) -> Result<Handle> {
        self.check_writable()?;
        if self.meta.is_far_over_budget() {
            self.bring_metadata_home()?;
        }
        Ok(self.journal().start(credits)?)
    }

    /// Ends a change in the middle and commits its first half: what a planted bug does.
    pub(crate) fn split_change(&self, half: Handle) -> Result<Handle> {
        let credits = half.credits();
        self.journal().commit(half.stop())?;
        self.start(credits)
    }

    /// Makes dirty metadata clean, so that the cache can drop it. No handle is open.
    fn bring_metadata_home(&self) -> Result<()> {
        let journal = self.journal();
        if !self.has_log() {
            journal.commit_running()?;
        }
        journal.checkpoint_now(threads::CHECKPOINT_BLOCKS)?;
        self.meta.trim();
        Ok(())
    }

    /// Byte offset of a block on the device. The block has been checked against the
    /// geometry by whoever read it from disk.
    pub(crate) fn byte_offset(&self, block: BlockNo) -> u64 {
        block.0.saturating_mul(u64::from(self.geo.block_size))
    }

    /// The time that new timestamps get.
    pub(crate) fn now(&self) -> Timespec {
        self.storable(self.options.fixed_time.unwrap_or_else(Timespec::now))
    }

    /// What is left of a time when it is stored: inodes of 128 bytes keep whole seconds of
    /// 32 bits, larger ones nanoseconds and seconds up to the year 2446.
    pub(crate) fn storable(&self, time: Timespec) -> Timespec {
        if self.geo.inode_size > GOOD_OLD_INODE_BYTES {
            let sec = time.sec.clamp(SECONDS_MIN, SECONDS_MAX);
            return Timespec { sec, nsec: if sec == time.sec { time.nsec } else { 0 } };
        }
        Timespec { sec: time.sec.clamp(SECONDS_MIN, SECONDS_MAX_32BIT), nsec: 0 }
    }

    /// Makes all completed writes durable.
    pub(crate) fn flush_device(&self) -> Result<()> {
        if !self.options.barrier {
            return Ok(());
        }
        let departed = self.inodes.departed_in_place.mark();
        self.device.flush().map_err(|error| {
            let error = Error::from(error);
            self.note_write_error(&error);
            error
        })?;
        self.inodes.departed_in_place.record_flush(departed);
        Ok(())
    }

    /// The largest size a file can have, which depends on how it maps its blocks.
    pub(crate) fn max_file_size(&self, state: &InodeState) -> u64 {
        crate::map::max_size_bytes(self, state)
    }

    /// Fails unless operations may go on.
    ///
    /// # Errors
    /// `Closed` after the unmount, `EIO` after a shutdown.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if !self.status.is_shut_down() {
            return Ok(());
        }
        Err(if self.status.is_unmounted() { Error::Closed } else { Errno::IO.into() })
    }

    /// Fails unless changes are allowed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_alive()?;
        if self.is_read_only() { Err(Errno::ROFS.into()) } else { Ok(()) }
    }

    /// Whether nothing may be changed, by choice or because of an error.
    pub(crate) fn is_read_only(&self) -> bool {
        self.options.read_only || self.status.is_read_only()
    }

    /// Wakes the writeback thread.
    pub(crate) fn wake_writeback(&self) {
        self.threads.wake(threads::Who::Writeback);
    }
}
