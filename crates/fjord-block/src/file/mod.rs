//! The backend for image files and block devices. Owns [`FileDevice`] and the routing of requests.
//!
//! - `raw`: blocking system calls; `open`: opening; `lock`: locks against other users;
//! - `shared`: a request and its claim; `helper`: threads for requests without a waiter;
//! - `ring`: io_uring for several transfers at a time; `flush`: flush combining;
//! - `room`: which parts of a sparse file have blocks;
//! - `gate`: holds changes during a snapshot; `copy`: the snapshot; `chunks`: its progress.
//!
//! Invariant: the waiting thread does the work itself where that is fastest: a single transfer and
//! a flush are system calls of the waiter, without a thread switch.

mod chunks;
mod clock;
mod copy;
mod flush;
mod gate;
#[cfg(test)]
mod gate_tests;
mod helper;
mod lock;
mod open;
mod raw;
mod ring;
mod room;
mod shared;

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use smallvec::{SmallVec, smallvec};

use crate::buf::AlignedBuf;
use crate::device::{Capabilities, Class, Device, Request, bufs_len, check_range};
use crate::error::{IoError, IoErrorKind, IoOp, OpenError};
use crate::snapshot::{SnapshotError, SnapshotOptions, SnapshotReport};
use crate::stats::{DeviceStats, StatCounters};
use crate::ticket::{IoResult, ReadSlot, ReadTicket, Ticket};
use flush::{DirtyClock, Flusher};
use helper::Helpers;
use raw::RawFile;
use ring::Ring;
use shared::{Job, Shared, Work};

/// How requests reach the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring if the kernel allows it, else plain system calls. The environment variable
    /// `FJORD_IO_ENGINE` (`uring` or `plain`) decides when it is set.
    #[default]
    Auto,
    /// io_uring, or fail to open.
    Uring,
    /// pwritev, preadv and fdatasync.
    Plain,
}

/// Lock timeout of [`FileOptions::default`]. A process that was killed, and a mount that has just
/// ended, hold the lock for a moment longer.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Retry interval of the lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// How to open a file or block device.
///
/// ```
/// use std::time::Duration;
/// use fjord_block::FileOptions;
///
/// // Read an image; fail at once if it is open for writing.
/// let options =
///     FileOptions { read_only: true, lock_timeout: Duration::ZERO, ..FileOptions::default() };
/// assert!(options.direct);
/// ```
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Refuse writes, and share the image with other readers.
    pub read_only: bool,
    /// How requests reach the kernel.
    pub engine: Engine,
    /// Bypass the page cache if the file system allows it. The environment variable
    /// `FJORD_IO_DIRECT=0` overrides it.
    pub direct: bool,
    /// How long to wait for an image that another process has locked. Zero does not wait.
    pub lock_timeout: Duration,
    /// Allocate holes of a sparse file on [`Device::ensure_room`]. Otherwise a write may find the
    /// disk full.
    pub takes_room: bool,
    /// The bytes of the file that are the device, such as those of a partition; `None` for all. What lies
    /// outside is neither read nor written, and the size is fixed.
    pub range: Option<Range<u64>>,
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions {
            read_only: false,
            engine: Engine::Auto,
            direct: true,
            lock_timeout: LOCK_TIMEOUT,
            takes_room: true,
            range: None,
        }
    }
}

/// A file or block device, open and locked. Dropping it waits for every request in flight.
///
/// It has threads: open it after a fork, not before.
///
/// ```
/// use std::time::Duration;
/// use fjord_block::{Device, DeviceExt, FileDevice, FileOptions};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("image");
/// std::fs::write(&path, vec![7; 1 << 20])?;
/// let device = FileDevice::open(&path, &FileOptions::default())?;
/// assert_eq!(device.size_bytes(), 1 << 20);
/// assert_eq!(device.read_buf(0, 512)?[0], 7);
/// // Locked: a second open fails.
/// let at_once = FileOptions { lock_timeout: Duration::ZERO, ..FileOptions::default() };
/// assert!(FileDevice::open(&path, &at_once).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FileDevice {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

impl fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileDevice")
            .field("file", &self.shared.file)
            .field("engine", &self.engine())
            .field("pending", &self.shared.gate.pending_count())
            .finish_non_exhaustive()
    }
}

/// Opens the file, waiting for its lock as long as the options say.
fn open_when_free(
    path: &Path,
    options: &FileOptions,
) -> Result<(RawFile, Capabilities), OpenError> {
    let started = Instant::now();
    loop {
        match open::open(path, options) {
            Err(OpenError::InUse { .. }) if started.elapsed() < options.lock_timeout => {
                thread::sleep(LOCK_INTERVAL);
            }
            done => return done,
        }
    }
}

