//! Snapshots of a mount, requested by another process. Owns the protocol; this file has the client
//! side, `server` that of the mount.
//!
//! 1. The client listens on an abstract Unix socket and passes its name and a secret in an ioctl on
//!    any file of the mount. The server checks the caller and connects, or refuses with an errno.
//! 2. The server sends the secret, so that no other process gets the file.
//! 3. The client sends an order, and the file for the copy as a descriptor.
//! 4. The server sends the outcome and hangs up. If the client hangs up before, the snapshot is
//!    cancelled.
//!
//! The ioctl returns at once: a FUSE request in progress cannot be interrupted, not even by
//! SIGKILL. The file is a descriptor opened by the client, so that the server, which may be root,
//! cannot write a file that the client may not write.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use fjord::snapshot::{Reflink, SnapshotReport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, sendmsg, socket_with,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

mod server;

pub(crate) use server::SnapshotServer;

/// Version of the protocol.
const VERSION: u32 = 1;
/// The largest message, in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;
/// Timeout of each side while they connect.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);

/// The argument of the ioctl.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Call {
    version: u32,
    reserved: u32,
    /// Names the socket.
    name: [u8; 16],
    secret: [u8; 16],
}

/// `_IOW('J', 2, Call)`.
pub(crate) const FJORD_IOC_SNAPSHOT: u32 =
    1 << 30 | (size_of::<Call>() as u32) << 16 | 0x4a << 8 | 2;

impl Call {
    fn new() -> io::Result<Call> {
        let mut random = [0; 32];
        io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut random)?;
        let (name, secret) = random.split_at(16);
        let mut call = Call { version: VERSION, reserved: 0, name: [0; 16], secret: [0; 16] };
        call.name.copy_from_slice(name);
        call.secret.copy_from_slice(secret);
        Ok(call)
    }

    fn address(&self) -> io::Result<SocketAddrUnix> {
        let hex: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(SocketAddrUnix::new_abstract_name(format!("fjord-snapshot-{hex}").as_bytes())?)
    }
}

/// The order.
#[derive(Serialize, Deserialize)]
struct Order {
    /// See [`Reflink::name`].
    reflink: String,
}

/// The outcome.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Done {
        size_bytes: u64,
        copied_bytes: u64,
        reflinked: bool,
        pause_us: u64,
        held_count: u64,
        mode: u32,
        image_dev: u64,
        image_ino: u64,
    },
    Failed {
        errno: i32,
        message: String,
    },
}

impl From<&SnapshotReport> for Outcome {
    fn from(report: &SnapshotReport) -> Outcome {
        Outcome::Done {
            size_bytes: report.size_bytes,
            copied_bytes: report.copied_bytes,
            reflinked: report.reflinked,
            pause_us: u64::try_from(report.pause.as_micros()).unwrap_or(u64::MAX),
            held_count: report.held_count,
            mode: report.mode,
            image_dev: report.image.0,
            image_ino: report.image.1,
        }
    }
}

impl Outcome {
    fn into_result(self) -> Result<SnapshotReport, AskError> {
        match self {
            Outcome::Done {
                size_bytes,
                copied_bytes,
                reflinked,
                pause_us,
                held_count,
                mode,
                image_dev,
                image_ino,
            } => Ok(SnapshotReport {
                size_bytes,
                copied_bytes,
                reflinked,
                pause: Duration::from_micros(pause_us),
                held_count,
                mode,
                image: (image_dev, image_ino),
            }),
            Outcome::Failed { errno, message } => Err(AskError::Failed { errno, message }),
        }
    }
}

