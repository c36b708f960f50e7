//! Tests of the block layer from outside, in one program. What measures the memory of the whole
//! process is in `pool`.

mod backends;
mod closing;
mod epoch_device;
mod epoch_failures;
mod epoch_rules;
mod epoch_waits;
mod faults;
mod loop_device;
mod model;
mod room;
mod snapshot;
