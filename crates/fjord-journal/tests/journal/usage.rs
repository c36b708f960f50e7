//! Credits, waiting, errors, the mode without a log, and versions for fine-grained commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fjord_block::{Buf, DeviceExt, IoError, IoOp, Request, Ticket};
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{Buffer, BufferKind, Journal, JournalError, Phase};

use crate::rig::{Awaited, Event, JOURNAL_START, Recorder, Rig, set_value, wait_until};

const EIO: i32 = 5;

fn rig() -> Rig {
    Rig::new(1024, ChecksumVersion::V3, true, 64)
}

#[test]
fn credits_are_counted_extended_and_given_back() {
    let rig = rig();
    let journal = rig.open();
    let (a, b) = (rig.buffer(1), rig.buffer(2));
    let handle = journal.start(1).unwrap();
    drop(handle.get_write(&a).unwrap());
    drop(handle.get_write(&a).unwrap());
    assert!(matches!(handle.get_write(&b), Err(JournalError::Usage(_))));
    assert!(handle.extend(1).unwrap());
    drop(handle.get_write(&b).unwrap());
    assert!(!handle.extend(journal.credits_max()).unwrap());
    let tid = handle.stop();
    assert!(matches!(journal.start(journal.credits_max() + 1), Err(JournalError::Usage(_))));
    // What a handle left over is there for the next, in the same transaction.
    for _ in 0..100 {
        let handle = journal.start(journal.credits_max() / 2).unwrap();
        assert_eq!(handle.tid(), tid);
    }
    let mut handle = journal.start(1).unwrap();
    assert_eq!(handle.restart(3).unwrap(), tid);
    assert_eq!(handle.credits(), 3);
}

#[test]
fn a_thread_cannot_wait_for_itself() {
    let rig = rig();
    let journal = rig.open();
    let handle = journal.start(1).unwrap();
    assert!(matches!(journal.start(1), Err(JournalError::Usage(_))));
    assert!(matches!(journal.commit(handle.tid()), Err(JournalError::Usage(_))));
    drop(handle);
    journal.start(1).unwrap().stop();
    assert!(matches!(journal.commit(Tid(99)), Err(JournalError::Usage(_))));
}

#[test]
fn two_buffers_of_one_block_and_blocks_of_the_journal_are_refused() {
    let rig = rig();
    let journal = rig.open();
    let (a, other) = (rig.buffer(1), rig.buffer(1));
    let handle = journal.start(3).unwrap();
    drop(handle.get_write(&a).unwrap());
    assert!(matches!(handle.get_write(&other), Err(JournalError::TwoBuffers(BlockNo(1)))));
    let inside = rig.buffer(JOURNAL_START + 1);
    assert!(matches!(handle.get_write(&inside), Err(JournalError::Usage(_))));
    assert_eq!(handle.credits(), 2);
}

#[test]
fn a_full_log_is_checkpointed_by_whoever_needs_room() {
    let rig = Rig::new(1024, ChecksumVersion::V2, false, 30);
    let journal = rig.open();
    for value in 1..200 {
        let buffer = rig.buffer(value % 7);
        let handle = journal.start(2).unwrap();
        set_value(&mut handle.get_write(&buffer).unwrap(), value);
        let tid = handle.stop();
        if value % 3 == 0 {
            journal.commit(tid).unwrap();
        }
        if value % 7 == 6 {
            // A cache keeps dirty buffers; here each round makes them anew, so write home.
            journal.commit_running().unwrap();
            journal.checkpoint_all().unwrap();
        } else {
            journal.commit_running().unwrap();
            if !buffer.is_evictable() {
                journal.checkpoint_some(1).unwrap();
            }
        }
    }
    journal.close().unwrap();
    assert_eq!(rig.value(&rig.device.image(), 199 % 7), 199);
}

#[test]
fn a_log_fills_up_while_handles_keep_coming() {
    let rig = Rig::new(1024, ChecksumVersion::V3, true, 30);
    let journal = rig.open();
    let buffers: Vec<_> = (0..6).map(|block| rig.buffer(block)).collect();
    for value in 1..300u64 {
        let handle = journal.start(3).unwrap();
        for offset in 0..3 {
            let buffer = &buffers[(value + offset) as usize % 6];
            set_value(&mut handle.get_write(buffer).unwrap(), value);
        }
        handle.stop();
        if value % 2 == 0 {
            journal.commit_running().unwrap();
        }
    }
    let stats = journal.stats();
    assert!(stats.log_full > 0 && stats.superseded_blocks > 0);
    journal.close().unwrap();
    let image = rig.device.image();
    assert_eq!(rig.value(&image, 299 % 6), 299);
    assert!(buffers.iter().all(|buffer| buffer.is_evictable()));
}

