//! The recorded device.
//!
//! Owns [`RecordingDevice`], a device over an [`Image`] that logs every request with the moments
//! of its submission and completion, and [`Log`], what it saw. One clock stamps requests,
//! operations and promises alike.
//!
//! Invariants:
//! - a request completes as late as the rules allow: when its submitter waits for it (or a
//!   moment later when nobody does). So a caller that flushes without having waited for a write
//!   has a log in which that flush does not cover the write;
//! - reads see every submitted write at once, as with a device that has them in its cache;
//! - stamps are unique and grow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Completer, Device, Driver, IoError, IoErrorKind, IoOp,
    Order, ReadTicket, Request, Ticket, TicketCore,
};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::image::Image;

/// Size of the objects of [`DeviceKind::Objects`]. They may be as small as 4 KiB, and have 4 MiB as a rule; small ones
/// tear more.
pub(crate) const OBJECT_BYTES: u64 = 16 << 10;
/// How long a request that nobody waits for stays under way.
const UNWAITED_MAX: Duration = Duration::from_millis(20);

/// The kinds of device whose power is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// A volatile cache: until a flush or FUA covers them, any writes may be lost.
    Volatile,
    /// The same, and no FUA: whoever wants a write durable flushes.
    NoFua,
    /// A volatile cache that keeps the order of epochs (barrier command).
    Barrier,
    /// No volatile cache: a completed write stays; those under way may be lost or torn.
    NoCache,
    /// An image on a cluster: the same, and no FUA; a write is whole within an object (the RADOS block device of
    /// Ceph: acknowledged by all copies, and an operation on an object is atomic).
    Objects,
}

impl DeviceKind {
    /// All kinds.
    pub const ALL: [DeviceKind; 5] = [
        DeviceKind::Volatile,
        DeviceKind::NoFua,
        DeviceKind::Barrier,
        DeviceKind::NoCache,
        DeviceKind::Objects,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Volatile => "volatile",
            DeviceKind::NoFua => "nofua",
            DeviceKind::Barrier => "barrier",
            DeviceKind::NoCache => "nocache",
            DeviceKind::Objects => "objects",
        }
    }

    /// The kind with this name.
    pub fn by_name(name: &str) -> Option<DeviceKind> {
        DeviceKind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether a completed write stays.
    pub(crate) fn keeps_completed(self) -> bool {
        matches!(self, DeviceKind::NoCache | DeviceKind::Objects)
    }

    fn capabilities(self) -> Capabilities {
        Capabilities {
            volatile_cache: !self.keeps_completed(),
            fua: !matches!(self, DeviceKind::NoFua | DeviceKind::Objects),
            native_barrier: self == DeviceKind::Barrier,
            discard: true,
            queue_depth: 64,
            logical_block_size: 512,
            read_only: false,
        }
    }
}

/// What a logged request puts on the device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Effect {
    /// These bytes from `offset` on.
    Write {
        /// Where, in bytes.
        offset: u64,
        /// What.
        #[serde(with = "saved_bufs")]
        bufs: Vec<Buf>,
    },
    /// Zeros, or after a discard anything at all.
    Zero {
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// A discard: a power cut may leave any bytes there.
        discard: bool,
    },
    /// A flush.
    Flush,
}

impl Effect {
    /// Byte offset and length; 0 and 0 for a flush.
    pub fn extent(&self) -> (u64, u64) {
        match self {
            Effect::Write { offset, bufs } => {
                (*offset, bufs.iter().map(|buf| buf.len() as u64).sum())
            }
            Effect::Zero { offset, len, .. } => (*offset, *len),
            Effect::Flush => (0, 0),
        }
    }
}

/// Buffers in a saved log: lists of bytes.
mod saved_bufs {
    use fjord_block::Buf;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(bufs: &[Buf], to: S) -> Result<S::Ok, S::Error> {
        bufs.iter().map(|buf| &buf[..]).collect::<Vec<&[u8]>>().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Buf>, D::Error> {
        let list: Vec<Vec<u8>> = Deserialize::deserialize(from)?;
        Ok(list.iter().map(|bytes| Buf::from_slice(bytes)).collect())
    }
}

/// One request of a log.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// What it does.
    pub effect: Effect,
    /// The epoch of an ordered write or barrier; `None` for orderless requests.
    pub epoch: Option<u64>,
    /// Durable by itself when done.
    pub fua: bool,
    /// The clock at submission.
    pub submitted_at: u64,
    /// The clock at completion; `u64::MAX` while under way.
    pub completed_at: u64,
}

