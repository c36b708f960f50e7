//! Findings, and the command that repeats one.
//!
//! Owns [`Finding`], [`CasePath`] and [`Damage`], the name of one image with all that was done to
//! it. Invariant: [`Finding::rerun`] names the image exactly; where threads make the run itself
//! unrepeatable, it names the recorded run in a file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use fjord::Scheduler;

use crate::check::{Kind, Problem};
use crate::command::CrashArgs;
use crate::explore::{Config, Workload};
use crate::recording::Recording;
use crate::states::Case;

/// A case, and inside the recovery from it perhaps another, and so on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CasePath(pub Vec<Case>);

impl fmt::Display for CasePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<_> = self.0.iter().map(Case::to_string).collect();
        f.write_str(&parts.join("+"))
    }
}

impl std::str::FromStr for CasePath {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<CasePath> {
        Ok(CasePath(text.split('+').map(str::parse).collect::<Result<_>>()?))
    }
}

/// A bit of an image that is turned before its recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Which byte.
    pub at: u64,
    /// Which bit of it, 0 to 7.
    pub bit: u8,
}

impl fmt::Display for Damage {
    /// `BYTE:BIT`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.at, self.bit)
    }
}

impl std::str::FromStr for Damage {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Damage> {
        let bad =
            || format!("{text:?} is not a bit of an image; expected BYTE:BIT, such as 1056768:3");
        let (at, bit) = text.split_once(':').with_context(bad)?;
        let damage =
            Damage { at: at.parse().with_context(bad)?, bit: bit.parse().with_context(bad)? };
        anyhow::ensure!(damage.bit < 8, bad());
        Ok(damage)
    }
}

/// One image of a run, and how it is judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The cut, and cuts inside the recoveries.
    pub path: CasePath,
    /// What is damaged besides.
    pub damage: Option<Damage>,
}

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What.
    pub problem: Problem,
    /// Which image; `None` when the run itself failed.
    pub target: Option<Target>,
    /// The workload.
    pub workload: Workload,
    /// How it was explored.
    pub config: Config,
    /// The run that the image is of.
    pub recording: Arc<Recording>,
    /// Where the recording is, if it was saved.
    pub saved: Option<PathBuf>,
}

impl Finding {
    /// The kind of the problem.
    pub fn kind(&self) -> Kind {
        self.problem.kind
    }

    /// Saves the recorded run in a directory, if running it again would not give the same
    /// requests.
    ///
    /// # Errors
    /// The directory cannot be made, or the file not written.
    pub fn save(&mut self, dir: &Path) -> Result<()> {
        // What the epoch scheduler sends depends on when earlier requests end.
        let races =
            !self.workload.others.is_empty() || self.config.options.scheduler == Scheduler::Epoch;
        if self.target.is_some() && races {
            let line = CrashArgs::of_run(&self.config, &self.workload).to_string();
            self.saved = Some(self.recording.save(dir, &line)?);
        }
        Ok(())
    }

    /// The command that shows it again.
    pub fn rerun(&self) -> CrashArgs {
        let of_run = || CrashArgs::of_run(&self.config, &self.workload);
        let mut args = self.saved.clone().map_or_else(of_run, CrashArgs::of_recording);
        if let Some(target) = &self.target {
            args.case = Some(target.path.clone());
            args.damage = target.damage;
        }
        args
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  rerun: {}", self.problem, self.rerun())?;
        if self.saved.is_none() && !self.workload.others.is_empty() {
            f.write_str("\n  (the order of its threads is not deterministic: this may pass)")?;
        }
        Ok(())
    }
}
