//! The explorer bites: each planted bug is found, and without it the same workload passes.
//!
//! `FJORD_TEST_SIZE=long cargo test -p fjord-crash --features plant --test planted -- --nocapture` prints the table of
//! docs/crash-model.md.

mod barriers;
mod dual;
mod policies;

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use fjord::{DataMode, FsyncPolicyKind, MountOptions, Scheduler};
use fjord_block::epoch::EpochDevice;
use fjord_block::plant::{Bug, Planting};
use fjord_block::{Buf, Class, Device, DeviceExt, Order, Request, Ticket};
use fjord_crash::base::Features;
use fjord_crash::check::Kind;
use fjord_crash::command::CrashArgs;
use fjord_crash::edges::Edge;
use fjord_crash::explore::{Config, Workload, explore};
use fjord_crash::finding::Finding;
use fjord_crash::image::Image;
use fjord_crash::minimise::minimise;
use fjord_crash::ops::{self, Op};
use fjord_crash::record::{DeviceKind, Log, RecordingDevice};
use fjord_crash::report::Report;
use fjord_crash::states::{self, Budget};
use fjord_crash::workloads::Family;
use fjord_testkit::size::pick;
use parking_lot::Mutex;

/// A workload that a bug shows in.
struct Plant {
    bug: Bug,
    /// With the bug, requests race: a rerun takes those of the run that was recorded.
    races: bool,
    config: Config,
    workload: Workload,
}

/// Creates, writes, overwrites, renames and removes, all synced.
const PLAIN: &str = "create /b; append /b 9000; fsync /b; write /a 100 5000; fsync /a; mkdir /d; \
                     rename /b /d/c; fsync /d/c; create /e; append /e 5000; unlink /a; sync";

impl Plant {
    fn new(bug: Bug) -> Plant {
        let mut config = Config::new(MountOptions::default());
        (config.inner_every, config.damage_every, config.use_every) = (0, 0, 0);
        let parse = |text| ops::parse(text).expect("operations");
        let workload = Workload::new(parse("create /a; append /a 9000"), parse(PLAIN));
        Plant { bug, races: false, config, workload }
    }

    /// The group policy: six directories, each with its files in a group of its own.
    fn groups(bug: Bug) -> Plant {
        let mut plant = Plant::new(bug).setup(
            "mkdir /G0; mkdir /G1; mkdir /G2; mkdir /G3; mkdir /G4; mkdir /G5; create /G0/a; \
             append /G0/a 9000; create /G1/a; append /G1/a 9000; mkdir /G0/d",
        );
        plant.config.options.fsync = FsyncPolicyKind::Group;
        plant.config.features = Features::by_name("groups").expect("a feature set");
        plant
    }

    fn setup(mut self, text: &str) -> Plant {
        self.workload.setup = ops::parse(text).expect("operations");
        self
    }

    fn ops(mut self, text: &str) -> Plant {
        self.workload.ops = ops::parse(text).expect("operations");
        self
    }

