//! FUSE over io_uring on this machine.

use std::path::Path;

use anyhow::{Context, Result};

/// Whether the kernel offers it to servers. Only root changes it.
pub const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Has the kernel offer FUSE over io_uring to mounts made from now on; `false`, counted as skipped, if it cannot.
/// Whoever runs the tests restores the parameter.
pub fn is_offered() -> Result<bool> {
    let parameter = Path::new(PARAMETER);
    if !parameter.exists() {
        crate::tools::skipped("FUSE over io_uring", "this kernel has none (Linux 6.14 and later)");
        return Ok(false);
    }
    if std::fs::read_to_string(parameter)?.trim() != "Y" {
        std::fs::write(parameter, "Y").with_context(|| format!("{PARAMETER}: root is needed"))?;
    }
    Ok(true)
}
