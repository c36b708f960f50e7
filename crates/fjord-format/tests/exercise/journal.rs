//! Blocks of the journal.

use fjord_format::jbd2::{self, ChecksumVersion, LogFormat};
use fjord_format::types::Tid;

use super::pick;

fn formats(bytes: &[u8]) -> impl Iterator<Item = LogFormat> {
    let (len, uuid) = (bytes.len(), [3; 16]);
    let versions =
        [ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3];
    versions.into_iter().flat_map(move |checksum| {
        [false, true].map(|bit64| LogFormat { block_size: len, bit64, checksum, seed: 9, uuid })
    })
}

/// The journal's superblock: any bytes.
pub fn superblock(bytes: &[u8]) {
    let Ok(sb) = jbd2::Superblock::decode(bytes) else { return };
    let again = jbd2::Superblock::decode(&sb.encode()).expect("just encoded");
    // The checksum's type follows from the features, whatever was stored.
    assert!(again.encode() == sb.encode());
    if sb.check(sb.s_blocksize, u64::from(sb.s_maxlen)).is_ok() {
        let area = sb.fast_commit_area();
        assert!(sb.log_end() <= sb.s_maxlen && area.end <= sb.s_maxlen);
        let format = sb.log_format();
        let _ = (format.tags_per_descriptor(), format.revokes_per_block());
    }
}

/// Descriptor, revoke, commit and fast-commit blocks: any bytes, taken as each of them.
pub fn log_block(bytes: &[u8]) {
    let _ = jbd2::needs_escape(bytes);
    if let Some(header) = jbd2::BlockHeader::decode(bytes) {
        let mut again = bytes.to_vec();
        header.encode(&mut again).expect("it was decoded from these bytes");
        assert_eq!(jbd2::BlockHeader::decode(&again), Some(header));
    }
    for format in formats(bytes) {
        let _ = format.verify_tail("log block", bytes);
        let tags = jbd2::parse_tags(&format, bytes);
        assert!(tags.len() <= bytes.len() / 8 + 1);
        if let Ok(revoked) = jbd2::parse_revokes(&format, bytes) {
            assert!(revoked.len() <= bytes.len() / 4);
        }
        let _ = jbd2::CommitBlock::verify(&format, bytes, pick(bytes, 1));
    }
    let _ = jbd2::CommitBlock::decode(bytes);
    let mut scan = jbd2::fast_commit::FastCommitScan::new(Tid(pick(bytes, 2)));
    if matches!(scan.push_block(bytes), Ok(true)) {
        let _ = scan.push_block(bytes);
    }
    assert!(scan.commit_count() as usize <= bytes.len());
    assert!(scan.into_records().len() <= bytes.len());
}
