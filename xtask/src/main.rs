//! The developer's commands: test, images, bench.

fn main() {}
