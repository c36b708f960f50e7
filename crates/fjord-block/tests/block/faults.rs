//! Failures reach every ticket that depends on them, and are not forgotten.

use std::sync::Arc;

use fjord_block::{
    Buf, Device, DeviceExt, Engine, FaultAction, FaultDevice, FaultMatch, FaultRule, FileDevice,
    FileOptions, IoErrorKind, IoOp, MemDevice, OpenError, Request, Ticket,
};

use crate::backends;

fn page(byte: u8) -> Vec<Buf> {
    vec![Buf::from_slice(&[byte; 4096])]
}

#[test]
fn a_failed_flush_is_sticky() {
    let device = MemDevice::new(1 << 20);
    device.flush().unwrap();
    device.faults().fail_flush(libc::EIO);
    assert_eq!(device.flush().unwrap_err().kind, IoErrorKind::Os(libc::EIO));
    device.write_all_at(0, &[1; 512]).unwrap();
    assert_eq!(device.flush().unwrap_err().kind, IoErrorKind::Earlier(libc::EIO));
}

#[test]
fn an_unseen_write_error_fails_the_flush_a_seen_one_does_not() {
    let device = MemDevice::new(1 << 20);
    device.faults().fail_nth(Some(IoOp::Write), 1, libc::ENOSPC);
    device.write_all_at(0, &[1; 512]).unwrap();
    assert!(device.write_all_at(0, &[1; 512]).unwrap_err().is_no_space());
    device.flush().unwrap();
    device.faults().fail_nth(Some(IoOp::Write), 0, libc::EIO);
    drop(device.submit_one(Request::write(0, page(1))));
    assert_eq!(device.flush().unwrap_err().kind, IoErrorKind::Earlier(libc::EIO));
}

#[test]
fn faults_by_range_and_torn_writes() {
    let device = MemDevice::new(1 << 20);
    device.faults().fail_range(Some(IoOp::Read), 8192..8193, libc::EIO);
    device.read_buf(4096, 4096).unwrap();
    assert!(device.read_buf(4096, 8192).is_err());
    device.faults().clear();
    device.read_buf(4096, 8192).unwrap();
    device.faults().add(FaultRule {
        matches: FaultMatch { op: Some(IoOp::Write), range: None },
        skip_count: 0,
        hit_count_max: 1,
        action: FaultAction::Torn { keep_bytes: 512, errno: libc::EIO },
    });
    assert!(device.submit_one(Request::write(0, page(7))).wait().is_err());
    let read = device.read_buf(0, 1024).unwrap();
    assert!(read[..512].iter().all(|byte| *byte == 7) && read[512..].iter().all(|byte| *byte == 0));
}

#[test]
fn the_wrapper_fails_records_and_passes_on() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = FaultDevice::new(backends::open_new(backend, dir.path(), 1 << 20));
        device.start_recording();
        device.submit_one(Request::write(0, page(1))).wait().unwrap();
        device.flush().unwrap();
        device.faults().fail_nth(Some(IoOp::Write), 1, libc::EIO);
        let tickets =
            device.submit(vec![Request::write(4096, page(2)), Request::write(8192, page(3))]);
        tickets[0].wait().unwrap();
        assert!(Ticket::wait_all(&tickets).is_err());
        device.faults().add(FaultRule {
            matches: FaultMatch::default(),
            skip_count: 0,
            hit_count_max: 1,
            action: FaultAction::Delay(std::time::Duration::from_millis(20)),
        });
        let started = std::time::Instant::now();
        device.submit_one(Request::write(12288, page(4))).wait().unwrap();
        assert!(started.elapsed().as_millis() >= 20);
        device.faults().fail_flush(libc::EIO);
        assert!(device.flush().is_err());
        assert!(matches!(device.flush().unwrap_err().kind, IoErrorKind::Earlier(_)));

        let log = device.take_recording();
        assert_eq!(log.len(), 7, "{backend}");
        assert!(log[0].completed_at.unwrap() < log[1].submitted_at);
        assert!(matches!(log[1].request, Request::Flush { .. }));
        let failed: Vec<bool> = log.iter().map(|record| record.error.is_some()).collect();
        assert_eq!(failed, [false, false, false, true, false, true, true]);
        let Request::Write { bufs, .. } = &log[2].request else {
            panic!("the third request is a write")
        };
        assert_eq!(bufs[0][0], 2);
        assert_eq!(device.read_buf(8192, 4096).unwrap()[0], 0);
    }
}

#[test]
fn bad_requests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for backend in backends::BACKENDS {
        let device = backends::open_new(backend, dir.path(), 1 << 20);
        for offset in [1 << 20, (1 << 20) - 512, u64::MAX - 100] {
            let error = device.submit_one(Request::write(offset, page(1))).wait().unwrap_err();
            assert_eq!(error.kind, IoErrorKind::OutOfRange);
            assert_eq!(device.read_buf(offset, 4096).unwrap_err().kind, IoErrorKind::OutOfRange);
        }
        device.flush().unwrap();
        device.set_size(2 << 20).unwrap();
        assert_eq!(device.size_bytes(), 2 << 20);
        device.write_all_at((2 << 20) - 4096, &[5; 4096]).unwrap();
        device.submit_one(Request::Discard { offset: 1 << 20, len: 1 << 20 }).wait().unwrap();
        assert!(device.read_buf((2 << 20) - 4096, 4096).unwrap().iter().all(|byte| *byte == 0));
        // Empty requests are fine.
        device.submit_one(Request::write(0, Vec::new())).wait().unwrap();
        let tickets = device
            .submit(vec![Request::write(0, Vec::new()), Request::write(0, vec![Buf::zeroed(0)])]);
        Ticket::wait_all(&tickets).unwrap();
    }
}

