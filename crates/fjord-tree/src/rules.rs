//! Rules for entries copied into an image. Owns no state but the caller's choices.

use fjord::Timespec;

use crate::exclude::Exclude;
use crate::owners::Owners;
use crate::tar::stream::{TarEntry, TarKind};

/// Rules for entries copied into an image. The default changes nothing.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Excluded entries.
    pub exclude: Exclude,
    /// Owners of entries.
    pub owners: Owners,
    /// Who owns the root directory of the image, when its contents do not say.
    pub root_owner: Option<(u32, u32)>,
    /// Permission bits of regular files, instead of their own.
    pub file_mode: Option<u16>,
    /// Leave out all extended attributes, access control lists and capabilities.
    pub without_xattrs: bool,
    /// Times that are later become this one, and access times that of the last change: what two
    /// runs give the same of.
    pub latest: Option<Timespec>,
    /// Have [`Contents::digest`](crate::Contents::digest), which takes a look at all data.
    pub digest: bool,
}

impl Rules {
    /// Whether an entry of a tar stream is left out.
    pub(crate) fn excludes_entry(&self, entry: &TarEntry) -> bool {
        let parts = entry.path.split(|byte| *byte == b'/');
        let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
        self.exclude.has_any_part(&parts.join(&b'/'), entry.kind == TarKind::Directory)
    }
}
