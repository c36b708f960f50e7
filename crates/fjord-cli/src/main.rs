//! The `fjord` command.

fn main() {}
