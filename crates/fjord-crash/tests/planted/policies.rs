//! Bugs of the policies: fast commits, i-transactions, commits of groups.

use fjord::{DataMode, FsyncPolicyKind};
use fjord_block::plant::Bug;
use fjord_crash::base::{FAST_COMMIT, Features};
use fjord_crash::check::Kind;
use fjord_crash::workloads::Family;

use crate::Plant;

/// Fast commits of files behind the journal's block of the inode table, over two full commits.
const FAST_COMMITS: &str = "append /n 9000; fsync /n; create /m; append /m 5000; fsync /m; \
    write /n 0 3000; fdatasync /n; truncate /n 2000; fsync /n; sync; append /m 100; fsync /m; \
    append /n 5000; fsync /n";

fn fast_commits(bug: Bug) -> Plant {
    let mut setup = String::new();
    for number in 0..20 {
        setup += &format!("create /f{number}; ");
    }
    let plant = Plant::new(bug).setup(&(setup + "create /n; append /n 20000")).ops(FAST_COMMITS);
    plant.with(|config| {
        config.features = FAST_COMMIT[0];
        config.options.fsync = FsyncPolicyKind::FastCommit;
    })
}

#[test]
fn fast_commit_before_data() {
    let kinds = [Kind::ForeignBytes, Kind::PromiseLost];
    fast_commits(Bug::FastCommitBeforeData).shows_as(&kinds);
}

