//! `fjord stats`: the counters of a mount.

use std::{
    cmp::Reverse,
    fmt::Write as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fjord_fuse::stats::{HealthReport, MountStats};

use crate::{
    failure::{Failure, Result},
    in_use::Waiting,
    output, size,
};

/// Kinds of requests that the table shows.
const REQUEST_KINDS_SHOWN: usize = 5;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
An fsync is served by the mount's policy, by data alone (only contents changed), or falls back to a
full commit for the reasons shown. The latest warnings and errors follow at the end.

Examples:
  fjord stats /mnt
  fjord stats --watch /mnt
  fjord stats --watch=0.2 /mnt
  fjord stats --json /mnt | jq .fsync.fallbacks")]
pub(crate) struct Args {
    /// Mount point of fjord, or a directory below it
    dir: PathBuf,
    /// Print a line every SECONDS seconds with the changes since the last one
    #[arg(
        short,
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1"
    )]
    watch: Option<f64>,
    /// Print JSON; with --watch one document per line
    #[arg(long)]
    json: bool,
    /// Print what locks cost the process, in a build with the feature lock-stats
    #[arg(long, conflicts_with = "watch")]
    locks: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.watch {
        None => {
            let waiting = Waiting::begin(&args.dir);
            let stats = read(&args.dir)?;
            drop(waiting);
            match (args.json, args.locks) {
                (true, _) => output::json(&stats),
                (false, true) => output::print(locks(&stats)?),
                (false, false) => output::print(table(&stats)),
            }
        }
        Some(seconds) => {
            let pause = Duration::try_from_secs_f64(seconds)
                .ok()
                .filter(|pause| !pause.is_zero())
                .ok_or_else(|| {
                    Failure::usage(format!(
                        "invalid interval {seconds}; give a positive number of seconds"
                    ))
                })?;
            watch(args, pause)
        }
    }
}

fn read(dir: &Path) -> Result<MountStats> {
    MountStats::read(dir).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOTTY | libc::ENOSYS | libc::EINVAL) => Failure::new(format!(
            "{} is not on a fjord mount; give the directory named to fjord mount",
            dir.display()
        )),
        _ => Failure::from(e).context(dir.display()),
    })
}

/// Prints the changes of each interval, until the mount or the reader is gone.
fn watch(args: &Args, pause: Duration) -> Result<()> {
    let mut before = read(&args.dir)?;
    for line in 0_u64.. {
        std::thread::sleep(pause);
        let now = read(&args.dir)?;
        let text = match args.json {
            true => serde_json::to_string(&now).map_err(std::io::Error::from)? + "\n",
            // Lines of a terminal.
            false if line.is_multiple_of(20) => heading() + &difference(&before, &now, pause),
            false => difference(&before, &now, pause),
        };
        output::print(text)?;
        before = now;
    }
    Ok(())
}

fn heading() -> String {
    format!(
        "{:>10}{:>10}{:>10}{:>11}{:>10}{:>10}{:>10}{:>12}\n",
        "fsyncs/s", "policy", "data", "fallbacks", "commits", "flushes", "MB/s", "dirty"
    )
}

fn difference(before: &MountStats, now: &MountStats, pause: Duration) -> String {
    let per_s = |count: fn(&MountStats) -> u64| {
        count(now).saturating_sub(count(before)) as f64 / pause.as_secs_f64()
    };
    format!(
        "{:>10.0}{:>10.0}{:>10.0}{:>11.0}{:>10.0}{:>10.0}{:>10.1}{:>12}\n",
        per_s(|stats| stats.fsync.calls),
        per_s(|stats| stats.fsync.policy),
        per_s(|stats| stats.fsync.data),
        per_s(|stats| stats.fsync.fallbacks.values().sum()),
        per_s(|stats| stats.journal.commits),
        per_s(|stats| stats.device.flush_issued_count),
        per_s(|stats| stats.device.write_bytes) / 1e6,
        size::show(now.cache.dirty_bytes)
    )
}

