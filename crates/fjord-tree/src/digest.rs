//! A digest of contents, from which a reproducible image derives its identifiers.
//!
//! Invariant: contents that make different images have different digests, except by chance: each
//! part is preceded by its length, and everything that enters the image is included. Not
//! cryptographically secure.

use fjord::Timespec;
use xxhash_rust::xxh3::Xxh3;

use crate::rules::Rules;

/// Collects what an image is made of.
#[derive(Default)]
pub(crate) struct Digest(Xxh3);

impl Digest {
    pub(crate) fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    /// Data of a file. Its pieces may be cut in any way.
    pub(crate) fn data(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// Mode and owner, time and attributes of an entry, as `rules` have them.
    pub(crate) fn meta(
        &mut self,
        (mode, uid, gid): (u32, u32, u32),
        mtime: Timespec,
        xattrs: &[(Vec<u8>, Vec<u8>)],
        rules: &Rules,
    ) {
        let (uid, gid) = rules.owners.map(uid, gid);
        let Timespec { sec, nsec } = rules.latest.map_or(mtime, |latest| mtime.min(latest));
        for number in [u64::from(mode), uid.into(), gid.into(), sec as u64, nsec.into()] {
            self.number(number);
        }
        self.number(xattrs.len() as u64);
        for (name, value) in xattrs {
            self.bytes(name);
            self.bytes(value);
        }
    }

    pub(crate) fn finish(&self) -> [u8; 16] {
        self.0.digest128().to_le_bytes()
    }
}
