//! The images that a power cut could leave.
//!
//! Owns [`enumerate`], which walks a [`Log`] and returns the legal images at each moment, and
//! [`Case`], the name of one of them.
//!
//! At any moment some writes are *forced* (a completed flush or FUA covers them, or the device
//! has no cache and they are done); the others are *pending*, and each may be there, missing, or
//! torn at a sector. A device with native barriers keeps a pending write only if all of earlier
//! epochs are there, and what else had completed before their barriers. The moments are the
//! submissions (the new write makes new images) and the
//! moments at which writes become forced (images of before are legal no more).
//!
//! Invariants: images are built in the order of submission, so that of two kept writes to one
//! sector the later wins; every case that is given is legal for its whole window.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use fjord_testkit::rng::Rng;

use crate::image::Image;
use crate::record::{DeviceKind, Effect, Entry, Log, OBJECT_BYTES};

/// The smallest unit that is written whole.
pub const SECTOR_BYTES: u64 = 512;
/// What a discarded range holds after a power cut.
const GARBAGE: u8 = 0xDB;

/// How many images a moment gives at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Subsets of whole writes at each moment: all of them when there are no more; else those
    /// that have each pair in all four combinations, and others up to this number.
    pub subsets_max: usize,
    /// Torn variants at each moment.
    pub torn_max: usize,
    /// About so many images of the log: where all moments would give more, few moments are taken, one
    /// by seed out of each run of so many. `None` for all.
    pub images_max: Option<usize>,
}

impl Budget {
    /// For logs of recoveries: as many images of a moment, but where moments are few, fewer still.
    #[must_use]
    pub fn inside(self) -> Budget {
        /// Sample: one of N of the cases of the log.
        const SHARE: usize = 64;
        Budget { images_max: self.images_max.map(|max| (max / SHARE).max(1)), ..self }
    }

    /// How many images a moment gives with so many writes that vary.
    fn images(&self, varying: usize) -> usize {
        let subsets = match all_subsets(varying, self.subsets_max) {
            Some(all) => all,
            None => self.subsets_max.max(2 + pairwise_rows(varying)),
        };
        subsets + self.torn_max
    }
}

/// The moments of a log, and how many of them were tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// How many there are.
    pub moments: u64,
    /// Those whose images were built.
    pub tried: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { subsets_max: 32, torn_max: 2, images_max: None }
    }
}

/// A pending write that a case keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its index in the log.
    pub index: usize,
    /// Which of its sectors; `None` for all.
    pub sectors: Option<Vec<bool>>,
}

/// One legal image: the moment and the pending writes that are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The stamp of the event that the cut follows.
    pub after: u64,
    /// Which pending writes are there.
    pub kept: Vec<Kept>,
}

impl Case {
    /// Says what is there of a pending write: in the order of indexes.
    pub fn set(&mut self, index: usize, kept: Option<Kept>) {
        self.kept.retain(|other| other.index != index);
        self.kept.extend(kept);
        self.kept.sort_by_key(|kept| kept.index);
    }
}

impl std::fmt::Display for Case {
    /// `AFTER:INDEX,INDEX/0110,...`, or `AFTER:-` when nothing pending is kept.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:", self.after)?;
        if self.kept.is_empty() {
            return f.write_str("-");
        }
        for (position, kept) in self.kept.iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            write!(f, "{comma}{}", kept.index)?;
            if let Some(sectors) = &kept.sectors {
                let bits: String =
                    sectors.iter().map(|kept| if *kept { '1' } else { '0' }).collect();
                write!(f, "/{bits}")?;
            }
        }
        Ok(())
    }
}

impl std::str::FromStr for Case {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Case> {
        let bad = || anyhow::anyhow!("{text:?} is not a case; expected the form 17:3,5/0110");
        let (after, list) = text.split_once(':').ok_or_else(bad)?;
        let mut kept = Vec::new();
        for part in list.split(',').filter(|part| *part != "-" && !part.is_empty()) {
            let (index, bits) = match part.split_once('/') {
                Some((index, bits)) => (index, Some(bits)),
                None => (part, None),
            };
            let sectors = bits.map(|bits| bits.chars().map(|bit| bit == '1').collect());
            kept.push(Kept { index: index.parse().map_err(|_| bad())?, sectors });
        }
        Ok(Case { after: after.parse().map_err(|_| bad())?, kept })
    }
}