/// What a device saw, from an image on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Log {
    /// The contents before.
    pub base: Image,
    /// The requests in the order of submission. Reads are not in it.
    pub entries: Vec<Entry>,
    /// The clock at the end.
    pub end: u64,
}

#[derive(Default)]
struct State {
    /// None while not recording.
    entries: Option<Vec<Entry>>,
    epoch: u64,
}

struct Shared {
    clock: AtomicU64,
    image: RwLock<Image>,
    /// The log; a leaf lock.
    state: Mutex<State>,
    /// Completers of requests under way, by index in the log, with their time of submission;
    /// a leaf lock.
    under_way: Mutex<Vec<(usize, Completer, std::time::Instant)>>,
    /// Requests take their time, so that other threads work while a commit is under way.
    is_slow: bool,
}

impl Shared {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn complete(&self, index: usize) {
        let completer = {
            let mut under_way = self.under_way.lock();
            let Some(at) = under_way.iter().position(|(other, ..)| *other == index) else { return };
            under_way.remove(at).1
        };
        {
            let mut state = self.state.lock();
            if let Some(entry) = state.entries.as_mut().and_then(|list| list.get_mut(index)) {
                entry.completed_at = self.tick();
            }
        }
        completer.complete(Ok(()));
    }
}

/// Completes one request when its submitter waits.
struct CompleteOnWait {
    shared: Weak<Shared>,
    index: usize,
}

impl Driver for CompleteOnWait {
    fn drive(&self, _: &Arc<TicketCore>) {
        if let Some(shared) = self.shared.upgrade() {
            if shared.is_slow {
                // Not all alike: 40 to 640 µs.
                let part = (self.index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
                std::thread::sleep(Duration::from_micros(40 * (part + 1)));
            }
            shared.complete(self.index);
        }
    }
    fn start(&self, _: &Arc<TicketCore>) {}
    fn needs_waiter(&self) -> bool {
        true
    }
}

/// A device in memory that records.
pub struct RecordingDevice {
    kind: DeviceKind,
    capabilities: Capabilities,
    size_bytes: u64,
    shared: Arc<Shared>,
    /// Ends the helper thread when dropped.
    _alive: Option<Arc<()>>,
}

impl std::fmt::Debug for RecordingDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordingDevice({} bytes)", self.size_bytes)
    }
}

impl RecordingDevice {
    fn build(image: Image, kind: DeviceKind, recording: bool, clock: u64) -> RecordingDevice {
        let size_bytes = image.size_bytes();
        let state = State { entries: recording.then(Vec::new), epoch: 0 };
        let shared = Arc::new(Shared {
            clock: AtomicU64::new(clock),
            image: RwLock::new(image),
            state: Mutex::new(state),
            under_way: Mutex::default(),
            is_slow: false,
        });
        let capabilities = kind.capabilities();
        RecordingDevice { kind, capabilities, size_bytes, shared, _alive: None }
    }

    /// A device that does not record: every request is done when submitted.
    pub fn plain(image: Image, kind: DeviceKind) -> RecordingDevice {
        Self::build(image, kind, false, 1)
    }

    /// A device that records, for callers that wait for all their requests in the end.
    pub fn recording(image: Image, kind: DeviceKind) -> RecordingDevice {
        Self::build(image, kind, true, 1)
    }

    /// As [`RecordingDevice::recording`], for users with threads: a request that nobody waits
    /// for is done after a moment.
    pub fn recording_threads(image: Image, kind: DeviceKind) -> RecordingDevice {
        let mut device = Self::recording(image, kind);
        if let Some(shared) = Arc::get_mut(&mut device.shared) {
            shared.is_slow = true;
        }
        let alive = Arc::new(());
        let (shared, watch) = (Arc::downgrade(&device.shared), Arc::downgrade(&alive));
        std::thread::spawn(move || {
            while watch.upgrade().is_some() {
                std::thread::sleep(UNWAITED_MAX / 4);
                let Some(shared) = shared.upgrade() else { return };
                let old: Vec<usize> = {
                    let under_way = shared.under_way.lock();
                    let old = under_way.iter().filter(|entry| entry.2.elapsed() > UNWAITED_MAX);
                    old.map(|entry| entry.0).collect()
                };
                old.into_iter().for_each(|index| shared.complete(index));
            }
        });
        device._alive = Some(alive);
        device
    }

    /// A stamp between what happened before and what happens after.
    pub fn stamp(&self) -> u64 {
        self.shared.tick()
    }

    /// The contents as reads see them.
    pub fn image(&self) -> Image {
        self.shared.image.read().clone()
    }

    /// Ends the recording; `base` is what the device held when it began.
    pub fn take_log(&self, base: Image) -> Log {
        let entries = self.shared.state.lock().entries.take().unwrap_or_default();
        Log { base, entries, end: self.shared.tick() }
    }

