//! How long a thread of class Sync waits beside a writer that saturates the device: at most three
//! times as long as alone, on every profile with a queue. In virtual time, so that it can be
//! asserted; and shown to fail where the scheduler does nothing about it.

use fjord_block::Class;
use fjord_block::epoch::Tuning;
use fjord_block::sim::{Contention, Medium, Probe, Profile, Waits, Writer};

const FACTOR_MAX: u64 = 3;
const CLASSES: [Class; 2] = [Class::Background, Class::Async];

/// The profiles with a queue in a long run (`FJORD_TEST_SIZE`), else the two that differ most:
/// fjord-bench's `figures` has a row for each anyway.
fn queued() -> impl Iterator<Item = &'static Profile> {
    let is_long = std::env::var("FJORD_TEST_SIZE").is_ok_and(|size| size == "long");
    let is_wanted = move |profile: &&Profile| is_long || ["ufs", "nvme"].contains(&profile.name);
    Profile::ALL.into_iter().filter(|profile| profile.queue_depth > 1).filter(is_wanted)
}

fn tuning(profile: &Profile) -> Tuning {
    Tuning::for_depth(profile.queue_depth)
}

/// Runs it alone and beside the writer: gives what that was like, whether it was too slow, and a
/// text for failures.
fn compare(profile: &Profile, tuning: &Tuning, both: &Contention) -> (Waits, bool, String) {
    let alone = Contention { writer: None, ..both.clone() }.run(profile, tuning).unwrap();
    let beside = both.run(profile, tuning).unwrap();
    let is_slow = beside.median_ns > FACTOR_MAX * alone.median_ns
        || beside.p99_ns > FACTOR_MAX * alone.p99_ns;
    let text = format!("{}, {both:?}: alone {alone:?}, beside it {beside:?}", profile.name);
    println!("{text}");
    (beside, is_slow, text)
}

fn check(probe: Probe, writers: &[Writer]) {
    for profile in queued() {
        for writer in writers {
            for pause_ns in [0, 1_000_000] {
                let writer = Some(*writer);
                let both = Contention { probe, writer, pause_ns, round_count: 100, silence_ns: 0 };
                holds(profile, &both);
            }
        }
    }
}

fn holds(profile: &Profile, both: &Contention) {
    let (beside, is_slow, text) = compare(profile, &tuning(profile), both);
    assert!(!is_slow, "{text}");
    assert!(beside.writer_bytes_per_s > 1e6, "the writer starves: {text}");
}

fn writers() -> Vec<Writer> {
    let of = |class| [Writer::random(class), Writer::sequential(class)];
    CLASSES.into_iter().flat_map(of).collect()
}

#[test]
fn a_write_and_flush_waits_three_times_as_long_at_most() {
    check(Probe::WriteFlush, &writers());
}

#[test]
fn a_commit_in_order_waits_three_times_as_long_at_most() {
    check(Probe::Commit, &writers());
}

#[test]
fn an_fsync_that_finds_its_write_queued_waits_three_times_as_long_at_most() {
    for class in CLASSES {
        check(Probe::Fsync { queued: class, promotes: true }, &[Writer::heap(class)]);
    }
}

/// Each round finds the device as the writer has filled it while nobody waited for anything.
#[test]
fn the_first_after_a_silence_waits_three_times_as_long_at_most() {
    let writers = [Writer::random(Class::Background), Writer::sequential(Class::Async)];
    for profile in queued() {
        for (probe, writer) in [Probe::WriteFlush, Probe::Commit].into_iter().zip(writers) {
            let (writer, silence_ns) = (Some(writer), 10_000_000);
            let both =
                Contention { probe, writer, pause_ns: 1_000_000, round_count: 100, silence_ns };
            holds(profile, &both);
        }
    }
}

/// The slower of two, on the two devices that do not write gigabytes in such a time.
#[test]
fn after_ten_seconds_it_is_the_same() {
    for profile in [&Profile::UFS, &Profile::SUPERCAP_SSD] {
        let (writer, silence_ns) = (Some(Writer::heap(Class::Async)), 10_000_000_000);
        let probe = Probe::WriteFlush;
        let both = Contention { probe, writer, pause_ns: 1_000_000, round_count: 2, silence_ns };
        holds(profile, &both);
    }
}

