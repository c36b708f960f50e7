//! Names, directories and attributes of the engine, judged by the kernel's ext4 and e2fsck.

mod cookies;
mod crash;
mod errors;
mod full;
mod hostile;
mod htree;
mod lockstep;
mod support;
mod threads;
mod xattrs;
