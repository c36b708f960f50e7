//! Deferred writes: held back until a thread waits for them.
//!
//! Owns the queue of such writes above any device. A write is submitted when its ticket is started
//! or waited for, merged with the adjacent deferred writes, or when the queue is too large. Until
//! then its content can be replaced. One that is started takes the next ones of its shard along, in one submission: whoever
//! starts one without waiting for it mostly starts these too, and the device may have to do something before each
//! submission.
//!
//! It is kept in shards by the writes' places, so that threads that write in different groups seldom meet.
//!
//! Invariants: writes in the queue do not overlap; a write that has been submitted is never
//! replaced; when [`Ticket::start`] returns, the write has been submitted, so that it precedes
//! later submissions; tickets of a dropped queue are abandoned.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::buf::Buf;
use crate::device::{Class, Device, Order, Request, bufs_len};
use crate::lock::{Mutex, Rank};
use crate::ticket::{Completer, Driver, Ticket, TicketCore};

/// Most bytes of a merged write.
const MERGED_BYTES_MAX: u64 = 1 << 20;

/// Bytes that a started write takes along.
const ALONG_BYTES: u64 = 1 << 20;

/// The queue; cheap to clone.
#[derive(Clone)]
pub struct DeferredWrites {
    shared: Arc<Shared>,
}

/// Number of shards.
const SHARDS: usize = 16;
/// Writes that begin in one such piece of the device are in one shard: those of a block group of 4 KiB blocks, which
/// are mostly started together.
const PIECE_BYTES: u64 = 128 << 20;

struct Shared {
    device: Arc<dyn Device>,
    /// By the piece of the device that a write begins in. Never held over a submission; never two at a time.
    shards: [Mutex<State>; SHARDS],
    /// In all shards.
    bytes: AtomicU64,
    /// Of the next write; within a shard they ascend.
    next_number: AtomicU64,
    /// Requests whose writes are complete.
    completed: Arc<AtomicU64>,
}

#[derive(Default)]
struct State {
    /// By byte offset.
    waiting: BTreeMap<u64, Waiting>,
    /// Offset and number of each, oldest first; includes writes that were started since.
    order: VecDeque<(u64, u64)>,
    bytes: u64,
}

struct Waiting {
    bufs: Vec<Buf>,
    len: u64,
    /// Distinguishes it from other writes at the same offset.
    number: u64,
    completer: Completer,
    starter: Arc<Starter>,
}

impl Waiting {
    fn is_for(&self, ticket: &Ticket) -> bool {
        self.completer.core().is_some_and(|core| ticket.is_of(core))
    }
}

/// Starts one write.
struct Starter {
    shared: Weak<Shared>,
    offset: u64,
    number: u64,
    /// The request that it was merged into.
    request: OnceLock<Ticket>,
}

impl DeferredWrites {
    /// A queue for writes to `device`.
    pub fn new(device: Arc<dyn Device>) -> DeferredWrites {
        let shard = |_| Mutex::new(Rank::DeferredWrites, State::default());
        DeferredWrites {
            shared: Arc::new(Shared {
                device,
                shards: std::array::from_fn(shard),
                bytes: AtomicU64::new(0),
                next_number: AtomicU64::new(0),
                completed: Arc::default(),
            }),
        }
    }

    /// Queues a write of `bufs` at byte `offset`. It must not overlap another one in the queue.
    pub fn add(&self, offset: u64, bufs: Vec<Buf>) -> Ticket {
        let (ticket, completer) = Ticket::pending(None);
        let len = bufs_len(&bufs);
        self.shared.with(offset, |state| {
            let number = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
            let shared = Arc::downgrade(&self.shared);
            let request = OnceLock::new();
            let starter = Arc::new(Starter { shared, offset, number, request });
            completer.set_driver(starter.clone());
            state.bytes += len;
            state.order.push_back((offset, number));
            state.waiting.insert(offset, Waiting { bufs, len, number, completer, starter });
        });
        ticket
    }