/// A case with its image and the cuts for which it is legal.
#[derive(Clone, Debug)]
pub struct CrashState {
    /// Which one.
    pub case: Case,
    /// The image.
    pub image: Image,
    /// The first cut: what has a smaller stamp has happened.
    pub first_cut: u64,
    /// The last cut.
    pub last_cut: u64,
}

impl CrashState {
    /// The first and the last cut: the most promises are due at the last, the fewest changes have
    /// begun at the first.
    pub fn cuts(&self) -> [u64; 2] {
        [self.first_cut, self.last_cut]
    }
}

/// A moment at which the set of legal images changes.
#[derive(Debug)]
struct Moment {
    stamp: u64,
    /// The write that was submitted.
    submitted: Option<usize>,
    /// The writes that became forced.
    forced: Vec<usize>,
}

fn is_write(entry: &Entry) -> bool {
    !matches!(entry.effect, Effect::Flush)
}

/// The moments of a log, in order.
fn moments(log: &Log, kind: DeviceKind) -> Vec<Moment> {
    let mut events: Vec<(u64, usize, bool)> = Vec::new();
    for (index, entry) in log.entries.iter().enumerate() {
        if is_write(entry) {
            events.push((entry.submitted_at, index, false));
        }
        if entry.completed_at != u64::MAX {
            events.push((entry.completed_at, index, true));
        }
    }
    events.sort_unstable();
    let before = epochs_before(log);
    let mut pending: Vec<usize> = Vec::new();
    let mut moments = Vec::new();
    for (stamp, index, completion) in events {
        if !completion {
            pending.push(index);
            moments.push(Moment { stamp, submitted: Some(index), forced: Vec::new() });
            continue;
        }
        let forced = forced_by(log, kind, &before, &pending, index);
        if !forced.is_empty() {
            pending.retain(|other| !forced.contains(other));
            moments.push(Moment { stamp, submitted: None, forced });
        }
    }
    moments
}

/// The epoch that each write is durable before the end of, on a device that keeps epochs apart: an
/// ordered write's own, and for others the one whose barrier was the first to be submitted after
/// their completion.
fn epochs_before(log: &Log) -> Vec<Option<u64>> {
    // The last write of an epoch is its barrier, if another epoch follows.
    let ordered = || log.entries.iter().filter_map(|e| e.epoch.map(|epoch| (epoch, e)));
    let barriers: BTreeMap<u64, u64> =
        ordered().map(|(epoch, entry)| (epoch, entry.submitted_at)).collect();
    let newest = barriers.keys().last().copied();
    let before = |entry: &Entry| {
        let follows = |epoch: &u64| Some(*epoch) < newest;
        let first = |(epoch, at): (&u64, &u64)| (*at > entry.completed_at).then_some(*epoch);
        entry.epoch.or_else(|| barriers.iter().find_map(first).filter(follows))
    };
    log.entries.iter().map(before).collect()
}

/// Which pending writes the completion of `index` makes durable.
fn forced_by(
    log: &Log,
    kind: DeviceKind,
    before: &[Option<u64>],
    pending: &[usize],
    index: usize,
) -> Vec<usize> {
    let done = &log.entries[index];
    let direct = |other: usize| match done.effect {
        Effect::Flush => log.entries[other].completed_at < done.submitted_at,
        _ => other == index && (done.fua || kind.keeps_completed()),
    };
    let mut forced: Vec<usize> = pending.iter().copied().filter(|other| direct(*other)).collect();
    if kind == DeviceKind::Barrier
        && let Some(epoch) = forced.iter().filter_map(|other| log.entries[*other].epoch).max()
    {
        let earlier = |other: usize| before[other].is_some_and(|e| e < epoch);
        for &other in pending {
            if earlier(other) && !forced.contains(&other) {
                forced.push(other);
            }
        }
        forced.sort_unstable();
    }
    forced
}

