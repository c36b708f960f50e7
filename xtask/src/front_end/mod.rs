//! `cargo xtask front-end`: ordinary programs on a mount of fjord and on the kernel's ext4, in turn.
//!
//! Owns the order of the turns. Invariants: of each workload the file systems take their turns directly one after the
//! other, on images of the same size; before the clock starts what the workload before wrote is on the device.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount},
    tools,
};
use serde_json::{Value, json};

use served::Served;
use workloads::{Sizes, WORKLOADS, Workload};

mod counted;
mod served;
mod workloads;

/// Size of each image.
const IMAGE_BYTES: u64 = 4 << 30;

/// Arguments of `cargo xtask front-end`.
#[derive(Debug, Args)]
pub(crate) struct FrontEndArgs {
    /// Directory on the disk under test, with 12 GiB free
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Turns of each file system; medians count
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Files in the large directory; twice as many in that of `creates`
    #[arg(long, default_value_t = 100_000)]
    files: u32,
    /// The tree that is unpacked and read
    #[arg(long, default_value = "/usr/include")]
    tree: PathBuf,
    /// Only these workloads; some use what the one before leaves (touch, creates, untar)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Arguments of a further mount of fjord, as a file system of its own
    #[arg(long, value_name = "ARGS")]
    also: Option<String>,
    /// The fjord program to measure [default: built from this checkout]
    #[arg(long)]
    program: Option<PathBuf>,
    /// A build with the feature lock-stats: each workload runs once more on it, with everything counted and
    /// nothing timed
    #[arg(long, value_name = "PROGRAM")]
    counted: Option<PathBuf>,
    /// Write all figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A file system under test.
enum Mount {
    Fjord(FjordMount),
    Kernel(KernelMount),
}

impl Mount {
    fn dir(&self) -> &Path {
        match self {
            Mount::Fjord(mount) => mount.path(),
            Mount::Kernel(mount) => mount.path(),
        }
    }

    fn served(&self) -> Result<Option<Served>> {
        match self {
            Mount::Fjord(mount) => Served::now(mount.pid(), mount.path()).map(Some),
            Mount::Kernel(_) => Ok(None),
        }
    }

