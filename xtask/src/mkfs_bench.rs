//! `cargo xtask mkfs-bench`: images with contents, made by `mke2fs -d` and by fjord in turn.
//!
//! Owns the tree that is put in, which a seed decides. Invariant: each image is a new file on the
//! same disk, durable when the program ends, of the same block size; both programs find the contents
//! in the page cache.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fjord_testkit::{
    rng::{Rng, pattern_vec},
    tools,
};
use serde_json::json;

const MARKS: [&str; 2] =
    ["<!-- mkfs: written by cargo xtask mkfs-bench -->\n", "<!-- end of mkfs -->\n"];

const DIRECTORIES: u64 = 300;
const DEPTH_MAX: usize = 6;
const FILE_BYTES_MIN: u64 = 512;
const FILE_BYTES_MAX: u64 = 40 << 10;
const IMAGE: &str = "128M";

/// Arguments of `cargo xtask mkfs-bench`.
#[derive(Debug, Args)]
pub(crate) struct MkfsBenchArgs {
    /// Directory on the disk to be measured, with 400 MiB free
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Turns of each program; medians count
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of files
    #[arg(long, default_value_t = 5000)]
    files: u64,
    /// The fjord program to measure [default: built from this checkout]
    #[arg(long)]
    program: Option<PathBuf>,
    /// Write the figures into docs/benchmarks.md
    #[arg(long)]
    document: bool,
}

/// A way to make the image.
struct Way {
    name: &'static str,
    program: PathBuf,
    /// Arguments; the image's path comes behind them, and then `size`.
    args: Vec<String>,
    size: Option<&'static str>,
    /// One for each round.
    times_ms: Vec<f64>,
    /// Processor time of each round, user and system.
    cpu_ms: Vec<f64>,
    /// The most memory in any round.
    rss_kib: u64,
}

impl Way {
    /// Makes the image once, under time(1).
    fn once(&mut self, dir: &Path) -> Result<()> {
        let image = dir.join("image");
        match fs::remove_file(&image) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let mut command = tools::command("time")?;
        command.args(["-f", "%M %U %S"]).arg(&self.program).args(&self.args);
        command.arg(&image).args(self.size);
        let began = Instant::now();
        let done = tools::run(&mut command)?.ok()?;
        self.times_ms.push(began.elapsed().as_secs_f64() * 1000.0);
        let last = done.stderr.lines().last().unwrap_or_default();
        let numbers: Vec<f64> = last.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [rss_kib, user, system] = numbers[..] else {
            bail!("time(1) said {:?}", done.stderr);
        };
        self.cpu_ms.push((user + system) * 1000.0);
        self.rss_kib = self.rss_kib.max(rss_kib as u64);
        Ok(())
    }
}

/// Measures, prints the figures as JSON, and puts them into the document if that is asked for.
pub(crate) fn run(args: &MkfsBenchArgs) -> Result<()> {
    tools::require(&["mke2fs", "tar", "time", "e2fsck"])?;
    ensure!(args.rounds > 0, "at least one round is needed");
    let program = match &args.program {
        Some(program) => fs::canonicalize(program)?,
        None => crate::bench::build_release()?,
    };
    let scratch = tempfile::tempdir_in(&args.dir)?;
    let dir = scratch.path();
    let (tree, tar) = (dir.join("tree"), dir.join("tree.tar"));
    let bytes = make_tree(&tree, args.files)?;
    tools::run(tools::command("tar")?.arg("-C").arg(&tree).arg("-cf").arg(&tar).arg("."))?.ok()?;
    let mut ways = ways(&program, &tree, &tar)?;
    // The first run of each brings program and contents into memory, and is judged.
    for way in &mut ways {
        way.once(dir)?;
        tools::run(tools::command("e2fsck")?.arg("-fn").arg(dir.join("image")))?.ok()?;
        way.times_ms.clear();
        way.cpu_ms.clear();
    }
    let load_before = load_average()?;
    for _ in 0..args.rounds {
        for way in &mut ways {
            way.once(dir)?;
        }
    }
    let load = format!("{load_before} before, {} after", load_average()?);
    let figures = figures(&ways, args, bytes, &load)?;
    println!("{}", serde_json::to_string_pretty(&figures)?);
    if args.document {
        let text = table(&ways, args, bytes, &load)?;
        crate::bench::put(&crate::workspace().join("docs/benchmarks.md"), MARKS, &text)?;
    }
    Ok(())
}

fn ways(program: &Path, tree: &Path, tar: &Path) -> Result<Vec<Way>> {
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is UTF-8");
    let mke2fs = tools::find("mke2fs").context("looked for before")?;
    let way = |name, program: &Path, args: &[&str], size| Way {
        name,
        program: program.to_owned(),
        args: args.iter().map(ToString::to_string).collect(),
        size,
        times_ms: Vec::new(),
        cpu_ms: Vec::new(),
        rss_kib: 0,
    };
    let (tree, tar) = (text(tree)?, text(tar)?);
    let fjord = ["mkfs", "-q", "-b", "4096", "--size", IMAGE];
    Ok(vec![
        way(
            "mke2fs -d",
            &mke2fs,
            &["-q", "-F", "-t", "ext4", "-b", "4096", "-d", &tree],
            Some(IMAGE),
        ),
        way("fjord --from-dir", program, &[&fjord[..], &["--from-dir", &tree]].concat(), None),
        way("fjord --from-tar", program, &[&fjord[..], &["--from-tar", &tar]].concat(), None),
    ])
}

