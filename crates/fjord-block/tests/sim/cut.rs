//! Power cuts of the modelled devices: every image keeps what was promised and the order that the
//! device keeps; and images do lose what may be lost, so that the checks have something to bite on.
//!
//! Each write fills its sectors with its own number, so that an image tells which writes it holds.
//! A failure prints the seed; `FJORD_SEED` reruns it alone.

use std::collections::HashMap;

use fjord_block::sim::{
    BarrierForm, CommandId, CutScope, Profile, SECTOR_BYTES, SeededChooser, SimCore,
};
use fjord_block::{Buf, Class, MemImage, Order, Request};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SIZE_BYTES: u64 = 128 << 10;
const SECTOR_COUNT: usize = (SIZE_BYTES / SECTOR_BYTES) as usize;

/// A write as the test knows it.
#[derive(Debug)]
struct Written {
    first_sector: usize,
    sector_count: usize,
    /// 0 for zeroes.
    number: u64,
}

#[derive(Default)]
struct History {
    writes: HashMap<CommandId, Written>,
    completed: Vec<CommandId>,
    /// Writes that a completed flush or FUA has promised.
    promised: Vec<CommandId>,
}

fn word(image: &MemImage, sector: usize) -> u64 {
    let mut bytes = [0; SECTOR_BYTES as usize];
    image.read_at(sector as u64 * SECTOR_BYTES, &mut bytes).unwrap();
    let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes.chunks(8).all(|chunk| chunk == word.to_le_bytes()), "torn inside a sector");
    word
}

/// Runs random requests, then gives the device as it stands in the middle of things.
fn run(profile: &Profile, seed: u64) -> (SimCore, History) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut core = SimCore::new(profile, SIZE_BYTES);
    core.start_trace();
    let mut history = History::default();
    let mut flushes: HashMap<CommandId, Vec<CommandId>> = HashMap::new();
    for number in 1..rng.random_range(2..80_u64) {
        let first_sector = rng.random_range(0..SECTOR_COUNT);
        let most = (SECTOR_COUNT - first_sector).min(24);
        let sector_count = rng.random_range(1..=most);
        let offset = first_sector as u64 * SECTOR_BYTES;
        match rng.random_range(0..20) {
            0 | 1 => {
                let covers = history.completed.clone();
                let id = core.submit(&Request::flush());
                flushes.insert(id, covers);
            }
            2 => {
                let len = sector_count as u64 * SECTOR_BYTES;
                let id = core.submit(&Request::WriteZeroes { offset, len });
                history.writes.insert(id, Written { first_sector, sector_count, number: 0 });
            }
            kind => {
                let words: Vec<u8> =
                    number.to_le_bytes().repeat(sector_count * SECTOR_BYTES as usize / 8);
                let order = if kind < 8 { Order::Barrier } else { Order::Ordered };
                let fua = kind == 19;
                let bufs = vec![Buf::from_slice(&words)];
                let request = Request::Write { offset, bufs, order, fua, class: Class::Sync };
                let id = core.submit(&request);
                history.writes.insert(id, Written { first_sector, sector_count, number });
                if fua {
                    flushes.insert(id, vec![id]);
                }
            }
        }
        let until_ns = core.now_ns() + rng.random_range(0..400_000);
        for completion in core.advance_to(until_ns) {
            assert_eq!(completion.result, Ok(()));
            if history.writes.contains_key(&completion.id) {
                history.completed.push(completion.id);
            }
            history.promised.extend(flushes.remove(&completion.id).unwrap_or_default());
        }
    }
    (core, history)
}

/// The writes to each sector in transfer order: (index in the order, epoch, number).
type Versions = Vec<Vec<(usize, u64, u64)>>;

fn check(image: &MemImage, versions: &Versions, history: &History, profile: &Profile) {
    let ordered = profile.barrier.is_some();
    let all = profile.power_loss_protection;
    // What is on each sector: an index into its versions, counted from 1; 0 for nothing. A number
    // that is not there was on the bus when the power went.
    let shown: Vec<Vec<usize>> = (0..SECTOR_COUNT)
        .map(|sector| {
            let word = word(image, sector);
            let hits = versions[sector].iter().enumerate().filter(|(_, v)| v.2 == word);
            let mut hits: Vec<usize> = hits.map(|(index, _)| index + 1).collect();
            if word == 0 {
                hits.push(0);
            }
            if hits.is_empty() {
                assert!(history.writes.values().any(|w| w.number == word), "invented {word}");
                hits.push(versions[sector].len() + 1);
            }
            hits
        })
        .collect();
    let latest = |sector: usize| shown[sector].iter().copied().max().unwrap_or(0);
    for id in &history.promised {
        let written = &history.writes[id];
        let sectors = versions.iter().enumerate().skip(written.first_sector);
        for (sector, list) in sectors.take(written.sector_count) {
            // Zeroes cannot be told from what was never written.
            let floor = match written.number {
                0 => 0,
                number => 1 + list.iter().position(|v| v.2 == number).expect("transferred"),
            };
            assert!(latest(sector) >= floor, "sector {sector} lost promised {written:?}");
        }
    }
    for (sector, list) in versions.iter().enumerate().filter(|_| all) {
        assert!(latest(sector) >= list.len(), "sector {sector} was durable");
    }
    // The epoch of the oldest version that a sector may be showing: nothing of earlier epochs may
    // be missing.
    let reached = (0..SECTOR_COUNT)
        .filter_map(|sector| {
            let least = shown[sector].iter().copied().min()?;
            versions[sector].get(least.checked_sub(1)?).map(|v| v.1)
        })
        .max();
    let Some(reached) = reached.filter(|_| ordered) else { return };
    for (sector, list) in versions.iter().enumerate() {
        let needed = list.iter().rposition(|v| v.1 < reached).map_or(0, |i| i + 1);
        assert!(
            latest(sector) >= needed,
            "sector {sector} shows {:?}, but epoch {reached} is there, which needs version {needed}",
            shown[sector]
        );
    }
}

