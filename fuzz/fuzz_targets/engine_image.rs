//! Fuzzes the whole engine: damages a small image in memory, opens it, reads and changes
//! everything, unmounts. The input decides the image, the damage and the operations.

#![no_main]

use fjord_testkit::hostile::mutate::{Bytes, Choices, mutate};
use fjord_testkit::hostile::{base, run_image};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut choices = Bytes(data);
    let index = choices.below(base::COUNT as u64) as usize;
    let base = base::get(index).expect("mke2fs and e2fsck make the sound image");
    let (image, done) = mutate(&base, &mut choices);
    let (_, wrong) = run_image(&image, &mut choices);
    assert!(wrong.is_empty(), "image {}: {done:?}: {wrong:?}", base.name);
});
