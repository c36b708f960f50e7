//! The transport over /dev/fuse: one read(2) per request, one writev(2) per reply.
//!
//! A worker that sleeps in read(2) is woken on another processor than the caller's, which takes
//! longer than most requests do, above all in a virtual machine. So during a rapid sequence of
//! requests, one worker polls for a moment before it sleeps; see [`Polling`].

use std::{
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    sync::Arc,
};

use fjord_block::lock::{Mutex, Rank};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use super::duty::{Duty, Turn};
use super::fuse_fd::FuseFd;
use super::polling::Polling;
use super::uring::{self, RingChannel};
use super::{Channel, Queue, ReplyPath, RequestBuf, Transport};
use crate::abi::FUSE_DEV_IOC_CLONE;
use crate::request::parse_header;

/// The device that a connection is opened through.
pub const DEV_FUSE: &str = "/dev/fuse";

/// A mounted connection over /dev/fuse.
#[derive(Debug)]
pub struct DevFuse {
    /// The descriptor that was given to mount(2). Gone once the connection was aborted.
    fd: Mutex<Option<Arc<FuseFd>>>,
    /// The kernel's number of the connection, once the mount is known.
    connection: Mutex<Option<u64>>,
    polling: Arc<Polling>,
    /// Of the rings' workers.
    ring_polling: Arc<Polling>,
    duty: Arc<Duty>,
}

impl DevFuse {
    /// Takes over a descriptor of /dev/fuse that is, or will be, mounted.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn new(fd: OwnedFd) -> io::Result<DevFuse> {
        Ok(DevFuse {
            fd: Mutex::new(Rank::FuseFd, Some(Arc::new(FuseFd::new(fd)?))),
            connection: Mutex::new(Rank::FuseConnection, None),
            polling: Arc::default(),
            ring_polling: Arc::default(),
            duty: Arc::default(),
        })
    }

    /// Opens /dev/fuse, not yet mounted.
    ///
    /// # Errors
    /// As open(2): the module is not loaded, or permission is missing.
    pub fn open() -> io::Result<DevFuse> {
        DevFuse::new(File::options().read(true).write(true).open(DEV_FUSE)?.into())
    }

    /// The descriptor to hand to mount(2).
    ///
    /// # Errors
    /// ENOTCONN after [`Transport::abort`].
    pub fn fd(&self) -> io::Result<Arc<FuseFd>> {
        self.fd.lock().clone().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTCONN))
    }

    /// Sets the connection's number, from the device number of the mounted root directory.
    pub fn set_connection(&self, root_dev: u64) {
        let minor = libc::minor(root_dev);
        let major = libc::major(root_dev);
        // The kernel names a connection by the low 32 bits of its internal device number.
        *self.connection.lock() = Some((u64::from(major) << 20) | u64::from(minor));
    }
}

impl Transport for DevFuse {
    fn channel(&self, queue: Queue, write_len_max: usize) -> io::Result<Box<dyn Channel>> {
        let session = self.fd()?;
        if let Queue::Ring(number) = queue {
            let polling = self.ring_polling.clone();
            return Ok(Box::new(RingChannel::new(session, number, write_len_max, polling)?));
        }
        let sleeping = match clone_device(&session, 0)? {
            Some(cloned) => cloned,
            // Sandboxes may forbid the ioctl: share the descriptor then, which is only slower.
            None => session.further(session.as_fd().try_clone_to_owned()?)?,
        };
        let polled = match self.polling.is_possible() {
            true => clone_device(&session, libc::O_NONBLOCK)?,
            false => None,
        };
        let worker = self.duty.worker();
        Ok(Box::new(DevFuseChannel {
            sleeping: Arc::new(sleeping),
            polled: polled.map(Arc::new),
            received_polled: false,
            polling: self.polling.clone(),
            duty: self.duty.clone(),
            worker,
            buf: RequestBuf::new(write_len_max)?,
            request_len: 0,
            _session: session,
        }))
    }

    fn ring_count(&self) -> Option<u16> {
        uring::queue_count()
    }

    fn is_crowded(&self) -> bool {
        self.duty.is_crowd_lasting()
    }

