//! What becomes of entries on their way into an image. Owns no state but the caller's choices.

use fjord::Timespec;

use crate::owners::Owners;

/// What becomes of entries on their way into an image. The default keeps all as it is.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Who owns entries.
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
}
