//! `cargo xtask ceph`: a cluster on this machine to try things on.

use std::path::PathBuf;
use std::process;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, Subcommand, ValueEnum};
use fjord_testkit::ceph::{self, Cluster, ClusterOptions, Life};
use fjord_testkit::cluster_faults::FAULTS;
use fjord_testkit::cuts::{CUTS, MEANWHILE, Site};
use fjord_testkit::{failover, on_cluster};

/// Threads of the workload.
const WORKER_COUNT: u32 = 4;
/// In a campaign of so many fail-overs one waits for a killed host.
const ROUNDS_PER_WAIT: u64 = 20;

/// Arguments of `cargo xtask ceph`.
#[derive(Debug, Args)]
pub(crate) struct CephArgs {
    #[command(subcommand)]
    command: Command,
    /// The folder of the cluster; a campaign has one of its own [default: target/ceph]
    #[arg(long, value_name = "DIR", global = true)]
    dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a cluster, in place of the one that is there
    Up {
        /// OSDs; each object is on all of them
        #[arg(long, value_name = "N", default_value_t = 1)]
        osds: u32,
        /// What keeps the objects
        #[arg(long, value_enum, default_value_t = Store::Bluestore)]
        store: Store,
    },
    /// End the cluster, and remove its folder
    Down,
    /// Faults of a cluster of its own with three OSDs under a mount with load
    Faults {
        /// Where the choices come from
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Times that each happens
        #[arg(long, value_name = "N", default_value_t = 1)]
        rounds: u64,
        /// Only those with this in their name
        #[arg(long, default_value = "", value_name = "PART")]
        only: String,
    },
    /// A host that has an image mounted is cut off from a cluster of its own, or loses most packets, for 5, 20 and
    /// 60 s, while another host does nothing, mounts the image, or steals it
    Cuts {
        /// Where the choices come from
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Times that each of the eighteen happens
        #[arg(long, value_name = "N", default_value_t = 1)]
        rounds: u64,
    },
    /// Suites of tests of mounts, with every image on a cluster of its own
    Suites {
        /// Where the choices come from
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// How much of each: kills, and hundreds of operations of a thread
        #[arg(long, value_name = "N", default_value_t = 20)]
        rounds: u64,
    },
    /// Two hosts of a cluster of its own that take an image from each other, killed and stopped ones: mostly by
    /// `--steal`; sometimes, after a kill, the other host waits
    Campaign {
        /// Fail-overs
        #[arg(long, value_name = "N", default_value_t = 200)]
        rounds: u64,
        /// Where the choices come from
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// OSDs; each object is on all of them
        #[arg(long, value_name = "N", default_value_t = 1)]
        osds: u32,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Store {
    /// A file
    Bluestore,
    /// Memory: quick, and gone when an OSD is killed
    Memstore,
}

fn campaign(rounds: u64, seed: u64, osd_count: u32) -> Result<()> {
    let site = Site::new(osd_count)?;
    let waits = rounds.div_ceil(ROUNDS_PER_WAIT);
    let done = site.failovers(&failover::Options { rounds, seed, workers: WORKER_COUNT, waits })?;
    site.end()?;
    println!(
        "seed {seed}: {} killed, {} stopped and gone on; {} operations, {} fsyncs, all kept; taken over within {:?}, \
         and {} times without --steal within {:?}",
        done.killed,
        done.stopped,
        done.operations,
        done.fsyncs,
        done.takeover_max,
        done.waited,
        done.wait_max
    );
    Ok(())
}

/// The test programs of fjord-cli that mount images and look at them only when they are unmounted.
const PROGRAMS: [&str; 5] = ["direct_io", "like_linux", "mounted", "mounted_killed", "privileges"];
/// A test of these that looks at the blocks of the image file.
const LOOKS_AT_FILE: &str = "trimming";

/// Each suite as a process of its own, whose images are on the cluster.
fn suites(seed: u64, rounds: u64) -> Result<()> {
    let dir = tempfile::Builder::new().prefix("ceph").tempdir()?;
    let cluster = Cluster::start(&dir.path().join("c"), &ClusterOptions::default())?;
    let (seed, operations) = (seed.to_string(), (100 * rounds).to_string());
    // Of these there are eight: each policy with each scheduler.
    let few = rounds.div_ceil(5).to_string();
    let (rounds, many) = (rounds.to_string(), (1000 * rounds).to_string());
    let own = |name: &str, args: &[&str]| {
        let mut command = process::Command::new(std::env::current_exe()?);
        command.arg(name).args(args).args(["--seed", &seed]);
        anyhow::Ok(command)
    };
    let areas = ["--rounds", &rounds, "--tune-arg=--ijournal=2x1M", "--mount-arg=-ofsync=ijournal"];
    let mut commands = vec![
        own("fsx", &["--seeds", "2", "--ops", &many])?,
        own("stress", &["--threads", "8", "--steps", &operations])?,
        own("kill9", &["--rounds", &rounds])?,
        own("kill9", &areas)?,
        own("kill9-programs", &["--rounds", &few])?,
    ];
    let mut tests = process::Command::new(env!("CARGO"));
    tests.args(["test", "--quiet", "-p", "fjord-cli"]).current_dir(crate::workspace());
    tests.args(PROGRAMS.iter().flat_map(|program| ["--test", program]));
    tests.args(["--", "--skip", LOOKS_AT_FILE]);
    commands.push(tests);
    for mut command in commands {
        let before = image_count(&cluster)?;
        let began = Instant::now();
        let status = command.env(on_cluster::VARIABLE, cluster.conf()).status()?;
        ensure!(status.success(), "{command:?}: {status}");
        let count = image_count(&cluster)? - before;
        ensure!(count > 0, "{command:?} mounted nothing on the cluster");
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        println!(
            "{}: passed, {count} mounts on the cluster, {:?}",
            args.join(" "),
            began.elapsed()
        );
    }
    cluster.stop()
}

fn image_count(cluster: &Cluster) -> Result<usize> {
    Ok(cluster.tell("rbd", &["ls"])?.lines().count())
}

fn faults(rounds: u64, seed: u64, only: &str) -> Result<()> {
    let wanted: Vec<_> = FAULTS.iter().filter(|fault| fault.name.contains(only)).collect();
    ensure!(!wanted.is_empty(), "no fault has {only:?} in its name");
    let dir = tempfile::Builder::new().prefix("ceph").tempdir()?;
    let osd_count = wanted.iter().map(|fault| fault.osds).max().unwrap_or(1);
    let options = ClusterOptions { osd_count, ..ClusterOptions::default() };
    let cluster = Cluster::start(&dir.path().join("c"), &options)?;
    for seed in seed..seed + rounds {
        for fault in &wanted {
            let began = Instant::now();
            fault.run(&cluster, seed, &[])?;
            println!("seed {seed}: {}: as it must be, {:?}", fault.name, began.elapsed());
        }
    }
    cluster.stop()
}

fn cuts(rounds: u64, seed: u64) -> Result<()> {
    let site = Site::new(1)?;
    for seed in seed..seed + rounds {
        for (how, cut_s) in CUTS.into_iter().flat_map(|how| [5, 20, 60].map(|cut_s| (how, cut_s))) {
            for meanwhile in MEANWHILE {
                let done = site.cut(seed, how, Duration::from_secs(cut_s), meanwhile)?;
                let whose = if done.taken { "taken over" } else { "kept" };
                println!(
                    "seed {seed}: {how:?} for {cut_s} s, {meanwhile:?}: {whose}; {} fsyncs, all kept; the other \
                     host's mount took {:?}",
                    done.fsyncs, done.mount_took
                );
            }
        }
    }
    site.end()
}

/// Carries out `cargo xtask ceph`.
pub(crate) fn run(args: &CephArgs) -> Result<()> {
    let dir = args.dir.clone().unwrap_or_else(|| crate::workspace().join("target/ceph"));
    let (osds, store) = match args.command {
        Command::Down => return ceph::take_down(&dir),
        Command::Up { osds, store } => (osds, store),
        Command::Cuts { seed, rounds } => return cuts(rounds, seed),
        Command::Suites { seed, rounds } => return suites(seed, rounds),
        Command::Faults { seed, rounds, ref only } => return faults(rounds, seed, only),
        Command::Campaign { rounds, seed, osds } => return campaign(rounds, seed, osds),
    };
    ensure!(osds > 0, "a cluster has at least one OSD");
    let store = match store {
        Store::Bluestore => ceph::Store::Bluestore,
        Store::Memstore => ceph::Store::Memstore,
    };
    let options = ClusterOptions {
        osd_count: osds,
        store,
        life: Life::Detached,
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start(&dir, &options)?;
    println!("The cluster runs. An image there:  fjord mkfs --size 1G '{}'", cluster.url("image"));
    println!("Ceph's own commands:               ceph -c {} -s", cluster.conf().display());
    let dir = args.dir.iter().map(|dir| format!(" --dir {}", dir.display())).collect::<String>();
    println!("End it with:                       cargo xtask ceph down{dir}");
    Ok(())
}
