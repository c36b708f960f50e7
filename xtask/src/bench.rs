//! `cargo xtask bench`: the benchmark runs whose figures `docs/benchmarks.md` shows.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::tools;

/// Marks before and after the figures in the document.
const MARKS: [&str; 2] = ["<!-- figures: written by cargo xtask bench -->\n", "<!-- end -->\n"];

/// The same for the figures about fsync.
const FSYNC_MARKS: [&str; 2] =
    ["<!-- fsync: written by cargo xtask bench --fsync -->\n", "<!-- end of fsync -->\n"];

/// Latency of fsyncs.
const FSYNC_RATES: &str = "--targets raw,fjord-library:ijournal,fjord-fuse:ijournal,\
    fjord-library:ijournal:nolow_latency,fjord-fuse:ijournal:nolow_latency,kernel,kernel-fc \
    --workloads append-fsync,create-fsync \
    --threads 1,8 --size 1G --rounds 5";

/// The figures after them.
const FSYNC_FIGURES: [&str; 15] = [
    "ijournaling-6",
    "ijournaling-7",
    "ijournaling-8",
    "ijournaling-9",
    "pbg-2",
    "pbg-3",
    "fastcommit-table",
    "neighbours",
    "fallbacks",
    "barrier-8",
    "barrier-table2",
    "barrier-11",
    "barrier-12",
    "barrier-13",
    "barrier-14",
];

/// The runs: a name, and the arguments of `fjord bench`.
const RUNS: [(&str, &str); 4] = [
    ("fsync", "--workloads append-fsync,overwrite-fdatasync --threads 1,8 --rounds 7"),
    (
        "large",
        "--targets raw,fjord-library,fjord-fuse,kernel --workloads seq-write,seq-read --rounds 3 \
         --size 5G --file-size 4G",
    ),
    (
        "files",
        "--targets raw,fjord-library,fjord-fuse,kernel,kernel-fc,fuse2fs \
         --workloads untar,create-unlink,parallel-read --rounds 3",
    ),
    ("open", "--targets fjord-library,fjord-fuse,kernel --workloads open-huge --rounds 5"),
];

/// Arguments of `cargo xtask bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Directory on the disk under test, with 22 GiB free
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Run the figures about fsync instead (40 minutes)
    #[arg(long)]
    fsync: bool,
    /// Only these runs (fsync, large, files, open; or rates and figures); does not change the
    /// document
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

/// Runs the benchmarks and writes the figures to the document.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    tools::require_root()?;
    let root = crate::workspace();
    let program = build_release()?;
    let is_wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
    let docs = root.join("docs");
    let mut text = machine()?;
    if args.fsync {
        if is_wanted("rates") {
            text.push_str(&measure(&program, FSYNC_RATES, None, &args.dir)?);
        }
        for name in FSYNC_FIGURES.into_iter().filter(|name| is_wanted(name)) {
            let svg = args.only.is_empty().then(|| docs.join(format!("{name}.svg")));
            text.push_str(&measure(&program, &format!("--figure {name}"), svg, &args.dir)?);
            if args.only.is_empty() {
                text.push_str(&format!("\n![{name}]({name}.svg)\n"));
            }
        }
    } else {
        for (name, arguments) in RUNS.into_iter().filter(|(name, _)| is_wanted(name)) {
            let draw = name == "fsync" && args.only.is_empty();
            let svg = draw.then(|| docs.join("benchmarks-latency.svg"));
            text.push_str(&measure(&program, arguments, svg, &args.dir)?);
        }
    }
    if args.only.is_empty() {
        let marks = if args.fsync { FSYNC_MARKS } else { MARKS };
        put(&docs.join("benchmarks.md"), marks, &text)?;
    }
    Ok(())
}

/// Builds the program to be measured.
pub(crate) fn build_release() -> Result<PathBuf> {
    let root = crate::workspace();
    let build = Command::new("cargo")
        .args(["build", "--release", "--quiet", "-p", "fjord-cli"])
        .current_dir(&root)
        .status()?;
    ensure!(build.success(), "fjord does not build");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
    Ok(target.join("release/fjord"))
}

/// One run of `fjord bench`; gives the command and its table for the document.
fn measure(program: &Path, arguments: &str, svg: Option<PathBuf>, dir: &Path) -> Result<String> {
    eprintln!("== fjord bench {arguments}");
    let mut command = Command::new(program);
    command.arg("bench").args(arguments.split_whitespace());
    if let Some(svg) = svg {
        command.arg("--svg").arg(svg);
    }
    let output = command.arg(dir).stderr(std::process::Stdio::inherit()).output()?;
    let table = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "fjord bench failed: {table}");
    print!("{table}");
    Ok(format!("\n    fjord bench {arguments}\n\n```\n{}\n```\n", table.trim()))
}

/// A sentence that describes the machine.
pub(crate) fn machine() -> Result<String> {
    let cpus = std::thread::available_parallelism()?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    Ok(format!("Linux {}, {cpus} processors.\n", release.trim()))
}

/// Replaces the text between the marks.
pub(crate) fn put(document: &Path, marks: [&str; 2], figures: &str) -> Result<()> {
    let text = fs::read_to_string(document)?;
    let (before, rest) = text.split_once(marks[0]).context("the document has no first mark")?;
    let (_, after) = rest.split_once(marks[1]).context("the document has no second mark")?;
    fs::write(document, format!("{before}{}\n{figures}\n{}{after}", marks[0], marks[1]))?;
    println!("{} has the figures", document.display());
    Ok(())
}
