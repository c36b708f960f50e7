//! Inodes that have fewer extra fields than the file system wants: those of an image whose inodes were
//! 128 bytes long before (`tune2fs -I 256`), or whose `s_want_extra_isize` was raised.
//!
//! Owns no state. Invariant: an inode keeps its attributes. Where they leave no room for the fields, the
//! inode stays as it is.

use fjord_format::geometry::{GOOD_OLD_INODE_BYTES, Geometry};
use fjord_format::xattr::{self, XattrRules, XattrSet};

/// What [`grow`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grown {
    /// There is no room.
    No,
    /// The inode has the fields.
    Fields,
    /// It has, and its attributes lie elsewhere in it.
    AttributesToo,
}

/// Makes room in an inode's bytes for the extra fields that the file system wants, as Linux does when an
/// inode changes. `old` is its `i_extra_isize`, which the caller sets.
pub(super) fn grow(bytes: &mut [u8], geometry: &Geometry, old: u16) -> Grown {
    let place = |extra: u16| usize::from(GOOD_OLD_INODE_BYTES.saturating_add(extra));
    let (from, to) = (place(old), place(geometry.want_extra_isize));
    let size = usize::from(geometry.inode_size);
    let (Some(area), true) = (bytes.get(from..size), from < to && to <= size) else {
        return Grown::No;
    };
    let set = match xattr::parse_ibody(area, &XattrRules::new(geometry)) {
        // Without extra fields there are no attributes.
        _ if old == 0 => None,
        Ok(view) => view.as_ref().map(XattrSet::from_view),
        // Damaged: they are left for e2fsck.
        Err(_) => return Grown::No,
    };
    let Some(set) = set else {
        let end = if old == 0 { size } else { to };
        bytes[from..end].fill(0);
        return Grown::Fields;
    };
    let mut moved = vec![0; size - to];
    let fits = set
        .is_ok_and(|set| set.ibody_bytes() <= moved.len() && set.encode_ibody(&mut moved).is_ok());
    if !fits {
        return Grown::No;
    }
    bytes[from..to].fill(0);
    bytes[to..size].copy_from_slice(&moved);
    Grown::AttributesToo
}
