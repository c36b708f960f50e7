//! The epoch scheduler step by step: each rule in a small example.

use fjord_block::epoch::{Command, DeviceTraits, EpochQueue, Io, IoKind, RequestId, Tuning};
use fjord_block::{Class, IoError, IoErrorKind, IoOp, Order};

const PAGE: u64 = 4096;
const NATIVE: DeviceTraits = DeviceTraits {
    volatile_cache: true,
    fua: true,
    native_barrier: true,
    queue_depth: 32,
    logical_block_size: 512,
};
const PLAIN: DeviceTraits = DeviceTraits { native_barrier: false, ..NATIVE };

fn queue(traits: DeviceTraits) -> EpochQueue {
    EpochQueue::new(traits, Tuning { merge_bytes_max: 0, ..Tuning::for_depth(traits.queue_depth) })
}

fn write(page: u64, order: Order) -> Io {
    Io::write(page * PAGE, PAGE, order, Class::Sync)
}

/// Everything that leaves now.
fn drain(queue: &mut EpochQueue) -> Vec<Command> {
    std::iter::from_fn(|| queue.next_dispatch(0)).collect()
}

/// Page and order of each write, "flush" for a flush.
fn show(commands: &[Command]) -> Vec<String> {
    let show = |command: &Command| match command.kind {
        IoKind::Write { order, .. } => format!("{}{order:?}", command.offset / PAGE),
        kind => format!("{kind:?}").to_lowercase(),
    };
    commands.iter().map(show).collect()
}

fn done(queue: &mut EpochQueue) -> Vec<(RequestId, Result<(), IoError>)> {
    std::iter::from_fn(|| queue.pop_done()).collect()
}

/// Figure 6 of the paper: the barrier is reassigned, an orderless write crosses.
#[test]
fn the_barrier_moves_to_the_last_that_leaves() {
    let mut queue = queue(NATIVE);
    queue.push(write(9, Order::Ordered), 0);
    queue.push(write(20, Order::Orderless), 0);
    queue.push(write(7, Order::Ordered), 0);
    queue.push(write(3, Order::Barrier), 0);
    queue.push(write(1, Order::Ordered), 0);
    queue.push(write(8, Order::Orderless), 0);
    let left = show(&drain(&mut queue));
    assert_eq!(left, ["3Ordered", "7Ordered", "8Orderless", "9Barrier", "20Orderless", "1Ordered"]);
    assert_eq!(queue.stats().reassigned_count, 1);
}

#[test]
fn without_a_native_barrier_the_next_epoch_waits_for_transfer_and_flush() {
    let mut queue = queue(PLAIN);
    queue.push(write(1, Order::Barrier), 0);
    let second = queue.push(write(0, Order::Barrier), 0);
    let first = drain(&mut queue);
    assert_eq!(show(&first), ["1Barrier"]);
    queue.completed(first[0].id, Ok(()), 0);
    let flush = drain(&mut queue);
    assert_eq!(show(&flush), ["flush"]);
    queue.completed(flush[0].id, Ok(()), 0);
    let next = drain(&mut queue);
    assert_eq!(show(&next), ["0Barrier"]);
    assert_eq!(next[0].parts[0].request, second);
}

