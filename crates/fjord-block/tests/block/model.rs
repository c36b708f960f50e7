//! Every backend against a vector of bytes, under random batches from many threads.

use std::sync::Arc;

use fjord_block::{AlignedBuf, Buf, Class, Device, DeviceExt, FileDevice, Order, Request, Ticket};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::backends;

const REGION_BYTES: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;

fn random_class(rng: &mut StdRng) -> Class {
    [Class::Sync, Class::Async, Class::Background][rng.random_range(0..3)]
}

/// Data cut into buffers of random sizes, each a multiple of `grain`.
fn cut(data: &[u8], grain: usize, rng: &mut StdRng) -> Vec<Buf> {
    let mut bufs = Vec::new();
    let mut rest = data;
    while !rest.is_empty() {
        let take = (rng.random_range(1..=8) * grain).min(rest.len());
        bufs.push(Buf::from_slice(&rest[..take]));
        rest = &rest[take..];
    }
    bufs
}

/// A random extent inside the pages `first..end`: usually aligned to 512 or 4096, sometimes not at all.
fn extent(first: usize, end: usize, rng: &mut StdRng) -> (usize, usize, usize) {
    let grain = [512, 4096, 4096, 4096, 1][rng.random_range(0..5)];
    let (low, high) = (first * PAGE_BYTES / grain, end * PAGE_BYTES / grain);
    let a = rng.random_range(low..high);
    let b = rng.random_range(low..high);
    let (start, stop) = (a.min(b) * grain, (a.max(b) + 1) * grain);
    (start, stop - start, if grain == 1 { 700 } else { grain })
}

/// One batch on disjoint pages; the model changes with it.
fn batch(model: &mut [u8], base: u64, rng: &mut StdRng) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut page = 0;
    let count = rng.random_range(1..=6);
    for _ in 0..count {
        let end = (page + rng.random_range(1..=24)).min(REGION_BYTES / PAGE_BYTES);
        if page + 1 >= end {
            break;
        }
        let (start, len, grain) = extent(page, end, rng);
        page = end;
        let offset = base + start as u64;
        let part = &mut model[start..start + len];
        match rng.random_range(0..12) {
            0 => {
                part.fill(0);
                requests.push(Request::WriteZeroes { offset, len: len as u64 });
            }
            1 => requests.push(Request::Flush { class: random_class(rng) }),
            kind => {
                rng.fill(part);
                requests.push(Request::Write {
                    offset,
                    bufs: cut(part, grain, rng),
                    order: [Order::Orderless, Order::Ordered, Order::Barrier][kind % 3],
                    fua: kind == 2,
                    class: random_class(rng),
                });
            }
        }
    }
    requests
}

fn check_random_read(device: &dyn Device, model: &[u8], base: u64, rng: &mut StdRng) {
    let (start, len, grain) = extent(0, REGION_BYTES / PAGE_BYTES, rng);
    let lens = cut(&model[start..start + len], grain, rng)
        .into_iter()
        .map(|buf| AlignedBuf::uninit(buf.len()));
    let ticket = device.submit_read(base + start as u64, lens.collect(), random_class(rng));
    if rng.random_bool(0.3) {
        ticket.ticket().promote();
    }
    let bufs = ticket.wait().unwrap();
    let got: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
    assert!(got == model[start..start + len], "read at {start} of {len} bytes differs");
}

/// Random batches and reads on one region; returns what it must contain.
fn work(device: &dyn Device, base: u64, seed: u64, round_count: usize) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut model = vec![0; REGION_BYTES];
    for _ in 0..round_count {
        let tickets = device.submit(batch(&mut model, base, &mut rng));
        match rng.random_range(0..3) {
            0 => Ticket::wait_all(&tickets).unwrap(),
            1 => tickets.iter().rev().for_each(|ticket| ticket.wait().unwrap()),
            _ => {
                // Nobody waits; poll until the backend has done it by itself.
                while !tickets.iter().all(Ticket::is_done) {
                    std::thread::yield_now();
                }
                tickets.iter().for_each(|ticket| assert_eq!(ticket.result(), Some(Ok(()))));
            }
        }
        check_random_read(device, &model, base, &mut rng);
    }
    model
}

fn check_regions(device: &dyn Device, models: &[Vec<u8>]) {
    let mut got = vec![0; REGION_BYTES];
    for (index, model) in models.iter().enumerate() {
        device.read_exact_at((index * REGION_BYTES) as u64, &mut got).unwrap();
        assert!(got == *model, "region {index} differs");
    }
}

