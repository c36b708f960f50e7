//! A device that fails one request, each in turn: what was promised stays, the error is told,
//! nothing hangs.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fjord::{AreaLayout, Cred, Fs, FsyncPolicyKind, MountOptions, Scheduler};
use fjord_block::{
    Capabilities, Device, FaultAction, FaultDevice, FaultMatch, FaultRule, IoOp, MemDevice,
    MemImage, Record, Request,
};
use fjord_testkit::hostile::base;
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::{rng, size, tools};

use crate::workload::{self, Promises, Run};

const RUN_TIME_MAX: Duration = Duration::from_secs(120);

/// What a file system stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stack {
    /// A volatile cache with FUA; the engine waits and flushes.
    Direct,
    /// The same below the scheduler.
    Epoch,
    /// Without FUA.
    EpochNoFua,
    /// Writes stay once they are complete.
    EpochNoCache,
    /// The device keeps epochs apart by itself.
    EpochNative,
}

impl Stack {
    const ALL: [Stack; 5] =
        [Stack::Direct, Stack::Epoch, Stack::EpochNoFua, Stack::EpochNoCache, Stack::EpochNative];

    pub(crate) fn claim(self, has: &mut Capabilities) {
        has.volatile_cache = self != Stack::EpochNoCache;
        has.fua = self != Stack::EpochNoFua;
        has.native_barrier = self == Stack::EpochNative;
    }

    fn options(self) -> MountOptions {
        let scheduler = if self == Stack::Direct { Scheduler::Direct } else { Scheduler::Epoch };
        MountOptions { scheduler, ..workload::options() }
    }
}

/// An image, the fsync policy, and what is between the image and the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) index: usize,
    pub(crate) fsync: FsyncPolicyKind,
    pub(crate) stack: Stack,
}

impl Setup {
    pub(crate) fn options(self) -> MountOptions {
        MountOptions { fsync: self.fsync, ..self.stack.options() }
    }

    /// The base image with what the policy needs. Made once.
    pub(crate) fn image(self) -> Result<MemImage> {
        static MADE: Mutex<BTreeMap<(usize, &str), MemImage>> = Mutex::new(BTreeMap::new());
        let mut made = MADE.lock().unwrap_or_else(|broken| broken.into_inner());
        let key = (self.index, self.fsync.name());
        if let Some(image) = made.get(&key) {
            return Ok(image.clone());
        }
        let device = Arc::new(MemDevice::from_image(&base::get(self.index)?.image));
        let fs = Fs::open_device(device.clone(), &workload::options())?;
        if self.fsync == FsyncPolicyKind::Ijournal {
            fs.set_ijournal_areas(Some(AreaLayout { count: 2, area_bytes: 256 << 10 }))?;
        }
        fs.unmount()?;
        let image = match self.fsync {
            FsyncPolicyKind::FastCommit => with_fast_commits(&device.snapshot())?,
            _ => device.snapshot(),
        };
        made.insert(key, image.clone());
        Ok(image)
    }
}

/// The same with another journal that has room for fast commits.
fn with_fast_commits(image: &MemImage) -> Result<MemImage> {
    let scratch = Scratch::in_memory("faults")?;
    let path = scratch.join("fast-commit.img");
    image.write_to_file(&path)?;
    for args in [&["-O", "^has_journal"][..], &["-O", "has_journal,fast_commit", "-J", "size=4"]] {
        tools::run(tools::command("tune2fs")?.args(args).arg(&path))?.ok()?;
    }
    image::e2fsck_clean(&path)?;
    Ok(MemDevice::from_file(&path)?.snapshot())
}

/// What happens to one request of a run.
#[derive(Debug, Clone)]
struct Fault {
    op: IoOp,
    skip_count: u64,
    action: FaultAction,
}

