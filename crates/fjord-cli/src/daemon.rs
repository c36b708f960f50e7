//! Forking into the background once the mount is complete.
//!
//! The parent waits for one message from the child: mounted, or an error. It ends with the child's
//! exit code and message, so that mount(8) and scripts see failures.

use std::{
    fs::File,
    io::{Read, Write, pipe},
};

use crate::failure::{Failure, Result};

/// Which side of the fork this is.
pub(crate) enum Side {
    /// The parent: the mount is complete.
    Parent,
    /// The child, which serves; it must call [`Ready::announce`].
    Child(Ready),
}

/// The child's obligation to report the outcome of its start.
pub(crate) struct Ready(std::io::PipeWriter);

/// Forks. Call it before any thread is started.
pub(crate) fn fork() -> Result<Side> {
    let (mut reader, writer) = pipe()?;
    // SAFETY: the process has one thread, so the child is not restricted to async-signal-safe
    // calls.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => {
            drop(reader);
            rustix::process::setsid().map_err(std::io::Error::from)?;
            Ok(Side::Child(Ready(writer)))
        }
        _ => {
            drop(writer);
            let mut message = Vec::new();
            reader.read_to_end(&mut message)?;
            match message.split_first() {
                Some((0, _)) => Ok(Side::Parent),
                Some((code, text)) => Err(Failure {
                    code: *code,
                    message: String::from_utf8_lossy(text).into_owned(),
                }),
                None => Err(Failure::new("the daemon ended before the mount was complete")),
            }
        }
    }
}

impl Ready {
    /// Reports the outcome to the parent; on success releases the terminal and the working
    /// directory. On failure it ends the process: the parent prints the message.
    pub(crate) fn announce(mut self, outcome: &Result<()>) -> Result<()> {
        match outcome {
            Ok(()) => {
                std::env::set_current_dir("/")?;
                let null = File::options().read(true).write(true).open("/dev/null")?;
                rustix::stdio::dup2_stdin(&null).map_err(std::io::Error::from)?;
                rustix::stdio::dup2_stdout(&null).map_err(std::io::Error::from)?;
                rustix::stdio::dup2_stderr(&null).map_err(std::io::Error::from)?;
                self.0.write_all(&[0])?;
            }
            Err(failure) => {
                self.0.write_all(&[failure.code])?;
                self.0.write_all(failure.message.as_bytes())?;
                std::process::exit(failure.code.into());
            }
        }
        Ok(())
    }
}
