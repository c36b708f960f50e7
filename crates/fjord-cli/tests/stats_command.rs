//! `fjord stats`: the counters of a mount say what was done on it. Needs root or FUSE for users.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::Scratch,
    tools::{self, Output},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn fjord(args: &[&str], dir: &Path) -> Result<Output> {
    tools::run(Command::new(program()).args(args).arg(dir).stdin(Stdio::null()))
}

fn counters(dir: &Path) -> Result<Value> {
    let out = fjord(&["stats", "--json"], dir)?.ok()?;
    Ok(serde_json::from_str(&out.stdout)?)
}

/// Mounts a new image that has what every policy needs.
fn mounted(scratch: &Scratch, options: &[&str]) -> Result<FjordMount> {
    let image = scratch.join("image");
    File::create(&image)?.set_len(64 << 20)?;
    fjord(&["mkfs", "-O", "fast_commit"], &image)?.ok()?;
    FjordMount::with_program(program(), &image, options)
}

#[test]
fn each_fsync_is_counted_once_and_where_it_belongs() -> Result<()> {
    let scratch = Scratch::new("stats-count")?;
    // The policy of which each fsync flushes.
    let mount = mounted(&scratch, &["--fsync", "compound"])?;
    let before = counters(mount.path())?;
    ensure!(before["fsync"]["calls"] == 0 && before["fsync_policy"].is_string(), "{before}");
    let mut file = File::create(mount.path().join("file"))?;
    for round in 1..=5_u64 {
        file.write_all(b"something new")?;
        file.sync_all()?;
        let now = counters(mount.path())?;
        ensure!(now["fsync"]["calls"] == round, "{now}");
    }
    // Nothing is new.
    file.sync_all()?;
    let now = counters(mount.path())?;
    let count = |name: &str| now["fsync"][name].as_u64().unwrap_or(u64::MAX);
    ensure!(count("calls") == 6 && count("nothing") == 1 && count("failed") == 0, "{now}");
    let fallbacks = now["fsync"]["fallbacks"].as_object().context("no reasons")?;
    let fallbacks: u64 = fallbacks.values().filter_map(Value::as_u64).sum();
    ensure!(count("nothing") + count("data") + count("policy") + fallbacks == 6, "{now}");
    let buckets = now["fsync"]["latency_histogram"].as_array().context("no histogram")?;
    let in_buckets: u64 = buckets.iter().filter_map(|bucket| bucket[1].as_u64()).sum();
    ensure!(in_buckets == 6, "{now}");
    let latency = |name: &str| now["fsync"]["latency_us"][name].as_u64();
    ensure!(latency("p50") > Some(0) && latency("p50") <= latency("max"), "{now}");
    let grew = |part: &str, name: &str| now[part][name].as_u64() > before[part][name].as_u64();
    ensure!(grew("device", "flush_issued_count") && grew("device", "write_bytes"), "{now}");
    // The same from a file and from a directory below, and as a table.
    fs::create_dir(mount.path().join("below"))?;
    for path in ["file", "below"] {
        ensure!(counters(&mount.path().join(path))?["fsync"]["calls"] == 6);
    }
    let table = fjord(&["stats"], mount.path())?.ok()?.stdout;
    for words in ["fsync policy", "6", "nothing to do", "1 (16.7 %)", "p99.9", "commits"] {
        ensure!(table.contains(words), "{words} is missing in {table}");
    }
    drop(file);
    mount.unmount()
}

#[test]
fn every_policy_tells_of_itself() -> Result<()> {
    for policy in fjord::FsyncPolicyKind::ALL {
        let scratch = Scratch::new("stats-policy")?;
        let mount = mounted(&scratch, &["--fsync", policy.name()])?;
        let mut file = File::create(mount.path().join("file"))?;
        file.write_all(b"new")?;
        file.sync_all()?;
        drop(file);
        let now = counters(mount.path())?;
        ensure!(now["fsync_policy"] == policy.name(), "{now}");
        ensure!(now["fsync"]["calls"] == 1, "{now}");
        mount.unmount()?;
    }
    Ok(())
}

/// Without a word the image decides, and the environment before it; `fjord info` foretells it.
#[test]
fn auto_is_what_the_image_is_made_for() -> Result<()> {
    for (options, policy) in [
        (&["-O", "fast_commit"][..], "ijournal"),
        (&["-O", "fast_commit", "--ijournal", "none"], "fast-commit"),
        (&["--ijournal", "none"], "compound"),
    ] {
        let scratch = Scratch::new("stats-auto")?;
        let image = scratch.join("image");
        File::create(&image)?.set_len(64 << 20)?;
        fjord(&[&["mkfs"], options].concat(), &image)?.ok()?;
        let info = fjord(&["info", "--json"], &image)?.ok()?.stdout;
        let info: Value = serde_json::from_str(&info)?;
        ensure!(info["journal"]["fsync_policy"] == policy, "{options:?}: {info}");
        for asked in [&[][..], &["--fsync", "auto"], &["-o", "fsync=auto"]] {
            let mount = FjordMount::with_program(program(), &image, asked)?;
            let now = counters(mount.path())?;
            ensure!(now["fsync_policy"] == policy, "{options:?} {asked:?}: {now}");
            mount.unmount()?;
        }
        if policy != "compound" {
            let mount = FjordMount::with_program(program(), &image, &["-o", "data=journal"])?;
            ensure!(counters(mount.path())?["fsync_policy"] == "compound");
            mount.unmount()?;
        }
    }
    Ok(())
}

