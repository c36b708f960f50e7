//! A model check of the commit pipeline: the journal's own code, every interleaving of a few threads
//! within bounds.
//!
//! `cargo test -p fjord-journal --features model --test pipeline_model -- --nocapture` prints how
//! many there were. What is checked, and what is not: docs/commit-pipeline.md.

mod cases;
mod device;
mod explore;
#[cfg(feature = "plant")]
mod races;
mod world;
