//! A ring of io_uring for one command at a time.
//!
//! Owns the ring and its memory, which is ordinary memory (IORING_SETUP_NO_MMAP). A ring that is mapped is kept
//! open by everybody who shares the memory, such as the child in which this process calls umount(2); it keeps
//! /dev/fuse open, and if the process is killed then, the child waits for the end of a connection that ends
//! after the child. No library for io_uring has such rings.
//!
//! Invariants: one thread uses a ring, the one that enables it; a command is pushed only when none is under way.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io_uring::{
    IoringEnterFlags, IoringRegisterOp, IoringSetupFlags, IoringSqFlags, io_uring_cqe,
    io_uring_enter, io_uring_params, io_uring_ptr, io_uring_register, io_uring_setup,
};

use super::RequestBuf;
use super::buffer::PAGE_SIZE;
use crate::abi::UringCmdSqe;

/// One command at a time.
pub(super) struct CommandRing {
    /// Before `memory`: closed first.
    fd: OwnedFd,
    /// One page for the two queues, one for the submissions.
    memory: RequestBuf,
    params: io_uring_params,
    /// Commands that were pushed and not submitted.
    unsubmitted: u32,
}

impl CommandRing {
    /// A ring that its user enables.
    ///
    /// # Errors
    /// io_uring is not allowed, or lacks what this needs (Linux 6.6); no memory.
    pub(super) fn new() -> io::Result<CommandRing> {
        let memory = RequestBuf::new(PAGE_SIZE)?;
        let mut params = io_uring_params::default();
        params.flags = IoringSetupFlags::SQE128
            | IoringSetupFlags::SINGLE_ISSUER
            | IoringSetupFlags::DEFER_TASKRUN
            | IoringSetupFlags::TASKRUN_FLAG
            | IoringSetupFlags::R_DISABLED
            | IoringSetupFlags::NO_MMAP
            | IoringSetupFlags::NO_SQARRAY;
        params.cq_off.user_addr = io_uring_ptr::new(memory.head().as_ptr().cast());
        params.sq_off.user_addr = io_uring_ptr::new(memory.data().as_ptr().cast());
        // SAFETY: both pages are this ring's alone, and outlive it. One entry takes less than a page of each.
        let fd = unsafe { io_uring_setup(1, &mut params)? };
        Ok(CommandRing { fd, memory, params, unsubmitted: 0 })
    }

    /// Makes the calling thread the ring's user.
    ///
    /// # Errors
    /// It is enabled already.
    pub(super) fn enable(&self) -> io::Result<()> {
        let op = IoringRegisterOp::RegisterEnableRings;
        // SAFETY: the operation takes no argument.
        unsafe { io_uring_register(&self.fd, op, std::ptr::null(), 0)? };
        Ok(())
    }

    /// Puts a command into the submission queue.
    ///
    /// # Safety
    /// What the command leads to is valid until it is complete.
    pub(super) unsafe fn push(&mut self, command: &UringCmdSqe) {
        let tail = self.word(self.params.sq_off.tail);
        // SAFETY: there is one place, and no command is under way.
        unsafe { self.memory.data().cast::<UringCmdSqe>().write(*command) };
        tail.store(tail.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        self.unsubmitted = 1;
    }

    /// Submits what was pushed; with `waits` it also waits for the completion.
    ///
    /// # Errors
    /// As io_uring_enter(2), EINTR included.
    pub(super) fn enter(&mut self, waits: bool) -> io::Result<()> {
        let flags = IoringEnterFlags::GETEVENTS;
        // SAFETY: as for `push`.
        let submitted = unsafe { io_uring_enter(&self.fd, self.unsubmitted, waits.into(), flags)? };
        self.unsubmitted -= submitted.min(self.unsubmitted);
        Ok(())
    }

    /// Whether the next [`CommandRing::enter`] finds something.
    pub(super) fn has_work(&self) -> bool {
        let flags = self.word(self.params.sq_off.flags).load(Ordering::Relaxed);
        IoringSqFlags::from_bits_retain(flags).contains(IoringSqFlags::TASKRUN)
    }

    /// The result of the command, if it is complete.
    pub(super) fn completion(&mut self) -> Option<i32> {
        let (head, tail) = (self.word(self.params.cq_off.head), self.word(self.params.cq_off.tail));
        let first = head.load(Ordering::Relaxed);
        if first == tail.load(Ordering::Acquire) {
            return None;
        }
        let mask = self.word(self.params.cq_off.ring_mask).load(Ordering::Relaxed);
        let offset =
            self.params.cq_off.cqes as usize + (first & mask) as usize * size_of::<io_uring_cqe>();
        // SAFETY: the kernel has told where in its page completions lie, and has written this one.
        let result =
            unsafe { (*self.memory.head().add(offset).cast::<io_uring_cqe>().as_ptr()).res };
        head.store(first.wrapping_add(1), Ordering::Release);
        Some(result)
    }

    /// A word of the queues, which the kernel uses as well.
    fn word(&self, offset: u32) -> &AtomicU32 {
        let place: NonNull<u8> = self.memory.head();
        // SAFETY: the kernel has told these offsets; they lie in the page and are aligned.
        unsafe { place.add(offset as usize).cast::<AtomicU32>().as_ref() }
    }
}
