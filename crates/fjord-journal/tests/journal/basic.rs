//! Commit, checkpoint, close, and what the next open finds.

use crate::rig::{Rig, set_value};
use fjord_format::jbd2::ChecksumVersion;

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
                let crashed = std::sync::Arc::new(crate::rig::Recorder::from_image(&image));
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
