//! Hostile images, failing devices, and images that somebody else uses.

mod faults;
mod images;
mod mmp;
mod workload;

use fjord_testkit::hostile::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
