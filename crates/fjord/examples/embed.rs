//! A journal of measurements in an ext4 image: what is fsynced survives a crash of this program and of
//! the machine.
//!
//!     cargo run -p fjord-fs --example embed -- measurements.img

use std::io::{self, Write};
use std::path::Path;

use fjord::{Fs, MkfsOptions, MountOptions, OpenOptions};

/// Size of a new image; the file is sparse.
const IMAGE_BYTES: u64 = 256 << 20;

fn main() -> io::Result<()> {
    let Some(image) = std::env::args_os().nth(1) else {
        return Err(io::Error::other("usage: embed IMAGE"));
    };
    let count = record(Path::new(&image), "21.5 °C")?;
    println!("{count} measurements");
    Ok(())
}

/// Adds a line to the journal and gives the count of lines.
pub(crate) fn record(image: &Path, measurement: &str) -> io::Result<usize> {
    // After a crash, opening recovers the image. A program whose images Linux or e2fsck should be able
    // to recover sets `fsync: FsyncPolicyKind::Compound` in these options.
    let options = MountOptions::default();
    let fs = if image.try_exists()? {
        Fs::open(image, &options)?
    } else {
        let new = MkfsOptions { size_bytes: Some(IMAGE_BYTES), ..MkfsOptions::default() };
        Fs::create(image, &new, &options)?
    };
    fs.create_dir_all("/journal")?;
    let mut journal = OpenOptions::new().append(true).create(true).open(&fs, "/journal/today")?;
    writeln!(journal, "{measurement}")?;
    // From here on the line survives whatever happens.
    journal.sync_data()?;
    drop(journal);

    let count = fs.read_to_string("/journal/today")?.lines().count();
    // Without it the image would be left as by a crash.
    fs.unmount()?;
    Ok(count)
}