#[test]
fn a_failed_write_stops_the_journal_for_everyone() {
    for (op, skip) in [(IoOp::Write, 0), (IoOp::Write, 1), (IoOp::Write, 2), (IoOp::Flush, 0)] {
        let rig = rig();
        let journal = rig.open();
        let buffer = rig.buffer(1);
        let told = Arc::new(AtomicUsize::new(0));
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(&buffer).unwrap(), 1);
        let count = told.clone();
        handle.on_commit(move |result| {
            assert!(result.is_err());
            count.fetch_add(1, Ordering::SeqCst);
        });
        let tid = handle.stop();
        rig.device.faults().fail_nth(Some(op), skip, EIO);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(journal.commit(tid).is_err()));
            }
        });
        assert_eq!(told.load(Ordering::SeqCst), 1);
        assert!(journal.error().unwrap().io_error().is_some());
        assert!(matches!(journal.start(1), Err(JournalError::Aborted(_))));
        assert!(matches!(journal.commit_running(), Err(JournalError::Aborted(_))));
        assert!(matches!(journal.close(), Err(JournalError::Aborted(_))));
        let device = Arc::new(Recorder::from_image(&rig.device.image()));
        let (again, report) = rig.open_on(&device).unwrap();
        assert_eq!(report.errno, Some(-EIO), "{op} {skip}");
        again.clear_errno().unwrap();
        again.close().unwrap();
        assert_eq!(rig.open_on(&device).unwrap().1.errno, None);
    }
}

#[test]
fn failed_data_fails_the_commit_that_refers_to_it() {
    let rig = rig();
    let journal = rig.open();
    let handle = journal.start(1).unwrap();
    handle.attach_data(Ticket::ready(Err(IoError::os(EIO, IoOp::Write, 0, 512))));
    assert!(journal.commit(handle.stop()).is_err());
    assert!(journal.start(1).is_err());
}

#[test]
fn data_is_waited_for_before_the_flush() {
    let rig = rig();
    // Its ticket is no write of the device, as order would need.
    let journal = rig.open_direct();
    let buffer = rig.buffer(1);
    let (ticket, completer, awaited) = Awaited::pending();
    let handle = journal.start(1).unwrap();
    set_value(&mut handle.get_write(&buffer).unwrap(), 1);
    handle.attach_data(ticket);
    let tid = handle.stop();
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| journal.commit(tid));
        wait_until("a wait for the data", || awaited.is_awaited() || commit.is_finished());
        assert_eq!(journal.phase(tid), Some(Phase::Flushing));
        assert!(!rig.device.events().iter().any(|event| matches!(event, Event::Flush)));
        // The next transaction runs meanwhile, and modifies the same block.
        let handle = journal.start(1).unwrap();
        assert_eq!(handle.tid(), tid.next());
        set_value(&mut handle.get_write(&buffer).unwrap(), 2);
        handle.stop();
        completer.complete(Ok(()));
        commit.join().unwrap().unwrap();
    });
    assert_eq!(journal.phase(tid), Some(Phase::Committed));
    journal.checkpoint_all().unwrap();
    assert_eq!(rig.value(&rig.device.image(), 1), 1);
}

#[test]
fn a_shutdown_leaves_no_trace() {
    let rig = rig();
    let journal = rig.open();
    let buffer = rig.buffer(1);
    let handle = journal.start(1).unwrap();
    set_value(&mut handle.get_write(&buffer).unwrap(), 1);
    let tid = handle.stop();
    let before = rig.device.event_count();
    journal.shutdown();
    assert!(matches!(journal.commit(tid), Err(JournalError::Shutdown)));
    assert_eq!(rig.device.event_count(), before);
}

