//! The modelled devices in virtual time: how fast they are in which way of ordering, and that the
//! same run gives the same figures. Nothing here depends on the machine's speed.

use std::collections::VecDeque;

use fjord_block::sim::{BarrierForm, Medium, Profile, SimCore, SimStats, UNIT_BYTES};
use fjord_block::{Buf, Class, Order, Request};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const AREA_BYTES: u64 = 64 << 20;

/// How the host keeps its writes in order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Orderless,
    /// Each write is a barrier; the next is dispatched at once.
    Barrier,
    /// The next write waits for the transfer.
    Transfer,
    /// The next write waits for the transfer and a flush.
    TransferAndFlush,
}

/// Random writes of 4 KiB: the first quarter fills the cache and does not count. Writes per second.
fn run(profile: &Profile, way: Way, count: u32) -> (f64, SimStats) {
    let mut core = SimCore::new(profile, 1 << 30);
    let mut rng = StdRng::seed_from_u64(7);
    let buf = Buf::zeroed(UNIT_BYTES as usize);
    let mut write = |core: &mut SimCore| {
        let offset = rng.random_range(0..AREA_BYTES / UNIT_BYTES) * UNIT_BYTES;
        let order = if way == Way::Barrier { Order::Barrier } else { Order::Orderless };
        let bufs = vec![buf.clone()];
        core.submit(&Request::Write { offset, bufs, order, fua: false, class: Class::Sync })
    };
    let warm = count / 4;
    let mut start_ns = 0;
    let mut done = 0;
    let mut outstanding = VecDeque::new();
    while done < count {
        let depth = match way {
            Way::Orderless | Way::Barrier => 2 * profile.queue_depth as usize,
            Way::Transfer | Way::TransferAndFlush => 1,
        };
        while outstanding.len() < depth {
            outstanding.push_back(write(&mut core));
        }
        for completion in core.advance_to_completion() {
            assert_eq!(completion.result, Ok(()));
            outstanding.retain(|id| *id != completion.id);
            done += 1;
            if way == Way::TransferAndFlush {
                let flush = core.submit(&Request::flush());
                let flushed = core.advance_to_completion();
                assert_eq!(flushed.first().map(|c| c.id), Some(flush));
            }
            if done == warm {
                start_ns = core.now_ns();
                core.reset_stats();
            }
        }
    }
    let rate = f64::from(done - warm) * 1e9 / (core.now_ns() - start_ns) as f64;
    (rate, core.stats())
}

fn share(profile: &Profile, way: Way) -> f64 {
    let count = if way == Way::TransferAndFlush { 2_000 } else { 30_000 };
    run(profile, way, count).0 / run(profile, Way::Orderless, 30_000).0
}

/// Figure 9 of *Barrier-Enabled IO Stack for Flash Storage*: 4 KiB random writes as a share of
/// orderless ones.
#[test]
fn the_shares_are_those_of_the_paper() {
    for (profile, flush, barrier) in [
        (&Profile::UFS, 0.10, 0.80),
        (&Profile::PLAIN_SSD, 0.005, 0.90),
        (&Profile::SUPERCAP_SSD, 0.35, 0.90),
    ] {
        let name = profile.name;
        let orderless = run(profile, Way::Orderless, 30_000).0;
        let shares =
            [Way::TransferAndFlush, Way::Transfer, Way::Barrier].map(|way| share(profile, way));
        println!("{name}: {orderless:.0} writes/s, shares {shares:.4?}");
        let [flush_share, transfer_share, barrier_share] = shares;
        assert!((flush_share / flush - 1.0).abs() < 0.1, "{name}: flush {flush_share}");
        assert!((0.30..0.40).contains(&transfer_share), "{name}: transfer {transfer_share}");
        assert!((barrier_share - barrier).abs() < 0.04, "{name}: barrier {barrier_share}");
    }
}

#[test]
fn the_modern_drive_loses_nothing_by_barriers_and_all_by_flushes() {
    let profile = &Profile::NVME;
    assert!(share(profile, Way::Barrier) > 0.85);
    assert!(share(profile, Way::Transfer) < 0.25);
    assert!(share(profile, Way::TransferAndFlush) < 0.01);
}

