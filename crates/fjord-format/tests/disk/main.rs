//! fjord-format against e2fsprogs and against hostile bytes.

mod mke2fs;
mod round_trip;
mod support;