/// A pending write; `lost` marks sectors that a later, forced write has replaced.
#[derive(Clone, Debug)]
struct Pending {
    index: usize,
    lost: Option<Vec<bool>>,
}

/// The device at one moment.
struct Cache<'a> {
    log: &'a Log,
    kind: DeviceKind,
    /// See [`epochs_before`].
    before: Vec<Option<u64>>,
    durable: Image,
    pending: Vec<Pending>,
}

fn sector_count(entry: &Entry) -> usize {
    entry.effect.extent().1.div_ceil(SECTOR_BYTES) as usize
}

/// Puts the sectors of a write that `take` names onto an image.
fn apply(image: &mut Image, entry: &Entry, take: impl Fn(usize) -> bool) {
    match &entry.effect {
        Effect::Flush => {}
        Effect::Write { offset, bufs } => {
            let mut at = *offset;
            let whole = (0..sector_count(entry)).all(&take);
            for buf in bufs {
                if whole {
                    image.write(at, buf);
                    at += buf.len() as u64;
                    continue;
                }
                for (index, sector) in buf.chunks(SECTOR_BYTES as usize).enumerate() {
                    let position = at + index as u64 * SECTOR_BYTES;
                    if take(((position - offset) / SECTOR_BYTES) as usize) {
                        image.write(position, sector);
                    }
                }
                at += buf.len() as u64;
            }
        }
        Effect::Zero { offset, len, discard } => {
            for index in 0..len.div_ceil(SECTOR_BYTES) {
                let position = offset + index * SECTOR_BYTES;
                let part = SECTOR_BYTES.min(offset + len - position);
                if take(index as usize) && *discard {
                    image.write(position, &[GARBAGE; SECTOR_BYTES as usize][..part as usize]);
                } else if take(index as usize) {
                    image.zero(position, part);
                }
            }
        }
    }
}

impl Cache<'_> {
    fn new(log: &Log, kind: DeviceKind) -> Cache<'_> {
        let (before, durable) = (epochs_before(log), log.base.clone());
        Cache { log, kind, before, durable, pending: Vec::new() }
    }

    fn step(&mut self, moment: &Moment) {
        self.force(&moment.forced);
        self.pending.extend(moment.submitted.map(|index| Pending { index, lost: None }));
    }

    fn force(&mut self, forced: &[usize]) {
        for &index in forced {
            let Some(at) = self.pending.iter().position(|write| write.index == index) else {
                continue;
            };
            let write = self.pending.remove(at);
            let entry = &self.log.entries[index];
            apply(&mut self.durable, entry, |sector| {
                write.lost.as_ref().is_none_or(|lost| !lost[sector])
            });
            let (start, len) = entry.effect.extent();
            for older in self.pending.iter_mut().filter(|older| older.index < index) {
                lose(older, &self.log.entries[older.index], start, start + len);
            }
        }
    }

    fn build(&self, kept: &[Kept]) -> Image {
        let mut image = self.durable.clone();
        for write in &self.pending {
            let Some(kept) = kept.iter().find(|kept| kept.index == write.index) else { continue };
            apply(&mut image, &self.log.entries[write.index], |sector| {
                let there = |bits: &Vec<bool>| bits.get(sector).copied().unwrap_or(false);
                kept.sectors.as_ref().is_none_or(there) && !write.lost.as_ref().is_some_and(there)
            });
        }
        image
    }

    /// Drops what this device could not have kept.
    fn legalise(&self, kept: &mut Vec<Kept>) {
        if self.kind != DeviceKind::Barrier {
            return;
        }
        let whole = |index: usize| kept.iter().any(|k| k.index == index && k.sectors.is_none());
        let epoch = |index: usize| self.log.entries[index].epoch;
        let missing = self.pending.iter().filter(|write| !whole(write.index));
        let before = |index: usize| self.before.get(index).copied().flatten();
        if let Some(first) = missing.filter_map(|write| before(write.index)).min() {
            kept.retain(|kept| epoch(kept.index).is_none_or(|epoch| epoch <= first));
        }
    }
}

