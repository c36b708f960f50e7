//! The scheduler as a device, with real threads: contents, order, flush promises, errors and
//! wake-ups over memory, over files, and over a device that reorders, delays and fails.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering as Atomic};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use fjord_block::epoch::{EpochDevice, Tuning};
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Completer, Device, DeviceExt, FaultDevice, IoError,
    IoErrorKind, IoOp, IoResult, MemDevice, Order, ReadTicket, Record, Request, Ticket,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::backends;

const PAGE: u64 = 4096;

fn page(byte: u8) -> Vec<Buf> {
    vec![Buf::from_slice(&[byte; PAGE as usize])]
}

fn write(number: u64, byte: u8, order: Order, class: Class) -> Request {
    Request::Write { offset: number * PAGE, bufs: page(byte), order, fua: false, class }
}

/// A seed of the clock unless FJORD_SEED gives one; printed, to rerun.
fn seed() -> u64 {
    let fresh = || {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        since.as_nanos() as u64
    };
    let seed = std::env::var("FJORD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(fresh);
    println!("FJORD_SEED={seed}");
    seed
}

/// A device that keeps requests until it is told to let one go, in an order of its own.
#[derive(Debug)]
struct Slow {
    inner: MemDevice,
    capabilities: Capabilities,
    state: Mutex<SlowState>,
    wake: Condvar,
}

#[derive(Default)]
struct SlowState {
    queue: Vec<(Request, Completer)>,
    /// As submitted.
    submitted: Vec<Request>,
    closed: bool,
}

impl std::fmt::Debug for SlowState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} queued", self.queue.len())
    }
}

impl Slow {
    fn new(queue_depth: u32, native_barrier: bool) -> Arc<Slow> {
        let inner = MemDevice::new(1 << 20);
        let capabilities = Capabilities {
            volatile_cache: true,
            fua: false,
            native_barrier,
            queue_depth,
            ..inner.capabilities().clone()
        };
        let (state, wake) = Default::default();
        Arc::new(Slow { inner, capabilities, state, wake })
    }

    /// Runs the request at `index` of those queued; false when there are fewer.
    fn step(&self, index: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        if index >= state.queue.len() {
            return false;
        }
        let (request, completer) = state.queue.remove(index);
        drop(state);
        completer.complete(self.inner.submit_one(request).wait());
        true
    }

    /// Lets requests go at random until closed.
    fn run(&self, seed: u64) {
        let mut rng = StdRng::seed_from_u64(seed);
        loop {
            let mut state = self.state.lock().unwrap();
            while state.queue.is_empty() && !state.closed {
                state = self.wake.wait(state).unwrap();
            }
            let Some(last) = state.queue.len().checked_sub(1) else { return };
            drop(state);
            self.step(rng.random_range(0..=last));
        }
    }

    fn close(&self) {
        self.state.lock().unwrap().closed = true;
        self.wake.notify_all();
    }

    /// Page and order of the writes that came so far, and flushes.
    fn seen(&self) -> Vec<String> {
        let show = |request: &Request| match request {
            Request::Write { offset, order, .. } => format!("{}{order:?}", offset / PAGE),
            Request::Flush { .. } => "flush".to_string(),
            other => format!("{other:?}"),
        };
        self.state.lock().unwrap().submitted.iter().map(show).collect()
    }
}

impl Device for Slow {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }
    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let mut state = self.state.lock().unwrap();
        let submit = |request: Request| {
            let (ticket, completer) = Ticket::pending(None);
            state.submitted.push(request.clone());
            state.queue.push((request, completer));
            ticket
        };
        let tickets = batch.into_iter().map(submit).collect();
        self.wake.notify_all();
        tickets
    }
    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.inner.submit_read(offset, bufs, class)
    }
}

fn unmerged(inner: &Arc<Slow>) -> EpochDevice {
    let depth = inner.capabilities().queue_depth;
    EpochDevice::with_tuning(
        inner.clone(),
        Tuning { merge_bytes_max: 0, ..Tuning::for_depth(depth) },
    )
}

