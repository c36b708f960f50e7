//! `fjord bench`: compare fjord with the raw device, the kernel's ext4 and fuse2fs, which take
//! turns in one run; and figures, measured or in virtual time.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use fjord::ImageName;
use fjord_bench::{
    BenchError, DeviceKind, Experiment, ExperimentOptions, ExperimentReport, Figure, LockOptions,
    Options, Progress, Report, Target, Workload,
};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    failure::{Context, Failure, Result},
    output, size,
};

const HELP: &str = "\
Targets:
  raw            O_DIRECT pwrite and fdatasync on a preallocated file: the lower bound
  fjord-block    the same through fjord's block layer
  fjord-library  fjord as a library, on an image file
  fjord-fuse     fjord mounted
                 both take an fsync policy and options: fjord-fuse:compound,
                 fjord-library:compound:epoch:dual, fjord-fuse:ijournal:nolow_latency,
                 fjord-library:compound:locked:dedicated:data-journal;
                 fjord-library:separate is a file system for each thread (parallel-*)
  kernel         the kernel's ext4 on a loop device (root)
  kernel-fc      the same with fast_commit (root)
  kernel-nobarrier, kernel-data-journal
                 the same mounted with nobarrier, with data=journal (root)
  fuse2fs        if installed
  /any/path      a directory of your choice, such as one on ext4 or xfs

Workloads:
  append-fsync create-fsync overwrite-fdatasync varmail seq-write seq-read untar create-unlink
  parallel-read open-huge

DIR may be a pool of a Ceph cluster, rbd:POOL[?conf=FILE]. raw is then librbd's own calls, and the
kernel's ext4 lies on a loop device over the file that rbd-fuse makes of an image.

Figures in virtual time on simulated devices, in seconds, independent of this machine:
  barrier-9      four ways to order 4 KiB random writes: throughput (FAST '18, Fig. 9)
  barrier-10     the same: queue depth over time (Fig. 10)
  sync-latency   latency of a thread while a writer saturates the device

Measured figures, every fsync policy and the kernel's ext4; minutes each:
  ijournaling-6     fsync latency during a sequential write (ATC '17, Fig. 6)
  ijournaling-7     … by the writer's bandwidth (Fig. 7)
  ijournaling-8     … with and without delayed allocation (Fig. 8)
  ijournaling-9     append and fsync by threads (Fig. 9)
  pbg-2, pbg-3      fsync during a copy in another directory, mean and over time
  fastcommit-table  fs_mark with an fsync after every write
  neighbours        latency of a probe, alone and with eight writers
  fallbacks         how often programs make a policy fall back to a full commit
  barrier-8         journal commits, dispatch to surface (FAST '18, Fig. 8)
  barrier-table2    latency of append and fsync (Table 2)
  barrier-11        context switches of a sync call (Fig. 11)
  barrier-12        queue depth during sync calls (Fig. 12)
  barrier-13        append and fsync, a file per thread (Fig. 13)
  barrier-14        varmail, and sysbench's OLTP-insert on MariaDB: durability, and
                    order only (Fig. 14)
  parallel-tokubench, parallel-sysbench, parallel-varmail, parallel-fileserver
                    one to 72 threads, ordered and with data=journal (FAST '18,
                    parallel journaling)

In builds with the feature lock-stats, in memory:
  locks             what locks cost per operation, and how far they let it scale

Their devices: disk (an image file in DIR), zram (root), and the simulated ufs, plain-ssd,
supercap-ssd, nvme and p3700, in real time. --targets fjord-library includes all its policies.

Images are made in a new directory in DIR, on the disk under test, and removed at the end.
Targets take turns, so ratios within one run are comparable; absolute figures of two runs are not.

Examples:
  fjord bench
  fjord bench --threads 1,8 --json result.json --svg latency.svg /srv
  fjord bench --targets fjord-fuse,kernel --workloads seq-write,seq-read --file-size 4G --size 6G
  fjord bench --figure barrier-9 --svg figure.svg
  fjord bench --figure ijournaling-6 --devices disk,plain-ssd --seconds 20 --json - /srv
  fjord bench neighbours /srv
  fjord bench --targets raw,fjord-library:ijournal,kernel rbd:pool";

const FILE_SIZE_BYTES: u64 = 256 << 20;
const FILE_COUNT: u32 = 20_000;
const CACHE_BYTES: u64 = 256 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Figure to make, as --figure, or directory on the disk under test [default: .]
    #[arg(value_name = "FIGURE|DIR")]
    first: Option<PathBuf>,
    /// Directory on the disk under test, after the name of a figure
    #[arg(value_name = "DIR", conflicts_with = "figure")]
    second: Option<PathBuf>,
    /// Targets, in the order of the table; by default all that this machine supports
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = target)]
    targets: Vec<Target>,
    /// Workloads [default: append-fsync,overwrite-fdatasync]
    #[arg(short, long, value_name = "LIST", value_delimiter = ',')]
    workloads: Vec<String>,
    /// Thread counts of the fsync workloads and of parallel-read [default: 1; 1,2,4 for reads]
    #[arg(short = 'j', long, value_name = "LIST", value_delimiter = ',')]
    threads: Vec<usize>,
    /// Rounds; the table shows medians [default: 5; 1 for figures]
    #[arg(short, long, value_name = "COUNT")]
    rounds: Option<u32>,
    /// Length of a round of the fsync workloads, or of a point of a figure [default: 1; figures
    /// have their own]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Size of each image; every target has one [default: 512M; 2G for figures, one per device]
    #[arg(short, long, value_parser = size::parse)]
    size: Option<u64>,
    /// Size of each image's journal, in whole MiB [default: what mke2fs takes for the size of the image]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    journal_size: Option<u64>,
    /// Size of the file of seq-write and seq-read [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    file_size: Option<u64>,
    /// Number of files of untar and create-unlink [default: 20000]
    #[arg(long, value_name = "COUNT")]
    files: Option<u32>,
    /// Options of fjord's mount, as in `fjord mount -o`
    #[arg(short, value_name = "LIST")]
    options: Vec<String>,
    /// Make a figure instead
    #[arg(long, value_name = "NAME", value_parser = figure, conflicts_with_all = ["workloads", "threads"])]
    figure: Option<Chosen>,
    /// Devices of a figure [default: the paper's, and the disk]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = device)]
    devices: Vec<DeviceKind>,
    /// Memory for cached data in a figure: fjord's cache, and the kernel's dirty pages of the
    /// device; 0 keeps the defaults of both [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    cache: Option<u64>,
    /// Run a figure in seconds, as a test; its numbers are meaningless
    #[arg(long)]
    quick: bool,
    /// Write all figures to this file; - for standard output, instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plot the latency distributions, or the figure, to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// What `--figure` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chosen {
    /// In virtual time.
    Modelled(Figure),
    Measured(Experiment),
    /// What locks cost.
    Locks,
}