#[test]
fn random_batches_from_many_threads() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        for (thread_count, round_count) in [(1, 60), (8, 25), (64, 4)] {
            let device =
                backends::open_new(backend, dir.path(), (thread_count * REGION_BYTES) as u64);
            let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
                let work = |index: usize| {
                    let device = &*device;
                    scope.spawn(move || {
                        work(device, (index * REGION_BYTES) as u64, index as u64, round_count)
                    })
                };
                let threads: Vec<_> = (0..thread_count).map(work).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            check_regions(&*device, &models);
            drop(device);
            if backend != "mem" {
                let device =
                    FileDevice::open(&dir.path().join(backend), &backends::options(backend))
                        .unwrap();
                check_regions(&device, &models);
            }
        }
    }
}

#[test]
fn dropped_tickets_complete_and_device_drop_waits() {
    let dir = tempfile::tempdir().unwrap();
    for backend in &backends::BACKENDS[1..] {
        let device = backends::open_new(backend, dir.path(), 4 << 20);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let device = &device;
                scope.spawn(move || {
                    // The thread ends with its requests under way.
                    for index in 0..32 {
                        let at = (thread * 32 + index) * 16384;
                        let bufs = vec![Buf::from_slice(&[thread as u8 + 1; 16384])];
                        let class = [Class::Sync, Class::Async][index as usize % 2];
                        device.submit(vec![Request::Write {
                            offset: at,
                            bufs,
                            order: Order::Orderless,
                            fua: false,
                            class,
                        }]);
                    }
                });
            }
        });
        drop(device.submit(vec![Request::flush(), Request::Flush { class: Class::Async }]));
        drop(device.submit_read(0, vec![AlignedBuf::uninit(65536)], Class::Async));
        drop(device);
        let data = std::fs::read(dir.path().join(backend)).unwrap();
        for (index, chunk) in data.chunks(16384).enumerate() {
            assert!(
                chunk.iter().all(|byte| usize::from(*byte) == index / 32 + 1),
                "{backend}: chunk {index}"
            );
        }
    }
}

#[test]
fn callbacks_run_without_a_waiter() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = backends::open_new(backend, dir.path(), 1 << 20);
        let (sender, receiver) = std::sync::mpsc::channel();
        let chained = device.clone();
        device.submit_one(Request::write(0, vec![Buf::zeroed(4096)])).on_complete(move |result| {
            result.clone().unwrap();
            // Submitting from a callback is allowed.
            chained
                .submit_one(Request::flush())
                .on_complete(move |result| sender.send(result.clone()).unwrap());
        });
        receiver.recv_timeout(std::time::Duration::from_secs(120)).unwrap().unwrap();
    }
}

#[test]
fn more_pieces_than_one_call_takes() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = backends::open_new(backend, dir.path(), 4 << 20);
        let bufs: Vec<Buf> =
            (0..3000u32).map(|i| Buf::from_slice(&i.to_le_bytes().repeat(128))).collect();
        // The second request keeps the first from being a lone one.
        let tickets = device.submit(vec![
            Request::write(512, bufs),
            Request::write(3 << 20, vec![Buf::zeroed(512)]),
        ]);
        Ticket::wait_all(&tickets).unwrap();
        let pieces = (0..3000).map(|_| AlignedBuf::uninit(512)).collect();
        let other = device.submit_read(0, vec![AlignedBuf::uninit(512)], Class::Async);
        let read = device.submit_read(512, pieces, Class::Async).wait().unwrap();
        other.wait().unwrap();
        for (i, piece) in read.iter().enumerate() {
            assert_eq!(**piece, (i as u32).to_le_bytes().repeat(128), "{backend}: piece {i}");
        }
    }
}

#[test]
fn one_ticket_many_waiters() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device: Arc<dyn Device> = backends::open_new(backend, dir.path(), 1 << 20);
        for round in 0..50u8 {
            let write = |at| Request::write(at, vec![Buf::from_slice(&[round; 4096])]);
            let mut tickets = device.submit(vec![write(0), write(8192), write(16384)]);
            tickets.truncate(1 + usize::from(round % 3));
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| Ticket::wait_all(&tickets).unwrap());
                }
                scope.spawn(|| device.flush().unwrap());
            });
        }
    }
}
