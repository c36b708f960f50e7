//! The memory of one entry of a FUSE ring.
//!
//! Owns the memory and the knowledge who has it. Invariants: the kernel has it from the moment that it is lent
//! ([`Entry::lend`]) until the completion of that command ([`Entry::take`]); in between nobody here touches it.
//! Then the worker has the request in it until it lends it again, and whoever holds the request's responder
//! writes the reply: into the payload, if the request itself does not reach there, else into `late`, from
//! where the worker copies it when it has done with the request. Memory that the kernel may still have is never
//! freed.

use std::io::{self, IoSlice};
use std::mem::{ManuallyDrop, offset_of};
use std::ptr::NonNull;
use std::sync::Arc;

use fjord_block::lock::{Condvar, Mutex, Rank};
use zerocopy::IntoBytes;

use super::{Fill, ReplyPath, RequestBuf, fuse_fd::FuseFd};
use crate::abi::{FuseUringEntInOut, FuseUringReqHeader, InHeader, OutHeader};

/// Longest first argument of a request, in bytes.
const OP_IN_LEN_MAX: usize = 128;

/// Who has the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The kernel.
    Lent,
    /// The worker, with a request that is not answered yet.
    Taken,
    /// The worker, with a reply or before the first request.
    Answered,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The request lies in the payload, too.
    is_payload_read: bool,
    /// A reply's payload while `is_payload_read`.
    late: Vec<u8>,
    /// The worker waits for the reply.
    is_awaited: bool,
}

/// Memory for one request at a time and its reply.
pub(super) struct Entry {
    memory: ManuallyDrop<RequestBuf>,
    state: Mutex<State>,
    /// Signalled when an awaited reply is there.
    answered: Condvar,
    /// For notifications.
    device: Arc<FuseFd>,
}

// SAFETY: `memory` is touched by one side at a time, as the module's invariants say.
unsafe impl Sync for Entry {}

