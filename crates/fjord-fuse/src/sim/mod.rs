//! A modelled device as a file: `disk` in a directory of its own, so that any file system can be
//! put on it, fjord as well as the kernel's ext4 on a loop device.
//!
//! Besides `disk` there are `stats` (counters of the model, JSON, generated at each open),
//! `control` (commands, one per write), `trace` (recorded events) and `image` (after a power cut,
//! an image that it may have left).
//!
//! Invariant: nothing of `disk` is cached above the model, so that each read, write and fsync costs
//! what the model says.

mod handler;
mod nodes;

use std::path::Path;
use std::sync::Arc;

use fjord_block::sim::{SimDevice, SimStats};
use serde::{Deserialize, Serialize};

use crate::abi::InitFlags;
use crate::mount::{self, FuseOptions, MountHandle, Mounted};
use crate::server::ServeError;
use crate::session::{Session, SessionConfig};

use handler::SimHandler;

/// The mount's subtype, in `fuse.SUBTYPE`.
pub const SUBTYPE: &str = fjord_block::mountinfo::SIM_SUBTYPE;
/// The file that is the device.
pub const DISK: &str = "disk";
/// The file with the counters of the model.
pub const STATS: &str = "stats";
/// The file that takes commands: `cut SEED`, `trace`.
pub const CONTROL: &str = "control";
/// The file that holds an image after a power cut.
pub const IMAGE: &str = "image";

/// The file with the events since its last open, one per line, in order:
/// `transfer NS COMMAND EPOCH`, `persist NS COMMAND EPOCH OFFSET`, `queue NS DEPTH`.
pub const TRACE: &str = "trace";

/// Contents of `stats`. Times are in nanoseconds of the model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SimReport {
    /// The device's profile.
    pub profile: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Whether the power is on.
    pub powered: bool,
    /// Time since the device was made.
    pub elapsed_ns: u64,
    /// Writes transferred.
    pub write_count: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Writes with FUA.
    pub fua_count: u64,
    /// Reads.
    pub read_count: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Flushes.
    pub flush_count: u64,
    /// Discards and write-zeroes.
    pub discard_count: u64,
    /// Program operations.
    pub program_count: u64,
    /// Units of 4096 bytes programmed.
    pub programmed_units: u64,
    /// Time that transfers waited for room in the cache.
    pub cache_stall_ns: u64,
    /// The mean queue depth over time, the idle time included.
    pub queue_depth_mean: f64,
    /// The largest queue depth.
    pub queue_depth_max: usize,
    /// How long the queue held so many commands, by number of commands.
    pub queue_depth_ns: Vec<u64>,
}

impl SimReport {
    fn new(device: &SimDevice) -> SimReport {
        let stats: SimStats = device.sim_stats();
        SimReport {
            profile: device.profile().name.into(),
            size_bytes: fjord_block::Device::size_bytes(device),
            powered: device.is_powered(),
            elapsed_ns: stats.elapsed_ns,
            write_count: stats.write_count,
            write_bytes: stats.write_bytes,
            fua_count: stats.fua_count,
            read_count: stats.read_count,
            read_bytes: stats.read_bytes,
            flush_count: stats.flush_count,
            discard_count: stats.discard_count,
            program_count: stats.program_count,
            programmed_units: stats.programmed_units,
            cache_stall_ns: stats.cache_stall_ns,
            queue_depth_mean: stats.queue_depth_mean(),
            queue_depth_max: stats.queue_depth_max(),
            queue_depth_ns: stats.queue_depth_ns,
        }
    }
}

/// A modelled device that is mounted and ready to be served.
pub struct SimServer {
    mounted: Mounted,
    session: Session<SimHandler>,
}

impl SimServer {
    /// Mounts `device` on `dir`; the mount table shows `source`. When this returns the mount
    /// stands; requests wait until [`SimServer::run`].
    ///
    /// # Errors
    /// See [`ServeError`]; nothing stays mounted.
    pub fn mount(
        device: Arc<SimDevice>,
        source: &str,
        dir: &Path,
    ) -> Result<SimServer, ServeError> {
        let options = FuseOptions::default();
        let depth = device.profile().queue_depth as usize;
        let mounted = mount::mount_plain(SUBTYPE, source, dir, &options)?;
        let default = SessionConfig::default();
        let config = SessionConfig {
            // So that one caller, such as a loop device, can have many commands under way. The disk has no
            // pages in the kernel's cache.
            flags: default.flags | InitFlags::ASYNC_DIO,
            // One worker waits for each command under way; some more keep the queue filled.
            threads_max: 2 * depth + 8,
            threads_idle_max: depth + 4,
            background_max: (2 * depth).max(16) as u16,
            ..default
        };
        let session = Session::new(mounted.transport(), SimHandler::new(device), config);
        if let Err(e) = session.init() {
            if let Err(error) = mounted.handle().cut() {
                tracing::error!(%error, "a failed mount could not be unmounted");
            }
            return Err(e.into());
        }
        Ok(SimServer { mounted, session })
    }

    /// A handle to unmount it, from any thread.
    pub fn handle(&self) -> MountHandle {
        self.mounted.handle()
    }

    /// Serves until the mount is taken down.
    ///
    /// # Errors
    /// No worker could be started.
    pub fn run(self) -> Result<(), ServeError> {
        Ok(self.session.run()?)
    }
}
