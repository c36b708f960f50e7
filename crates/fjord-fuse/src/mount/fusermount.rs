//! Mounting without privileges, through the set-user-ID helper `fusermount3`.

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Names under which distributions install the helper.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];

/// Mounts through the helper, and receives the descriptor of /dev/fuse from it.
///
/// # Errors
/// The helper is missing (`NotFound`), or refused; its own message is in the error.
pub(super) fn mount(mountpoint: &Path, options: &str) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    let theirs_fd = theirs.as_raw_fd();
    let mut command = helper_command(|command| {
        command.arg("-o").arg(options).arg("--").arg(mountpoint);
        command.env("_FUSE_COMMFD", theirs_fd.to_string());
        // SAFETY: between fork and exec only fcntl is called, which is async-signal-safe.
        unsafe {
            command.pre_exec(move || match libc::fcntl(theirs_fd, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
    })?;
    drop(theirs);
    let received = receive_fd(&ours);
    let output = wait(&mut command)?;
    match received {
        Ok(Some(fd)) => Ok(fd),
        Ok(None) => Err(io::Error::other(output)),
        Err(e) => Err(e),
    }
}

/// Unmounts a mount that this user owns.
///
/// # Errors
/// As [`mount`]; a busy mount is `ResourceBusy`.
pub(super) fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { "-uz" } else { "-u" };
    let mut child = helper_command(|command| {
        command.arg(flags).arg("--").arg(mountpoint);
    })?;
    let message = wait(&mut child)?;
    match child.wait()? {
        status if status.success() => Ok(()),
        _ if message.contains("busy") => Err(io::ErrorKind::ResourceBusy.into()),
        _ => Err(io::Error::other(message)),
    }
}

fn helper_command(configure: impl Fn(&mut Command)) -> io::Result<std::process::Child> {
    let mut last = io::ErrorKind::NotFound.into();
    for helper in HELPERS {
        let mut command = Command::new(OsStr::new(helper));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        configure(&mut command);
        match command.spawn() {
            Ok(child) => return Ok(child),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Waits for the helper; returns its message, one line.
fn wait(child: &mut std::process::Child) -> io::Result<String> {
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        io::Read::read_to_string(&mut stderr, &mut said)?;
    }
    child.wait()?;
    Ok(said.trim().replace('\n', "; "))
}

/// The descriptor that the helper sends, or `None` if it closes its end without one.
fn receive_fd(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8; 1];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return Ok(fds.next());
        }
    }
    Ok(None)
}
