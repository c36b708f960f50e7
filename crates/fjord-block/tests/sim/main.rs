//! Tests of the modelled devices: their times, queues and power cuts, alone and below the scheduler.

mod cut;
mod device;
mod epochs;
mod latency;
mod lazy_cache;
mod timing;
