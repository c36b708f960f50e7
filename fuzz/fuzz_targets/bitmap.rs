//! Fuzzes bitmaps.

#![no_main]

use fjord_fuzz::exercise::metadata;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| metadata::bits(data));
