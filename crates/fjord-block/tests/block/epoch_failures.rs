//! What a failed request stops, and what it leaves alone: each place of the failure, on each kind of
//! device, through the queue alone and over the modelled devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::epoch::{Command, DeviceTraits, EpochDevice, EpochQueue, Io, IoKind};
use fjord_block::epoch::{RequestId, Tuning};
use fjord_block::sim::{CutScope, Profile, SeededChooser, SimDevice};
use fjord_block::{
    Buf, Class, Device, DeviceExt, FaultDevice, IoError, IoErrorKind, IoOp, IoResult, Order,
    Request, Ticket,
};

use crate::backends;

const PAGE: u64 = 4096;
const NATIVE: DeviceTraits = DeviceTraits {
    volatile_cache: true,
    fua: true,
    native_barrier: true,
    queue_depth: 32,
    logical_block_size: 512,
};
const PLAIN: DeviceTraits = DeviceTraits { native_barrier: false, ..NATIVE };
const NO_CACHE: DeviceTraits = DeviceTraits { volatile_cache: false, ..PLAIN };
const DEVICES: [DeviceTraits; 6] = [
    NATIVE,
    DeviceTraits { fua: false, ..NATIVE },
    PLAIN,
    DeviceTraits { fua: false, ..PLAIN },
    NO_CACHE,
    DeviceTraits { queue_depth: 1, ..PLAIN },
];

fn queue(traits: DeviceTraits) -> EpochQueue {
    EpochQueue::new(traits, Tuning { merge_bytes_max: 0, ..Tuning::for_depth(traits.queue_depth) })
}

fn write(page: u64, order: Order) -> Io {
    Io::write(page * PAGE, PAGE, order, Class::Sync)
}

fn fua(page: u64, order: Order) -> Io {
    Io { kind: IoKind::Write { order, fua: true }, ..write(page, order) }
}

fn flush() -> Io {
    Io::flush(Class::Sync)
}

fn drain(queue: &mut EpochQueue) -> Vec<Command> {
    std::iter::from_fn(|| queue.next_dispatch(0)).collect()
}

fn done(queue: &mut EpochQueue) -> Vec<(RequestId, IoResult)> {
    std::iter::from_fn(|| queue.pop_done()).collect()
}

fn error_at(page: u64) -> IoError {
    IoError::os(libc::EIO, IoOp::Write, page * PAGE, PAGE)
}

/// The kind of error that names the failed write of `page`.
fn broken_at(page: u64) -> IoErrorKind {
    IoErrorKind::OrderBroken { errno: libc::EIO, op: IoOp::Write, offset: page * PAGE, len: PAGE }
}

fn kind(result: &IoResult) -> Option<IoErrorKind> {
    result.as_ref().err().map(|error| error.kind)
}

/// Three commits, each of two epochs with a flush behind them; the second and third epoch of two
/// writes. Every write has a page of its own, the number of its place.
fn commits() -> Vec<Io> {
    let orders = [
        Some(Order::Barrier),
        None,
        Some(Order::Ordered),
        Some(Order::Barrier),
        None,
        Some(Order::Ordered),
        Some(Order::Ordered),
        Some(Order::Barrier),
        Some(Order::Barrier),
        None,
    ];
    let io = |(page, order): (u64, Option<Order>)| order.map_or(flush(), |o| write(page, o));
    (0..).zip(orders).map(io).collect()
}

/// Lets the device complete everything, the first or the last in flight first; the write of
/// `failing_page` fails.
fn run_out(
    queue: &mut EpochQueue,
    failing_page: Option<u64>,
    last_first: bool,
) -> BTreeMap<RequestId, IoResult> {
    let (mut in_flight, mut results) = (Vec::new(), BTreeMap::new());
    loop {
        in_flight.extend(drain(queue));
        results.extend(done(queue));
        if in_flight.is_empty() {
            assert!(queue.is_idle(), "a request hangs");
            return results;
        }
        let command = in_flight.remove(if last_first { in_flight.len() - 1 } else { 0 });
        let fails = |page: &u64| command.kind.changes() && command.offset == page * PAGE;
        let failure = failing_page.filter(fails).map(error_at);
        queue.completed(command.id, failure.map_or(Ok(()), Err), 0);
    }
}

