//! `fjord bench` with sizes so small that the figures mean nothing: tables and files come out, what
//! cannot be measured is named, and nothing stays behind. Needs root for the mounts.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_block::mountinfo::{self, MountEntry};
use fjord_testkit::{image::Scratch, size::pick, tools};

fn bench(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fjord"));
    command.arg("bench");
    for small in ["--rounds=1", "--seconds=0.05", "--size=64M"] {
        let (name, _) = small.split_once('=').unwrap_or_default();
        if !args.iter().any(|arg| arg.starts_with(name)) {
            command.arg(small);
        }
    }
    command.args(args).arg(dir).stdin(Stdio::null());
    command
}

fn ended(output: &Output, code: i32) -> Result<(String, String)> {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(code), "ended with {}: {out}{err}", output.status);
    Ok((out, err))
}

/// Neither mounts nor files are left in `dir`.
fn ensure_empty(dir: &Path) -> Result<()> {
    let left: Vec<_> = fs::read_dir(dir)?.flatten().map(|entry| entry.path()).collect();
    ensure!(left.is_empty(), "{left:?}");
    let mounts = mountinfo::mounts()?;
    ensure!(!mounts.iter().any(|mount| mount.mountpoint.starts_with(dir)), "{mounts:?}");
    Ok(())
}

#[test]
fn every_default_target_is_measured_or_named() -> Result<()> {
    let scratch = Scratch::new("bench-default")?;
    let dir = scratch.join("work");
    fs::create_dir(&dir)?;
    let (json, svg) = (scratch.join("out.json"), scratch.join("out.svg"));
    let args = [format!("--json={}", json.display()), format!("--svg={}", svg.display())];
    let output = bench(&dir, &[&args[0], &args[1]]).output()?;
    let (table, _) = ended(&output, 0)?;
    ensure_empty(&dir)?;
    for name in ["raw", "fjord-block", "fjord-library", "fjord-fuse", "kernel", "fuse2fs"] {
        ensure!(table.contains(name), "{name} is missing in {table}");
    }
    for words in ["append-fsync · 1 thread", "overwrite-fdatasync", "p99.9", "load average"] {
        ensure!(table.contains(words), "{words} is missing in {table}");
    }
    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(json)?)?;
    let cases = report["cases"].as_array().context("no cases")?;
    let fuse = cases.iter().find(|case| case["target"] == "fjord-fuse").context("no fjord-fuse")?;
    ensure!(fuse["rate"].as_f64() > Some(0.0) && fuse["latency"]["p50_us"].is_number(), "{fuse}");
    ensure!(fs::read_to_string(svg)?.contains("<svg"));
    Ok(())
}

#[test]
fn chosen_workloads_go_through_the_mount() -> Result<()> {
    let scratch = Scratch::new("bench-chosen")?;
    let args = [
        "--targets=fjord-fuse,fjord-library",
        "--workloads=seq-write,seq-read,untar,create-unlink",
        "--file-size=4M",
        "--files=50",
        "-o",
        "noatime",
        "--json=-",
    ];
    let (out, _) = ended(&bench(scratch.path(), &args).output()?, 0)?;
    ensure_empty(scratch.path())?;
    let report: serde_json::Value = serde_json::from_str(&out)?;
    ensure!(report["cases"].as_array().is_some_and(|cases| cases.len() == 8), "{out}");
    Ok(())
}