/// The name of [`Chosen::Locks`].
const LOCKS: &str = "locks";

fn target(name: &str) -> Result<Target, String> {
    Target::from_name(name).map_err(|e| e.to_string())
}

fn device(name: &str) -> Result<DeviceKind, String> {
    DeviceKind::from_name(name).map_err(|e| e.to_string())
}

fn figure(name: &str) -> Result<Chosen, String> {
    if let Some(experiment) = Experiment::from_name(name) {
        return Ok(Chosen::Measured(experiment));
    }
    if name == LOCKS {
        return Ok(Chosen::Locks);
    }
    let measured = Experiment::ALL.map(Experiment::name).join(", ");
    let figure =
        Figure::from_name(name).map_err(|e| format!("{e}; measured: {measured}, {LOCKS}"))?;
    Ok(Chosen::Modelled(figure))
}

impl From<BenchError> for Failure {
    fn from(e: BenchError) -> Failure {
        match e {
            BenchError::Usage(_) => Failure::usage(e.to_string()),
            _ => Failure::new(e.to_string()),
        }
    }
}

impl Args {
    /// The requested figure, and the directory: by its option, as the only workload, or as the first
    /// argument, unless a directory has that name.
    fn chosen(&self) -> Result<(Option<Chosen>, &Path)> {
        let here = Path::new(".");
        let first = self.first.as_deref();
        if let Some(second) = &self.second {
            let name = first.unwrap_or(here).to_string_lossy();
            let chosen = figure(&name).map_err(Failure::usage)?;
            return Ok((Some(chosen), second));
        }
        let dir = first.unwrap_or(here);
        let name = first.filter(|first| !first.exists()).and_then(Path::to_str);
        Ok(match (self.figure, &*self.workloads, name.map(figure)) {
            (Some(chosen), ..) => (Some(chosen), dir),
            (None, [], Some(Ok(chosen))) => (Some(chosen), here),
            (None, [only], _) => (Experiment::from_name(only).map(Chosen::Measured), dir),
            _ => (None, dir),
        })
    }

    fn turn(&self) -> Result<Option<Duration>> {
        let turn = |seconds: f64| {
            Duration::try_from_secs_f64(seconds).map_err(|_| {
                Failure::usage(format!(
                    "invalid length of a turn: {seconds}; give a number of seconds"
                ))
            })
        };
        self.seconds.map(turn).transpose()
    }

    fn mount_args(&self) -> Vec<String> {
        self.options.iter().flat_map(|list| ["-o".into(), list.clone()]).collect()
    }

