//! Each planted race is found, and the same case without it passes (it is one of [`crate::cases`]).

use std::cell::RefCell;
use std::panic::catch_unwind;
use std::sync::Once;

use fjord_block::plant::{Bug, Planting};

use crate::cases;
use crate::explore::{Case, Search};

use Search::{Preemptions, Priorities, Random};

const DEADLOCK: &str = "deadlock!";
const NOT_DURABLE: &str = "but a power cut leaves";
const NO_ANSWER: &str = "requests without an answer";
const CALLBACK_LATE: &str = "comes after its caller";
const TWO_WRITES: &str = "two writes of a block in flight";
const NOT_FOUND: &str = "a buffer with changes is not in the table";
const TOO_MANY: &str = "commits that no flush covers";
/// The interleaving decides which of them comes first.
const STAGES: &str = "stages increase|callbacks are out of order";
const ENDLESS: &str = "exceeded max_steps";

thread_local! {
    /// The first panic of this thread.
    static FIRST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Searches on a thread of its own, since a panic in a model is never unwound; the first message.
fn failure(case: Case, search: Search) -> Option<String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let other = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let first = FIRST_PANIC.take().unwrap_or_else(|| panic.to_string());
            FIRST_PANIC.set(Some(first));
            other(panic);
        }));
    });
    let searching = std::thread::spawn(move || {
        let failed = catch_unwind(|| case.search(search)).is_err();
        failed.then(|| FIRST_PANIC.take().unwrap_or_default())
    });
    searching.join().expect("a panic is caught")
}

/// Whether the panic is one of the symptoms, which `|` separates.
fn has_symptom(text: &str, symptoms: &str) -> bool {
    symptoms.split('|').any(|symptom| text.contains(symptom))
}

/// The search finds the race, by this symptom; threads that run until they wait do not show it.
fn finds(bug: Bug, case: Case, search: Search, symptom: &str) {
    let _planting = Planting::new(Some(bug));
    let alone = failure(case, Preemptions(0));
    assert_eq!(alone, None, "{bug:?} shows without a race");
    let found = failure(case, search);
    let text = found.unwrap_or_else(|| panic!("{bug:?} was not found by {search:?}"));
    println!("| `{bug:?}` | {search:?} | {symptom} |");
    assert!(has_symptom(&text, symptom), "{bug:?} shows as {text:?}");
}

/// Bugs that the crash explorer finds show too, by checks that no race needs.
fn shows(bug: Bug, case: Case, symptom: &str) {
    let _planting = Planting::new(Some(bug));
    let text = failure(case, Preemptions(1));
    let text = text.unwrap_or_else(|| panic!("{bug:?} was not found"));
    assert!(has_symptom(&text, symptom), "{bug:?} shows as {text:?}");
}

#[test]
fn every_check_can_fail() {
    shows(Bug::LaterToldFirst, cases::FBARRIER_DUAL, "callbacks are out of order");
    shows(Bug::LaterNotTold, cases::COMMIT_BLOCK_FAILS_ORDERED, "a callback is told");
    shows(Bug::DataAfterCommit, cases::DATA_DUAL, "before its data");
    shows(Bug::ToldBeforeFlush, cases::FREED_DUAL, "a callback is told");
    shows(Bug::RoundJoinedLate, cases::FSYNCS_DUAL_ORDERED, NOT_DURABLE);
    shows(Bug::LogStartNotOrdered, cases::FSYNCS_DUAL, NOT_DURABLE);
    shows(Bug::LogStartNotOrdered, cases::FSYNCS_DUAL_ORDERED, NOT_DURABLE);
}

#[test]
fn every_rule_is_checked() {
    shows(Bug::RemovedBufferWritten, cases::CHANGED_AND_FREED, "a freed block is logged");
    shows(Bug::HomeBeforeLastBatch, cases::CHECKPOINTS, NOT_DURABLE);
}

/// A test for each race.
macro_rules! races {
    ($($name:ident: $bug:expr, $case:expr, $search:expr, $symptom:expr;)*) => {
        $(#[test]
        fn $name() {
            finds($bug, $case, $search, $symptom);
        })*
    };
}

