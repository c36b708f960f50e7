//! A model checker for one file, in the manner of fsx: random operations on the file and on a
//! byte vector, which must stay equal.
//!
//! Invariant: the run of a seed is the same for every target; what a target does not support is
//! counted and leaves the model unchanged.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use libc::{
    FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE,
    FALLOC_FL_ZERO_RANGE,
};
use rustix::{
    fs::{FallocateFlags, SeekFrom},
    mm::{MapFlags, ProtFlags},
};

use crate::rng::{Rng, pattern_vec};

/// A file that can be checked. Offsets and lengths in bytes.
pub trait FileUnderTest {
    /// Reads at most `buf.len()` bytes.
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// Writes all of `data`.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Sets the size.
    fn truncate(&mut self, size: u64) -> io::Result<()>;
    /// fallocate with FALLOC_FL_* bits.
    fn fallocate(&mut self, mode: i32, offset: u64, len: u64) -> io::Result<()>;
    /// The size.
    fn size(&mut self) -> io::Result<u64>;
    /// Makes content durable.
    fn fsync(&mut self, data_only: bool) -> io::Result<()>;
    /// Closes and opens again.
    fn reopen(&mut self) -> io::Result<()>;
    /// Start of the next data at or after `offset`; None when there is none.
    fn seek_data(&mut self, offset: u64) -> io::Result<Option<u64>>;
    /// Start of the next hole at or after `offset`.
    fn seek_hole(&mut self, offset: u64) -> io::Result<u64>;
    /// Writes through a shared mapping; EOPNOTSUPP where there is no mapping.
    fn map_write(&mut self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Reads through a shared mapping; EOPNOTSUPP where there is no mapping.
    fn map_read(&mut self, _offset: u64, _buf: &mut [u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}

/// A file reached by system calls.
#[derive(Debug)]
pub struct KernelFile {
    path: PathBuf,
    file: File,
}

impl KernelFile {
    /// Makes (or empties) the file.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(KernelFile { path: path.to_owned(), file })
    }

    /// Runs `with` on a shared mapping of the pages around the range.
    fn mapped<T>(&self, offset: u64, len: usize, with: impl FnOnce(*mut u8) -> T) -> io::Result<T> {
        const PAGE: u64 = 4096;
        let start = offset / PAGE * PAGE;
        let lead = (offset - start) as usize;
        let bytes = lead + len;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; it is unmapped below and
        // the pointer does not escape `with`.
        unsafe {
            let base = rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                prot,
                MapFlags::SHARED,
                &self.file,
                start,
            )?;
            let out = with(base.cast::<u8>().add(lead));
            rustix::mm::munmap(base, bytes)?;
            Ok(out)
        }
    }
}

impl FileUnderTest for KernelFile {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64)? {
                0 => break,
                got => done += got,
            }
        }
        Ok(done)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn truncate(&mut self, size: u64) -> io::Result<()> {
        self.file.set_len(size)
    }

    fn fallocate(&mut self, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        Ok(rustix::fs::fallocate(&self.file, mode, offset, len)?)
    }

    fn size(&mut self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn fsync(&mut self, data_only: bool) -> io::Result<()> {
        if data_only { self.file.sync_data() } else { self.file.sync_all() }
    }

    fn reopen(&mut self) -> io::Result<()> {
        self.file = File::options().read(true).write(true).open(&self.path)?;
        Ok(())
    }

    fn seek_data(&mut self, offset: u64) -> io::Result<Option<u64>> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn seek_hole(&mut self, offset: u64) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.file, SeekFrom::Hole(offset))?)
    }

    fn map_write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.mapped(offset, data.len(), |to| {
            // SAFETY: the mapping covers `data.len()` bytes from `to`, all below the file's end,
            // and nobody else changes the file's size meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
        })
    }

    fn map_read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let (to, len) = (buf.as_mut_ptr(), buf.len());
        self.mapped(offset, len, |from| {
            // SAFETY: as in map_write, with `buf` as the other side.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
        })
    }
}

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Seed of all choices.
    pub seed: u64,
    /// Number of operations.
    pub operations: u64,
    /// Largest file size in bytes.
    pub max_bytes: u64,
    /// Alignment of collapse and insert, in bytes.
    pub block_bytes: u64,
}

impl Options {
    /// The usual shape: up to 512 KiB.
    pub fn new(seed: u64, operations: u64) -> Self {
        Options { seed, operations, max_bytes: 512 << 10, block_bytes: 4096 }
    }
}

/// How often each operation ran, by name.
pub type Counts = BTreeMap<&'static str, u64>;

struct Checker<'a> {
    file: &'a mut dyn FileUnderTest,
    model: Vec<u8>,
    rng: Rng,
    options: Options,
    counts: Counts,
    recent: VecDeque<String>,
}

