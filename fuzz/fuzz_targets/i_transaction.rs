//! Fuzzes i-transactions and the table of their areas.

#![no_main]

use fjord_fuzz::exercise::ijournal;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| ijournal::i_transaction(data));
