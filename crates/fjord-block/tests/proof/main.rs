//! Storage order, proven for small queues: every script of a few requests, on every kind of
//! device, through every schedule that the scheduler calls legal. See docs/ordering.md.

mod flood;
mod model;
mod search;
mod wrong;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fjord_block::epoch::{DeviceTraits, Io, IoKind, Paper, Rules, Tuning};
use fjord_block::{Class, Order};

use flood::Flood;
use search::{Case, search};

const PAGE: u64 = 4096;

const BASE: DeviceTraits = DeviceTraits {
    volatile_cache: true,
    fua: false,
    native_barrier: false,
    queue_depth: 64,
    logical_block_size: 512,
};

/// Every kind of device.
const DEVICES: [DeviceTraits; 6] = [
    BASE,
    DeviceTraits { fua: true, ..BASE },
    DeviceTraits { volatile_cache: false, ..BASE },
    DeviceTraits { native_barrier: true, ..BASE },
    DeviceTraits { native_barrier: true, fua: true, ..BASE },
    DeviceTraits { queue_depth: 1, ..BASE },
];

fn write(page: u64, order: Order) -> Io {
    Io::write(page * PAGE, PAGE, order, Class::Sync)
}

fn fua(page: u64, order: Order) -> Io {
    Io { kind: IoKind::Write { order, fua: true }, ..write(page, order) }
}

/// The kinds of writes on two neighbouring pages, and a flush.
fn basic() -> Vec<Io> {
    let orders = [Order::Orderless, Order::Ordered, Order::Barrier];
    let mut ios: Vec<_> = orders.iter().flat_map(|o| [write(0, *o), write(1, *o)]).collect();
    ios.push(Io::flush(Class::Sync));
    ios
}

/// What a failure stops and what it does not: both kinds of flush, FUA, writes of each order.
fn failing() -> Vec<Io> {
    let mut ios = vec![Io::flush(Class::Sync), Io::flush_completed(Class::Sync)];
    ios.extend([Order::Orderless, Order::Ordered, Order::Barrier].map(|order| write(0, order)));
    ios.extend([write(1, Order::Ordered), write(1, Order::Barrier)]);
    ios.extend([fua(1, Order::Orderless), fua(1, Order::Barrier)]);
    ios
}

/// Besides: reads, discards, FUA, a write over both pages, one that leaves in pieces.
fn rich() -> Vec<Io> {
    let mut ios = basic();
    ios.push(Io::flush_completed(Class::Sync));
    ios.push(Io::read(0, PAGE, Class::Sync));
    ios.push(Io { kind: IoKind::Discard, ..write(0, Order::Orderless) });
    ios.push(fua(0, Order::Orderless));
    ios.push(fua(0, Order::Ordered));
    ios.push(fua(1, Order::Barrier));
    ios.push(Io::write(0, 2 * PAGE, Order::Barrier, Class::Sync));
    ios.push(Io::write(2 * PAGE, 2 * PAGE, Order::Barrier, Class::Background));
    ios.push(Io::write(PAGE, 2 * PAGE, Order::Orderless, Class::Async));
    ios
}

/// Ordered writes with FUA and without, beside an orderless one that may have completed.
fn mixed() -> Vec<Io> {
    let mut ios = vec![write(0, Order::Orderless), Io::flush(Class::Sync)];
    for order in [Order::Ordered, Order::Barrier] {
        ios.extend([write(1, order), fua(1, order)]);
    }
    ios
}

/// All sequences of `len` of `ios`.
fn scripts(ios: &[Io], len: u32) -> Vec<Vec<Io>> {
    let count = ios.len().pow(len);
    let nth = |number: usize| {
        (0..len).map(|digit| ios[number / ios.len().pow(digit) % ios.len()]).collect()
    };
    (0..count).map(nth).collect()
}

/// All cases of some scripts.
fn cases<R: Rules>(scripts: &[Vec<Io>], failures: u32) -> Vec<Case<R>> {
    let mut cases = Vec::new();
    for script in scripts {
        for traits in DEVICES {
            for merge_bytes_max in [0, 1 << 20] {
                cases.push(Case {
                    rules: R::default(),
                    traits,
                    script: script.clone(),
                    merge_bytes_max,
                    failures,
                    demand_no_delay: false,
                });
            }
        }
    }
    cases
}

/// Searches all cases on all cores; gives the number of states, or the first violation.
fn search_all<R: Rules + Send + Sync>(cases: &[Case<R>]) -> Result<u64, (u64, String)> {
    on_all_cores(cases, |case| {
        let outcome = search(case);
        (outcome.state_count, outcome.violation)
    })
}

