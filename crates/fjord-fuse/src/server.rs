//! A mounted file system and the loop that serves it.

use std::path::Path;

use fjord::{Error, Fs};
use thiserror::Error;

use crate::{
    engine::EngineHandler,
    mount::{self, FuseOptions, MountError, MountHandle, Mounted},
    session::{Negotiated, Session, SessionError},
    standstill::Standstill,
};

/// Errors of serving.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The mount was not made.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The connection to the kernel failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The engine failed; at the end this means that the image is not clean.
    #[error(transparent)]
    Engine(#[from] Error),
}

/// A file system that is mounted and ready to be served.
///
/// The process that serves it should not use it by its own threads. A thread whose request has been read
/// waits for the answer and ends at no signal; if the process is killed then, the connection stays open
/// with that thread until somebody writes to `/sys/fs/fuse/connections/N/abort`. What this crate itself
/// asks of the mount (umount(2), syncfs(2)) a child process asks.
pub struct Server {
    mounted: Mounted,
    session: Session<EngineHandler>,
    negotiated: Negotiated,
    /// Watches for an error that turns it read-only, if root mounted it for writing.
    watched: Option<Fs>,
}

impl Server {
    /// Mounts `fs`, which was opened from `image`, on `dir`. When this returns the mount stands
    /// and INIT is done; requests wait until [`Server::run`].
    ///
    /// # Errors
    /// See [`ServeError`]. Nothing stays mounted; `fs` stays open and is the caller's to unmount.
    pub fn mount(
        fs: &Fs,
        image: &Path,
        dir: &Path,
        options: &FuseOptions,
    ) -> Result<Server, ServeError> {
        let handler = EngineHandler::new(fs.clone(), options)?;
        let block_size = fs.statfs().block_size;
        let mounted = mount::mount(image, dir, options, block_size, Some(fs))?;
        let config = EngineHandler::session_config(options);
        let session = Session::new(mounted.transport(), handler, config);
        match session.init() {
            Ok(negotiated) => {
                if let Some(lost) = mounted.lost() {
                    fs.warn(lost);
                }
                mounted.set_readahead(negotiated.io_len_max);
                let may_remount = rustix::process::geteuid().is_root() && !options.read_only();
                let watched = may_remount.then(|| fs.clone());
                Ok(Server { mounted, session, negotiated, watched })
            }
            Err(e) => {
                if let Err(error) = mounted.handle().cut() {
                    tracing::error!(%error, "a failed mount could not be unmounted");
                }
                Err(e.into())
            }
        }
    }

    /// A handle to unmount it, from any thread.
    pub fn handle(&self) -> MountHandle {
        self.mounted.handle()
    }

    /// Limitations of this mount, if any; see [`Mounted::lost`].
    pub fn lost(&self) -> Option<&str> {
        self.mounted.lost()
    }

    /// Parameters negotiated with the kernel.
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// Serves until the mount is taken down, then closes the file system.
    ///
    /// # Errors
    /// No worker could be started, or the image could not be left clean.
    pub fn run(self) -> Result<(), ServeError> {
        let dir = self.mounted.handle().mountpoint().to_owned();
        let standstill = self.watched.map(|fs| Standstill::watch(fs, dir));
        let served = self.session.run();
        drop(standstill);
        let closed = self.session.handler().close_result();
        served?;
        match closed {
            Some(Err(e)) => Err(e.into()),
            _ => Ok(()),
        }
    }
}