/// Marks the sectors of `older` inside `start..end` as replaced.
fn lose(older: &mut Pending, entry: &Entry, start: u64, end: u64) {
    let (from, len) = entry.effect.extent();
    if from >= end || from + len <= start {
        return;
    }
    let lost = older.lost.get_or_insert_with(|| vec![false; sector_count(entry)]);
    for (index, lost) in lost.iter_mut().enumerate() {
        let at = from + index as u64 * SECTOR_BYTES;
        *lost |= at >= start && at < end;
    }
}

/// Gives every legal image of the log that the budget allows, from `from` on (a stamp).
///
/// Images of one moment are given in a fixed order for a given seed. Equal images may be given
/// more than once, with different windows.
pub fn enumerate(
    log: &Log,
    kind: DeviceKind,
    budget: &Budget,
    seed: u64,
    from: u64,
    visit: &mut dyn FnMut(CrashState) -> ControlFlow<()>,
) -> Walked {
    let moments = moments(log, kind);
    let chosen = chosen_moments(&moments, budget, seed);
    let mut walked = Walked { moments: moments.len() as u64, tried: 0 };
    let mut cache = Cache::new(log, kind);
    // The end of the window of each moment: the next one that forces something.
    let mut last_cuts = vec![log.end; moments.len()];
    for index in (1..moments.len()).rev() {
        let later = &moments[index];
        last_cuts[index - 1] = if later.forced.is_empty() { last_cuts[index] } else { later.stamp };
    }
    for ((moment, last_cut), chosen) in moments.iter().zip(last_cuts).zip(chosen) {
        cache.step(moment);
        if !chosen || moment.stamp < from {
            continue;
        }
        walked.tried += 1;
        let mut rng = Rng::new(seed ^ moment.stamp);
        for mut kept in selections(&cache, moment.submitted, budget, &mut rng) {
            cache.legalise(&mut kept);
            let image = cache.build(&kept);
            let case = Case { after: moment.stamp, kept };
            let state = CrashState { case, image, first_cut: moment.stamp + 1, last_cut };
            if visit(state).is_break() {
                return walked;
            }
        }
    }
    walked
}

/// Which moments are tried: all of them, or where they give too many images one by seed out of each
/// run of so many. At random in each run: what a workload repeats would be met at one place only.
fn chosen_moments(moments: &[Moment], budget: &Budget, seed: u64) -> Vec<bool> {
    let mut pending = 0;
    let images = moments.iter().map(|moment| {
        pending += usize::from(moment.submitted.is_some());
        pending -= moment.forced.len();
        budget.images(pending - usize::from(moment.submitted.is_some()))
    });
    let (all, count) = (images.sum::<usize>(), moments.len());
    let Some(max) = budget.images_max.filter(|max| *max < all) else { return vec![true; count] };
    let runs = (count * max / all).max(1);
    let mut rng = Rng::new(seed);
    let mut chosen = vec![false; count];
    for run in 0..runs {
        let (start, end) = (run * count / runs, (run + 1) * count / runs);
        chosen[start + rng.below((end - start) as u64) as usize] = true;
    }
    chosen
}

/// The device behind the moment with this stamp, and the moments that follow.
fn device_at(log: &Log, kind: DeviceKind, after: u64) -> Option<(Cache<'_>, Vec<Moment>)> {
    let mut cache = Cache::new(log, kind);
    let mut moments = moments(log, kind);
    let at = moments.iter().position(|moment| moment.stamp == after)?;
    let later = moments.split_off(at + 1);
    moments.iter().for_each(|moment| cache.step(moment));
    Some((cache, later))
}

/// The writes that are pending at the cut of a case, by their index in the log.
pub fn pending(log: &Log, kind: DeviceKind, case: &Case) -> Option<Vec<usize>> {
    let (cache, _) = device_at(log, kind, case.after)?;
    Some(cache.pending.iter().map(|write| write.index).collect())
}

