//! Fuzzes the superblock and the layout derived from it.

#![no_main]

use fjord_fuzz::exercise::metadata;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| metadata::superblock(data));