    /// A workload of the family `edges`.
    fn edge(mut self, edge: Edge) -> Plant {
        self.workload = edge.workload();
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Config)) -> Plant {
        change(&mut self.config);
        self
    }

    fn data(self, data: DataMode) -> Plant {
        self.with(|config| config.options.data = data)
    }

    fn run(&self, bug: Option<Bug>) -> Report {
        let _planting = Planting::new(bug);
        explore(&self.config, &self.workload, &Default::default()).expect("the explorer runs")
    }

    /// Number of states of the workload without a bug, in none of which anything is found. Computed
    /// once for all bugs that are looked for in the same way.
    fn sound(&self) -> u64 {
        static KNOWN: Mutex<Option<HashMap<String, Arc<OnceLock<u64>>>>> = Mutex::new(None);
        let key = format!("{:?} {:?}", self.config, self.workload);
        let known = KNOWN.lock().get_or_insert_default().entry(key).or_default().clone();
        *known.get_or_init(|| {
            let report = self.run(None);
            assert!(report.findings.is_empty(), "without the bug: {}", report.findings[0]);
            report.all_states()
        })
    }

    /// With either scheduler, unless one is asked for (of a run that is not long: with one of them, each with half
    /// of the bugs): without the bug there is no finding; with it the first one is of one of these kinds, and the
    /// command that it prints finds it again.
    fn shows_as(self, kinds: &[Kind]) {
        let asked = [self.config.options.scheduler];
        let schedulers = match asked {
            [Scheduler::Auto] => {
                let both = &[Scheduler::Direct, Scheduler::Epoch][..];
                let first = self.bug as usize % 2;
                pick(&both[first..=first], &both[first..=first], both)
            }
            _ => &asked[..],
        };
        let mut plant = self;
        for &scheduler in schedulers {
            plant = plant.with(|config| config.options.scheduler = scheduler);
            plant.shows_so(kinds);
        }
    }

    /// Without the bug there is no finding; with it there is one in some run of the threads.
    fn found_by_threads(&self) {
        self.sound();
        let mut tried = 0;
        for run in 1..=60 {
            let report = self.run(Some(self.bug));
            tried += report.all_states();
            if let Some(finding) = report.findings.first() {
                println!("| `{:?}` | `{:?}` | {tried} ({run} runs) |", self.bug, finding.kind());
                return;
            }
        }
        panic!("not found in {tried} states of 60 runs");
    }

    fn shows_so(&self, kinds: &[Kind]) {
        let all = self.sound();
        let report = self.run(Some(self.bug));
        let (bug, tried) = (self.bug, report.all_states());
        let Some(finding) = report.findings.first() else {
            panic!("{bug:?} was not found in {tried} states ({all} without it)");
        };
        let scheduler = self.config.options.scheduler;
        println!("| `{bug:?}` | {scheduler:?} | `{:?}` | {tried} | {all} |", finding.problem.kind);
        println!("    {finding}");
        assert!(kinds.contains(&finding.problem.kind), "{bug:?}: {finding}");
        assert!(finding.target.is_some(), "{bug:?} was found without a power cut: {finding}");
        let _planting = Planting::new(Some(self.bug));
        if self.races {
            let (mut finding, dir) = (finding.clone(), tempfile::tempdir().expect("a directory"));
            finding.save(dir.path()).expect("a file");
            is_rerun(&finding);
        } else {
            is_rerun(finding);
        }
    }
}

/// What shows a bug as this kind of problem, first of all.
fn plant_of(kind: Kind) -> Plant {
    match kind {
        Kind::RecoveryFailed => Plant::new(Bug::SequenceNotChecked).setup(
            "create /a; append /a 9000; sync; create /x; sync; create /y; sync; create /z; sync",
        ),
        Kind::Fsck => Plant::new(Bug::OrphanTooLate).ops(OPEN_WITHOUT_NAMES),
        Kind::PromiseLost => Plant::new(Bug::CommitNotDurable),
        Kind::OrderBroken => barriers_ignored(),
        Kind::ForeignBytes => {
            let ops = "truncate /a 0; create /b; append /b 9000; fsync /b";
            Plant::new(Bug::BlockReuse).ops(ops)
        }
        Kind::Invented => Plant::new(Bug::RenameInTwo),
        Kind::NotIdempotent => {
            policies::i_transactions(Bug::RecoveryNotMarked).with(|config| config.inner_every = 1)
        }
        Kind::Disagrees => {
            Plant::new(Bug::LastCommitIgnored).with(|config| config.compare_every = 1)
        }
        Kind::DamageReplayed => {
            Plant::new(Bug::ChecksumsNotVerified).with(|config| config.damage_every = 1)
        }
        Kind::EngineFailed => Plant::new(Bug::FreedTwice).ops("truncate /a 0; fsync /a; sync"),
    }
}

/// Each kind of finding prints a command that shows it again, before and after it is made small.
#[test]
fn a_finding_of_each_kind_is_rerun() {
    for kind in Kind::ALL {
        let plant = plant_of(kind);
        let report = plant.run(Some(plant.bug));
        let finding = report.findings.first().expect("the bug is found");
        assert_eq!(finding.problem.kind, kind, "{finding}");
        let _planting = Planting::new(Some(plant.bug));
        is_rerun(finding);
        let small = minimise(finding.clone()).expect("the explorer runs");
        assert_eq!(small.problem.kind, kind, "{small}");
        is_rerun(&small);
        println!("{small}");
    }
}

/// A run of threads is not repeatable, so its recording is kept: the finding is in the file, and
/// needs the bug no more.
#[test]
fn a_run_of_threads_is_rerun_from_its_recording() {
    let mut plant = Plant::new(Bug::CommitNotDurable);
    plant.workload = Family::Threads.workloads(1).next().expect("an endless family");
    let mut report = plant.run(Some(plant.bug));
    let finding = report.findings.pop().expect("the bug is found");
    let mut finding = minimise(finding).expect("the explorer runs");
    let dir = tempfile::tempdir().expect("a directory");
    finding.save(dir.path()).expect("a file");
    let _planting = Planting::new(None);
    is_rerun(&finding);
    println!("{finding}");
}

