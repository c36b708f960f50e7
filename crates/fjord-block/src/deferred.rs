//! Deferred writes: held back until a thread waits for them.
//!
//! Owns the queue of such writes above any device. A write is submitted when its ticket is started
//! or waited for, merged with the adjacent deferred writes, or when the queue is too large. Until
//! then its content can be replaced.
//!
//! Invariants: writes in the queue do not overlap; a write that has been submitted is never
//! replaced; when [`Ticket::start`] returns, the write has been submitted, so that it precedes
//! later submissions; tickets of a dropped queue are abandoned.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::buf::Buf;
use crate::device::{Class, Device, DeviceExt, Order, Request, bufs_len};
use crate::lock::{Mutex, Rank};
use crate::ticket::{Completer, Driver, Ticket, TicketCore};

/// Most bytes of a merged write.
const MERGED_BYTES_MAX: u64 = 1 << 20;

/// The queue; cheap to clone.
#[derive(Clone)]
pub struct DeferredWrites {
    shared: Arc<Shared>,
}

struct Shared {
    device: Arc<dyn Device>,
    /// Never held over a submission.
    state: Mutex<State>,
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
    next_number: u64,
}

struct Waiting {
    bufs: Vec<Buf>,
    len: u64,
    /// Distinguishes it from other writes at the same offset.
    number: u64,
    completer: Completer,
    /// The request that it was merged into.
    request: Arc<OnceLock<Ticket>>,
}

/// Starts one write.
struct Starter {
    shared: Weak<Shared>,
    offset: u64,
    number: u64,
    request: Arc<OnceLock<Ticket>>,
}

impl DeferredWrites {
    /// A queue for writes to `device`.
    pub fn new(device: Arc<dyn Device>) -> DeferredWrites {
        let completed = Arc::default();
        DeferredWrites {
            shared: Arc::new(Shared {
                device,
                state: Mutex::new(Rank::DeferredWrites, State::default()),
                completed,
            }),
        }
    }

    /// Queues a write of `bufs` at byte `offset`. It must not overlap another one in the queue.
    pub fn add(&self, offset: u64, bufs: Vec<Buf>) -> Ticket {
        let (ticket, completer) = Ticket::pending(None);
        let len = bufs_len(&bufs);
        let mut state = self.shared.state.lock();
        let number = state.next_number;
        state.next_number += 1;
        let shared = Arc::downgrade(&self.shared);
        let request = Arc::new(OnceLock::new());
        let starter = Starter { shared, offset, number, request: request.clone() };
        completer.set_driver(Arc::new(starter));
        state.bytes += len;
        state.order.push_back((offset, number));
        state.waiting.insert(offset, Waiting { bufs, len, number, completer, request });
        ticket
    }

    /// Replaces the buffer at byte `offset` in a queued write. `false` if there is none with a
    /// buffer of this length there.
    pub fn replace(&self, offset: u64, buf: Buf) -> bool {
        let mut state = self.shared.state.lock();
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

    /// Bytes in the queue.
    pub fn bytes(&self) -> u64 {
        self.shared.state.lock().bytes
    }

    /// Incremented whenever writes of the queue complete: tickets need not be polled again before
    /// it changes.
    pub fn completed_count(&self) -> u64 {
        self.shared.completed.load(Ordering::Acquire)
    }

    /// Submits the oldest writes until at most `bytes` are left in the queue.
    pub fn shrink_to(&self, bytes: u64) {
        loop {
            let oldest = {
                let mut state = self.shared.state.lock();
                if state.bytes <= bytes {
                    return;
                }
                state.order.pop_front()
            };
            let Some((offset, number)) = oldest else { return };
            if let Some(ticket) = self.shared.submit(offset, number, Class::Background) {
                ticket.start();
            }
        }
    }
}

impl Shared {
    /// Submits a write with its neighbours if it is still queued.
    fn submit(&self, offset: u64, number: u64, class: Class) -> Option<Ticket> {
        let (start, group) = {
            let mut state = self.state.lock();
            state.waiting.get(&offset).filter(|waiting| waiting.number == number)?;
            state.take_group(offset)
        };
        let mut bufs = Vec::new();
        let mut completers = Vec::with_capacity(group.len());
        let mut members = Vec::with_capacity(group.len());
        for waiting in group {
            bufs.extend(waiting.bufs);
            members.push((waiting.request, waiting.completer.core().cloned()));
            completers.push(waiting.completer);
        }
        let order = Order::Ordered;
        let request = Request::Write { offset: start, bufs, order, fua: false, class };
        let ticket = self.device.submit_one(request);
        for (request, core) in members {
            // Set once, by the thread that took the write out of the queue.
            let _ = request.set(ticket.clone());
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
        Some(ticket)
    }
}

impl State {
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
        self.bytes -= end - start;
        if self.order.len() > 2 * self.waiting.len() + 64 {
            let waiting = &self.waiting;
            self.order.retain(|(offset, number)| {
                waiting.get(offset).is_some_and(|waiting| waiting.number == *number)
            });
        }
        (start, group.into())
    }
}

impl Starter {
    fn submit(&self, class: Class) -> Option<Ticket> {
        self.shared.upgrade()?.submit(self.offset, self.number, class)
    }
}

impl Driver for Starter {
    fn drive(&self, _: &Arc<TicketCore>) {
        let submitted = self.submit(Class::Sync);
        if let Some(ticket) = submitted.as_ref().or_else(|| self.request.get()) {
            // This thread drives the device; the result reaches the waiters through `watch`.
            ticket.finish();
        }
    }

    fn start(&self, _: &Arc<TicketCore>) {
        let Some(shared) = self.shared.upgrade() else { return };
        match shared.submit(self.offset, self.number, Class::Async) {
            Some(ticket) => ticket.start(),
            // Another thread took it out of the queue and may not have submitted it yet.
            None => self.request.wait().start(),
        }
    }
}

impl fmt::Debug for DeferredWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        write!(f, "DeferredWrites({} writes, {} bytes)", state.waiting.len(), state.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::buf::AlignedBuf;
    use crate::device::Capabilities;
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