/// What a run left.
struct Left {
    hit: bool,
    promises: Promises,
    /// The device as it is, and as it is if its cache loses what no flush covered.
    images: [MemImage; 2],
    /// Requests by kind: writes, flushes.
    counts: (u64, u64),
    /// Calls of fsync that the mount's own policy served.
    policy_count: u64,
}

/// Ends the test when `act` hangs.
pub(crate) fn timed<T: Send + 'static>(
    title: &str,
    act: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = channel();
    let worker = std::thread::spawn(move || sender.send(act()));
    match receiver.recv_timeout(RUN_TIME_MAX) {
        Ok(value) => Ok(value),
        Err(RecvTimeoutError::Timeout) => bail!("{title}: hangs"),
        Err(RecvTimeoutError::Disconnected) => {
            bail!("{title}: panicked: {:?}", worker.join().is_err())
        }
    }
}

/// The content after a power cut that takes all that no flush or FUA made durable; without a
/// cache every write that completed stays.
pub(crate) fn after_power_cut(
    before: &MemImage,
    records: &[Record],
    stack: Stack,
) -> Result<MemImage> {
    let flushes: Vec<u64> = records
        .iter()
        .filter(|r| matches!(r.request, Request::Flush { .. }) && r.error.is_none())
        .filter(|r| r.completed_at.is_some())
        .map(|r| r.submitted_at)
        .collect();
    let device = MemDevice::from_image(before);
    for record in records {
        let Some(done) = record.completed_at else { continue };
        let fua = matches!(record.request, Request::Write { fua: true, .. });
        let stays = fua || stack == Stack::EpochNoCache;
        let durable = stays || flushes.iter().any(|&flush| flush > done);
        if record.error.is_none() && durable {
            device.submit(vec![record.request.clone()]).iter().try_for_each(|t| t.wait())?;
        }
    }
    Ok(device.snapshot())
}

/// Runs the workload on a copy of the base image with a fault, or without one.
fn run(setup: Setup, fault: Option<Fault>) -> Result<Left> {
    let before = setup.image()?;
    let memory = Arc::new(MemDevice::from_image(&before));
    let stack = setup.stack;
    let device = FaultDevice::new(memory.clone()).claiming(|has| stack.claim(has));
    let device = Arc::new(device);
    device.start_recording();
    let fault_op = fault.as_ref().map(|fault| fault.op);
    if let Some(Fault { op, skip_count, action }) = fault {
        let matches = FaultMatch { op: Some(op), range: None };
        device.faults().add(FaultRule { matches, skip_count, hit_count_max: 1, action });
    }
    let (mut promises, mut policy_count) = (Promises::new(), 0);
    match Fs::open_device(device.clone(), &setup.options()) {
        Err(error) => {
            ensure!(device.faults().hit_count() > 0, "does not open: {error}");
            ensure!(error.errno() == libc::EIO, "opening reports {error}");
        }
        Ok(fs) => {
            promises = use_it(&fs, &device, fault_op)?;
            policy_count = fs.stats().fsync.policy;
        }
    }
    let hit = device.faults().hit_count() > 0;
    let records = device.take_recording();
    let writes = records.iter().filter(|r| matches!(r.request, Request::Write { .. })).count();
    let flushes = records.iter().filter(|r| matches!(r.request, Request::Flush { .. })).count();
    Ok(Left {
        hit,
        promises,
        images: [memory.snapshot(), after_power_cut(&before, &records, stack)?],
        counts: (writes as u64, flushes as u64),
        policy_count,
    })
}

