//! A copy of an image as of one moment, in a file.
//!
//! The cluster freezes that moment: a snapshot of the image is made, read, and removed. The image is not held up
//! while it is read. Invariant: each copy has a snapshot of its own, by host and process, of which one runs at a time;
//! so one with the name of ours is what a process that was killed has left.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fjord_block::{SnapshotError, SnapshotOptions, SnapshotReport};

use crate::image::Image;

/// Begins the name of the snapshot while it is read.
const PREFIX: &str = "fjord-copy";
/// Bytes read at a time: an object.
const CHUNK_BYTES: usize = 4 << 20;
/// Zeroes that become holes.
const HOLE_BYTES: usize = 4096;
/// Who may read and write the copy, before the umask: only its owner.
const MODE: u32 = 0o600;

/// Copies `image` to `out`, an empty file.
pub(crate) fn copy(
    image: &Image,
    out: &File,
    options: &SnapshotOptions<'_>,
) -> Result<SnapshotReport, SnapshotError> {
    if image.name.snapshot.is_some() {
        return read(image, out, options, Duration::ZERO);
    }
    let failed = |doing: &'static str| move |source| SnapshotError::Cluster { doing, source };
    let name = &own_name().map_err(failed("naming the snapshot"))?;
    match image.snapshot_remove(name) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
            return Err(failed("removing a snapshot that is left from before")(error));
        }
        _ => {}
    }
    let began = Instant::now();
    image.snapshot_create(name).map_err(failed("making a snapshot"))?;
    let pause = began.elapsed();
    let opened = image.snapshot(name).map_err(io::Error::other);
    let copied = opened
        .map_err(failed("opening the snapshot"))
        .and_then(|snapshot| read(&snapshot, out, options, pause));
    let removed = image.snapshot_remove(name).map_err(failed("removing the snapshot"));
    let report = copied?;
    removed?;
    Ok(report)
}

/// `fjord-copy.HOST.PID`.
fn own_name() -> io::Result<CString> {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let name = format!("{PREFIX}.{host}.{}", std::process::id());
    Ok(CString::new(name.replace(['@', '/'], "-"))?)
}

/// Copies what `image` is, which does not change.
fn read(
    image: &Image,
    out: &File,
    options: &SnapshotOptions<'_>,
    pause: Duration,
) -> Result<SnapshotReport, SnapshotError> {
    let failed = |doing: &'static str| move |source| SnapshotError::Cluster { doing, source };
    let size = image.size_bytes().map_err(|code| io::Error::from_raw_os_error(-code));
    let size_bytes = size.map_err(failed("asking for the size"))?;
    out.set_len(size_bytes).map_err(SnapshotError::Write)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut copied_bytes = 0;
    for offset in (0..size_bytes).step_by(CHUNK_BYTES) {
        options.check_cancelled()?;
        let len = (size_bytes - offset).min(CHUNK_BYTES as u64) as usize;
        image.read_at(offset, &mut chunk[..len]).map_err(failed("reading the snapshot"))?;
        copied_bytes += write_data(out, offset, &chunk[..len]).map_err(SnapshotError::Write)?;
    }
    Ok(SnapshotReport { size_bytes, copied_bytes, pause, mode: MODE, ..SnapshotReport::default() })
}

/// Writes what is not zero; returns how many bytes that was.
fn write_data(out: &File, offset: u64, bytes: &[u8]) -> io::Result<u64> {
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    let (mut at, mut written) = (0, 0);
    // Neighbours are written together.
    for same in
        bytes.chunks(HOLE_BYTES).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b))
    {
        let len = same.iter().map(|block| block.len()).sum::<usize>();
        if !is_zero(same[0]) {
            out.write_all_at(&bytes[at..at + len], offset + at as u64)?;
            written += len as u64;
        }
        at += len;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn blocks_of_zeroes_are_left_out() {
        let file = tempfile::tempfile().expect("a file");
        let mut bytes = vec![0; 5 * HOLE_BYTES];
        bytes[HOLE_BYTES + 7] = 1;
        bytes[2 * HOLE_BYTES] = 2;
        bytes[5 * HOLE_BYTES - 1] = 3;
        file.set_len(1 << 20).expect("a size");
        let written = write_data(&file, 65536, &bytes).expect("written");
        assert_eq!(written, 3 * HOLE_BYTES as u64);
        let mut found = vec![9; bytes.len()];
        file.read_exact_at(&mut found, 65536).expect("read");
        assert!(found == bytes);
        assert_eq!(file.metadata().expect("metadata").size(), 1 << 20);
    }
}
