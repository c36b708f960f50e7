//! The snapshot: pause, clone or copy, resume. Owns the two threads of it.
//!
//! - the *copier*, the caller's thread: pauses, clones, or sweeps over the image from start to end,
//!   and does all writes to the copy;
//! - the *pre-reader*: limits the length of the pause, and reads the chunks that held changes wait
//!   for, ahead of the sweep. It never writes to the copy, so a slow disk there delays changes only
//!   when [`PIECES_BYTES_MAX`] have been read and not written.
//!
//! Invariants: a chunk is read for the copy while it is taken and not safe, so after the pause
//! began and before any later change; a hold ends after [`PAUSE_MAX`] or [`HOLD_MAX`] at the
//! latest, and the snapshot then fails.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::chunks::Chunks;
use super::gate::{Gate, Guard, Mode, Piece};
use super::raw::RawFile;
use super::shared::Shared;
use crate::buf::AlignedBuf;
use crate::error::IoOp;
use crate::lock::MutexGuard;
use crate::snapshot::{Reflink, SnapshotError, SnapshotOptions, SnapshotReport};

/// The longest pause. A clone of a file with many extents takes a while.
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest time that a change waits for its chunks.
pub(super) const HOLD_MAX: Duration = Duration::from_secs(5);
/// Bytes that the sweep reads at a time.
const SWEEP_BYTES: u64 = 1 << 20;
/// Most bytes in memory that are not written to the copy yet.
pub(super) const PIECES_BYTES_MAX: usize = 32 << 20;
/// Bytes written to the copy between starts of writeback.
const WRITEBACK_BYTES: u64 = 8 << 20;
/// Zeroes of this many bytes, at multiples of it, become holes.
const HOLE_BYTES: usize = 4096;
static ZEROES: [u8; HOLE_BYTES] = [0; HOLE_BYTES];

type Result<T> = std::result::Result<T, SnapshotError>;

/// Takes the snapshot into `out`, an empty file.
pub(super) fn snapshot(
    shared: &Arc<Shared>,
    out: &File,
    options: &SnapshotOptions<'_>,
) -> Result<SnapshotReport> {
    shared.gate.begin()?;
    let _finish = Finish(&shared.gate);
    std::thread::scope(|scope| {
        let pre_reader = std::thread::Builder::new().name("fjord-snapshot".into());
        pre_reader.spawn_scoped(scope, || pre_read(shared)).map_err(SnapshotError::Thread)?;
        // Also on unwinding: the scope waits for the pre-reader.
        let _end = EndKeeping(shared);
        Copier { shared, out, options, report: report_of(&shared.file)?, sent_bytes: 0 }.run()
    })
}

/// Lets the next snapshot begin.
struct Finish<'a>(&'a Gate);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Opens the gate and ends the pre-reader.
struct EndKeeping<'a>(&'a Arc<Shared>);

impl Drop for EndKeeping<'_> {
    fn drop(&mut self) {
        self.0.gate.end_keeping(self.0);
    }
}

fn report_of(file: &RawFile) -> Result<SnapshotReport> {
    let stat = rustix::fs::fstat(&file.buffered).map_err(|e| SnapshotError::Write(e.into()))?;
    Ok(SnapshotReport {
        size_bytes: file.size_bytes(),
        mode: stat.st_mode & 0o7777,
        image: (stat.st_dev, stat.st_ino),
        ..SnapshotReport::default()
    })
}

struct Copier<'a> {
    shared: &'a Arc<Shared>,
    out: &'a File,
    options: &'a SnapshotOptions<'a>,
    report: SnapshotReport,
    /// Bytes of `report.copied_bytes` whose writeback has been started.
    sent_bytes: u64,
}