/// Runs the checker; an error shows the seed, the last operations and the first wrong byte.
pub fn check(file: &mut dyn FileUnderTest, options: Options) -> Result<Counts> {
    let mut checker = Checker {
        file,
        model: Vec::new(),
        rng: Rng::new(options.seed),
        options,
        counts: Counts::new(),
        recent: VecDeque::new(),
    };
    for number in 0..options.operations {
        checker.step().with_context(|| {
            let recent: Vec<String> = checker.recent.iter().cloned().collect();
            format!(
                "fsx: seed {} operation {number}; last operations:\n  {}",
                options.seed,
                recent.join("\n  ")
            )
        })?;
    }
    checker.verify_all().with_context(|| format!("fsx: seed {} at the end", options.seed))?;
    Ok(checker.counts)
}

impl Checker<'_> {
    fn note(&mut self, name: &'static str, offset: u64, len: u64) {
        *self.counts.entry(name).or_default() += 1;
        if self.recent.len() == 40 {
            self.recent.pop_front();
        }
        self.recent
            .push_back(format!("{name} {offset:#x}+{len:#x} (size {:#x})", self.model.len()));
    }

    /// A range that may end after the file's end but within the maximum.
    fn range(&mut self) -> (u64, u64) {
        let offset = self.rng.below(self.options.max_bytes - 1);
        let len = self.rng.magnitude((self.options.max_bytes - offset).min(96 << 10)).max(1);
        (offset, len)
    }

    /// A non-empty range inside the file; None when the file is empty.
    fn inside(&mut self) -> Option<(u64, u64)> {
        let size = self.model.len() as u64;
        if size == 0 {
            return None;
        }
        let offset = self.rng.below(size);
        Some((offset, self.rng.magnitude((size - offset).min(96 << 10)).max(1)))
    }

    fn step(&mut self) -> Result<()> {
        match self.rng.below(100) {
            0..=24 => self.write(false),
            25..=29 => self.append(),
            30..=34 => self.write(true),
            35..=54 => self.read(false),
            55..=59 => self.read(true),
            60..=66 => self.truncate(),
            67..=70 => self.allocate(0),
            71..=73 => self.allocate(FALLOC_FL_KEEP_SIZE),
            74..=78 => self.zero(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, "punch"),
            79..=81 => self.zero(FALLOC_FL_ZERO_RANGE, "zero"),
            82..=84 => self.zero(FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, "zero-keep"),
            85..=87 => self.collapse(),
            88..=90 => self.insert(),
            91..=93 => self.seek(),
            94..=95 => self.sync(),
            96..=97 => self.reopen(),
            _ => self.verify_all(),
        }
    }

    fn store(&mut self, offset: u64, data: &[u8]) {
        let end = offset as usize + data.len();
        if self.model.len() < end {
            self.model.resize(end, 0);
        }
        self.model[offset as usize..end].copy_from_slice(data);
    }

    fn write(&mut self, mapped: bool) -> Result<()> {
        let range = if mapped { self.inside() } else { Some(self.range()) };
        let Some((offset, len)) = range else { return Ok(()) };
        let data = pattern_vec(self.rng.next_u64(), offset, len as usize);
        self.note(if mapped { "map-write" } else { "write" }, offset, len);
        let done = if mapped {
            self.file.map_write(offset, &data)
        } else {
            self.file.write(offset, &data)
        };
        if self.supported(done)? {
            self.store(offset, &data);
        }
        Ok(())
    }

    fn append(&mut self) -> Result<()> {
        let offset = self.model.len() as u64;
        let len = self.rng.magnitude((self.options.max_bytes - offset).min(32 << 10));
        let data = pattern_vec(self.rng.next_u64(), offset, len as usize);
        self.note("append", offset, len);
        self.file.write(offset, &data)?;
        if !data.is_empty() {
            self.store(offset, &data);
        }
        Ok(())
    }

    fn read(&mut self, mapped: bool) -> Result<()> {
        let range = if mapped { self.inside() } else { Some(self.range()) };
        let Some((offset, len)) = range else { return Ok(()) };
        self.note(if mapped { "map-read" } else { "read" }, offset, len);
        let mut buf = vec![0xEE; len as usize];
        let got = if mapped {
            let done = self.file.map_read(offset, &mut buf);
            if !self.supported(done)? {
                return Ok(());
            }
            buf.len()
        } else {
            self.file.read(offset, &mut buf)?
        };
        let size = self.model.len() as u64;
        let want = size.saturating_sub(offset).min(len) as usize;
        ensure!(got == want, "read at {offset:#x} gave {got:#x} bytes, expected {want:#x}");
        self.compare(offset, &buf[..got])
    }

    fn compare(&self, offset: u64, found: &[u8]) -> Result<()> {
        if found.is_empty() {
            return Ok(());
        }
        let expected = &self.model[offset as usize..offset as usize + found.len()];
        let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) else { return Ok(()) };
        let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        let end = (at + 16).min(found.len());
        bail!(
            "content differs at {:#x} ({wrong} bytes wrong): expected {:02x?}, found {:02x?}",
            offset + at as u64,
            &expected[at..end],
            &found[at..end]
        )
    }

    fn truncate(&mut self) -> Result<()> {
        let size = self.rng.magnitude(self.options.max_bytes);
        self.note("truncate", size, 0);
        self.file.truncate(size)?;
        self.model.resize(size as usize, 0);
        Ok(())
    }

    /// False for an operation the target lacks.
    fn supported(&mut self, done: io::Result<()>) -> Result<bool> {
        match done {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                *self.counts.entry("unsupported").or_default() += 1;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn allocate(&mut self, mode: i32) -> Result<()> {
        let (offset, len) = self.range();
        self.note(if mode == 0 { "allocate" } else { "allocate-keep" }, offset, len);
        let done = self.file.fallocate(mode, offset, len);
        if self.supported(done)? && mode == 0 {
            let end = (offset + len) as usize;
            if self.model.len() < end {
                self.model.resize(end, 0);
            }
        }
        Ok(())
    }

    fn zero(&mut self, mode: i32, name: &'static str) -> Result<()> {
        let (offset, len) = self.range();
        self.note(name, offset, len);
        let done = self.file.fallocate(mode, offset, len);
        if !self.supported(done)? {
            return Ok(());
        }
        if mode & FALLOC_FL_KEEP_SIZE == 0 && self.model.len() < (offset + len) as usize {
            self.model.resize((offset + len) as usize, 0);
        }
        let size = self.model.len();
        let (start, end) = ((offset as usize).min(size), ((offset + len) as usize).min(size));
        self.model[start..end].fill(0);
        Ok(())
    }

    fn collapse(&mut self) -> Result<()> {
        let unit = self.options.block_bytes;
        let blocks = (self.model.len() as u64).saturating_sub(1) / unit;
        if blocks == 0 {
            return Ok(());
        }
        let start = self.rng.below(blocks);
        let count = self.rng.range(1, blocks - start + 1);
        let (offset, len) = (start * unit, count * unit);
        self.note("collapse", offset, len);
        let done = self.file.fallocate(FALLOC_FL_COLLAPSE_RANGE, offset, len);
        if self.supported(done)? {
            self.model.drain(offset as usize..(offset + len) as usize);
        }
        Ok(())
    }

    fn insert(&mut self) -> Result<()> {
        let unit = self.options.block_bytes;
        let size = self.model.len() as u64;
        let room = (self.options.max_bytes - size) / unit;
        let blocks = size.saturating_sub(1) / unit;
        if room == 0 || blocks == 0 {
            return Ok(());
        }
        let offset = self.rng.below(blocks) * unit;
        let len = self.rng.range(1, room.min(16) + 1) * unit;
        self.note("insert", offset, len);
        let done = self.file.fallocate(FALLOC_FL_INSERT_RANGE, offset, len);
        if self.supported(done)? {
            let at = offset as usize;
            self.model.splice(at..at, std::iter::repeat_n(0, len as usize));
        }
        Ok(())
    }

    /// Every non-zero byte lies in a data range, and the walk ends.
    fn seek(&mut self) -> Result<()> {
        self.note("seek", 0, self.model.len() as u64);
        let size = self.model.len() as u64;
        let mut at = 0;
        while at < size {
            let data = self.file.seek_data(at)?.unwrap_or(size);
            ensure!(data >= at && data <= size, "SEEK_DATA from {at:#x} gave {data:#x}");
            let hidden = self.model[at as usize..data as usize].iter().position(|byte| *byte != 0);
            if let Some(index) = hidden {
                bail!("SEEK_DATA says hole {at:#x}..{data:#x}, data at {:#x}", at + index as u64);
            }
            if data == size {
                break;
            }
            let hole = self.file.seek_hole(data)?;
            ensure!(hole > data && hole <= size, "SEEK_HOLE from {data:#x} gave {hole:#x}");
            at = hole;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        let data_only = self.rng.percent(50);
        self.note(if data_only { "fdatasync" } else { "fsync" }, 0, 0);
        Ok(self.file.fsync(data_only)?)
    }

    fn reopen(&mut self) -> Result<()> {
        self.note("reopen", 0, 0);
        Ok(self.file.reopen()?)
    }

    fn verify_all(&mut self) -> Result<()> {
        self.note("verify", 0, self.model.len() as u64);
        let size = self.file.size()?;
        ensure!(
            size == self.model.len() as u64,
            "size {size:#x}, expected {:#x}",
            self.model.len()
        );
        let mut buf = vec![0; self.model.len()];
        let got = self.file.read(0, &mut buf)?;
        ensure!(got == buf.len(), "read gave {got:#x} bytes of {:#x}", buf.len());
        self.compare(0, &buf)
    }
}
