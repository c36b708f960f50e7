//! FUSE over io_uring (kernel document filesystems/fuse/fuse-io-uring).
//!
//! The kernel has one queue for each processor, and gives a request to an entry of the queue of the caller's
//! processor; if none is free it waits there. A command of io_uring commits the reply in an entry and fetches
//! the next request into it. Each worker has a ring of its own with one entry, so requests are copied by the
//! thread that serves them. FORGET, INTERRUPT and notifications stay on /dev/fuse.
//!
//! Invariant: an entry that was registered is served as long as the connection lives. The kernel has no way to
//! take one back without losing a request that it was just given, so these workers do not end before.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io_uring::IoringOp;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::entry::Entry;
use super::polling::Polling;
use super::ring::CommandRing;
use super::{Channel, ReplyPath, fuse_fd::FuseFd};
use crate::abi::{
    FUSE_IO_URING_CMD_COMMIT_AND_FETCH, FUSE_IO_URING_CMD_REGISTER, FuseUringCmdReq, UringCmdSqe,
};

/// The processors that the kernel keeps a queue for.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// How many queues the kernel has for a connection, if that can be found out.
pub(super) fn queue_count() -> Option<u16> {
    count_of(&std::fs::read_to_string(POSSIBLE).ok()?)
}

/// Counts the processors in a list such as `0-3,8`.
fn count_of(list: &str) -> Option<u16> {
    list.trim().split(',').try_fold(0u16, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

/// Keeps a worker on its queue's processor, where its callers are: the switch between the two wakes no other
/// processor. Where that is not allowed it runs anywhere.
fn stay_on(processor: u16) {
    let mut set = CpuSet::new();
    set.set(processor.into());
    let _ = sched_setaffinity(None, &set);
}

/// One worker's ring.
pub(super) struct RingChannel {
    /// Before `entry`, so that it is closed before that memory is freed.
    ring: CommandRing,
    entry: Arc<Entry>,
    device: Arc<FuseFd>,
    queue: u16,
    /// The kernel knows the entry.
    is_registered: bool,
    /// Where the last request lies in the entry's memory, and its length.
    request: (NonNull<u8>, usize),
    polling: Arc<Polling>,
}

// SAFETY: `request` leads into the entry's memory, which belongs to this channel.
unsafe impl Send for RingChannel {}

impl RingChannel {
    /// # Errors
    /// io_uring is not allowed, or has not what this needs; no memory.
    pub(super) fn new(
        device: Arc<FuseFd>,
        queue: u16,
        write_len_max: usize,
        polling: Arc<Polling>,
    ) -> io::Result<RingChannel> {
        let ring = CommandRing::new()?;
        let entry = Arc::new(Entry::new(write_len_max, device.clone())?);
        let request = (NonNull::dangling(), 0);
        Ok(RingChannel { ring, entry, device, queue, is_registered: false, request, polling })
    }

    /// Puts the next command into the ring. For the first one, `places` are where the entry's memory lies.
    fn command(&mut self, places: &[libc::iovec; 2]) -> io::Result<()> {
        let mut command = UringCmdSqe {
            opcode: IoringOp::UringCmd as u8,
            fd: self.device.as_raw_fd(),
            cmd_op: FUSE_IO_URING_CMD_COMMIT_AND_FETCH,
            cmd: FuseUringCmdReq { qid: self.queue, ..Default::default() },
            ..Default::default()
        };
        if self.is_registered {
            command.cmd.commit_id = self.entry.commit_id();
        } else {
            stay_on(self.queue);
            self.ring.enable()?;
            command.cmd_op = FUSE_IO_URING_CMD_REGISTER;
            command.addr = places.as_ptr().expose_provenance() as u64;
            command.len = places.len() as u32;
        }
        self.entry.lend();
        // SAFETY: `places` outlives the submission, which reads it. The memory that they lead to is the
        // entry's, which keeps it until the command is complete.
        unsafe { self.ring.push(&command) };
        self.is_registered = true;
        Ok(())
    }

    /// Submits what is queued, and waits for its completion: the command's result.
    fn wait(&mut self) -> io::Result<i32> {
        let mut wait = self.polling.begin_newest();
        let mut is_submitted = false;
        loop {
            if let Some(result) = self.ring.completion() {
                wait.found();
                return Ok(result);
            }
            let polls = wait.poll_on();
            if polls && is_submitted && !self.ring.has_work() {
                std::thread::yield_now();
                continue;
            }
            if !polls {
                wait.sleep();
            }
            is_submitted = true;
            match self.ring.enter(!polls) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }
}

impl Channel for RingChannel {
    fn receive(&mut self) -> io::Result<bool> {
        let places = self.entry.places();
        let is_first = !self.is_registered;
        self.command(&places)?;
        let error = match self.wait()? {
            0 => {
                self.request = self.entry.take();
                return Ok(true);
            }
            negative => io::Error::from_raw_os_error(-negative),
        };
        // The memory is not the kernel's any more.
        self.entry.give_up();
        match error.raw_os_error() {
            Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED) => Ok(false),
            // Without the first of each queue requests go on coming over /dev/fuse, without others to these.
            _ if is_first => {
                tracing::warn!(%error, queue = self.queue, "the kernel takes no further worker over io_uring");
                Ok(false)
            }
            _ => Err(error),
        }
    }

    fn request(&self) -> &[u8] {
        let (start, len) = self.request;
        // SAFETY: the entry's memory holds the request from `take` until the next `receive`, which needs this
        // channel for itself; replies are not written there.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
    }

    fn reply_path(&self) -> Arc<dyn ReplyPath> {
        self.entry.clone()
    }

    fn is_settled(&self) -> bool {
        self.entry.is_settled()
    }

    fn settle(&mut self) {
        self.entry.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_of_a_list_are_counted() {
        for (list, count) in [("0\n", Some(1)), ("0-1\n", Some(2)), ("0-3,8,10-11", Some(7))] {
            assert_eq!(count_of(list), count);
        }
        for list in ["", "a", "3-1", "0-65535"] {
            assert_eq!(count_of(list), None, "{list}");
        }
    }
}
