//! A host that is cut off from the cluster, under load, and what another host may do meanwhile.
//!
//! The judge is the ledger of the workload ([`crate::promise`]): it goes on for as long as the first host can
//! promise anything, so also after the cut.

use std::{
    path::Path,
    process::Command,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    ceph::{Cluster, ClusterOptions},
    failover::{self, check},
    fjord_mount::{FjordMount, fjord, fjord_program},
    image::Scratch,
    network::{Host, Network},
    promise,
};

/// Threads of the workload.
const WORKER_COUNT: u32 = 3;
/// A mount of an image whose holder is gone takes no longer.
const WAIT_MAX: Duration = Duration::from_secs(45);
/// A holder that was away for longer has lost the image to whoever waits for it.
const LOST_AFTER: Duration = Duration::from_secs(40);
/// A holder that was away for less is not taken for dead.
const KEPT_WITHIN: Duration = Duration::from_secs(10);

/// How a host is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Its cable is pulled.
    Cable,
    /// Most of its packets are lost.
    Loss,
}

/// Each of them.
pub const CUTS: [Cut; 2] = [Cut::Cable, Cut::Loss];

/// Of a hundred packets so many are lost by [`Cut::Loss`], each way: connections stand, and hardly move.
const LOSS_PERCENT: u8 = 40;

/// What the other host does while the first is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// Nothing.
    Nobody,
    /// It mounts the image.
    Mounts,
    /// It mounts the image with `--steal`.
    Steals,
}

/// Each of them.
pub const MEANWHILE: [Meanwhile; 3] = [Meanwhile::Nobody, Meanwhile::Mounts, Meanwhile::Steals];

/// How a cut ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the other host has the image.
    pub taken: bool,
    /// How long its mount took.
    pub mount_took: Duration,
    /// Promises, all of which held.
    pub fsyncs: u64,
}

/// A cluster and two hosts on a network of their own.
#[derive(Debug)]
pub struct Site {
    cluster: Cluster,
    hosts: [Host; 2],
    scratch: Scratch,
}

impl Site {
    /// Makes network, hosts and a cluster with so many OSDs; the calling thread is on the network from then on.
    pub fn new(osd_count: u32) -> Result<Site> {
        let network = Network::enter()?;
        let hosts = [network.host(2)?, network.host(3)?];
        let scratch = Scratch::new("cuts")?;
        let address = network.address();
        let options = ClusterOptions { osd_count, address, ..ClusterOptions::default() };
        let cluster = Cluster::start(&scratch.join("c"), &options)?;
        Ok(Site { cluster, hosts, scratch })
    }

    fn mount(&self, host: usize, url: &str, args: &[&str]) -> Result<FjordMount> {
        let mut program = Command::new(fjord_program()?);
        self.hosts[host].enter(&mut program)?;
        FjordMount::start(program, Path::new(url), args)
    }

    /// Cuts the first host off for a time, under load.
    ///
    /// # Errors
    /// A promise that does not hold, or two hosts that can write.
    pub fn cut(&self, seed: u64, how: Cut, cut: Duration, meanwhile: Meanwhile) -> Result<Outcome> {
        let image = format!("cut-{seed}-{how:?}-{}-{meanwhile:?}", cut.as_secs());
        let result = self.one_cut(&image, seed, (how, cut), meanwhile);
        result.with_context(|| format!("seed {seed}, {how:?}, {meanwhile:?}, cut for {cut:?}"))
    }

    /// Rounds of fail-over between the two hosts; see [`failover::run_between`].
    ///
    /// # Errors
    /// A promise that does not hold.
    pub fn failovers(&self, options: &failover::Options) -> Result<failover::Summary> {
        failover::run_between(&self.cluster, options, &|host| {
            let mut program = Command::new(fjord_program()?);
            self.hosts[host].enter(&mut program)?;
            Ok(program)
        })
    }

    fn disturb(&self, how: Cut, is_cut: bool) -> Result<()> {
        match how {
            Cut::Cable => self.hosts[0].cut(is_cut),
            Cut::Loss => self.hosts[0].lose(if is_cut { LOSS_PERCENT } else { 0 }),
        }
    }