impl Copier<'_> {
    fn run(mut self) -> Result<SnapshotReport> {
        self.options.check_cancelled()?;
        self.shared.gate.close(self.shared)?;
        self.report.size_bytes = self.shared.file.size_bytes();
        let why_not = match self.options.reflink {
            Reflink::Never => io::ErrorKind::Unsupported.into(),
            Reflink::Auto | Reflink::Always => match self.clone_paused()? {
                Ok(()) => return Ok(self.report),
                Err(why_not) => why_not,
            },
        };
        if self.options.reflink == Reflink::Always {
            return Err(SnapshotError::NoReflink(why_not));
        }
        let chunks = Chunks::new(self.report.size_bytes);
        self.report.pause = self.shared.gate.reopen(Mode::Copying(chunks), self.shared)?;
        // Not during the pause: no call on the copy that may block.
        self.out.set_len(self.report.size_bytes).map_err(SnapshotError::Write)?;
        self.sweep()?;
        Ok(self.report)
    }

    /// Shares the blocks, with the gate closed; opens it when that has succeeded. The inner error
    /// says why blocks cannot be shared.
    fn clone_paused(&mut self) -> Result<io::Result<()>> {
        if let Err(error) = clone_to(self.out, &self.shared.file) {
            return Ok(Err(error));
        }
        self.check_size()?;
        self.report.held_count = self.shared.gate.lock().held_count;
        self.report.pause = self.shared.gate.reopen(Mode::Open, self.shared)?;
        self.report.reflinked = true;
        Ok(Ok(()))
    }

    /// A truncated part would look like a hole.
    fn check_size(&self) -> Result<()> {
        self.shared.file.check(IoOp::Check).map_err(SnapshotError::Read)
    }

    /// Copies chunk by chunk, and in between the chunks that the pre-reader has read.
    fn sweep(&mut self) -> Result<()> {
        let gate = &self.shared.gate;
        let mut at = 0;
        loop {
            self.options.check_cancelled()?;
            let mut guard = gate.lock();
            if let Some(failure) = guard.failure.take() {
                return Err(failure);
            }
            if let Some(piece) = guard.pieces.pop_front() {
                drop(guard);
                let written = self.write(&piece);
                let mut guard = gate.lock();
                guard.pieces_bytes = guard.pieces_bytes.saturating_sub(piece.buf.len());
                gate.wake();
                drop(guard);
                written?;
                continue;
            }
            let Mode::Copying(chunks) = &guard.mode else {
                // Only a failure changes the mode, and it was looked for above.
                return Err(SnapshotError::Cancelled);
            };
            if let Some(free) = chunks.next_free(at) {
                drop(guard);
                at = self.copy_from(free)?;
            } else if chunks.all_safe() {
                self.report.held_count = guard.held_count;
                drop(guard);
                return self.check_size();
            } else {
                // The pre-reader is reading the rest.
                gate.wait(&mut guard, None);
            }
        }
    }

    /// Copies the first data at or after `free`, which is in a free chunk; returns where to
    /// continue.
    fn copy_from(&mut self, free: u64) -> Result<u64> {
        let size_bytes = self.report.size_bytes;
        let file = &self.shared.file;
        // True of every chunk that is still free when it is marked: those have not changed.
        let data = next_data(file, free, size_bytes);
        let end = next_hole(file, data, size_bytes).min(data.saturating_add(SWEEP_BYTES));
        let mut guard = self.shared.gate.lock();
        let Mode::Copying(chunks) = &mut guard.mode else { return Ok(free) };
        chunks.skip_hole(free..data);
        let taken = if data < end { chunks.take(data..end, SWEEP_BYTES) } else { None };
        self.shared.gate.let_go(guard, self.shared);
        let Some(taken) = taken else { return Ok(data) };
        let buf = read(file, &taken)?;
        self.set_safe(&taken);
        self.write(&Piece { offset: taken.start, buf })?;
        Ok(data)
    }

    fn set_safe(&self, range: &Range<u64>) {
        let mut guard = self.shared.gate.lock();
        if let Mode::Copying(chunks) = &mut guard.mode {
            chunks.set_safe(range);
        }
        self.shared.gate.let_go(guard, self.shared);
    }

    /// Writes all but zeroes.
    fn write(&mut self, piece: &Piece) -> Result<()> {
        for range in data_ranges(&piece.buf) {
            let offset = piece.offset + range.start as u64;
            self.report.copied_bytes += range.len() as u64;
            self.out.write_all_at(&piece.buf[range], offset).map_err(SnapshotError::Write)?;
        }
        if self.report.copied_bytes - self.sent_bytes >= WRITEBACK_BYTES {
            self.sent_bytes = self.report.copied_bytes;
            self.send_home();
        }
        Ok(())
    }

    /// Starts writeback of the copy: all at once at the end, it would delay the flushes of an image
    /// on the same disk.
    fn send_home(&self) {
        let fd = self.out.as_raw_fd();
        // SAFETY: the call takes no memory. Its errors are reported when the copy is made durable.
        unsafe { libc::sync_file_range(fd, 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }
}

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct FileCloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}

/// `FICLONERANGE` of linux/fs.h.
const FICLONERANGE: libc::c_ulong = 0x4020_940d;

