//! Images made by fjord-mkfs, judged by e2fsck, dumpe2fs, mke2fs and Linux.

mod compare;
mod kernel;
mod support;
