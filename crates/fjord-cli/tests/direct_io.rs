//! Direct and buffered I/O on one file: a buffered read after a direct write has completed sees
//! what was written, while others read all the time. Needs root.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fs::File,
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result, bail, ensure};
use fjord_testkit::{
    features,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
};

const PIECE: usize = 16 << 10;
const PIECES: u64 = 8;
const ROUNDS: u64 = 800;
const READERS: usize = 2;

/// Memory that direct I/O takes.
struct Aligned(*mut u8);

impl Aligned {
    const LAYOUT: Layout = match Layout::from_size_align(PIECE, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("a power of two"),
    };

    fn new() -> Aligned {
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(Self::LAYOUT) };
        assert!(!start.is_null(), "out of memory");
        Aligned(start)
    }

    fn fill(&mut self, byte: u8) {
        // SAFETY: PIECE bytes from here on are this value's own, and no write is in flight.
        unsafe { self.0.write_bytes(byte, PIECE) };
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.0, Self::LAYOUT) };
    }
}

/// A context of io_submit(2).
struct Aio(libc::c_ulong);

impl Aio {
    fn new() -> Result<Aio> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the call writes one number through a valid pointer.
        let rc = unsafe { libc::syscall(libc::SYS_io_setup, 8, &raw mut context) };
        ensure!(rc == 0, "io_setup: {}", io::Error::last_os_error());
        Ok(Aio(context))
    }

    /// Writes `data` at `offset` and waits until the kernel says that it is done.
    fn write(&self, file: &File, data: &Aligned, offset: u64) -> Result<()> {
        // SAFETY: all zeros is a value of the structure, which has only numbers.
        let mut block: libc::iocb = unsafe { std::mem::zeroed() };
        block.aio_lio_opcode = 1;
        block.aio_fildes = file.as_raw_fd() as u32;
        block.aio_buf = data.0 as u64;
        block.aio_nbytes = PIECE as u64;
        block.aio_offset = offset as i64;
        let mut list = [&raw mut block];
        // SAFETY: one control block, which outlives the call; its memory outlives the wait below.
        let rc = unsafe { libc::syscall(libc::SYS_io_submit, self.0, 1, list.as_mut_ptr()) };
        ensure!(rc == 1, "io_submit: {}", io::Error::last_os_error());
        let mut event = [0i64; 4];
        // SAFETY: room for the one event that is asked for, 32 bytes.
        let rc = unsafe {
            let none = std::ptr::null_mut::<libc::timespec>();
            libc::syscall(libc::SYS_io_getevents, self.0, 1, 1, event.as_mut_ptr(), none)
        };
        ensure!(rc == 1, "io_getevents: {}", io::Error::last_os_error());
        ensure!(event[2] == PIECE as i64, "a direct write ended with {}", event[2]);
        Ok(())
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context is not used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// Writes each piece again and again, reads it the other way when the write has completed.
fn write_and_look(path: &Path, asynchronous: bool) -> Result<()> {
    let direct = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .context("O_DIRECT")?;
    let buffered = File::open(path)?;
    let (aio, mut data, mut found) = (Aio::new()?, Aligned::new(), vec![0; PIECE]);
    for round in 0..ROUNDS {
        let (byte, offset) = ((round / PIECES + 1) as u8, round % PIECES * PIECE as u64);
        data.fill(byte);
        if asynchronous {
            aio.write(&direct, &data, offset)?;
        } else {
            // SAFETY: PIECE bytes, which nobody changes meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(data.0, PIECE) };
            direct.write_all_at(bytes, offset)?;
        }
        buffered.read_exact_at(&mut found, offset)?;
        if let Some(at) = found.iter().position(|&b| b != byte) {
            bail!("round {round}: byte {at} is {}, {byte} was written", found[at]);
        }
    }
    Ok(())
}

fn beside_readers(dir: &Path, asynchronous: bool) -> Result<()> {
    let path = dir.join("file");
    std::fs::write(&path, vec![0; PIECE * PIECES as usize])?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let read = || -> Result<()> {
            let (file, mut bytes) = (File::open(&path)?, vec![0; PIECE]);
            while !done.load(Ordering::Relaxed) {
                for piece in 0..PIECES {
                    file.read_exact_at(&mut bytes, piece * PIECE as u64)?;
                }
            }
            Ok(())
        };
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(read)).collect();
        let looked = write_and_look(&path, asynchronous);
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
        }
        looked
    })
}

#[test]
fn a_buffered_read_sees_direct_writes() -> Result<()> {
    let scratch = Scratch::in_memory("direct-io")?;
    let img = scratch.join("image");
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let linux = KernelMount::new(&img, "acl")?;
    for asynchronous in [false, true] {
        beside_readers(linux.path(), asynchronous).context("on Linux")?;
    }
    linux.unmount()?;
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    for args in [&[][..], &["--writeback-cache"]] {
        let fjord = FjordMount::with_program(program, &img, args)?;
        for asynchronous in [false, true] {
            let ended = beside_readers(fjord.path(), asynchronous);
            ended.with_context(|| format!("fjord {args:?}, asynchronous: {asynchronous}"))?;
        }
        fjord.unmount()?;
    }
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Direct I/O of any alignment is taken, where Linux's ext4 answers EINVAL (docs/mounting.md).
#[test]
fn direct_io_needs_no_alignment() -> Result<()> {
    let scratch = Scratch::new("direct-io")?;
    let img = scratch.join("image");
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let open = |dir: &Path| {
        let mut options = File::options();
        options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
        options.open(dir.join("file"))
    };
    let linux = KernelMount::new(&img, "rw")?;
    let refused = open(linux.path())?.write_at(b"seven b", 3).err().context("taken by Linux")?;
    ensure!(refused.raw_os_error() == Some(libc::EINVAL), "{refused}");
    linux.unmount()?;
    let fuse = FjordMount::with_program(Path::new(env!("CARGO_BIN_EXE_fjord")), &img, &[])?;
    let file = open(fuse.path())?;
    file.write_all_at(b"seven b", 3)?;
    file.write_all_at(&[7; 5001], 4095)?;
    let mut read = [0; 9];
    file.read_exact_at(&mut read, 2)?;
    ensure!(&read == b"\0seven b\0", "{read:?}");
    drop(file);
    fuse.unmount()?;
    image::e2fsck_clean(&img)?;
    let linux = KernelMount::new(&img, "ro")?;
    let seen = std::fs::read(linux.path().join("file"))?;
    ensure!(seen.len() == 4095 + 5001 && &seen[3..10] == b"seven b" && seen[4095..] == [7; 5001]);
    linux.unmount()
}
