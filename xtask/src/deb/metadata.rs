//! The metadata of the package, as the manifest has it for cargo-deb.

use std::{
    ffi::OsStr,
    path::{Component, Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::tools;
use serde_json::Value;

/// The crate whose manifest has the metadata.
const CRATE: &str = "fjord-cli";

/// One line of `assets`.
#[derive(Debug)]
pub(super) struct Asset {
    /// As the manifest has it; the last component may be `*`.
    source: String,
    /// Where it goes, below the root; a directory if it ends with a slash.
    target: String,
    /// Permission bits.
    pub(super) mode: u32,
}

impl Asset {
    fn from_json(value: &Value) -> Result<Asset> {
        let text = |i: usize| value[i].as_str().context("an asset has three texts");
        let mode = u32::from_str_radix(text(2)?, 8).context("the mode of an asset is octal")?;
        Ok(Asset { source: text(0)?.to_owned(), target: text(1)?.to_owned(), mode })
    }

    /// Where a file of this asset goes, below the root.
    pub(super) fn place(&self, file: &Path) -> Result<PathBuf> {
        let target = Path::new(&self.target);
        let plain = target.components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(plain, "{} is not a path below the root", self.target);
        match self.target.ends_with('/') {
            true => Ok(target.join(file.file_name().context("a file with a name")?)),
            false => Ok(target.to_owned()),
        }
    }
}

/// All that a package says about itself.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) maintainer: String,
    pub(super) section: String,
    pub(super) priority: String,
    pub(super) depends: String,
    pub(super) recommends: String,
    pub(super) homepage: String,
    pub(super) description: String,
    pub(super) extended_description: String,
    pub(super) changelog: PathBuf,
    pub(super) assets: Vec<Asset>,
    /// The directory of the crate.
    dir: PathBuf,
    /// Cargo's target directory.
    pub(super) target: PathBuf,
}

impl Package {
    /// Reads the metadata of the workspace at `root`.
    ///
    /// # Errors
    /// Something is missing in the manifest.
    pub(super) fn read(root: &Path) -> Result<Package> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
        let said = tools::run(cargo.current_dir(root))?.ok()?.stdout;
        let workspace: Value = serde_json::from_str(&said)?;
        let packages = workspace["packages"].as_array().context("a list of packages")?;
        let package = packages.iter().find(|package| package["name"] == CRATE);
        Package::from_json(package.context(CRATE)?, &workspace["target_directory"])
    }

    fn from_json(package: &Value, target: &Value) -> Result<Package> {
        let deb = &package["metadata"]["deb"];
        let text = |value: &Value, name: &str| {
            value[name].as_str().map(str::to_owned).with_context(|| format!("no {name}"))
        };
        let manifest = PathBuf::from(text(package, "manifest_path")?);
        let dir = manifest.parent().context("a manifest lies in a directory")?.to_owned();
        let version = match deb["revision"].as_str() {
            Some("") => text(package, "version")?,
            revision => format!("{}-{}", text(package, "version")?, revision.unwrap_or("1")),
        };
        let assets = deb["assets"].as_array().context("no assets")?;
        Ok(Package {
            name: text(deb, "name")?,
            version,
            maintainer: text(deb, "maintainer")?,
            section: text(deb, "section")?,
            priority: text(deb, "priority")?,
            depends: text(deb, "depends")?,
            recommends: text(deb, "recommends")?,
            homepage: text(package, "repository")?,
            // Debian has no full stop there.
            description: text(package, "description")?.trim_end_matches('.').to_owned(),
            extended_description: text(deb, "extended-description")?,
            changelog: dir.join(text(deb, "changelog")?),
            assets: assets.iter().map(Asset::from_json).collect::<Result<_>>()?,
            dir,
            target: target.as_str().context("no target directory")?.into(),
        })
    }

    /// The files of an asset. `program` is in the place of a release build, `extra` in that of
    /// target/package.
    pub(super) fn sources(
        &self,
        asset: &Asset,
        program: &Path,
        extra: &Path,
    ) -> Result<Vec<PathBuf>> {
        if asset.source == "target/release/fjord" {
            return Ok(vec![program.to_owned()]);
        }
        let path = match asset.source.strip_prefix("../../target/package/") {
            Some(rest) => extra.join(rest),
            None => self.dir.join(&asset.source),
        };
        if path.file_name() != Some(OsStr::new("*")) {
            return Ok(vec![path]);
        }
        let dir = path.parent().context("a pattern lies in a directory")?;
        let entries = dir.read_dir().with_context(|| format!("reading {}", dir.display()))?;
        let mut found: Vec<PathBuf> =
            entries.map(|entry| entry.map(|e| e.path())).collect::<std::io::Result<_>>()?;
        found.sort();
        ensure!(!found.is_empty(), "{} is empty", dir.display());
        Ok(found)
    }

    /// The time that everything in the package gets, in seconds since 1970.
    ///
    /// # Errors
    /// The changelog is not one of Debian's.
    pub(super) fn epoch(&self) -> Result<String> {
        if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
            return Ok(epoch);
        }
        let said = super::run_tool("dpkg-parsechangelog", |parse| {
            parse.arg("-l").arg(&self.changelog).args(["-S", "Timestamp"])
        })?;
        Ok(said.trim().to_owned())
    }
}