#[test]
fn a_failed_write_fails_what_comes_behind_and_nothing_before() {
    let commits = commits();
    for traits in DEVICES {
        for (failing, _) in commits.iter().enumerate().filter(|(_, io)| io.kind.changes()) {
            for last_first in [false, true] {
                let mut queue = queue(traits);
                let ids: Vec<_> = commits.iter().map(|io| queue.push(*io, 0)).collect();
                let results = run_out(&mut queue, Some(failing as u64), last_first);
                for (index, id) in ids.iter().enumerate() {
                    let (result, io) = (&results[id], &commits[index]);
                    let what = format!("{index} after {failing} on {traits:?}: {result:?}");
                    // The device may have reported a later write before the one that failed.
                    let came_first = last_first && io.kind.changes() && result.is_ok();
                    match index.cmp(&failing) {
                        std::cmp::Ordering::Less => assert_eq!(*result, Ok(()), "{what}"),
                        std::cmp::Ordering::Equal => {
                            assert_eq!(*result, Err(error_at(failing as u64)), "{what}");
                        }
                        std::cmp::Ordering::Greater => assert!(
                            came_first || kind(result) == Some(broken_at(failing as u64)),
                            "{what}"
                        ),
                    }
                }
            }
        }
    }
}

/// A write behind the failed one that the device already has fails too, unless its success was
/// reported before the failure.
#[test]
fn a_later_write_in_flight_does_not_succeed_after_the_failure() {
    let mut queue = queue(NATIVE);
    let ids = [1, 2, 3].map(|page| queue.push(write(page, Order::Barrier), 0));
    let commands = drain(&mut queue);
    assert_eq!(commands.len(), 3);
    queue.completed(commands[1].id, Ok(()), 0);
    assert_eq!(done(&mut queue), [(ids[1], Ok(()))]);
    queue.completed(commands[0].id, Err(error_at(1)), 0);
    assert_eq!(done(&mut queue), [(ids[0], Err(error_at(1)))]);
    queue.completed(commands[2].id, Ok(()), 0);
    let late = done(&mut queue);
    assert_eq!((late[0].0, kind(&late[0].1)), (ids[2], Some(broken_at(1))));
}

/// Whatever the order in which failures are reported, the first one submitted counts.
#[test]
fn an_earlier_failure_that_shows_later_stops_more() {
    let mut queue = queue(NATIVE);
    let mut push = |io| queue.push(io, 0);
    let [_, first_flush] = [write(0, Order::Barrier), flush()].map(&mut push);
    let [_, second_flush] = [write(1, Order::Barrier), flush()].map(&mut push);
    let [_, third_flush] = [write(2, Order::Barrier), flush()].map(&mut push);
    let commands = drain(&mut queue);
    queue.completed(commands[2].id, Err(error_at(2)), 0);
    let results: BTreeMap<_, _> = done(&mut queue).into_iter().collect();
    assert_eq!(kind(&results[&third_flush]), Some(broken_at(2)));
    assert!(!results.contains_key(&second_flush));
    queue.completed(commands[1].id, Err(error_at(1)), 0);
    let results: BTreeMap<_, _> = done(&mut queue).into_iter().collect();
    assert_eq!(kind(&results[&second_flush]), Some(broken_at(1)));
    let later = queue.push(flush(), 0);
    queue.completed(commands[0].id, Ok(()), 0);
    let results: BTreeMap<_, _> = run_out(&mut queue, None, false);
    assert_eq!(kind(&results[&later]), Some(broken_at(1)));
    assert_eq!(results[&first_flush], Ok(()));
}

/// An orderless write merged with an ordered one that fails does not move the failure forward.
#[test]
fn a_merged_command_fails_at_its_first_ordered_write() {
    let mut queue = EpochQueue::new(PLAIN, Tuning::for_depth(32));
    let free = queue.push(write(5, Order::Orderless), 0);
    let before = queue.push(flush(), 0);
    let failing = queue.push(write(4, Order::Barrier), 0);
    let behind = queue.push(flush(), 0);
    let results = run_out(&mut queue, Some(4), false);
    assert_eq!(queue.stats().merged_count, 1);
    assert_eq!([&results[&free], &results[&failing]], [&Err(error_at(4)); 2]);
    assert_eq!(results[&before], Ok(()));
    assert_eq!(kind(&results[&behind]), Some(broken_at(4)));
}

/// A failure that the owner reports lies behind all that it has submitted, in whatever epoch.
#[test]
fn a_failure_of_the_owner_fails_later_requests_only() {
    for traits in DEVICES {
        let mut queue = queue(traits);
        let ids: Vec<_> = commits().into_iter().map(|io| queue.push(io, 0)).collect();
        queue.fail(error_at(77));
        let later = [flush(), write(20, Order::Ordered)].map(|io| queue.push(io, 0));
        let completed = queue.push_flush_completed(Class::Sync, 0);
        let results = run_out(&mut queue, None, false);
        for id in ids.iter().chain([&completed]) {
            assert_eq!(results[id], Ok(()), "{traits:?}");
        }
        for id in later {
            assert_eq!(kind(&results[&id]), Some(broken_at(77)), "{traits:?}");
        }
    }
}