/// Makes the tree and reads it once; bytes of its files.
fn make_tree(top: &Path, files: u64) -> Result<u64> {
    let mut rng = Rng::new(1);
    fs::create_dir(top)?;
    let mut dirs = vec![(top.to_owned(), 0)];
    for number in 0..DIRECTORIES {
        let (above, depth) = match rng.pick(&dirs) {
            (_, depth) if *depth >= DEPTH_MAX => (top.to_owned(), 0),
            (above, depth) => (above.clone(), *depth),
        };
        let dir = above.join(format!("dir{number:03}"));
        fs::create_dir(&dir)?;
        dirs.push((dir, depth + 1));
    }
    let mut bytes = 0;
    for number in 0..files {
        // Small ones are the more frequent: some 12 KiB on average.
        let unit = |rng: &mut Rng| rng.below(1 << 20) as f64 / f64::from(1 << 20);
        let part = unit(&mut rng).powf(2.4);
        let len = FILE_BYTES_MIN + (part * (FILE_BYTES_MAX - FILE_BYTES_MIN) as f64) as u64;
        let path = rng.pick(&dirs).0.join(format!("file{number:05}"));
        fs::write(&path, pattern_vec(number, 0, len as usize))?;
        bytes += len;
    }
    // Writing the contents back is no part of what is measured.
    tools::run(tools::command("sync")?.arg("-f").arg(top))?.ok()?;
    Ok(bytes)
}

pub(crate) fn load_average() -> Result<String> {
    let text = fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}

/// The middle one, the least and the greatest.
pub(crate) fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    (at(sorted.len() / 2), at(0), at(sorted.len().saturating_sub(1)))
}

/// How many times as fast as the first way, round by round.
fn ratios(ways: &[Way], way: &Way) -> Vec<f64> {
    let first = ways.first().map_or(&[][..], |first| &first.times_ms);
    first.iter().zip(&way.times_ms).map(|(first, time)| first / time).collect()
}

pub(crate) fn commit() -> Result<String> {
    let mut git = tools::command("git")?;
    let git = git.args(["describe", "--always", "--dirty"]).current_dir(crate::workspace());
    Ok(tools::run(git)?.ok()?.stdout.trim().to_owned())
}

fn figures(
    ways: &[Way],
    args: &MkfsBenchArgs,
    bytes: u64,
    load: &str,
) -> Result<serde_json::Value> {
    let rows: Vec<_> = ways
        .iter()
        .map(|way| {
            let (median, least, greatest) = spread(&way.times_ms);
            let (ratio, worst, best) = spread(&ratios(ways, way));
            json!({
                "name": way.name, "median_ms": median, "min_ms": least, "max_ms": greatest,
                "ratio": ratio, "ratio_min": worst, "ratio_max": best, "cpu_ms": spread(&way.cpu_ms).0, "peak_rss_kib": way.rss_kib,
            })
        })
        .collect();
    Ok(json!({
        "commit": commit()?, "files": args.files, "bytes": bytes, "rounds": args.rounds,
        "load_average": load, "ways": rows,
    }))
}

fn table(ways: &[Way], args: &MkfsBenchArgs, bytes: u64, load: &str) -> Result<String> {
    let (machine, commit) = (crate::bench::machine()?, commit()?);
    let (files, mib, rounds) = (args.files, bytes >> 20, args.rounds);
    let mut text = format!(
        "{machine}Commit {commit}; {files} files, {mib} MiB; {rounds} rounds; load average {load}.\n\n    \
         cargo xtask mkfs-bench --rounds {rounds}\n\n| | median ms | min to max | times as fast as \
         `mke2fs -d` | min to max | processor ms | peak memory, MiB |\n|---|---|---|---|---|---|---|\n"
    );
    for way in ways {
        let (median, least, greatest) = spread(&way.times_ms);
        let (ratio, worst, best) = spread(&ratios(ways, way));
        text += &format!(
            "| `{}` | {median:.0} | {least:.0} to {greatest:.0} | {ratio:.2} | {worst:.2} to {best:.2} | \
             {:.0} | {:.1} |\n",
            way.name,
            spread(&way.cpu_ms).0,
            way.rss_kib as f64 / 1024.0
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_as_described() {
        let dir = tempfile::tempdir().expect("a directory");
        let bytes = make_tree(&dir.path().join("tree"), 500).expect("made");
        assert!((5 << 20..7 << 20).contains(&bytes), "{bytes} bytes in 500 files");
    }

    #[test]
    fn ratios_are_those_of_each_round() {
        let way = |times_ms: &[f64]| Way {
            name: "",
            program: PathBuf::new(),
            args: Vec::new(),
            size: None,
            times_ms: times_ms.to_vec(),
            cpu_ms: Vec::new(),
            rss_kib: 0,
        };
        let ways = [way(&[100.0, 300.0, 200.0]), way(&[50.0, 100.0, 200.0])];
        assert_eq!(ratios(&ways, &ways[1]), [2.0, 3.0, 1.0]);
        assert_eq!(spread(&ratios(&ways, &ways[1])), (2.0, 1.0, 3.0));
    }
}