/// The line that a finding prints, read as the program reads it, finds the same again; it says
/// so when it has to look elsewhere for it.
fn is_rerun(finding: &Finding) {
    let text = finding.to_string();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("rerun: "));
    let line = line.expect("a finding prints a command");
    let args = CrashArgs::parse_line(line).expect("the command is understood");
    assert_eq!(args, finding.rerun(), "{line}");
    let report = args
        .rerun(&Default::default(), &|text| panic!("{text}: {line}"))
        .expect("the explorer runs");
    let [again] = &report.findings[..] else { panic!("not found again: {line}") };
    assert_eq!(again.problem.kind, finding.problem.kind, "{line}");
    assert_eq!(again.target, finding.target, "{line}");
}

#[test]
fn commit_before_blocks() {
    let kinds = [Kind::RecoveryFailed, Kind::PromiseLost, Kind::ForeignBytes];
    Plant::new(Bug::CommitBeforeBlocks).shows_as(&kinds);
}

#[test]
fn no_flush_before_commit() {
    Plant::new(Bug::NoFlushBeforeCommit).shows_as(&[Kind::PromiseLost, Kind::RecoveryFailed]);
}

#[test]
fn log_start_not_ordered() {
    Plant::new(Bug::LogStartNotOrdered).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn commit_not_durable() {
    Plant::new(Bug::CommitNotDurable).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn data_after_commit() {
    Plant::new(Bug::DataAfterCommit).shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

/// A directory's block is logged, freed, and then holds a file's data.
const BLOCK_CHANGES_OWNER: &str = "create /d/y; fsync /d; unlink /d/y; rmdir /d; sync; \
                                   create /f; append /f 40000; fsync /f; write /f 0 40000; fsync /f";

#[test]
fn no_revoke() {
    let plant = Plant::new(Bug::NoRevoke).setup("mkdir /d").ops(BLOCK_CHANGES_OWNER);
    plant.shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn revokes_ignored() {
    let plant = Plant::new(Bug::RevokesIgnored).setup("mkdir /d").ops(BLOCK_CHANGES_OWNER);
    plant.shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

/// Goes round the log: 1024 blocks, of which each sync takes some 220.
const ROUND_THE_LOG: &str = "create /b; append /b 850000; fsync /b; write /b 0 850000; fsync /b; \
    write /b 0 850000; fsync /b; create /c; fsync /c; write /b 0 850000; fsync /b; create /e; \
    append /e 3000; fsync /e; write /b 0 850000; mkdir /f; fsync /b; create /g; fsync /g";

fn round_the_log(bug: Bug) -> Plant {
    Plant::new(bug).data(DataMode::Journal).ops(ROUND_THE_LOG)
}

/// Descriptors of four blocks: a commit has several pieces.
fn in_pieces(bug: Bug) -> Plant {
    Plant::new(bug).with(|config| config.options.descriptor_blocks_max = Some(4))
}

#[test]
fn pieces_over_revokes() {
    let plant = in_pieces(Bug::PiecesOverRevokes).setup("mkdir /d").ops(BLOCK_CHANGES_OWNER);
    plant.shows_as(&[Kind::PromiseLost, Kind::RecoveryFailed]);
}

#[test]
fn pieces_not_awaited() {
    let direct = |config: &mut Config| config.options.scheduler = Scheduler::Direct;
    let plant = in_pieces(Bug::PiecesNotAwaited).with(direct);
    plant.shows_as(&[Kind::PromiseLost, Kind::RecoveryFailed]);
}

#[test]
fn wrap_off_by_one() {
    round_the_log(Bug::WrapOffByOne).shows_as(&[Kind::PromiseLost, Kind::RecoveryFailed]);
}

#[test]
fn tail_before_home() {
    let kinds = [Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed];
    // Without the flush the checkpoint's requests race with the commit's.
    let plant = Plant { races: true, ..Plant::new(Bug::TailBeforeHome) };
    plant.shows_as(&kinds);
}

#[test]
fn tail_not_durable() {
    let kinds = [Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed];
    round_the_log(Bug::TailNotDurable).shows_as(&kinds);
}

/// The oldest transaction has a directory's block that the running one changes, too, when the log
/// is full.
#[test]
fn running_goes_home() {
    let plant = Plant::new(Bug::RunningGoesHome).data(DataMode::Journal);
    let plant = plant.setup("mkdir /d; create /b; append /b 886000");
    let ops = "create /d/x; fsync /d/x; write /b 0 886000; fsync /b; write /b 0 886000; fsync /b; \
               write /b 0 886000; fsync /b; write /b 0 886000; fsync /b; create /d/y; \
               write /b 0 886000; fsync /b";
    plant.ops(ops).shows_as(&[Kind::Fsck, Kind::Invented, Kind::RecoveryFailed]);
}

#[test]
fn escape_not_undone() {
    let plant = Plant::new(Bug::EscapeNotUndone).data(DataMode::Journal);
    plant.ops("magic /a 0; fsync /a").shows_as(&[Kind::PromiseLost]);
}

#[test]
fn sequence_not_checked() {
    let plant = Plant::new(Bug::SequenceNotChecked);
    let setup =
        "create /a; append /a 9000; sync; create /x; sync; create /y; sync; create /z; sync";
    plant.setup(setup).shows_as(&[Kind::RecoveryFailed, Kind::PromiseLost, Kind::Fsck]);
}

#[test]
fn checksums_not_verified() {
    let plant = Plant::new(Bug::ChecksumsNotVerified).with(|config| config.damage_every = 1);
    plant.shows_as(&[Kind::DamageReplayed]);
}

#[test]
fn replay_not_flushed() {
    let plant = Plant::new(Bug::ReplayNotFlushed).with(|config| config.inner_every = 1);
    plant.shows_as(&[Kind::NotIdempotent, Kind::RecoveryFailed, Kind::Fsck]);
}

/// Found in the first images whose log holds a transaction that nobody was promised.
#[test]
fn last_commit_ignored() {
    let plant = Plant::new(Bug::LastCommitIgnored).with(|config| config.compare_every = 1);
    plant.shows_as(&[Kind::Disagrees]);
}

/// Found only where a write is torn: in a mount, of which no log has the whole of it.
#[test]
fn superblock_in_two_sectors() {
    let plant = |torn| {
        let plant = Plant::new(Bug::SuperblockInTwoSectors).with(|config| config.compare_every = 1);
        plant.with(|config| config.budget.torn_max = torn)
    };
    assert!(plant(0).run(Some(Bug::SuperblockInTwoSectors)).findings.is_empty());
    plant(8).shows_as(&[Kind::RecoveryFailed]);
}

/// As at boot, e2fsck leaves a log alone that the superblock does not speak of.
#[test]
fn log_not_announced() {
    let plant = Plant::new(Bug::LogNotAnnounced).with(|config| config.compare_every = 1);
    plant.shows_as(&[Kind::Disagrees]);
}

/// Needs no power cut: the second time is found by the engine.
#[test]
fn freed_twice() {
    let plant = Plant::new(Bug::FreedTwice).ops("truncate /a 0; fsync /a; sync");
    plant.sound();
    let report = plant.run(Some(Bug::FreedTwice));
    let finding = report.findings.first().expect("the bug is found");
    assert_eq!(finding.problem.kind, Kind::EngineFailed, "{finding}");
    println!("| `FreedTwice` | `EngineFailed` | 0 | |");
}

#[test]
fn block_reuse() {
    let plant = Plant::new(Bug::BlockReuse);
    let ops = "truncate /a 0; create /b; append /b 9000; fsync /b";
    plant.ops(ops).shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn inode_reuse() {
    let plant = Plant::new(Bug::InodeReuse);
    let ops = "hold /a; unlink /a; sync; create /b; append /b 100; fsync /b";
    plant.ops(ops).shows_as(&[Kind::Fsck, Kind::RecoveryFailed, Kind::PromiseLost]);
}

#[test]
fn discard_before_commit() {
    let plant = Plant::new(Bug::DiscardBeforeCommit).with(|config| config.options.discard = true);
    plant.shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn entry_before_inode() {
    Plant::new(Bug::EntryBeforeInode).shows_as(&[Kind::Fsck, Kind::RecoveryFailed]);
}

#[test]
fn rename_in_two() {
    Plant::new(Bug::RenameInTwo).shows_as(&[Kind::Invented, Kind::Fsck]);
}

const OPEN_WITHOUT_NAMES: &str = "hold /a; unlink /a; create /b; fsync /b; append /b 100; sync";

#[test]
fn orphan_too_late() {
    Plant::new(Bug::OrphanTooLate).ops(OPEN_WITHOUT_NAMES).shows_as(&[Kind::Fsck]);
}

#[test]
fn orphans_not_processed() {
    let kinds = [Kind::Fsck, Kind::RecoveryFailed];
    Plant::new(Bug::OrphansNotProcessed).ops(OPEN_WITHOUT_NAMES).shows_as(&kinds);
}

#[test]
fn size_before_data() {
    let plant = Plant::new(Bug::SizeBeforeData);
    let ops = "append /a 20000; chmod /a 600; create /b; fsync /b";
    plant.ops(ops).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn stale_tail() {
    let plant = Plant::new(Bug::StaleTail);
    let ops = "truncate /a 5000; truncate /a 8100; create /b; fsync /b";
    plant.ops(ops).shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

/// Four threads that free and take blocks, with a commit for each file.
fn churn() -> Workload {
    let churn = |thread: u64| {
        let mut text = String::new();
        for round in 0..24 {
            let file = format!("/T{thread}/f{}", round % 3);
            let len = 9000 + 4096 * ((round + thread) % 3);
            text += &format!("create {file}; append {file} {len}; fsync {file}; unlink {file}; ");
        }
        ops::parse(&text).expect("operations")
    };
    let setup = ops::parse("mkdir /T0; mkdir /T1; mkdir /T2; mkdir /T3").expect("operations");
    Workload::threads(setup, (0..4).map(churn).collect())
}

/// Only threads show it: one takes what another's commit, which is under way, frees.
#[test]
fn told_before_logged() {
    let plant = Plant { workload: churn(), ..Plant::new(Bug::ToldBeforeLogged) };
    plant.with(|config| config.options.scheduler = Scheduler::Direct).found_by_threads();
}

#[test]
fn truncation_not_completed() {
    let mut plant = Plant::new(Bug::TruncationNotCompleted).edge(Edge::LongTruncate);
    // The truncation, and nothing behind it.
    let is_it = |op: &Op| op.to_string().starts_with("truncate /wide");
    let at = plant.workload.ops.iter().position(is_it).expect("there is one");
    plant.workload.ops.truncate(at + 1);
    plant.shows_as(&[Kind::Fsck]);
}

#[test]
fn value_not_revoked() {
    Plant::new(Bug::ValueNotRevoked).edge(Edge::ValueInodes).shows_as(&[Kind::ForeignBytes]);
}

#[test]
fn revoke_block_cut() {
    Plant::new(Bug::RevokeBlockCut).edge(Edge::ManyRevokes).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn shrunk_page_forgotten() {
    Plant::new(Bug::ShrunkPageForgotten)
        .ops("truncate /a 5000; truncate /a 30000; sync")
        .shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn old_tail_kept() {
    let plant = Plant::new(Bug::OldTailKept).with(|config| config.use_every = 1);
    plant.ops("truncate /a 5000; create /b; fsync /b").shows_as(&[Kind::ForeignBytes]);
}

#[test]
fn shift_not_committed() {
    let plant = Plant::new(Bug::ShiftNotCommitted).setup("create /a; append /a 20000");
    let ops = "fallocate /a insert 4096 4096; write /a 3000 6000; fdatasync /a";
    plant.ops(ops).shows_as(&[Kind::ForeignBytes, Kind::PromiseLost]);
}

#[test]
fn writeback_not_awaited() {
    let plant = Plant { races: true, ..Plant::new(Bug::WritebackNotAwaited) };
    plant.shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn neighbour_forgotten() {
    Plant::new(Bug::NeighbourForgotten)
        .ops("create /a; append /a 5000; create /b; append /b 5000; sync")
        .shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn fsync_as_fdatasync() {
    Plant::new(Bug::FsyncAsFdatasync).shows_as(&[Kind::PromiseLost]);
}

/// Under a policy that commits what the directory depends on; the others commit everything.
#[test]
fn directory_fdatasync() {
    Plant::groups(Bug::DirectoryFdatasync)
        .ops("unlink /G0/a; fdatasync /G0")
        .shows_as(&[Kind::PromiseLost]);
}

#[test]
fn directory_fsync_alone() {
    Plant::new(Bug::DirectoryFsyncAlone)
        .setup("mkdir /d; create /a")
        .ops("chmod /a 600; mkdir /e; fdatasync /d")
        .shows_as(&[Kind::PromiseLost]);
}

#[test]
fn overwrite_not_flushed() {
    Plant::new(Bug::OverwriteNotFlushed)
        .ops("write /a 0 5000; fdatasync /a")
        .shows_as(&[Kind::PromiseLost]);
}

/// The scheduler above a device with native barriers, every epoch a batch of writes of which the
/// barrier's goes to the lowest address, and so leaves the queue first.
struct Epochs {
    log: Log,
}

const EPOCHS: u64 = 4;
const WRITES: u64 = 3;
const BLOCK: u64 = 4096;

/// Where write `number` of `epoch` goes; not adjacent, so that nothing is merged.
fn place(epoch: u64, number: u64) -> u64 {
    (epoch * WRITES + number) * 2 * BLOCK
}

impl Epochs {
    fn run() -> Epochs {
        let base = Image::new(1 << 20);
        let inner = Arc::new(RecordingDevice::recording(base.clone(), DeviceKind::Barrier));
        let device = EpochDevice::new(inner.clone());
        let mut tickets = Vec::new();
        for epoch in 0..EPOCHS {
            let write = |number| Request::Write {
                offset: place(epoch, number),
                bufs: vec![Buf::from_slice(&[0xE0 | (epoch as u8 + 1); BLOCK as usize])],
                order: if number == 0 { Order::Barrier } else { Order::Ordered },
                fua: false,
                class: Class::Sync,
            };
            tickets.extend(device.submit((0..WRITES).rev().map(write).collect()));
        }
        Ticket::wait_all(&tickets).expect("the device works");
        device.flush().expect("the device works");
        Epochs { log: inner.take_log(base) }
    }

    /// How many states were judged, and the first in which a write of an epoch is there, but not
    /// all of the epochs before.
    fn judge(&self) -> (u64, Option<String>) {
        let (mut seen, mut wrong) = (HashSet::new(), None);
        let budget = Budget::default();
        states::enumerate(&self.log, DeviceKind::Barrier, &budget, 1, 0, &mut |state| {
            if seen.insert(state.image.hash()) && !in_order(&state.image) {
                wrong = Some(state.case.to_string());
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        });
        (seen.len() as u64, wrong)
    }
}

fn in_order(image: &Image) -> bool {
    let there = |epoch: u64| -> Vec<usize> {
        let bytes = |number| {
            let mut block = [0; BLOCK as usize];
            image.read(place(epoch, number), &mut block);
            block.iter().filter(|byte| **byte != 0).count()
        };
        (0..WRITES).map(bytes).collect()
    };
    (1..EPOCHS).all(|epoch| {
        let begun = there(epoch).iter().any(|count| *count > 0);
        !begun || (0..epoch).flat_map(there).all(|count| count == BLOCK as usize)
    })
}

#[test]
fn barrier_not_reassigned() {
    let run = |bug| {
        let _planting = Planting::new(bug);
        Epochs::run().judge()
    };
    let (all, sound) = run(None);
    assert!(all > 30 && sound.is_none(), "without the bug, in {all} states: {sound:?}");
    let (tried, wrong) = run(Some(Bug::BarrierNotReassigned));
    assert!(wrong.is_some(), "not found in {tried} states");
    println!("| `BarrierNotReassigned` | order of epochs | {tried} | {all} |");
}

#[test]
fn barrier_ignored() {
    barriers_ignored().shows_as(&[Kind::OrderBroken]);
}

fn barriers_ignored() -> Plant {
    Plant::new(Bug::BarrierIgnored)
        .setup("create /a; append /a 9000; create /b; append /b 9000")
        .ops("write /a 0 5000; fdatabarrier /a; write /b 0 5000; fdatasync /b")
        .with(|config| config.options.scheduler = Scheduler::Epoch)
}

/// A name commits, and what was written before it does not.
#[test]
fn journaled_data_late() {
    let ops = "append /a 3000; create /n; fsync /";
    let plant = Plant::new(Bug::JournaledDataLate).data(DataMode::Journal).ops(ops);
    plant.shows_as(&[Kind::OrderBroken]);
}

/// The planted list and these files do not drift apart.
#[test]
fn every_bug_has_a_test() {
    let tests = concat!(
        include_str!("main.rs"),
        include_str!("policies.rs"),
        include_str!("barriers.rs"),
        include_str!("dual.rs")
    );
    for bug in Bug::ALL {
        let own = [format!("(Bug::{bug:?})"), format!("(Some(Bug::{bug:?}))")];
        assert!(own.iter().any(|own| tests.contains(own)), "{bug:?} has no test");
    }
}
