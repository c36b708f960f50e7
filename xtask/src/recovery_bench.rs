//! `cargo xtask recovery-bench`: dirty images, made clean by fjord, e2fsck and Linux in turn.
//!
//! Owns how the images are made: 302 files written and fsynced through a mount whose process is then killed.
//! Invariant: each turn begins with a copy of the same dirty image and without its pages in memory.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, Scratch},
    tools,
};
use serde_json::{Value, json};

use crate::mkfs_bench::{commit, load_average, spread};

const MARKS: [&str; 2] =
    ["<!-- recovery: written by cargo xtask recovery-bench -->\n", "<!-- end of recovery -->\n"];
const FSYNCS: usize = 302;
const FILE_BYTES: usize = 5000;
/// Kernel, e2fsck and fjord read in sectors of this size.
const SECTOR_BYTES: u64 = 512;

/// Arguments of `cargo xtask recovery-bench`.
#[derive(Debug, Args)]
pub(crate) struct RecoveryBenchArgs {
    /// Directory on the disk to be measured, with 6 GiB free
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Turns of each program; medians count
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// The fjord program to measure [default: built from this checkout]
    #[arg(long)]
    program: Option<PathBuf>,
    /// Write the figures into docs/benchmarks.md, and as JSON beside it
    #[arg(long)]
    document: bool,
}

/// An image to be recovered.
struct Case {
    name: &'static str,
    policy: &'static str,
    mkfs: &'static [&'static str],
    /// Files that lie in pieces among each other, before the fsyncs.
    fragmented: bool,
}

const CASES: [Case; 6] = [
    Case { name: "compound", policy: "compound", mkfs: &[], fragmented: false },
    Case { name: "group", policy: "group", mkfs: &[], fragmented: false },
    Case {
        name: "fast-commit",
        policy: "fast-commit",
        mkfs: &["-O", "fast_commit"],
        fragmented: false,
    },
    Case { name: "ijournal", policy: "ijournal", mkfs: &[], fragmented: false },
    Case {
        name: "compound, log of 1 GiB",
        policy: "compound",
        mkfs: &["-J", "1G"],
        fragmented: false,
    },
    Case { name: "ijournal, fragmented", policy: "ijournal", mkfs: &[], fragmented: true },
];

/// One program's turns on one image.
#[derive(Default)]
struct Turns {
    times_ms: Vec<f64>,
    rss_kib: u64,
    read_bytes: Vec<f64>,
}

/// Measures, prints the figures as JSON, and puts them into the document if that is asked for.
pub(crate) fn run(args: &RecoveryBenchArgs) -> Result<()> {
    tools::require(&["e2fsck", "time", "losetup", "mount", "umount"])?;
    tools::require_root()?;
    ensure!(args.rounds > 0, "at least one round is needed");
    let program = match &args.program {
        Some(program) => fs::canonicalize(program)?,
        None => crate::bench::build_release()?,
    };
    let scratch = tempfile::tempdir_in(&args.dir)?;
    let (mut rows, mut table) = (Vec::new(), String::new());
    let load = load_average()?;
    for case in &CASES {
        let dirty = scratch.path().join("dirty");
        make(case, &program, &dirty).with_context(|| case.name.to_owned())?;
        let mut turns: [(&str, Option<Turns>); 3] = [
            ("fjord recover", Some(Turns::default())),
            ("e2fsck -p", None),
            ("Linux, mount", None),
        ];
        for other in &mut turns[1..] {
            // Linux and e2fsck refuse an image whose journal has i-transactions.
            other.1 = (case.policy != "ijournal").then(Turns::default);
        }
        for _ in 0..args.rounds {
            for (name, turns) in &mut turns {
                let Some(turns) = turns else { continue };
                let copy = scratch.path().join("copy");
                image::copy_sparse(&dirty, &copy)?;
                turns
                    .once(name, &program, &copy)
                    .with_context(|| format!("{}: {name}", case.name))?;
            }
        }
        for (name, turns) in &turns {
            add(case, name, turns.as_ref(), &mut rows, &mut table);
        }
        fs::remove_file(&dirty)?;
    }
    let figures = json!({
        "commit": commit()?, "rounds": args.rounds, "fsyncs": FSYNCS, "image": "30 GiB, sparse",
        "load_average": format!("{load} before, {} after", load_average()?), "rows": rows,
    });
    println!("{}", serde_json::to_string_pretty(&figures)?);
    if args.document {
        let docs = crate::workspace().join("docs");
        let text = format!(
            "{}Commit {}; {} rounds; load average {load}. [JSON](measured/recovery.json)\n\n    \
             cargo xtask recovery-bench --rounds {}\n\n| image | program | median ms | min to max | peak memory, MiB \
             | read, MiB |\n|---|---|---|---|---|---|\n{table}",
            crate::bench::machine()?,
            commit()?,
            args.rounds,
            args.rounds
        );
        crate::bench::put(&docs.join("benchmarks.md"), MARKS, &text)?;
        let json = serde_json::to_string_pretty(&figures)? + "\n";
        fs::write(docs.join("measured/recovery.json"), json)?;
    }
    Ok(())
}

