//! Multi-mount protection: an image with the `mmp` feature is used by one node at a time.
//!
//! Owns the MMP block while the image is mounted. Invariant: the block holds our
//! sequence number from before the first other write until after the last; if someone
//! else's number appears, writing stops.
//!
//! Format and waiting rules: Linux `Documentation/filesystems/ext4/mmp.rst`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fjord_block::lock::{Condvar, Mutex, Rank};
use fjord_block::{Buf, Class, Device, DeviceExt, Order, Request};
use fjord_format::BlockNo;
use fjord_format::features::Incompat;
use fjord_format::geometry::Geometry;
use fjord_format::mmp::{MmpBlock, SEQ_CLEAN, SEQ_FSCK, SEQ_MAX};
use fjord_format::superblock::RawSuperblock;

use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::options::MountOptions;

/// Shortest time between two heartbeats, in seconds.
const INTERVAL_MIN_SECONDS: u64 = 1;
/// Longest time to wait beyond one interval for a sign of life of another user.
const WAIT_EXTRA_MAX_SECONDS: u64 = 60;

const E2FSCK_RUNS: &str = "e2fsck is running on it, or was killed while it did";

/// MMP state of a mount; empty for images without the feature.
pub(crate) struct Mmp {
    held: Option<Held>,
    stop: Arc<(Mutex<bool>, Condvar)>,
    released: AtomicBool,
    /// Another user has the image: no further writes, not even of this block.
    lost: AtomicBool,
}

impl Default for Mmp {
    fn default() -> Mmp {
        Mmp {
            held: None,
            stop: Arc::new((Mutex::new(Rank::MmpStop, false), Condvar::new())),
            released: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        }
    }
}

struct Held {
    device: Arc<dyn Device>,
    offset: u64,
    geo: Geometry,
    interval: Duration,
    /// What the block says now.
    block: Mutex<Option<MmpBlock>>,
}

impl Held {
    /// The block of an image with the feature; nothing is written yet.
    fn of(device: &Arc<dyn Device>, raw: &RawSuperblock, geo: &Geometry) -> Result<Option<Held>> {
        if !geo.features.incompat.contains(Incompat::MMP) {
            return Ok(None);
        }
        let number = BlockNo(raw.s_mmp_block.get());
        if number.0 <= geo.first_data_block.0 || !geo.contains(number) {
            return Err(Error::corrupt("superblock", format!("MMP block {number}")));
        }
        let update = u64::from(raw.s_mmp_update_interval.get());
        Ok(Some(Held {
            device: device.clone(),
            offset: number.0 * u64::from(geo.block_size),
            geo: geo.clone(),
            interval: Duration::from_secs(update.max(INTERVAL_MIN_SECONDS)),
            block: Mutex::new(Rank::MmpBlock, None),
        }))
    }

    fn read(&self) -> Result<MmpBlock> {
        let bytes = self.device.read_buf(self.offset, self.geo.block_size as usize)?;
        Ok(MmpBlock::decode(&bytes, &self.geo)?)
    }

    fn write(&self, block: &MmpBlock) -> Result<()> {
        let mut bytes = self.device.read_buf(self.offset, self.geo.block_size as usize)?;
        block.encode(&mut bytes, &self.geo)?;
        let request = Request::Write {
            offset: self.offset,
            bufs: vec![Buf::from(bytes)],
            order: Order::Orderless,
            fua: true,
            class: Class::Sync,
        };
        Ok(self.device.submit_one(request).wait()?)
    }
}

impl Mmp {
    /// For views that hold nothing.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// Claims the image, after waiting for a heartbeat of another user.
    ///
    /// # Errors
    /// `Usage` naming the other user.
    pub(crate) fn acquire(
        device: &Arc<dyn Device>,
        raw: &RawSuperblock,
        geo: &Geometry,
        options: &MountOptions,
    ) -> Result<Self> {
        if options.read_only {
            return Ok(Self::none());
        }
        let Some(held) = Held::of(device, raw, geo)? else { return Ok(Self::none()) };
        let update = u64::from(raw.s_mmp_update_interval.get());
        let found = held.read()?;
        if found.seq == SEQ_FSCK {
            return Err(in_use(&found, E2FSCK_RUNS));
        }
        let check = u64::from(found.check_interval_seconds).max(update).max(INTERVAL_MIN_SECONDS);
        if found.seq != SEQ_CLEAN {
            wait_for_life(&held, &found, check)?;
        }
        let mut ours = found;
        ours.seq = new_seq();
        ours.check_interval_seconds = u16::try_from(check).unwrap_or(u16::MAX);
        ours.nodename = padded(rustix::system::uname().nodename().to_bytes());
        ours.bdevname = padded(b"fjord");
        held.write(&ours)?;
        // Two nodes may have written at the same moment: the one that finds itself wins.
        wait_for_life(&held, &ours, check)?;
        *held.block.lock() = Some(ours);
        Ok(Self { held: Some(held), ..Self::default() })
    }

