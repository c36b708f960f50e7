//! Bugs of barrier calls under `ijournal`, which orders by itself over a device that keeps no order.

use fjord_block::plant::Bug;
use fjord_crash::check::Kind;

use crate::Plant;
use crate::policies::i_transactions;

/// Two files with data that has committed.
fn barriers(bug: Bug) -> Plant {
    i_transactions(bug).setup("create /a; append /a 9000; create /b; append /b 9000")
}

/// A barrier for each file.
const TWO: &str = "write /a 0 5000; fdatabarrier /a; write /b 0 5000; fdatabarrier /b";

#[test]
fn barrier_gap_accepted() {
    barriers(Bug::BarrierGapAccepted).ops(TWO).shows_as(&[Kind::OrderBroken]);
}

#[test]
fn barriers_not_marked() {
    barriers(Bug::BarriersNotMarked).ops(TWO).shows_as(&[Kind::OrderBroken]);
}

#[test]
fn last_barrier_not_named() {
    let ops = format!("{TWO}; append /a 100; fsync /a");
    barriers(Bug::LastBarrierNotNamed).ops(&ops).shows_as(&[Kind::OrderBroken]);
}

/// The numbers after the fsync are those before it.
#[test]
fn barrier_count_lost() {
    let ops = format!(
        "{TWO}; append /b 100; fsync /b; write /b 200 100; fdatabarrier /b; write /a 200 100; fdatabarrier /a; \
         append /a 10; fsync /a"
    );
    barriers(Bug::BarrierCountLost).ops(&ops).shows_as(&[Kind::OrderBroken]);
}

/// The first is on its way while three gather; the state of `/a` among them is newer than the barrier of `/b`.
#[test]
fn open_barriers_count_alone() {
    let ops = "write /b 0 100; fdatabarrier /b; write /a 0 100; fdatabarrier /a; write /b 100 100; \
               fdatabarrier /b; write /a 100 100; fdatabarrier /a; fsync /b";
    // A torn write shows it.
    let plant = barriers(Bug::OpenBarriersCountAlone).with(|config| config.budget.torn_max = 40);
    plant.ops(ops).shows_as(&[Kind::OrderBroken]);
}

#[test]
fn barriers_not_flushed() {
    let ops = "write /a 0 5000; fdatabarrier /a; append /b 3000; fsync /b";
    barriers(Bug::BarriersNotFlushed).ops(ops).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn data_overtakes_barriers() {
    let ops = "write /a 0 5000; fdatabarrier /a; write /b 0 5000; fdatasync /b";
    barriers(Bug::DataOvertakesBarriers).ops(ops).shows_as(&[Kind::OrderBroken]);
}

#[test]
fn carried_data_overtakes_barriers() {
    let ops = format!("{TWO}; sync");
    barriers(Bug::CarriedDataOvertakesBarriers).ops(&ops).shows_as(&[Kind::OrderBroken]);
}

#[test]
fn barrier_without_data() {
    barriers(Bug::BarrierWithoutData).ops(TWO).shows_as(&[Kind::OrderBroken]);
}

#[test]
fn fua_covers_barriers() {
    let ops = "write /a 0 5000; fdatabarrier /a; append /b 3000; fsync /b";
    barriers(Bug::FuaCoversBarriers).ops(ops).shows_as(&[Kind::PromiseLost]);
}

#[test]
fn fsync_trusts_barriers() {
    let ops = "append /a 3000; fbarrier /a; fsync /a";
    barriers(Bug::FsyncTrustsBarriers).ops(ops).shows_as(&[Kind::PromiseLost]);
}

/// Data was written to its place, and nothing has flushed it.
#[test]
fn held_barrier_sent_at_once() {
    let ops = "append /a 60000; writeback /a; fdatabarrier /a; write /b 0 100; fdatabarrier /b";
    let plant = Plant { races: true, ..barriers(Bug::HeldBarrierSentAtOnce) };
    plant.ops(ops).shows_as(&[Kind::PromiseLost, Kind::OrderBroken]);
}