#[test]
fn the_disk_gains_by_its_cache_only() {
    let (orderless, _) = run(&Profile::DISK, Way::Orderless, 2_000);
    let (flushed, _) = run(&Profile::DISK, Way::TransferAndFlush, 500);
    assert!((100.0..1000.0).contains(&orderless), "{orderless}");
    assert!((50.0..150.0).contains(&flushed), "{flushed}");
}

/// Figure 10: one command with wait-on-transfer, a full queue with barriers.
#[test]
fn barriers_fill_the_queue_and_waiting_does_not() {
    for profile in [&Profile::UFS, &Profile::PLAIN_SSD, &Profile::SUPERCAP_SSD, &Profile::NVME] {
        let waiting = run(profile, Way::Transfer, 5_000).1;
        assert_eq!(waiting.queue_depth_max(), 1, "{}", profile.name);
        let barrier = run(profile, Way::Barrier, 5_000).1;
        assert_eq!(barrier.queue_depth_max(), profile.queue_depth as usize);
        assert!(barrier.queue_depth_mean() > 0.9 * f64::from(profile.queue_depth));
        assert_eq!(barrier.queue_depth_ns.iter().sum::<u64>(), barrier.elapsed_ns);
    }
}

#[test]
fn sustained_writes_run_at_the_rate_of_the_chips() {
    let (rate, stats) = run(&Profile::PLAIN_SSD, Way::Orderless, 30_000);
    // 32 chips, 16 KiB each in 1450 µs and 41 µs on the channel.
    let chips = 32.0 * 4.0 / 1_491e-6;
    assert!((rate / chips - 1.0).abs() < 0.03, "{rate} against {chips}");
    assert!(stats.cache_stall_ns > stats.elapsed_ns / 10, "{stats:?}");
}

/// The price of each form of the barrier command, every write being one.
#[test]
fn in_order_writeback_gives_up_parallelism() {
    let with = |form| Profile { barrier: Some(form), ..Profile::PLAIN_SSD };
    let rate = |form| run(&with(form), Way::Barrier, 3_000).0;
    let in_order = rate(BarrierForm::InOrderWriteback);
    // One program operation after the other.
    assert!((in_order / (1e9 / 1_460_000.0) - 1.0).abs() < 0.05, "{in_order}");
    assert!(rate(BarrierForm::TransactionalWriteback) > 50.0 * in_order);
    assert!(rate(BarrierForm::InOrderRecovery) > 50.0 * in_order);
}

#[test]
fn reads_go_before_queued_programs_and_come_from_the_cache_where_they_can() {
    let mut core = SimCore::new(&Profile::PLAIN_SSD, 1 << 30);
    let read_ns = |core: &mut SimCore, offset| {
        let start = core.now_ns();
        let id = core.submit_read(offset, 4096);
        loop {
            if let Some(done) = core.advance_to_completion().iter().find(|c| c.id == id) {
                return done.at_ns - start;
            }
        }
    };
    let never_written = read_ns(&mut core, 1 << 20);
    core.submit(&Request::write(0, vec![Buf::from_slice(&[1; 4096])]));
    core.advance_to_completion();
    let cached = read_ns(&mut core, 0);
    assert_eq!(cached, never_written);
    core.submit(&Request::flush());
    core.advance_to_completion();
    let from_flash = read_ns(&mut core, 0);
    assert_eq!(from_flash, cached + 60_000 + 4096 * 10 / 4);
}

