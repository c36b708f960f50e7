//! `fjord bench`: fjord beside the raw device, the kernel's ext4 and fuse2fs, in turn in one run;
//! and figures of papers on modelled devices.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use fjord_bench::{BenchError, Figure, Options, Report, Target, Workload};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    failure::{Context, Failure, Result},
    output, size,
};

const HELP: &str = "\
Targets:
  raw            O_DIRECT pwrite and fdatasync on a preallocated file: the floor
  fjord-block    the same through fjord's block layer
  fjord-library  fjord inside the program, on an image file
  fjord-fuse     fjord mounted
  kernel         the kernel's ext4 on a loop device (root)
  kernel-fc      the same with fast_commit (root)
  fuse2fs        where it is installed
  /any/path      a directory of your choice, such as one on ext4 or xfs

Workloads:
  append-fsync overwrite-fdatasync seq-write seq-read untar create-unlink parallel-read open-huge

Figures (virtual time on modelled devices, nothing of this machine is measured):
  barrier-9      four ways to order 4 KiB random writes: throughput (FAST '18, Fig. 9)
  barrier-10     the same: queue depth over time (Fig. 10)

Images are made in a new directory in DIR, on the disk to be measured, and removed at the end.
Targets take turns, so ratios of one run compare; absolute figures of two runs do not.

Examples:
  fjord bench
  fjord bench --threads 1,8 --json result.json --svg latency.svg /srv
  fjord bench --targets fjord-fuse,kernel --workloads seq-write,seq-read --file-size 4G --size 6G
  fjord bench --figure barrier-9 --svg figure.svg";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Directory on the disk to be measured
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Targets, in the order of the table; all that this machine has when not given
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = target)]
    targets: Vec<Target>,
    /// What to measure
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = workload)]
    #[arg(default_value = "append-fsync,overwrite-fdatasync")]
    workloads: Vec<Workload>,
    /// Thread counts of the fsync workloads and of parallel-read [default: 1; 1,2,4 for reads]
    #[arg(short = 'j', long, value_name = "LIST", value_delimiter = ',')]
    threads: Vec<usize>,
    /// How often each target takes its turn; medians are shown
    #[arg(short, long, value_name = "COUNT", default_value_t = 5)]
    rounds: u32,
    /// How long a turn of the fsync workloads lasts
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// Size of each image; every target has one
    #[arg(short, long, value_parser = size::parse, default_value = "512M")]
    size: u64,
    /// Size of the file of seq-write and seq-read
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "256M")]
    file_size: u64,
    /// Files of untar and create-unlink
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    files: u32,
    /// Options of fjord's mount, as in `fjord mount -o`
    #[arg(short, value_name = "LIST")]
    options: Vec<String>,
    /// Redo a figure of a paper on modelled devices instead
    #[arg(long, value_name = "NAME", value_parser = figure)]
    #[arg(conflicts_with_all = ["targets", "workloads", "dir", "options", "threads"])]
    figure: Option<Figure>,
    /// Write all figures to this file; - for standard output, instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plot the latency distributions, or the figure, to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

fn target(name: &str) -> Result<Target, String> {
    Target::from_name(name).map_err(|e| e.to_string())
}

fn figure(name: &str) -> Result<Figure, String> {
    Figure::from_name(name).map_err(|e| e.to_string())
}

fn workload(name: &str) -> Result<Workload, String> {
    Workload::from_name(name).map_err(|e| e.to_string())
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
    fn options(&self, dir: &Path) -> Result<Options> {
        let turn = Duration::try_from_secs_f64(self.seconds)
            .map_err(|_| Failure::usage(format!("{} is no time for a turn", self.seconds)))?;
        let mut options = Options {
            workloads: self.workloads.clone(),
            round_count: self.rounds,
            turn,
            image_size_bytes: self.size,
            sequential_bytes: self.file_size,
            file_count: self.files,
            fjord_program: std::env::current_exe().context("finding the fjord program")?,
            ..Options::new(dir)
        };
        if !self.targets.is_empty() {
            options.targets.clone_from(&self.targets);
        }
        if !self.threads.is_empty() {
            options.fsync_threads.clone_from(&self.threads);
            options.read_threads.clone_from(&self.threads);
        }
        for list in &self.options {
            options.fjord_mount_args.extend(["-o".into(), list.clone()]);
        }
        Ok(options)
    }
}

/// Set when the user wants to stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// Turns SIGINT and SIGTERM into a wish to stop, so that mounts and images go away first.
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
    if let Some(figure) = args.figure {
        return show_figure(args, figure);
    }
    let dir = std::path::absolute(&args.dir)?;
    if !dir.is_dir() {
        return Err(Failure::new(format!(
            "{} is not a directory; name one on the disk to be measured",
            dir.display()
        )));
    }
    // The process ID tells runs side by side apart.
    let work = dir.join(format!("fjord-bench.{}", std::process::id()));
    let options = args.options(&work)?;
    fs::create_dir(&work).context(format!("making {}", work.display()))?;
    catch_signals();
    let result = measure(&options);
    let removed = fs::remove_dir_all(&work);
    let report = result?;
    removed.context(format!("removing {}", work.display()))?;
    show(args, &report)
}

fn measure(options: &Options) -> Result<Report> {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}") {
        bar.set_style(style);
    }
    let result = fjord_bench::run(options, &mut |progress| {
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

fn show_figure(args: &Args, figure: Figure) -> Result<()> {
    let report = fjord_bench::run_figure(figure)?;
    put(args.json.as_deref(), report.to_json(), report.to_table())?;
    if let Some(path) = &args.svg {
        report.write_svg(path)?;
    }
    Ok(())
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
    // Who names a target counts on its figures.
    if !args.targets.is_empty() && !report.skipped.is_empty() {
        return Err(Failure::new(format!("left out: {}", report.skipped.join("; "))));
    }
    Ok(())
}