races! {
    settle_lock_wakes_nobody:
        Bug::SettleLockWakesNobody, cases::FSYNCS_DUAL, Preemptions(2), DEADLOCK;
    sleeps_without_looking:
        Bug::SleepsWithoutLooking, cases::SETTLE_IN_FLIGHT, Preemptions(2), DEADLOCK;
    commit_lock_released_early:
        Bug::CommitLockReleasedEarly, cases::FBARRIER_DUAL, Preemptions(2), ENDLESS;
    follower_not_woken: Bug::FollowerNotWoken, cases::PARTS_DUAL, Preemptions(2), DEADLOCK;
    dispatched_unflushed: Bug::DispatchedUnflushed, cases::CHAINS_DUAL, Preemptions(2), TOO_MANY;
    offer_lost: Bug::OfferLost, cases::THREE_DUAL, Priorities(4, 20_000), DEADLOCK;
    last_write_overtaken:
        Bug::LastWriteOvertaken, cases::THREE_DUAL, Priorities(4, 20_000), STAGES;
    fua_covers_later:
        Bug::FuaCoversLater, cases::THREE_DUAL_ORDERED, Priorities(4, 20_000), NOT_DURABLE;
    committed_before_callbacks:
        Bug::CommittedBeforeCallbacks, cases::FSYNCS_DUAL, Preemptions(2), CALLBACK_LATE;
    parts_leave_early: Bug::PartsLeaveEarly, cases::ONE_CHANGE, Random(20_000), NOT_DURABLE;
    end_wakes_nobody:
        Bug::EndWakesNobody, cases::THREE_DUAL_ORDERED, Priorities(4, 20_000), DEADLOCK;
    last_handle_wakes_nobody:
        Bug::LastHandleWakesNobody, cases::FSYNCS_SERIAL, Preemptions(2), DEADLOCK;
    handle_during_freeze:
        Bug::HandleDuringFreeze, cases::FSYNCS_SERIAL, Preemptions(2), NOT_DURABLE;
    queue_not_looked_at:
        Bug::QueueNotLookedAt, cases::REQUESTS_SERIAL, Preemptions(2), NO_ANSWER;
    insert_lost: Bug::InsertLost, cases::FSYNCS_SERIAL, Preemptions(2), NOT_DURABLE;
    gathered_early: Bug::GatheredEarly, cases::FSYNCS_SERIAL, Preemptions(2), NOT_DURABLE;
    piece_claimed_twice:
        Bug::PieceClaimedTwice, cases::PIECES_SERIAL, Preemptions(2), NOT_DURABLE;
    commit_before_last_piece:
        Bug::CommitBeforeLastPiece, cases::PIECES_SERIAL_ORDERED, Preemptions(2), NOT_DURABLE;
    piece_end_wakes_nobody:
        Bug::PieceEndWakesNobody, cases::PIECES_SERIAL, Preemptions(2), DEADLOCK;
    batch_of_others_uncounted:
        Bug::BatchOfOthersUncounted, cases::CHECKPOINTS, Preemptions(2), NOT_DURABLE;
    two_home_writes:
        Bug::TwoHomeWrites, cases::ONE_BLOCK_GOES_HOME, Preemptions(2), TWO_WRITES;
    batch_end_wakes_nobody:
        Bug::BatchEndWakesNobody, cases::CHECKPOINTS, Preemptions(2), DEADLOCK;
    buffer_lost_while_fetched:
        Bug::BufferLostWhileFetched, cases::FETCHED_WHILE_REMOVED, Preemptions(2), NOT_FOUND;
    stop_unheard: Bug::StopUnheard, cases::SHUTDOWN_WHILE_LOCKED, Preemptions(2), DEADLOCK;
}

#[test]
fn every_bug_has_a_test() {
    let tests = include_str!("races.rs");
    for bug in Bug::RACES.iter().chain(Bug::RULES) {
        assert!(tests.contains(&format!("Bug::{bug:?}, cases::")), "{bug:?} has no test");
    }
}