/// A chip that can sets a program aside for a read, and goes on with it afterwards; but for so many
/// reads only.
#[test]
fn a_program_is_set_aside_for_a_few_reads() {
    const SUSPEND_NS: u64 = 10_000;
    const PROGRAM_NS: u64 = 660_000;
    // One chip, so that every read meets it.
    let medium = Medium::Flash {
        channel_count: 1,
        ways_per_channel: 1,
        units_per_program: 1,
        channel_bytes_per_s: u64::MAX,
        program_ns: PROGRAM_NS,
        read_ns: 45_000,
        suspend_ns: Some(SUSPEND_NS),
    };
    let profile = Profile { medium, ..Profile::NVME.clone() };
    let run = |read_count: u64| {
        let mut core = SimCore::new(&profile, 1 << 30);
        // One page that is on the medium, to be read; another that is being programmed.
        core.submit(&Request::write(1 << 20, vec![Buf::from_slice(&[1; 4096])]));
        core.advance_to_completion();
        core.submit(&Request::flush());
        core.advance_to_completion();
        core.submit(&Request::write(0, vec![Buf::from_slice(&[1; 4096])]));
        core.advance_to_completion();
        let flush = core.submit(&Request::flush());
        let start_ns = core.now_ns();
        let mut reads_ns = Vec::new();
        let mut flushed_ns = None;
        let mut next = core.submit_read(1 << 20, 4096);
        let mut asked_ns = start_ns;
        while flushed_ns.is_none() || (reads_ns.len() as u64) < read_count {
            for done in core.advance_to_completion() {
                if done.id == flush {
                    flushed_ns = Some(done.at_ns - start_ns);
                } else if done.id == next {
                    reads_ns.push(done.at_ns - asked_ns);
                    asked_ns = done.at_ns;
                    if (reads_ns.len() as u64) < read_count {
                        next = core.submit_read(1 << 20, 4096);
                    }
                }
            }
        }
        (reads_ns, flushed_ns.unwrap())
    };
    let (one, flushed_one_ns) = run(1);
    let (many, flushed_ns) = run(6);
    assert!(one[0] < 45_000 + SUSPEND_NS + 20_000, "{one:?}");
    assert!(many[..4].iter().all(|ns| *ns < 45_000 + SUSPEND_NS + 20_000), "{many:?}");
    assert!(many[4] > PROGRAM_NS / 4, "the fifth waits for the program: {many:?}");
    // Each read puts the end off by what it took, no more and no less.
    assert_eq!(flushed_ns - flushed_one_ns, 3 * (45_000 + SUSPEND_NS));
}

/// Order::Barrier is SCSI's ordered priority: after all earlier, before all later commands. Others
/// are transferred in any order.
#[test]
fn barriers_keep_their_place_in_the_transfer_order() {
    for profile in Profile::ALL {
        let mut core = SimCore::new(profile, 1 << 20);
        let mut rng = StdRng::seed_from_u64(11);
        core.start_trace();
        let mut barriers = Vec::new();
        for _ in 0..2_000 {
            let order = [Order::Orderless, Order::Ordered, Order::Barrier][rng.random_range(0..3)];
            let len = rng.random_range(1..5) * 4096;
            let offset = rng.random_range(0..200) * UNIT_BYTES;
            let bufs = vec![Buf::zeroed(len)];
            let request = Request::Write { offset, bufs, order, fua: false, class: Class::Sync };
            let id = core.submit(&request);
            if order == Order::Barrier {
                barriers.push(id);
            }
            if rng.random_range(0..8) == 0 {
                core.advance_to(core.now_ns() + rng.random_range(0..500_000));
            }
        }
        while core.outstanding_count() > 0 {
            core.advance_to_completion();
        }
        let order: Vec<_> = core.take_trace().transfers.iter().map(|t| t.id).collect();
        assert_eq!(order.len(), 2_000);
        assert_eq!(order.is_sorted(), profile.barrier.is_none(), "{}", profile.name);
        for barrier in barriers.iter().filter(|_| profile.barrier.is_some()) {
            let place = order.iter().position(|id| id == barrier).unwrap();
            assert!(order[..place].iter().all(|id| id < barrier), "{}", profile.name);
            assert!(order[place..].iter().all(|id| id >= barrier), "{}", profile.name);
        }
    }
}

#[test]
fn the_same_run_gives_the_same_figures() {
    for profile in Profile::ALL {
        let first = run(profile, Way::Orderless, 1_000);
        assert_eq!(first, run(profile, Way::Orderless, 1_000), "{}", profile.name);
    }
}
