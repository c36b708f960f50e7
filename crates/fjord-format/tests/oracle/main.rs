//! What Linux and e2fsprogs wrote, read with this crate; what this crate writes, compared with
//! what they write. Needs root (loop mounts) and the packages e2fsprogs and mount.

mod acl;
#[path = "../exercise/mod.rs"]
pub mod exercise;
mod fs_image;
mod hash;
mod htree;
mod inline_data;
mod mutation;
mod orphan_file;
mod xattr;
