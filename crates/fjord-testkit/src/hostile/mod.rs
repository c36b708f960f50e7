//! Hostile images: sound ones with damage, through the whole engine.
//!
//! - [`base`]: the sound images; [`places`]: where their structures lie.
//! - [`mutate`](mod@mutate): the damage; `seal`: checksums that fit it.
//! - `exercise`: what a user does with the image.
//! - [`memory`]: an allocator that sees lengths taken from the image unchecked.
//!
//! A case is one seed: it chooses the image, the damage and the operations. Asserted are: no
//! panic in any thread, no hang, bounded memory, typed errors, read-only after damage.

pub mod base;
mod exercise;
pub mod memory;
pub mod mutate;
pub mod places;
mod seal;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use fjord::{Fs, MountOptions};
use fjord_block::{MemDevice, MemImage};

use crate::rng::Rng;
use exercise::User;
use mutate::Choices;

/// Longest time for one case; generous, since the machine may be busy.
const CASE_TIME_MAX: Duration = Duration::from_secs(120);
/// Largest single allocation; the engine reads at most a few MiB in one piece.
const ALLOCATION_BYTES_MAX: u64 = 64 << 20;
/// Memory of all running cases together, beyond what was in use before.
const LIVE_BYTES_MAX: u64 = 768 << 20;
/// Failures after which a campaign ends.
const FAILURES_MAX: usize = 8;

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seed of the first case; the next ones count up from it.
    pub seed: u64,
    /// Number of cases.
    pub rounds: u64,
    /// Threads.
    pub threads: usize,
    /// No new case after this time.
    pub time_max: Option<Duration>,
    /// Where images of failed cases go.
    pub keep_failed_in: Option<PathBuf>,
}

/// What a campaign saw.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Cases run.
    pub cases: u64,
    /// Images that could be opened for writing in spite of the damage.
    pub opened: u64,
    /// Cases in which damage was met and the file system turned read-only.
    pub stopped: u64,
    /// The damage that made file systems read-only.
    pub first_errors: Vec<String>,
    /// Outcomes of operations by errno, 0 for success.
    pub outcomes: BTreeMap<i32, u64>,
}

impl Summary {
    fn add(&mut self, other: &Summary) {
        self.cases += other.cases;
        self.opened += other.opened;
        self.stopped += other.stopped;
        for (errno, count) in &other.outcomes {
            *self.outcomes.entry(*errno).or_default() += count;
        }
    }
}

/// Panics of any thread, with their place, since the hook was set.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn record_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            let text = format!("thread {}: {info}", thread.name().unwrap_or("?"));
            if let Ok(mut panics) = PANICS.lock() {
                panics.push(text);
            }
            before(info);
        }));
    });
}

fn take_panics() -> Vec<String> {
    PANICS.lock().map(|mut panics| std::mem::take(&mut *panics)).unwrap_or_default()
}

/// Runs one image through everything. Returns what happened and what must not have.
pub fn run_image(image: &MemImage, choices: &mut dyn Choices) -> (Summary, Vec<String>) {
    run_device(&Arc::new(MemDevice::from_image(image)), choices)
}

/// As [`run_image`], on a device whose content afterwards is of interest.
pub fn run_device(device: &Arc<MemDevice>, choices: &mut dyn Choices) -> (Summary, Vec<String>) {
    let mut summary = Summary { cases: 1, ..Summary::default() };
    let mut wrong = Vec::new();
    let quiet = MountOptions {
        background_threads: choices.percent(10),
        commit_interval: Duration::from_millis(1),
        writeback_interval: Duration::from_millis(1),
        ..MountOptions::default()
    };
    let looking =
        MountOptions { read_only: true, no_load_journal: true, ..MountOptions::default() };
    let before = device.snapshot();
    visit(device, &looking, &mut summary, &mut wrong, |user| user.walk());
    if device.snapshot() != before {
        wrong.push("a read-only mount changed the image".into());
    }
    // Changes first on the damage as it is, then a look at all of it, then changes once more.
    for pass in 0..2 {
        let opened = visit(device, &quiet, &mut summary, &mut wrong, |user| {
            if pass == 1 {
                user.walk();
            }
            user.change(choices, 6);
        });
        summary.opened += u64::from(opened && pass == 0);
    }
    if choices.percent(25) {
        let copy = Arc::new(MemDevice::from_image(&before));
        let recovering = MountOptions {
            read_only: true,
            recover_before_read_only: true,
            ..MountOptions::default()
        };
        visit(&copy, &recovering, &mut summary, &mut wrong, |user| user.walk());
    }
    (summary, wrong)
}

