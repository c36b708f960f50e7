//! Fuzzes access control lists.

#![no_main]

use fjord_fuzz::exercise::xattrs;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| xattrs::acl(data));