#[test]
fn the_environment_names_a_policy() -> Result<()> {
    let scratch = Scratch::new("stats-environment")?;
    let image = scratch.join("image");
    File::create(&image)?.set_len(64 << 20)?;
    fjord(&["mkfs"], &image)?.ok()?;
    let dir = scratch.join("mount");
    fs::create_dir(&dir)?;
    let mount = |name: &str, options: &[&str]| {
        let mut command = Command::new(program());
        command.env("FJORD_FSYNC", name).args(["mount", "--daemon"]).args(options);
        tools::run(command.arg(&image).arg(&dir).stdin(Stdio::null()))
    };
    for (name, options, policy) in
        [("group", &[][..], "group"), ("group", &["--fsync", "compound"], "compound")]
    {
        mount(name, options)?.ok()?;
        let now = counters(&dir)?;
        fjord(&["umount"], &dir)?.ok()?;
        ensure!(now["fsync_policy"] == policy, "{now}");
    }
    let said = mount("sometimes", &[])?;
    ensure!(said.code != Some(0) && said.stderr.contains("FJORD_FSYNC"), "{said:?}");
    Ok(())
}

#[test]
fn watching_shows_what_was_done_meanwhile() -> Result<()> {
    let scratch = Scratch::new("stats-watch")?;
    let mount = mounted(&scratch, &[])?;
    let mut child = Command::new(program())
        .args(["stats", "--watch=0.2"])
        .arg(mount.path())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    let heading = lines.next().context("no heading")??;
    ensure!(heading.contains("fsyncs/s") && heading.contains("fallbacks"), "{heading}");
    let mut file = File::create(mount.path().join("file"))?;
    let mut seen = false;
    for _ in 0..20 {
        file.write_all(b"more")?;
        file.sync_all()?;
        let line = lines.next().context("no line")??;
        let rate: f64 = line.split_whitespace().next().context("an empty line")?.parse()?;
        seen |= rate > 0.0;
    }
    child.kill()?;
    child.wait()?;
    ensure!(seen, "no line tells of an fsync");
    drop(file);
    mount.unmount()
}

#[test]
fn what_is_no_mount_of_fjord_is_named() -> Result<()> {
    let scratch = Scratch::new("stats-bad")?;
    for (args, dir, code, words) in [
        (&["stats"][..], Path::new("/proc"), 1, "not on a fjord mount"),
        (&["stats"], scratch.path(), 1, "not on a fjord mount"),
        (&["stats"], Path::new("/nonexistent"), 1, "/nonexistent"),
        (&["stats", "--watch=0"], scratch.path(), 2, "invalid interval"),
        (&["stats", "--watch=-1"], scratch.path(), 2, "invalid interval"),
    ] {
        let out = fjord(args, dir)?;
        ensure!(out.code == Some(code) && out.stderr.contains(words), "{args:?}: {out:?}");
    }
    Ok(())
}

/// A server that is stopped is waited for, and who waits is told why.
#[test]
fn who_waits_for_a_stopped_server_is_told() -> Result<()> {
    let scratch = Scratch::new("stats-stopped")?;
    let mount = mounted(&scratch, &["-o", "nofuseblk"])?;
    let server = Pid::from_raw(mount.pid() as i32).context("a process")?;
    kill_process(server, Signal::STOP)?;
    let copy = scratch.join("copy.img");
    let commands = [&["stats"][..], &["resize"], &["snapshot"]].map(|args| {
        let mut command = Command::new(program());
        command.args(args).arg(mount.path()).args((args == ["snapshot"]).then_some(&copy));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()
    });
    let mut told = Vec::new();
    let mut children = Vec::new();
    for child in commands {
        let mut child = child?;
        let mut line = String::new();
        BufReader::new(child.stderr.take().context("piped")?).read_line(&mut line)?;
        told.push(line);
        children.push(child);
    }
    kill_process(server, Signal::CONT)?;
    for line in &told {
        ensure!(line.contains("does not answer"), "{told:?}");
    }
    for mut child in children {
        ensure!(child.wait()?.success(), "a command that waited failed");
    }
    mount.unmount()
}
