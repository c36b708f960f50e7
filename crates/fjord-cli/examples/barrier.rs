//! Appends records to a file of a mount, in an order that a power cut keeps:
//!
//!     cargo run -p fjord-cli --example barrier -- /mnt/log one two three
//!
//! Order where fjord gives it, durability elsewhere. Data of a shared mapping, or all with
//! `--writeback-cache`, must be written to fjord first (sync_file_range(2), as `fjord.h` does it).

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, Write},
    process::ExitCode,
};

use rustix::io::Errno;
use rustix::ioctl::{NoArg, Opcode, ioctl, opcode};

/// `FJORD_IOC_FDATABARRIER` of `fjord.h`.
const FDATABARRIER: Opcode = opcode::none(b'J', 5);

/// Nothing that is changed later survives a power cut without what the file has now.
fn fdatabarrier(file: &File) -> io::Result<()> {
    // SAFETY: the number names an ioctl without an argument.
    match unsafe { ioctl(file, NoArg::<FDATABARRIER>::new()) } {
        Err(Errno::NOTTY) => file.sync_data(),
        result => Ok(result?),
    }
}

fn append(path: &str, records: impl Iterator<Item = String>) -> io::Result<()> {
    let mut log = OpenOptions::new().append(true).create(true).open(path)?;
    for record in records {
        writeln!(log, "{record}")?;
        fdatabarrier(&log)?;
    }
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
