//! Errors of what another process asks the server of a mount for. Owns [`AskError`], and the words of
//! each kind of order.

use std::io;

use thiserror::Error;

/// Kind of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// A copy: [`crate::snapshot`].
    Snapshot,
    /// Growth: [`crate::resize`].
    Resize,
}

impl Asked {
    /// Its name, in messages of the server.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Asked::Snapshot => "snapshot",
            Asked::Resize => "resize",
        }
    }
}

/// Why the server of a mount did not carry out an order.
#[derive(Debug, Error)]
pub enum AskError {
    /// Not a mount of fjord, or served by an older fjord.
    #[error("{}", not_served(*.0))]
    NotServed(Asked),
    /// Another user's mount.
    #[error("{}", not_allowed(*.0))]
    NotAllowed(Asked),
    /// Another order of the kind is being carried out.
    #[error("{}", busy(*.0))]
    Busy(Asked),
    /// The server cannot reach the socket of this process.
    #[error("{}", out_of_reach(*.0))]
    OutOfReach(Asked),
    /// The server ended, or was killed.
    #[error("{}", ended(*.0))]
    Ended(Asked),
    /// An error of the server.
    #[error("{message}")]
    Failed {
        /// What it was asked for.
        asked: Asked,
        /// Its errno.
        errno: i32,
        /// What went wrong and what to do.
        message: String,
    },
    /// Any other failure of this side.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl AskError {
    /// A failure of this side while `doing`.
    pub(crate) fn io<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> AskError {
        move |source| AskError::Io { doing, source: source.into() }
    }
}

fn not_served(asked: Asked) -> &'static str {
    match asked {
        Asked::Snapshot => {
            "not on a fjord mount that supports snapshots; give the directory named to fjord mount"
        }
        Asked::Resize => {
            "not on a fjord mount that can be resized; name the directory given to fjord mount, or \
             unmount the image and name that"
        }
    }
}

fn not_allowed(asked: Asked) -> &'static str {
    match asked {
        Asked::Snapshot => "only root and the user who mounted it may take a snapshot of it",
        Asked::Resize => {
            "only root and the user who mounted it may resize it; run this as one of them"
        }
    }
}

fn busy(asked: Asked) -> String {
    match asked {
        Asked::Snapshot => {
            "another snapshot of it is in progress; try again when it has ended".to_owned()
        }
        Asked::Resize => fjord::resize::ResizeError::Busy.to_string(),
    }
}

fn out_of_reach(asked: Asked) -> &'static str {
    match asked {
        Asked::Snapshot => {
            "the process that serves the mount is in another network namespace; run this command in \
             the namespace of fjord mount"
        }
        Asked::Resize => {
            "the process that serves the mount is in another network namespace, out of reach; run \
             this where fjord mount was run"
        }
    }
}

fn ended(asked: Asked) -> &'static str {
    match asked {
        Asked::Snapshot => "the mount ended during the snapshot; run fjord snapshot on the image",
        Asked::Resize => "the mount ended meanwhile; mount the image again, and run this again",
    }
}