impl Entry {
    /// Memory for writes and reads of up to `write_len_max` bytes.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn new(write_len_max: usize, device: Arc<FuseFd>) -> io::Result<Entry> {
        let state = State {
            phase: Phase::Answered,
            is_payload_read: false,
            late: Vec::new(),
            is_awaited: false,
        };
        Ok(Entry {
            memory: ManuallyDrop::new(RequestBuf::new(write_len_max)?),
            state: Mutex::new(Rank::FuseEntry, state),
            answered: Condvar::new(),
            device,
        })
    }

    /// The two places that a ring's entry is registered with: headers and payload.
    pub(super) fn places(&self) -> [libc::iovec; 2] {
        let payload = self.memory.data();
        [
            libc::iovec {
                iov_base: self.memory.head().as_ptr().cast(),
                iov_len: size_of::<FuseUringReqHeader>(),
            },
            libc::iovec { iov_base: payload.as_ptr().cast(), iov_len: payload.len() },
        ]
    }

    /// Whether the request is answered.
    pub(super) fn is_settled(&self) -> bool {
        self.state.lock().phase != Phase::Taken
    }

    /// Waits until the request is answered.
    pub(super) fn settle(&self) {
        let mut state = self.state.lock();
        while state.phase == Phase::Taken {
            state.is_awaited = true;
            self.answered.wait(&mut state);
        }
        state.is_awaited = false;
    }

    /// Puts the reply where the kernel looks for it, and gives the memory to the kernel. The request must not
    /// be used any more.
    pub(super) fn lend(&self) {
        let mut state = self.state.lock();
        if state.is_payload_read && state.phase == Phase::Answered {
            let late = std::mem::take(&mut state.late);
            // SAFETY: the worker has the memory, and has done with the request. `put` has checked the length.
            unsafe {
                self.payload().copy_from_nonoverlapping(NonNull::from(&late[..]).cast(), late.len())
            };
            state.late = late;
        }
        state.phase = Phase::Lent;
    }

    /// The connection has ended: the kernel does not have it any more.
    pub(super) fn give_up(&self) {
        self.state.lock().phase = Phase::Answered;
    }

    /// Takes the memory back with a request in it, and puts that together: returns where it begins and its
    /// length. Of a request that makes no sense it is only the header.
    pub(super) fn take(&self) -> (NonNull<u8>, usize) {
        let mut header = InHeader::default();
        // SAFETY: the kernel has given the memory back, and the header's place is inside.
        unsafe { self.copy_out(offset_of!(FuseUringReqHeader, in_out), header.as_mut_bytes()) };
        let about = self.about();
        let payload_len = about.payload_sz as usize;
        let fixed = (header.len as usize).checked_sub(size_of::<InHeader>() + payload_len);
        let op_in_len = fixed.filter(|len| {
            *len <= OP_IN_LEN_MAX && len % 8 == 0 && payload_len <= self.memory.data().len()
        });
        let before = size_of::<InHeader>() + op_in_len.unwrap_or(0);
        let len = before + if op_in_len.is_some() { payload_len } else { 0 };
        // SAFETY: the page before the payload has room for header and argument behind the ring's headers,
        // which the copies do not overlap.
        let start = unsafe {
            let start = self.payload().sub(before);
            start.copy_from_nonoverlapping(
                NonNull::from(header.as_bytes()).cast(),
                size_of::<InHeader>(),
            );
            let op_in = self.memory.head().add(offset_of!(FuseUringReqHeader, op_in));
            start
                .add(size_of::<InHeader>())
                .copy_from_nonoverlapping(op_in, op_in_len.unwrap_or(0));
            start
        };
        let mut state = self.state.lock();
        state.phase = Phase::Taken;
        state.is_payload_read = len > before;
        (start, len)
    }

    /// What a reply is committed by.
    pub(super) fn commit_id(&self) -> u64 {
        self.about().commit_id
    }

    fn about(&self) -> FuseUringEntInOut {
        let mut about = FuseUringEntInOut::default();
        // SAFETY: called by those who have the memory.
        unsafe {
            self.copy_out(offset_of!(FuseUringReqHeader, ring_ent_in_out), about.as_mut_bytes())
        };
        about
    }

    fn payload(&self) -> NonNull<u8> {
        self.memory.data().cast()
    }

    /// # Safety
    /// The kernel does not have the memory, and nobody writes there.
    unsafe fn copy_out(&self, offset: usize, to: &mut [u8]) {
        debug_assert!(offset + to.len() <= size_of::<FuseUringReqHeader>());
        // SAFETY: the caller's; the place is inside the first page.
        unsafe {
            self.memory
                .head()
                .add(offset)
                .copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len());
        }
    }

    /// # Safety
    /// As for `copy_out`; nobody reads there.
    unsafe fn copy_in(&self, offset: usize, from: &[u8]) {
        debug_assert!(offset + from.len() <= size_of::<FuseUringReqHeader>());
        // SAFETY: the caller's; the place is inside the first page.
        unsafe {
            let to = self.memory.head().add(offset);
            to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len());
        }
    }

    /// Notes that the reply is complete, with this header and so many bytes of payload.
    fn answer(&self, state: &mut State, header: OutHeader, payload_len: usize) {
        // SAFETY: the request is taken and not answered, and its header and argument were copied.
        unsafe {
            self.copy_in(offset_of!(FuseUringReqHeader, in_out), header.as_bytes());
            let offset = offset_of!(FuseUringReqHeader, ring_ent_in_out)
                + offset_of!(FuseUringEntInOut, payload_sz);
            self.copy_in(offset, (payload_len as u32).as_bytes());
        }
        state.phase = Phase::Answered;
        if state.is_awaited {
            self.answered.notify_one();
        }
    }
}

impl ReplyPath for Entry {
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let mut header = OutHeader::default();
        let header_len = size_of::<OutHeader>();
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        let payload_len =
            bytes.checked_sub(header_len).filter(|len| *len <= self.memory.data().len());
        let (Some(payload_len), Some((first, rest))) = (payload_len, parts.split_first()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let (head, first) =
            first.split_at_checked(header_len).ok_or(io::ErrorKind::InvalidInput)?;
        header.as_mut_bytes().copy_from_slice(head);
        let mut state = self.state.lock();
        if state.phase != Phase::Taken {
            return Ok(());
        }
        let payload = [first].into_iter().chain(rest.iter().map(|part| &**part));
        if state.is_payload_read {
            state.late.clear();
            payload.for_each(|part| state.late.extend_from_slice(part));
        } else {
            let mut to = self.payload();
            for part in payload {
                // SAFETY: the request is taken, does not reach into the payload, and all parts fit there.
                unsafe {
                    to.copy_from_nonoverlapping(NonNull::from(part).cast(), part.len());
                    to = to.add(part.len());
                }
            }
        }
        self.answer(&mut state, header, payload_len);
        Ok(())
    }

    fn notify(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.device.notify(parts)
    }

    fn forgo(&self) {
        // There is no way but to answer.
        let mut state = self.state.lock();
        if state.phase == Phase::Taken {
            let unique = self.commit_id();
            let len = size_of::<OutHeader>() as u32;
            self.answer(&mut state, OutHeader { len, error: -libc::EIO, unique }, 0);
        }
    }

