//! Short runs over the targets that need nothing of fjord's mount: figures come out, and nothing
//! stays behind.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use fjord_bench::{BenchError, How, Options, Target, Workload, run};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn options(dir: &Path, targets: &[Target], workloads: &[Workload]) -> Options {
    Options {
        targets: targets.to_vec(),
        workloads: workloads.to_vec(),
        round_count: 2,
        turn: Duration::from_millis(50),
        image_size_bytes: 128 << 20,
        sequential_bytes: 16 << 20,
        read_threads: vec![1, 2],
        file_count: 150,
        ..Options::new(dir)
    }
}

/// How long a loop device may stay after it was detached: while another program looks into it, such as udev.
const DETACHED_PATIENCE: Duration = Duration::from_secs(60);

/// A file below `dir` that a loop device has.
fn attached(dir: &Path) -> Option<String> {
    let dir = dir.display().to_string();
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices.map(|device| device.path().join("loop/backing_file"));
    files.flat_map(std::fs::read_to_string).find(|file| file.contains(&dir))
}

/// Neither mounts, nor loop devices, nor files.
fn assert_clean(dir: &Path) {
    let mounts = fjord_block::mountinfo::mounts().unwrap();
    assert!(!mounts.iter().any(|mount| mount.mountpoint.starts_with(dir)), "{mounts:?}");
    let began = Instant::now();
    while let Some(file) = attached(dir) {
        assert!(began.elapsed() < DETACHED_PATIENCE, "{file}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let left: Vec<_> =
        std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn every_workload_gives_figures() {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("work");
    let own = tempfile::tempdir().unwrap();
    let mut targets = vec![Target::Raw, Target::Block, Target::Directory(own.path().to_owned())];
    if is_root() {
        targets.extend([Target::Kernel, Target::KernelFastCommit]);
    }
    let workloads: Vec<Workload> =
        Workload::ALL.into_iter().filter(|w| *w != Workload::OpenHuge).collect();
    let mut steps = Vec::new();
    let report = run(&options(&work, &targets, &workloads), &mut |progress| {
        steps.push((progress.done_count, progress.total_count));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_clean(&work);
    assert!(std::fs::read_dir(own.path()).unwrap().next().is_none());
    assert!(steps.is_sorted() && steps.iter().all(|(done, total)| done < total), "{steps:?}");
    for workload in workloads {
        let cases: Vec<_> =
            report.cases.iter().filter(|case| case.workload == workload.name()).collect();
        assert!(
            !cases.is_empty() && cases.iter().all(|case| case.rate > 0.0),
            "{}",
            workload.name()
        );
    }
    let raw = report.cases.iter().find(|case| case.target == "raw").unwrap();
    assert_eq!(raw.ratio_to_raw, Some(1.0));
    for case in &report.cases {
        let Some(latency) = &case.latency else { continue };
        let ordered = [latency.p50_us, latency.p99_us, latency.p99_9_us];
        assert!(latency.p50_us > 0.5 && ordered.is_sorted() && latency.max_us < 60e6, "{case:?}");
    }
    let table = report.to_table();
    assert!(
        table.contains("append-fsync · 1 thread") && table.contains("parallel-read · 2 threads"),
        "{table}"
    );
    assert!(report.to_json().contains("\"p99_9_us\""));
    let svg = dir.path().join("latency.svg");
    report.write_latency_svg(&svg).unwrap();
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.contains("<polyline") && svg.contains("fjord-block"));
}

#[test]
fn an_interrupted_run_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let targets: &[Target] =
        if is_root() { &[Target::Raw, Target::Kernel] } else { &[Target::Raw] };
    for limit in 0..4 {
        let options = options(dir.path(), targets, &[Workload::AppendFsync]);
        let result = run(&options, &mut |progress| {
            if progress.done_count >= limit {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        assert!(matches!(result, Err(BenchError::Interrupted)));
        assert_clean(dir.path());
    }
}

#[test]
fn a_missing_program_is_named_and_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        fjord_program: "/nonexistent/fjord".into(),
        ..options(
            dir.path(),
            &[Target::Raw, Target::Fuse(How::default())],
            &[Workload::AppendFsync],
        )
    };
    let report = run(&options, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(report.skipped.len(), 1);
    assert!(
        report.skipped[0].contains("/nonexistent/fjord is not installed"),
        "{}",
        report.skipped[0]
    );
    assert_clean(dir.path());
}

#[test]
fn senseless_options_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let base = options(dir.path(), &[Target::Raw], &[Workload::SequentialWrite]);
    let too_large = Options { sequential_bytes: 1 << 30, ..base.clone() };
    let no_rounds = Options { round_count: 0, ..base };
    for options in [too_large, no_rounds] {
        assert!(matches!(
            run(&options, &mut |_| ControlFlow::Continue(())),
            Err(BenchError::Usage(_))
        ));
    }
    assert!(Target::from_name("nothing").unwrap_err().to_string().contains("kernel-fc"));
    assert_eq!(Workload::from_name("untar").unwrap(), Workload::Untar);
    for name in ["fjord-fuse", "fjord-library:epoch", "fjord-fuse:ijournal:epoch:nolow_latency"] {
        assert_eq!(Target::from_name(name).unwrap().name(), name);
    }
    for name in [
        "kernel:nolow_latency",
        "kernel:epoch",
        "raw:compound",
        "fjord-fuse:epic",
        "fjord-fuse:separate",
        "fjord-library:native:separate",
    ] {
        assert!(matches!(Target::from_name(name), Err(BenchError::Usage(_))), "{name}");
    }
}