    fn one_cut(
        &self,
        image: &str,
        seed: u64,
        (how, cut): (Cut, Duration),
        meanwhile: Meanwhile,
    ) -> Result<Outcome> {
        let urls = [self.cluster.url(image), format!("{}&id=admin", self.cluster.url(image))];
        // Blocks as the ledger has them: with smaller ones an overwrite that nobody synced may be torn between them.
        fjord(&["mkfs", "-q", "-b", "4096", "--size", "256M", &urls[0]], &[])?.ok()?;
        let first = self.mount(0, &urls[0], &[])?;
        let (ledgers, (second, mount_took)) =
            promise::under_load(first.path(), seed, WORKER_COUNT, |may_fail| {
                thread::sleep(Duration::from_millis(500));
                // Its calls fail once it has lost the image.
                may_fail.store(meanwhile != Meanwhile::Nobody, Ordering::SeqCst);
                let taken = self.while_cut((how, cut), &urls[1], meanwhile)?;
                if taken.0.is_none() {
                    first.fsync_new_file("after-the-cut").context("the image was not taken")?;
                }
                Ok(taken)
            })?;
        ensure!(second.is_none() || mount_took < WAIT_MAX, "the mount took {mount_took:?}");
        // Whether one who loses packets is taken for dead is chance.
        if meanwhile == Meanwhile::Mounts && how == Cut::Cable {
            ensure!(second.is_some() || cut < LOST_AFTER, "the image was not given up");
            ensure!(second.is_none() || cut > KEPT_WITHIN, "the image was given up too early");
        }
        let taken = second.is_some();
        let last = self.hand_over(first, second, &urls[1])?;
        let mut fsyncs = 0;
        for ledger in &ledgers {
            ledger.verify(last.path())?;
            fsyncs += ledger.fsyncs;
        }
        last.fsync_new_file("on-the-other-host")?;
        last.unmount()?;
        check(&self.cluster, image, &self.scratch.join("exported.img"))?;
        Ok(Outcome { taken, mount_took, fsyncs })
    }

    /// Cuts the first host off, and returns what the other one has then, and how long that took.
    fn while_cut(
        &self,
        (how, cut): (Cut, Duration),
        url: &str,
        meanwhile: Meanwhile,
    ) -> Result<(Option<FjordMount>, Duration)> {
        self.disturb(how, true)?;
        thread::scope(|scope| {
            // The cable is plugged in again whatever the other host waits for.
            let heals = scope.spawn(|| {
                thread::sleep(cut);
                self.disturb(how, false)
            });
            let began = Instant::now();
            let second = self.other_host(url, meanwhile);
            let took = began.elapsed();
            heals.join().expect("a cable does not panic")?;
            Ok((second?, took))
        })
    }

    /// What the other host does; its mount, if it has the image.
    fn other_host(&self, url: &str, meanwhile: Meanwhile) -> Result<Option<FjordMount>> {
        match meanwhile {
            Meanwhile::Nobody => Ok(None),
            Meanwhile::Steals => self.mount(1, url, &["--steal"]).map(Some),
            Meanwhile::Mounts => match self.mount(1, url, &[]) {
                Ok(mount) => Ok(Some(mount)),
                Err(error) if format!("{error:#}").contains("is in use by the client") => Ok(None),
                Err(error) => Err(error),
            },
        }
    }

    /// Ends the first mount; the second host has the image then.
    fn hand_over(
        &self,
        mut first: FjordMount,
        second: Option<FjordMount>,
        url: &str,
    ) -> Result<FjordMount> {
        let Some(second) = second else {
            first.unmount()?;
            return self.mount(1, url, &[]);
        };
        if first.fsync_new_file("of-the-old-holder").is_ok() {
            bail!("two hosts write");
        }
        first.kill()?;
        first.detach();
        Ok(second)
    }

    /// Ends the cluster.
    pub fn end(self) -> Result<()> {
        self.cluster.stop()
    }
}
