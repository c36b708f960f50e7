//! Failures of commands: a message that says what to do, and an exit code.

use std::{fmt, path::Path};

use fjord::Error;
use fjord_block::{OpenError, SnapshotError};
use fjord_format::FormatError;
use fjord_fuse::{
    AskError, Asked, ServeError,
    mount::{MountError, OptionError},
};

/// Failed.
pub(crate) const EXIT_FAILURE: u8 = 1;
/// Wrong arguments.
pub(crate) const EXIT_USAGE: u8 = 2;
/// The image or mount point is in use.
pub(crate) const EXIT_IN_USE: u8 = 3;
/// The image is damaged.
pub(crate) const EXIT_DAMAGED: u8 = 4;
/// The image has a feature that is not supported.
pub(crate) const EXIT_UNSUPPORTED: u8 = 5;
/// Done, except for what is listed.
pub(crate) const EXIT_INCOMPLETE: u8 = 6;

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Exit code of the process.
    pub(crate) code: u8,
    /// What went wrong and what to do.
    pub(crate) message: String,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Failure {
        Failure { code: EXIT_FAILURE, message: message.into() }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure { code: EXIT_USAGE, message: message.into() }
    }

    /// Done, except for losses that were listed.
    pub(crate) fn incomplete(message: impl Into<String>) -> Failure {
        Failure { code: EXIT_INCOMPLETE, message: message.into() }
    }

    /// The same; the cause is damage in the image.
    pub(crate) fn of_damage(self) -> Failure {
        Failure { code: EXIT_DAMAGED, ..self }
    }

    /// Puts the name of the image before a message about what is in the image, if it does not have it yet.
    pub(crate) fn of_image(self, image: Option<&Path>) -> Failure {
        let Some(image) = image.filter(|_| matches!(self.code, EXIT_DAMAGED | EXIT_UNSUPPORTED))
        else {
            return self;
        };
        let image = image.display().to_string();
        if self.message.contains(&image) { self } else { self.context(image) }
    }

    pub(crate) fn in_use(message: impl Into<String>) -> Failure {
        Failure { code: EXIT_IN_USE, message: message.into() }
    }

    /// Puts the failed step before the message.
    pub(crate) fn context(self, doing: impl fmt::Display) -> Failure {
        Failure { message: format!("{doing}: {}", self.message), ..self }
    }
}

/// Adds the failed step to an error.
pub(crate) trait Context<T> {
    fn context(self, doing: impl fmt::Display) -> Result<T>;
}

impl<T, E: Into<Failure>> Context<T> for Result<T, E> {
    fn context(self, doing: impl fmt::Display) -> Result<T> {
        self.map_err(|e| e.into().context(doing))
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        let code = match &e {
            Error::Corrupt { .. } => EXIT_DAMAGED,
            Error::Incompatible { .. } => EXIT_UNSUPPORTED,
            Error::Open(open) => match **open {
                OpenError::InUse { .. } => EXIT_IN_USE,
                OpenError::NotADevice { .. } => EXIT_USAGE,
                _ => EXIT_FAILURE,
            },
            Error::Snapshot(failed) if matches!(**failed, SnapshotError::Busy) => EXIT_IN_USE,
            Error::Resize(refused) => resize_code(refused.errno()),
            _ => EXIT_FAILURE,
        };
        let hint = match e.errno() {
            _ if matches!(e, Error::NoRoom(_) | Error::Snapshot(_) | Error::Resize(_)) => "",
            libc::ENOSPC => {
                "; the image, or the file system that holds it, is full: free space or use a \
                 larger one"
            }
            libc::EMLINK => {
                "; ext4 allows a file 65,000 names, and without dir_nlink a directory as many \
                 subdirectories: make a copy in place of the link"
            }
            libc::EROFS if !matches!(e, Error::Open(_)) => {
                "; the image is read-only since an earlier error: unmount it and run e2fsck -f"
            }
            _ if matches!(e, Error::Io(_)) => {
                "; changes before the last fsync are safe: check the device (dmesg), then run \
                 `fjord recover`"
            }
            _ => "",
        };
        Failure { code, message: format!("{e}{hint}") }
    }
}

impl From<FormatError> for Failure {
    fn from(e: FormatError) -> Failure {
        Error::from(e).into()
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Failure {
        Failure::new(e.to_string())
    }
}

impl From<MountError> for Failure {
    fn from(e: MountError) -> Failure {
        let code = match e {
            MountError::Engine(e) => return e.into(),
            MountError::AlreadyMounted { .. } | MountError::Busy(_) | MountError::Dead(_) => {
                EXIT_IN_USE
            }
            _ => EXIT_FAILURE,
        };
        Failure { code, message: e.to_string() }
    }
}

impl From<OptionError> for Failure {
    fn from(e: OptionError) -> Failure {
        Failure::usage(e.to_string())
    }
}

/// The exit code of a size that is not to be had, by the number of the error.
fn resize_code(errno: i32) -> u8 {
    match errno {
        libc::EINVAL => EXIT_USAGE,
        libc::EBUSY => EXIT_IN_USE,
        libc::EOPNOTSUPP => EXIT_UNSUPPORTED,
        libc::EUCLEAN => EXIT_DAMAGED,
        _ => EXIT_FAILURE,
    }
}

impl From<AskError> for Failure {
    fn from(e: AskError) -> Failure {
        let code = match &e {
            AskError::Busy(_) => EXIT_IN_USE,
            AskError::Failed { asked: Asked::Resize, errno, .. } => resize_code(*errno),
            AskError::Failed { asked: Asked::Snapshot, errno: libc::EBUSY, .. } => EXIT_IN_USE,
            _ => EXIT_FAILURE,
        };
        Failure { code, message: e.to_string() }
    }
}

impl From<ServeError> for Failure {
    fn from(e: ServeError) -> Failure {
        match e {
            ServeError::Mount(e) => e.into(),
            ServeError::Engine(e) => e.into(),
            ServeError::Session(e) => Failure::new(e.to_string()),
        }
    }
}

/// A failure to open an image, with its path.
pub(crate) fn open_failed(image: &Path, error: Error) -> Failure {
    if let Error::Open(open) = &error {
        if let OpenError::Os { source, .. } = &**open {
            let what = match source.kind() {
                std::io::ErrorKind::NotFound => {
                    "does not exist; check the path, or make it with `fjord mkfs`"
                }
                std::io::ErrorKind::PermissionDenied => {
                    "cannot be opened: no permission; check its owner and mode, or open it \
                     read-only"
                }
                _ => return Failure::from(error),
            };
            return Failure::new(format!("{} {what}", image.display()));
        }
        return Failure::from(error);
    }
    let hint = match &error {
        Error::NotExt4(contents) => contents
            .usable_partition()
            .map(|number| format!(", such as `fjord ls {}@{number}`", image.display())),
        _ => None,
    };
    let Failure { code, message } = Failure::from(error).context(image.display());
    Failure { code, message: message + &hint.unwrap_or_default() }
}
