//! Whom a waiting thread waits for: a request that is not ordered behind a flush does not wait for one.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering as Atomic};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fjord_block::epoch::{
    Command, DeviceTraits, EpochDevice, EpochQueue, Io, IoKind, RequestId, Tuning,
};
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Completer, Device, DeviceExt, Driver, IoResult,
    MemDevice, Order, ReadTicket, Request, Ticket, TicketCore,
};

const PAGE: u64 = 4096;
/// How long something that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a thread is given to do what it must not do. One that is slower does it unnoticed.
const A_WHILE: Duration = Duration::from_millis(100);

/// What threads have done with requests that do not end by themselves.
#[derive(Default)]
struct Seen {
    driven: AtomicBool,
    started: AtomicBool,
}

impl Seen {
    fn is_driven(&self) -> bool {
        self.driven.load(Atomic::SeqCst)
    }
}

impl Driver for Seen {
    fn drive(&self, _: &Arc<TicketCore>) {
        self.driven.store(true, Atomic::SeqCst);
    }

    fn start(&self, _: &Arc<TicketCore>) {
        self.started.store(true, Atomic::SeqCst);
    }
}

type Hook = Box<dyn FnOnce() + Send>;

/// A device whose flushes do not end, and whose writes end when the test says so.
struct Stalled {
    inner: MemDevice,
    capabilities: Capabilities,
    flushes: Arc<Seen>,
    writes: Arc<Seen>,
    /// What is in flight.
    pending: Mutex<Vec<(Request, Completer)>>,
    /// Called in the submission of the next write.
    in_submission: Mutex<Option<Hook>>,
}

impl Stalled {
    fn new(queue_depth: u32) -> Arc<Stalled> {
        let inner = MemDevice::new(1 << 20);
        let capabilities =
            Capabilities { volatile_cache: true, queue_depth, ..inner.capabilities().clone() };
        let (flushes, writes, pending, in_submission) = Default::default();
        Arc::new(Stalled { inner, capabilities, flushes, writes, pending, in_submission })
    }

    /// Ends the flushes in flight, or the writes.
    fn end(&self, flushes: bool) {
        let ends =
            |(request, _): &mut (Request, _)| matches!(request, Request::Flush { .. }) == flushes;
        let ended: Vec<_> = self.pending.lock().unwrap().extract_if(.., ends).collect();
        for (request, completer) in ended {
            completer.complete(self.inner.submit_one(request).wait());
        }
    }
}

impl fmt::Debug for Stalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stalled").finish_non_exhaustive()
    }
}

impl Device for Stalled {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let submit = |request: Request| {
            let (ticket, completer) = Ticket::pending(None);
            let is_flush = matches!(request, Request::Flush { .. });
            let seen = if is_flush { &self.flushes } else { &self.writes };
            completer.set_driver(seen.clone());
            self.pending.lock().unwrap().push((request, completer));
            let hook = self.in_submission.lock().unwrap().take_if(|_| !is_flush);
            hook.into_iter().for_each(|hook| hook());
            ticket
        };
        batch.into_iter().map(submit).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.inner.submit_read(offset, bufs, class)
    }
}

fn write(number: u64, order: Order) -> Request {
    let bufs = vec![Buf::from_slice(&[1; PAGE as usize])];
    Request::Write { offset: number * PAGE, bufs, order, fua: false, class: Class::Sync }
}