fn kinds() -> Vec<Profile> {
    let small = |profile: &Profile| Profile { cache_units: 24, ..profile.clone() };
    let plain = small(&Profile::PLAIN_SSD);
    vec![
        Profile { name: "volatile", barrier: None, ..plain.clone() },
        Profile {
            name: "in-order writeback",
            barrier: Some(BarrierForm::InOrderWriteback),
            ..plain.clone()
        },
        Profile { name: "transactional", ..plain },
        small(&Profile::UFS),
        small(&Profile::SUPERCAP_SSD),
        small(&Profile::DISK),
    ]
}

#[test]
fn every_image_keeps_promises_and_order() {
    let only: Option<u64> = std::env::var("FJORD_SEED").ok().and_then(|text| text.parse().ok());
    let seeds = only.map_or(0..400, |seed| seed..seed + 1);
    for profile in kinds() {
        let (mut image_count, mut lossy_count) = (0, 0);
        for seed in seeds.clone() {
            println!("{}: FJORD_SEED={seed}", profile.name);
            let (mut core, history) = run(&profile, seed);
            let states = [CutScope::Contract, CutScope::Timed].map(|scope| core.cut_state(scope));
            let mut versions: Versions = vec![Vec::new(); SECTOR_COUNT];
            for (index, transfer) in core.take_trace().transfers.iter().enumerate() {
                let written = &history.writes[&transfer.id];
                for list in &mut versions[written.first_sector..][..written.sector_count] {
                    list.push((index, transfer.epoch, written.number));
                }
            }
            for state in states {
                let all = state.image_with_all();
                check(&all, &versions, &history, &profile);
                for choice in 0..12 {
                    let image = state.image(&mut SeededChooser::new(choice));
                    check(&image, &versions, &history, &profile);
                    image_count += 1;
                    lossy_count += u32::from(image != core.contents());
                }
            }
        }
        println!("{}: {image_count} images, {lossy_count} lost something", profile.name);
        let may_lose = !profile.power_loss_protection;
        assert!(only.is_some() || !may_lose || lossy_count > image_count / 10);
    }
}

/// One unit, one barrier between: what each form may leave, counted out.
#[test]
fn few_writes_leave_exactly_the_images_that_the_form_allows() {
    let images = |profile: &Profile| {
        let mut core = SimCore::new(
            &Profile { transfer_order: fjord_block::sim::TransferOrder::Fifo, ..profile.clone() },
            1 << 20,
        );
        for (sector, order) in [(0, Order::Ordered), (8, Order::Barrier), (16, Order::Ordered)] {
            let bufs = vec![Buf::from_slice(&[1; 512])];
            let offset = sector * SECTOR_BYTES;
            core.submit(&Request::Write { offset, bufs, order, fua: false, class: Class::Sync });
        }
        while core.advance_to_completion().len() + core.outstanding_count() > 0 {
            if core.outstanding_count() == 0 {
                break;
            }
        }
        let state = core.cut_state(CutScope::Contract);
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..500 {
            let image = state.image(&mut SeededChooser::new(seed));
            seen.insert([0, 8, 16].map(|sector| u8::from(word(&image, sector) != 0)));
        }
        seen.into_iter().collect::<Vec<_>>()
    };
    let of = |barrier| images(&Profile { barrier, ..Profile::PLAIN_SSD });
    assert_eq!(of(None).len(), 8);
    let epochs = of(Some(BarrierForm::InOrderWriteback));
    assert_eq!(epochs, [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]);
    let log = of(Some(BarrierForm::InOrderRecovery));
    assert_eq!(log, [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]);
    for unit in of(Some(BarrierForm::TransactionalWriteback)) {
        assert!(log.contains(&unit));
    }
    assert_eq!(images(&Profile::SUPERCAP_SSD), [[1, 1, 1]]);
}

#[test]
fn after_the_cut_nothing_works_and_what_was_under_way_fails() {
    let mut core = SimCore::new(&Profile::UFS, 1 << 20);
    let under_way = core.submit(&Request::write(0, vec![Buf::zeroed(4096)]));
    core.power_off();
    let later = core.submit(&Request::flush());
    let failed = core.advance_to_completion();
    assert_eq!(failed.iter().map(|c| c.id).collect::<Vec<_>>(), [under_way, later]);
    assert!(failed.iter().all(|c| c.result.as_ref().is_err_and(|e| e.errno() == libc::EIO)));
    assert_eq!((core.queue_depth(), core.outstanding_count()), (0, 0));
}

/// Counts and times stand still from the cut on.
#[test]
fn nothing_is_counted_after_the_cut() {
    let mut core = SimCore::new(&Profile::UFS, SIZE_BYTES);
    let write = || Request::write(0, vec![Buf::zeroed(4096)]);
    core.submit(&write());
    core.advance_to_completion();
    core.submit(&write());
    core.power_off();
    let before = core.stats();
    assert!(before.elapsed_ns > 0 && before.write_count == 1);
    core.submit(&write());
    core.advance_to(core.now_ns() + 1_000_000_000);
    assert_eq!(core.stats(), before);
}