fn use_it(fs: &Fs, device: &FaultDevice, fault_op: Option<IoOp>) -> Result<Promises> {
    let mut run = Run::new(fs);
    run.all();
    let log = run.log.join("\n  ");
    let (promises, is_told) = (run.promises, !run.errors.is_empty());
    // Data that found no room, and to which nothing referred, waits for it.
    let is_full = |error: &fjord::Error| error.errno() == libc::ENOSPC;
    let waits = run.errors.iter().any(is_full) && !fs.is_read_only();
    // The one failure was that of a request with the data of several files, each written again alone.
    let is_mended = || fs.stats().events.iter().any(|e| e.message.contains("was written again"));
    let is_hit = || device.faults().hit_count() > 0 && fault_op != Some(IoOp::Read);
    let is_lost = || is_hit() && !waits && !is_mended();
    if is_lost() {
        if !is_told {
            // It was sent behind the last promise and shows with the next one.
            ensure!(one_more(fs).is_err(), "nobody was told\n  {log}");
        }
        ensure!(fs.is_read_only(), "still writable\n  {log}");
        ensure!(fs.first_error().is_some(), "the error is not kept\n  {log}");
        let refused = fs.root().and_then(|root| root.create(b"after", 0o600, &Cred::root()));
        let errno = refused.err().map(|error| error.errno());
        ensure!(errno == Some(libc::EROFS), "a later create gives {errno:?}\n  {log}");
    } else if fault_op.is_none() {
        ensure!(!is_told, "errors without a fault: {:?}", run.errors);
    }
    let unmounted = fs.unmount();
    ensure!(unmounted.is_err() || !is_lost(), "unmount says that all is well\n  {log}");
    if let (Err(error), false) = (&unmounted, device.faults().hit_count() > 0) {
        bail!("unmount: {error}\n  {log}");
    }
    Ok(promises)
}

/// Another file and its fsync.
pub(crate) fn one_more(fs: &Fs) -> fjord::Result<()> {
    let file = fs.root()?.create(b"one-more", 0o600, &Cred::root())?;
    file.write(0, b"one more")?;
    file.open().fsync(false)
}

/// Runs with a fault and checks what is left; whether the fault was hit.
fn one(setup: Setup, fault: &Fault, judge: bool) -> Result<bool> {
    let left = run(setup, Some(fault.clone()))?;
    let [whole, cut] = &left.images;
    for (image, what) in left.images.iter().zip(["as it is", "after a power cut"]) {
        // The cut took nothing.
        if std::ptr::eq(image, cut) && cut == whole {
            break;
        }
        let device = Arc::new(MemDevice::from_image(image));
        workload::check(device.clone(), &left.promises).context(what)?;
        if judge {
            image::e2fsck_clean_in_memory(&device.snapshot()).context(what)?;
        }
    }
    Ok(left.hit)
}

/// Runs beyond the last request that are needed to see that it was the last: two runs may differ
/// by a request or two, since times do.
const BEYOND: u64 = 3;

/// Fails each request of a kind in turn, in a shorter run each third or tenth; gives how many were hit.
fn sweep(setup: Setup, op: IoOp, action: &FaultAction) -> Result<u64> {
    let (mut hits, mut beyond) = (0, 0);
    // There are few flushes.
    let step = if op == IoOp::Flush { 1 } else { size::pick(10, 3, 1) };
    let first = rng::seed_from_env("requests that fail", 0) % step;
    for skip_count in (first..).step_by(step as usize) {
        let fault = Fault { op, skip_count, action: action.clone() };
        let title = format!("image {}, {setup:?}, {fault:?}", base::get(setup.index)?.name);
        let judge = skip_count % 4 == 0;
        let hit = timed(&title, move || one(setup, &fault, judge))?.context(title)?;
        hits += u64::from(hit);
        beyond = if hit { 0 } else { beyond + 1 };
        if beyond == BEYOND {
            break;
        }
    }
    println!("{setup:?}: {op} {action:?}: {hits} requests failed in turn");
    Ok(hits)
}

const FAIL: FaultAction = FaultAction::Fail(libc::EIO);

/// The default image, and 1 KiB blocks without checksums: their places in the table of base images.
const IMAGES: [usize; 3] = [0, 1, 3];
/// Of an image with several block groups.
const GROUPS: usize = 12;

