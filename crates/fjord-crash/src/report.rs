//! What explorations did, in numbers.
//!
//! Owns [`Report`], and [`Combination`], the part of a configuration whose runs are counted.

use std::collections::BTreeMap;

use crate::command::{data_name, pipeline_name, scheduler_name};
use crate::explore::Config;
use crate::finding::Finding;
use crate::judge::JudgeStats;
use crate::recording::Ran;
use crate::states::Walked;

/// What orders the writes of a configuration: by the names on the command line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Combination {
    /// When a commit may follow another.
    pub pipeline: String,
    /// Fsync policy.
    pub policy: &'static str,
    /// Data mode.
    pub data: &'static str,
    /// Device.
    pub device: &'static str,
    /// Who keeps the order of writes.
    pub scheduler: String,
}

impl Combination {
    /// That of a configuration.
    pub fn of(config: &Config) -> Combination {
        let options = &config.options;
        Combination {
            pipeline: pipeline_name(options.pipeline),
            policy: options.fsync.name(),
            data: data_name(options.data),
            device: config.device.name(),
            scheduler: scheduler_name(options.scheduler),
        }
    }
}

/// What an exploration did with one [`Combination`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Covered {
    /// Workloads that ran to their end.
    pub workloads: u64,
    /// Distinct images of their cuts.
    pub states: u64,
    /// Commits that began while another was in flight.
    pub overlapped_commits: u64,
}

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
    /// Commits that began while another was in flight.
    pub overlapped_commits: u64,
    /// What of it was done with each combination.
    pub covered: BTreeMap<Combination, Covered>,
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
            overlapped_commits: ran.overlapped_commits,
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
        self.overlapped_commits += other.overlapped_commits;
        for (combination, covered) in other.covered {
            let sum = self.covered.entry(combination).or_default();
            sum.workloads += covered.workloads;
            sum.states += covered.states;
            sum.overlapped_commits += covered.overlapped_commits;
        }
        self.requests += other.requests;
        self.walked.moments += other.walked.moments;
        self.walked.tried += other.walked.tried;
        self.cases += other.cases;
        self.states += other.states;
        self.inner_states += other.inner_states;
        self.judged.add(&other.judged);
        self.findings.extend(other.findings);
    }

    /// Counts the exploration of one workload, which it is of, as one of its configuration.
    pub(crate) fn cover(&mut self, config: &Config) {
        let covered = Covered {
            workloads: 1,
            states: self.states,
            overlapped_commits: self.overlapped_commits,
        };
        self.covered.insert(Combination::of(config), covered);
    }

    /// All states that were tried.
    pub fn all_states(&self) -> u64 {
        self.states + self.inner_states
    }
}
