//! The cases: two threads with all interleavings up to a number of preemptions, more threads at
//! random.

use fjord_journal::{JournalError, PipelineMode};

use crate::device::{FIRST, Fault};
use crate::explore::{Case, Search, Step};
use crate::world::{Setup, World};

use Search::{Preemptions, Priorities, Random};

const SERIAL: Setup = Setup {
    pipeline: PipelineMode::Serial,
    keeps_order: false,
    parts: false,
    pieces: false,
    refusals: 0,
    fault: None,
};
const DUAL: Setup = Setup { pipeline: PipelineMode::Dual, ..SERIAL };

const fn ordered(setup: Setup) -> Setup {
    Setup { keeps_order: true, ..setup }
}

const fn parts(setup: Setup) -> Setup {
    Setup { parts: true, ..setup }
}

const fn pieces(setup: Setup) -> Setup {
    Setup { pieces: true, ..setup }
}

const fn failing(setup: Setup, fault: Fault) -> Setup {
    Setup { fault: Some(fault), ..setup }
}

fn fsync_0(world: &World) {
    world.fsync(world.change(0));
}

fn fsync_1(world: &World) {
    world.fsync(world.change(1));
}

fn fsync_2(world: &World) {
    world.fsync(world.change(2));
}

fn fsync_twice(world: &World) {
    fsync_0(world);
    fsync_0(world);
}

fn fsync_data(world: &World) {
    world.fsync(world.change_with_data(0, 50));
}

fn fbarrier_twice(world: &World) {
    world.fbarrier(world.change(0));
    world.fbarrier(world.change(0));
}

fn fbarrier_6(world: &World) {
    for block in 0..6 {
        world.fbarrier(world.change(block));
    }
}

fn finish(world: &World) {
    world.journal.finish_commits().expect("commits in flight become durable");
    world.assert_all_durable();
    world.assert_all_called();
}

fn commit_running(world: &World) {
    world.journal.commit_running().expect("a commit");
}

fn commit_running_or_stopped(world: &World) {
    let _ = world.journal.commit_running();
}

fn change_0(world: &World) {
    world.change(0);
}

fn ask_0(world: &World) {
    world.ask(world.change(0));
}

fn ask_1(world: &World) {
    world.ask(world.change(1));
}

fn ask_twice(world: &World) {
    ask_0(world);
    ask_1(world);
}

/// Changes of parts that stay behind, so that commits of other parts are partial.
fn fill_part_3(world: &World) {
    world.change(3);
    world.change(7);
}

fn fsync_part_0(world: &World) {
    world.fsync_part(world.change(0));
}

fn fsync_part_1(world: &World) {
    world.fsync_part(world.change(1));
}

/// Another block of part 0.
fn fsync_part_0_again(world: &World) {
    world.fsync_part(world.change(4));
}

/// A change of part 0, for others to commit.
fn fill_parts_0_and_3(world: &World) {
    world.change(0);
    fill_part_3(world);
}

/// Makes a change of before durable.
fn fsync_part_0_of_before(world: &World) {
    world.fsync_part(world.newest(0));
}

fn ask_part_0(world: &World) {
    world.ask_part(world.change(0));
}

fn ask_part_1(world: &World) {
    world.ask_part(world.change(1));
}

fn abort(world: &World) {
    world.journal.abort(JournalError::Usage("an error elsewhere".into()));
}

fn shutdown(world: &World) {
    world.journal.shutdown();
}

fn close(world: &World) {
    let _ = world.journal.close();
}

fn free_0(world: &World) {
    world.fsync(world.free(0, 1));
}

fn change_and_free_0(world: &World) {
    world.fsync(world.change_and_free(0, 1));
}

fn fetch_0(world: &World) {
    world.change_and_fetch(0);
}

fn reused(world: &World) {
    world.assert_reused(0);
}

fn checkpoint(world: &World) {
    world.journal.checkpoint_all().expect("a checkpoint");
}