/// What had completed when a barrier was submitted is durable before what follows the barrier,
/// though the barrier itself needs no flush. Nothing is flushed twice.
#[test]
fn a_fua_barrier_takes_completed_writes_along() {
    let barrier = |page| Io {
        kind: IoKind::Write { order: Order::Barrier, fua: true },
        ..write(page, Order::Barrier)
    };
    let complete = |queue: &mut EpochQueue| {
        let commands = drain(queue);
        commands.iter().for_each(|command| queue.completed(command.id, Ok(()), 0));
        show(&commands)
    };
    let mut queue = queue(PLAIN);
    queue.push(write(9, Order::Orderless), 0);
    assert_eq!(complete(&mut queue), ["9Orderless"]);
    // Completes later, so that nothing is promised of it.
    queue.push(barrier(1), 0);
    queue.push(write(8, Order::Orderless), 0);
    queue.push(write(2, Order::Ordered), 0);
    assert_eq!(complete(&mut queue), ["1Barrier", "8Orderless"]);
    assert_eq!(complete(&mut queue), ["flush"]);
    assert_eq!(complete(&mut queue), ["2Ordered"]);
    // The same with a flush that comes in between anyway: as a commit does it.
    queue.push(write(3, Order::Barrier), 0);
    queue.push(barrier(4), 0);
    queue.push(write(5, Order::Barrier), 0);
    for expected in ["3Barrier", "flush", "4Barrier", "5Barrier"] {
        assert_eq!(complete(&mut queue), [expected]);
    }
    // And where nothing completed since the last flush.
    queue.push(Io::flush(Class::Sync), 0);
    assert_eq!(complete(&mut queue), ["flush"]);
    queue.push(barrier(6), 0);
    queue.push(barrier(7), 0);
    queue.push(write(8, Order::Ordered), 0);
    for expected in ["6Barrier", "7Barrier", "8Ordered"] {
        assert_eq!(complete(&mut queue), [expected]);
    }
}

#[test]
fn a_device_without_cache_needs_no_flush() {
    let mut queue = queue(DeviceTraits { volatile_cache: false, ..PLAIN });
    queue.push(write(1, Order::Barrier), 0);
    queue.push(write(0, Order::Barrier), 0);
    let flush = queue.push(Io::flush(Class::Sync), 0);
    for page in ["1Barrier", "0Barrier"] {
        let commands = drain(&mut queue);
        assert_eq!(show(&commands), [page]);
        queue.completed(commands[0].id, Ok(()), 0);
    }
    assert_eq!(done(&mut queue).last(), Some(&(flush, Ok(()))));
    assert!(queue.is_idle());
}

/// {D, JD barrier, JC barrier, flush} in one go: only the flush needs waiting for.
#[test]
fn one_flush_covers_the_epochs_before_it() {
    for (traits, flush_count) in [(NATIVE, 1), (PLAIN, 2)] {
        let mut queue = queue(traits);
        queue.push(write(1, Order::Ordered), 0);
        queue.push(write(2, Order::Barrier), 0);
        queue.push(write(3, Order::Barrier), 0);
        let flush = queue.push(Io::flush(Class::Sync), 0);
        let mut done_ids = Vec::new();
        loop {
            let commands = drain(&mut queue);
            if commands.is_empty() {
                break;
            }
            commands.iter().for_each(|command| queue.completed(command.id, Ok(()), 0));
            done_ids.extend(done(&mut queue).into_iter().map(|(id, _)| id));
        }
        assert_eq!(done_ids.last(), Some(&flush));
        assert_eq!(queue.stats().flush_count, flush_count, "{traits:?}");
    }
}

#[test]
fn flushes_share_a_command() {
    let mut queue = queue(PLAIN);
    let first = queue.push(Io::flush(Class::Sync), 0);
    let running = drain(&mut queue);
    let write = queue.push(write(1, Order::Orderless), 0);
    let transfer = drain(&mut queue);
    queue.completed(transfer[0].id, Ok(()), 0);
    let later: Vec<_> = (0..3).map(|_| queue.push(Io::flush(Class::Sync), 0)).collect();
    assert!(drain(&mut queue).is_empty());
    assert_eq!(done(&mut queue), [(write, Ok(()))]);
    queue.completed(running[0].id, Ok(()), 0);
    assert_eq!(done(&mut queue), [(first, Ok(()))]);
    let second = drain(&mut queue);
    assert_eq!(show(&second), ["flush"]);
    queue.completed(second[0].id, Ok(()), 0);
    assert_eq!(done(&mut queue), later.into_iter().map(|id| (id, Ok(()))).collect::<Vec<_>>());
    assert_eq!(queue.stats().combined_flush_count, 2);
}