    fn fill(&self, unique: u64, len_max: usize, fill: Fill<'_>) -> bool {
        {
            let state = self.state.lock();
            let has_room = len_max <= self.memory.data().len();
            if state.phase != Phase::Taken || state.is_payload_read || !has_room {
                return false;
            }
        }
        // SAFETY: the request is taken and does not reach into the payload; only the holder of its responder,
        // who calls this, may write there until it is answered.
        let room = unsafe { std::slice::from_raw_parts_mut(self.payload().as_ptr(), len_max) };
        let (error, len) = match fill(room) {
            Ok(len) => (0, len.min(len_max)),
            Err(errno) => (-errno, 0),
        };
        let header = OutHeader { len: (size_of::<OutHeader>() + len) as u32, error, unique };
        self.answer(&mut self.state.lock(), header, len);
        true
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.state.lock().phase == Phase::Lent {
            // The kernel may still write there.
            return;
        }
        // SAFETY: dropped once, here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn entry() -> Entry {
        let null = FuseFd::new(File::open("/dev/null").unwrap().into()).unwrap();
        Entry::new(8192, Arc::new(null)).unwrap()
    }

    /// Does what the kernel does with a request: `op_in` is its first argument.
    fn give(entry: &Entry, len: usize, op_in: &[u8], payload: &[u8]) -> Vec<u8> {
        entry.lend();
        let header = InHeader { len: len as u32, opcode: 16, unique: 7, ..Default::default() };
        let about = FuseUringEntInOut {
            commit_id: 7,
            payload_sz: payload.len() as u32,
            ..Default::default()
        };
        // SAFETY: this is the kernel here.
        unsafe {
            entry.copy_in(offset_of!(FuseUringReqHeader, in_out), header.as_bytes());
            entry.copy_in(offset_of!(FuseUringReqHeader, op_in), op_in);
            entry.copy_in(offset_of!(FuseUringReqHeader, ring_ent_in_out), about.as_bytes());
            let to = entry.payload();
            to.copy_from_nonoverlapping(NonNull::from(payload).cast(), payload.len());
        }
        let (start, len) = entry.take();
        // SAFETY: the request lies there.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }.to_vec()
    }

    /// What the kernel finds: the error and the payload.
    fn found(entry: &Entry) -> (i32, Vec<u8>) {
        entry.lend();
        let mut header = OutHeader::default();
        // SAFETY: this is the kernel here.
        unsafe {
            entry.copy_out(offset_of!(FuseUringReqHeader, in_out), header.as_mut_bytes());
            let len = entry.about().payload_sz as usize;
            let payload = std::slice::from_raw_parts(entry.payload().as_ptr(), len);
            (header.error, payload.to_vec())
        }
    }

    fn send(entry: &Entry, payload: &[u8]) {
        let header = OutHeader { len: 16 + payload.len() as u32, error: 0, unique: 7 };
        entry.send(&[IoSlice::new(header.as_bytes()), IoSlice::new(payload)]).unwrap();
    }

    #[test]
    fn a_request_is_in_one_piece_and_its_reply_leaves_it_alone() {
        let entry = entry();
        let request = give(&entry, 40 + 16 + 5, &[1; 16], b"hello");
        assert_eq!(request[40..], [&[1; 16][..], b"hello"].concat());
        send(&entry, b"answer!");
        // SAFETY: the request is taken.
        let payload = unsafe { std::slice::from_raw_parts(entry.payload().as_ptr(), 5) };
        assert_eq!(payload, b"hello");
        assert_eq!(found(&entry), (0, b"answer!".to_vec()));
    }

    #[test]
    fn a_reply_is_filled_in_where_the_kernel_looks() {
        let entry = entry();
        assert_eq!(give(&entry, 40 + 40, &[2; 40], b"").len(), 80);
        let mut fill = |room: &mut [u8]| {
            room[..3].copy_from_slice(b"abc");
            Ok(3)
        };
        assert!(entry.fill(7, 4096, &mut fill));
        entry.settle();
        assert_eq!(found(&entry), (0, b"abc".to_vec()));
        give(&entry, 80, &[2; 40], b"");
        assert!(entry.fill(7, 4096, &mut |_| Err(libc::EISDIR)));
        assert_eq!(found(&entry), (-libc::EISDIR, Vec::new()));
        // A request that reaches into the payload has its room elsewhere.
        give(&entry, 40 + 8 + 2, &[3; 8], b"x\0");
        assert!(!entry.fill(7, 4096, &mut |_| panic!("no room")));
        entry.forgo();
        assert_eq!(found(&entry).0, -libc::EIO);
    }

    #[test]
    fn of_a_request_that_makes_no_sense_there_is_the_header() {
        let entry = entry();
        for (len, payload) in [(39, 0), (40 + 136, 0), (40 + 7, 0), (44, 8), (usize::MAX, 0)] {
            assert_eq!(give(&entry, len, &[0; 128], &vec![0; payload]).len(), 40, "{len}");
            send(&entry, b"");
        }
        assert_eq!(found(&entry), (0, Vec::new()));
    }
}
