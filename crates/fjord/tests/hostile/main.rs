//! Hostile images, failing devices, and images that somebody else uses.

mod faults;
mod full;
mod images;
mod mmp;
mod truncated;
mod workload;

use fjord_testkit::hostile::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
