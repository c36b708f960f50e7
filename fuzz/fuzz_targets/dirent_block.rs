//! Fuzzes directory blocks; the first byte chooses the file system.

#![no_main]

use fjord_fuzz::exercise::{Env, directory};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((choice, data)) = input.split_first() else { return };
    let env = Env::made_up(*choice);
    directory::dirent_block(&env, data);
});
