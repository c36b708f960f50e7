//! The backends under test.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use fjord_block::{Device, Engine, FileDevice, FileOptions, MemDevice};

/// Every backend of the crate, by name.
pub(crate) const BACKENDS: [&str; 5] =
    ["mem", "uring-direct", "uring-buffered", "plain-direct", "plain-buffered"];

/// Options for a file backend of [`BACKENDS`].
pub(crate) fn options(backend: &str) -> FileOptions {
    let engine = if backend.starts_with("uring") { Engine::Uring } else { Engine::Plain };
    FileOptions { engine, direct: backend.ends_with("direct"), ..FileOptions::default() }
}

/// Makes an image file of zeroes.
pub(crate) fn make_image(path: &Path, size_bytes: u64) {
    File::create(path).unwrap().set_len(size_bytes).unwrap();
}

/// Opens a new device of a backend; files lie in `dir`.
pub(crate) fn open_new(backend: &str, dir: &Path, size_bytes: u64) -> Arc<dyn Device> {
    if backend == "mem" {
        return Arc::new(MemDevice::new(size_bytes));
    }
    let path = dir.join(backend);
    make_image(&path, size_bytes);
    Arc::new(FileDevice::open(&path, &options(backend)).unwrap())
}