/// The state that a case names, if it is legal for this log.
pub fn find(log: &Log, kind: DeviceKind, case: &Case) -> Option<CrashState> {
    let (cache, later) = device_at(log, kind, case.after)?;
    let pending = |kept: &Kept| cache.pending.iter().any(|write| write.index == kept.index);
    if !case.kept.iter().all(pending) {
        return None;
    }
    let mut legal = case.kept.clone();
    cache.legalise(&mut legal);
    if legal != case.kept {
        return None;
    }
    let next = later.iter().find(|moment| !moment.forced.is_empty());
    Some(CrashState {
        image: cache.build(&case.kept),
        case: case.clone(),
        first_cut: case.after + 1,
        last_cut: next.map_or(log.end, |moment| moment.stamp),
    })
}

/// Which subsets of the pending writes are tried, the new one in each of them, and which torn ones.
fn selections(
    cache: &Cache<'_>,
    newest: Option<usize>,
    budget: &Budget,
    rng: &mut Rng,
) -> Vec<Vec<Kept>> {
    let others: Vec<usize> =
        cache.pending.iter().map(|write| write.index).filter(|i| Some(*i) != newest).collect();
    let chosen = subsets(others.len(), budget.subsets_max, rng);
    let whole = |index: usize| Kept { index, sectors: None };
    let pick = |subset: &Vec<bool>| -> Vec<Kept> {
        let others = others.iter().zip(subset).filter(|(_, keep)| **keep);
        others.map(|(index, _)| *index).chain(newest).map(whole).collect()
    };
    let mut selections: Vec<Vec<Kept>> = chosen.iter().map(pick).collect();
    for round in 0..budget.torn_max {
        let mut kept = pick(rng.pick(&chosen));
        tear(cache, &mut kept, newest.is_some() && round == 0, rng);
        if kept.iter().any(|write| write.sectors.is_some()) {
            selections.push(kept);
        }
    }
    selections
}

/// Tears the last of the kept writes, or else any one of them, or many.
fn tear(cache: &Cache<'_>, kept: &mut [Kept], the_last: bool, rng: &mut Rng) {
    // The unit of each sector, the smallest part that the device writes whole.
    let units = |write: &Kept| units(cache.kind, &cache.log.entries[write.index]);
    let torn = |units: &[usize], rng: &mut Rng| -> Vec<bool> {
        let there = torn(units.last().map_or(0, |last| last + 1), rng);
        units.iter().map(|unit| there[*unit]).collect()
    };
    let is_divisible = |units: &[usize]| units.last().is_some_and(|last| *last > 0);
    if kept.is_empty() {
        return;
    }
    if !the_last && rng.percent(50) {
        for write in kept {
            let units = units(write);
            write.sectors = (is_divisible(&units) && rng.percent(70)).then(|| torn(&units, rng));
        }
        return;
    }
    let victim = if the_last { kept.len() - 1 } else { rng.below(kept.len() as u64) as usize };
    let units = units(&kept[victim]);
    kept[victim].sectors = is_divisible(&units).then(|| torn(&units, rng));
}

/// Which part each sector of a write belongs to; a device writes each part whole or not at all.
fn units(kind: DeviceKind, entry: &Entry) -> Vec<usize> {
    let (offset, _) = entry.effect.extent();
    let object = |sector: usize| {
        let first = offset / OBJECT_BYTES;
        ((offset + sector as u64 * SECTOR_BYTES) / OBJECT_BYTES - first) as usize
    };
    let of = |sector| if kind == DeviceKind::Objects { object(sector) } else { sector };
    (0..sector_count(entry)).map(of).collect()
}

