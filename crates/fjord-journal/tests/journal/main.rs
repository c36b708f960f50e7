//! The journal against models, crashes and real tools. One binary, so that the rig is
//! compiled once.

mod areas;
mod basic;
mod cooperative;
mod crash;
mod failed;
mod fast_commits;
mod freed;
mod history;
mod last_changes;
mod log_start;
mod modules;
mod open_barriers;
mod parts;
mod parts_crash;
mod requests;
mod rig;
mod threads;
mod usage;
