//! Barriers that gather while a write of others is on its way.

use std::sync::Arc;

use fjord_block::{AlignedBuf, Capabilities, Class, Device, ReadTicket, Request, Ticket};
use fjord_format::types::{InodeNo, Tid};
use fjord_journal::Journal;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::areas::{change, i_transaction_of, rig, sub_ids};
use crate::rig::{Event, Recorder, Rig, Survival, crash, on_wait};

/// The first block behind the log.
const AREAS_BLOCK: u64 = 1230;

/// A device that writes to the areas only when a thread waits for it.
#[derive(Debug)]
struct Lazy(Arc<Recorder>);

impl Lazy {
    fn submit_one(&self, request: Request) -> Ticket {
        let (_, offset, _) = request.extent();
        let is_in_areas = offset >= AREAS_BLOCK * 1024;
        if !is_in_areas || !matches!(request, Request::Write { .. }) {
            return self.0.submit(vec![request]).remove(0);
        }
        on_wait(self.0.clone(), request)
    }
}

impl Device for Lazy {
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        batch.into_iter().map(|request| self.submit_one(request)).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.0.submit_read(offset, bufs, class)
    }
}

fn open(rig: &Rig) -> Journal {
    let device = Arc::new(Lazy(rig.device.clone()));
    Journal::open(device, rig.map.clone(), rig.block_size, &rig.options).unwrap().0
}

/// A barrier of a file.
fn barrier(journal: &Journal, ino: u32, tid: Tid, value: u8) {
    let writer = journal.barrier_writer().unwrap().unwrap();
    let (_, transaction) = i_transaction_of(&writer, InodeNo(ino), tid, value);
    writer.submit_barrier(0, transaction, false).unwrap().unwrap();
}

/// A barrier that is submitted, and four that gather behind it, of two files.
fn gather(rig: &Rig) -> Journal {
    let journal = open(rig);
    let tid = change(rig, &journal, 3, 1);
    for (ino, value) in [(20, 1), (21, 2), (20, 3), (21, 4), (20, 5)] {
        barrier(&journal, ino, tid, value);
    }
    journal
}

fn area_writes(rig: &Rig) -> Vec<usize> {
    let in_areas = |event: &Event| match event {
        Event::Write(offset, data, _) if *offset > AREAS_BLOCK * 1024 => Some(data.len() / 1024),
        _ => None,
    };
    rig.device.events().iter().filter_map(in_areas).collect()
}

#[test]
fn they_go_together_and_a_file_that_comes_again_once() {
    let rig = rig();
    let journal = gather(&rig);
    assert_eq!((journal.last_barrier(), journal.durable_barrier()), (5, 0));
    assert_eq!(area_writes(&rig), [], "nobody has waited");
    assert!(journal.make_barriers_durable().unwrap());
    assert_eq!(journal.durable_barrier(), 5);
    assert_eq!(area_writes(&rig), [2, 4], "header and data of one, then of two");
    assert_eq!((journal.stats().barriers, journal.area_stats().unwrap().transactions), (5, 3));
    journal.shutdown();
    let (journal, _) = rig.open_on(&rig.device).unwrap();
    let found = journal.take_pending();
    let state = |at: usize| (found[at].sub_id, found[at].ino.0, found[at].inodes[0].bytes[0]);
    assert_eq!([state(0), state(1), state(2)], [(1, 20, 1), (2, 21, 4), (3, 20, 5)]);
    assert_eq!(found[1].data[0].content[0], 4);
}

/// The second file's state is newer than the third barrier, so it must not be found without that.
#[test]
fn they_are_found_together_or_not() {
    let seed = std::env::var("FJORD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    println!("FJORD_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let rig = rig();
    let start = rig.device.image();
    let from = rig.device.event_count();
    let journal = gather(&rig);
    journal.submit_barriers().unwrap();
    journal.make_barriers_durable().unwrap();
    let mut events = rig.device.events().split_off(from);
    assert!(matches!(events.pop(), Some(Event::Flush)));
    journal.shutdown();
    let mut seen = [0; 3];
    for _ in 0..200 {
        let image = crash(&start, &events, events.len(), Survival::Sectors, &mut rng);
        let device = Arc::new(Recorder::from_image(&image));
        let found = sub_ids(&rig.open_on(&device).unwrap().0);
        let kind = [&[][..], &[1], &[1, 2, 3]].iter().position(|ids| *ids == found);
        seen[kind.unwrap_or_else(|| panic!("{found:?}"))] += 1;
    }
    println!("none, the first, all: {seen:?}");
    assert!(seen[0] > 0 && seen[1] > 0);
}

/// An fsync names them, so they are submitted before it.
#[test]
fn an_fsync_submits_them() {
    let rig = rig();
    let journal = gather(&rig);
    let tid = change(&rig, &journal, 3, 2);
    let writer = journal.area_writer().unwrap().unwrap();
    let (_, transaction) = i_transaction_of(&writer, InodeNo(22), tid, 6);
    let submitted = writer.submit(0, transaction, true).unwrap();
    let fjord_journal::Submitted::Written(write) = submitted else { panic!("full") };
    assert!(write.is_behind_barriers);
    writer.wait(write).unwrap();
    drop(writer);
    barrier(&journal, 20, tid, 7);
    journal.make_barriers_durable().unwrap();
    journal.shutdown();
    // Those of 4 and 5 were taken in.
    assert_eq!(sub_ids(&rig.open_on(&rig.device).unwrap().0), [1, 2, 3, 6, 7]);
}

/// What has committed needs no write, and its place is free.
#[test]
fn a_commit_makes_them_unnecessary() {
    let rig = rig();
    let journal = gather(&rig);
    let tid = change(&rig, &journal, 3, 2);
    journal.commit(tid).unwrap();
    journal.make_barriers_durable().unwrap();
    assert_eq!(area_writes(&rig), [2]);
    assert_eq!(journal.durable_barrier(), 5);
    journal.close().unwrap();
    assert_eq!(sub_ids(&rig.open()), []);
}

/// More than an area has for them, until a commit: the call says so, and nothing is lost.
#[test]
fn a_full_area_submits_them() {
    let rig = rig();
    let journal = open(&rig);
    let tid = change(&rig, &journal, 3, 1);
    let one = |value: u8| {
        let writer = journal.barrier_writer().unwrap().unwrap();
        let ino = InodeNo(20 + u32::from(value));
        let (_, transaction) = i_transaction_of(&writer, ino, tid, value);
        writer.submit_barrier(0, transaction, false).unwrap()
    };
    let count = (0..).map_while(one).count() as u64;
    assert_eq!(count, 16, "two blocks each, of 32");
    journal.make_barriers_durable().unwrap();
    assert_eq!((journal.last_barrier(), journal.durable_barrier()), (count, count));
    assert_eq!(area_writes(&rig).iter().sum::<usize>(), 32);
}