#[test]
fn a_commit_is_submitted_at_once_and_only_its_flush_waited_for() {
    let slow = Slow::new(8, false);
    let device = unmerged(&slow);
    let tickets = device.submit(vec![
        write(1, 1, Order::Ordered, Class::Sync),
        write(2, 2, Order::Barrier, Class::Sync),
        write(3, 3, Order::Barrier, Class::Sync),
        Request::flush(),
    ]);
    assert_eq!(slow.seen(), ["1Ordered", "2Barrier"]);
    assert!(slow.step(1) && slow.step(0));
    assert_eq!(slow.seen()[2..], ["flush"], "the earlier epoch becomes durable first");
    assert!(slow.step(0));
    assert_eq!(slow.seen()[3..], ["3Barrier"]);
    assert!(slow.step(0));
    assert_eq!(slow.seen()[4..], ["flush"]);
    assert!(!tickets[3].is_done());
    assert!(slow.step(0));
    assert_eq!(tickets[3].wait(), Ok(()));
    assert!(tickets.iter().all(Ticket::is_done));
}

#[test]
fn a_native_barrier_needs_no_waiting() {
    let slow = Slow::new(8, true);
    let device = unmerged(&slow);
    device.submit(vec![
        write(2, 1, Order::Ordered, Class::Sync),
        write(1, 2, Order::Barrier, Class::Sync),
        write(9, 9, Order::Orderless, Class::Sync),
        write(3, 3, Order::Barrier, Class::Sync),
    ]);
    // The barrier went to the last of its epoch that left; the orderless write is free.
    let seen = slow.seen();
    let ordered: Vec<_> = seen.iter().filter(|one| *one != "9Orderless").collect();
    assert_eq!(ordered, ["1Ordered", "2Barrier", "3Barrier"]);
    assert_eq!(seen.len(), 4);
    assert_eq!(device.epoch_stats().reassigned_count, 1);
    assert!(device.capabilities().native_barrier);
}

#[test]
fn background_writes_leave_room_and_promotion_overtakes() {
    let slow = Slow::new(4, false);
    let device = unmerged(&slow);
    let background = |number| write(number, 1, Order::Orderless, Class::Background);
    let tickets = device.submit((10..20).map(background).collect());
    assert_eq!(slow.seen().len(), 1, "a quarter of the queue");
    let sync = device.submit_one(write(1, 2, Order::Orderless, Class::Sync));
    assert_eq!(slow.seen().len(), 2, "a write of class Sync leaves at once");
    tickets[9].promote();
    assert_eq!(slow.seen()[2..], ["19Orderless"]);
    while slow.step(0) {}
    assert!(sync.is_done() && tickets.iter().all(Ticket::is_done));
    assert_eq!(device.epoch_stats().promoted_count, 1);
}

#[test]
fn flushes_are_combined() {
    let slow = Slow::new(8, false);
    let device = unmerged(&slow);
    let first = device.submit_one(Request::flush());
    let more = device.submit((0..5).map(|_| Request::flush()).collect());
    assert!(slow.step(0));
    assert!(first.is_done());
    while slow.step(0) {}
    assert_eq!(Ticket::wait_all(&more), Ok(()));
    assert!(slow.seen().len() <= 2, "{:?}", slow.seen());
}

