//! The formatter: ext4 images as mke2fs makes them, without root.