#[test]
fn read_only_devices_share_and_refuse() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    backends::make_image(&path, 1 << 20);
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let a = FileDevice::open(&path, &options).unwrap();
    let b = FileDevice::open(&path, &options).unwrap();
    assert!(a.capabilities().read_only);
    assert_eq!(b.write_all_at(0, &[1; 512]).unwrap_err().errno(), libc::EROFS);
    assert_eq!(a.set_size(5).unwrap_err().errno(), libc::EROFS);
    a.flush().unwrap();
    let error = FileDevice::open(&path, &FileOptions::default()).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
}

#[test]
fn an_image_is_opened_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    backends::make_image(&path, 1 << 20);
    let first = FileDevice::open(&path, &FileOptions::default()).unwrap();
    let error = FileDevice::open(&path, &FileOptions::default()).unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY);
    assert!(error.to_string().contains("this process itself"), "{error}");
    drop(first);
    FileDevice::open(&path, &FileOptions::default()).unwrap();
}

#[test]
fn what_cannot_be_opened_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let error = FileDevice::open(dir.path(), &FileOptions::default()).unwrap_err();
    assert!(error.to_string().contains("directory"), "{error}");
    let error = FileDevice::open(&dir.path().join("nothing"), &FileOptions::default()).unwrap_err();
    assert_eq!(error.errno(), libc::ENOENT);
    let error = FileDevice::open("/dev/null".as_ref(), &FileOptions::default()).unwrap_err();
    assert!(error.to_string().contains("character device"), "{error}");
}

#[test]
fn a_file_truncated_behind_our_back_fails_reads() {
    const TRUNCATED: IoErrorKind = IoErrorKind::Truncated { size_bytes: 8192 };
    let dir = tempfile::tempdir().unwrap();
    for backend in &backends::BACKENDS[1..] {
        let device = backends::open_new(backend, dir.path(), 1 << 20);
        backends::make_image(&dir.path().join(backend), 8192);
        assert_eq!(device.read_buf(4096, 8192).unwrap_err().kind, TRUNCATED);
        let at = |offset| {
            device.submit_read(
                offset,
                vec![fjord_block::AlignedBuf::uninit(8192)],
                Default::default(),
            )
        };
        let (a, b) = (at(4096), at(16384));
        assert_eq!(b.wait().unwrap_err().kind, TRUNCATED, "{backend}");
        assert_eq!(a.wait().unwrap_err().kind, TRUNCATED, "{backend}");
        // Nor does a flush promise anything, whether or not anybody has read there.
        device.write_all_at(0, &[1; 4096]).unwrap();
        assert_eq!(device.flush().unwrap_err().kind, TRUNCATED, "{backend}");
        assert_eq!(device.check().unwrap_err().kind, TRUNCATED, "{backend}");
    }
}

/// A check beside a change of the size takes neither size for a truncation.
#[test]
fn a_file_that_changes_its_size_is_not_truncated() {
    const CHANGES: u64 = 20_000;
    let dir = tempfile::tempdir().unwrap();
    let device = backends::open_new(backends::BACKENDS[1], dir.path(), 1 << 20);
    let over = std::sync::atomic::AtomicBool::new(false);
    let is_over = || over.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let checks = scope.spawn(|| {
            while !is_over() {
                device.check().unwrap();
            }
        });
        for change in 0..CHANGES {
            if checks.is_finished() {
                break;
            }
            match change % 3 {
                0 => drop(device.ensure_size((1 << 20) + 4096).unwrap()),
                1 => device.set_size((1 << 20) + 8192).unwrap(),
                _ => device.set_size(1 << 20).unwrap(),
            }
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_full_host_is_told_and_recovered_from() {
    // A file size limit acts like a full disk, but only a process of its own may have it; a tiny
    // file system needs root. Use /dev/full's cousin: a sparse image on a small tmpfs when root.
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: no small file system to fill");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("small");
    std::fs::create_dir(&mount).unwrap();
    let run = |program: &str, args: &[&std::ffi::OsStr]| {
        assert!(
            std::process::Command::new(program).args(args).status().unwrap().success(),
            "{program} {args:?}"
        );
    };
    let arg = std::ffi::OsStr::new;
    run(
        "mount",
        &[arg("-t"), arg("tmpfs"), arg("-o"), arg("size=1m"), arg("none"), mount.as_os_str()],
    );
    for engine in [Engine::Uring, Engine::Plain] {
        let path = mount.join("image");
        backends::make_image(&path, 8 << 20);
        let options = FileOptions { engine, ..FileOptions::default() };
        let device = Arc::new(FileDevice::open(&path, &options).unwrap());
        let error = device.write_all_at(0, &vec![1; 4 << 20]).unwrap_err();
        assert!(error.is_no_space(), "{error}");
        device.submit_one(Request::Discard { offset: 0, len: 8 << 20 }).wait().unwrap();
        device.write_all_at(0, &[1; 65536]).unwrap();
        device.flush().unwrap();
    }
    run("umount", &[mount.as_os_str()]);
}