#[test]
fn neighbours_leave_together_and_large_background_writes_in_pieces() {
    let slow = Slow::new(1, false);
    let device = EpochDevice::new(slow.clone());
    let blocker = device.submit_one(write(100, 9, Order::Orderless, Class::Sync));
    let tickets =
        device.submit((1..5).map(|n| write(n, n as u8, Order::Ordered, Class::Sync)).collect());
    assert!(slow.step(0) && blocker.is_done());
    assert_eq!(slow.seen()[1..], ["1Ordered"]);
    assert!(slow.step(0));
    assert_eq!(Ticket::wait_all(&tickets), Ok(()));
    assert_eq!(device.epoch_stats().merged_count, 3);
    let data: Vec<u8> = (0..65 * PAGE).map(|at| (at / 100) as u8).collect();
    // Buffers whose borders are none of the pieces'.
    let bufs = data.chunks(12345).map(Buf::from_slice).collect();
    let large = device.submit_one(Request::Write {
        offset: 10 * PAGE,
        bufs,
        order: Order::Orderless,
        fua: false,
        class: Class::Background,
    });
    while slow.step(0) {}
    assert_eq!(large.wait(), Ok(()));
    assert!(device.epoch_stats().split_count > 1);
    let mut read = vec![0; data.len()];
    device.read_exact_at(10 * PAGE, &mut read).unwrap();
    assert!(read == data);
    device.read_exact_at(PAGE, &mut read[..4 * PAGE as usize]).unwrap();
    assert!((0..4).all(|n| read[n * PAGE as usize] == n as u8 + 1));
}