    /// Fails if the MMP block names a user, who may be on another node, or dead.
    ///
    /// # Errors
    /// `Usage` naming the user.
    pub(crate) fn check_unused(
        device: &Arc<dyn Device>,
        raw: &RawSuperblock,
        geo: &Geometry,
    ) -> Result<()> {
        let Some(held) = Held::of(device, raw, geo)? else { return Ok(()) };
        let found = held.read()?;
        match found.seq {
            SEQ_CLEAN => Ok(()),
            SEQ_FSCK => Err(in_use(&found, E2FSCK_RUNS)),
            _ => Err(in_use(&found, "its MMP block names that user")),
        }
    }

    /// Takes the mark from a copy of an image, which nobody uses.
    pub(crate) fn clear(
        device: &Arc<dyn Device>,
        raw: &RawSuperblock,
        geo: &Geometry,
    ) -> Result<()> {
        let Some(held) = Held::of(device, raw, geo)? else { return Ok(()) };
        let found = held.read()?;
        if found.seq == SEQ_CLEAN {
            return Ok(());
        }
        held.write(&MmpBlock { seq: SEQ_CLEAN, ..found })
    }

    /// Starts the heartbeat.
    pub(crate) fn start(fs: &Arc<FsInner>) {
        if fs.mmp.held.is_none() {
            return;
        }
        let weak = Arc::downgrade(fs);
        let stop = fs.mmp.stop.clone();
        let interval = fs.mmp.held.as_ref().map_or(Duration::MAX, |held| held.interval);
        let spawned = std::thread::Builder::new().name("fjord-mmp".into()).spawn(move || {
            loop {
                {
                    let mut stopped = stop.0.lock();
                    if !*stopped {
                        stop.1.wait_until(&mut stopped, Instant::now() + interval);
                    }
                    if *stopped {
                        return;
                    }
                }
                let Some(fs) = weak.upgrade() else { return };
                if let Err(error) = fs.mmp.beat() {
                    if fs.mmp.is_lost() {
                        fs.stop_at_once(&error);
                    } else {
                        fs.note_write_error(&error);
                    }
                    return;
                }
            }
        });
        if let Err(error) = spawned {
            fs.note_write_error(&Error::Usage(format!("cannot start the MMP heartbeat: {error}")));
        }
    }

    /// Whether somebody else took the image.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn beat(&self) -> Result<()> {
        let Some(held) = &self.held else { return Ok(()) };
        let mut guard = held.block.lock();
        let Some(block) = guard.as_mut().filter(|_| !self.released.load(Ordering::Acquire)) else {
            return Ok(());
        };
        let found = held.read()?;
        if found.seq != block.seq {
            self.lost.store(true, Ordering::Release);
            return Err(in_use(&found, "it claimed the image while this process was using it"));
        }
        block.seq = if block.seq >= SEQ_MAX { 1 } else { block.seq + 1 };
        block.time_seconds = u64::try_from(crate::attr::Timespec::now().sec).unwrap_or(0);
        held.write(block)
    }

    /// Releases the image. On errors it stays marked as in use, which is safe.
    pub(crate) fn release(&self) {
        let Some(held) = &self.held else { return };
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if self.is_lost() {
            return;
        }
        let mut guard = held.block.lock();
        let Some(block) = guard.as_mut().filter(|_| !self.released.swap(true, Ordering::AcqRel))
        else {
            return;
        };
        block.seq = SEQ_CLEAN;
        if let Err(error) = held.write(block) {
            tracing::warn!(%error, "the image stays marked as in use (MMP)");
        }
    }
}

/// Fails if the block changes within the time after which a live user must have written.
fn wait_for_life(held: &Held, seen: &MmpBlock, check_seconds: u64) -> Result<()> {
    let wait = (check_seconds * 2 + 1).min(check_seconds + WAIT_EXTRA_MAX_SECONDS);
    std::thread::sleep(Duration::from_secs(wait));
    let now = held.read()?;
    if now.seq != seen.seq {
        return Err(in_use(&now, "its heartbeat was seen"));
    }
    Ok(())
}

fn in_use(block: &MmpBlock, why: &str) -> Error {
    Error::Usage(format!(
        "the image is in use by {} on {}: {why}; unmount it there, or, if that user is dead, \
         clear the mark with `tune2fs -f -E clear_mmp`",
        text(&block.bdevname),
        text(&block.nodename),
    ))
}

/// A name in a field of zero-padded bytes.
fn padded<const N: usize>(name: &[u8]) -> [u8; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(name) {
        *to = *from;
    }
    field
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

/// A sequence number that no other user is likely to pick.
fn new_seq() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    (random % u64::from(SEQ_MAX)) as u32 + 1
}
