//! Bytes to types and back for ext4, ext2/3 and JBD2: no I/O, no unsafe.