fn wait_until(what: &str, reached: &AtomicBool) {
    let began = Instant::now();
    while !reached.load(Atomic::SeqCst) {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A thread that submits a request and waits for it.
fn waits(run: impl FnOnce() -> IoResult + Send + 'static) -> Receiver<IoResult> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(run()));
    receiver
}

fn reads(device: &Arc<EpochDevice>) -> Receiver<IoResult> {
    let device = device.clone();
    waits(move || device.read_buf(9 * PAGE, PAGE as usize).map(drop))
}

/// A flush is stalled, and another thread dispatches when the request is submitted: that thread
/// sends it, and its waiter must hear of that.
fn beside_a_dispatching_thread(
    submit: impl Fn(&Arc<EpochDevice>) -> Receiver<IoResult> + Send + 'static,
) {
    let stalled = Stalled::new(8);
    let device = Arc::new(EpochDevice::new(stalled.clone()));
    let _flush = device.submit_one(Request::flush());
    let (sender, receiver) = mpsc::channel();
    let (beside, seen) = (device.clone(), stalled.flushes.clone());
    *stalled.in_submission.lock().unwrap() = Some(Box::new(move || {
        sender.send(submit(&beside)).unwrap();
        let began = Instant::now();
        while began.elapsed() < A_WHILE && !seen.is_driven() {
            thread::sleep(Duration::from_millis(1));
        }
    }));
    let _write = device.submit_one(write(1, Order::Orderless));
    let waiter = receiver.recv_timeout(PATIENCE).unwrap();
    // It may be a write, which the device has by now.
    stalled.end(false);
    assert_eq!(waiter.recv_timeout(PATIENCE), Ok(Ok(())), "it waits for an unrelated flush");
    assert!(!stalled.flushes.is_driven());
}

#[test]
fn a_read_beside_a_dispatching_thread_does_not_wait_for_a_flush() {
    beside_a_dispatching_thread(reads);
}

#[test]
fn a_write_beside_a_dispatching_thread_does_not_wait_for_a_flush() {
    for order in [Order::Orderless, Order::Ordered] {
        beside_a_dispatching_thread(move |device| {
            let device = device.clone();
            waits(move || device.submit_one(write(5, order)).wait())
        });
    }
}

/// The device's queue is full, and nobody waits for what occupies it. One of its places may be that of
/// a stalled flush.
#[test]
fn a_request_waits_for_any_place_in_the_queue() {
    for (queue_depth, is_flush) in [(2, false), (1, false), (1, true)] {
        let stalled = Stalled::new(queue_depth);
        let device = Arc::new(EpochDevice::new(stalled.clone()));
        let _flush = (queue_depth == 2).then(|| device.submit_one(Request::flush()));
        let written = device.submit_one(write(1, Order::Orderless));
        let waiter = match is_flush {
            false => reads(&device),
            true => waits({
                let device = device.clone();
                move || device.flush()
            }),
        };
        wait_until("a start of what is in the way", &stalled.writes.started);
        stalled.end(false);
        if is_flush {
            wait_until("a waiter that drives its flush", &stalled.flushes.driven);
            stalled.end(true);
        }
        assert_eq!(waiter.recv_timeout(PATIENCE), Ok(Ok(())), "depth {queue_depth}");
        assert_eq!(stalled.flushes.is_driven(), is_flush, "depth {queue_depth}");
        assert_eq!(written.wait(), Ok(()));
    }
}

/// A queue, and the flush of class `class` that it has sent.
fn queue_with_flush(native_barrier: bool, class: Class) -> (EpochQueue, RequestId, Command) {
    let traits = DeviceTraits {
        volatile_cache: true,
        fua: false,
        native_barrier,
        queue_depth: 8,
        logical_block_size: 512,
    };
    let mut queue = EpochQueue::new(traits, Tuning::for_depth(8));
    let flush = queue.push(Io::flush(class), 0);
    let command = queue.next_dispatch(0).unwrap();
    assert_eq!(command.kind, IoKind::Flush);
    (queue, flush, command)
}

fn ordered(number: u64, order: Order) -> Io {
    Io::write(number * PAGE, PAGE, order, Class::Sync)
}

#[test]
fn what_only_waits_to_be_dispatched_waits_for_no_command() {
    let (mut queue, flush, command) = queue_with_flush(false, Class::Sync);
    assert_eq!(queue.waits_for(flush), Some(command.id));
    let read = queue.push(Io::read(0, PAGE, Class::Sync), 0);
    let write = queue.push(ordered(1, Order::Barrier), 0);
    let behind = queue.push(ordered(2, Order::Ordered), 0);
    for request in [read, write, behind] {
        assert_eq!(queue.waits_for(request), None);
    }
    // A read of what is being written waits for the write, and a later epoch for the earlier one.
    let blocked = queue.push(Io::read(PAGE, PAGE, Class::Sync), 0);
    let mut sent = std::iter::from_fn(|| queue.next_dispatch(0)).collect::<Vec<_>>();
    let written = sent.extract_if(.., |sent| sent.kind != IoKind::Read).next().unwrap();
    for request in [blocked, behind] {
        assert_eq!(queue.waits_for(request), Some(written.id));
    }
    // The flush began before that write, and the next one begins when it has ended.
    queue.completed(written.id, Ok(()), 0);
    assert_eq!(queue.waits_for(behind), Some(command.id));
    queue.completed(command.id, Ok(()), 0);
    assert_eq!(queue.waits_for(behind), None);
    let next = std::iter::from_fn(|| queue.next_dispatch(0));
    let next = next.filter(|sent| sent.kind == IoKind::Flush).last().unwrap();
    assert_eq!(queue.waits_for(behind), Some(next.id));
}

#[test]
fn a_flush_for_a_waiter_does_not_wait_for_a_background_flush() {
    let (mut queue, _, background) = queue_with_flush(false, Class::Background);
    let written = queue.push(ordered(1, Order::Ordered), 0);
    let command = queue.next_dispatch(0).unwrap();
    assert_eq!(queue.waits_for(written), Some(command.id));
    queue.completed(command.id, Ok(()), 0);
    let flush = queue.push(Io::flush(Class::Sync), 0);
    assert_eq!(queue.waits_for(flush), None, "it is sent beside the other");
    let own = queue.next_dispatch(0).unwrap();
    assert_eq!(queue.waits_for(flush), Some(own.id));
    assert_ne!(own.id, background.id);
}

/// Epochs of a device that keeps order wait until the earlier ones are dispatched, not transferred.
#[test]
fn with_a_native_barrier_an_epoch_does_not_wait_for_transfers() {
    let (mut queue, ..) = queue_with_flush(true, Class::Sync);
    queue.push(ordered(1, Order::Barrier), 0);
    let first = queue.next_dispatch(0).unwrap();
    queue.push(ordered(2, Order::Barrier), 0);
    let last = queue.push(ordered(3, Order::Ordered), 0);
    assert_eq!(queue.waits_for(last), None);
    queue.completed(first.id, Ok(()), 0);
    assert_eq!(queue.waits_for(last), None);
}