fn table(stats: &MountStats) -> String {
    let fsync = &stats.fsync;
    let share = |count: u64| format!("{count} ({:.1} %)", percent(count, fsync.calls));
    let mut lines: Vec<(String, String)> = vec![
        ("state".into(), state(&stats.health)),
        ("fsync policy".into(), stats.fsync_policy.clone()),
        ("fsyncs".into(), fsync.calls.to_string()),
        ("  by the policy".into(), share(fsync.policy)),
        ("  data alone".into(), share(fsync.data)),
        ("  nothing to do".into(), share(fsync.nothing)),
        ("  fallbacks".into(), share(fsync.fallbacks.values().sum())),
    ];
    let reasons = fsync.fallbacks.iter();
    lines.extend(reasons.map(|(why, count)| (format!("    {why}"), share(*count))));
    if fsync.failed > 0 {
        lines.push(("  failed".into(), fsync.failed.to_string()));
    }
    let barriers = &stats.barriers;
    if barriers.ordered + barriers.as_fsync > 0 {
        let (ordered, as_fsync, waits) = (barriers.ordered, barriers.as_fsync, barriers.waits);
        let mib = barriers.bytes_max >> 20;
        let calls =
            format!("{ordered}, and {as_fsync} as fsyncs; {waits} waits, with {mib} MiB in flight");
        lines.push(("barrier calls".into(), calls));
    }
    if barriers.fsyncs > 0 {
        let calls = format!("{} calls, which made nothing durable (order_only)", barriers.fsyncs);
        lines.push(("fsync for order".into(), calls));
    }
    let mut latency = String::new();
    for name in ["p50", "p95", "p99", "p99_9", "max"] {
        let us = fsync.latency_us.get(name).copied().unwrap_or(0);
        let _ = write!(
            latency,
            "{}{us} {}",
            if latency.is_empty() { "" } else { ", " },
            name.replace('_', ".")
        );
    }
    let own_log = format!(
        "{}, {} of file data",
        per(fsync.log_blocks, fsync.policy),
        size::show(fsync.inline_data_bytes)
    );
    let journal = &stats.journal;
    let logged = journal.metadata_blocks + journal.data_blocks + journal.control_blocks;
    let device = &stats.device;
    lines.extend([
        ("  latency, µs".into(), latency),
        ("  own log, blocks".into(), own_log),
        ("commits".into(), journal.commits.to_string()),
        ("  blocks".into(), per(logged, journal.commits)),
        ("  flushes".into(), journal.flushes.to_string()),
        ("  checkpointed".into(), format!("{} blocks", journal.checkpoint_blocks)),
        (
            "  page conflicts".into(),
            format!(
                "{} of {} blocks that joined a transaction",
                journal.conflicting_blocks, journal.joined_blocks
            ),
        ),
    ]);
    if let Some(areas) = &stats.areas {
        let blocks = u64::from(areas.count) * u64::from(areas.area_blocks);
        let live = format!("{} of {blocks} blocks live", areas.live_blocks);
        lines.push(("areas".into(), format!("{}, {live}", areas.count)));
        let written = format!("{}, full {} times", areas.transactions, areas.full);
        lines.push(("  i-transactions".into(), written));
    }
    lines.extend([
        (
            "cache".into(),
            format!(
                "{} of pages ({} dirty), {} of metadata",
                size::show(stats.cache.pages_bytes),
                size::show(stats.cache.dirty_bytes),
                size::show(stats.cache.metadata_bytes)
            ),
        ),
        (
            "writes".into(),
            format!(
                "{} ({}), {} with FUA",
                device.write_count,
                size::show(device.write_bytes),
                device.fua_count
            ),
        ),
        ("reads".into(), format!("{} ({})", device.read_count, size::show(device.read_bytes))),
        (
            "flushes".into(),
            format!("{} sent, {} asked for", device.flush_issued_count, device.flush_count),
        ),
    ]);
    if let Some(since) = stats.cache.full_below_since {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (ago, waiting) = (now.saturating_sub(since), size::show(stats.cache.dirty_bytes));
        let state = format!("since {since} ({ago} s ago), {waiting} waiting for space");
        lines.push(("host disk full".into(), state));
    }
    if device.error_count > 0 {
        lines.push(("device errors".into(), device.error_count.to_string()));
    }
    lines.push(("requests".into(), requests(stats)));
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{name:<22}{value}\n")).collect();
    for event in &stats.health.events {
        let (time, severity) = (output::seconds(event.time), &event.severity);
        let again =
            if event.count > 1 { format!(" ({} times)", event.count) } else { String::new() };
        let _ = writeln!(text, "{time} UTC {severity}: {}{again}", event.message);
    }
    text
}

/// How many there were, and of the most frequent kinds.
fn requests(stats: &MountStats) -> String {
    let mut kinds: Vec<_> = stats.requests.iter().collect();
    kinds.sort_by_key(|(_, count)| Reverse(*count));
    let all: u64 = stats.requests.values().sum();
    let kinds =
        kinds.iter().take(REQUEST_KINDS_SHOWN).map(|(kind, count)| format!("{count} {kind}"));
    format!("{all}: {}", kinds.collect::<Vec<_>>().join(", "))
}

fn locks(stats: &MountStats) -> Result<String> {
    let locks = stats.locks.as_ref().ok_or_else(|| {
        Failure::new(
            "the fjord that serves this mount does not count locks; build one with `cargo build \
             --release --features lock-stats --package fjord-cli`, and mount with it",
        )
    })?;
    let mut text = format!(
        "{:<22}{:>12}{:>12}{:>14}{:>14}{:>14}\n",
        "lock", "taken", "waited", "waited ms", "held ms", "longest µs"
    );
    for lock in locks {
        let _ = writeln!(
            text,
            "{:<22}{:>12}{:>12}{:>14.1}{:>14.1}{:>14.0}",
            lock.lock,
            lock.taken,
            lock.waited,
            lock.waited_ns as f64 / 1e6,
            lock.held_ns as f64 / 1e6,
            lock.held_ns_max as f64 / 1e3
        );
    }
    Ok(text)
}

/// Whether the file system is writable, and if not, since when and why.
fn state(health: &HealthReport) -> String {
    match &health.failure {
        Some(failure) => {
            let since = output::seconds(failure.time);
            format!("read-only since {since} UTC: {}", failure.error)
        }
        None if health.read_only => "mounted read-only".into(),
        None => "read-write".into(),
    }
}

fn percent(count: u64, all: u64) -> f64 {
    count as f64 / all.max(1) as f64 * 100.0
}

/// A sum and a mean.
fn per(sum: u64, count: u64) -> String {
    match count {
        0 => sum.to_string(),
        _ => format!("{sum} ({:.1} each)", sum as f64 / count as f64),
    }
}
