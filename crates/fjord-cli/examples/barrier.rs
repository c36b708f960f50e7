//! Appends records to a file of a mount, in an order that a power cut keeps, and tells when the last one is
//! durable. Needs no crate:
//!
//!     rustc --edition 2024 barrier.rs && ./barrier /mnt/log one two three
//!
//! Order where fjord gives it, durability elsewhere. Data of a shared mapping, or all with
//! `--writeback-cache`, must be written to fjord first (sync_file_range(2), as `fjord.h` does it).

use std::{
    env,
    ffi::{c_int, c_ulong},
    fs::{File, OpenOptions},
    io::{self, Write},
    os::fd::AsRawFd,
    process::ExitCode,
};

/// `struct fjord_epoch` of `fjord.h`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Epoch {
    mount: u64,
    number: u64,
    call: u32,
    is_durable: u32,
}

/// `FJORD_IOC_EPOCH`, on most processors; on PowerPC, MIPS and SPARC the direction has other bits.
const EPOCH: c_ulong = 0xc018_4a06;
const FDATABARRIER: u32 = 1;
const LOOK: u32 = 2;
const WAIT: u32 = 3;

const ENOTTY: i32 = 25;

unsafe extern "C" {
    fn ioctl(fd: c_int, request: c_ulong, epoch: *mut Epoch) -> c_int;
}

fn call(file: &File, epoch: &mut Epoch, call: u32) -> io::Result<()> {
    epoch.call = call;
    // SAFETY: the descriptor is open, and the ioctl reads and writes one `struct fjord_epoch`.
    match unsafe { ioctl(file.as_raw_fd(), EPOCH, epoch) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Nothing that is changed later survives a power cut without what the file has now. `None` where that is
/// durable: not on fjord.
fn fdatabarrier(file: &File) -> io::Result<Option<Epoch>> {
    let mut epoch = Epoch::default();
    match call(file, &mut epoch, FDATABARRIER) {
        Err(error) if error.raw_os_error() == Some(ENOTTY) => file.sync_data().map(|()| None),
        result => result.map(|()| Some(epoch)),
    }
}

fn append(path: &str, records: impl Iterator<Item = String>) -> io::Result<()> {
    let mut log = OpenOptions::new().append(true).create(true).open(path)?;
    let mut last = None;
    for record in records {
        writeln!(log, "{record}")?;
        last = fdatabarrier(&log)?;
    }
    // Ordered now, learned later: before somebody is told that the records are safe.
    if let Some(mut epoch) = last {
        call(&log, &mut epoch, LOOK)?;
        if epoch.is_durable == 0 {
            call(&log, &mut epoch, WAIT)?;
        }
    }
    println!("all records are durable");
    Ok(())
}

fn main() -> ExitCode {
    let mut args = env::args().skip(1);
    let Some(path) = args.next() else {
        eprintln!("usage: barrier FILE RECORD...");
        return ExitCode::from(2);
    };
    match append(&path, args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{path}: {error}");
            ExitCode::FAILURE
        }
    }
}
