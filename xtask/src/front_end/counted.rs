//! A round in which everything is counted and nothing is timed.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Mount, Sizes, Stand, Workload, timed};

/// System calls, and threads that the process wakes.
const EVENTS: &str = "raw_syscalls:sys_enter,sched:sched_wakeup";
/// perf(1) has attached itself by then.
const ATTACHED_AFTER: Duration = Duration::from_millis(500);

/// Runs each workload once on a mount of `program`, which counts locks and allocations.
pub(super) fn run(
    dir: &Path,
    program: &Path,
    workloads: &[&Workload],
    sizes: &Sizes,
    tar: &Path,
) -> Result<Stand> {
    let mut stand = Stand::fjord("counted", program, dir, "")?;
    let Mount::Fjord(mount) = &stand.mount else { unreachable!("it is fjord's") };
    let pid = mount.pid();
    for workload in workloads {
        let counted = timed(&stand.mount, workload, sizes, tar, || perf(pid), calls);
        let (_, served) = counted.with_context(|| format!("{} counted", workload.name))?;
        let (calls, served) = served.context("a mount of fjord")?;
        stand.served.insert(workload.name, served.with_calls(calls));
    }
    Ok(stand)
}

/// Counts for all threads of a process, those to come included.
fn perf(pid: u32) -> Result<Child> {
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x,", "-e", EVENTS, "-p", &pid.to_string()]);
    let child = perf.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let child = child.context("perf(1) counts system calls: apt-get install linux-perf")?;
    thread::sleep(ATTACHED_AFTER);
    Ok(child)
}

/// Ends it: system calls, and threads woken.
fn calls(perf: Child) -> Result<(u64, u64)> {
    let ended = Command::new("kill").args(["-s", "INT", &perf.id().to_string()]).status()?;
    ensure!(ended.success(), "perf has ended before");
    let said = String::from_utf8(perf.wait_with_output()?.stderr)?;
    let count = |event: &str| {
        let line = said.lines().find(|line| line.contains(event));
        let count = line.and_then(|line| line.split(',').next()?.parse::<u64>().ok());
        count.with_context(|| format!("perf stat does not count {event}: {said}"))
    };
    Ok((count("sys_enter")?, count("sched_wakeup")?))
}

/// What serving cost, for each file, write or value.
pub(super) fn table(workloads: &[&Workload], stand: &Stand, sizes: &Sizes) -> String {
    let mut text = format!("{:<16}", "for each");
    let columns = ["requests", "calls", "wakes", "switches", "KiB", "allocs", "locks", "fs locks"];
    columns.iter().for_each(|column| text += &format!("{column:>10}"));
    text.push('\n');
    for workload in workloads {
        text += &format!("{:<16}", workload.name);
        let served = &stand.served[workload.name];
        let counts = served.counts(f64::from(sizes.count(workload)));
        counts.iter().for_each(|count| text += &format!("{count:>10.2}"));
        text.push('\n');
    }
    text
}
