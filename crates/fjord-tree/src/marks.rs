//! Flags of chattr(1) and project IDs on their way into an image.
//!
//! Invariant: append-only and immutable are set last, when everything has its names and contents.

use fjord::{FileKind, InodeRef};
use fjord_format::inode::InodeFlags;
use rustix::io::Errno;

/// Flags that say something of the file, whatever file system it is on. The others say how one stores it.
const KEPT: InodeFlags = InodeFlags::USER_MODIFIABLE
    .difference(InodeFlags::EXTENTS.union(InodeFlags::EOFBLOCKS))
    .difference(InodeFlags::JOURNAL_DATA.union(InodeFlags::DAX).union(InodeFlags::CASEFOLD));
/// Flags that ext4 has and an image cannot be given: they are listed.
const NOT_KEPT: [(InodeFlags, &str); 4] = [
    (InodeFlags::JOURNAL_DATA, "journal_data (j)"),
    (InodeFlags::NOCOMPR, "no_compression (m)"),
    (InodeFlags::DAX, "dax (x)"),
    (InodeFlags::CASEFOLD, "casefold (F)"),
];
/// Flags that forbid what a copy still has to do.
const LAST: InodeFlags = InodeFlags::IMMUTABLE.union(InodeFlags::APPEND);
/// Flags that only directories have.
const OF_DIRECTORIES: InodeFlags =
    InodeFlags::DIRSYNC.union(InodeFlags::TOPDIR).union(InodeFlags::PROJINHERIT);

/// Flags and project ID of a file or directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// As FS_IOC_GETFLAGS gives them.
    pub(crate) flags: u32,
    /// 0 is the default, which no file is given.
    pub(crate) project: u32,
}

impl Marks {
    /// Whether there is nothing to set or to list.
    pub(crate) fn is_empty(self) -> bool {
        let listed = NOT_KEPT.iter().map(|(flag, _)| *flag).collect::<InodeFlags>();
        self.project == 0 && !self.known().intersects(KEPT | listed)
    }

    /// Whether they forbid what a copy still has to do.
    pub(crate) fn come_last(self) -> bool {
        self.known().intersects(LAST)
    }

    fn known(self) -> InodeFlags {
        InodeFlags::from_bits_retain(self.flags)
    }

    /// Marks an inode. Returns what could not be kept, with reasons.
    ///
    /// # Errors
    /// Those of the engine.
    pub(crate) fn set(self, inode: &InodeRef) -> fjord::Result<Vec<String>> {
        let lost = NOT_KEPT.iter().filter(|(flag, _)| self.known().contains(*flag));
        let mut unkept: Vec<String> =
            lost.map(|(_, name)| format!("the flag {name} cannot be set")).collect();
        if self.project != 0 {
            match inode.set_project(self.project) {
                Err(error) if error.is(Errno::OPNOTSUPP) => unkept.push(format!(
                    "the image keeps no project ID ({}): make it with mkfs -O project and inodes of 256 bytes",
                    self.project
                )),
                set => set?,
            }
        }
        let mut wanted = self.known() & KEPT;
        if inode.attr().kind() != FileKind::Directory {
            wanted -= OF_DIRECTORIES;
        }
        if !wanted.is_empty() {
            let all = InodeFlags::from_bits_retain(inode.flags()) | wanted;
            inode.set_flags(all.bits())?;
        }
        Ok(unkept)
    }
}