/// Three blocks in one commit.
fn fsync_three(world: &World) {
    world.change(0);
    world.change(1);
    fsync_2(world);
}

/// Three blocks, for others to commit.
fn fill_three(world: &World) {
    for block in 0..3 {
        world.change(block);
    }
}

fn fsync_of_before(world: &World) {
    world.fsync(world.newest(2));
    world.assert_newest_durable();
}

fn try_fsync_of_before(world: &World) {
    world.fsync(world.newest(2));
}

fn fsync_part_of_before(world: &World) {
    world.fsync_part(world.newest(2));
}

fn checkpoint_durable(world: &World) {
    checkpoint(world);
    world.assert_newest_durable();
}

fn fsync_and_checkpoint(world: &World) {
    fsync_0(world);
    checkpoint(world);
}

/// Two commits with a block in common.
fn fsync_four(world: &World) {
    world.change(1);
    fsync_0(world);
    world.change(2);
    fsync_0(world);
}

fn try_checkpoint(world: &World) {
    let _ = world.journal.checkpoint_all();
}

fn newest_durable(world: &World) {
    world.assert_newest_durable();
}

fn close_durable(world: &World) {
    world.journal.close().expect("a close");
    world.assert_newest_durable();
}

fn settle_in_flight(world: &World) {
    world.journal.settle_in_flight();
}

/// Stops the journal while a handle is open.
fn shutdown_under_a_handle(world: &World) {
    if let Ok(handle) = world.journal.start(1) {
        shutdown(world);
        handle.stop();
    }
}

fn first_lasts(world: &World) {
    world.assert_failed_from(FIRST + 1);
}

fn none_lasts(world: &World) {
    world.assert_failed_from(FIRST);
}

fn failed_are_lost(world: &World) {
    world.assert_failed_are_lost();
}

fn any(_: &World) {}

/// A case for each name, and its test.
macro_rules! cases {
    ($($name:ident $test:ident: $case:expr, $searches:expr;)*) => {
        $(pub(crate) const $name: Case = $case;)*
        $(#[test]
        fn $test() {
            $name.check(concat!("cases::", stringify!($test)), &$searches);
        })*
    };
}

const THREE_FSYNC_PART_0: [Step; 3] = [fsync_part_0_of_before; 3];
/// A change of before, beside a full commit or that of another part.
const PART_BESIDE_WHOLE: [Step; 3] = [fsync_part_0_of_before, fsync_part_0_of_before, fsync_2];
const PART_BESIDE_PART: [Step; 3] = [fsync_part_0_of_before, fsync_part_0_of_before, fsync_part_1];

/// For two threads.
const TWO: [Search; 1] = [Preemptions(2)];
/// For three threads, or many commits.
const MANY: [Search; 3] = [Preemptions(1), Random(3000), Priorities(3, 3000)];

