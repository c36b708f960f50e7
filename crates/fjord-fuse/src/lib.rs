//! The FUSE front end.
