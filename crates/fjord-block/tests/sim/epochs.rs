//! The scheduler over the modelled devices, in real time and under threads: whatever a power cut
//! leaves at any moment, no block of an epoch is there unless all of the epochs before are.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering as Atomic};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use fjord_block::epoch::EpochDevice;
use fjord_block::sim::{BarrierForm, CutScope, Profile, SeededChooser, SimDevice};
use fjord_block::{Buf, Class, Device, MemImage, Order, Request, Ticket};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const PAGE: u64 = 4096;
const THREADS: u64 = 4;

/// All profiles, and the other forms of the barrier on some.
fn profiles() -> Vec<Profile> {
    let mut profiles: Vec<Profile> = Profile::ALL.into_iter().cloned().collect();
    let forms = [None, Some(BarrierForm::InOrderWriteback)];
    profiles.extend(forms.map(|barrier| Profile { barrier, ..Profile::UFS }));
    profiles.extend(forms.map(|barrier| Profile { barrier, ..Profile::PLAIN_SSD }));
    profiles
}

/// A write of one page, whose number is its content.
fn write(page: u64, order: Order, class: Class) -> Request {
    let bufs = vec![Buf::from_slice(&(page + 1).to_le_bytes().repeat(PAGE as usize / 8))];
    Request::Write { offset: page * PAGE, bufs, order, fua: false, class }
}

/// What the threads submitted: each page once.
#[derive(Default)]
struct Submitted {
    /// Which epoch the next ordered write joins; held over each submission, so that it is known.
    open: u64,
    /// Of ordered writes, by page.
    epochs: BTreeMap<u64, u64>,
}

/// Threads write ordered, orderless and barrier writes at random while the power is "cut" again and
/// again: gives the images that this may have left.
fn storm(
    device: &dyn Device,
    sim: &SimDevice,
    seed: u64,
    rounds: u64,
) -> (Submitted, Vec<MemImage>) {
    let submitted = Mutex::new(Submitted::default());
    let next_page = AtomicU64::new(0);
    let is_over = AtomicBool::new(false);
    let mut images = Vec::new();
    thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|number| {
                let (submitted, next_page) = (&submitted, &next_page);
                scope.spawn(move || {
                    let mut rng = StdRng::seed_from_u64(seed ^ number << 32);
                    for _ in 0..rounds {
                        let mut batch = Vec::new();
                        let mut joined = Vec::new();
                        let mut state = submitted.lock().unwrap();
                        for _ in 0..rng.random_range(1..6) {
                            let page = next_page.fetch_add(1, Atomic::Relaxed);
                            let order = [Order::Orderless, Order::Ordered, Order::Barrier]
                                [rng.random_range(0..3)];
                            let class = [Class::Sync, Class::Async, Class::Background]
                                [rng.random_range(0..3)];
                            batch.push(write(page, order, class));
                            if order != Order::Orderless {
                                joined.push((page, state.open));
                            }
                            state.open += u64::from(order == Order::Barrier);
                        }
                        let flush = rng.random_bool(0.2);
                        batch.extend(flush.then(Request::flush));
                        state.epochs.extend(joined);
                        let tickets = device.submit(batch);
                        drop(state);
                        if flush || rng.random_bool(0.3) {
                            assert_eq!(Ticket::wait_all(&tickets), Ok(()));
                        }
                    }
                    device.submit(vec![Request::flush()])[0].wait().unwrap();
                })
            })
            .collect();
        let cutter = scope.spawn(|| {
            let mut images = Vec::new();
            let mut seed = seed;
            while !is_over.load(Atomic::Relaxed) {
                for scope in [CutScope::Contract, CutScope::Timed] {
                    let cut = sim.cut_state(scope);
                    for _ in 0..4 {
                        seed = seed.wrapping_add(1);
                        images.push(cut.image(&mut SeededChooser::new(seed)));
                    }
                }
                thread::sleep(Duration::from_millis(1));
            }
            images
        });
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        is_over.store(true, Atomic::Relaxed);
        images = cutter.join().unwrap();
        ended.into_iter().for_each(|end| end.unwrap());
    });
    (submitted.into_inner().unwrap(), images)
}

/// Nothing of an epoch unless all of the epochs before is there, whole.
fn check(submitted: &Submitted, image: &MemImage) -> Result<u64, String> {
    let mut bytes = [0; PAGE as usize];
    // The first page that is not whole, by epoch, and the last epoch of which there is anything.
    let (mut missing, mut last) = (None::<(u64, u64)>, None::<(u64, u64)>);
    for (page, epoch) in &submitted.epochs {
        image.read_at(page * PAGE, &mut bytes).unwrap();
        let whole = (page + 1).to_le_bytes().repeat(PAGE as usize / 8);
        if bytes != whole[..] && missing.is_none_or(|(other, _)| *epoch < other) {
            missing = Some((*epoch, *page));
        }
        if bytes.iter().any(|byte| *byte != 0) && last.is_none_or(|(other, _)| *epoch > other) {
            last = Some((*epoch, *page));
        }
    }
    match (missing, last) {
        (Some((missing, page)), Some((last, other))) if missing < last => Err(format!(
            "page {page} of epoch {missing} is not there, page {other} of epoch {last} is"
        )),
        (_, last) => Ok(last.map_or(0, |(epoch, _)| epoch)),
    }
}

/// FJORD_SEED reruns what was printed.
fn seed() -> u64 {
    let fresh = || std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = std::env::var("FJORD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(fresh);
    println!("FJORD_SEED={seed}");
    seed
}

#[test]
fn no_power_cut_breaks_the_order_of_epochs() {
    let seed = seed();
    for profile in profiles() {
        let sim = Arc::new(SimDevice::new(&profile, 64 << 20));
        let device = EpochDevice::new(sim.clone());
        let rounds = if profile.queue_depth > 1 { 60 } else { 8 };
        let (submitted, images) = storm(&device, &sim, seed, rounds);
        let what = format!("{}, {:?}", profile.name, profile.barrier);
        let mut partial = 0;
        for image in &images {
            let last = check(&submitted, image).unwrap_or_else(|e| panic!("{what}: {e}"));
            partial += u64::from(last > 0 && last + 1 < submitted.open);
        }
        println!("{what}: {} images, {partial} of a moment between", images.len());
        assert!(partial > 0, "{what}: no cut came between");
        let stats = device.epoch_stats();
        assert!(stats.epoch_count > 0 && stats.in_flight_count == 0);
        assert!(stats.in_flight_count_max <= profile.queue_depth);
        assert_eq!(check(&submitted, &sim.contents()).map(|_| ()), Ok(()));
    }
}

/// The same storm without the scheduler, on a device that keeps no order.
#[test]
fn the_check_notices_missing_order() {
    let profile = Profile { barrier: None, ..Profile::PLAIN_SSD };
    let sim = Arc::new(SimDevice::new(&profile, 64 << 20));
    let (submitted, images) = storm(&*sim, &sim, seed(), 60);
    let broken = images.iter().filter(|image| check(&submitted, image).is_err()).count();
    assert!(broken > 0, "{} images, none of them out of order", images.len());
}
