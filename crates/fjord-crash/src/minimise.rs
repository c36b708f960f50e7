//! Minimises findings.
//!
//! Owns [`minimise`]. First operations are left out, of the workload and then of what prepares
//! the tree, as long as a finding of the same kind remains; then the image comes nearer to the
//! plain prefix of the requests, every write kept whole, as long as the same kind of problem
//! shows.
//!
//! Runs of several threads are not repeated: only their image is made small, in the run that was
//! recorded.
//!
//! Invariant: the result has been checked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::check::{Kind, Problem};
use crate::explore::{Config, Replayer, Workload, explore_until};
use crate::finding::{CasePath, Finding, Target};
use crate::ops::Op;
use crate::states::{Case, Kept};

/// Explorations that one finding is worth, and the time for them.
const EXPLORATIONS_MAX: usize = 400;
/// See [`EXPLORATIONS_MAX`].
const EXPLORING_MAX: Duration = Duration::from_secs(120);
/// Lists of so many operations first lose what comes after the finding.
const LONG: usize = 64;
/// Judged images that one finding is worth.
const IMAGES_MAX: usize = 600;

/// The finding with as few operations, and as few writes missing or torn, as trying finds.
///
/// # Errors
/// The tools do not run.
pub fn minimise(mut finding: Finding) -> Result<Finding> {
    if finding.workload.others.is_empty() {
        let mut tries = Tries { left: EXPLORATIONS_MAX, end: Instant::now() + EXPLORING_MAX };
        tries.shorten(&mut finding);
        tries.fewer_ops(&mut finding, |workload| &mut workload.ops);
        tries.fewer_ops(&mut finding, |workload| &mut workload.setup);
    }
    plainer_image(&mut finding)?;
    Ok(finding)
}

/// What a finding is still worth.
struct Tries {
    /// Explorations.
    left: usize,
    /// When the last of them ends.
    end: Instant,
}

impl Tries {
    /// Goes on with this workload if it has a finding of the same kind.
    fn take(&mut self, finding: &mut Finding, workload: &Workload) -> bool {
        if self.left == 0 || Instant::now() >= self.end {
            return false;
        }
        self.left -= 1;
        let config = Config { findings_max: 1, ..finding.config.clone() };
        // A tree that cannot be made so is no candidate.
        let found = explore_until(&config, workload, &Arc::default(), Some(self.end));
        let same = |other: &Finding| other.kind() == finding.kind();
        match found.ok().and_then(|report| report.findings.into_iter().find(same)) {
            Some(smaller) => *finding = smaller,
            None => return false,
        }
        true
    }

    /// Looks for the first operation after which a long workload has the finding.
    fn shorten(&mut self, finding: &mut Finding) {
        let mut sound = 0;
        while finding.workload.ops.len() - sound > LONG {
            let mut workload = finding.workload.clone();
            let half = sound + (workload.ops.len() - sound) / 2;
            workload.ops.truncate(half);
            if !self.take(finding, &workload) {
                sound = half;
            }
        }
    }

    /// Leaves out operations of the list that `list` names, many at once first.
    fn fewer_ops(&mut self, finding: &mut Finding, list: fn(&mut Workload) -> &mut Vec<Op>) {
        let len = |finding: &mut Finding| list(&mut finding.workload).len();
        let mut width = len(finding).div_ceil(2);
        while width > 0 {
            let mut at = 0;
            while at < len(finding) {
                let mut workload = finding.workload.clone();
                let ops = list(&mut workload);
                ops.drain(at..(at + width).min(ops.len()));
                if !self.take(finding, &workload) {
                    at += width;
                }
            }
            width /= 2;
        }
    }
}

/// Makes the image of a finding plainer, in the run that it is of.
fn plainer_image(finding: &mut Finding) -> Result<()> {
    let Some(target) = finding.target.clone() else { return Ok(()) };
    let recording = finding.recording.clone();
    let replayer = Replayer::new(&finding.config, &finding.workload, recording)?;
    let kind = finding.kind();
    let mut search = Search { replayer, kind, tries: IMAGES_MAX, best: None, target };
    // Without the cuts inside recovery, if the outer one is enough.
    if search.target.path.0.len() > 1 {
        let path = CasePath(search.target.path.0[..1].to_vec());
        search.take(Target { path, ..search.target.clone() });
    }
    for level in (0..search.target.path.0.len()).rev() {
        search.restore_writes(level);
        search.mend_torn(level);
    }
    if let Some(problem) = search.best {
        *finding = Finding { problem, target: Some(search.target), ..finding.clone() };
    }
    Ok(())
}

/// A search for the plainest image.
struct Search {
    replayer: Replayer,
    kind: Kind,
    /// Images that may still be judged.
    tries: usize,
    /// The problem of `target`, if it is not the first one.
    best: Option<Problem>,
    target: Target,
}

impl Search {
    /// Goes on from this target if the same kind of problem shows there. One that this run does
    /// not have is none.
    fn take(&mut self, target: Target) -> bool {
        if self.tries == 0 || target == self.target {
            return false;
        }
        self.tries -= 1;
        match self.replayer.problem(&target) {
            Ok(Some(problem)) if problem.kind == self.kind => {
                (self.best, self.target) = (Some(problem), target);
                true
            }
            _ => false,
        }
    }

    fn take_case(&mut self, level: usize, case: Case) -> bool {
        let mut target = self.target.clone();
        target.path.0[level] = case;
        self.take(target)
    }

    /// Keeps writes whole that are missing or torn: all of them, halves of them, ..., single ones.
    fn restore_writes(&mut self, level: usize) {
        let Some(pending) = self.replayer.pending(&self.target.path.0[..=level]) else { return };
        let is_whole = |case: &Case, index: usize| {
            case.kept.iter().any(|kept| kept.index == index && kept.sectors.is_none())
        };
        let case = &self.target.path.0[level];
        let mut other: Vec<usize> =
            pending.into_iter().filter(|index| !is_whole(case, *index)).collect();
        let mut width = other.len();
        while width > 0 {
            let mut at = 0;
            while at < other.len() {
                let end = (at + width).min(other.len());
                let mut case = self.target.path.0[level].clone();
                for &index in &other[at..end] {
                    case.set(index, Some(Kept { index, sectors: None }));
                }
                if self.take_case(level, case) {
                    other.drain(at..end);
                } else {
                    at = end;
                }
            }
            width /= 2;
        }
    }

    /// Leaves torn writes out, or keeps as many of their sectors as can be.
    fn mend_torn(&mut self, level: usize) {
        let torn: Vec<Kept> = self.target.path.0[level]
            .kept
            .iter()
            .filter(|k| k.sectors.is_some())
            .cloned()
            .collect();
        for Kept { index, sectors } in torn {
            let mut case = self.target.path.0[level].clone();
            case.set(index, None);
            if self.take_case(level, case) {
                continue;
            }
            let mut sectors = sectors.unwrap_or_default();
            for sector in 0..sectors.len() {
                if sectors[sector] {
                    continue;
                }
                let mut fuller = sectors.clone();
                fuller[sector] = true;
                let mut case = self.target.path.0[level].clone();
                case.set(index, Some(Kept { index, sectors: Some(fuller.clone()) }));
                if self.take_case(level, case) {
                    sectors = fuller;
                }
            }
        }
    }
}