thread_local! {
    /// The job of class Sync that this thread submitted last and may not have waited for.
    static LAST: RefCell<Weak<Job>> = const { RefCell::new(Weak::new()) };
}

impl FileDevice {
    /// Opens and locks `path`, which must exist.
    ///
    /// # Errors
    /// `InUse` when it is still locked after [`FileOptions::lock_timeout`]; `NotADevice` for a path
    /// that is neither a file nor a block device; `WriteProtected`; `OutOfRange` for a range that
    /// reaches beyond the end; `Unavailable` if the requested engine is not supported; `Os` for the
    /// rest.
    pub fn open(path: &Path, options: &FileOptions) -> Result<FileDevice, OpenError> {
        let mut options = options.clone();
        options.direct &= std::env::var_os("FJORD_IO_DIRECT").is_none_or(|value| value != "0");
        if options.engine == Engine::Auto {
            options.engine = match std::env::var("FJORD_IO_ENGINE").as_deref() {
                Ok("plain") => Engine::Plain,
                Ok("uring") => Engine::Uring,
                _ => Engine::Auto,
            };
        }
        let (file, capabilities) = open_when_free(path, &options)?;
        let ring = match options.engine {
            Engine::Plain => None,
            engine => match Ring::new(&file) {
                Ok(ring) => Some(ring),
                Err(error) if engine == Engine::Auto => {
                    tracing::debug!("no io_uring ({error}), plain calls instead");
                    None
                }
                Err(source) => {
                    return Err(OpenError::Unavailable {
                        path: path.to_owned(),
                        what: "io_uring",
                        source,
                    });
                }
            },
        };
        let shared = Arc::new(Shared {
            file,
            ring,
            flusher: Flusher::default(),
            helpers: Helpers::default(),
            dirty: DirtyClock::new(),
            sticky: Arc::default(),
            stats: StatCounters::default(),
            gate: Arc::default(),
        });
        Helpers::start(&shared)
            .map_err(|source| OpenError::Os { path: path.to_owned(), source })?;
        Ok(FileDevice { capabilities, shared })
    }

    /// Fails unless `path` is a regular file or a block device. Does not open the path.
    ///
    /// # Errors
    /// `NotADevice`; `Os` if stat(2) fails.
    pub fn check_kind(path: &Path) -> Result<(), OpenError> {
        open::check_kind(path)
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.shared.file.direct.is_some()
    }

    /// The engine in use: [`Engine::Uring`] or [`Engine::Plain`].
    pub fn engine(&self) -> Engine {
        if self.shared.ring.is_some() { Engine::Uring } else { Engine::Plain }
    }

    /// Whether the image is a block device (not a regular file).
    pub fn is_block_device(&self) -> bool {
        self.shared.file.is_block_device
    }

    /// Whether the size cannot change: a block device, or a range of a file.
    pub fn has_fixed_size(&self) -> bool {
        self.shared.file.is_block_device || self.shared.file.is_range
    }

    /// Whether another handle, here or in another process, has an image file, or a range of it, open for
    /// writing. Takes a shared lock on `file` for a look, which ends with it.
    pub fn is_locked(file: &File, range: Option<&Range<u64>>) -> bool {
        lock::is_locked(file, range)
    }

    /// Locks an open file, or a range of it, as an open device is, for as long as its description lives.
    /// `false` if another handle has it.
    pub fn lock(file: &File, range: Option<&Range<u64>>, read_only: bool) -> bool {
        lock::lock_as_user(file, range, read_only)
    }

    /// The bytes of the file that are the device, if it is not all of the file.
    pub fn range(&self) -> Option<Range<u64>> {
        self.shared.file.range()
    }

    fn check(&self, request: &Request) -> IoResult {
        let (op, offset, len) = request.extent();
        if self.capabilities.read_only && op != IoOp::Flush {
            return Err(IoError::new(IoErrorKind::ReadOnly, op, offset, len));
        }
        check_range(op, offset, len, self.size_bytes())
    }

    fn count(&self, request: &Request) {
        let stats = &self.shared.stats;
        match request {
            Request::Write { bufs, fua, class, .. } => stats.write(*class, bufs_len(bufs), *fua),
            Request::Flush { class } => stats.flush(*class),
            Request::Discard { len, .. } => stats.discard(*len),
            Request::WriteZeroes { len, .. } => stats.write_zeroes(*len),
        }
    }

