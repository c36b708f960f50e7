//! Power cuts: the images that a device may leave. Owns nothing of the device; a [`CutState`] is a
//! copy of the relevant state at one moment (cheap: contents are shared copy-on-write).
//!
//! Invariant: each image of [`CutState::image`] includes all promised data (completed flushes and
//! FUA writes), and keeps the order of the device's barrier form.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::core::CommandId;
use super::log::{Data, Log, Progress};
use super::profile::{BarrierForm, SECTOR_BYTES};
use crate::mem::MemImage;

/// Scope of legal images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutScope {
    /// All that the host cannot exclude from completions. For finding bugs.
    #[default]
    Contract,
    /// Those that the model could leave at this moment: programmed data is there, data being
    /// programmed may be, the rest of a volatile cache is not.
    Timed,
}

/// Chooses among legal images.
pub trait Chooser {
    /// A number below `count`, which is at least 1.
    fn choose(&mut self, count: u64) -> u64;
}

impl<F: FnMut(u64) -> u64> Chooser for F {
    fn choose(&mut self, count: u64) -> u64 {
        self(count)
    }
}

/// Chooses by a seed: the same seed gives the same image of the same state.
#[derive(Debug)]
pub struct SeededChooser(StdRng);

impl SeededChooser {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        SeededChooser(StdRng::seed_from_u64(seed))
    }
}

impl Chooser for SeededChooser {
    fn choose(&mut self, count: u64) -> u64 {
        self.0.random_range(0..count.max(1))
    }
}

/// Effect of a power cut on a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// It survives.
    Certain,
    /// It survives, is lost, or is torn at sector borders, within the rule of the state.
    Possible,
    /// It is lost.
    Lost,
}

/// A write of at most one unit of 4096 bytes (or a zeroed range) that is not certain to survive, or
/// that follows such a write.
#[derive(Clone, Debug)]
pub struct CutWrite {
    /// The command that it is part of.
    pub id: CommandId,
    /// The epoch on the device.
    pub epoch: u64,
    /// Byte offset.
    pub offset: u64,
    /// What becomes of it.
    pub survival: Survival,
    data: Data,
}

impl CutWrite {
    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.data.len()
    }
}

/// Which sets of [`CutState::writes`] may survive together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutRule {
    /// Any subset, each write torn or not.
    Subset,
    /// All of some epochs, any subset of the next one, nothing of later ones.
    EpochPrefix,
    /// The first N writes, for one of these counts (ascending); none is torn.
    Prefix(Vec<usize>),
}

/// The state of a device when the power went.
#[derive(Clone, Debug)]
pub struct CutState {
    /// Contents that certainly survive.
    pub base: MemImage,
    /// Later writes, in transfer order.
    pub writes: Vec<CutWrite>,
    /// Which of them may survive together.
    pub rule: CutRule,
}

impl CutState {
    /// The state of `log`; `under_way` is the command that was being transferred.
    pub(super) fn new(
        log: &Log,
        under_way: Option<(CommandId, &[(u64, Data)])>,
        barrier: Option<BarrierForm>,
        protected: bool,
        scope: CutScope,
    ) -> CutState {
        let survival = |progress, acked| match (scope, progress) {
            _ if acked => Survival::Certain,
            (CutScope::Contract, _) | (CutScope::Timed, Progress::Programming) => {
                Survival::Possible
            }
            (CutScope::Timed, Progress::Programmed) => Survival::Certain,
            (CutScope::Timed, Progress::Cached) => Survival::Lost,
        };
        let mut writes: Vec<CutWrite> = log
            .entries
            .iter()
            .map(|entry| CutWrite {
                id: entry.id,
                epoch: entry.epoch,
                offset: entry.offset,
                survival: survival(entry.progress, entry.acked),
                data: entry.data.clone(),
            })
            .collect();
        let in_order = matches!(
            barrier,
            Some(BarrierForm::InOrderRecovery | BarrierForm::TransactionalWriteback)
        );
        let rule = match barrier {
            _ if protected => CutRule::Subset,
            Some(BarrierForm::InOrderRecovery) => CutRule::Prefix((0..=writes.len()).collect()),
            Some(BarrierForm::TransactionalWriteback) => CutRule::Prefix(unit_counts(log)),
            // The drain itself kept the order of what is programmed.
            Some(BarrierForm::InOrderWriteback) if scope == CutScope::Contract => {
                CutRule::EpochPrefix
            }
            Some(BarrierForm::InOrderWriteback) | None => CutRule::Subset,
        };
        if let (Some((id, units)), true) = (under_way, protected || !in_order) {
            let of_cache = protected || scope == CutScope::Contract;
            let survival = if of_cache { Survival::Possible } else { Survival::Lost };
            writes.extend(units.iter().map(|(offset, data)| CutWrite {
                id,
                epoch: log.epoch,
                offset: *offset,
                survival,
                data: data.clone(),
            }));
        }
        let rule = match rule {
            CutRule::Prefix(counts) => CutRule::Prefix(possible_counts(&writes, counts)),
            rule => rule,
        };
        CutState { base: log.durable.clone(), writes, rule }
    }

