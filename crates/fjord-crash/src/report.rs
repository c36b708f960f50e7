//! What explorations did, in numbers.
//!
//! Owns [`Report`].

use crate::finding::Finding;
use crate::judge::JudgeStats;
use crate::recording::Ran;
use crate::states::Walked;

/// What an exploration did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Workloads.
    pub workloads: u64,
    /// Operations.
    pub ops: u64,
    /// Operations that the engine refused.
    pub refused: u64,
    /// fsync and fdatasync calls that the policy served by itself.
    pub by_policy: u64,
    /// Those that fell back to a commit of everything.
    pub fallbacks: u64,
    /// Commits of parts of a transaction (policy `group`).
    pub partial_commits: u64,
    /// Requests recorded.
    pub requests: u64,
    /// Moments at which a cut leaves other images, and how many of them were tried.
    pub walked: Walked,
    /// Images built, equal ones too.
    pub cases: u64,
    /// Distinct images of the workloads' cuts.
    pub states: u64,
    /// Distinct images of cuts inside recovery.
    pub inner_states: u64,
    /// Recoveries, e2fsck runs, comparisons.
    pub judged: JudgeStats,
    /// What was found.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The report of one run, before its first state.
    pub fn of(ran: Ran) -> Report {
        Report {
            workloads: 1,
            ops: ran.ops,
            refused: ran.refused,
            by_policy: ran.by_policy,
            fallbacks: ran.fallbacks,
            partial_commits: ran.partial_commits,
            ..Report::default()
        }
    }

    /// Adds another.
    pub fn add(&mut self, other: Report) {
        self.workloads += other.workloads;
        self.ops += other.ops;
        self.refused += other.refused;
        self.by_policy += other.by_policy;
        self.fallbacks += other.fallbacks;
        self.partial_commits += other.partial_commits;
        self.requests += other.requests;
        self.walked.moments += other.walked.moments;
        self.walked.tried += other.walked.tried;
        self.cases += other.cases;
        self.states += other.states;
        self.inner_states += other.inner_states;
        self.judged.add(&other.judged);
        self.findings.extend(other.findings);
    }

    /// All states that were tried.
    pub fn all_states(&self) -> u64 {
        self.states + self.inner_states
    }
}
