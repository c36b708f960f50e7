//! Opening an image of 16 TiB: how long it takes and how much memory it needs.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use crate::error::{BenchError, Result};
use crate::options::{Options, Target};
use crate::report::OpenResult;
use crate::target::{KernelMount, LibraryFs, Mount, file_name, mount_args, run_program};

/// The largest file that ext4 below holds, rounded down to a GiB.
const HUGE_BYTES: u64 = (16 << 40) - (1 << 30);

/// Resident bytes of this process.
fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Results, and the targets left out with the reasons.
type Opens = (Vec<OpenResult>, Vec<String>);

/// Formats one sparse image and opens it on each target that opens images, `round_count` times;
/// the fastest time counts.
pub(crate) fn open_huge(options: &Options) -> Result<Opens> {
    let image = options.dir.join("huge.img");
    let result = measure(options, &image);
    let _ = std::fs::remove_file(&image);
    result
}

fn measure(options: &Options, image: &Path) -> Result<Opens> {
    let failed = || BenchError::io(format!("create {}", image.display()));
    File::create(image).map_err(failed())?.set_len(HUGE_BYTES).map_err(failed())?;
    // Nothing lazily initialised is written, so that the file stays small.
    run_program(
        "mke2fs",
        &["-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"],
        &[image],
    )?;
    let (mut results, mut skipped) = (Vec::new(), Vec::new());
    for target in &options.targets {
        match open_on(target, options, image) {
            Ok(result) => results.extend(result),
            Err(error) => skipped.push(format!("open-huge on {}: {error}", target.name())),
        }
    }
    Ok((results, skipped))
}

/// None for targets that open no images.
fn open_on(target: &Target, options: &Options, image: &Path) -> Result<Option<OpenResult>> {
    let dir = options.dir.join(format!("huge-{}.mnt", file_name(target)));
    let (mut milliseconds, mut resident_bytes) = (f64::INFINITY, None);
    for _ in 0..options.round_count {
        let before_bytes = rss_bytes();
        let began = Instant::now();
        let mount = match target {
            Target::Library(how) => {
                let fs = LibraryFs::open(image, &how.engine_options(), how.order)?;
                milliseconds = milliseconds.min(began.elapsed().as_secs_f64() * 1e3);
                // What a first open left with the allocator serves the later ones.
                resident_bytes.get_or_insert(rss_bytes().saturating_sub(before_bytes));
                drop(fs);
                continue;
            }
            Target::Fuse(how) => {
                let args = mount_args(*how, Vec::new(), options);
                Mount::fjord(&options.fjord_program, &args, image, &dir)?
            }
            Target::Kernel => Mount::kernel(image, &dir, &KernelMount::default())?,
            Target::Fuse2fs => Mount::fuse2fs(image, &dir)?,
            Target::Raw
            | Target::Block
            | Target::KernelFastCommit
            | Target::KernelNoBarrier
            | Target::KernelDataJournal
            | Target::Directory(_) => {
                return Ok(None);
            }
        };
        milliseconds = milliseconds.min(began.elapsed().as_secs_f64() * 1e3);
        resident_bytes = resident_bytes.or(mount.server_peak_bytes());
        mount.unmount()?;
    }
    Ok(Some(OpenResult { target: target.name(), milliseconds, resident_bytes }))
}
