//! Turns a frozen transaction into log blocks.
//!
//! Invariant: blocks come in the order they take in the log: revoke blocks, then each
//! descriptor followed by the blocks it describes. The commit block is not among them.

use std::collections::BTreeSet;

use fjord_block::Buf;
use fjord_block::plant::{Bug, planted};
use fjord_format::FormatError;
use fjord_format::jbd2::{self, ChecksumVersion, DescriptorBuilder, LogFormat, RevokeBuilder};
use fjord_format::types::{BlockNo, Tid};

use crate::error::{JournalError, Result};
use crate::log::Log;
use crate::transaction::Version;

/// Number of log blocks of a transaction, without its commit block.
pub(super) struct LogShape {
    pub(super) revoke_blocks: usize,
    pub(super) descriptors: usize,
    versions: usize,
}

impl LogShape {
    pub(super) fn new(log: &Log, versions: usize, revokes: usize) -> LogShape {
        LogShape {
            revoke_blocks: revokes.div_ceil(log.format.revokes_per_block().max(1)),
            descriptors: versions.div_ceil(log.versions_per_descriptor),
            versions,
        }
    }

    pub(super) fn blocks(&self) -> usize {
        self.revoke_blocks + self.descriptors + self.versions
    }
}

/// The log blocks of a transaction.
pub(super) struct LogBlocks {
    /// One buffer per block; as many as [`LogShape::blocks`].
    pub(super) bufs: Vec<Buf>,
    /// Number of the first of them that are revoke blocks.
    pub(super) revoke_blocks: usize,
    /// Checksum v1 over descriptors and data.
    pub(super) crc: u32,
}

impl LogBlocks {
    pub(super) fn build(
        log: &Log,
        tid: Tid,
        versions: &[Version],
        revoked: &BTreeSet<BlockNo>,
    ) -> Result<LogBlocks> {
        let format = &log.format;
        let shape = LogShape::new(log, versions.len(), revoked.len());
        let bufs = Vec::with_capacity(shape.blocks());
        let mut blocks = LogBlocks { bufs, revoke_blocks: shape.revoke_blocks, crc: !0 };
        let usage = |error: FormatError| JournalError::Usage(error.to_string());
        let revoked: Vec<BlockNo> = revoked.iter().copied().collect();
        for mut chunk in revoked.chunks(format.revokes_per_block().max(1)) {
            if !blocks.bufs.is_empty() && planted(Bug::RevokeBlockCut) {
                chunk = &chunk[..1];
            }
            blocks.push_revokes(format, tid, chunk).map_err(usage)?;
        }
        for chunk in versions.chunks(log.versions_per_descriptor) {
            blocks.push_versions(format, tid, chunk).map_err(usage)?;
        }
        Ok(blocks)
    }

    fn push_revokes(
        &mut self,
        format: &LogFormat,
        tid: Tid,
        revoked: &[BlockNo],
    ) -> Result<(), FormatError> {
        let mut block = Buf::zeroed(format.block_size);
        let mut builder = RevokeBuilder::new(format, tid, block.make_mut())?;
        for &block in revoked {
            builder.push(block)?;
        }
        builder.finish();
        self.bufs.push(block);
        Ok(())
    }

    fn push_versions(
        &mut self,
        format: &LogFormat,
        tid: Tid,
        versions: &[Version],
    ) -> Result<(), FormatError> {
        let mut descriptor = Buf::zeroed(format.block_size);
        let mut builder = DescriptorBuilder::new(format, tid, descriptor.make_mut())?;
        let mut copies = Vec::with_capacity(versions.len());
        for (buffer, version) in versions {
            let (copy, escaped) = log_copy(version);
            let checksum = if format.has_block_checksums() {
                jbd2::data_checksum(format, tid, &copy)
            } else {
                0
            };
            builder.push(buffer.block(), escaped, checksum)?;
            copies.push(copy);
        }
        builder.finish()?;
        if wants_transaction_crc(format.checksum) {
            self.crc = jbd2::crc32_be(self.crc, &descriptor);
            for copy in &copies {
                self.crc = jbd2::crc32_be(self.crc, copy);
            }
        }
        self.bufs.push(descriptor);
        self.bufs.append(&mut copies);
        Ok(())
    }
}

/// The contents for the log, and whether they had to be escaped.
fn log_copy(version: &Buf) -> (Buf, bool) {
    let mut copy = version.clone();
    let escaped = jbd2::needs_escape(version);
    if escaped {
        copy.make_mut()[..4].fill(0);
    }
    (copy, escaped)
}

/// Whether a commit has to compute the checksum of the whole transaction.
fn wants_transaction_crc(version: ChecksumVersion) -> bool {
    version == ChecksumVersion::V1
}