/// Over a device that is done at once, each completion lets the next request go: on the same stack,
/// but not one inside of the other.
#[test]
fn a_long_chain_needs_little_stack() {
    let chain = || {
        let device = Arc::new(EpochDevice::new(Arc::new(MemDevice::new(1 << 20))));
        // Each waits for the one before, being the next epoch.
        let one = |n: u64| write(n % 250, n as u8, Order::Barrier, Class::Sync);
        let tickets = device.submit((0..2000).map(one).collect());
        assert_eq!(Ticket::wait_all(&tickets), Ok(()));
        let (inside, slow) = (device.clone(), Slow::new(4, false));
        let outer = unmerged(&slow).submit_one(write(1, 1, Order::Barrier, Class::Sync));
        outer.watch(move |_| {
            let tickets = inside.submit((0..2000).map(one).collect());
            assert!(tickets.iter().all(Ticket::is_done), "a callback may submit");
        });
        assert!(slow.step(0));
        assert_eq!(outer.wait(), Ok(()));
        assert_eq!(device.epoch_stats().epoch_count, 4000);
    };
    let thread = thread::Builder::new().stack_size(256 << 10).spawn(chain).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_failed_ordered_write_ends_order_for_good_and_says_which_it_was() {
    let fault = Arc::new(FaultDevice::new(Slow::new(8, false).feed()));
    fault.faults().fail_range(Some(IoOp::Write), 2 * PAGE..3 * PAGE, libc::EIO);
    let device = EpochDevice::with_tuning(
        fault.clone(),
        Tuning { merge_bytes_max: 0, ..Tuning::for_depth(8) },
    );
    let tickets = device.submit(vec![
        write(1, 1, Order::Ordered, Class::Sync),
        write(2, 2, Order::Barrier, Class::Sync),
        write(3, 3, Order::Barrier, Class::Sync),
        write(4, 4, Order::Orderless, Class::Sync),
        Request::flush(),
    ]);
    let broken =
        IoErrorKind::OrderBroken { errno: libc::EIO, op: IoOp::Write, offset: 2 * PAGE, len: PAGE };
    assert_eq!(tickets[0].wait(), Ok(()));
    assert_eq!(tickets[1].wait(), Err(IoError::os(libc::EIO, IoOp::Write, 2 * PAGE, PAGE)));
    assert_eq!(tickets[2].wait().unwrap_err().kind, broken);
    assert_eq!(tickets[3].wait(), Ok(()), "orderless writes go on");
    assert_eq!(tickets[4].wait().unwrap_err().kind, broken);
    fault.faults().clear();
    assert_eq!(device.flush().unwrap_err().kind, broken, "never forgotten");
    assert_eq!(
        device.submit_one(write(5, 5, Order::Ordered, Class::Sync)).wait().unwrap_err().kind,
        broken
    );
    assert_eq!(device.submit_one(write(5, 5, Order::Orderless, Class::Sync)).wait(), Ok(()));
    assert_eq!(device.read_buf(3 * PAGE, 1).unwrap()[0], 0, "never tried");
}

#[test]
fn a_failure_that_nobody_saw_fails_later_flushes() {
    let mem = Arc::new(MemDevice::new(1 << 20));
    mem.faults().fail_nth(Some(IoOp::Write), 0, libc::ENOSPC);
    let device = EpochDevice::new(mem);
    drop(device.submit_one(write(1, 1, Order::Orderless, Class::Async)));
    let kind = device.flush().unwrap_err().kind;
    assert!(matches!(kind, IoErrorKind::OrderBroken { errno: libc::ENOSPC, .. }), "{kind:?}");
}

#[test]
fn bad_requests_are_refused_without_spoiling_neighbours() {
    let device = EpochDevice::new(Arc::new(MemDevice::new(8 * PAGE)));
    let tickets =
        device.submit((6..10).map(|n| write(n, 1, Order::Orderless, Class::Sync)).collect());
    let results: Vec<IoResult> = tickets.iter().map(Ticket::wait).collect();
    assert!(results[0].is_ok() && results[1].is_ok());
    assert_eq!(results[2].as_ref().unwrap_err().kind, IoErrorKind::OutOfRange);
    assert_eq!(results[3].as_ref().unwrap_err().kind, IoErrorKind::OutOfRange);
    let far = device.submit_one(write(u64::MAX / PAGE, 1, Order::Orderless, Class::Sync));
    assert_eq!(far.wait().unwrap_err().kind, IoErrorKind::OutOfRange);
    assert_eq!(device.flush(), Ok(()));
    assert!(device.submit_one(write(9, 1, Order::Ordered, Class::Sync)).wait().is_err());
    assert!(device.flush().is_err(), "an ordered write that failed is missing from the order");
}

impl Slow {
    /// Starts a thread that lets requests go.
    fn feed(self: Arc<Self>) -> Arc<Feeding> {
        let slow = self.clone();
        let thread = thread::spawn(move || slow.run(1));
        Arc::new(Feeding { slow: self, thread: Some(thread) })
    }
}

/// A slow device with its thread.
#[derive(Debug)]
struct Feeding {
    slow: Arc<Slow>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for Feeding {
    fn drop(&mut self) {
        self.slow.close();
        // The last reference may go inside of a completion, on the thread itself.
        match self.thread.take() {
            Some(thread) if thread.thread().id() != thread::current().id() => {
                thread.join().unwrap()
            }
            _ => {}
        }
    }
}

impl Device for Feeding {
    fn capabilities(&self) -> &Capabilities {
        self.slow.capabilities()
    }
    fn size_bytes(&self) -> u64 {
        self.slow.size_bytes()
    }
    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        self.slow.submit(batch)
    }
    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.slow.submit_read(offset, bufs, class)
    }
}

