//! Fuzzes block maps of ext2 and ext3; the first byte chooses the file system.

#![no_main]

use fjord_fuzz::exercise::{Env, metadata};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((choice, data)) = input.split_first() else { return };
    let env = Env::made_up(*choice);
    metadata::block_map(&env, data);
});