#[test]
fn orderless_fua_writes_go_on_after_a_failed_write() {
    for traits in DEVICES {
        let mut queue = queue(traits);
        queue.push(write(1, Order::Barrier), 0);
        let before = queue.push(fua(2, Order::Orderless), 0);
        let commands = drain(&mut queue);
        queue.completed(commands[0].id, Err(error_at(1)), 0);
        commands[1..].iter().for_each(|command| queue.completed(command.id, Ok(()), 0));
        let behind = queue.push(fua(3, Order::Orderless), 0);
        let ordered = queue.push(fua(4, Order::Ordered), 0);
        let results = run_out(&mut queue, None, false);
        assert_eq!([&results[&before], &results[&behind]], [&Ok(()); 2], "{traits:?}");
        assert_eq!(kind(&results[&ordered]), Some(broken_at(1)), "{traits:?}");
    }
}

/// It waits for no ordered write, and what completes after its submission is not its concern.
#[test]
fn a_flush_of_completed_writes_waits_for_none() {
    for traits in [NATIVE, PLAIN] {
        let mut queue = queue(traits);
        queue.push(write(1, Order::Orderless), 0);
        let first = drain(&mut queue);
        queue.completed(first[0].id, Ok(()), 0);
        done(&mut queue);
        let slow = queue.push(write(2, Order::Barrier), 0);
        let ordinary = queue.push(flush(), 0);
        let completed = queue.push_flush_completed(Class::Sync, 0);
        let commands = drain(&mut queue);
        assert_eq!(
            commands.iter().map(|command| command.kind).collect::<Vec<_>>(),
            [IoKind::Flush, IoKind::Write { order: Order::Barrier, fua: false },]
        );
        queue.completed(commands[0].id, Ok(()), 0);
        assert_eq!(done(&mut queue), [(completed, Ok(()))]);
        // Nothing has completed since: no command is needed.
        let again = queue.push_flush_completed(Class::Sync, 0);
        assert_eq!(done(&mut queue), [(again, Ok(()))]);
        assert_eq!(queue.stats().flush_count, 1);
        queue.completed(commands[1].id, Ok(()), 0);
        let results = run_out(&mut queue, None, false);
        assert_eq!([&results[&slow], &results[&ordinary]], [&Ok(()); 2]);
    }
    let mut queue = queue(NO_CACHE);
    queue.push(write(1, Order::Barrier), 0);
    let completed = queue.push_flush_completed(Class::Sync, 0);
    assert_eq!(done(&mut queue), [(completed, Ok(()))]);
}

#[test]
fn a_failed_flush_fails_flushes_of_completed_writes_too() {
    for kind_of_first in [IoKind::Flush, IoKind::FlushCompleted] {
        let mut queue = queue(PLAIN);
        let first = queue.push(Io { kind: kind_of_first, ..flush() }, 0);
        let other = queue.push_flush_completed(Class::Sync, 0);
        let command = drain(&mut queue).remove(0);
        queue.completed(command.id, Err(IoError::os(libc::EIO, IoOp::Flush, 0, 0)), 0);
        let later = queue.push_flush_completed(Class::Sync, 0);
        let results = run_out(&mut queue, None, false);
        let broken =
            IoErrorKind::OrderBroken { errno: libc::EIO, op: IoOp::Flush, offset: 0, len: 0 };
        for id in [first, other, later] {
            assert_eq!(kind(&results[&id]), Some(broken));
        }
    }
}

/// Native barriers; a volatile cache without barriers; no cache and no barriers.
fn profiles() -> [Profile; 3] {
    [
        Profile::UFS,
        Profile { barrier: None, ..Profile::PLAIN_SSD },
        Profile { barrier: None, ..Profile::SUPERCAP_SSD },
    ]
}

fn request(io: &Io, byte: u8) -> Request {
    match io.kind {
        IoKind::Write { order, fua } => Request::Write {
            offset: io.offset,
            bufs: vec![Buf::from_slice(&[byte; PAGE as usize])],
            order,
            fua,
            class: io.class,
        },
        _ => Request::flush(),
    }
}