/// Runs a figure in its quick form and gives its JSON. Every row has the numbers named, gains over
/// the kernel and over compound commits, and nothing is left out.
fn quick_figure(name: &str, args: &[&str], numbers: &[&str]) -> Result<serde_json::Value> {
    let scratch = Scratch::new(&format!("bench-{name}"))?;
    let dir = scratch.join("work");
    fs::create_dir(&dir)?;
    let (json, svg) = (scratch.join("out.json"), scratch.join("out.svg"));
    let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .args(["bench", "--quick", "--figure", name])
        .args(args)
        .args([format!("--json={}", json.display()), format!("--svg={}", svg.display())])
        .arg(&dir)
        .stdin(Stdio::null())
        .output()?;
    let (table, _) = ended(&output, 0)?;
    println!("{table}");
    ensure_empty(&dir)?;
    ensure_no_devices(&dir)?;
    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(json)?)?;
    ensure!(report["figure"] == name && report["left_out"] == serde_json::json!([]), "{report}");
    let background =
        |row: &serde_json::Value| row["numbers"]["background_mb_per_s"].as_f64() > Some(0.0);
    let has_writer = numbers.contains(&"background_mb_per_s");
    ensure!(!has_writer || rows(&report)?.iter().any(background), "no writer wrote: {report}");
    for row in rows(&report)? {
        for name in numbers {
            // On a busy machine a writer may come to nothing in so short a round.
            let may_be_none = *name == "background_mb_per_s";
            let least = if may_be_none { -1.0 } else { 0.0 };
            ensure!(row["numbers"][name].as_f64().is_some_and(|n| n > least), "{name} in {row}");
        }
        for gain in ["gain_over_kernel", "gain_over_kernel_fast_commit", "gain_over_compound"] {
            let is_floor = row["target"] == "raw" && gain == "gain_over_compound";
            ensure!(is_floor || row[gain].as_f64().is_some_and(|n| n > 0.0), "{gain} in {row}");
        }
        let target = row["target"].as_str().context("no target")?;
        if target == "kernel" || target.ends_with(":compound") {
            ensure!(row["gain_over_compound"] == 1.0, "{row}");
        }
        ensure!(table.contains(target), "{table}");
    }
    let svg = fs::read_to_string(svg)?;
    ensure!(svg.contains("<polyline") && svg.contains("kernel-fc"), "{name}: an empty picture");
    Ok(report)
}

fn rows(report: &serde_json::Value) -> Result<&Vec<serde_json::Value>> {
    report["rows"].as_array().context("no rows")
}

/// How long a loop device may stay after it was detached: while another program looks into it, such as udev.
const DETACHED_PATIENCE: Duration = Duration::from_secs(60);