#[test]
fn fast_commit_not_durable() {
    fast_commits(Bug::FastCommitNotDurable).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn fast_commit_not_restarted() {
    fast_commits(Bug::FastCommitNotRestarted).shows_as(&[Kind::PromiseLost]);
}

/// Replay by e2fsck begins with the counts that are checkpointed, and writes them back.
#[test]
fn directory_count_not_home() {
    let plant = fast_commits(Bug::DirectoryCountNotHome).with(|config| config.compare_every = 1);
    let plant = plant.ops("append /n 100; fsync /n; mkdir /d; sync; append /n 5000; fsync /n");
    plant.shows_as(&[Kind::Disagrees]);
}

/// Only what e2fsck makes of it shows it: fjord and Linux pass over the head of another stream.
#[test]
fn stream_marked_early() {
    let plant = fast_commits(Bug::StreamMarkedEarly).with(|config| config.compare_every = 1);
    plant.shows_as(&[Kind::Disagrees]);
}

#[test]
fn stream_end_not_hidden() {
    let plant = fast_commits(Bug::StreamEndNotHidden).with(|config| config.compare_every = 1);
    plant.shows_as(&[Kind::Disagrees]);
}

#[test]
fn stream_end_not_flushed() {
    fast_commits(Bug::StreamEndNotFlushed).shows_as(&[Kind::PromiseLost, Kind::RecoveryFailed]);
}

/// The directory commits before the fast commits, and has no part in what ends them.
#[test]
fn stream_end_before_home() {
    let plant = fast_commits(Bug::StreamEndBeforeHome);
    let plant =
        plant.ops("append /n 100; fsync /n; rename /f1 /g; sync; append /n 5000; fsync /n; sync");
    plant.shows_as(&[Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed]);
}

#[test]
fn fast_commit_no_name() {
    fast_commits(Bug::FastCommitNoName).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn fast_commit_no_holes() {
    let kinds = [Kind::PromiseLost, Kind::ForeignBytes, Kind::Fsck, Kind::NotIdempotent];
    let plant = fast_commits(Bug::FastCommitNoHoles);
    plant.ops("fallocate /n keep+punch 4096 8192; fsync /n; sync").shows_as(&kinds);
}

#[test]
fn fast_commit_tid_not_checked() {
    let kinds = [Kind::PromiseLost, Kind::ForeignBytes, Kind::RecoveryFailed, Kind::Fsck];
    // Behind the first fast commit of the second stream lies the second one of the first.
    let plant = fast_commits(Bug::FastCommitTidNotChecked).ops(
        "append /n 9000; fsync /n; truncate /n 100; fsync /n; sync; append /n 5000; fsync /n; \
         write /n 0 3000; fsync /n",
    );
    plant.shows_as(&kinds);
}

#[test]
fn fast_commit_marked_clean() {
    let plant = fast_commits(Bug::FastCommitMarkedClean).with(|config| config.inner_every = 1);
    plant.shows_as(&[Kind::NotIdempotent, Kind::PromiseLost]);
}

#[test]
fn fast_commit_in_parts() {
    let plant = fast_commits(Bug::FastCommitInParts).with(|config| config.inner_every = 1);
    plant.shows_as(&[Kind::NotIdempotent, Kind::PromiseLost, Kind::Fsck]);
}

/// Only what Linux makes of it shows it.
#[test]
fn fast_commit_attribute_block() {
    let plant = fast_commits(Bug::FastCommitAttributeBlock);
    let plant = plant.setup("create /n; setxattr /n user.r 700; append /n 20000");
    let plant = plant.with(|config| config.compare_every = 1);
    plant.ops("append /n 4096; fsync /n").shows_as(&[Kind::Disagrees]);
}

/// Where such a log ends is not where a journal does whose fast commits do not count.
#[test]
fn log_goes_round() {
    let writes = "write /a 0 200000; fsync /a; ".repeat(6);
    let plant = Plant::new(Bug::LogGoesRound).setup("create /a; append /a 200000").ops(&writes);
    let plant = plant.data(DataMode::Journal).with(|config| {
        config.features = Features::by_name("fast_commit-1k").expect("a feature set");
        (config.compare_every, config.budget.subsets_max) = (1, 2);
    });
    plant.shows_as(&[Kind::PromiseLost, Kind::Disagrees]);
}

/// Fsync by i-transactions, in one area.
pub(crate) fn i_transactions(bug: Bug) -> Plant {
    Plant::new(bug).with(|config| {
        config.features = config.features.with_areas(1);
        config.options.fsync = FsyncPolicyKind::Ijournal;
    })
}

/// A file is fsynced, changes, and the change is committed: what the i-transaction has is older.
#[test]
fn i_transaction_dead() {
    let ops = "write /a 0 5000; fsync /a; truncate /a 100; sync; create /b; fsync /b";
    let plant = i_transactions(Bug::ItransactionDead).ops(ops);
    plant.shows_as(&[Kind::PromiseLost, Kind::ForeignBytes, Kind::Fsck, Kind::RecoveryFailed]);
}

#[test]
fn i_transaction_order() {
    let ops = "write /a 0 100; fsync /a; write /a 50 100; append /a 3000; fsync /a";
    i_transactions(Bug::ItransactionOrder).ops(ops).shows_as(&[Kind::PromiseLost]);
}

/// More i-transactions of one file than the area holds, after one of another.
#[test]
fn i_transaction_area_reused() {
    let appends = "append /a 4096; fsync /a; ".repeat(12);
    let ops = format!("create /b; append /b 4096; fsync /b; {appends}");
    i_transactions(Bug::ItransactionAreaReused).ops(&ops).shows_as(&[Kind::PromiseLost]);
}

/// More than an i-transaction carries, over blocks that are there.
#[test]
fn i_transaction_overwrite_not_flushed() {
    let plant = i_transactions(Bug::ItransactionOverwriteNotFlushed);
    let plant = plant.setup("create /a; append /a 60000; sync");
    plant.ops("write /a 0 50000; fsync /a").shows_as(&[Kind::PromiseLost]);
}

#[test]
fn i_transaction_link_not_committed() {
    let plant = i_transactions(Bug::ItransactionLinkNotCommitted);
    let plant = plant.setup("create /a; append /a 100");
    plant.ops("link /a /b; fsync /a").shows_as(&[Kind::PromiseLost]);
}

#[test]
fn i_transaction_attributes_not_committed() {
    let plant = i_transactions(Bug::ItransactionAttributesNotCommitted).setup("create /a");
    plant.ops("setxattr /a user.x 3000; fsync /a").shows_as(&[Kind::PromiseLost]);
}

#[test]
fn i_transaction_not_durable() {
    i_transactions(Bug::ItransactionNotDurable).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn i_transaction_before_data() {
    let plant = i_transactions(Bug::ItransactionBeforeData).ops("append /a 60000; fsync /a");
    plant.shows_as(&[Kind::PromiseLost, Kind::ForeignBytes]);
}

#[test]
fn i_transaction_no_parents() {
    let ops = "mkdir /d; mkdir /d/e; create /d/e/f; fsync /d/e/f";
    i_transactions(Bug::ItransactionNoParents).ops(ops).shows_as(&[Kind::PromiseLost]);
}

/// Holes between the blocks: more extents than the inode holds.
#[test]
fn i_transaction_no_nodes() {
    let writes: String = (0..7).map(|n| format!("write /b {} 4096; ", n * 8192)).collect();
    let ops = format!("create /b; {writes} fsync /b; append /b 4096; fsync /b");
    let kinds = [Kind::PromiseLost, Kind::RecoveryFailed, Kind::ForeignBytes];
    i_transactions(Bug::ItransactionNoNodes).ops(&ops).shows_as(&kinds);
}

#[test]
fn i_transaction_name_taken() {
    let ops = "create /b; append /b 100; fsync /b; rename /b /c; create /b; fsync /b";
    i_transactions(Bug::ItransactionNameTaken).ops(ops).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn i_transaction_no_mark() {
    i_transactions(Bug::ItransactionNoMark).shows_as(&[Kind::PromiseLost]);
}

/// Data that an i-transaction carries is written over by a larger write, in place.
#[test]
fn inline_data_stale() {
    let plant = i_transactions(Bug::InlineDataStale).setup("create /a; append /a 90000");
    let ops = "write /a 0 4096; fsync /a; write /a 0 80000; fdatasync /a";
    plant.ops(ops).shows_as(&[Kind::PromiseLost]);
}

/// The same, and recovery lets the old data go before the new is there.
#[test]
fn superseded_not_flushed() {
    let plant = i_transactions(Bug::SupersededNotFlushed).setup("create /a; append /a 60000");
    let ops = "write /a 0 4096; fsync /a; write /a 0 57344; fsync /a";
    plant.ops(ops).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn inline_data_not_replayed() {
    let kinds = [Kind::PromiseLost, Kind::ForeignBytes];
    i_transactions(Bug::InlineDataNotReplayed).shows_as(&kinds);
}

#[test]
fn inline_data_not_committed() {
    let kinds = [Kind::PromiseLost, Kind::ForeignBytes];
    let plant = i_transactions(Bug::InlineDataNotCommitted);
    plant.ops("append /a 4096; fsync /a; create /b; fsync /; create /c; fsync /c").shows_as(&kinds);
}

#[test]
fn recovery_not_marked() {
    let plant = i_transactions(Bug::RecoveryNotMarked).with(|config| config.inner_every = 1);
    plant.shows_as(&[Kind::NotIdempotent, Kind::PromiseLost]);
}

/// Changes of groups that nothing syncs.
const ELSEWHERE: &str = "create /G2/n; create /G3/n; create /G4/n; create /G5/n; ";

#[test]
fn parts_not_closed() {
    let ops = "rename /G0/a /G1/x; fsync /G1/x";
    let kinds = [Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed, Kind::Invented];
    Plant::groups(Bug::PartsNotClosed).ops(&format!("{ELSEWHERE}{ops}")).shows_as(&kinds);
}

#[test]
fn entries_of_all_parts() {
    let ops = "create /G0/n; fsync /G0/n";
    let kinds = [Kind::Fsck, Kind::RecoveryFailed];
    Plant::groups(Bug::EntriesOfAllParts).ops(&format!("{ELSEWHERE}{ops}")).shows_as(&kinds);
}

#[test]
fn entries_before_last_part() {
    let ops = "create /G0/n; fsync /G0/n; create /G1/n; fsync /G1/n";
    let kinds = [Kind::Fsck, Kind::RecoveryFailed];
    Plant::groups(Bug::EntriesBeforeLastPart).ops(&format!("{ELSEWHERE}{ops}")).shows_as(&kinds);
}

#[test]
fn part_data_not_awaited() {
    let ops = "append /G0/a 100; fsync /G0/a; append /G0/a 5000; fsync /G0/a";
    let kinds = [Kind::PromiseLost, Kind::ForeignBytes];
    Plant::groups(Bug::PartDataNotAwaited).ops(&format!("{ELSEWHERE}{ops}")).shows_as(&kinds);
}

#[test]
fn part_overwrite_not_flushed() {
    let ops = "write /G0/a 0 4096; fdatasync /G0/a; write /G0/a 0 4096; fdatasync /G0/a";
    Plant::groups(Bug::PartOverwriteNotFlushed).ops(ops).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn part_sequence_reused() {
    let ops = "create /G0/n; fsync /G0/n; create /G1/n; fsync /G1/n";
    let kinds = [Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed];
    Plant::groups(Bug::PartSequenceReused).ops(&format!("{ELSEWHERE}{ops}")).shows_as(&kinds);
}

#[test]
fn freed_of_all_parts() {
    let ops = "truncate /G0/a 0; truncate /G1/a 0; fsync /G0/a; \
               create /G1/b; append /G1/b 9000; fsync /G1/b";
    let kinds = [Kind::PromiseLost, Kind::ForeignBytes];
    Plant::groups(Bug::FreedOfAllParts).ops(&format!("{ELSEWHERE}{ops}")).shows_as(&kinds);
}

/// Threads meet in directories that one of them has just made.
#[test]
fn entry_logged_too_early() {
    let workload = Family::SharedDirs.workloads(1).next().expect("it is endless");
    let plant = i_transactions(Bug::EntryLoggedTooEarly);
    Plant { workload, ..plant }.found_by_threads();
}