/// All stacks with the default image, the two main ones with each.
pub(crate) fn setups() -> Vec<Setup> {
    let stacks = |index: usize| if index == 0 { &Stack::ALL[..] } else { &Stack::ALL[..2] };
    let of =
        |index, stack: &Stack| Setup { index, fsync: FsyncPolicyKind::Compound, stack: *stack };
    IMAGES.into_iter().flat_map(|index| stacks(index).iter().map(move |s| of(index, s))).collect()
}

/// A policy with both ways to keep order, and on a device that keeps it.
pub(crate) fn policy_setups(fsync: FsyncPolicyKind) -> Vec<Setup> {
    let index = if fsync == FsyncPolicyKind::Group { GROUPS } else { 0 };
    let stacks = [Stack::Direct, Stack::Epoch, Stack::EpochNative];
    stacks.into_iter().map(|stack| Setup { index, fsync, stack }).collect()
}

pub(crate) fn policies() -> impl Iterator<Item = FsyncPolicyKind> {
    FsyncPolicyKind::ALL.iter().copied().filter(|policy| *policy != FsyncPolicyKind::Compound)
}

#[test]
fn without_faults_all_is_kept() -> Result<()> {
    for setup in setups().into_iter().chain(policies().flat_map(policy_setups)) {
        let left = run(setup, None)?;
        println!("{setup:?}: {:?} writes and flushes", left.counts);
        println!("{setup:?}: {} calls of fsync served by the policy", left.policy_count);
        ensure!(left.policy_count > 20, "the policy is not used");
        for image in &left.images {
            workload::check(Arc::new(MemDevice::from_image(image)), &left.promises)?;
        }
    }
    Ok(())
}

fn failed_writes(setups: Vec<Setup>) -> Result<()> {
    for setup in setups {
        ensure!(sweep(setup, IoOp::Write, &FAIL)? > 0, "{setup:?}: no write was hit");
    }
    Ok(())
}

fn failed_flushes(setups: Vec<Setup>) -> Result<()> {
    for setup in setups {
        let hits = sweep(setup, IoOp::Flush, &FAIL)?;
        ensure!((hits > 0) == (setup.stack != Stack::EpochNoCache), "{setup:?}: {hits} flushes");
    }
    Ok(())
}

/// Short writes: some bytes arrive, from the front.
fn torn_writes(setups: Vec<Setup>) -> Result<()> {
    for setup in setups {
        for keep_bytes in [512, 4096 + 512] {
            let action = FaultAction::Torn { keep_bytes, errno: libc::EIO };
            ensure!(sweep(setup, IoOp::Write, &action)? > 0, "{setup:?}: no write was hit");
        }
    }
    Ok(())
}

#[test]
fn failed_writes_in_turn() -> Result<()> {
    failed_writes(setups())
}

#[test]
fn failed_flushes_in_turn() -> Result<()> {
    failed_flushes(setups())
}

#[test]
fn torn_writes_in_turn() -> Result<()> {
    torn_writes(setups())
}

/// A policy's own writes fail like all others.
fn failures_of(fsync: FsyncPolicyKind) -> Result<()> {
    failed_writes(policy_setups(fsync))?;
    failed_flushes(policy_setups(fsync))?;
    torn_writes(policy_setups(fsync))
}

#[test]
fn failures_of_group_commits() -> Result<()> {
    failures_of(FsyncPolicyKind::Group)
}

#[test]
fn failures_of_fast_commits() -> Result<()> {
    failures_of(FsyncPolicyKind::FastCommit)
}

#[test]
fn failures_of_i_transactions() -> Result<()> {
    failures_of(FsyncPolicyKind::Ijournal)
}

#[test]
fn full_below() -> Result<()> {
    for setup in setups().into_iter().take(2) {
        let hits = sweep(setup, IoOp::Write, &FaultAction::Fail(libc::ENOSPC))?;
        ensure!(hits > 0, "{setup:?}: no write was hit");
    }
    Ok(())
}