/// Threads submit at random to one device over one that reorders; the log of the inner device
/// must show: no ordered write enters it before all ordered writes of earlier epochs are in and
/// flushed. Each page is written once, so that a page tells which request it was. Submissions are
/// serialised by a lock, so that the epochs are known.
fn storm(seed: u64, queue_depth: u32, threads: u64) {
    let fault = Arc::new(FaultDevice::new(Slow::new(queue_depth, false).feed()));
    fault.start_recording();
    let device = Arc::new(EpochDevice::new(fault.clone()));
    let next_page = AtomicU64::new(0);
    // The epoch that the next ordered write joins; held over each submission.
    let epoch = Mutex::new(0u64);
    let epochs: Mutex<HashMap<u64, u64>> = Mutex::default();
    thread::scope(|scope| {
        for number in 0..threads {
            let (device, next_page, epoch, epochs) = (&device, &next_page, &epoch, &epochs);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(seed ^ (number << 32));
                let mut waiting = Vec::new();
                for _ in 0..40 {
                    let order =
                        [Order::Orderless, Order::Ordered, Order::Barrier][rng.random_range(0..3)];
                    let class =
                        [Class::Sync, Class::Async, Class::Background][rng.random_range(0..3)];
                    let mut now = epoch.lock().unwrap();
                    let number = next_page.fetch_add(1, Atomic::SeqCst) % 256;
                    if number < 250 && order != Order::Orderless {
                        epochs.lock().unwrap().insert(number, *now);
                    }
                    if number >= 250 {
                        break;
                    }
                    waiting.push(device.submit_one(write(number, number as u8, order, class)));
                    *now += u64::from(order == Order::Barrier);
                    drop(now);
                    match rng.random_range(0..6) {
                        0 => assert_eq!(device.flush(), Ok(())),
                        1 => waiting.drain(..).for_each(|ticket| assert_eq!(ticket.wait(), Ok(()))),
                        2 => waiting.iter().for_each(Ticket::promote),
                        3 => {
                            assert_eq!(device.read_buf(number * PAGE, 1).unwrap()[0], number as u8)
                        }
                        _ => {}
                    }
                }
                assert_eq!(Ticket::wait_all(&waiting), Ok(()));
            });
        }
    });
    assert_eq!(device.flush(), Ok(()));
    let stats = device.epoch_stats();
    assert_eq!((stats.queued_count, stats.in_flight_count), (0, 0));
    let order = check_order(&fault.take_recording(), &epochs.into_inner().unwrap());
    assert_eq!(order, Ok(()));
}

/// Every ordered write entered the device only after a flush that covers all of earlier epochs.
fn check_order(log: &[Record], epochs: &HashMap<u64, u64>) -> Result<(), String> {
    // Epoch, submitted, completed of each page of a write.
    let mut writes = Vec::new();
    let mut flushes = Vec::new();
    for record in log {
        let end = record.completed_at.expect("all is done");
        let (op, offset, len) = record.request.extent();
        match op {
            IoOp::Flush => flushes.push((record.submitted_at, end)),
            _ => writes.extend((offset / PAGE..(offset + len) / PAGE).filter_map(|page| {
                epochs.get(&page).map(|epoch| (*epoch, record.submitted_at, end))
            })),
        }
    }
    assert_eq!(writes.len(), epochs.len(), "each page is written once");
    writes.sort_unstable();
    for (index, (epoch, submitted, _)) in writes.iter().enumerate() {
        for (earlier, _, end) in writes[..index].iter().filter(|(earlier, ..)| earlier < epoch) {
            let covered = flushes.iter().any(|(begin, done)| begin > end && done < submitted);
            if !covered {
                return Err(format!("epoch {epoch} entered before epoch {earlier} was durable"));
            }
        }
    }
    Ok(())
}

/// The same check on a device without a scheduler.
#[test]
fn the_check_of_the_log_notices_missing_order() {
    let fault = FaultDevice::new(Slow::new(8, false).feed());
    fault.start_recording();
    let barriers = (0..20).map(|n| write(n, 1, Order::Barrier, Class::Sync));
    assert_eq!(Ticket::wait_all(&fault.submit(barriers.collect())), Ok(()));
    let epochs = (0..20).map(|n| (n, n)).collect();
    assert!(check_order(&fault.take_recording(), &epochs).is_err());
}

#[test]
fn threads_at_random_keep_order() {
    let seed = seed();
    for round in 0..30 {
        storm(seed.wrapping_add(round), [1, 2, 8, 32][round as usize % 4], 1 + round % 6);
    }
}

