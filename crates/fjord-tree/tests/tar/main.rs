//! Tar streams in images: what is in the stream must be what Linux sees, and e2fsck must find the
//! image clean, whatever the stream was.

mod access_lists;
mod compressed;
mod differential;
mod ends;
mod exercise;
mod formats;
mod layers;
mod links;
mod maker;
mod mutated;
mod round_trip;
mod support;

use fjord_testkit::hostile::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