#[test]
fn failed_reads() -> Result<()> {
    let setups = setups().into_iter().chain(policies().flat_map(policy_setups));
    for setup in setups.filter(|setup| matches!(setup.stack, Stack::Direct | Stack::Epoch)) {
        ensure!(sweep(setup, IoOp::Read, &FAIL)? > 0, "{setup:?}: no read was hit");
    }
    Ok(())
}

/// Two handles of a changed file and one of another, while the n-th request of an fsync fails:
/// who was promised nothing yet hears of it, each handle, and nobody else does.
fn hears(stack: Stack, op: IoOp, skip_count: u64) -> Result<bool> {
    let memory = Arc::new(MemDevice::from_image(&base::get(0)?.image));
    let device = FaultDevice::new(memory).claiming(|has| stack.claim(has));
    let device = Arc::new(device);
    let fs = Fs::open_device(device.clone(), &stack.options())?;
    let file = fs.resolve("/big")?;
    let (one, two) = (file.open(), file.open());
    let other = fs.resolve("/small")?.open();
    // A file that was just read in counts as changed until a commit or flush has passed.
    other.fsync(false)?;
    // One page in place and one at a new end.
    file.write(0, &[b'x'; 4096])?;
    file.write(file.attr().size, &[b'y'; 4096])?;
    device.faults().fail_nth(Some(op), skip_count, libc::EIO);
    let first = one.fsync(false).err().map(|error| error.errno());
    if device.faults().hit_count() == 0 {
        ensure!(first.is_none(), "{first:?} without a fault");
        return Ok(false);
    }
    ensure!(first == Some(libc::EIO), "{first:?}");
    ensure!(two.fsync(false).is_err(), "the second open file was not told");
    let late = file.open();
    ensure!(late.fsync(false).is_err(), "what is not there counts as durable");
    ensure!(other.fsync(false).is_ok(), "a file without changes fails");
    ensure!(fs.is_read_only(), "still writable");
    ensure!(fs.unmount().is_err(), "unmount says that all is well");
    Ok(true)
}

/// Each open file hears of a failed request once; files without changes do not.
#[test]
fn every_open_file_hears_of_it_once() -> Result<()> {
    for stack in Stack::ALL {
        for op in [IoOp::Write, IoOp::Flush] {
            let mut hits = 0;
            while hears(stack, op, hits).with_context(|| format!("{stack:?}, {op} {hits}"))? {
                hits += 1;
            }
            println!("{stack:?}: {hits} requests of kind {op}");
            let flushes = op == IoOp::Flush && stack != Stack::EpochNoCache;
            ensure!(hits > 0 || !(op == IoOp::Write || flushes), "{stack:?}: no {op} was hit");
        }
    }
    Ok(())
}

/// A failure of background writeback is told once to each file that was open, and to no other.
#[test]
fn failures_of_writeback_are_told_once() -> Result<()> {
    for stack in Stack::ALL {
        let memory = Arc::new(MemDevice::from_image(&base::get(0)?.image));
        let device = FaultDevice::new(memory).claiming(|has| stack.claim(has));
        let device = Arc::new(device);
        let fs = Fs::open_device(device.clone(), &stack.options())?;
        let file = fs.resolve("/big")?;
        let other = fs.resolve("/small")?.open();
        other.fsync(false)?;
        let open = file.open();
        file.write(0, &[b'x'; 4096])?;
        device.faults().fail_nth(Some(IoOp::Write), 0, libc::EIO);
        // As the timer does: data alone, by somebody else.
        ensure!(fs.sync().is_err(), "{stack:?}: sync says that all is well");
        let told = [open.fsync(false).is_err(), open.fsync(false).is_err()];
        ensure!(told[0], "{stack:?}: the open file was not told");
        ensure!(other.fsync(false).is_ok(), "{stack:?}: another file was told");
        ensure!(fs.is_read_only(), "{stack:?}: still writable");
        println!("{stack:?}: told {told:?}");
    }
    Ok(())
}