    fn apply(&self, request: &Request) {
        let mut image = self.shared.image.write();
        match request {
            Request::Write { offset, bufs, .. } => {
                let mut at = *offset;
                for buf in bufs {
                    image.write(at, buf);
                    at += buf.len() as u64;
                }
            }
            Request::Discard { offset, len } | Request::WriteZeroes { offset, len } => {
                image.zero(*offset, *len);
            }
            Request::Flush { .. } => {}
        }
    }

    fn submit_one(&self, request: Request) -> Ticket {
        let (op, offset, len) = request.extent();
        if offset.checked_add(len).is_none_or(|end| end > self.size_bytes) {
            return Ticket::ready(Err(IoError::new(IoErrorKind::OutOfRange, op, offset, len)));
        }
        let mut state = self.shared.state.lock();
        let epoch = state.epoch;
        let Some(entries) = state.entries.as_mut() else {
            drop(state);
            self.apply(&request);
            return Ticket::ready(Ok(()));
        };
        // Under the lock of the log, so that the log's order is the order of effects.
        self.apply(&request);
        let (effect, order, fua) = match request {
            Request::Write { offset, bufs, order, fua, .. } => {
                (Effect::Write { offset, bufs }, order, fua)
            }
            Request::Flush { .. } => (Effect::Flush, Order::Orderless, false),
            Request::Discard { offset, len } => {
                let effect = Effect::Zero { offset, len, discard: true };
                (effect, Order::Orderless, false)
            }
            Request::WriteZeroes { offset, len } => {
                let effect = Effect::Zero { offset, len, discard: false };
                (effect, Order::Orderless, false)
            }
        };
        let index = entries.len();
        let epoch = (order != Order::Orderless).then_some(epoch);
        let submitted_at = self.shared.tick();
        entries.push(Entry { effect, epoch, fua, submitted_at, completed_at: u64::MAX });
        if order == Order::Barrier {
            state.epoch += 1;
        }
        let (ticket, completer) = Ticket::pending(None);
        completer
            .set_driver(Arc::new(CompleteOnWait { shared: Arc::downgrade(&self.shared), index }));
        self.shared.under_way.lock().push((index, completer, std::time::Instant::now()));
        ticket
    }
}

impl Device for RecordingDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn object_bytes(&self) -> Option<u64> {
        (self.kind == DeviceKind::Objects).then_some(OBJECT_BYTES)
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        batch.into_iter().map(|request| self.submit_one(request)).collect()
    }

    fn submit_read(&self, offset: u64, mut bufs: Vec<AlignedBuf>, _: Class) -> ReadTicket {
        let len: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        if offset.checked_add(len).is_none_or(|end| end > self.size_bytes) {
            let error = IoError::new(IoErrorKind::OutOfRange, IoOp::Read, offset, len);
            return ReadTicket::ready(Err(error));
        }
        let image = self.shared.image.read();
        let mut at = offset;
        for buf in &mut bufs {
            image.read(at, buf);
            at += buf.len() as u64;
        }
        ReadTicket::ready(Ok(bufs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fjord_block::DeviceExt;

    #[test]
    fn a_write_is_done_when_waited_for() {
        let image = Image::new(1 << 20);
        let device = RecordingDevice::recording(image.clone(), DeviceKind::Volatile);
        let early = device.submit_one(Request::write(0, vec![Buf::from_slice(&[1; 512])]));
        let late = device.submit_one(Request::write(512, vec![Buf::from_slice(&[2; 512])]));
        early.wait().unwrap();
        device.flush().unwrap();
        late.wait().unwrap();
        let log = device.take_log(image);
        let [a, b, flush] = &log.entries[..] else { panic!("{log:?}") };
        assert!(a.completed_at < flush.submitted_at);
        assert!(b.completed_at > flush.submitted_at);
        assert!(flush.submitted_at < flush.completed_at);
    }

    #[test]
    fn barriers_end_epochs() {
        let image = Image::new(1 << 20);
        let device = RecordingDevice::recording(image.clone(), DeviceKind::Barrier);
        for order in [Order::Ordered, Order::Orderless, Order::Barrier, Order::Ordered] {
            let bufs = vec![Buf::from_slice(&[1; 512])];
            let request = Request::Write { offset: 0, bufs, order, fua: false, class: Class::Sync };
            DeviceExt::submit_one(&device, request).wait().unwrap();
        }
        let epochs: Vec<_> = device.take_log(image).entries.iter().map(|e| e.epoch).collect();
        assert_eq!(epochs, [Some(0), None, Some(0), Some(1)]);
    }
}