#[test]
fn neighbours_merge_and_the_result_is_ordered_if_one_is() {
    let tuning = Tuning::for_depth(32);
    let mut queue = EpochQueue::new(NATIVE, tuning);
    queue.push(write(5, Order::Orderless), 0);
    queue.push(write(4, Order::Barrier), 0);
    queue.push(write(6, Order::Orderless), 0);
    let merged = drain(&mut queue);
    assert_eq!(show(&merged), ["4Barrier"]);
    assert_eq!((merged[0].len, merged[0].parts.len()), (3 * PAGE, 3));
    assert_eq!(queue.stats().merged_count, 2);
}

#[test]
fn overlapping_requests_keep_their_order() {
    let mut queue = queue(PLAIN);
    queue.push(write(1, Order::Orderless), 0);
    queue.push(Io::read(PAGE, PAGE, Class::Sync), 0);
    queue.push(Io::read(PAGE, PAGE, Class::Sync), 0);
    queue.push(write(1, Order::Orderless), 0);
    for expected in [vec!["1Orderless"], vec!["read", "read"], vec!["1Orderless"]] {
        let commands = drain(&mut queue);
        assert_eq!(show(&commands), expected);
        commands.iter().for_each(|command| queue.completed(command.id, Ok(()), 0));
    }
}

#[test]
fn unaligned_requests_exclude_others_from_their_page() {
    let mut queue = queue(PLAIN);
    queue.push(Io::write(100, 10, Order::Orderless, Class::Sync), 0);
    queue.push(Io::write(512, 512, Order::Orderless, Class::Sync), 0);
    assert_eq!(drain(&mut queue).len(), 1);
    let mut queue = self::queue(PLAIN);
    queue.push(Io::write(0, 512, Order::Orderless, Class::Sync), 0);
    queue.push(Io::write(512, 512, Order::Orderless, Class::Sync), 0);
    assert_eq!(drain(&mut queue).len(), 2);
}

#[test]
fn fua_is_passed_on_or_made_of_a_flush() {
    let fua = |order| Io {
        kind: IoKind::Write { order, fua: true },
        offset: 0,
        len: PAGE,
        class: Class::Sync,
    };
    let no_fua = DeviceTraits { fua: false, ..PLAIN };
    // On a native barrier device an ordered FUA write could overtake earlier epochs.
    for (traits, order, passed) in [
        (PLAIN, Order::Orderless, true),
        (PLAIN, Order::Barrier, true),
        (no_fua, Order::Orderless, false),
        (NATIVE, Order::Orderless, true),
        (NATIVE, Order::Barrier, false),
    ] {
        let mut queue = queue(traits);
        let id = queue.push(fua(order), 0);
        let commands = drain(&mut queue);
        assert_eq!(commands[0].kind, IoKind::Write { order, fua: passed });
        queue.completed(commands[0].id, Ok(()), 0);
        let flush = drain(&mut queue);
        assert_eq!(flush.len(), usize::from(!passed));
        flush.iter().for_each(|command| queue.completed(command.id, Ok(()), 0));
        assert_eq!(done(&mut queue), [(id, Ok(()))]);
    }
}

#[test]
fn a_failure_ends_all_order_and_says_which_request_it_was() {
    let mut queue = queue(PLAIN);
    let failed = queue.push(write(1, Order::Barrier), 0);
    let next = queue.push(write(2, Order::Barrier), 0);
    let flush = queue.push(Io::flush(Class::Sync), 0);
    let free = queue.push(write(3, Order::Orderless), 0);
    let commands = drain(&mut queue);
    assert_eq!(show(&commands), ["1Barrier", "3Orderless"]);
    let error = IoError::os(libc::EIO, IoOp::Write, PAGE, PAGE);
    queue.completed(commands[0].id, Err(error.clone()), 0);
    queue.completed(commands[1].id, Ok(()), 0);
    let later = queue.push(write(4, Order::Ordered), 0);
    let broken =
        IoErrorKind::OrderBroken { errno: libc::EIO, op: IoOp::Write, offset: PAGE, len: PAGE };
    let results: std::collections::BTreeMap<_, _> = done(&mut queue).into_iter().collect();
    assert_eq!(results[&failed], Err(error));
    for id in [next, flush, later] {
        assert_eq!(results[&id].clone().map_err(|error| error.kind), Err(broken));
    }
    assert_eq!(results[&free], Ok(()));
    assert!(drain(&mut queue).is_empty() && queue.is_idle());
    let text = results[&flush].clone().unwrap_err().to_string();
    assert!(text.contains("write of 4096 bytes at offset 4096"), "{text}");
}

