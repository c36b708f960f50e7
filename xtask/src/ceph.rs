//! `cargo xtask ceph`: a cluster on this machine to try things on.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand, ValueEnum};
use fjord_testkit::ceph::{self, Cluster, ClusterOptions, Life};

/// Arguments of `cargo xtask ceph`.
#[derive(Debug, Args)]
pub(crate) struct CephArgs {
    #[command(subcommand)]
    command: Command,
    /// The folder of the cluster [default: target/ceph]
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
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Store {
    /// A file
    Bluestore,
    /// Memory: quick, and gone when an OSD is killed
    Memstore,
}

/// Carries out `cargo xtask ceph`.
pub(crate) fn run(args: &CephArgs) -> Result<()> {
    let dir = args.dir.clone().unwrap_or_else(|| crate::workspace().join("target/ceph"));
    let (osds, store) = match args.command {
        Command::Down => return ceph::take_down(&dir),
        Command::Up { osds, store } => (osds, store),
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
