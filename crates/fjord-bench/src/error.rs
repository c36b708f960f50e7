//! Errors of the benchmarks.

use std::io;
use std::path::PathBuf;

/// Why a benchmark could not run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The target needs privileges.
    #[error("{target} needs root to mount; run as root, or omit it from --targets")]
    NotRoot {
        /// The target's name.
        target: String,
    },
    /// A program that the target needs is not installed.
    #[error("{program} is not installed ({source}); install it, or omit the targets that need it")]
    MissingProgram {
        /// The program.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program failed.
    #[error("{command} failed: {message}")]
    Command {
        /// The command line.
        command: String,
        /// Its standard error.
        message: String,
    },
    /// A file system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, on which target.
        what: String,
        /// The error.
        source: io::Error,
    },
    /// The options make no sense.
    #[error("{0}")]
    Usage(String),
    /// No space for the images.
    #[error("{} has {free_bytes} bytes free, the images need {needed_bytes}; choose another directory or a smaller size", dir.display())]
    NoSpace {
        /// Where the images were to be made.
        dir: PathBuf,
        /// Bytes free there.
        free_bytes: u64,
        /// Bytes needed.
        needed_bytes: u64,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

/// The result of benchmark calls.
pub type Result<T> = std::result::Result<T, BenchError>;

impl BenchError {
    /// For `map_err` on I/O results.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> BenchError {
        let what = what.into();
        move |source| BenchError::Io { what, source }
    }
}
