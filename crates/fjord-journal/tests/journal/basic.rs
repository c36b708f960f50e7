//! Commit, checkpoint, close, and what the next open finds.

use std::sync::Arc;

use fjord_format::jbd2::{ChecksumVersion, MAGIC};
use fjord_journal::recovery::Case;

use crate::rig::{JOURNAL_START, Recorder, Rig, set_value};

const VERSIONS: [ChecksumVersion; 4] =
    [ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3];

#[test]
fn a_committed_change_survives_a_crash_in_every_format() {
    for checksum in VERSIONS {
        for bit64 in [false, true] {
            for block_size in [1024, 4096] {
                let rig = Rig::new(block_size, checksum, bit64, 64);
                let journal = rig.open();
                let (a, b) = (rig.buffer(3), rig.buffer(7));
                let handle = journal.start(2).unwrap();
                set_value(&mut handle.get_write(&a).unwrap(), 11);
                set_value(&mut handle.get_write(&b).unwrap(), 12);
                let tid = handle.stop();
                journal.commit(tid).unwrap();
                assert!(journal.is_committed(tid));
                // Not home yet: what a crash leaves has it in the log only.
                let image = rig.device.image();
                assert_eq!(rig.value(&image, 3), 0);
                let crashed = Arc::new(Recorder::from_image(&image));
                let (_, report) = rig.open_on(&crashed).unwrap();
                assert_eq!((report.transactions, report.replayed_blocks), (1, 2));
                let image = crashed.image();
                assert_eq!((rig.value(&image, 3), rig.value(&image, 7)), (11, 12));
                journal.close().unwrap();
                let image = rig.device.image();
                assert_eq!((rig.value(&image, 3), rig.value(&image, 7)), (11, 12));
                let (_, report) = rig.open_on(&rig.device).unwrap();
                assert!(!report.was_dirty);
            }
        }
    }
}

#[test]
fn a_block_that_starts_like_a_log_block_is_escaped() {
    for checksum in VERSIONS {
        let rig = Rig::new(1024, checksum, true, 64);
        let journal = rig.open();
        let buffer = rig.buffer(3);
        let handle = journal.start(1).unwrap();
        let mut guard = handle.get_write(&buffer).unwrap();
        set_value(&mut guard, 11);
        // Looks like the commit block of this very transaction.
        guard[..4].copy_from_slice(&MAGIC.to_be_bytes());
        guard[4..8].copy_from_slice(&2u32.to_be_bytes());
        guard[8..12].copy_from_slice(&handle.tid().0.to_be_bytes());
        let wanted = guard.to_vec();
        drop(guard);
        journal.commit(handle.stop()).unwrap();
        let crashed = Arc::new(Recorder::from_image(&rig.device.image()));
        let (_, report) = rig.open_on(&crashed).unwrap();
        assert!(report.cases.contains(&Case::Escaped));
        assert!(crashed.image()[3 * 1024..4 * 1024] == wanted[..]);
        let at = (JOURNAL_START as usize + (1024 - 64) + 1) * 1024;
        assert_eq!(rig.device.image()[at..at + 4], [0; 4]);
        assert!(buffer.read()[..] == wanted[..], "the buffer itself stays as it is");
    }
}

#[test]
fn a_checkpoint_between_commit_block_and_callbacks_moves_the_tail_right() {
    let rig = Rig::new(1024, ChecksumVersion::V3, true, 64);
    let journal = rig.open();
    let buffer = rig.buffer(3);
    let write = |value| {
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(&buffer).unwrap(), value);
        handle
    };
    let handle = write(1);
    let other = journal.clone();
    handle.on_commit(move |_| other.checkpoint_all().unwrap());
    journal.commit(handle.stop()).unwrap();
    journal.commit(write(2).stop()).unwrap();
    let crashed = Arc::new(Recorder::from_image(&rig.device.image()));
    rig.open_on(&crashed).unwrap();
    assert_eq!(rig.value(&crashed.image(), 3), 2);
}
