//! Many workloads on several threads.
//!
//! Owns [`Plan`], what to explore under which configurations, and [`run`].
//!
//! Invariant: the jobs of a plan come in one order, whatever the number of threads; each
//! workload gets a configuration in turn, or all of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use fjord::CommitPipeline;
use parking_lot::Mutex;

use crate::base::Features;
use crate::explore::{Config, Shared, Workload, explore_until};
use crate::finding::Finding;
use crate::journal_how::JournalHow;
use crate::minimise::minimise;
use crate::panics;
use crate::record::DeviceKind;
use crate::report::Report;
use crate::workloads::Family;

/// What to explore.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Families, in this order; endless ones take turns at the end.
    pub families: Vec<Family>,
    /// Feature sets.
    pub features: Vec<Features>,
    /// Data modes.
    pub data: Vec<fjord::DataMode>,
    /// Devices.
    pub devices: Vec<DeviceKind>,
    /// Commit pipelines.
    pub pipelines: Vec<CommitPipeline>,
    /// How the journal works, in turn.
    pub journals: Vec<JournalHow>,
    /// Every workload under every configuration, instead of one each in turn.
    pub product: bool,
    /// Everything else.
    pub config: Config,
    /// Take only one in so many workloads of each family.
    pub sample_every: usize,
    /// At most so many workloads in all.
    pub workloads_max: Option<usize>,
    /// Start no workload after this moment.
    pub deadline: Option<Instant>,
    /// Threads.
    pub threads: usize,
    /// Stop at so many findings.
    pub findings_max: usize,
    /// Where runs of several threads with a finding are kept.
    pub save: Option<PathBuf>,
}

impl Plan {
    /// These families with one configuration.
    pub fn new(families: &[Family], config: Config) -> Plan {
        Plan {
            families: families.to_vec(),
            features: vec![config.features],
            data: vec![config.options.data],
            devices: vec![config.device],
            pipelines: vec![config.options.pipeline],
            journals: vec![JournalHow::of(&config.options)],
            product: false,
            config,
            sample_every: 1,
            workloads_max: None,
            deadline: None,
            threads: 2,
            findings_max: 1,
            save: None,
        }
    }

    fn configs(&self) -> Vec<Config> {
        let pipelines = self
            .devices
            .iter()
            .flat_map(|device| self.pipelines.iter().map(move |&pipeline| (*device, pipeline)));
        let mut configs = Vec::new();
        for (device, pipeline) in pipelines {
            for &data in &self.data {
                for &features in &self.features {
                    let mut config = Config { features, device, ..self.config.clone() };
                    (config.options.data, config.options.pipeline) = (data, pipeline);
                    configs.push(config);
                }
            }
        }
        configs
    }

    /// Tries whether recordings can be saved where they are to be: a campaign of hours should not
    /// find that out last.
    ///
    /// # Errors
    /// The directory cannot be made, or takes no files.
    pub fn check_save(&self) -> Result<()> {
        let Some(dir) = &self.save else { return Ok(()) };
        let cannot = || format!("cannot write to {}; choose another --save", dir.display());
        std::fs::create_dir_all(dir).with_context(cannot)?;
        tempfile::tempfile_in(dir).with_context(cannot)?;
        Ok(())
    }

    /// How many jobs there are; `None` if a family is endless.
    pub fn job_count(&self) -> Option<usize> {
        let endless = self.families.iter().any(|family| family.is_endless());
        let count = || {
            let of = |family: &Family| family.workloads(self.config.seed).count();
            let all: usize =
                self.families.iter().map(|f| of(f).div_ceil(self.sample_every.max(1))).sum();
            all * if self.product { self.configs().len() } else { 1 }
        };
        let all = if endless { None } else { Some(count()) };
        match (all, self.workloads_max) {
            (Some(all), Some(max)) => Some(all.min(max)),
            (all, max) => all.or(max),
        }
    }

