//! A workload that was run, ready to be cut.
//!
//! Owns [`Recording`], its file, and [`record`], which makes one. Invariant: a recording holds
//! all that judging its images needs, so that a run of threads, which no second run repeats, can
//! be judged again from the file.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use fjord::{Fs, MountOptions};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::base::{Base, Extents, quiet};
use crate::check::{Kind, Problem};
use crate::explore::{Config, Workload};
use crate::model::Model;
use crate::ops::Op;
use crate::panics;
use crate::record::{Log, RecordingDevice};
use crate::run::Runner;

/// What the device saw of a run, and what was promised.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recording {
    /// The requests.
    pub log: Log,
    /// The histories and promises.
    pub model: Model,
    /// Byte extents of the log.
    pub log_extents: Extents,
    /// Byte extents that mean nothing after recovery.
    pub dead_extents: Extents,
}

impl Recording {
    /// Writes it into a file in `dir`, after a line with the command of its run; gives the path.
    ///
    /// # Errors
    /// The directory or the file cannot be made.
    pub fn save(&self, dir: &Path, line: &str) -> Result<PathBuf> {
        let bytes = postcard::to_stdvec(self)?;
        let hash = xxhash_rust::xxh3::xxh3_64(&bytes);
        let path = dir.join(format!("{hash:016x}.recording"));
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(dir)?;
            let mut file = std::fs::File::create(&path)?;
            writeln!(file, "{line}")?;
            file.write_all(&bytes)
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Reads a file; the line first.
    ///
    /// # Errors
    /// The file cannot be read, or is none of ours.
    pub fn load(path: &Path) -> Result<(String, Recording)> {
        let cannot = || format!("cannot read the recording {}", path.display());
        let bytes = std::fs::read(path).with_context(cannot)?;
        let end = bytes.iter().position(|byte| *byte == b'\n').with_context(cannot)?;
        let line = String::from_utf8(bytes[..end].to_vec()).with_context(cannot)?;
        Ok((line, postcard::from_bytes(&bytes[end + 1..]).with_context(cannot)?))
    }
}

/// What the engine says of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ran {
    /// Operations.
    pub ops: u64,
    /// Those of them that it refused.
    pub refused: u64,
    /// fsync and fdatasync calls that the policy served by itself.
    pub by_policy: u64,
    /// Those that fell back to a commit of everything.
    pub fallbacks: u64,
    /// Commits of parts of a transaction.
    pub partial_commits: u64,
    /// Commits that began while another was in flight.
    pub overlapped_commits: u64,
}

/// A run: the recording, what the engine says, and how it failed.
pub struct Run {
    /// What can be cut.
    pub recording: Recording,
    /// Counts; zeros for a run that failed.
    pub ran: Ran,
    /// What went wrong without any power cut.
    pub failed: Option<Problem>,
}

/// Intervals of the engine's own threads in runs that have them.
const BACKGROUND_INTERVAL: Duration = Duration::from_millis(25);

/// Runs a workload on a recorded device.
///
/// # Errors
/// The base cannot be made.
pub fn record(config: &Config, workload: &Workload) -> Result<Run> {
    let base = Base::get(config.features, &workload.setup)?;
    let threaded = !workload.others.is_empty();
    let image = base.image.clone();
    let device = Arc::new(if threaded {
        RecordingDevice::recording_threads(image, config.device)
    } else {
        RecordingDevice::recording(image, config.device)
    });
    let options = MountOptions {
        background_threads: threaded,
        commit_interval: BACKGROUND_INTERVAL,
        writeback_interval: BACKGROUND_INTERVAL,
        ..quiet(&config.options)
    };
    let mut model = base.model.clone();
    model.is_threaded = threaded;
    let model = Mutex::new(model);
    let run = || run(&device, &options, &model, workload);
    let ran = panics::catch(run);
    let failed = ran.as_ref().err().map(|e| Problem::new(Kind::EngineFailed, format!("{e:#}")));
    let recording = Recording {
        log: device.take_log(base.image.clone()),
        model: model.into_inner(),
        log_extents: base.log_extents.clone(),
        dead_extents: base.dead_extents.clone(),
    };
    Ok(Run { recording, ran: ran.unwrap_or_default(), failed })
}

/// Mounts, runs all threads to their end, unmounts (a promise for everything).
fn run(
    device: &Arc<RecordingDevice>,
    options: &MountOptions,
    model: &Mutex<Model>,
    workload: &Workload,
) -> Result<Ran> {
    let fs = Fs::open_device(device.clone(), options)?;
    let one = |ops: &[Op]| -> Result<u64> {
        let stamp = || device.stamp();
        let mut runner = Runner::new(&fs, model, &stamp);
        let mut refused = 0;
        for op in ops {
            refused += u64::from(!runner.step(op)?);
        }
        Ok(refused)
    };
    let refused = std::thread::scope(|scope| -> Result<u64> {
        let others: Vec<_> = workload.others.iter().map(|ops| scope.spawn(|| one(ops))).collect();
        let mut refused = one(&workload.ops)?;
        for other in others {
            refused +=
                other.join().unwrap_or_else(|payload| Err(panics::told("engine", &*payload)))?;
        }
        Ok(refused)
    })?;
    fs.unmount().context("unmount")?;
    let stamp = device.stamp();
    model.lock().promise(stamp, &Op::Sync);
    let stats = fs.stats();
    let lens = [&workload.ops].into_iter().chain(&workload.others).map(|ops| ops.len() as u64);
    Ok(Ran {
        ops: lens.sum(),
        refused,
        by_policy: stats.fsync.policy,
        fallbacks: stats.fsync.fallbacks.iter().map(|(_, count)| count).sum(),
        partial_commits: stats.journal.partial_commits,
        overlapped_commits: stats.journal.overlapped_commits,
    })
}