/// Errors of a snapshot of a mount.
#[derive(Debug, Error)]
pub enum AskError {
    /// Not a mount of fjord, or served by an older fjord.
    #[error(
        "not on a fjord mount that supports snapshots; give the directory named to fjord mount"
    )]
    NotServed,
    /// Another user's mount.
    #[error("only root and the user who mounted it may take a snapshot of it")]
    NotAllowed,
    /// Another snapshot is in progress.
    #[error("another snapshot of it is in progress; try again when it has ended")]
    Busy,
    /// The server cannot reach the socket of this process.
    #[error(
        "the process that serves the mount is in another network namespace; run this command in \
         the namespace of fjord mount"
    )]
    OutOfReach,
    /// The server ended, or was killed.
    #[error("the mount ended during the snapshot; run fjord snapshot on the image")]
    Ended,
    /// An error of the server.
    #[error("{message}")]
    Failed {
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

fn io_error<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> AskError {
    move |source| AskError::Io { doing, source: source.into() }
}

/// Has the server of the mount copy its image to `out`, an empty regular file open for writing.
/// `dir` is any file or directory of the mount; while it is open, the mount is busy for umount(2).
/// The copy is neither recovered nor durable; see [`fjord::Fs::snapshot_to`].
///
/// # Errors
/// See [`AskError`]; `out` holds anything then.
pub fn ask(dir: &File, out: &File, reflink: Reflink) -> Result<SnapshotReport, AskError> {
    let call = Call::new().map_err(io_error("/dev/urandom"))?;
    let listener = listening(&call).map_err(io_error("cannot listen for the server"))?;
    announce(dir, &call)?;
    let socket = accept_server(&listener, &call).map_err(io_error("no answer from the server"))?;
    drop(listener);
    let order = Order { reflink: reflink.name().into() };
    send_order(&socket, &order, out).map_err(io_error("cannot reach the server"))?;
    let mut message = [0; MESSAGE_BYTES_MAX];
    let received = rustix::io::retry_on_intr(|| recv(&socket, &mut message, RecvFlags::empty()));
    let len = match received {
        Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return Err(AskError::Ended),
        Ok((len, _)) => len,
        Err(error) => return Err(io_error("no answer from the server")(error)),
    };
    let outcome: Outcome = serde_json::from_slice(&message[..len])
        .map_err(|e| io_error("invalid answer from the server")(io::Error::from(e)))?;
    outcome.into_result()
}

fn listening(call: &Call) -> io::Result<OwnedFd> {
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&listener, &call.address()?)?;
    listen(&listener, 4)?;
    Ok(listener)
}

/// Tells the server where to connect to.
fn announce(dir: &File, call: &Call) -> Result<(), AskError> {
    // SAFETY: the number says that as many bytes are read as `call` has, and it lives for the call.
    let rc = unsafe {
        libc::ioctl(dir.as_raw_fd(), FJORD_IOC_SNAPSHOT as libc::Ioctl, std::ptr::from_ref(call))
    };
    if rc >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::ENOTTY | libc::ENOSYS | libc::EINVAL) => AskError::NotServed,
        Some(libc::EPERM) => AskError::NotAllowed,
        Some(libc::EBUSY) => AskError::Busy,
        Some(libc::ECONNREFUSED) => AskError::OutOfReach,
        Some(libc::ENOTCONN) => AskError::Ended,
        _ => AskError::Io { doing: "cannot request a snapshot", source: error },
    })
}

/// The connection that sends the secret. Names of abstract sockets are public.
fn accept_server(listener: &OwnedFd, call: &Call) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + GREETING_TIME_MAX;
    loop {
        wait_readable(listener, deadline)?;
        let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
        // The server has already sent the secret; another process gets one second.
        let greeted = wait_readable(&socket, deadline.min(Instant::now() + Duration::from_secs(1)));
        let mut secret = [0; 17];
        if greeted.is_ok()
            && matches!(recv(&socket, &mut secret, RecvFlags::DONTWAIT), Ok((16, _)))
            && secret[..16] == call.secret
        {
            return Ok(socket);
        }
    }
}

/// Waits until a socket has something to read, or has hung up.
fn wait_readable(socket: &impl AsFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn send_order(socket: &OwnedFd, order: &Order, out: &File) -> io::Result<()> {
    let text = serde_json::to_vec(order)?;
    let fds = [out.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(socket, &[io::IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