/// The same for any search that gives its states and what it found.
fn on_all_cores<C: Sync>(
    cases: &[C],
    search: impl Fn(&C) -> (u64, Option<String>) + Sync,
) -> Result<u64, (u64, String)> {
    let (next, state_count) = (AtomicUsize::new(0), AtomicU64::new(0));
    let violation = Mutex::new(None);
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (states, found) = search(case);
            state_count.fetch_add(states, Ordering::Relaxed);
            if let Some(found) = found {
                next.store(cases.len(), Ordering::Relaxed);
                violation.lock().expect("no search panics").get_or_insert(found);
            }
        }
    };
    std::thread::scope(|scope| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        (0..count).for_each(|_| drop(scope.spawn(work)));
    });
    let state_count = state_count.into_inner();
    match violation.into_inner().expect("no search panics") {
        Some(violation) => Err((state_count, violation)),
        None => Ok(state_count),
    }
}

fn prove(name: &str, scripts: &[Vec<Io>], failures: u32) {
    let cases = cases::<Paper>(scripts, failures);
    let started = std::time::Instant::now();
    match search_all(&cases) {
        Ok(states) => println!(
            "{name}: {} scripts, {} cases, {states} states, {:.1} s",
            scripts.len(),
            cases.len(),
            started.elapsed().as_secs_f64()
        ),
        Err((_, violation)) => panic!("{name}: {violation}"),
    }
}

/// Seconds with 3; `FJORD_PROOF_LEN=4` takes minutes.
fn script_len() -> u32 {
    let asked = std::env::var("FJORD_PROOF_LEN").ok();
    asked.map_or(3, |len| len.parse().expect("FJORD_PROOF_LEN is a number"))
}

#[test]
fn no_schedule_breaks_order() {
    for len in 1..=script_len() {
        prove(&format!("order, {len} requests"), &scripts(&basic(), len), 0);
        prove(&format!("with FUA, {len} requests"), &scripts(&mixed(), len), 0);
    }
    for len in 1..script_len() {
        prove(&format!("all kinds, {len} requests"), &scripts(&rich(), len), 0);
    }
}

#[test]
fn no_failure_is_passed_over() {
    for len in 1..script_len() {
        prove(&format!("all kinds, one failure, {len} requests"), &scripts(&rich(), len), 1);
    }
    // Each further request makes some sixty times as many states.
    let len_max = script_len().min(3);
    for len in 1..=len_max {
        prove(&format!("one failure, {len} requests"), &scripts(&failing(), len), 1);
    }
    for len in 1..len_max {
        prove(&format!("two failures, {len} requests"), &scripts(&failing(), len), 2);
    }
}

/// The first violation with these rules, in scripts of growing length.
fn caught<R: Rules + Send + Sync>(name: &str, failures: u32) {
    let mut total = 0;
    for len in 1..=3 {
        match search_all(&cases::<R>(&scripts(&rich(), len), failures)) {
            Ok(states) => total += states,
            Err((states, violation)) => {
                let first = violation.lines().next().unwrap_or_default();
                println!("{name}: caught after {} states: {first}", total + states);
                return;
            }
        }
    }
    panic!("{name}: not caught in {total} states");
}

#[test]
fn the_search_finds_wrong_rules() {
    caught::<wrong::BarrierStays>("barrier stays", 0);
    caught::<wrong::BarrierLost>("barrier lost", 0);
    caught::<wrong::NoFlushBetween>("no flush between", 0);
    caught::<wrong::NoTransferWait>("no transfer wait", 0);
    caught::<wrong::LeavesTooEarly>("leaves too early", 0);
    caught::<wrong::CompletedForgotten>("completed forgotten", 0);
    caught::<wrong::OverlapIgnored>("overlap ignored", 0);
    caught::<wrong::ReadsOvertake>("reads overtake", 0);
    caught::<wrong::FlushTooEarly>("flush too early", 0);
    caught::<wrong::FuaOvertakes>("FUA overtakes", 0);
    caught::<wrong::FuaDropped>("FUA dropped", 0);
    caught::<wrong::ErrorForgotten>("error forgotten", 1);
    caught::<wrong::FailsBackwards>("fails backwards", 1);
    caught::<wrong::WritesPassFailure>("writes pass a failure", 1);
    caught::<wrong::FlushesPassFailure>("flushes pass a failure", 1);
    caught::<wrong::CompletedFlushStopped>("flush of completed stopped", 1);
    caught::<wrong::FlushErrorForgotten>("flush error forgotten", 1);
}

/// An ordered write on the bytes of an orderless one does wait for it; the check must say so.
#[test]
fn the_search_notices_a_delay() {
    let script = vec![write(0, Order::Orderless), write(0, Order::Barrier)];
    let mut case = cases::<Paper>(&[script], 0).swap_remove(0);
    assert!(search(&case).violation.is_none());
    case.demand_no_delay = true;
    let violation = search(&case).violation.expect("the delay is noticed");
    assert!(violation.starts_with("request 1 waits for an orderless one"), "{violation}");
}

