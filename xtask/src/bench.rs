//! `cargo xtask bench`: the benchmark runs whose figures `docs/benchmarks.md` shows.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::tools;

/// What stands before and behind the figures in the document.
const MARKS: [&str; 2] = ["<!-- figures: written by cargo xtask bench -->\n", "<!-- end -->\n"];

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
    /// Directory on the disk to be measured, with 22 GiB free
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Only these runs (fsync, large, files, open); the document is not changed then
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

/// Runs the benchmarks and puts the figures into the document.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    tools::require_root()?;
    let root = crate::workspace();
    let build = Command::new("cargo")
        .args(["build", "--release", "--quiet", "-p", "fjord-cli"])
        .current_dir(&root)
        .status()?;
    ensure!(build.success(), "fjord does not build");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
    let program = target.join("release/fjord");
    let mut text = machine()?;
    for (name, arguments) in RUNS {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
            continue;
        }
        eprintln!("== {name}: fjord bench {arguments}");
        let mut command = Command::new(&program);
        command.arg("bench").args(arguments.split_whitespace());
        if name == "fsync" && args.only.is_empty() {
            command.arg("--svg").arg(root.join("docs/benchmarks-latency.svg"));
        }
        let output = command.arg(&args.dir).stderr(std::process::Stdio::inherit()).output()?;
        let table = String::from_utf8(output.stdout)?;
        ensure!(output.status.success(), "fjord bench failed: {table}");
        print!("{table}");
        text.push_str(&format!("\n    fjord bench {arguments}\n\n```\n{}\n```\n", table.trim()));
    }
    if args.only.is_empty() {
        put(&root.join("docs/benchmarks.md"), &text)?;
    }
    Ok(())
}

/// Which machine this is, in a sentence.
fn machine() -> Result<String> {
    let cpus = std::thread::available_parallelism()?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    Ok(format!("Linux {}, {cpus} processors.\n", release.trim()))
}

/// Replaces what stands between the marks.
fn put(document: &Path, figures: &str) -> Result<()> {
    let text = fs::read_to_string(document)?;
    let (before, rest) = text.split_once(MARKS[0]).context("the document has no first mark")?;
    let (_, after) = rest.split_once(MARKS[1]).context("the document has no second mark")?;
    fs::write(document, format!("{before}{}\n{figures}\n{}{after}", MARKS[0], MARKS[1]))?;
    println!("{} has the figures", document.display());
    Ok(())
}
