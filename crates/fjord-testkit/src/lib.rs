//! Test support for fjord: what the tests of several crates share.
//!
//! - [`tools`]: the machine's programs, and what happens when one is missing.
//! - [`shell`]: the same for tests that panic.
//! - [`features`]: the mke2fs feature sets that interoperation is shown for.
//! - [`image`]: scratch directories, sparse copies, kernel mounts, e2fsck and debugfs.
//! - [`kernel_log`]: why the kernel refuses an image.
//! - [`manifest`]: everything a user can see of a tree, as a value that can be compared.
//! - [`script`]: a seeded script of varied operations, run by the kernel or by fjord.
//! - [`ceph`]: a Ceph cluster on this machine; [`failover`]: an image there goes from host to host;
//!   [`cluster_faults`]: the cluster fails under a mount;
//!   [`network`]: hosts of their own; [`cuts`]: one of them is cut off.
//! - [`size`]: how much of its matrices a test covers.
//! - [`side_by_side`]: the same steps on a fjord mount and on the kernel's ext4.
//! - [`fsx`]: a model checker for one file.
//! - [`fast_commits`]: images with fast commits, left by the kernel.
//! - [`gate_device`]: a device whose answers a test holds back, and whose requests fail.
//! - [`hostile`]: damaged images and what the engine does with them.
//! - [`programs`]: SQLite and the usual ways of making files durable, killed and judged.
//! - [`numbered`]: writers whose fsyncs a copy of one moment must hold.
//! - [`model`], [`stress`]: a file system in memory, and many threads compared with it.
//!
//! The judge is always a tool that is not fjord: e2fsck, debugfs, the kernel's own ext4.

pub mod ceph;
pub mod cluster_faults;
pub mod cuts;
pub mod dirty;
pub mod engine_file;
pub mod failover;
pub mod fast_commits;
pub mod features;
pub mod fjord_mount;
pub mod fsx;
pub mod gate_device;
pub mod hostile;
pub mod image;
pub mod io_uring;
pub mod kernel_log;
pub mod kill9;
pub mod manifest;
pub mod model;
pub mod network;
pub mod numbered;
pub mod on_cluster;
pub mod order_log;
pub mod programs;
pub mod promise;
pub mod rng;
pub mod script;
pub mod shell;
pub mod side_by_side;
pub mod size;
pub mod stress;
pub mod tools;
pub mod workloads;

/// The programs of the library's guide must compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct LibraryGuide;