/// A device so slow that class Sync is overdue at once, on the real times.
const SLOW_TICK_NS: u64 = 250_000_000;
/// One that is some completions away from each age, on short times.
const FAST_TICK_NS: u64 = 1_000_000;
const FAST_DEADLINE_NS: [u64; 3] = [3_000_000, 4_000_000, 6_000_000];
const FAST_STARVATION_NS: [u64; 3] = [u64::MAX, 5_000_000, 8_000_000];

/// Ordered writes, barriers and flushes of each class, each script on pages of its own.
fn flooded_scripts(len: u32) -> Vec<Vec<Io>> {
    let classes = [Class::Sync, Class::Async, Class::Background];
    let of = |class| {
        let write = |order| Io::write(0, PAGE, order, class);
        [write(Order::Ordered), write(Order::Barrier), Io::flush(class)]
    };
    let mut scripts = scripts(&classes.into_iter().flat_map(of).collect::<Vec<_>>(), len);
    for script in &mut scripts {
        for (page, io) in (0..).zip(script).filter(|(_, io)| io.kind != IoKind::Flush) {
            io.offset = 2 * page * PAGE;
        }
    }
    scripts
}

/// What may come without end.
fn floods() -> Vec<Io> {
    let write = |class| Io::write(0, PAGE, Order::Orderless, class);
    vec![
        write(Class::Sync),
        Io { kind: IoKind::Write { order: Order::Orderless, fua: true }, ..write(Class::Sync) },
        Io::read(0, PAGE, Class::Sync),
        write(Class::Async),
        write(Class::Background),
    ]
}

fn flooded_cases(len: u32, tuning: &Tuning) -> Vec<Flood> {
    let ages = |tuning: &Tuning| {
        let [_, r#async, background] = tuning.starvation_ns;
        [tuning.deadline_ns[0], r#async, background]
    };
    let fast = Tuning { deadline_ns: FAST_DEADLINE_NS, ..tuning.clone() };
    let fast = match tuning.starvation_ns[1] {
        u64::MAX => fast,
        _ => Tuning { starvation_ns: FAST_STARVATION_NS, ..fast },
    };
    let speeds = [(tuning.clone(), SLOW_TICK_NS), (fast, FAST_TICK_NS)];
    let mut cases = Vec::new();
    for script in flooded_scripts(len) {
        for traits in [DEVICES[0], DEVICES[2], DEVICES[3]] {
            for queue_depth in [1, 2] {
                for flood in floods() {
                    cases.extend(speeds.iter().map(|(tuning, tick_ns)| Flood {
                        traits: DeviceTraits { queue_depth, ..traits },
                        overdue_ns: ages(tuning),
                        tuning: tuning.clone(),
                        script: script.clone(),
                        flood,
                        tick_ns: *tick_ns,
                    }));
                }
            }
        }
    }
    cases
}

/// Whatever orderless requests there are, of whatever class, all that is ordered has its turn.
#[test]
fn no_flood_of_orderless_requests_delays_order() {
    let ticks_max = AtomicU64::new(0);
    for len in 1..script_len() {
        let mut cases = flooded_cases(len, &Tuning::for_depth(2));
        // Three against every order of completion take hours.
        cases.retain(|case| len < 3 || case.traits.queue_depth == 1);
        let started = std::time::Instant::now();
        let found = on_all_cores(&cases, |case| {
            let seen = flood::search(case);
            ticks_max.fetch_max(seen.ticks_max, Ordering::Relaxed);
            (seen.state_count, seen.violation)
        });
        let states = found.unwrap_or_else(|(_, violation)| panic!("{violation}"));
        println!(
            "floods, {len} requests: {} cases, {states} states, at most {} completions once overdue, {:.1} s",
            cases.len(),
            ticks_max.load(Ordering::Relaxed),
            started.elapsed().as_secs_f64()
        );
    }
}

/// What never ages is held up for ever by plain writes and reads of class Sync.
#[test]
fn the_search_notices_a_flood() {
    let never = Tuning { starvation_ns: [u64::MAX; 3], ..Tuning::for_depth(2) };
    let mut cases = flooded_cases(1, &never);
    let is_plain = |io: &Io| !matches!(io.kind, IoKind::Write { fua: true, .. });
    cases.retain(|case| case.flood.class == Class::Sync && is_plain(&case.flood));
    cases.retain(|case| case.script[0].class != Class::Sync);
    // Without a cache a flush has nothing to wait for.
    cases.retain(|case| case.script[0].kind != IoKind::Flush || case.traits.volatile_cache);
    assert!(!cases.is_empty());
    for case in &mut cases {
        case.overdue_ns = FAST_STARVATION_NS;
        let violation = flood::search(case).violation;
        assert!(violation.is_some(), "no delay is noticed: {case:?}");
    }
}
