//! Unit tests of the gate: which requests pass while it is closed, and that it always opens again.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::chunks::Chunks;
use super::copy::{HOLD_MAX, PAUSE_MAX, PIECES_BYTES_MAX};
use super::gate::{Gate, Guard, Mode};
use super::{Engine, FileDevice, FileOptions};
use crate::buf::Buf;
use crate::device::{Class, Device, DeviceExt, Order, Request};
use crate::snapshot::{Reflink, SnapshotError, SnapshotOptions};

const SIZE: u64 = 8 << 20;
const ENGINES: [(Engine, bool); 4] =
    [(Engine::Uring, true), (Engine::Uring, false), (Engine::Plain, true), (Engine::Plain, false)];

fn open(dir: &Path, engine: Engine, direct: bool) -> (FileDevice, PathBuf) {
    let path = dir.join(format!("{engine:?}-{direct}"));
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    let options = FileOptions { engine, direct, ..FileOptions::default() };
    (FileDevice::open(&path, &options).unwrap(), path)
}

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);

fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let began = Instant::now();
    while !reached() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for a state of the gate.
fn wait_for(gate: &Gate, what: &str, reached: impl Fn(&Guard) -> bool) {
    wait_until(what, || reached(&gate.lock()));
}

fn held_now(guard: &Guard) -> usize {
    guard.held_ranges().count()
}

/// Moves the stopped clock, and waits until the pre-reader has seen what time it is.
fn advance_seen(gate: &Gate, time: Duration) {
    gate.lock().clock.advance(time);
    gate.wake();
    wait_for(gate, "the pre-reader looks at the clock", |guard| guard.clock.is_waited_for());
}

fn advance(gate: &Gate, time: Duration) {
    gate.lock().clock.advance(time);
    gate.wake();
}

fn write(offset: u64, byte: u8, class: Class, fua: bool) -> Request {
    write_bytes(offset, &[byte; 4096], class, fua)
}

fn write_bytes(offset: u64, bytes: &[u8], class: Class, fua: bool) -> Request {
    let bufs = vec![Buf::from_slice(bytes)];
    Request::Write { offset, bufs, order: Order::Orderless, fua, class }
}

fn byte_at(path: &Path, offset: u64) -> u8 {
    let mut byte = [0];
    File::open(path).unwrap().read_exact_at(&mut byte, offset).unwrap();
    byte[0]
}

/// Changes of every kind and class, waited for or not, wait while the gate is closed; reads and
/// flushes do not; all are done when it opens.
#[test]
fn no_change_passes_a_closed_gate() {
    let dir = tempfile::tempdir().unwrap();
    for (engine, direct) in ENGINES {
        let (device, path) = open(dir.path(), engine, direct);
        let gate = device.shared.gate.clone();
        device.write_all_at(6 * 4096, &[9; 4096]).unwrap();
        gate.begin().unwrap();
        gate.close(&device.shared).unwrap();
        let closed_at = Instant::now();
        let mut requests = vec![Request::WriteZeroes { offset: 6 * 4096, len: 4096 }];
        for (index, class) in [Class::Sync, Class::Async, Class::Background].into_iter().enumerate()
        {
            requests.push(write(index as u64 * 8192, 1, class, false));
            requests.push(write(index as u64 * 8192 + 4096, 2, class, true));
        }
        let tickets = device.submit(requests);
        // A write that its submitter waits for at once.
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| device.write_all_at(SIZE - 4096, &[3; 4096]));
            tickets.iter().for_each(|ticket| ticket.start());
            // Each is held by then, or has passed.
            wait_for(&gate, "all are submitted", |guard| {
                let passed = tickets.iter().filter(|ticket| ticket.is_done()).count();
                held_now(guard) + passed + usize::from(waiter.is_finished()) > tickets.len()
            });
            assert!(tickets.iter().all(|ticket| !ticket.is_done()) && !waiter.is_finished());
            for at in [0, 4096, 8192, 12288, 16384, 20480, SIZE - 4096] {
                assert_eq!(byte_at(&path, at), 0, "{engine:?} {direct} {at}");
            }
            assert_eq!(byte_at(&path, 6 * 4096), 9);
            let mut read = [0; 4096];
            device.read_exact_at(6 * 4096, &mut read).unwrap();
            assert_eq!(read, [9; 4096]);
            device.flush().unwrap();
            // Nothing is lost by a discard that does nothing.
            device.submit_one(Request::Discard { offset: 0, len: SIZE }).wait().unwrap();
            assert_eq!(byte_at(&path, 6 * 4096), 9);
            let at_least = closed_at.elapsed();
            let closed = gate.reopen(Mode::Open, &device.shared).unwrap();
            assert!(closed >= at_least, "{closed:?} of {at_least:?}");
            waiter.join().unwrap().unwrap();
        });
        tickets.iter().for_each(|ticket| ticket.wait().unwrap());
        assert_eq!((byte_at(&path, 0), byte_at(&path, 6 * 4096)), (1, 0));
        gate.finish();
        device.write_all_at(0, &[4; 4096]).unwrap();
        assert_eq!(gate.pending_count(), 0);
    }
}