/// The same over a modelled device. Whatever a power cut leaves afterwards has every write that
/// succeeded before a flush, of either kind, that succeeded.
#[test]
fn over_modelled_devices_nothing_before_a_failed_write_is_lost() {
    let commits = commits();
    for profile in profiles() {
        for failing in (0..commits.len()).filter(|index| commits[*index].kind.changes()) {
            let sim = Arc::new(SimDevice::new(&profile, 16 << 20));
            let fault = Arc::new(FaultDevice::new(sim.clone()));
            let at = failing as u64 * PAGE;
            fault.faults().fail_range(Some(IoOp::Write), at..at + PAGE, libc::EIO);
            let tuning = Tuning { merge_bytes_max: 0, ..Tuning::for_depth(profile.queue_depth) };
            let device = EpochDevice::with_tuning(fault.clone(), tuning);
            let tickets = device.submit(commits.iter().map(|io| request(io, 1)).collect());
            let results: Vec<_> = tickets.iter().map(Ticket::wait).collect();
            let what = format!("{failing} on {} {:?}: {results:?}", profile.name, profile.barrier);
            assert!(results[..failing].iter().all(Result::is_ok), "{what}");
            assert_eq!(results[failing], Err(error_at(failing as u64)), "{what}");
            let broken = |result: &IoResult| kind(result) == Some(broken_at(failing as u64));
            let behind = (failing + 1..commits.len()).filter(|i| !commits[*i].kind.changes());
            behind.for_each(|flush| assert!(broken(&results[flush]), "{what}"));
            check_pages(&sim, flushed(&commits, &results), &what);
            let free = device.submit_one(request(&write(50, Order::Orderless), 1)).wait();
            assert_eq!(free, Ok(()), "{what}");
            assert!(broken(&device.flush()), "{what}");
            assert_eq!(device.flush_completed().wait(), Ok(()), "{what}");
            let whole = (0..commits.len()).filter(|i| commits[*i].kind.changes());
            let whole = whole.filter(|i| results[*i].is_ok()).map(|i| i as u64);
            check_pages(&sim, whole.chain([50]).collect(), &what);
            // A flush that fails is told.
            fault.faults().fail_flush(libc::EIO);
            assert_eq!(device.submit_one(request(&write(51, Order::Orderless), 1)).wait(), Ok(()));
            let failed = device.flush_completed().wait();
            let sends_flushes = device.capabilities().volatile_cache;
            assert_eq!(failed.is_err(), sends_flushes, "{what}");
        }
    }
}

/// The pages before the last flush that succeeded.
fn flushed(commits: &[Io], results: &[IoResult]) -> Vec<u64> {
    let well = |index: &usize| commits[*index].kind == IoKind::Flush && results[*index].is_ok();
    let last = (0..commits.len()).rev().find(well).unwrap_or(0);
    (0..last).filter(|index| commits[*index].kind.changes()).map(|index| index as u64).collect()
}

/// Every image that a power cut now could leave has these pages.
fn check_pages(sim: &SimDevice, pages: Vec<u64>, what: &str) {
    let mut bytes = [0; PAGE as usize];
    for scope in [CutScope::Contract, CutScope::Timed] {
        let cut = sim.cut_state(scope);
        for seed in 0..8 {
            let image = cut.image(&mut SeededChooser::new(seed));
            for page in &pages {
                image.read_at(page * PAGE, &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| *byte == 1), "page {page} is lost: {what}");
            }
        }
    }
}

/// The check of the images sees what no flush has covered.
#[test]
fn the_check_of_the_images_notices_a_missing_flush() {
    let sim = SimDevice::new(&Profile { barrier: None, ..Profile::PLAIN_SSD }, 16 << 20);
    let pages = 0..64;
    let writes = pages.clone().map(|page| request(&write(page, Order::Orderless), 1));
    assert_eq!(Ticket::wait_all(&sim.submit(writes.collect())), Ok(()));
    let check = || check_pages(&sim, pages.collect(), "no flush");
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err());
}

/// On a backend it is an ordinary flush.
#[test]
fn every_backend_flushes_what_has_completed() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let fault = FaultDevice::new(backends::open_new(backend, dir.path(), 1 << 20));
        fault.start_recording();
        assert_eq!(fault.flush_completed().wait(), Ok(()), "{backend}");
        assert_eq!(fault.take_recording().len(), 1, "{backend}");
        let device = EpochDevice::new(Arc::new(fault));
        assert_eq!(Arc::new(device).flush_completed().wait(), Ok(()), "{backend}");
    }
}
