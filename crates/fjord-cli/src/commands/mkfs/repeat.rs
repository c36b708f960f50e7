//! Reproducible images: times from the environment or the contents instead of the clock,
//! identifiers derived from the contents instead of random ones.

use fjord::Timespec;
use fjord_mkfs::MkfsOptions;
use fjord_tree::{Contents, Rules};

use super::layout::Layout;
use crate::{failure::Result, image::latest_time};

/// Core count that the image is made for, instead of the machine's.
const CORES: u32 = 4;

/// State of a reproducible build.
pub(super) struct Repeat {
    /// The latest permitted time, if given.
    epoch: Option<Timespec>,
}

impl Repeat {
    /// Whether the image is reproducible, and with which times.
    ///
    /// # Errors
    /// The variable is not a time.
    pub(super) fn wanted(by_option: bool) -> Result<Option<Repeat>> {
        let epoch = latest_time()?;
        Ok((by_option || epoch.is_some()).then_some(Repeat { epoch }))
    }

    /// What the first pass over the contents must compute.
    pub(super) fn ask(&self, layout: &Layout, rules: &mut Rules) {
        rules.latest = self.epoch;
        rules.digest = layout.uuid().is_none();
    }

    /// Fixes all values that would come from the clock or be random.
    pub(super) fn fix(
        &self,
        contents: Option<&Contents>,
        rules: &mut Rules,
        options: &mut MkfsOptions,
    ) {
        let newest = contents.and_then(|contents| contents.newest);
        let latest = self.epoch.or(newest).unwrap_or_default();
        rules.latest = Some(latest);
        options.time_seconds = Some(u64::try_from(latest.sec).unwrap_or(0));
        options.cores = Some(CORES);
        let digest = contents.and_then(|contents| contents.digest).unwrap_or_default();
        let seed = digest_of(&[&digest, format!("{options:?}").as_bytes()]);
        let uuid = options.uuid.unwrap_or_else(|| as_uuid(seed));
        options.uuid = Some(uuid);
        let hash_seed = || as_uuid(digest_of(&[&uuid, b"hash seed"]));
        options.hash_seed = Some(options.hash_seed.unwrap_or_else(hash_seed));
    }
}

fn digest_of(parts: &[&[u8]]) -> [u8; 16] {
    xxhash_rust::xxh3::xxh3_128(&parts.concat()).to_le_bytes()
}

/// A UUID of version 8 (vendor-specific).
fn as_uuid(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}