    /// Replaces the buffer at byte `offset` in a queued write. `false` if there is none with a
    /// buffer of this length there, or it cannot be found because the write began in another piece of the device.
    pub fn replace(&self, offset: u64, buf: Buf) -> bool {
        let mut state = self.shared.shard(offset).lock();
        let Some((&start, waiting)) = state.waiting.range_mut(..=offset).next_back() else {
            return false;
        };
        let mut at = start;
        for old in &mut waiting.bufs {
            if at == offset && old.len() == buf.len() {
                *old = buf;
                return true;
            }
            at += old.len() as u64;
        }
        false
    }

    /// Takes the write of `ticket` at byte `offset` out of the queue: it succeeds, and nothing is written. `false` if it
    /// has been submitted, or is about to be.
    pub fn cancel(&self, offset: u64, ticket: &Ticket) -> bool {
        let cancelled = self.shared.with(offset, |state| {
            let is_queued = state.waiting.get(&offset).is_some_and(|it| it.is_for(ticket));
            is_queued.then(|| state.take(offset)).flatten()
        });
        let Some(waiting) = cancelled else { return false };
        // Threads that found it gone wait for its request.
        let _ = waiting.starter.request.set(Ticket::ready(Ok(())));
        waiting.completer.complete(Ok(()));
        self.shared.completed.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// Bytes in the queue.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Incremented whenever writes of the queue complete: tickets need not be polled again before
    /// it changes.
    pub fn completed_count(&self) -> u64 {
        self.shared.completed.load(Ordering::Acquire)
    }

    /// Submits the oldest writes until at most `bytes` are left in the queue, each with those after it in its piece of
    /// the device.
    pub fn shrink_to(&self, bytes: u64) {
        loop {
            let Some(more) = self.bytes().checked_sub(bytes).filter(|more| *more > 0) else {
                return;
            };
            let Some((_, offset)) =
                self.shared.shards.iter().filter_map(|it| it.lock().oldest()).min()
            else {
                return;
            };
            let take = |state: &mut State| state.take_from(0, more.min(ALONG_BYTES));
            let groups = self.shared.with(offset, take);
            if groups.is_empty() {
                return;
            }
            self.shared.send(groups, Class::Background).iter().for_each(Ticket::start);
        }
    }
}

impl Shared {
    fn shard(&self, offset: u64) -> &Mutex<State> {
        &self.shards[(offset / PIECE_BYTES) as usize % SHARDS]
    }

    /// Changes the shard of this offset.
    fn with<R>(&self, offset: u64, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.shard(offset).lock();
        let before = state.bytes;
        let result = change(&mut state);
        // Wraps where bytes left.
        self.bytes.fetch_add(state.bytes.wrapping_sub(before), Ordering::Relaxed);
        result
    }

    /// Submits a write with its neighbours if it is still queued, and the next ones of about so many bytes. Its own
    /// ticket comes first.
    fn submit(&self, offset: u64, number: u64, class: Class, along_bytes: u64) -> Vec<Ticket> {
        let groups = self.with(offset, |state| {
            if state.waiting.get(&offset).is_none_or(|waiting| waiting.number != number) {
                return Vec::new();
            }
            let mut groups = vec![state.take_group(offset)];
            groups.append(&mut state.take_from(number, along_bytes));
            groups
        });
        if groups.is_empty() { Vec::new() } else { self.send(groups, class) }
    }

