//! Reads log blocks, many at a time.
//!
//! Invariant: never more than one window of the log in memory.

use std::sync::Arc;

use fjord_block::{AlignedBuf, Class, Device};

use crate::error::{JournalError, Result};
use crate::map::JournalMap;

/// Size of a read, in bytes.
const WINDOW_BYTES: usize = 256 << 10;

/// A window that slides over the log.
pub(crate) struct LogReader<'a> {
    device: &'a Arc<dyn Device>,
    map: &'a JournalMap,
    block_size: usize,
    /// Just past the last block that may be read ahead.
    end: u32,
    window_start: u32,
    window: Vec<AlignedBuf>,
}

impl<'a> LogReader<'a> {
    pub(crate) fn new(
        device: &'a Arc<dyn Device>,
        map: &'a JournalMap,
        block_size: usize,
        end: u32,
    ) -> LogReader<'a> {
        LogReader { device, map, block_size, end, window_start: 0, window: Vec::new() }
    }

    /// Journal block `at`.
    pub(crate) fn block(&mut self, at: u32) -> Result<&[u8]> {
        let inside = at.checked_sub(self.window_start).map(|index| index as usize);
        let index = match inside.filter(|&index| index < self.window.len()) {
            Some(index) => index,
            None => {
                self.load(at)?;
                0
            }
        };
        let missing = || JournalError::BadMap(format!("its block {at} cannot be read"));
        self.window.get(index).map(|block| &**block).ok_or_else(missing)
    }

    fn load(&mut self, at: u32) -> Result<()> {
        self.window.clear();
        let (start, mapped) = self.map.run(at)?;
        let most = (WINDOW_BYTES / self.block_size).max(1) as u32;
        let count = mapped.min(most).min(self.end.saturating_sub(at)).max(1);
        let bufs = (0..count).map(|_| AlignedBuf::uninit(self.block_size)).collect();
        let offset = start.0.saturating_mul(self.block_size as u64);
        let read = self.device.submit_read(offset, bufs, Class::Sync).wait();
        self.window = read.map_err(JournalError::io("reading the log"))?;
        self.window_start = at;
        Ok(())
    }
}