#[test]
fn classes_rank_and_promotion_reaches_what_is_waited_for() {
    let mut queue = queue(DeviceTraits { queue_depth: 1, ..PLAIN });
    let io = |page, order, class| Io::write(page * PAGE, PAGE, order, class);
    queue.push(io(1, Order::Orderless, Class::Background), 0);
    queue.push(io(2, Order::Barrier, Class::Background), 0);
    let waited = queue.push(io(3, Order::Ordered, Class::Async), 0);
    queue.push(io(4, Order::Orderless, Class::Async), 0);
    queue.promote(waited, 0);
    let first = drain(&mut queue);
    assert_eq!(show(&first), ["2Barrier"]);
    queue.completed(first[0].id, Ok(()), 0);
    let flush = drain(&mut queue);
    assert_eq!(show(&flush), ["flush"]);
    queue.completed(flush[0].id, Ok(()), 0);
    assert_eq!(show(&drain(&mut queue)), ["3Ordered"]);
    // The barrier twice: when the async write came, and now.
    assert_eq!(queue.stats().promoted_count, 3);
}

/// Who comes later and waits for earlier requests on the same bytes raises them, and what these
/// wait for.
#[test]
fn submitting_raises_what_lies_on_the_same_bytes() {
    let mut queue = queue(DeviceTraits { queue_depth: 1, ..PLAIN });
    let io = |page, class| Io::write(page * PAGE, PAGE, Order::Orderless, class);
    queue.push(io(9, Class::Background), 0);
    queue.push(io(9, Class::Background), 0);
    queue.push(io(1, Class::Sync), 0);
    queue.push(io(2, Class::Async), 0);
    queue.push(io(9, Class::Sync), 0);
    let mut left = Vec::new();
    while let Some(command) = drain(&mut queue).pop() {
        left.push((command.offset / PAGE, command.class));
        queue.completed(command.id, Ok(()), 0);
    }
    let sync = |page| (page, Class::Sync);
    assert_eq!(left, [sync(1), sync(9), sync(9), sync(9), (2, Class::Async)]);
    assert_eq!(queue.stats().promoted_count, 2);
}

/// A flush waits for the ordered writes before it, of any epoch; so does who waits for the flush.
#[test]
fn promoting_a_flush_raises_the_ordered_writes_before_it() {
    let mut queue = queue(DeviceTraits { queue_depth: 1, ..PLAIN });
    let io = |page, order| Io::write(page * PAGE, PAGE, order, Class::Background);
    queue.push(io(5, Order::Ordered), 0);
    queue.push(io(6, Order::Orderless), 0);
    let flush = queue.push(Io::flush(Class::Background), 0);
    queue.push(io(7, Order::Ordered), 0);
    queue.push(Io::write(0, PAGE, Order::Orderless, Class::Async), 0);
    queue.promote(flush, 0);
    let mut left = Vec::new();
    while let Some(command) = drain(&mut queue).pop() {
        left.extend(show(std::slice::from_ref(&command)));
        queue.completed(command.id, Ok(()), 0);
    }
    assert_eq!(left[..3], ["5Ordered", "flush", "0Orderless"]);
    assert_eq!(left.len(), 5);
}

