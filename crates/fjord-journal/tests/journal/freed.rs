//! Blocks that are freed and come back: as data, as metadata, in the same transaction or later.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fjord_block::{Buf, DeviceExt, Request};
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{Buffer, BufferKind, Journal};

use crate::rig::{Recorder, Rig, set_value};

fn rig() -> Rig {
    Rig::new(1024, ChecksumVersion::V3, true, 64)
}

fn write(journal: &Journal, buffer: &Arc<Buffer>, value: u64) {
    let handle = journal.start(1).unwrap();
    set_value(&mut handle.get_write(buffer).unwrap(), value);
    handle.stop();
}

/// A journal with a committed version of block 5.
fn committed() -> (Rig, Journal, Arc<Buffer>) {
    let rig = rig();
    let journal = rig.open();
    let buffer = rig.buffer(5);
    write(&journal, &buffer, 1);
    journal.commit_running().unwrap();
    (rig, journal, buffer)
}

/// Frees the block of a buffer.
fn free(journal: &Journal, buffer: &Arc<Buffer>) -> Tid {
    let handle = journal.start(1).unwrap();
    handle.forget(buffer.block(), Some(buffer)).unwrap();
    handle.stop()
}

fn write_data(rig: &Rig, block: u64, value: u64) {
    let mut contents = Buf::zeroed(rig.block_size);
    set_value(contents.make_mut(), value);
    let request = Request::write(block * rig.block_size as u64, vec![contents]);
    rig.device.submit_one(request).wait().unwrap();
}

/// The value of a block after a crash now and recovery.
fn recovered(rig: &Rig, block: u64) -> u64 {
    let device = Arc::new(Recorder::from_image(&rig.device.image()));
    rig.open_on(&device).unwrap();
    rig.value(&device.image(), block)
}

#[test]
fn replay_does_not_overwrite_a_freed_block_that_became_data() {
    let (rig, journal, buffer) = committed();
    journal.commit(free(&journal, &buffer)).unwrap();
    write_data(&rig, 5, 2);
    assert_eq!(recovered(&rig, 5), 2);
}

#[test]
fn a_checkpoint_does_not_overwrite_a_freed_block_that_became_data() {
    for with_buffer in [false, true] {
        let (rig, journal, buffer) = committed();
        let handle = journal.start(1).unwrap();
        handle.forget(BlockNo(5), with_buffer.then_some(&buffer)).unwrap();
        let tid = handle.stop();
        assert!(!buffer.is_evictable());
        journal.commit(tid).unwrap();
        assert!(buffer.is_evictable());
        assert_eq!(journal.live_block_count(), 0);
        write_data(&rig, 5, 2);
        journal.checkpoint_all().unwrap();
        journal.close().unwrap();
        assert_eq!(rig.value(&rig.device.image(), 5), 2);
    }
}

#[test]
fn until_the_free_commits_the_old_version_still_goes_home() {
    let (rig, journal, buffer) = committed();
    free(&journal, &buffer);
    journal.checkpoint_all().unwrap();
    assert_eq!(recovered(&rig, 5), 1, "the free never committed");
}

#[test]
fn a_block_created_and_freed_in_one_transaction_is_not_logged() {
    let rig = rig();
    let journal = rig.open();
    let buffer = rig.buffer(5);
    let handle = journal.start(2).unwrap();
    set_value(&mut handle.get_create(&buffer).unwrap(), 9);
    handle.forget(BlockNo(5), Some(&buffer)).unwrap();
    journal.commit(handle.stop()).unwrap();
    assert_eq!(journal.stats().metadata_blocks, 0);
    assert!(buffer.is_evictable());
    assert_eq!(recovered(&rig, 5), 0);
}

#[test]
fn reallocation_as_metadata_in_the_same_transaction_cancels_the_revoke() {
    let (rig, journal, buffer) = committed();
    let handle = journal.start(2).unwrap();
    handle.forget(BlockNo(5), Some(&buffer)).unwrap();
    set_value(&mut handle.get_create(&buffer).unwrap(), 2);
    journal.commit(handle.stop()).unwrap();
    assert_eq!(journal.stats().revoke_records, 0);
    assert_eq!(recovered(&rig, 5), 2);
    journal.checkpoint_all().unwrap();
    assert_eq!(rig.value(&rig.device.image(), 5), 2);
}

#[test]
fn reallocation_as_metadata_in_a_later_transaction_is_replayed() {
    let rig = rig();
    let journal = rig.open();
    let buffer = rig.buffer(5);
    write(&journal, &buffer, 1);
    journal.commit(free(&journal, &buffer)).unwrap();
    // The cache dropped the old buffer and makes a new one.
    let fresh = rig.buffer(5);
    let handle = journal.start(1).unwrap();
    set_value(&mut handle.get_create(&fresh).unwrap(), 3);
    journal.commit(handle.stop()).unwrap();
    assert_eq!(recovered(&rig, 5), 3);
}

#[test]
fn callbacks_run_after_old_versions_are_discarded_and_before_waiters_go_on() {
    let (_, journal, buffer) = committed();
    let called = Arc::new(AtomicBool::new(false));
    let handle = journal.start(1).unwrap();
    handle.forget(BlockNo(5), Some(&buffer)).unwrap();
    let (flag, seen) = (called.clone(), buffer.clone());
    handle.on_commit(move |result| {
        assert!(result.is_ok() && seen.is_evictable());
        flag.store(true, Ordering::SeqCst);
    });
    journal.commit(handle.stop()).unwrap();
    assert!(called.load(Ordering::SeqCst));
}

#[test]
fn journaled_data_is_treated_like_metadata_and_counted_apart() {
    let rig = rig();
    let journal = rig.open();
    let buffer = Buffer::new(BlockNo(6), Buf::zeroed(1024), BufferKind::Data);
    write(&journal, &buffer, 4);
    journal.commit_running().unwrap();
    assert_eq!((journal.stats().data_blocks, journal.stats().metadata_blocks), (1, 0));
    assert_eq!(recovered(&rig, 6), 4);
    journal.commit(free(&journal, &buffer)).unwrap();
    write_data(&rig, 6, 5);
    assert_eq!(recovered(&rig, 6), 5);
}

#[test]
fn many_revokes_fill_several_blocks() {
    let rig = Rig::new(1024, ChecksumVersion::V2, true, 64);
    let journal = rig.open();
    let handle = journal.start(3).unwrap();
    for block in 2000..2300 {
        handle.forget(BlockNo(block), None).unwrap();
    }
    assert_eq!(handle.credits(), 0);
    let full = (2300..3000).find_map(|block| handle.forget(BlockNo(block), None).err());
    assert!(full.is_some());
    journal.commit(handle.stop()).unwrap();
    assert_eq!(journal.stats().revoke_blocks, 3);
}