    /// Submits writes that were taken out of the queue, each group as one.
    fn send(&self, groups: Vec<(u64, Vec<Waiting>)>, class: Class) -> Vec<Ticket> {
        let mut requests = Vec::with_capacity(groups.len());
        let mut taken = Vec::with_capacity(groups.len());
        for (start, group) in groups {
            let mut bufs = Vec::new();
            let mut completers = Vec::with_capacity(group.len());
            let mut members = Vec::with_capacity(group.len());
            for waiting in group {
                bufs.extend(waiting.bufs);
                members.push((waiting.starter, waiting.completer.core().cloned()));
                completers.push(waiting.completer);
            }
            let order = Order::Ordered;
            requests.push(Request::Write { offset: start, bufs, order, fua: false, class });
            taken.push((members, completers));
        }
        let tickets = self.device.submit(requests);
        for (ticket, (members, completers)) in tickets.iter().zip(taken) {
            for (starter, core) in members {
                // Set once, by the thread that took the write out of the queue.
                let _ = starter.request.set(ticket.clone());
                // Threads that waited meanwhile can now drive the request.
                if let Some(core) = core {
                    core.nudge();
                }
            }
            let completed = self.completed.clone();
            ticket.watch(move |result| {
                for completer in completers {
                    completer.complete(result.clone());
                }
                completed.fetch_add(1, Ordering::AcqRel);
            });
        }
        tickets
    }
}

impl State {
    /// Number and offset of the write that has waited longest.
    fn oldest(&self) -> Option<(u64, u64)> {
        let mut all = self.order.iter().map(|&(offset, number)| (number, offset));
        all.find(|(number, offset)| self.waiting.get(offset).is_some_and(|it| it.number == *number))
    }

    /// Takes writes of about so many bytes that were queued from number `from` on, oldest first, each with its
    /// neighbours.
    fn take_from(&mut self, from: u64, bytes: u64) -> Vec<(u64, Vec<Waiting>)> {
        let until_bytes = self.bytes.saturating_sub(bytes);
        let first = self.order.partition_point(|(_, number)| *number < from);
        let mut wanted = Vec::new();
        let mut bytes_left = bytes;
        for &(offset, number) in self.order.range(first..) {
            if bytes_left == 0 {
                break;
            }
            if let Some(waiting) = self.waiting.get(&offset).filter(|it| it.number == number) {
                bytes_left = bytes_left.saturating_sub(waiting.len);
                wanted.push((offset, number));
            }
        }
        let mut groups = Vec::new();
        for (offset, number) in wanted {
            let is_queued = self.waiting.get(&offset).is_some_and(|it| it.number == number);
            // Neighbours may have made it enough.
            if is_queued && self.bytes > until_bytes {
                groups.push(self.take_group(offset));
            }
        }
        groups
    }

    /// Takes the write at `offset` out of the queue with the adjacent ones, up to the size of a
    /// request. Returns the offset of the first.
    fn take_group(&mut self, offset: u64) -> (u64, Vec<Waiting>) {
        let mut group = VecDeque::new();
        let (mut start, mut end) = (offset, offset);
        if let Some(first) = self.waiting.remove(&offset) {
            end += first.len;
            group.push_back(first);
        }
        while let Some((&before, waiting)) = self.waiting.range(..start).next_back()
            && before + waiting.len == start
            && end - before <= MERGED_BYTES_MAX
            && let Some(waiting) = self.waiting.remove(&before)
        {
            start = before;
            group.push_front(waiting);
        }
        while let Some(waiting) = self.waiting.get(&end)
            && end + waiting.len - start <= MERGED_BYTES_MAX
            && let Some(waiting) = self.waiting.remove(&end)
        {
            end += waiting.len;
            group.push_back(waiting);
        }
        self.took(end - start);
        (start, group.into())
    }

    /// Takes the write at `offset` alone.
    fn take(&mut self, offset: u64) -> Option<Waiting> {
        let waiting = self.waiting.remove(&offset)?;
        self.took(waiting.len);
        Some(waiting)
    }