/// Some, but not all, of `count` sectors: a prefix, a suffix, all but one, one alone, or any.
fn torn(count: usize, rng: &mut Rng) -> Vec<bool> {
    let at = rng.range(1, count as u64) as usize;
    let one = rng.below(count as u64) as usize;
    let keep = |keep: &dyn Fn(usize) -> bool| (0..count).map(keep).collect();
    match rng.below(5) {
        0 => keep(&|sector| sector < at),
        1 => keep(&|sector| sector >= at),
        2 => keep(&|sector| sector != one),
        3 => keep(&|sector| sector == one),
        _ => {
            let mut sectors: Vec<bool> = (0..count).map(|_| rng.percent(50)).collect();
            sectors[at - 1] = true;
            sectors[at] = false;
            sectors
        }
    }
}

/// Subsets of `count` things: all of them while there are no more than `max`. Else none, all, and
/// so many that of any two things each is there or not beside the other there or not
/// ([`pairwise`], also beyond `max`); then up to `max` each one missing, each one alone, and random
/// ones.
fn subsets(count: usize, max: usize, rng: &mut Rng) -> Vec<Vec<bool>> {
    if let Some(all) = all_subsets(count, max) {
        return (0..all)
            .rev()
            .map(|bits| (0..count).map(|at| bits >> at & 1 == 1).collect())
            .collect();
    }
    let mut list = vec![vec![true; count]];
    list.extend(pairwise(count, rng));
    let mut single: Vec<Vec<bool>> = Vec::new();
    for at in 0..count {
        single.push((0..count).map(|other| other != at).collect());
        single.push((0..count).map(|other| other == at).collect());
    }
    shuffle(&mut single, rng);
    single.truncate(max.saturating_sub(list.len()));
    list.append(&mut single);
    while list.len() < max {
        let percent = *rng.pick(&[20, 50, 80]);
        list.push((0..count).map(|_| rng.percent(percent)).collect());
    }
    list
}

/// How many subsets there are, if no more than `max`.
fn all_subsets(count: usize, max: usize) -> Option<usize> {
    let all = u32::try_from(count).ok().and_then(|count| 1usize.checked_shl(count));
    all.filter(|all| *all <= max)
}

/// How many subsets [`pairwise`] gives after the empty one.
fn pairwise_rows(count: usize) -> usize {
    let mut rows = 1;
    while choose(rows, rows / 2 + 1) < count {
        rows += 1;
    }
    rows
}

/// As few subsets as can be, the empty one first, that have any two things in all four
/// combinations (Katona; Kleitman and Spencer, 1973). Of `n` subsets after the first, each thing is
/// in another choice of more than half: of two such choices, neither contains the other, and they
/// meet. Which thing has which choice is random.
fn pairwise(count: usize, rng: &mut Rng) -> Vec<Vec<bool>> {
    let rows = pairwise_rows(count);
    let mut choices = Vec::with_capacity(count);
    let mut choice: Vec<usize> = (0..rows / 2 + 1).collect();
    while choices.len() < count {
        choices.push(choice.clone());
        // The next one in order: the last place that can move does, those after it follow.
        let movable = (0..choice.len()).rev().find(|at| choice[*at] + choice.len() - at < rows);
        let Some(at) = movable else { break };
        let start = choice[at] + 1;
        choice.iter_mut().skip(at).zip(start..).for_each(|(place, row)| *place = row);
    }
    shuffle(&mut choices, rng);
    let row = |row: usize| choices.iter().map(|choice| choice.contains(&row)).collect();
    [vec![false; count]].into_iter().chain((0..rows).map(row)).collect()
}

/// How many choices of `few` out of `many` there are; the greatest number, if that is too many.
fn choose(many: usize, few: usize) -> usize {
    (0..few)
        .try_fold(1usize, |product, at| {
            Some(product.checked_mul(many.checked_sub(at)?)? / (at + 1))
        })
        .unwrap_or(if few > many { 0 } else { usize::MAX })
}