#[test]
fn background_writes_keep_to_their_share() {
    let mut queue = queue(PLAIN);
    for index in 0..100 {
        queue.push(Io::write(index * 2 * PAGE, PAGE, Order::Orderless, Class::Background), 0);
    }
    assert_eq!(drain(&mut queue).len(), 8);
    let sync = queue.push(write(500, Order::Orderless), 0);
    let commands = drain(&mut queue);
    assert_eq!(commands.len(), 1);
    assert_eq!(commands[0].parts[0].request, sync);
}

#[test]
fn a_large_background_write_leaves_in_pieces() {
    let mut queue = queue(PLAIN);
    queue.push(write(500, Order::Orderless), 0);
    let large = queue.push(Io::write(0, 80 << 10, Order::Barrier, Class::Background), 0);
    let mut lens = Vec::new();
    loop {
        let commands = drain(&mut queue);
        if commands.is_empty() {
            break;
        }
        for command in commands {
            if command.class == Class::Background && command.kind != IoKind::Flush {
                let order = IoKind::order(command.kind);
                lens.push((command.parts[0].skip, command.len, order));
            }
            queue.completed(command.id, Ok(()), 0);
        }
    }
    let k = 1 << 10;
    // Two pieces fill what may be under way before the device's times are known.
    let piece = Tuning::for_depth(32).lower_bytes_start / 2;
    let expected: Vec<_> = (0..80 * k / piece)
        .map(|number| (number * piece, piece, Order::Ordered))
        .map(|(skip, len, order)| match skip + len == 80 * k {
            true => (skip, len, Order::Barrier),
            false => (skip, len, order),
        })
        .collect();
    assert_eq!(lens, expected);
    assert_eq!(done(&mut queue).last().map(|(id, _)| *id), Some(large));
}

/// While class Sync is about, lower classes keep to what two pieces take, and one more piece may
/// overtake a command that is with the device.
#[test]
fn lower_classes_keep_to_what_the_device_does_in_time() {
    for class in [Class::Async, Class::Background] {
        let mut queue = queue(PLAIN);
        for index in 0..100 {
            queue.push(Io::write(index * 2 * PAGE, PAGE, Order::Orderless, class), 0);
        }
        let sync = queue.push(write(500, Order::Orderless), 0);
        let commands = drain(&mut queue);
        let start = Tuning::for_depth(32).lower_bytes_start;
        let ahead = commands.iter().position(|command| command.parts[0].request == sync);
        assert_eq!(ahead, Some(0), "the best class first");
        let overtaking: u64 = commands[1..].iter().map(|command| command.len).sum();
        assert_eq!(overtaking, start / 2, "{class:?}");
        queue.completed(commands[0].id, Ok(()), 1000);
        let lower: u64 = drain(&mut queue).iter().map(|command| command.len).sum();
        // Room is kept for a whole piece, whatever the length of the next.
        let under_way = overtaking + lower;
        assert!((start / 2 + PAGE..=start).contains(&under_way), "{class:?}: {under_way}");
    }
}

/// After a failure no flush makes room in the cache for them any more.
#[test]
fn background_writes_go_on_after_a_failure() {
    let mut queue = queue(PLAIN);
    let barrier = queue.push(write(1, Order::Barrier), 0);
    let command = drain(&mut queue).remove(0);
    let error = IoError::os(libc::EIO, IoOp::Write, PAGE, PAGE);
    queue.completed(command.id, Err(error.clone()), 0);
    assert_eq!(done(&mut queue), [(barrier, Err(error))]);
    let bytes = 4 * Tuning::for_depth(32).background_cache_bytes_max;
    queue.push(Io::write(0, bytes, Order::Orderless, Class::Background), 0);
    loop {
        let commands = drain(&mut queue);
        if commands.is_empty() {
            break;
        }
        commands.iter().for_each(|command| queue.completed(command.id, Ok(()), 0));
    }
    assert_eq!(done(&mut queue).len(), 1);
    assert!(queue.is_idle());
}