/// Makes a dirty image.
fn make(case: &Case, program: &Path, dirty: &Path) -> Result<()> {
    let mut mkfs = Command::new(program);
    mkfs.args(["mkfs", "-q", "--size", "30G"]).args(case.mkfs).arg(dirty);
    tools::run(&mut mkfs)?.ok()?;
    let mut mount = FjordMount::with_program(program, dirty, &["--fsync", case.policy])?;
    if case.fragmented {
        fragment(mount.path())?;
    }
    for number in 0..FSYNCS {
        let dir = mount.path().join(format!("dir-{}", number % 10));
        fs::create_dir_all(&dir)?;
        let file = fs::File::create(dir.join(format!("file-{number}")))?;
        std::io::Write::write_all(&mut &file, &vec![number as u8; FILE_BYTES])?;
        file.sync_all()?;
    }
    mount.kill()?;
    mount.detach();
    Ok(())
}

/// Leaves free space in pieces: every other one of many small files is removed.
fn fragment(dir: &Path) -> Result<()> {
    let path = |number: usize| dir.join(format!("piece-{number}"));
    for number in 0..6000 {
        fs::write(path(number), vec![1; 8 << 10])?;
    }
    for number in (0..6000).step_by(2) {
        fs::remove_file(path(number))?;
    }
    rustix::fs::syncfs(fs::File::open(dir)?)?;
    Ok(())
}

/// Forgets the pages of all files.
fn drop_pages() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("/proc/sys/vm/drop_caches")
}

impl Turns {
    fn once(&mut self, name: &str, program: &Path, copy: &Path) -> Result<()> {
        drop_pages()?;
        if name.starts_with("Linux") {
            return self.by_linux(copy);
        }
        let mut command = tools::command("time")?;
        command.args(["-f", "%M %I"]);
        match name.starts_with("e2fsck") {
            true => command.arg(tools::find("e2fsck").context("looked for before")?).arg("-p"),
            false => command.arg(program).arg("recover"),
        };
        let began = Instant::now();
        let done = tools::run(command.arg(copy))?.expect_code(&[0, 1])?;
        self.times_ms.push(began.elapsed().as_secs_f64() * 1000.0);
        let last = done.stderr.lines().last().unwrap_or_default();
        let numbers: Vec<u64> = last.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [rss_kib, sectors] = numbers[..] else { bail!("time(1) said {:?}", done.stderr) };
        self.rss_kib = self.rss_kib.max(rss_kib);
        self.read_bytes.push((sectors * SECTOR_BYTES) as f64);
        Ok(())
    }

    /// The mount alone is timed; the device counts what is read.
    fn by_linux(&mut self, copy: &Path) -> Result<()> {
        let mut attach = tools::command("losetup")?;
        let node = tools::run(attach.args(["--find", "--show"]).arg(copy))?.ok()?.stdout;
        let node = node.trim();
        let mounted = Scratch::new("recovery").and_then(|dir| {
            let before = sectors_read(node)?;
            let began = Instant::now();
            let mut mount = tools::command("mount")?;
            tools::run(mount.args(["-t", "ext4", node]).arg(dir.path()))?.ok()?;
            let time_ms = began.elapsed().as_secs_f64() * 1000.0;
            let read = sectors_read(node)? - before;
            image::unmount(dir.path())?;
            Ok((time_ms, read))
        });
        tools::run(tools::command("losetup")?.args(["--detach", node]))?.ok()?;
        let (time_ms, sectors) = mounted?;
        self.times_ms.push(time_ms);
        self.read_bytes.push((sectors * SECTOR_BYTES) as f64);
        Ok(())
    }
}

/// Sectors read from a block device so far.
fn sectors_read(node: &str) -> Result<u64> {
    let name = node.trim_start_matches("/dev/");
    let text = fs::read_to_string(format!("/sys/block/{name}/stat"))?;
    Ok(text.split_whitespace().nth(2).context("a counter")?.parse()?)
}

fn add(case: &Case, name: &str, turns: Option<&Turns>, rows: &mut Vec<Value>, table: &mut String) {
    let Some(turns) = turns else {
        *table += &format!("| {} | `{name}` | refuses | | | |\n", case.name);
        return;
    };
    let (median, least, greatest) = spread(&turns.times_ms);
    let read_mib = spread(&turns.read_bytes).0 / f64::from(1 << 20);
    let rss_mib = turns.rss_kib as f64 / 1024.0;
    let rss = if turns.rss_kib == 0 { "–".to_owned() } else { format!("{rss_mib:.0}") };
    *table += &format!(
        "| {} | `{name}` | {median:.1} | {least:.1} to {greatest:.1} | {rss} | {read_mib:.1} |\n",
        case.name
    );
    rows.push(json!({
        "image": case.name, "program": name, "median_ms": median, "min_ms": least,
        "max_ms": greatest, "times_ms": turns.times_ms, "peak_rss_kib": turns.rss_kib,
        "read_bytes_median": spread(&turns.read_bytes).0,
    }));
}
