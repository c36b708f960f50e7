//! Fuzzes descriptor, revoke, commit and fast-commit blocks.

#![no_main]

use fjord_fuzz::exercise::journal;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| journal::log_block(data));