    fn jobs(&self) -> Box<dyn Iterator<Item = (Config, Workload)> + Send> {
        let seed = self.config.seed;
        let step = self.sample_every.max(1);
        let (endless, bounded): (Vec<_>, Vec<_>) =
            self.families.iter().copied().partition(|family| family.is_endless());
        let bounded = bounded.into_iter().flat_map(move |f| f.workloads(seed).step_by(step));
        let mut turns: Vec<_> = endless.into_iter().map(|family| family.workloads(seed)).collect();
        let mut turn = 0;
        let endless = std::iter::from_fn(move || {
            turn = (turn + 1) % turns.len().max(1);
            turns.get_mut(turn)?.next()
        });
        let configs = self.configs();
        let (product, journals) = (self.product, self.journals.clone());
        let jobs = bounded.chain(endless).enumerate().flat_map(move |(index, workload)| {
            let chosen = if product {
                configs.clone()
            } else {
                vec![configs[turn_of(index, configs.len())].clone()]
            };
            // Each configuration meets each of them after a while.
            let journal =
                journals.get((index / configs.len().max(1) + index) % journals.len().max(1));
            let journal = journal.copied();
            chosen.into_iter().map(move |mut config| {
                if let Some(journal) = journal {
                    journal.apply(&mut config.options);
                }
                (config, workload.clone())
            })
        });
        match self.workloads_max {
            Some(max) => Box::new(jobs.take(max)),
            None => Box::new(jobs),
        }
    }
}

/// The configuration of `count` that is the turn of a job: all come equally often, and neighbours
/// have little in common, so that a few jobs see many features, data modes and devices.
fn turn_of(job: usize, count: usize) -> usize {
    let coprime = |stride: &usize| {
        let (mut a, mut b) = (*stride, count);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    // Near the golden section of the count.
    let stride = (count * 5 / 8..).find(coprime).unwrap_or(1);
    job % count * stride % count
}

/// What happens in a campaign.
#[derive(Debug)]
pub enum Event<'a> {
    /// Something is found, and will be made small now.
    Found(&'a Finding),
    /// The recording of a finding could not be saved.
    NotSaved(&'a anyhow::Error),
    /// A workload has ended; the sum so far, with findings as small as they become.
    Done(&'a Report),
}

/// Runs a plan; calls `progress` for events, and counts in `shared`. Findings are
/// minimised.
///
/// # Errors
/// The tools do not run, or a base cannot be made.
pub fn run(
    plan: &Plan,
    shared: &Arc<Shared>,
    progress: &(dyn Fn(Event<'_>) + Sync),
) -> Result<Report> {
    let jobs = Mutex::new(plan.jobs());
    let total = Mutex::new(Report::default());
    let stop = AtomicBool::new(false);
    let work = || -> Result<()> {
        while !stop.load(Ordering::Relaxed) && !shared.is_stopped() {
            if plan.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
            let Some((config, workload)) = jobs.lock().next() else { break };
            let mut report = explore_until(&config, &workload, shared, plan.deadline)?;
            for finding in &mut report.findings {
                progress(Event::Found(finding));
                *finding = minimise(finding.clone())?;
                if let Some(Err(error)) = plan.save.as_deref().map(|dir| finding.save(dir)) {
                    progress(Event::NotSaved(&error));
                }
            }
            let mut total = total.lock();
            total.add(report);
            if total.findings.len() >= plan.findings_max {
                stop.store(true, Ordering::Relaxed);
            }
            progress(Event::Done(&total));
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..plan.threads.max(1)).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            let outcome =
                thread.join().unwrap_or_else(|payload| Err(panics::told("explorer", &*payload)));
            if outcome.is_err() {
                stop.store(true, Ordering::Relaxed);
                outcome?;
            }
        }
        Ok(())
    })?;
    Ok(total.into_inner())
}

#[cfg(test)]
mod tests {
    use super::turn_of;

    #[test]
    fn every_configuration_has_its_turn() {
        for count in [1, 2, 3, 9, 117] {
            let mut turns: Vec<usize> = (count..2 * count).map(|job| turn_of(job, count)).collect();
            turns.sort_unstable();
            assert!(turns.into_iter().eq(0..count));
        }
    }
}