/// One request of each kind fails at a random place: every ticket completes, nothing ordered and
/// no flush succeeds once the failure was seen, and order holds among what was written.
#[test]
fn threads_at_random_survive_errors() {
    let seed = seed();
    for round in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(round));
        let fault = Arc::new(FaultDevice::new(Slow::new(8, false).feed()));
        let op = [IoOp::Write, IoOp::Flush][rng.random_range(0..2)];
        fault.faults().fail_nth(Some(op), rng.random_range(0..20), libc::EIO);
        let device = Arc::new(EpochDevice::new(fault.clone()));
        thread::scope(|scope| {
            for number in 0..4 {
                let device = &device;
                scope.spawn(move || {
                    let mut failed = false;
                    for step in 0..30 {
                        let at = number * 40 + step;
                        let mut tickets = device.submit(vec![
                            write(at, 1, Order::Ordered, Class::Sync),
                            write(at + 1, 1, Order::Barrier, Class::Async),
                            Request::flush(),
                        ]);
                        let flush = tickets.pop().unwrap().wait();
                        let writes = Ticket::wait_all(&tickets);
                        assert!(flush.is_err() || writes.is_ok(), "the flush covers the writes");
                        assert!(
                            !failed || (flush.is_err() && writes.is_err()),
                            "it came back to life"
                        );
                        failed |= flush.is_err();
                    }
                });
            }
        });
        assert_eq!(fault.faults().hit_count(), 1);
        assert!(device.flush().is_err());
    }
}

/// The same bytes from many threads on every backend: overlapping writes keep their order, and
/// reads see them.
#[test]
fn overlapping_writes_keep_their_order_on_every_backend() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = EpochDevice::new(backends::open_new(backend, dir.path(), 1 << 20));
        thread::scope(|scope| {
            for number in 0..4u64 {
                let device = &device;
                scope.spawn(move || {
                    for round in 0..50u8 {
                        let order = [Order::Orderless, Order::Barrier][usize::from(round % 2)];
                        let class = [Class::Sync, Class::Background][usize::from(round / 2 % 2)];
                        let at = number * 8;
                        let batch =
                            (0..4).map(|n| write(at + n % 2, round * 4 + n as u8, order, class));
                        let tickets = device.submit(batch.collect());
                        let read = device.read_buf(at * PAGE, 2 * PAGE as usize).unwrap();
                        assert_eq!((read[0], read[PAGE as usize]), (round * 4 + 2, round * 4 + 3));
                        match round % 3 {
                            0 => assert_eq!(Ticket::wait_all(&tickets), Ok(())),
                            1 => assert_eq!(device.flush(), Ok(())),
                            _ => {}
                        }
                    }
                });
            }
        });
        assert_eq!(device.flush(), Ok(()), "{backend}");
    }
}

/// Unaligned requests in one page are not run side by side.
#[test]
fn unaligned_neighbours_do_not_lose_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = EpochDevice::new(backends::open_new(backend, dir.path(), 1 << 20));
        let write = |n: u64| Request::write(n * 100, vec![Buf::from_slice(&[n as u8; 100])]);
        let tickets = device.submit((0..100).map(write).collect());
        assert_eq!(Ticket::wait_all(&tickets), Ok(()), "{backend}");
        let mut read = vec![0; 10_000];
        device.read_exact_at(0, &mut read).unwrap();
        assert!(read.iter().enumerate().all(|(at, byte)| *byte == (at / 100) as u8), "{backend}");
    }
}

/// Nobody waits, everything completes all the same, and the device may be dropped before.
#[test]
fn requests_complete_without_waiters() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = EpochDevice::new(backends::open_new(backend, dir.path(), 1 << 20));
        let (sender, receiver) = std::sync::mpsc::channel();
        let mut batch: Vec<_> = (0..20).map(|n| write(n, 1, Order::Barrier, Class::Sync)).collect();
        batch.push(Request::flush());
        for ticket in device.submit(batch) {
            let sender = sender.clone();
            ticket.watch(move |result| sender.send(result.clone()).unwrap());
        }
        drop(device);
        for _ in 0..21 {
            let result = receiver.recv_timeout(Duration::from_secs(60)).expect(backend);
            assert_eq!(result, Ok(()), "{backend}");
        }
    }
}
