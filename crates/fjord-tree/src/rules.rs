//! Rules for entries copied into an image. Owns no state but the caller's choices.

use fjord::Timespec;

use crate::builder::ACL_XATTRS;
use crate::exclude::Exclude;
use crate::host::write::without_list;
use crate::owners::Owners;
use crate::tar::excluded::plain_name;
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
    /// The mode of an entry with these attributes. An access control list that is left out must not
    /// leave its mask where the group's permissions belong.
    pub(crate) fn kept_mode(&self, mode: u32, xattrs: &[(Vec<u8>, Vec<u8>)]) -> u32 {
        let list = xattrs.iter().find(|(name, _)| name == ACL_XATTRS[0]);
        let lost = list.filter(|_| self.without_xattrs);
        lost.map_or(mode, |(_, list)| without_list(list, mode))
    }

    /// Whether an entry of a tar stream is left out.
    pub(crate) fn excludes_entry(&self, entry: &TarEntry) -> bool {
        self.exclude.has_any_part(&plain_name(&entry.path), entry.kind == TarKind::Directory)
    }
}
