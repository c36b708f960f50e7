//! How a command reaches the process that serves a mount. Owns the handshake and the messages of both
//! sides.
//!
//! 1. The client listens on an abstract Unix socket and passes its name and a secret in an ioctl on
//!    any file of the mount. The server checks the caller and connects, or refuses with an errno.
//! 2. The server sends the secret, so that no other process gets the order.
//! 3. The client sends an order, the server its outcome, each a message in JSON.
//!
//! The ioctl returns at once: a FUSE request in progress cannot be interrupted, not even by
//! SIGKILL.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, connect, listen, recv, send, socket_with,
};
use serde::{Serialize, de::DeserializeOwned};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ask::{AskError, Asked};
use crate::reply::Errno;

/// Version of the protocol.
const VERSION: u32 = 1;
/// The largest message, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 4096;
/// Timeout of each side while they connect.
pub(crate) const GREETING_TIME_MAX: Duration = Duration::from_secs(10);

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

const fn ioctl_number(number: u32) -> u32 {
    1 << 30 | (size_of::<Call>() as u32) << 16 | 0x4a << 8 | number
}

/// `_IOW('J', 2, Call)`.
pub(crate) const FJORD_IOC_SNAPSHOT: u32 = ioctl_number(2);
/// `_IOW('J', 3, Call)`.
pub(crate) const FJORD_IOC_RESIZE: u32 = ioctl_number(3);

fn ioctl(asked: Asked) -> u32 {
    match asked {
        Asked::Snapshot => FJORD_IOC_SNAPSHOT,
        Asked::Resize => FJORD_IOC_RESIZE,
    }
}

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

    /// Refuses a client with another version of the protocol.
    pub(crate) fn check_version(&self) -> Result<(), Errno> {
        if self.version == VERSION { Ok(()) } else { Err(Errno(libc::EINVAL)) }
    }

    /// Connects to an authorised client, and greets it in a thread of its own, which carries out the
    /// order by `serve`.
    pub(crate) fn serve(
        &self,
        asked: Asked,
        serve: impl FnOnce(&OwnedFd) -> io::Result<()> + Send + 'static,
    ) -> Result<(), Errno> {
        let failed = |error: io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
        let (socket, secret) = (self.connect().map_err(failed)?, self.secret);
        let run = move || {
            let greeted = send(&socket, &secret, SendFlags::NOSIGNAL).map_err(Into::into);
            if let Err(error) = greeted.and_then(|_| serve(&socket)) {
                tracing::warn!(%error, "cannot answer the client of a {}", asked.name());
            }
        };
        let thread = thread::Builder::new().name(format!("fjord-{}", asked.name()));
        thread.spawn(run).map(drop).map_err(failed)
    }

    /// A connection to the client. Does not block: the client may have filled its own queue.
    fn connect(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &self.address()?)?;
        Ok(socket)
    }

    fn address(&self) -> io::Result<SocketAddrUnix> {
        let hex: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(SocketAddrUnix::new_abstract_name(format!("fjord-snapshot-{hex}").as_bytes())?)
    }
}

/// A connection to the server of the mount that `dir` lies on.
pub(crate) fn reach(dir: &File, asked: Asked) -> Result<OwnedFd, AskError> {
    let call = Call::new().map_err(AskError::io("/dev/urandom"))?;
    let listener = listening(&call).map_err(AskError::io("cannot listen for the server"))?;
    announce(dir, asked, &call)?;
    accept_server(&listener, &call).map_err(AskError::io("no answer of the server"))
}

/// Waits for the outcome.
pub(crate) fn answer<T: DeserializeOwned>(socket: &OwnedFd, asked: Asked) -> Result<T, AskError> {
    let mut message = [0; MESSAGE_BYTES_MAX];
    let received = rustix::io::retry_on_intr(|| recv(socket, &mut message, RecvFlags::empty()));
    let len = match received {
        Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return Err(AskError::Ended(asked)),
        Ok((len, _)) => len,
        Err(error) => return Err(AskError::io("no answer of the server")(error)),
    };
    serde_json::from_slice(&message[..len])
        .map_err(|e| AskError::io("an answer that makes no sense")(io::Error::from(e)))
}

/// Sends a message. Somebody who has gone does not want it any more.
pub(crate) fn tell(socket: &OwnedFd, message: &impl Serialize) -> io::Result<()> {
    match send(socket, &serde_json::to_vec(message)?, SendFlags::NOSIGNAL) {
        Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Ok(()),
        other => other.map(drop).map_err(Into::into),
    }
}

fn listening(call: &Call) -> io::Result<OwnedFd> {
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&listener, &call.address()?)?;
    listen(&listener, 4)?;
    Ok(listener)
}

/// Tells the server where to connect to.
fn announce(dir: &File, asked: Asked, call: &Call) -> Result<(), AskError> {
    // SAFETY: the number says that as many bytes are read as `call` has, and it lives for the call.
    let rc = unsafe {
        libc::ioctl(dir.as_raw_fd(), ioctl(asked) as libc::Ioctl, std::ptr::from_ref(call))
    };
    if rc >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::ENOTTY | libc::ENOSYS | libc::EINVAL) => AskError::NotServed(asked),
        Some(libc::EPERM) => AskError::NotAllowed(asked),
        Some(libc::EBUSY) => AskError::Busy(asked),
        Some(libc::ECONNREFUSED) => AskError::OutOfReach(asked),
        Some(libc::ENOTCONN | libc::ECONNABORTED) => AskError::Ended(asked),
        _ => AskError::Io { doing: "cannot ask the server", source: error },
    })
}

/// The connection of whoever knows the secret. Names of abstract sockets are public.
fn accept_server(listener: &OwnedFd, call: &Call) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + GREETING_TIME_MAX;
    loop {
        wait_readable(listener, deadline)?;
        let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
        // A stranger has a second, the server has sent it already.
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
pub(crate) fn wait_readable(socket: &impl AsFd, deadline: Instant) -> io::Result<()> {
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