    fn abort(&self) -> io::Result<()> {
        let connection = *self.connection.lock();
        self.fd.lock().take();
        match connection.map(open_abort) {
            Some(Ok(mut file)) => file.write_all(b"1"),
            // It has ended.
            Some(Err(e)) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Some(Err(e)) => Err(e),
            None => Ok(()),
        }
    }
}

/// The file that ends a connection.
fn open_abort(connection: u64) -> io::Result<File> {
    let dir = Path::new("/sys/fs/fuse/connections");
    let name = format!("{connection}/abort");
    // Empty where nobody mounted fusectl; then root mounts it where nobody sees it.
    if std::fs::read_dir(dir)?.next().is_some() {
        return File::options().write(true).open(dir.join(name));
    }
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let root = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(&root, name, flags, Mode::empty())?.into())
}

/// A further way into the same connection, with a list of pending requests of its own; `None`
/// where that is forbidden.
fn clone_device(session: &FuseFd, flags: i32) -> io::Result<Option<FuseFd>> {
    let file = File::options().read(true).write(true).custom_flags(flags).open(DEV_FUSE)?;
    let further = session.further(file.into())?;
    let session_fd = session.as_raw_fd() as u32;
    // SAFETY: the ioctl reads one u32 through a pointer that is valid for the call.
    let rc = unsafe {
        libc::ioctl(further.as_raw_fd(), FUSE_DEV_IOC_CLONE as libc::Ioctl, &raw const session_fd)
    };
    Ok((rc == 0).then_some(further))
}

/// One worker's descriptors of /dev/fuse.
#[derive(Debug)]
pub struct DevFuseChannel {
    /// Waits for requests.
    sleeping: Arc<FuseFd>,
    /// Only looks whether there is one. None where polling is of no use or not allowed.
    polled: Option<Arc<FuseFd>>,
    /// Which of the two the last request came through: its reply must leave there.
    received_polled: bool,
    polling: Arc<Polling>,
    duty: Arc<Duty>,
    /// What `duty` knows this one as.
    worker: u64,
    buf: RequestBuf,
    /// Of the last request, in `buf`.
    request_len: usize,
    /// Keeps the connection alive while this worker serves it.
    _session: Arc<FuseFd>,
}

impl Drop for DevFuseChannel {
    fn drop(&mut self) {
        self.duty.leave(self.worker);
    }
}

/// What one read(2) of the device found.
enum Found {
    Request(usize),
    Nothing,
    End,
}

/// Reads once.
fn read_once(fd: &FuseFd, room: &mut [u8]) -> io::Result<Found> {
    match rustix::io::read(fd, room) {
        Ok(len) => Ok(Found::Request(len)),
        // NOENT: the request was interrupted before it could be read.
        Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Ok(Found::Nothing),
        Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Found::End),
        Err(e) => Err(e.into()),
    }
}

impl Channel for DevFuseChannel {
    fn receive(&mut self) -> io::Result<bool> {
        let room = self.buf.as_mut_slice();
        let turn = match self.polled {
            Some(_) => self.duty.turn(self.worker),
            None => Turn::Crowd,
        };
        let mut wait = self.polling.begin();
        let mut looks = 0u32;
        let found = loop {
            // On duty a worker looks once in any case, to see whether there are many callers.
            let polls = wait.poll_on() || (looks == 0 && turn == Turn::OnDuty);
            let polled = self.polled.as_ref().filter(|_| polls);
            if polled.is_none() {
                wait.sleep();
            }
            match read_once(polled.unwrap_or(&self.sleeping), room) {
                Ok(Found::Nothing) if polled.is_some() => std::thread::yield_now(),
                Ok(Found::Nothing) => {}
                found => {
                    self.received_polled = polled.is_some();
                    break found;
                }
            }
            looks = looks.saturating_add(1);
        };
        match found {
            Ok(Found::Request(len)) => {
                wait.found();
                let caller = parse_header(&room[..len]).map_or(0, |header| header.pid);
                self.duty.found(turn, caller, looks == 0);
                self.request_len = len;
                Ok(true)
            }
            Ok(_) => {
                self.duty.end();
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn request(&self) -> &[u8] {
        &self.buf.as_slice()[..self.request_len]
    }

    fn reply_path(&self) -> Arc<dyn ReplyPath> {
        match &self.polled {
            Some(polled) if self.received_polled => polled.clone(),
            _ => self.sleeping.clone(),
        }
    }
}