    /// Refuses those of these options that are given; `what` says why they do not apply.
    fn refuse(&self, what: &str, options: &[(&str, bool)]) -> Result<()> {
        let given = options.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name);
        let given: Vec<_> = given.collect();
        if given.is_empty() {
            return Ok(());
        }
        Err(Failure::usage(format!("{what} and does not accept {}", given.join(", "))))
    }

    fn options(&self, dir: &Path) -> Result<Options> {
        self.refuse(
            "this is not a figure (see --figure)",
            &[
                ("--devices", !self.devices.is_empty()),
                ("--cache", self.cache.is_some()),
                ("--quick", self.quick),
            ],
        )?;
        let mut options = Options {
            sequential_bytes: self.file_size.unwrap_or(FILE_SIZE_BYTES),
            file_count: self.files.unwrap_or(FILE_COUNT),
            journal_size_bytes: self.journal_size,
            fjord_program: fjord_program()?,
            fjord_mount_args: self.mount_args(),
            ..Options::new(dir)
        };
        if !self.workloads.is_empty() {
            let workloads = self.workloads.iter().map(|name| Workload::from_name(name));
            options.workloads = workloads.collect::<Result<_, BenchError>>()?;
        }
        options.round_count = self.rounds.unwrap_or(options.round_count);
        options.turn = self.turn()?.unwrap_or(options.turn);
        options.image_size_bytes = self.size.unwrap_or(options.image_size_bytes);
        if !self.targets.is_empty() {
            options.targets.clone_from(&self.targets);
        }
        if !self.threads.is_empty() {
            options.fsync_threads.clone_from(&self.threads);
            options.read_threads.clone_from(&self.threads);
        }
        Ok(options)
    }

    fn experiment_options(&self, dir: &Path) -> Result<ExperimentOptions> {
        self.refuse(
            "a figure has its own workload",
            &[
                ("--threads", !self.threads.is_empty()),
                ("--file-size", self.file_size.is_some()),
                ("--files", self.files.is_some()),
                ("--journal-size", self.journal_size.is_some()),
            ],
        )?;
        Ok(ExperimentOptions {
            targets: self.targets.clone(),
            devices: self.devices.clone(),
            round_count: self.rounds,
            turn: self.turn()?,
            quick: self.quick,
            image_size_bytes: self.size,
            cache_bytes: Some(self.cache.unwrap_or(CACHE_BYTES)).filter(|bytes| *bytes > 0),
            fjord_program: fjord_program()?,
            fjord_mount_args: self.mount_args(),
            ..ExperimentOptions::new(dir)
        })
    }
}

fn fjord_program() -> Result<PathBuf> {
    std::env::current_exe().context("finding the fjord program")
}

/// Set by SIGINT and SIGTERM.
static STOP: AtomicBool = AtomicBool::new(false);

/// Has SIGINT and SIGTERM set a flag, so that mounts and images are removed before the process
/// ends.
fn catch_signals() {
    extern "C" fn stop(_signal: libc::c_int) {
        STOP.store(true, Ordering::Relaxed);
    }
    let handler: extern "C" fn(libc::c_int) = stop;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (chosen, dir) = args.chosen()?;
    match chosen {
        Some(Chosen::Modelled(figure)) => show_figure(args, figure, dir),
        Some(Chosen::Locks) => show_locks(args, dir),
        Some(Chosen::Measured(experiment)) => {
            let report = in_new_dir(dir, |work| {
                let options = args.experiment_options(work)?;
                with_progress(|step| fjord_bench::run_experiment(experiment, &options, step))
            })?;
            show_experiment(args, &report)
        }
        None => {
            let (dir, pool) = place(dir)?;
            let report = in_new_dir(&dir, |work| {
                let options = Options { pool: pool.clone(), ..args.options(work)? };
                with_progress(|step| fjord_bench::run(&options, step))
            })?;
            show(args, &report)
        }
    }
}

/// The directory to work in, and the pool for the images if `dir` is one.
fn place(dir: &Path) -> Result<(PathBuf, Option<String>)> {
    match ImageName::parse(dir).remote()? {
        Some((_, pool)) => Ok((std::env::temp_dir(), Some(pool.to_owned()))),
        None => Ok((dir.to_owned(), None)),
    }
}

/// Makes a directory for images and mounts in `dir` and removes it in the end.
fn in_new_dir<T>(dir: &Path, measure: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let dir = std::path::absolute(dir)?;
    if !dir.is_dir() {
        return Err(Failure::new(format!(
            "{} is not a directory; give one on the disk under test",
            dir.display()
        )));
    }
    // The process ID distinguishes concurrent runs.
    let work = dir.join(format!("fjord-bench.{}", std::process::id()));
    fs::create_dir(&work).context(format!("making {}", work.display()))?;
    catch_signals();
    let result = measure(&work);
    let removed = fs::remove_dir_all(&work);
    let report = result?;
    removed.context(format!("removing {}", work.display()))?;
    Ok(report)
}