    /// Writes of so many bytes left the queue.
    fn took(&mut self, bytes: u64) {
        self.bytes -= bytes;
        if self.order.len() > 2 * self.waiting.len() + 64 {
            let waiting = &self.waiting;
            self.order.retain(|(offset, number)| {
                waiting.get(offset).is_some_and(|waiting| waiting.number == *number)
            });
        }
    }
}

impl Driver for Starter {
    fn drive(&self, _: &Arc<TicketCore>) {
        let shared = self.shared.upgrade();
        let submitted = shared.map(|it| it.submit(self.offset, self.number, Class::Sync, 0));
        let submitted = submitted.unwrap_or_default();
        if let Some(ticket) = submitted.first().or_else(|| self.request.get()) {
            // This thread drives the device; the result reaches the waiters through `watch`.
            ticket.finish();
        }
    }

    fn start(&self, _: &Arc<TicketCore>) {
        let Some(shared) = self.shared.upgrade() else { return };
        let submitted = shared.submit(self.offset, self.number, Class::Async, ALONG_BYTES);
        if submitted.is_empty() {
            // Another thread took it out of the queue and may not have submitted it yet.
            self.request.wait().start();
        }
        submitted.iter().for_each(Ticket::start);
    }
}

impl fmt::Debug for DeferredWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let writes: usize = self.shared.shards.iter().map(|it| it.lock().waiting.len()).sum();
        write!(f, "DeferredWrites({writes} writes, {} bytes)", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::buf::AlignedBuf;
    use crate::device::{Capabilities, DeviceExt};
    use crate::mem::MemDevice;
    use crate::ticket::ReadTicket;

    const BLOCK: usize = 4096;

    fn rig() -> (Arc<MemDevice>, DeferredWrites) {
        let device = Arc::new(MemDevice::new(1 << 20));
        (device.clone(), DeferredWrites::new(device))
    }

    fn block(value: u8) -> Buf {
        Buf::from_slice(&[value; BLOCK])
    }

    fn values(device: &MemDevice, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count * BLOCK];
        device.read_exact_at(0, &mut bytes).unwrap();
        bytes.chunks(BLOCK).map(|block| block[7]).collect()
    }

    #[test]
    fn neighbours_go_together_when_one_is_waited_for() {
        let (device, queue) = rig();
        let at = |index: usize| (index * BLOCK) as u64;
        let first = queue.add(at(1), vec![block(1), block(2)]);
        let second = queue.add(at(3), vec![block(3)]);
        let apart = queue.add(at(5), vec![block(5)]);
        let before = queue.add(at(0), vec![block(9)]);
        assert_eq!(values(&device, 6), [0; 6]);
        assert!(queue.replace(at(2), block(7)));
        assert!(!queue.replace(at(4), block(7)));
        second.wait().unwrap();
        assert!(first.is_done() && before.is_done() && !apart.is_done());
        assert_eq!(values(&device, 6), [9, 1, 7, 3, 0, 0]);
        assert!(!queue.replace(at(2), block(8)), "it has been written");
        assert_eq!(queue.bytes(), BLOCK as u64);
        apart.start();
        apart.wait().unwrap();
        assert_eq!(values(&device, 6)[5], 5);
    }

    /// A device on whose way somebody is held up.
    #[derive(Debug)]
    struct Narrow {
        memory: MemDevice,
        entered: Mutex<Sender<()>>,
        go: Mutex<Receiver<()>>,
    }

    impl Device for Narrow {
        fn capabilities(&self) -> &Capabilities {
            self.memory.capabilities()
        }

        fn size_bytes(&self) -> u64 {
            self.memory.size_bytes()
        }

        fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
            self.entered.lock().unwrap().send(()).unwrap();
            self.go.lock().unwrap().recv().unwrap();
            self.memory.submit(batch)
        }

        fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
            self.memory.submit_read(offset, bufs, class)
        }
    }

    /// What comes after a start counts on it, also when another thread submits the write.
    #[test]
    fn a_started_write_has_been_submitted() {
        let (entered, has_entered) = channel();
        let (go, may_go) = channel();
        let memory = MemDevice::new(1 << 20);
        let device = Narrow { memory, entered: Mutex::new(entered), go: Mutex::new(may_go) };
        let queue = DeferredWrites::new(Arc::new(device));
        let tickets = [queue.add(0, vec![block(1)]), queue.add(BLOCK as u64, vec![block(2)])];
        let (back, is_back) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| tickets[0].start());
            has_entered.recv().unwrap();
            // Its neighbour is on the way too.
            scope.spawn(|| {
                tickets[1].start();
                back.send(()).unwrap();
            });
            // One that comes back without having waited, but later than this, goes unnoticed.
            let early = is_back.recv_timeout(Duration::from_millis(100));
            go.send(()).unwrap();
            assert!(early.is_err(), "it came back before the write was submitted");
            is_back.recv().unwrap();
        });
        Ticket::wait_all(&tickets).unwrap();
    }

    #[test]
    fn a_started_write_takes_the_next_ones_along() {
        let device = Arc::new(MemDevice::new(16 << 20));
        let queue = DeferredWrites::new(device.clone());
        let count = ALONG_BYTES as usize / BLOCK + 10;
        // None has a neighbour.
        let add = |index: usize| queue.add((2 * index * BLOCK) as u64, vec![block(7)]);
        let tickets: Vec<Ticket> = (0..count).map(add).collect();
        tickets[3].start();
        tickets[3].wait().unwrap();
        let waiting: Vec<usize> = (0..count).filter(|&index| !tickets[index].is_done()).collect();
        let rest = 4 + ALONG_BYTES as usize / BLOCK;
        assert_eq!(waiting, [0, 1, 2].into_iter().chain(rest..count).collect::<Vec<_>>());
        tickets[0].wait().unwrap();
        assert!(!tickets[1].is_done(), "one that is waited for goes alone");
    }

    #[test]
    fn a_cancelled_write_never_happens() {
        let (device, queue) = rig();
        let [first, second] =
            [0, 1].map(|index| queue.add((index * BLOCK) as u64, vec![block(index as u8 + 1)]));
        assert!(!queue.cancel(BLOCK as u64, &first), "another one is there");
        assert!(queue.cancel(0, &first) && !queue.cancel(0, &first));
        assert_eq!((first.result(), queue.bytes()), (Some(Ok(())), BLOCK as u64));
        first.start();
        second.wait().unwrap();
        assert!(!queue.cancel(BLOCK as u64, &second), "it has been written");
        assert_eq!(values(&device, 2), [0, 2]);
        let again = queue.add(0, vec![block(3)]);
        assert!(!queue.cancel(0, &first), "one of before");
        again.wait().unwrap();
        assert_eq!(values(&device, 1), [3]);
    }

    #[test]
    fn the_oldest_make_room() {
        let (device, queue) = rig();
        let tickets: Vec<_> = (0..20u8)
            .map(|index| queue.add(u64::from(index) * 2 * BLOCK as u64, vec![block(index + 1)]))
            .collect();
        queue.shrink_to(5 * BLOCK as u64);
        assert_eq!(queue.bytes(), 5 * BLOCK as u64);
        assert!(tickets[..15].iter().all(Ticket::is_done));
        assert!(!tickets[15].is_done());
        Ticket::wait_all(&tickets).unwrap();
        assert_eq!(values(&device, 40)[38], 20);
    }

    #[test]
    fn a_failure_reaches_every_ticket() {
        let (device, queue) = rig();
        device.faults().fail_nth(None, 0, libc::EIO);
        let tickets = [queue.add(0, vec![block(1)]), queue.add(BLOCK as u64, vec![block(2)])];
        assert!(tickets[0].wait().is_err() && tickets[1].wait().is_err());
    }

    #[test]
    fn tickets_of_a_queue_that_is_gone_are_abandoned() {
        let (device, queue) = rig();
        let ticket = queue.add(0, vec![block(1)]);
        drop(queue);
        assert!(ticket.wait().is_err());
        assert_eq!(values(&device, 1), [0]);
    }
}
