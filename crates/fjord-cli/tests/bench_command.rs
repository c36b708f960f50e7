//! `fjord bench` with sizes so small that the figures mean nothing: tables and files come out, what
//! cannot be measured is named, and nothing stays behind. Needs root for the mounts.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::image::Scratch;

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
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!mounts.contains(&dir.display().to_string()), "{mounts}");
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

#[test]
fn bad_use_is_named() -> Result<()> {
    let scratch = Scratch::new("bench-bad")?;
    let dir = scratch.path();
    for (args, code, words) in [
        (&["--targets=floppy"][..], 2, "kernel-fc"),
        (&["--workloads=nap"], 2, "append-fsync"),
        (&["--threads=0"], 2, "at least 1"),
        (&["--seconds=-1"], 2, "no time"),
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

#[test]
fn an_interrupt_unmounts_and_cleans_up() -> Result<()> {
    let scratch = Scratch::new("bench-interrupt")?;
    let mut child = bench(scratch.path(), &["--rounds=1000", "--targets=raw,fjord-fuse"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    std::thread::sleep(Duration::from_millis(1500));
    // SAFETY: plain system call on a child of ours that has not been waited for.
    let sent = unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    if sent != 0 {
        child.kill()?;
    }
    let (_, err) = ended(&child.wait_with_output()?, 1)?;
    ensure!(err.contains("interrupted"), "{err}");
    ensure_empty(scratch.path())
}