    /// One of the legal images.
    pub fn image(&self, chooser: &mut dyn Chooser) -> MemImage {
        let mut image = self.base.clone();
        match &self.rule {
            CutRule::Subset => {
                self.writes.iter().for_each(|write| apply(write, &mut image, chooser));
            }
            CutRule::EpochPrefix => {
                let certain = self.writes.iter().rev().find(|w| w.survival == Survival::Certain);
                let lowest = certain.or(self.writes.first()).map_or(0, |write| write.epoch);
                let highest = self.writes.last().map_or(0, |write| write.epoch);
                let torn_epoch = lowest + chooser.choose(highest.saturating_sub(lowest) + 1);
                for write in &self.writes {
                    match write.epoch.cmp(&torn_epoch) {
                        std::cmp::Ordering::Less => write.data.apply(&mut image, write.offset),
                        std::cmp::Ordering::Equal => apply(write, &mut image, chooser),
                        std::cmp::Ordering::Greater => {}
                    }
                }
            }
            CutRule::Prefix(counts) => {
                let index = chooser.choose(counts.len().max(1) as u64) as usize;
                let count = counts.get(index).copied().unwrap_or(0);
                for write in self.writes.iter().take(count) {
                    write.data.apply(&mut image, write.offset);
                }
            }
        }
        image
    }

    /// The legal image with the most writes: that of a device after a long idle time.
    pub fn image_with_all(&self) -> MemImage {
        let mut image = self.base.clone();
        let kept = match &self.rule {
            CutRule::Prefix(counts) => counts.last().copied().unwrap_or(0),
            _ => self.writes.len(),
        };
        for write in self.writes.iter().take(kept).filter(|w| w.survival != Survival::Lost) {
            write.data.apply(&mut image, write.offset);
        }
        image
    }
}

/// How many writes the log has before each border of a unit.
fn unit_counts(log: &Log) -> Vec<usize> {
    let mut counts = vec![0];
    counts.extend(log.unit_ends.iter().map(|end| (end - log.first()) as usize));
    // What is in the cache and not being drained would be one unit more.
    counts.push(log.entries.len());
    counts.dedup();
    counts
}

/// The counts that keep all certain writes and no lost one.
fn possible_counts(writes: &[CutWrite], counts: Vec<usize>) -> Vec<usize> {
    let first_lost = writes.iter().position(|w| w.survival == Survival::Lost);
    let most = first_lost.unwrap_or(writes.len());
    // What is programmed after a hole is cut off with it; before it, it is there.
    let first_open = writes.iter().position(|w| w.survival != Survival::Certain);
    let programmed = first_open.unwrap_or(writes.len());
    // A unit that is not complete counts for nothing.
    let least = counts.iter().copied().filter(|count| *count <= programmed).max().unwrap_or(0);
    counts.into_iter().filter(|count| (least..=most.max(least)).contains(count)).collect()
}

/// Applies what survives of a write.
fn apply(write: &CutWrite, image: &mut MemImage, chooser: &mut dyn Chooser) {
    let kept = match write.survival {
        Survival::Certain => 1,
        Survival::Lost => 0,
        Survival::Possible => chooser.choose(3),
    };
    match (kept, &write.data) {
        (0, _) => {}
        (1, data) => data.apply(image, write.offset),
        (_, Data::Bytes(buf)) => {
            let mut at = write.offset;
            let mut rest = &buf[..];
            while !rest.is_empty() {
                let sector = (SECTOR_BYTES - at % SECTOR_BYTES) as usize;
                let (head, tail) = rest.split_at(sector.min(rest.len()));
                if chooser.choose(2) == 1 {
                    // The range was checked when the command was submitted.
                    let _ = image.write_at(at, head);
                }
                at += head.len() as u64;
                rest = tail;
            }
        }
        (_, Data::Zeroes(len)) => {
            let sectors = chooser.choose(len / SECTOR_BYTES + 1);
            image.zero(write.offset, sectors * SECTOR_BYTES);
        }
    }
}
