//! Trees in images, judged by e2fsck, debugfs and Linux.

mod contents;
mod full;
