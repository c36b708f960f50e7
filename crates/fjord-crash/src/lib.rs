//! The crash explorer: records the engine's requests to its device, builds the images that a power
//! cut could leave, recovers each and checks it.
//!
//! - [`ops`], [`model`], [`run`]: workloads, the model that keeps step with them, promises;
//! - [`record`], [`states`], [`image`]: the recorded device and the images of its cuts;
//! - [`tree`], [`check`], [`moment`], [`judge`]: what a recovered image shows and what it must show;
//!   [`panics`]: panics of the engine, as findings;
//! - [`recording`], [`explore`]: all of it together for one workload; [`finding`], [`minimise`],
//!   [`report`]: the results;
//! - [`workloads`], [`edges`], [`journal_how`], [`campaign`], [`command`]: many workloads, and the command line.
//!
//! ```no_run
//! use fjord_crash::explore::{Config, Workload, explore};
//!
//! let config = Config::new(fjord::MountOptions::default());
//! let ops = fjord_crash::ops::parse("create /a; append /a 5000; fsync /a")?;
//! let report = explore(&config, &Workload::new(Vec::new(), ops), &Default::default())?;
//! assert!(report.findings.is_empty(), "{} states: {}", report.states, report.findings[0]);
//! # Ok::<(), anyhow::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod base;
pub mod campaign;
pub mod check;
pub mod command;
pub mod content;
pub mod edges;
pub mod explore;
mod filling;
pub mod finding;
pub mod image;
pub mod journal_how;
pub mod judge;
pub mod minimise;
pub mod model;
pub mod moment;
pub mod ops;
pub mod panics;
pub mod record;
pub mod recording;
pub mod report;
pub mod run;
pub mod states;
pub mod tree;
pub mod workloads;