/// Opens, uses, unmounts. Whether it could be opened.
fn visit(
    device: &Arc<MemDevice>,
    options: &MountOptions,
    summary: &mut Summary,
    wrong: &mut Vec<String>,
    act: impl FnOnce(&mut User<'_>),
) -> bool {
    let fs = match Fs::open_device(device.clone(), options) {
        Ok(fs) => fs,
        Err(error) => {
            if matches!(error, fjord::Error::Io(_)) {
                wrong.push(format!("open: a request that the device refuses: {error}"));
            }
            *summary.outcomes.entry(error.errno()).or_default() += 1;
            return false;
        }
    };
    let mut user = User::new(&fs);
    act(&mut user);
    wrong.append(&mut user.wrong);
    for (errno, count) in user.outcomes {
        *summary.outcomes.entry(errno).or_default() += count;
    }
    if !options.read_only && fs.is_read_only() {
        summary.stopped += 1;
    }
    if let Some(error) = fs.first_error() {
        summary.first_errors.push(error.to_string());
    }
    let unmounted = fs.unmount();
    if let (Ok(()), Some(error), false) = (unmounted, fs.first_error(), options.read_only) {
        wrong.push(format!("unmount says that all is well after {error}"));
    }
    true
}

/// One case.
struct Case {
    seed: u64,
    began: Instant,
}

struct Campaign {
    options: Options,
    next: AtomicU64,
    began: Instant,
    running: Mutex<Vec<Option<Case>>>,
    summary: Mutex<Summary>,
    failures: Mutex<Vec<String>>,
    live_before: u64,
}

/// The image of a case and what was done to it.
///
/// # Errors
/// The sound image cannot be made.
pub fn damaged(seed: u64, rng: &mut Rng) -> Result<(MemImage, String)> {
    let base = base::get(rng.below(base::COUNT as u64) as usize)?;
    let (image, done) = mutate::mutate(&base, rng);
    Ok((image, format!("seed {seed}, image {}: {}", base.name, done.join("; "))))
}

/// Runs the cases of `options`.
///
/// # Errors
/// What went wrong in which case; the seed of a case runs it again.
pub fn run(options: &Options) -> Result<Summary> {
    record_panics();
    for index in 0..base::COUNT {
        base::get(index)?;
    }
    let campaign = Arc::new(Campaign {
        options: options.clone(),
        next: AtomicU64::new(0),
        began: Instant::now(),
        running: Mutex::new((0..options.threads).map(|_| None).collect()),
        summary: Mutex::default(),
        failures: Mutex::default(),
        live_before: memory::live_bytes(),
    });
    memory::take_largest_bytes();
    let mut workers = Vec::new();
    for slot in 0..options.threads {
        let campaign = campaign.clone();
        let name = format!("hostile-{slot}");
        workers.push(std::thread::Builder::new().name(name).spawn(move || campaign.work(slot))?);
    }
    while workers.iter().any(|worker| !worker.is_finished()) {
        std::thread::sleep(Duration::from_millis(20));
        campaign.watch()?;
    }
    let failures = campaign.failures.lock().map(|f| f.join("\n")).unwrap_or_default();
    if !failures.is_empty() {
        bail!("{failures}");
    }
    Ok(campaign.summary.lock().map(|summary| summary.clone()).unwrap_or_default())
}

impl Campaign {
    fn work(&self, slot: usize) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let late = self.options.time_max.is_some_and(|max| self.began.elapsed() > max);
            let failed = self.failures.lock().map_or(0, |failures| failures.len());
            if number >= self.options.rounds || late || failed >= FAILURES_MAX {
                return;
            }
            let seed = self.options.seed.wrapping_add(number);
            self.set_running(slot, Some(Case { seed, began: Instant::now() }));
            self.case(seed);
            self.set_running(slot, None);
        }
    }

    fn set_running(&self, slot: usize, case: Option<Case>) {
        if let Ok(mut running) = self.running.lock() {
            running[slot] = case;
        }
    }

    fn case(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        let (image, title) = match damaged(seed, &mut rng) {
            Ok(made) => made,
            Err(error) => return self.fail(None, format!("{error:#}")),
        };
        let result = catch_unwind(AssertUnwindSafe(|| run_image(&image, &mut rng)));
        let mut wrong = take_panics();
        if let Ok((summary, found)) = result {
            wrong.extend(found);
            if let Ok(mut all) = self.summary.lock() {
                all.add(&summary);
            }
        }
        let largest = memory::take_largest_bytes();
        if largest > ALLOCATION_BYTES_MAX {
            wrong.push(format!("one allocation of {largest} bytes (or in a case beside it)"));
        }
        if !wrong.is_empty() {
            self.fail(Some((seed, &image)), format!("{title}\n    {}", wrong.join("\n    ")));
        }
    }

    fn fail(&self, image: Option<(u64, &MemImage)>, what: String) {
        eprintln!("{what}");
        if let (Some(dir), Some((seed, image))) = (&self.options.keep_failed_in, image) {
            let path = dir.join(format!("hostile-{seed}.img"));
            let kept = std::fs::create_dir_all(dir).and_then(|()| image.write_to_file(&path));
            eprintln!("    image {}: {kept:?}", path.display());
        }
        if let Ok(mut failures) = self.failures.lock() {
            failures.push(what);
        }
    }

    /// Ends the campaign when a case hangs or memory runs away: its threads cannot be stopped,
    /// the process can.
    fn watch(&self) -> Result<()> {
        let live = memory::live_bytes().saturating_sub(self.live_before);
        let Ok(running) = self.running.lock() else { return Ok(()) };
        let seeds: Vec<u64> = running.iter().flatten().map(|case| case.seed).collect();
        if live > LIVE_BYTES_MAX {
            bail!("{live} bytes of memory in use by the cases with seeds {seeds:?}");
        }
        for case in running.iter().flatten() {
            if case.began.elapsed() > CASE_TIME_MAX {
                bail!("the case with seed {} hangs", case.seed);
            }
        }
        Ok(())
    }
}