    fn unmount(self) -> Result<()> {
        match self {
            Mount::Fjord(mount) => mount.unmount(),
            Mount::Kernel(mount) => mount.unmount(),
        }
    }
}

/// One file system with what was measured on it.
struct Stand {
    name: &'static str,
    mount: Mount,
    /// By workload: seconds of each round.
    seconds: BTreeMap<&'static str, Vec<f64>>,
    /// By workload: what serving it cost in the last round.
    served: BTreeMap<&'static str, Served>,
}

/// Measures, and prints a table.
pub(crate) fn run(args: &FrontEndArgs) -> Result<()> {
    tools::require_root()?;
    let wanted = |workload: &&Workload| {
        args.only.is_empty() || args.only.iter().any(|name| name == workload.name)
    };
    let workloads: Vec<_> = WORKLOADS.iter().filter(wanted).collect();
    ensure!(!workloads.is_empty(), "no workload has that name: {:?}", args.only);
    let program = match &args.program {
        Some(program) => program.clone(),
        None => crate::bench::build_release()?,
    };
    let scratch = tempfile::Builder::new().prefix("front-end-").tempdir_in(&args.dir)?;
    let tar = scratch.path().join("tree.tar");
    let packed =
        Command::new("tar").arg("-C").arg(&args.tree).arg("-cf").arg(&tar).arg(".").status()?;
    ensure!(packed.success(), "tar does not pack {}", args.tree.display());
    let sizes = Sizes::new(args.files, &args.tree)?;
    let mut stands = stands(scratch.path(), &program, args.also.as_deref())?;
    for round in 0..args.rounds {
        for workload in &workloads {
            for stand in &mut stands {
                turn(stand, workload, &sizes, &tar)
                    .with_context(|| format!("{} on {}", workload.name, stand.name))?;
            }
        }
        eprintln!("round {} of {}", round + 1, args.rounds);
    }
    print!("{}", table(&workloads, &stands, &sizes));
    if let Some(program) = &args.counted {
        let stand = counted::run(scratch.path(), program, &workloads, &sizes, &tar)?;
        print!("{}", counted::table(&workloads, &stand, &sizes));
        stands.push(stand);
    }
    if let Some(path) = &args.json {
        let report = report(args, &workloads, &stands, &sizes);
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    stands.into_iter().try_for_each(|stand| stand.mount.unmount())
}

impl Stand {
    fn new(name: &'static str, mount: Mount) -> Stand {
        Stand { name, mount, seconds: BTreeMap::new(), served: BTreeMap::new() }
    }

    /// A new image in `dir`, mounted with these arguments.
    fn fjord(name: &'static str, program: &Path, dir: &Path, args: &str) -> Result<Stand> {
        let path = dir.join(name);
        let mut mkfs = Command::new(program);
        tools::run(mkfs.args(["mkfs", "-q", "--size", "4G"]).arg(&path))?.ok()?;
        let args: Vec<_> = args.split_whitespace().collect();
        Ok(Stand::new(name, Mount::Fjord(FjordMount::with_program(program, &path, &args)?)))
    }
}

fn stands(dir: &Path, program: &Path, also: Option<&str>) -> Result<Vec<Stand>> {
    let mut stands = vec![Stand::fjord("fjord", program, dir, "")?];
    if let Some(args) = also {
        stands.push(Stand::fjord("fjord-also", program, dir, args)?);
    }
    for (name, features) in [("kernel", &[][..]), ("kernel-fc", &["-O", "fast_commit"])] {
        let path = dir.join(name);
        image::make_sparse(&path, IMAGE_BYTES)?;
        let mut mkfs = tools::command("mke2fs")?;
        mkfs.args(["-q", "-t", "ext4", "-E", "lazy_itable_init=0"]).args(features).arg(&path);
        tools::run(&mut mkfs)?.ok()?;
        stands.push(Stand::new(name, Mount::Kernel(KernelMount::new(&path, "")?)));
    }
    Ok(stands)
}

/// One workload on one file system.
fn turn(stand: &mut Stand, workload: &Workload, sizes: &Sizes, tar: &Path) -> Result<()> {
    let (took, served) = timed(&stand.mount, workload, sizes, tar, || Ok(()), |()| Ok(()))?;
    if let Some(((), served)) = served {
        stand.served.insert(workload.name, served);
    }
    stand.seconds.entry(workload.name).or_default().push(took.as_secs_f64());
    Ok(())
}

/// Runs a workload: how long it took, and on fjord what `end` made of what `begin` began just before it, and what
/// serving cost.
fn timed<B, E>(
    mount: &Mount,
    workload: &Workload,
    sizes: &Sizes,
    tar: &Path,
    begin: impl FnOnce() -> Result<B>,
    end: impl FnOnce(B) -> Result<E>,
) -> Result<(Duration, Option<(E, Served)>)> {
    let script = |text: &str| -> Result<Duration> {
        let mut command = Command::new("bash");
        command.args(["-ec", text]).current_dir(mount.dir());
        command.env("TAR", tar).env("FILES", sizes.files.to_string());
        // git would look for a configuration and for an owner.
        command.env("HOME", "/nonexistent").env("GIT_CONFIG_NOSYSTEM", "1");
        let began = Instant::now();
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        let took = began.elapsed();
        ensure!(status.success(), "the script failed: {text}");
        Ok(took)
    };
    script(workload.before)?;
    rustix::fs::syncfs(File::open(mount.dir())?)?;
    let before = mount.served()?;
    let begun = begin()?;
    let took = script(workload.timed)?;
    let ended = end(begun)?;
    let served = before.zip(mount.served()?).map(|(before, after)| (ended, after.since(&before)));
    script(workload.after)?;
    Ok((took, served))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(workloads: &[&Workload], stands: &[Stand], sizes: &Sizes) -> String {
    let mut text = format!("{:<16}", "µs for each");
    for stand in stands {
        text += &format!("{:>12}", stand.name);
    }
    text += "    fjord ÷ kernel (lowest, highest round)   served: requests, switches, CPU µs for each\n";
    for workload in workloads {
        text += &format!("{:<16}", workload.name);
        let count = f64::from(sizes.count(workload));
        for stand in stands {
            let seconds = &stand.seconds[workload.name];
            text += &format!("{:>12.2}", median(seconds) / count * 1e6);
        }
        let (ratio, low, high) = ratio(workload, stands);
        text += &format!("{ratio:>12.2} ({low:.2}, {high:.2})");
        if let Some(served) = stands[0].served.get(workload.name) {
            text += &format!("   {}", served.show(count));
        }
        text += "\n";
    }
    text
}

/// Speed of the first file system against the better of the kernel's, of medians and of rounds.
fn ratio(workload: &Workload, stands: &[Stand]) -> (f64, f64, f64) {
    let fjord = &stands[0].seconds[workload.name];
    let kernels = || stands.iter().filter(|stand| stand.name.starts_with("kernel"));
    let best = |of: &dyn Fn(&[f64]) -> f64| {
        kernels().map(|stand| of(&stand.seconds[workload.name])).fold(f64::INFINITY, f64::min)
    };
    let rounds = (0..fjord.len()).map(|round| best(&|seconds| seconds[round]) / fjord[round]);
    let (low, high) = rounds
        .fold((f64::INFINITY, 0.0_f64), |(low, high), ratio| (low.min(ratio), high.max(ratio)));
    (best(&median) / median(fjord), low, high)
}

fn report(args: &FrontEndArgs, workloads: &[&Workload], stands: &[Stand], sizes: &Sizes) -> Value {
    let of_workload = |workload: &&Workload| {
        let (ratio, low, high) = ratio(workload, stands);
        let seconds: BTreeMap<_, _> =
            stands.iter().map(|stand| (stand.name, stand.seconds.get(workload.name))).collect();
        let served: BTreeMap<_, _> = stands
            .iter()
            .filter_map(|stand| Some((stand.name, stand.served.get(workload.name)?.to_json())))
            .collect();
        json!({
            "workload": workload.name, "timed": workload.timed, "count": sizes.count(workload), "seconds": seconds,
            "ratio": ratio, "ratio_min": low, "ratio_max": high, "served": served,
        })
    };
    json!({
        "rounds": args.rounds, "files": sizes.files, "tree_files": sizes.tree_files, "also": args.also,
        "workloads": workloads.iter().map(of_workload).collect::<Vec<_>>(),
    })
}
