//! What the fuzz targets share: the same checks that the mutation tests of `fjord-format` run.

#[path = "../../crates/fjord-format/tests/exercise/mod.rs"]
pub mod exercise;