/// A run of this length is announced.
const LONG: Duration = Duration::from_secs(60);

/// How long a run takes, as far as it is known before.
fn duration_notice(progress: &Progress) -> String {
    let minutes = progress.measured_time.as_secs().div_ceil(60);
    format!(
        "{} measurements of {:.1} s each: about {minutes} min, and the time to make and mount their \
         images; --seconds, --devices and --targets shorten it, --quick only tries it",
        progress.total_count,
        progress.measured_time.as_secs_f64() / progress.total_count.max(1) as f64
    )
}

type Step<'a> = &'a mut dyn FnMut(&Progress) -> ControlFlow<()>;

/// Shows the progress of a run, and ends it on SIGINT and SIGTERM.
fn with_progress<T>(run: impl FnOnce(Step<'_>) -> Result<T, BenchError>) -> Result<T> {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}") {
        bar.set_style(style);
    }
    let mut is_told = false;
    let result = run(&mut |progress| {
        if !std::mem::replace(&mut is_told, true) && progress.measured_time >= LONG {
            bar.suspend(|| output::complain(duration_notice(progress)));
        }
        bar.set_length(progress.total_count);
        bar.set_position(progress.done_count);
        bar.set_message(progress.what.clone());
        if STOP.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish_and_clear();
    Ok(result?)
}

fn show_figure(args: &Args, figure: Figure, dir: &Path) -> Result<()> {
    args.refuse(
        &format!("{} runs in virtual time", figure.name()),
        &[
            ("--targets", !args.targets.is_empty()),
            ("--devices", !args.devices.is_empty()),
            ("--rounds", args.rounds.is_some()),
            ("--seconds", args.seconds.is_some()),
            ("--size", args.size.is_some()),
            ("--file-size", args.file_size.is_some()),
            ("--files", args.files.is_some()),
            ("--cache", args.cache.is_some()),
            ("--quick", args.quick),
            ("-o", !args.options.is_empty()),
            ("a directory", dir != Path::new(".")),
        ],
    )?;
    let report = fjord_bench::run_figure(figure)?;
    put(args.json.as_deref(), report.to_json(), report.to_table())?;
    if let Some(path) = &args.svg {
        report.write_svg(path)?;
    }
    Ok(())
}

fn show_locks(args: &Args, dir: &Path) -> Result<()> {
    args.refuse(
        "locks runs in memory",
        &[
            ("--targets", !args.targets.is_empty()),
            ("--devices", !args.devices.is_empty()),
            ("--size", args.size.is_some()),
            ("--file-size", args.file_size.is_some()),
            ("--files", args.files.is_some()),
            ("--cache", args.cache.is_some()),
            ("--svg", args.svg.is_some()),
            ("-o", !args.options.is_empty()),
            ("a directory", dir != Path::new(".")),
        ],
    )?;
    let mut options = LockOptions::default();
    options.round_count = args.rounds.unwrap_or(options.round_count);
    options.turn = args.turn()?.unwrap_or(options.turn);
    if args.quick {
        options.turn = Duration::from_millis(20);
    }
    let report = fjord_bench::run_locks(&options)?;
    put(args.json.as_deref(), report.to_json(), report.to_table())
}

fn show_experiment(args: &Args, report: &ExperimentReport) -> Result<()> {
    put(args.json.as_deref(), report.to_json(), report.to_table())?;
    if let Some(path) = &args.svg {
        report.write_svg(path)?;
    }
    if report.left_out.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("left out: {}", report.left_out.join("; "))))
}

/// Prints the table and writes the JSON where it is wanted.
fn put(json_path: Option<&Path>, json: String, table: String) -> Result<()> {
    match json_path {
        Some(path) if path.as_os_str() == "-" => output::print(json + "\n"),
        Some(path) => {
            fs::write(path, json + "\n").context(format!("writing {}", path.display()))?;
            output::print(table)
        }
        None => output::print(table),
    }
}

fn show(args: &Args, report: &Report) -> Result<()> {
    put(args.json.as_deref(), report.to_json(), report.to_table())?;
    if let Some(path) = &args.svg {
        report.write_latency_svg(path)?;
    }
    if report.cases.is_empty() && report.opens.is_empty() {
        return Err(Failure::new(format!(
            "nothing could be measured: {}",
            report.skipped.join("; ")
        )));
    }
    // A target that was named explicitly must be measured.
    if !args.targets.is_empty() && !report.skipped.is_empty() {
        return Err(Failure::new(format!("left out: {}", report.skipped.join("; "))));
    }
    Ok(())
}