fn shuffle<T>(list: &mut [T], rng: &mut Rng) {
    for at in (1..list.len()).rev() {
        list.swap(at, rng.below(at as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_subsets_while_they_are_few() {
        let mut rng = Rng::new(1);
        for count in 0..=5 {
            let mut list = subsets(count, 32, &mut rng);
            assert!(list[0].iter().all(|kept| *kept));
            assert_eq!(list.len(), 1 << count);
            list.sort_unstable();
            list.dedup();
            assert_eq!(list.len(), 1 << count);
        }
    }

    #[test]
    fn each_pair_in_all_four_combinations() {
        let mut rng = Rng::new(1);
        for count in [2, 3, 6, 7, 10, 11, 35, 36, 100, 300] {
            for max in [1, 8, 32] {
                let list = subsets(count, max, &mut rng);
                assert!(list.len() <= 32, "{count}: {}", list.len());
                assert!(list.contains(&vec![true; count]) && list.contains(&vec![false; count]));
                for (a, b) in (1..count).flat_map(|b| (0..b).map(move |a| (a, b))) {
                    for wanted in [(false, false), (false, true), (true, false), (true, true)] {
                        let there = list.iter().any(|row| (row[a], row[b]) == wanted);
                        assert!(there, "{count} {max}: {a} and {b} {wanted:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_object_is_written_whole() {
        let object = OBJECT_BYTES as usize;
        let write = |offset, len: usize| Entry {
            effect: Effect::Write {
                offset,
                bufs: vec![fjord_block::Buf::from_slice(&vec![1; len])],
            },
            epoch: None,
            fua: false,
            submitted_at: 1,
            completed_at: 2,
        };
        let parts = |kind, entry: &Entry| units(kind, entry).last().copied();
        assert_eq!(parts(DeviceKind::Objects, &write(4096, object - 4096)), Some(0));
        assert_eq!(parts(DeviceKind::NoCache, &write(4096, object - 4096)), Some(23));
        // Three sectors before the boundary, a whole object, one sector after it.
        let of = units(DeviceKind::Objects, &write(OBJECT_BYTES - 1536, 1536 + object + 512));
        let count = |unit| of.iter().filter(|other| **other == unit).count();
        assert_eq!([count(0), count(1), count(2), of.len()], [3, 32, 1, 36]);
    }

    #[test]
    fn few_moments_are_spread_evenly() {
        let moment =
            |at: u64| Moment { stamp: at, submitted: Some(at as usize), forced: Vec::new() };
        let moments: Vec<Moment> = (0..1000).map(moment).collect();
        let budget = |images_max| Budget { subsets_max: 8, torn_max: 2, images_max };
        let of = |images_max, seed| chosen_moments(&moments, &budget(images_max), seed);
        assert!(of(None, 1).into_iter().all(|chosen| chosen));
        assert!(of(Some(1_000_000), 1).into_iter().all(|chosen| chosen));
        for seed in 1..20 {
            let chosen = of(Some(1500), seed);
            let count = |part: &[bool]| part.iter().filter(|chosen| **chosen).count();
            let all = count(&chosen);
            assert!((75..=150).contains(&all), "{all}");
            for part in chosen.chunks(100) {
                assert!(count(part).abs_diff(all / 10) <= 2, "{seed}: {}", count(part));
            }
            assert_ne!(chosen, of(Some(1500), seed + 100));
        }
        assert_eq!(of(Some(1), 3).iter().filter(|chosen| **chosen).count(), 1);
    }

    #[test]
    fn images_of_a_moment_are_counted_without_building_them() {
        let mut rng = Rng::new(1);
        for max in [1, 2, 8, 32, 40] {
            for count in 0..60 {
                let budget = Budget { subsets_max: max, torn_max: 0, images_max: None };
                assert_eq!(
                    budget.images(count),
                    subsets(count, max, &mut rng).len(),
                    "{count} {max}"
                );
            }
        }
    }

    #[test]
    fn a_torn_write_lacks_something_and_has_something() {
        let mut rng = Rng::new(1);
        for count in [2, 3, 8, 64] {
            for _ in 0..200 {
                let sectors = torn(count, &mut rng);
                assert_eq!(sectors.len(), count);
                assert!(sectors.contains(&true) && sectors.contains(&false), "{sectors:?}");
            }
        }
    }
}