/// Shares the blocks of the device with `out`.
fn clone_to(out: &File, file: &RawFile) -> io::Result<()> {
    let Some(range) = file.range() else {
        return Ok(rustix::fs::ioctl_ficlone(out, &file.buffered)?);
    };
    let what = FileCloneRange {
        src_fd: i64::from(file.buffered.as_raw_fd()),
        src_offset: range.start,
        src_length: range.end - range.start,
        dest_offset: 0,
    };
    // SAFETY: the kernel reads one `file_clone_range` through a pointer valid for the call.
    match unsafe { libc::ioctl(out.as_raw_fd(), FICLONERANGE as _, &raw const what) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The pre-reader thread.
pub(super) fn pre_read(shared: &Arc<Shared>) {
    PreReader { shared }.run();
}

struct PreReader<'a> {
    shared: &'a Arc<Shared>,
}

impl PreReader<'_> {
    fn run(&self) {
        let gate = &self.shared.gate;
        let mut guard = gate.lock();
        while !guard.ended {
            let deadline = match &guard.mode {
                Mode::Open => None,
                Mode::Closed(since) => {
                    Some((*since + PAUSE_MAX, SnapshotError::SlowPause(PAUSE_MAX)))
                }
                Mode::Copying(_) => {
                    if guard.pieces_bytes < PIECES_BYTES_MAX
                        && let Some(range) = take_wanted(&mut guard)
                    {
                        guard = self.pre_read(guard, &range);
                        continue;
                    }
                    let slow = SnapshotError::SlowCopy(HOLD_MAX);
                    guard.oldest().map(|since| (since + HOLD_MAX, slow))
                }
            };
            let Some((deadline, failure)) = deadline else {
                gate.wait(&mut guard, None);
                continue;
            };
            if guard.clock.now() < deadline {
                gate.wait(&mut guard, Some(deadline));
            } else {
                drop(guard);
                gate.fail(failure, self.shared);
                guard = gate.lock();
            }
        }
    }

    /// Reads the chunks that held changes wait for, and releases changes whose chunks are all safe.
    fn pre_read<'g>(
        &'g self,
        guard: MutexGuard<'g, Guard>,
        range: &Range<u64>,
    ) -> MutexGuard<'g, Guard> {
        let gate = &self.shared.gate;
        drop(guard);
        let buf = match read(&self.shared.file, range) {
            Ok(buf) => buf,
            Err(failure) => {
                gate.fail(failure, self.shared);
                return gate.lock();
            }
        };
        let mut guard = gate.lock();
        if let Mode::Copying(chunks) = &mut guard.mode {
            chunks.set_safe(range);
            guard.pieces_bytes += buf.len();
            guard.pieces.push_back(Piece { offset: range.start, buf });
        }
        gate.let_go(guard, self.shared);
        gate.lock()
    }
}

/// Takes the first chunks that a held change waits for; the sweep may already have taken some.
fn take_wanted(guard: &mut Guard) -> Option<Range<u64>> {
    let wanted: Vec<Range<u64>> = guard.held_ranges().collect();
    let Mode::Copying(chunks) = &mut guard.mode else { return None };
    wanted.into_iter().find_map(|range| chunks.take(range, SWEEP_BYTES))
}

/// Reads a range of the image.
fn read(file: &RawFile, range: &Range<u64>) -> Result<AlignedBuf> {
    // At most SWEEP_BYTES, or one chunk, which is 16 MiB in an image of 256 TiB.
    let mut bufs = [AlignedBuf::uninit((range.end - range.start) as usize)];
    file.read(range.start, &mut bufs, 0).map_err(SnapshotError::Read)?;
    let [buf] = bufs;
    Ok(buf)
}

/// Start of the next data at or after `at`, if the file system reports it; else `at`.
fn next_data(file: &RawFile, at: u64, size_bytes: u64) -> u64 {
    match file.seek(SeekFrom::Data, at) {
        Ok(data) => data.clamp(at, size_bytes),
        // None up to the end. A file that became shorter fails the next read or flush of the mount.
        Err(Errno::NXIO) if !file.is_block_device => size_bytes,
        Err(_) => at,
    }
}

/// End of the data at `at`, if the file system reports it.
fn next_hole(file: &RawFile, at: u64, size_bytes: u64) -> u64 {
    match file.seek(SeekFrom::Hole, at) {
        Ok(hole) if hole > at => hole.min(size_bytes),
        _ => size_bytes,
    }
}

/// The ranges of `bytes` that are not zero, in multiples of [`HOLE_BYTES`].
fn data_ranges(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (index, block) in bytes.chunks(HOLE_BYTES).enumerate() {
        if block == &ZEROES[..block.len()] {
            continue;
        }
        let start = index * HOLE_BYTES;
        let end = start + block.len();
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}