    fn submit_flush(&self, class: Class) -> Ticket {
        let ticket = Flusher::submit(&self.shared);
        if !ticket.is_done() {
            match class {
                Class::Sync => self.shared.helpers.push_lazy_flush(ticket.clone()),
                Class::Async | Class::Background => self.shared.start_flush(ticket.clone()),
            }
        }
        ticket
    }

    /// Leaves a single Sync job to its waiter; dispatches everything else.
    fn enqueue(&self, mut jobs: SmallVec<[(Arc<Job>, Class); 4]>) {
        let shared = &self.shared;
        if jobs.is_empty() {
            return;
        }
        // The thread did not wait for its last job before this one: run both now.
        let last = LAST.try_with(|last| last.take().upgrade()).ok().flatten();
        let last = last.filter(|last| Arc::ptr_eq(&last.shared, shared) && !last.is_claimed());
        let lone = jobs.len() == 1 && last.is_none();
        jobs.extend(last.map(|last| (last, Class::Sync)));
        let mut by_class: [Vec<Arc<Job>>; 3] = Default::default();
        for (job, class) in jobs {
            // A buffered write is a copy in memory, best done by the waiter in any case.
            if class == Class::Sync && (lone || !self.is_direct()) {
                if lone {
                    // A thread that is ending has no thread-locals; the ticker dispatches the job
                    // then.
                    let _ = LAST.try_with(|last| last.replace(Arc::downgrade(&job)));
                }
                shared.helpers.push_lazy_job(job);
            } else {
                by_class[class as usize].push(job);
            }
        }
        for (jobs, class) in
            by_class.into_iter().zip([Class::Sync, Class::Async, Class::Background])
        {
            if !jobs.is_empty() {
                shared.dispatch(jobs, class);
            }
        }
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        self.shared.helpers.stop();
    }
}

impl Device for FileDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.shared.file.size_bytes()
    }

    fn set_size(&self, size_bytes: u64) -> IoResult {
        if self.capabilities.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly, IoOp::SetSize, 0, size_bytes));
        }
        if size_bytes < self.size_bytes() {
            self.shared.gate.fail(SnapshotError::Resized, &self.shared);
        }
        let result = self.shared.file.set_size(size_bytes);
        self.shared.dirty.bump();
        result
    }

    fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        if self.capabilities.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly, IoOp::SetSize, 0, size_bytes));
        }
        let result = self.shared.file.ensure_size(size_bytes);
        self.shared.dirty.bump();
        result
    }

    fn ensure_room(&self, offset: u64, len: u64) -> IoResult {
        room::ensure(&self.shared.file, offset, len, || self.shared.dirty.bump())
    }

    fn check(&self) -> IoResult {
        self.shared.file.check(IoOp::Check)
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let mut tickets = Vec::with_capacity(batch.len());
        let mut jobs = SmallVec::<[_; 4]>::new();
        for request in batch {
            self.count(&request);
            if let Err(error) = self.check(&request) {
                self.shared.stats.error();
                tickets.push(Ticket::ready(Err(error)));
            } else if let Request::Flush { class } = request {
                tickets.push(self.submit_flush(class));
            } else if let Some((work, ticket, class)) = Work::new(request, &self.shared) {
                tickets.push(ticket);
                if let Some(work) = self.shared.gate.pass(work, class, &self.shared) {
                    jobs.push((Job::new(work, &self.shared), class));
                }
            }
        }
        self.enqueue(jobs);
        tickets
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs_len(&bufs);
        self.shared.stats.read(class, len);
        if let Err(error) = check_range(IoOp::Read, offset, len, self.size_bytes()) {
            self.shared.stats.error();
            return ReadTicket::ready(Err(error));
        }
        let slot = ReadSlot::default();
        let (work, ticket) = Work::new_read(offset, bufs, slot.clone(), &self.shared);
        self.enqueue(smallvec![(Job::new(work, &self.shared), class)]);
        ReadTicket::new(ticket, slot)
    }

    fn stats(&self) -> DeviceStats {
        self.shared.stats.snapshot()
    }

    fn release(&self) {
        self.shared.gate.fail(SnapshotError::Closed, &self.shared);
        self.shared.file.unlock();
    }

    fn snapshot_to(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        copy::snapshot(&self.shared, out, options)
    }

    fn claim(&self, alone: bool) -> Result<(), OpenError> {
        self.shared.file.claim(alone)
    }
}