#[test]
fn the_last_committed_version_stays_within_reach() {
    let rig = rig();
    let journal = rig.open();
    let buffer = Buffer::new_keeping_base(BlockNo(1), Buf::zeroed(1024), BufferKind::Metadata);
    let value = |version: Option<Buf>| version.unwrap()[0];
    let set = |byte: u8| {
        let handle = journal.start(1).unwrap();
        handle.get_write(&buffer).unwrap().fill(byte);
        handle.stop()
    };
    set(1);
    assert_eq!(value(buffer.last_committed()), 0);
    journal.commit_running().unwrap();
    assert_eq!(value(buffer.last_committed()), 1);
    set(2);
    assert_eq!(value(buffer.last_committed()), 1);
    journal.checkpoint_all().unwrap();
    assert_eq!(value(buffer.last_committed()), 1, "also after it went home");
    journal.commit_running().unwrap();
    journal.checkpoint_all().unwrap();
    assert_eq!(value(buffer.last_committed()), 2);
}

#[test]
fn without_a_log_a_commit_writes_home_and_flushes() {
    let device = Arc::new(Recorder::new(1 << 20));
    let journal = Journal::without_log(device.clone(), 1024);
    let buffers: Vec<_> = (0..5)
        .map(|block| Buffer::new(BlockNo(block), Buf::zeroed(1024), BufferKind::Metadata))
        .collect();
    let handle = journal.start(5).unwrap();
    for buffer in &buffers {
        set_value(&mut handle.get_write(buffer).unwrap(), 7);
    }
    handle.forget(BlockNo(4), Some(&buffers[4])).unwrap();
    let tid = handle.stop();
    assert!(buffers[0].is_dirty() && !buffers[4].is_dirty());
    assert_eq!(device.event_count(), 0);
    journal.commit(tid).unwrap();
    let events = device.events();
    assert!(
        matches!(&events[..], [Event::Write(0, data, false), Event::Flush] if data.len() == 4096)
    );
    assert!(buffers.iter().all(|buffer| buffer.is_evictable()));
    assert_eq!(journal.live_block_count(), 0);
    journal.close().unwrap();
    journal.close().unwrap();
}

#[test]
fn nobarrier_sends_no_flush() {
    let mut rig = rig();
    rig.options.barrier = false;
    let journal = rig.open();
    let buffer = rig.buffer(1);
    for value in 0..40 {
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(&buffer).unwrap(), value);
        journal.commit(handle.stop()).unwrap();
    }
    journal.close().unwrap();
    assert_eq!(journal.stats().flushes, 0);
    let harmless = |event: &Event| matches!(event, Event::Write(_, _, false));
    assert!(rig.device.events().iter().all(harmless));
}

#[test]
fn commits_cost_one_flush_and_one_durable_block() {
    let rig = Rig::new(4096, ChecksumVersion::V3, true, 512);
    let journal = rig.open();
    let buffers: Vec<_> = (0..8).map(|block| rig.buffer(block * 3)).collect();
    for round in 0..5 {
        let before = rig.device.event_count();
        let handle = journal.start(8).unwrap();
        buffers.iter().for_each(|buffer| set_value(&mut handle.get_write(buffer).unwrap(), round));
        journal.commit(handle.stop()).unwrap();
        let events = rig.device.events().split_off(before);
        let first = usize::from(round == 0);
        assert!(
            matches!(
                &events[first..],
                [Event::Write(_, body, false), Event::Flush, Event::Write(_, commit, true)]
                    if body.len() == 9 * 4096 && commit.len() == 4096
            ),
            "round {round}"
        );
    }
}

#[test]
fn hooks_for_the_commit_timer() {
    let rig = rig();
    let journal = rig.open();
    assert!(!journal.needs_commit() && journal.running_age().is_none());
    let buffer = rig.buffer(1);
    let handle = journal.start(1).unwrap();
    assert!(!journal.needs_commit(), "nothing was changed yet");
    set_value(&mut handle.get_write(&buffer).unwrap(), 1);
    let tid = handle.stop();
    assert!(journal.needs_commit() && journal.running_tid() == Some(tid));
    assert!(journal.running_age().is_some());
    journal.commit_running().unwrap();
    assert!(!journal.needs_commit());
    assert!(journal.log_usage_blocks().0 > 0);
    journal.quiesce().unwrap();
    assert_eq!(journal.log_usage_blocks().0, 0);
    assert!(journal.live_buffer(BlockNo(1)).is_none());
    let contents = rig.device.read_buf(1024, 1024).unwrap();
    assert_eq!(contents[15], 1);
    let request = Request::flush();
    rig.device.submit_one(request).wait().unwrap();
}