/// Whatever the writers do, the file is at rest once the gate is closed, and has what was
/// completed before.
#[test]
fn a_closed_gate_has_nothing_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    for (engine, direct) in ENGINES {
        let (device, path) = open(dir.path(), engine, direct);
        let stop = AtomicBool::new(false);
        let completed: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for (thread, completed) in completed.iter().enumerate() {
                let (device, stop) = (&device, &stop);
                scope.spawn(move || {
                    let classes = [Class::Sync, Class::Async, Class::Background];
                    for round in 1_u64.. {
                        if stop.load(Ordering::SeqCst) {
                            return;
                        }
                        let at = |part: u64| thread as u64 * (1 << 20) + part * 65536;
                        let bytes = round.to_le_bytes().repeat(512);
                        let batch = (0..4)
                            .map(|part| write_bytes(at(part), &bytes, classes[thread], false))
                            .collect();
                        let tickets = device.submit(batch);
                        tickets.iter().for_each(|ticket| ticket.wait().unwrap());
                        completed.store(round, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..40 {
                let rounds = || -> Vec<u64> {
                    completed.iter().map(|count| count.load(Ordering::SeqCst)).collect()
                };
                let before = rounds();
                wait_until("all write", || {
                    rounds().iter().zip(&before).all(|(now, old)| now > old)
                });
                let gate = &device.shared.gate;
                gate.begin().unwrap();
                let promised = rounds();
                gate.close(&device.shared).unwrap();
                let before = std::fs::read(&path).unwrap();
                // A write that is still on its way may come later than this: then it goes unnoticed.
                std::thread::sleep(Duration::from_millis(2));
                assert!(before == std::fs::read(&path).unwrap(), "{engine:?} {direct}");
                gate.reopen(Mode::Open, &device.shared).unwrap();
                gate.finish();
                for (thread, promised) in promised.into_iter().enumerate() {
                    for part in 0..4 {
                        let found = &before[(thread << 20) + part * 65536..][..8];
                        let found = u64::from_le_bytes(found.try_into().unwrap());
                        assert!(
                            found >= promised,
                            "{engine:?}: {promised} promised, {found} found"
                        );
                    }
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}

/// While chunks are copied, a change waits for those that it touches and for no others.
#[test]
fn changes_wait_for_their_own_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let (device, path) = open(dir.path(), Engine::Auto, true);
    let gate = &device.shared.gate;
    gate.begin().unwrap();
    gate.close(&device.shared).unwrap();
    let mut chunks = Chunks::new(SIZE);
    let safe = chunks.take(65536..3 * 65536, u64::MAX).unwrap();
    chunks.set_safe(&safe);
    gate.reopen(Mode::Copying(chunks), &device.shared).unwrap();
    device.write_all_at(65536, &[1; 2 * 65536]).unwrap();
    let both = device.submit_one(Request::write(65536 - 512, vec![Buf::from_slice(&[2; 1024])]));
    let other = device.submit_one(write(SIZE - 4096, 2, Class::Sync, false));
    // A change that passed would not be there.
    assert_eq!(held_now(&gate.lock()), 2);
    assert!(!both.is_done() && !other.is_done());
    let mut guard = gate.lock();
    let Mode::Copying(chunks) = &mut guard.mode else { panic!("the mode changed") };
    let first = chunks.take(0..1, u64::MAX).unwrap();
    chunks.set_safe(&first);
    gate.let_go(guard, &device.shared);
    both.wait().unwrap();
    assert_eq!(held_now(&gate.lock()), 1);
    assert!(!other.is_done());
    gate.fail(SnapshotError::Closed, &device.shared);
    other.wait().unwrap();
    assert_eq!((byte_at(&path, 65536), byte_at(&path, SIZE - 1)), (2, 2));
    gate.finish();
}

/// A change held while the copy makes no progress waits only for the limit, then the snapshot
/// fails. So does one during a pause that does not end.
#[test]
fn a_hold_ends_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let size = 64 << 20;
    File::create(&path).unwrap().set_len(size).unwrap();
    let device = FileDevice::open(&path, &FileOptions::default()).unwrap();
    device.write_all_at(0, &vec![1; size as usize]).unwrap();
    let out = File::create(dir.path().join("copy")).unwrap();
    let (asked, release) = (AtomicU64::new(0), AtomicBool::new(false));
    let ask = || {
        // As a write to a disk that hangs, from the second time on.
        if asked.fetch_add(1, Ordering::SeqCst) > 0 {
            while !release.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        false
    };
    let options = SnapshotOptions { reflink: Reflink::Never, is_cancelled: Some(&ask) };
    let gate = &device.shared.gate;
    gate.lock().clock.stop();
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| device.snapshot_to(&out, &options));
        wait_until("the copy has begun", || asked.load(Ordering::SeqCst) > 1);
        let busy = device.snapshot_to(&out, &SnapshotOptions::default()).unwrap_err();
        assert!(matches!(busy, SnapshotError::Busy), "{busy}");
        // As much as may be in memory passes at once: no time passes.
        device.write_all_at(0, &vec![2; 24 << 20]).unwrap();
        assert!(gate.lock().failure.is_none());
        let rest = scope.spawn(|| device.write_all_at(24 << 20, &vec![2; 40 << 20]));
        wait_for(gate, "memory is full", |guard| {
            held_now(guard) > 0 && guard.pieces_bytes >= PIECES_BYTES_MAX
        });
        let moment = Duration::from_millis(1);
        advance_seen(gate, HOLD_MAX - moment);
        assert!(!rest.is_finished() && gate.lock().failure.is_none());
        advance(gate, moment);
        rest.join().unwrap().unwrap();
        release.store(true, Ordering::SeqCst);
        let failed = taking.join().unwrap().unwrap_err();
        assert!(matches!(failed, SnapshotError::SlowCopy(_)), "{failed}");
    });
    let mut found = vec![0; size as usize];
    device.read_exact_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 2));
}

#[test]
fn a_pause_ends_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let (device, _) = open(dir.path(), Engine::Auto, true);
    let shared: Arc<_> = device.shared.clone();
    shared.gate.lock().clock.stop();
    shared.gate.begin().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| super::copy::pre_read(&shared));
        shared.gate.close(&shared).unwrap();
        let held = device.submit_one(write(0, 1, Class::Async, false));
        let moment = Duration::from_millis(1);
        advance_seen(&shared.gate, PAUSE_MAX - moment);
        assert!(!held.is_done() && held_now(&shared.gate.lock()) == 1);
        advance(&shared.gate, moment);
        held.wait().unwrap();
        let failed = shared.gate.reopen(Mode::Open, &shared).unwrap_err();
        assert!(matches!(failed, SnapshotError::SlowPause(_)), "{failed}");
        shared.gate.end_keeping(&shared);
    });
    shared.gate.finish();
}
