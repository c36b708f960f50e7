//! A user-space ext4 engine.