/// No loop devices of a run are left.
fn ensure_no_devices(dir: &Path) -> Result<()> {
    let dir = dir.display().to_string();
    let began = Instant::now();
    let attached = || -> Result<Option<PathBuf>> {
        let mut devices = fs::read_dir("/sys/block")?.flatten().map(|device| device.path());
        Ok(devices.find(|device| {
            let backing = fs::read_to_string(device.join("loop/backing_file"));
            backing.is_ok_and(|file| file.contains(&dir))
        }))
    };
    while let Some(device) = attached()? {
        ensure!(began.elapsed() < DETACHED_PATIENCE, "{}", device.display());
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The rows are those of each device with each of its settings and each target, in order.
fn ensure_rows(
    report: &serde_json::Value,
    points: &[(&str, &[&str])],
    more: &[&str],
) -> Result<()> {
    let mut expected = Vec::new();
    for (device, settings) in points {
        for setting in *settings {
            for target in more.iter().copied().chain(["kernel", "kernel-fc"]).map(String::from) {
                expected.push((*device, *setting, target));
            }
            for front in ["fjord-library", "fjord-fuse"] {
                for policy in policies() {
                    expected.push((*device, *setting, format!("{front}:{policy}")));
                }
            }
        }
    }
    let name = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let of = |row: &serde_json::Value| {
        (name(&row["device"]), name(&row["setting"]), name(&row["target"]))
    };
    // A policy may have settings of its own.
    let measured = rows(report)?.iter().map(of).filter(|(_, setting, _)| !setting.contains(", "));
    let measured: Vec<_> = measured.collect();
    let expected: Vec<_> =
        expected.into_iter().map(|(d, s, t)| (d.to_owned(), s.to_owned(), t)).collect();
    ensure!(measured == expected, "{measured:?} instead of {expected:?}");
    Ok(())
}

/// The rows of fjord over the epoch scheduler, where a figure has them behind the others.
fn ensure_epoch_rows(report: &mut serde_json::Value) -> Result<()> {
    let all = report["rows"].as_array_mut().context("no rows")?;
    let settings = all.iter().filter(|row| row["target"] == "kernel").count();
    for front in ["fjord-library", "fjord-fuse"] {
        let before = all.len();
        all.retain(|row| row["target"] != format!("{front}:ijournal:epoch"));
        ensure!(before - all.len() == settings, "{front}: {} rows", before - all.len());
    }
    Ok(())
}

/// As the engine has them, but for `auto`, which is one of the others.
fn policies() -> Vec<&'static str> {
    let all = fjord::FsyncPolicyKind::ALL.iter().map(|policy| policy.name());
    all.filter(|name| *name != "auto").collect()
}

const LATENCY: [&str; 7] =
    ["fsync_count", "mean_ms", "p50_ms", "p95_ms", "p99_9_ms", "max_ms", "background_mb_per_s"];

#[test]
fn the_distribution_beside_a_writer_on_every_device() -> Result<()> {
    let fast: &[&str] = &["400 MB/s"];
    let real: &[&str] = &["alone", "400 MB/s"];
    let all = [
        ("plain-ssd", fast),
        ("disk", real),
        ("zram", real),
        ("ufs", &["50 MB/s"]),
        ("supercap-ssd", &["75 MB/s"]),
        ("nvme", fast),
    ];
    let devices = &all[..pick(2, 3, all.len())];
    let names: Vec<&str> = devices.iter().map(|(name, _)| *name).collect();
    let argument = format!("--devices={}", names.join(","));
    let mut report = quick_figure("ijournaling-6", &[&argument], &LATENCY)?;
    ensure_epoch_rows(&mut report)?;
    ensure_rows(&report, devices, &[])?;
    let kernel = rows(&report)?.iter().find(|row| row["target"] == "kernel");
    ensure!(kernel.context("no kernel")?["paper"] == "p95 > 3500 ms");
    // The time of the model shows in every row: no fsync without a flush of some milliseconds.
    for row in rows(&report)?.iter().filter(|row| row["device"] == "plain-ssd") {
        ensure!(row["numbers"]["p50_ms"].as_f64() > Some(0.8), "no flush: {row}");
    }
    Ok(())
}

#[test]
fn latency_by_bandwidth_and_by_allocation() -> Result<()> {
    let report = quick_figure("ijournaling-7", &["--devices=disk"], &LATENCY)?;
    ensure_rows(&report, &[("disk", &["100 MB/s", "200 MB/s"])], &[])?;
    let report = quick_figure("ijournaling-8", &["--devices=disk"], &LATENCY)?;
    ensure_rows(&report, &[("disk", &["delalloc", "nodelalloc"])], &[])?;
    let first = &rows(&report)?[0];
    let points = first["series"].as_array().context("no latencies over time")?;
    ensure!(points.len() as f64 == first["numbers"]["fsync_count"].as_f64().unwrap_or(0.0));
    Ok(())
}

#[test]
fn bandwidth_by_threads_on_disk_and_ram() -> Result<()> {
    let numbers = ["mb_per_s", "fsyncs_per_s", "p50_ms", "p99_ms"];
    let report = quick_figure("ijournaling-9", &[], &numbers)?;
    let threads: &[&str] = &["1 thread", "2 threads"];
    for row in rows(&report)? {
        ensure!(row["gain_over_raw"].as_f64().is_some_and(|gain| gain > 0.0), "{row}");
    }
    ensure_rows(&report, &[("disk", threads), ("zram", threads)], &["raw"])
}

#[test]
fn beside_a_copy_with_small_and_large_flex_groups() -> Result<()> {
    let settings: &[&str] = &["flex group of 1", "flex group of 16"];
    // Both are of the same runs.
    for figure in pick(&["pbg-3"][..], &["pbg-3"], &["pbg-2", "pbg-3"]) {
        let report = quick_figure(figure, &["--devices=disk"], &LATENCY)?;
        ensure_rows(&report, &[("disk", settings)], &[])?;
    }
    Ok(())
}

#[test]
fn the_table_of_fs_mark_has_the_patchs_numbers_and_a_mean() -> Result<()> {
    let numbers = ["mb_per_s", "fsyncs_per_s", "p50_ms"];
    let report = quick_figure("fastcommit-table", &["--devices=disk"], &numbers)?;
    let cells: &[&str] = &["4 KiB to 32 KiB", "8 KiB to 32 KiB", "32 KiB to 32 KiB"];
    ensure_rows(&report, &[("disk", cells)], &[])?;
    let of = |target: &str| {
        rows(&report)
            .map(|rows| rows.iter().filter(|row| row["target"] == target).collect::<Vec<_>>())
    };
    ensure!(
        of("kernel")?[1]["paper"] == "0.45 MB/s" && of("kernel-fc")?[2]["paper"] == "1.80 MB/s"
    );
    let gains: Vec<f64> =
        of("kernel-fc")?.iter().filter_map(|row| row["gain_over_compound"].as_f64()).collect();
    let mean = gains.iter().sum::<f64>() / gains.len() as f64;
    let means = report["means"].as_array().context("no means")?;
    let told = means.iter().find(|mean| mean["target"] == "kernel-fc").context("no mean")?;
    ensure!((told["gain_over_compound"].as_f64().unwrap_or(0.0) - mean).abs() < 1e-9, "{told}");
    ensure!(told["paper"].as_str().is_some_and(|paper| paper.contains("280")), "{told}");
    Ok(())
}

#[test]
fn a_probe_alone_and_beside_neighbours() -> Result<()> {
    let numbers = [
        "idle_p50_ms",
        "idle_p99_ms",
        "p50_ms",
        "p99_ms",
        "max_ms",
        "p50_times_idle",
        "p99_times_idle",
        "background_mb_per_s",
    ];
    let mut report = quick_figure("neighbours", &["--devices=disk"], &numbers)?;
    ensure_epoch_rows(&mut report)?;
    ensure_rows(&report, &[("disk", &["eight writers"])], &[])?;
    for row in rows(&report)? {
        let number = |name: &str| row["numbers"][name].as_f64().unwrap_or(0.0);
        let times = number("p99_ms") / number("idle_p99_ms");
        ensure!((times / number("p99_times_idle") - 1.0).abs() < 1e-6, "{row}");
    }
    Ok(())
}

/// Programs that fsync, on every policy.
#[test]
fn fallbacks_are_counted_by_program_and_reason() -> Result<()> {
    let scratch = Scratch::new("bench-fallbacks")?;
    let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .args(["bench", "--quick", "--figure=fallbacks", "--json=-"])
        .arg(scratch.path())
        .output()?;
    let (out, _) = ended(&output, 0)?;
    ensure_empty(scratch.path())?;
    let report: serde_json::Value = serde_json::from_str(&out)?;
    let programs = ["create+write+fsync", "append+fsync", "fs_mark", "varmail"];
    let mounted = ["SQLite WAL", "SQLite PERSIST", "SQLite DELETE", "git"];
    for policy in policies() {
        let expected =
            [("fjord-library", &programs[..]), ("fjord-fuse", &programs), ("fjord-fuse", &mounted)];
        for (target, programs) in expected {
            for program in programs {
                let target = format!("{target}:{policy}");
                let is = |row: &&serde_json::Value| {
                    row["target"] == target && row["setting"] == *program
                };
                let row = rows(&report)?
                    .iter()
                    .find(is)
                    .with_context(|| format!("{target}, {program}"))?;
                let count = |name: &str| row["numbers"][name].as_f64().unwrap_or(0.0);
                ensure!(count("fsync_count") > 0.0, "nobody called fsync: {row}");
                let parts = ["policy_count", "data_count", "nothing_count", "fallback_count"];
                ensure!(count("fsync_count") == parts.map(count).iter().sum::<f64>(), "{row}");
                let reasons = row["served"]["fallbacks"].as_object().context("no reasons")?;
                let told: u64 = reasons.values().filter_map(serde_json::Value::as_u64).sum();
                ensure!(count("fallback_count") == told as f64, "{row}");
                // Where the policy's log has a place, nothing but that log stands in the way.
                let unavoidable: &[&str] = match policy {
                    "ijournal" => &["log-full"],
                    // A directory that grows costs one commit.
                    "fast-commit" => &["log-full", "commit-under-way", "directory-changed"],
                    _ => continue,
                };
                if ["create+write+fsync", "append+fsync"].contains(program) {
                    let others = reasons.keys().filter(|why| !unavoidable.contains(&why.as_str()));
                    ensure!(count("policy_count") > 0.0 && others.count() == 0, "{row}");
                }
            }
        }
    }
    Ok(())
}

/// The journal's figures of the barrier paper: the kernel on a modelled device as a file, fjord on the
/// device itself, with order only, too.
#[test]
fn commits_and_queues_of_modelled_devices() -> Result<()> {
    let targets = "--targets=kernel,kernel-nobarrier,fjord-library:compound:native,\
                   fjord-library:compound:epoch:dual:native,\
                   fjord-library:compound:epoch:dual:native:order";
    for (figure, numbers) in [
        ("barrier-8", &["commit_count", "to_surface_ms", "in_flight_mean"][..]),
        ("barrier-table2", &["mean_ms", "p50_ms", "p99_ms", "p99_9_ms", "p99_99_ms"]),
        ("barrier-11", &["fsync_count", "mean_ms"]),
        ("barrier-12", &["queue_depth_mean", "queue_depth_max"]),
        ("barrier-13", &["fsyncs_per_s"]),
    ] {
        let scratch = Scratch::new(&format!("bench-{figure}"))?;
        let svg = scratch.join("out.svg");
        let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
            .args(["bench", "--quick", "--figure", figure, "--devices=ufs", targets, "--json=-"])
            .arg(format!("--svg={}", svg.display()))
            .arg(scratch.path())
            .output()?;
        let (out, _) = ended(&output, 0)?;
        let report: serde_json::Value = serde_json::from_str(&out)?;
        ensure!(report["left_out"] == serde_json::json!([]), "{report}");
        let settings = if ["barrier-8", "barrier-13"].contains(&figure) { 2 } else { 1 };
        ensure!(rows(&report)?.len() == 5 * settings, "{figure}: {report}");
        for row in rows(&report)? {
            for name in numbers {
                ensure!(row["numbers"][name].as_f64() > Some(0.0), "{figure}: {name} in {row}");
            }
        }
        ensure!(fs::read_to_string(svg)?.contains("<polyline"), "{figure}: an empty picture");
    }
    Ok(())
}

/// Threads that seldom wait, on one file system and on one for each, in RAM.
#[test]
fn parallel_figures_have_a_file_system_for_each_thread() -> Result<()> {
    let how = ["locked:dedicated", "data-journal", "separate", "data-journal:separate"];
    let targets = how.map(|how| format!("fjord-library:compound:{how}"));
    for figure in ["tokubench", "sysbench", "varmail", "fileserver"] {
        let scratch = Scratch::new(&format!("bench-{figure}"))?;
        let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
            .args(["bench", "--quick", "--devices=zram", "--json=-", "--targets"])
            .args([targets.join(","), format!("--figure=parallel-{figure}")])
            .arg(scratch.path())
            .output()?;
        let (out, _) = ended(&output, 0)?;
        ensure_empty(scratch.path())?;
        let report: serde_json::Value = serde_json::from_str(&out)?;
        ensure!(report["left_out"] == serde_json::json!([]), "{report}");
        ensure!(rows(&report)?.len() == 2 * targets.len(), "{figure}: {report}");
        for row in rows(&report)? {
            ensure!(row["numbers"]["operations_per_s"].as_f64() > Some(0.0), "{figure}: {row}");
        }
    }
    Ok(())
}

/// The name alone is enough, and a directory of one's own is a target on the disk.
#[test]
fn neighbours_by_name_and_a_directory_as_target() -> Result<()> {
    let scratch = Scratch::new("bench-neighbours")?;
    let own = tempfile::tempdir()?;
    let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .args(["bench", "neighbours", "--quick", "--devices=disk,ufs", "--targets"])
        .arg(format!("{},fjord-library:compound", own.path().display()))
        .current_dir(scratch.path())
        .output()?;
    let (table, _) = ended(&output, 0)?;
    ensure_empty(scratch.path())?;
    ensure!(fs::read_dir(own.path())?.next().is_none());
    ensure!(table.matches("fjord-library:compound").count() == 2, "{table}");
    ensure!(table.matches(&own.path().display().to_string()).count() == 1, "{table}");
    // The directory may follow, and a figure in virtual time has a name too.
    let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .args(["bench", "--quick", "--devices=disk", "--targets=fjord-library:compound"])
        .arg("neighbours")
        .arg(scratch.path())
        .output()?;
    ended(&output, 0)?;
    ensure_empty(scratch.path())?;
    let figure = || Command::new(env!("CARGO_BIN_EXE_fjord"));
    let (by_name, _) = ended(&figure().args(["bench", "barrier-10"]).output()?, 0)?;
    let (by_option, _) = ended(&figure().args(["bench", "--figure=barrier-10"]).output()?, 0)?;
    ensure!(by_name == by_option, "{by_name}");
    let (_, err) = ended(&bench(Path::new("doodle"), &["/srv"]).output()?, 2)?;
    ensure!(err.contains("ijournaling-6"), "{err}");
    Ok(())
}

#[test]
fn what_cannot_be_measured_is_named_and_the_rest_is_shown() -> Result<()> {
    let scratch = Scratch::new("bench-left-out")?;
    // An option that only fjord's mount sees, and refuses.
    let args = ["--quick", "--figure=neighbours", "--devices=disk", "-o", "frobnicate"];
    let targets = "--targets=fjord-fuse:compound,fjord-library:compound";
    let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .arg("bench")
        .args(args)
        .arg(targets)
        .arg(scratch.path())
        .output()?;
    let (table, err) = ended(&output, 1)?;
    ensure!(
        table.contains("left out: disk, fjord-fuse:compound")
            && table.contains("fjord-library:compound ")
    );
    ensure!(err.contains("frobnicate"), "{err}");
    ensure_empty(scratch.path())
}

#[test]
fn bad_use_is_named() -> Result<()> {
    let scratch = Scratch::new("bench-bad")?;
    let dir = scratch.path();
    for (args, code, words) in [
        (&["--targets=floppy"][..], 2, "kernel-fc"),
        (&["--targets=fjord-fuse:magic"], 2, "there are: compound"),
        (&["--targets=kernel:compound"], 2, "no fsync policies"),
        (&["--targets=fjord-fuse:native"], 2, "only fjord-library"),
        (&["--figure=doodle"], 2, "ijournaling-6"),
        (&["--figure=pbg-2", "--devices=floppy"], 2, "supercap-ssd"),
        (&["--figure=pbg-2", "--size=64M"], 2, "256 MiB"),
        (&["--figure=barrier-9", "--targets=raw"], 2, "virtual time"),
        (&["--quick"], 2, "--figure"),
        (&["--workloads=nap"], 2, "append-fsync"),
        (&["--threads=0"], 2, "at least 1"),
        (&["--seconds=-1"], 2, "length of a turn"),
        (&["--rounds=0"], 2, "one round"),
        (&["--size=1M"], 2, "64 MiB"),
        (&["--size=64M", "--workloads=seq-read"], 2, "must fit"),
        (&["--size=8P"], 1, "bytes free"),
        // Named, so its lack is a failure; the rest is measured all the same.
        (&["--targets=raw,/nonexistent", "--workloads=append-fsync"], 1, "/nonexistent"),
    ] {
        let (_, err) = ended(&bench(dir, args).output()?, code)?;
        ensure!(err.contains(words) && !err.contains("panicked"), "{args:?}: {err}");
        ensure_empty(dir)?;
    }
    let (_, err) = ended(&bench(&dir.join("absent"), &[]).output()?, 1)?;
    ensure!(err.contains("not a directory"), "{err}");
    Ok(())
}

/// What a figure has no use for is refused by name, not ignored.
#[test]
fn options_without_effect_are_named() -> Result<()> {
    let scratch = Scratch::new("bench-no-effect")?;
    let virtual_time = ["bench", "--figure", "barrier-9"];
    for option in [
        "--targets=raw",
        "--devices=ufs",
        "--rounds=0",
        "--seconds=0",
        "--size=64M",
        "--file-size=1M",
        "--files=3",
        "--cache=0",
        "--quick",
        "-onoatime",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
            .args(virtual_time)
            .arg(option)
            .current_dir(scratch.path())
            .output()?;
        let (_, err) = ended(&output, 2)?;
        let name = if option.starts_with("-o") {
            "-o"
        } else {
            option.split('=').next().context("a name")?
        };
        ensure!(err.contains("virtual time") && err.contains(name), "{option}: {err}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .args(virtual_time)
        .args(["--seconds", "0", "--rounds", "0"])
        .current_dir(scratch.path())
        .output()?;
    let (_, err) = ended(&output, 2)?;
    ensure!(err.contains("does not accept --rounds, --seconds"), "{err}");
    for (args, name) in [
        (&["--figure=pbg-2", "--files=3"][..], "--files"),
        (&["--figure=pbg-2", "--file-size=1M"], "--file-size"),
        (&["neighbours", "--threads=2"], "--threads"),
        (&["--cache=1M"], "--cache"),
        (&["--devices=ufs"], "--devices"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_fjord"))
            .arg("bench")
            .args(args)
            .current_dir(scratch.path())
            .output()?;
        let (_, err) = ended(&output, 2)?;
        ensure!(err.contains(name), "{args:?}: {err}");
        ensure_empty(scratch.path())?;
    }
    Ok(())
}

/// How long a long figure takes is told before it begins.
#[test]
fn a_long_figure_is_announced() -> Result<()> {
    let scratch = Scratch::new("bench-long")?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_fjord"))
        .args(["bench", "neighbours", "--seconds=300", "--devices=disk", "--size=256M"])
        .arg("--targets=fjord-library:compound,fjord-library:ijournal")
        .current_dir(scratch.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut said = String::new();
    let mut stderr = child.stderr.take().context("no pipe")?;
    BufReader::new(&mut stderr).read_line(&mut said)?;
    child.kill()?;
    child.wait()?;
    ensure!(said.contains("2 measurements of 300.0 s each: about 10 min"), "{said}");
    Ok(())
}

#[test]
fn an_interrupt_unmounts_and_cleans_up() -> Result<()> {
    let scratch = Scratch::new("bench-interrupt")?;
    let mut command = bench(scratch.path(), &["--rounds=1000", "--targets=raw,fjord-fuse"]);
    let mut child =
        tools::hear_signals(&mut command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    // In the middle of it: with a mount.
    let deadline = Instant::now() + Duration::from_secs(120);
    let is_below = |mount: &MountEntry| mount.mountpoint.starts_with(scratch.path());
    while !mountinfo::mounts()?.iter().any(is_below) {
        ensure!(child.try_wait()?.is_none() && Instant::now() < deadline, "it does not mount");
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: plain system call on a child of ours that has not been waited for.
    let sent = unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    if sent != 0 {
        child.kill()?;
    }
    let (_, err) = ended(&child.wait_with_output()?, 1)?;
    ensure!(err.contains("interrupted"), "{err}");
    ensure_empty(scratch.path())
}
