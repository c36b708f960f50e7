//! Fuzzes what reads tar streams: an image is made of the input, or an error that a bad stream may have. The
//! first byte says whether the stream is a layer; the rest is the stream.

#![no_main]

use std::sync::Arc;

use fjord_block::MemDevice;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/fjord-tree/tests/tar/exercise.rs"]
mod exercise;

const BLOCK_BYTES: usize = 512;
/// The checksum of a header: six octal digits, NUL, a blank.
const CHECKSUM: std::ops::Range<usize> = 148..156;

/// Gives each block that may be a header the checksum that fits, or the fuzzer would seldom get behind it.
fn seal(stream: &mut [u8]) {
    for block in stream.chunks_exact_mut(BLOCK_BYTES) {
        let digits = &block[CHECKSUM.start..CHECKSUM.start + 6];
        if !digits.iter().all(|byte| matches!(byte, b'0'..=b'7')) {
            continue;
        }
        block[CHECKSUM].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&first, stream)) = data.split_first() else { return };
    let mut stream = stream.to_vec();
    seal(&mut stream);
    // Which it is, the target itself checks.
    let _ = exercise::put_in(Arc::new(MemDevice::new(0)), &stream, first & 1 == 1, "the input");
});
