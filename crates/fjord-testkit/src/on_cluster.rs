//! Tests of mounts on images of a cluster: with [`VARIABLE`] in the environment a mount of an image file is one of an
//! image on a cluster instead, to which the file is copied, and from which it is copied back when the daemon has ended.
//!
//! So every test of a mount is one of a mount on a cluster. Not for tests that look into the file while it is
//! mounted. Invariant: an image of a daemon that was killed is not used again; what the test goes on with gets a new
//! one, since the old one has a lock until the cluster gives its holder up.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context, Result};

use crate::ceph::Cluster;

/// Names the configuration file of the cluster.
pub const VARIABLE: &str = "FJORD_TEST_ON_CLUSTER";

/// An image file that is on a cluster for the time of a mount.
#[derive(Debug)]
pub(crate) struct Moved {
    cluster: Cluster,
    name: String,
    file: PathBuf,
}

impl Moved {
    /// Copies the file to the cluster, if there is to be one, and if it is a file.
    pub(crate) fn wanted(image: &Path) -> Result<Option<Moved>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let Some(conf) = std::env::var_os(VARIABLE) else { return Ok(None) };
        if !image.is_file() {
            return Ok(None);
        }
        let conf = PathBuf::from(conf);
        let cluster = Cluster::at(conf.parent().context("a configuration file in a folder")?)?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("test-{}-{count}", std::process::id());
        let moved = Moved { cluster, name, file: image.to_owned() };
        moved.cluster.tell("rbd", &["import", "--no-progress", moved.path()?, &moved.name])?;
        Ok(Some(moved))
    }

    fn path(&self) -> Result<&str> {
        self.file.to_str().context("a plain path")
    }

    /// What to mount.
    pub(crate) fn url(&self) -> PathBuf {
        self.cluster.url(&self.name).into()
    }

    /// Copies it back.
    pub(crate) fn bring_back(self) -> Result<()> {
        let new = format!("{}.back", self.path()?);
        self.cluster.tell("rbd", &["export", "--no-progress", &self.name, &new])?;
        std::fs::rename(&new, &self.file)
            .with_context(|| format!("replacing {}", self.file.display()))
    }
}