cases! {
    ONE_TRANSACTION_SERIAL one_transaction_serial:
        Case::new(SERIAL, &[commit_running, commit_running]).before(change_0), [Preemptions(3)];
    ONE_TRANSACTION_DUAL one_transaction_dual:
        Case::new(DUAL, &[commit_running, commit_running]).before(change_0), [Preemptions(3)];
    FSYNCS_SERIAL fsyncs_serial: Case::new(SERIAL, &[fsync_0, fsync_1]), TWO;
    FSYNCS_SERIAL_ORDERED fsyncs_serial_ordered:
        Case::new(ordered(SERIAL), &[fsync_0, fsync_1]), TWO;
    FSYNCS_DUAL fsyncs_dual: Case::new(DUAL, &[fsync_0, fsync_1]), TWO;
    FSYNCS_DUAL_ORDERED fsyncs_dual_ordered: Case::new(ordered(DUAL), &[fsync_0, fsync_1]), TWO;
    ONE_BLOCK one_block: Case::new(DUAL, &[fsync_0, fsync_0]), TWO;
    DATA_DUAL data_dual: Case::new(DUAL, &[fsync_data, fsync_1]), TWO;
    DATA_DUAL_ORDERED data_dual_ordered: Case::new(ordered(DUAL), &[fsync_data, fsync_1]), TWO;
    CHAIN_DUAL chain_dual: Case::new(DUAL, &[fsync_twice, fsync_1]), TWO;
    CHAIN_DUAL_ORDERED chain_dual_ordered: Case::new(ordered(DUAL), &[fsync_twice, fsync_1]), TWO;
    CHAINS_DUAL chains_dual: Case::new(DUAL, &[fsync_twice, fsync_1, fsync_2]), MANY;
    SETTLE_IN_FLIGHT settle_in_flight_beside: Case::new(DUAL, &[fsync_0, settle_in_flight]), TWO;
    THREE_SERIAL three_serial: Case::new(SERIAL, &[fsync_0, fsync_1, fsync_2]), MANY;
    THREE_SERIAL_ORDERED three_serial_ordered:
        Case::new(ordered(SERIAL), &[fsync_0, fsync_1, fsync_2]), MANY;
    THREE_DUAL three_dual: Case::new(DUAL, &[fsync_0, fsync_1, fsync_2]), MANY;
    THREE_DUAL_ORDERED three_dual_ordered:
        Case::new(ordered(DUAL), &[fsync_0, fsync_1, fsync_2]), MANY;

    FBARRIER_SERIAL fbarrier_serial:
        Case::new(ordered(SERIAL), &[fbarrier_twice, fsync_1]).after(finish), TWO;
    FBARRIER_DUAL fbarrier_dual:
        Case::new(ordered(DUAL), &[fbarrier_twice, fsync_1]).after(finish), TWO;
    TWELVE_FBARRIERS twelve_fbarriers:
        Case::new(ordered(DUAL), &[fbarrier_6, fbarrier_6]).after(finish), MANY;

    REQUESTS_SERIAL requests_serial: Case::new(SERIAL, &[ask_0, ask_1]), TWO;
    REQUESTS_DUAL requests_dual: Case::new(DUAL, &[ask_0, ask_1]), TWO;
    REQUESTS_AND_FSYNC requests_and_fsync: Case::new(DUAL, &[ask_twice, ask_1, fsync_2]), MANY;

    PARTS_SERIAL parts_serial:
        Case::new(parts(SERIAL), &[fsync_part_0, fsync_part_1]).before(fill_part_3), TWO;
    PARTS_DUAL parts_dual:
        Case::new(parts(DUAL), &[fsync_part_0, fsync_part_1]).before(fill_part_3), TWO;
    PARTS_DUAL_ORDERED parts_dual_ordered:
        Case::new(parts(ordered(DUAL)), &[fsync_part_0, fsync_part_1]).before(fill_part_3), TWO;
    ONE_PART one_part:
        Case::new(parts(DUAL), &[fsync_part_0, fsync_part_0_again]).before(fill_part_3), TWO;
    ONE_CHANGE one_change:
        Case::new(parts(DUAL), &THREE_FSYNC_PART_0).before(fill_parts_0_and_3), MANY;
    PARTS_NOT_READY parts_not_ready:
        Case::new(Setup { refusals: 2, ..parts(DUAL) }, &[fsync_part_0, fsync_part_1])
            .before(fill_part_3), MANY;
    PARTS_AND_WHOLE parts_and_whole:
        Case::new(parts(DUAL), &[fsync_part_0, fsync_part_1, fsync_2]).before(fill_part_3), MANY;
    PART_REQUESTS part_requests:
        Case::new(parts(DUAL), &[ask_part_0, ask_part_1]).before(fill_part_3), TWO;

    LOG_START_FAILS log_start_fails:
        Case::new(failing(DUAL, Fault::LogStart), &[fsync_0, fsync_1]).after(none_lasts), TWO;
    LOG_START_FAILS_ORDERED log_start_fails_ordered:
        Case::new(failing(ordered(DUAL), Fault::LogStart), &[fbarrier_twice, fsync_1]).after(any),
        TWO;
    LOG_BLOCK_FAILS log_block_fails:
        Case::new(failing(DUAL, Fault::Body(FIRST + 1)), &[fsync_twice, fsync_1])
            .after(first_lasts), TWO;
    LOG_BLOCK_FAILS_ORDERED log_block_fails_ordered:
        Case::new(failing(ordered(DUAL), Fault::Body(FIRST + 1)), &[fsync_twice, fsync_1])
            .after(first_lasts), TWO;
    COMMIT_BLOCK_FAILS commit_block_fails:
        Case::new(failing(DUAL, Fault::CommitBlock(FIRST + 1)), &[fsync_twice, fsync_1])
            .after(first_lasts), TWO;
    COMMIT_BLOCK_FAILS_SERIAL commit_block_fails_serial:
        Case::new(failing(SERIAL, Fault::CommitBlock(FIRST + 1)), &[fsync_twice, fsync_1])
            .after(first_lasts), TWO;
    COMMIT_BLOCK_FAILS_ORDERED commit_block_fails_ordered:
        Case::new(failing(ordered(DUAL), Fault::CommitBlock(FIRST + 1)), &[fbarrier_twice, fsync_1])
            .after(first_lasts), TWO;
    WHOLE_BEHIND_PART_FAILS whole_behind_part_fails:
        Case::new(failing(parts(DUAL), Fault::CommitBlock(FIRST + 1)), &PART_BESIDE_WHOLE)
            .before(fill_parts_0_and_3).after(failed_are_lost), MANY;
    WHOLE_BEHIND_PART_FAILS_ORDERED whole_behind_part_fails_ordered:
        Case::new(failing(parts(ordered(DUAL)), Fault::CommitBlock(FIRST + 1)), &PART_BESIDE_WHOLE)
            .before(fill_parts_0_and_3).after(failed_are_lost), MANY;
    PART_BEHIND_PART_FAILS part_behind_part_fails:
        Case::new(failing(parts(DUAL), Fault::Body(FIRST + 1)), &PART_BESIDE_PART)
            .before(fill_parts_0_and_3).after(failed_are_lost), MANY;
    PART_BEHIND_PART_FAILS_ORDERED part_behind_part_fails_ordered:
        Case::new(failing(parts(ordered(DUAL)), Fault::CommitBlock(FIRST + 1)), &PART_BESIDE_PART)
            .before(fill_parts_0_and_3).after(failed_are_lost), MANY;
    FLUSH_FAILS flush_fails:
        Case::new(failing(DUAL, Fault::Flush(1)), &[fsync_twice, fsync_1]).after(any), TWO;
    FLUSH_FAILS_ORDERED flush_fails_ordered:
        Case::new(failing(ordered(DUAL), Fault::Flush(0)), &[fbarrier_twice, fsync_1]).after(any),
        TWO;
    REQUEST_FAILS request_fails:
        Case::new(failing(DUAL, Fault::Body(FIRST)), &[ask_0, ask_1]).after(none_lasts), TWO;

    ABORT_DUAL abort_dual: Case::new(DUAL, &[fsync_0, fsync_1, abort]).after(any), MANY;
    ABORT_DUAL_ORDERED abort_dual_ordered:
        Case::new(ordered(DUAL), &[fbarrier_twice, fsync_1, abort]).after(any), MANY;
    SHUTDOWN_WHILE_LOCKED shutdown_while_locked:
        Case::new(SERIAL, &[shutdown_under_a_handle, commit_running_or_stopped, change_0])
            .before(change_0).after(any), TWO;
    SHUTDOWN_SERIAL shutdown_serial:
        Case::new(SERIAL, &[fsync_0, fsync_1, shutdown]).after(any), MANY;
    SHUTDOWN_DUAL shutdown_dual: Case::new(DUAL, &[fsync_0, fsync_1, shutdown]).after(any), MANY;
    SHUTDOWN_REQUESTS shutdown_requests:
        Case::new(DUAL, &[ask_0, ask_1, shutdown]).after(any), MANY;
    CLOSE_DUAL close_dual: Case::new(DUAL, &[fsync_0, ask_1, close]).after(any), MANY;

    CHECKPOINTS checkpoints:
        Case::new(SERIAL, &[checkpoint_durable, checkpoint_durable]).before(fsync_three), TWO;
    CHECKPOINTS_AND_FSYNC checkpoints_and_fsync:
        Case::new(DUAL, &[checkpoint, checkpoint, fsync_0]).before(fsync_three), MANY;
    CHECKPOINT_AND_CLOSE checkpoint_and_close:
        Case::new(SERIAL, &[try_checkpoint, close_durable]).before(fsync_three), TWO;
    CHECKPOINT_FAILS checkpoint_fails:
        Case::new(failing(SERIAL, Fault::Home(1)), &[try_checkpoint, try_checkpoint])
            .before(fsync_three).after(newest_durable), TWO;

    PIECES_SERIAL pieces_serial:
        Case::new(pieces(SERIAL), &[fsync_of_before, fsync_of_before]).before(fill_three), TWO;
    PIECES_SERIAL_ORDERED pieces_serial_ordered:
        Case::new(pieces(ordered(SERIAL)), &[fsync_of_before, fsync_of_before]).before(fill_three), TWO;
    PIECES_DUAL pieces_dual:
        Case::new(pieces(DUAL), &[fsync_of_before, fsync_of_before]).before(fill_three), TWO;
    PIECES_DUAL_ORDERED pieces_dual_ordered:
        Case::new(pieces(ordered(DUAL)), &[fsync_of_before, fsync_of_before]).before(fill_three), TWO;
    PIECES_OF_PARTS pieces_of_parts:
        Case::new(parts(pieces(DUAL)), &[fsync_part_of_before, fsync_part_of_before]).before(fill_three), TWO;
    PIECES_OF_THREE pieces_of_three:
        Case::new(pieces(SERIAL), &[fsync_of_before, fsync_of_before, fsync_of_before]).before(fill_three), MANY;
    PIECES_AND_FSYNC pieces_and_fsync:
        Case::new(pieces(DUAL), &[try_fsync_of_before, try_fsync_of_before, fsync_three])
            .before(fill_three), MANY;
    PIECE_FAILS piece_fails:
        Case::new(failing(pieces(SERIAL), Fault::Body(FIRST)), &[try_fsync_of_before, try_fsync_of_before])
            .before(fill_three).after(none_lasts), TWO;
    PIECE_FAILS_ORDERED piece_fails_ordered:
        Case::new(failing(pieces(ordered(DUAL)), Fault::Body(FIRST)), &[try_fsync_of_before, try_fsync_of_before])
            .before(fill_three).after(none_lasts), TWO;
    PIECES_AND_SHUTDOWN pieces_and_shutdown:
        Case::new(pieces(SERIAL), &[try_fsync_of_before, try_fsync_of_before, shutdown])
            .before(fill_three).after(any), MANY;

    ONE_BLOCK_GOES_HOME one_block_goes_home:
        Case::new(SERIAL, &[checkpoint, fsync_and_checkpoint]).before(fsync_0)
            .after(newest_durable), TWO;
    TWO_COMMITS_GO_HOME two_commits_go_home:
        Case::new(SERIAL, &[checkpoint_durable, checkpoint_durable]).before(fsync_four), TWO;

    FETCHED_WHILE_REMOVED fetched_while_removed:
        Case::new(SERIAL, &[checkpoint, fetch_0]).before(fsync_0), TWO;

    CHANGED_AND_FREED changed_and_freed:
        Case::new(SERIAL, &[change_and_free_0, checkpoint]).before(fsync_0).after(reused), TWO;
    FREED_DUAL freed_dual:
        Case::new(DUAL, &[free_0, checkpoint]).before(fsync_0).after(reused), TWO;
    FREED_DUAL_ORDERED freed_dual_ordered:
        Case::new(ordered(DUAL), &[free_0, checkpoint]).before(fsync_0).after(reused), TWO;
}