#[test]
fn a_read_waits_three_times_as_long_at_most() {
    let (random, sequential) = (Writer::random, Writer::sequential);
    check(Probe::Read, &[random(Class::Background), sequential(Class::Async)]);
}

#[test]
fn the_first_read_after_a_silence_waits_three_times_as_long_at_most() {
    for profile in queued() {
        let (probe, writer) = (Probe::Read, Some(Writer::heap(Class::Async)));
        let (pause_ns, silence_ns) = (1_000_000, 30_000_000);
        holds(profile, &Contention { probe, writer, pause_ns, round_count: 100, silence_ns });
    }
}

/// The two whose program operations are many times as long as a read.
const LONG_PROGRAMS: [&Profile; 2] = [&Profile::PLAIN_SSD, &Profile::SUPERCAP_SSD];

/// How long a chip of these that sets no program operation aside keeps a read waiting at most.
fn program_ns(profile: &Profile) -> u64 {
    let Medium::Flash { program_ns, units_per_program, channel_bytes_per_s, .. } = profile.medium
    else {
        panic!("{} has no chips", profile.name);
    };
    program_ns + u64::from(units_per_program) * 4096 * 1_000_000_000 / channel_bytes_per_s
}

#[test]
fn where_programs_are_not_set_aside_a_read_waits_for_one_at_most() {
    for profile in LONG_PROGRAMS.map(Profile::without_suspension) {
        for (writer, silence_ns) in
            [(Writer::random(Class::Background), 0), (Writer::heap(Class::Async), 30_000_000)]
        {
            let (probe, writer) = (Probe::Read, Some(writer));
            let both =
                Contention { probe, writer, pause_ns: 1_000_000, round_count: 100, silence_ns };
            let alone = Contention { writer: None, ..both.clone() };
            let alone_ns = alone.run(&profile, &tuning(&profile)).unwrap().p99_ns;
            let (beside, _, text) = compare(&profile, &tuning(&profile), &both);
            assert!(beside.p99_ns <= FACTOR_MAX * alone_ns + program_ns(&profile), "{text}");
        }
    }
}

/// Why it is then the device that makes reads wait, and no bound on the writer that helps: one that
/// writes 4 MB/s already takes a chip away from more than a hundredth of them.
#[test]
fn where_programs_are_not_set_aside_next_to_nothing_slows_reads() {
    for profile in LONG_PROGRAMS.map(Profile::without_suspension) {
        let (probe, writer) = (Probe::Read, Some(Writer::trickle(Class::Background)));
        let both =
            Contention { probe, writer, pause_ns: 1_000_000, round_count: 400, silence_ns: 0 };
        let (beside, is_slow, text) = compare(&profile, &tuning(&profile), &both);
        assert!(is_slow && beside.writer_bytes_per_s < 5e6, "{text}");
    }
}

/// Some rounds of what should be too slow.
fn breaks(profile: &Profile, tuning: &Tuning, probe: Probe, writer: Writer) {
    let writer = Some(writer);
    let both = Contention { probe, writer, pause_ns: 1_000_000, round_count: 20, silence_ns: 0 };
    let (_, is_slow, text) = compare(profile, tuning, &both);
    assert!(is_slow, "{text}");
}

/// The writer is one that would hold them up: without bounds it does, on every profile.
#[test]
fn without_bounds_they_wait_longer() {
    for profile in queued() {
        // Nothing is too long, and much is let through from the start.
        let tuning = Tuning {
            slowdown_percent: 1_000_000,
            lower_bytes_start: 1 << 40,
            lower_cache_bytes_start: 1 << 40,
            ..tuning(profile)
        };
        for probe in [Probe::WriteFlush, Probe::Commit] {
            breaks(profile, &tuning, probe, Writer::sequential(Class::Async));
        }
    }
}

#[test]
fn without_promotion_an_fsync_waits_longer() {
    for profile in queued() {
        for class in CLASSES {
            let probe = Probe::Fsync { queued: class, promotes: false };
            breaks(profile, &tuning(profile), probe, Writer::heap(class));
        }
    }
}

#[test]
fn the_same_run_gives_the_same_figures() {
    let run = || {
        let writer = Some(Writer::random(Class::Background));
        let both = Contention {
            probe: Probe::Commit,
            writer,
            pause_ns: 1000,
            round_count: 20,
            silence_ns: 0,
        };
        both.run(&Profile::UFS, &tuning(&Profile::UFS)).unwrap()
    };
    assert_eq!(run(), run());
}
