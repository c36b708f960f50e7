//! `cargo xtask fsx`, `stress` and `kill9`: long randomised runs through a mount.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::{
    features::{self, FeatureSet},
    fjord_mount::FjordMount,
    fsx::{self, KernelFile},
    image::{self, KernelMount, Scratch},
    kill9,
    manifest::Manifest,
    script::KernelExecutor,
    stress,
};

/// Common arguments.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Seed of the first run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Feature set of the image
    #[arg(long, default_value = "default")]
    set: String,
    /// Check the kernel's ext4 instead (a check of the checker)
    #[arg(long)]
    kernel: bool,
    /// Argument for `fjord mount` (may be repeated)
    #[arg(long = "mount-arg", value_name = "ARG", allow_hyphen_values = true)]
    mount_args: Vec<String>,
    /// Build fjord without optimisation, with overflow checks
    #[arg(long)]
    debug: bool,
}

/// Arguments of `cargo xtask fsx`.
#[derive(Debug, Args)]
pub(crate) struct FsxArgs {
    #[command(flatten)]
    common: Common,
    /// Number of seeds, counted up from the first
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Operations for each seed
    #[arg(long, default_value_t = 100_000)]
    ops: u64,
}

/// Arguments of `cargo xtask stress`.
#[derive(Debug, Args)]
pub(crate) struct StressArgs {
    #[command(flatten)]
    common: Common,
    /// Threads
    #[arg(long, default_value_t = 8)]
    threads: u32,
    /// Steps of each thread
    #[arg(long, default_value_t = 10_000)]
    steps: u32,
}

/// Arguments of `cargo xtask kill9`.
#[derive(Debug, Args)]
pub(crate) struct Kill9Args {
    #[command(flatten)]
    common: Common,
    /// Kills
    #[arg(long, default_value_t = 200)]
    rounds: u64,
    /// Threads of the workload
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// Argument for `fjord tune` of the new image, such as --ijournal=4x1M (may be repeated)
    #[arg(long = "tune-arg", value_name = "ARG", allow_hyphen_values = true)]
    tune_args: Vec<String>,
    /// Keep the image of a failed round here
    #[arg(long, default_value = "target/kill9-failed")]
    keep: PathBuf,
}

impl Common {
    fn set(&self) -> Result<&'static FeatureSet> {
        features::by_name(&self.set).with_context(|| format!("no feature set {}", self.set))
    }
}

/// Builds the fjord program and returns its path.
pub(crate) fn build(debug: bool) -> Result<PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "-p", "fjord-cli", "--message-format", "json"]);
    if !debug {
        cargo.arg("--release");
    }
    let out =
        cargo.current_dir(crate::workspace()).stderr(std::process::Stdio::inherit()).output()?;
    ensure!(out.status.success(), "fjord-cli does not build");
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| {
            let program = message["executable"].as_str()?;
            (message["target"]["name"] == "fjord").then(|| PathBuf::from(program))
        })
        .context("cargo built no program named fjord")
}

enum Mounted {
    Kernel(KernelMount),
    Fjord(FjordMount),
}

impl Mounted {
    fn new(common: &Common, image: &std::path::Path) -> Result<Self> {
        common.set()?.make(image)?;
        if common.kernel {
            return Ok(Mounted::Kernel(KernelMount::new(image, "noinit_itable")?));
        }
        let args: Vec<&str> = common.mount_args.iter().map(String::as_str).collect();
        Ok(Mounted::Fjord(FjordMount::with_program(&build(common.debug)?, image, &args)?))
    }

    fn path(&self) -> &std::path::Path {
        match self {
            Mounted::Kernel(mount) => mount.path(),
            Mounted::Fjord(mount) => mount.path(),
        }
    }

    fn unmount(self) -> Result<()> {
        match self {
            Mounted::Kernel(mount) => mount.unmount(),
            Mounted::Fjord(mount) => mount.unmount(),
        }
    }
}

/// Runs fsx for several seeds on one mount.
pub(crate) fn fsx(args: &FsxArgs) -> Result<()> {
    let scratch = Scratch::new("fsx")?;
    let img = scratch.join("fsx.img");
    let mount = Mounted::new(&args.common, &img)?;
    for seed in args.common.seed..args.common.seed + args.seeds {
        let mut file = KernelFile::create(&mount.path().join(format!("file-{seed}")))?;
        let counts = fsx::check(&mut file, fsx::Options::new(seed, args.ops))?;
        println!("seed {seed}: {} operations: {counts:?}", args.ops);
    }
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Runs the stress once.
pub(crate) fn stress(args: &StressArgs) -> Result<()> {
    let scratch = Scratch::new("stress")?;
    let img = scratch.join("stress.img");
    let mount = Mounted::new(&args.common, &img)?;
    let root = mount.path().to_owned();
    let options =
        stress::Options { seed: args.common.seed, threads: args.threads, steps: args.steps };
    let expected = stress::run(options, || Box::new(KernelExecutor::new(&root)))?;
    expected.verify(&Manifest::from_directory(&root)?)?;
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    if args.common.set()?.kernel_mounts()? {
        let mount = KernelMount::new(&img, "ro")?;
        expected.verify(&Manifest::from_directory(mount.path())?).context("seen by the kernel")?;
        mount.unmount()?;
    }
    println!("seed {}: {} threads, {} steps each", args.common.seed, args.threads, args.steps);
    Ok(())
}

/// Runs the kills.
pub(crate) fn kill9(args: &Kill9Args) -> Result<()> {
    ensure!(!args.common.kernel, "the kernel cannot be killed; see the self-check of the test kit");
    let program = build(args.common.debug)?;
    let options = kill9::Options {
        end: kill9::End::Kill,
        rounds: args.rounds,
        seed: args.common.seed,
        workers: args.workers,
        set: args.common.set()?,
        program,
        mount_args: args.common.mount_args.clone(),
        tune_args: args.tune_args.clone(),
        linux_recovers: !args.common.mount_args.iter().any(|arg| arg.contains("ijournal")),
        keep_failed_in: Some(crate::workspace().join(&args.keep)),
    };
    let summary = kill9::run(&options)?;
    println!(
        "seed {}: {} kills survived, {} operations, {} fsyncs, all kept",
        args.common.seed, summary.rounds, summary.operations, summary.fsyncs
    );
    Ok(())
}
