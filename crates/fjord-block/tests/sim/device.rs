//! The modelled devices in real time, under threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord_block::sim::{CutScope, Profile, SeededChooser, SimCore, SimDevice};
use fjord_block::{Buf, Device, DeviceExt, Request, Ticket};

#[test]
fn threads_read_what_they_wrote() {
    for profile in Profile::ALL {
        let device = Arc::new(SimDevice::new(profile, 64 << 20));
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let device = &device;
                scope.spawn(move || {
                    let start = u64::from(thread) * (1 << 20);
                    for i in 0..8_u64 {
                        let data = [thread * 8 + i as u8; 5000];
                        device.write_all_at(start + i * 5120, &data).unwrap();
                    }
                    device.flush().unwrap();
                    let mut back = [0; 5000];
                    for i in 0..8_u64 {
                        device.read_exact_at(start + i * 5120, &mut back).unwrap();
                        assert_eq!(back, [thread * 8 + i as u8; 5000], "{}", profile.name);
                    }
                });
            }
        });
        let stats = device.sim_stats();
        assert_eq!((stats.write_count, stats.flush_count), (32, 4));
        assert!(stats.queue_depth_max() <= profile.queue_depth as usize);
        assert_eq!(device.stats().writes_total().request_count, 32);
    }
}

/// Real time is never ahead of the model: the same requests take at least as long.
#[test]
fn nothing_completes_before_its_modelled_time() {
    let mut core = SimCore::new(&Profile::UFS, 1 << 20);
    let device = SimDevice::new(&Profile::UFS, 1 << 20);
    let started = Instant::now();
    for i in 0..20_u64 {
        let write = Request::write(i * 4096, vec![Buf::zeroed(4096)]);
        for request in [write, Request::flush()] {
            core.submit(&request);
            assert_eq!(core.advance_to_completion().len(), 1);
            device.submit_one(request).wait().unwrap();
        }
    }
    assert!(started.elapsed() >= Duration::from_nanos(core.now_ns()));
}

#[test]
fn a_power_cut_fails_what_is_under_way_and_keeps_what_was_flushed() {
    // Ten seconds of writes, and another device if this thread has slept through them.
    let cut_in_time = (0..20).any(|_| power_is_cut_in_time());
    assert!(cut_in_time, "the cut comes too late each time");
}

/// Whether the cut was before the last write.
fn power_is_cut_in_time() -> bool {
    let device = SimDevice::new(&Profile::DISK, 64 << 20);
    device.write_all_at(0, &[7; 4096]).unwrap();
    device.flush().unwrap();
    let write =
        |i: u64| Request::write(i * 7919 % 16_384 * 4096, vec![Buf::from_slice(&[9; 4096])]);
    let tickets = device.submit((1..2000).map(write).chain([Request::flush()]).collect());
    let image = device.cut_power(CutScope::Contract, &mut SeededChooser::new(3));
    let results: Vec<_> = tickets.iter().map(Ticket::wait).collect();
    if results.iter().all(Result::is_ok) {
        return false;
    }
    assert!(device.flush().is_err() && device.read_exact_at(0, &mut [0; 8]).is_err());
    assert!(!device.is_powered());
    let mut bytes = [0; 4096];
    image.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
    true
}

#[test]
fn out_of_range_fails_at_once_and_a_dropped_device_ends_its_waiters() {
    let device = SimDevice::new(&Profile::DISK, 1 << 20);
    assert!(device.write_all_at(1 << 20, &[0]).is_err());
    let tickets = device.submit((0..50).map(|i| Request::write(i, vec![Buf::zeroed(1)])).collect());
    drop(device);
    assert!(tickets.iter().all(Ticket::is_done));
}
