//! The FUSE front end: the protocol, the transport, the mount, and the mapping to the engine.
//!
//! Layers, each knowing only those before it:
//! - [`abi`]: the structures on the wire; [`request`] and [`reply`]: their parsing and building;
//! - [`transport`]: how they are transported (/dev/fuse, io_uring; open to virtiofs);
//! - `lane`: how many workers a queue of requests has;
//! - [`session`]: INIT, worker threads, the end;
//! - [`mount`]: mount(2), `fusermount3`, loop devices, options;
//! - [`engine`]: requests carried out by [`fjord::Fs`];
//! - `child`: system calls that wait for the server itself;
//! - `call`: how a command finds the server of a mount; [`AskError`]: what may go wrong;
//! - [`Server`]: all of it together;
//! - [`stats`]: counters of a mount, for other processes;
//! - [`resize`]: growth of a mount, for other processes;
//! - [`snapshot`]: a copy of the image of a mount, for other processes;
//! - [`device_file`]: a device as a file;
//! - [`sim`]: a modelled device as a file, over the same protocol and session.
//!
//! Why this is written here and no FUSE crate is used: `docs/decisions/0001-fuse-layer.md`.

pub mod abi;
mod ask;
mod call;
mod child;
pub mod device_file;
pub mod engine;
mod lane;
pub mod mount;
pub mod reply;
pub mod request;
pub mod resize;
pub mod session;
pub mod sim;
pub mod snapshot;
mod standstill;
pub mod stats;
pub mod transport;

mod server;

pub use ask::{AskError, Asked};
pub use server::{ServeError, Server};
