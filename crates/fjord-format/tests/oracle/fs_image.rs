//! Reading the bytes of real images, so that what Linux and e2fsprogs wrote can be compared.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fjord_format::checksum;
use fjord_format::dirent::DirFormat;
use fjord_format::geometry::Geometry;
use fjord_format::group::GroupDesc;
use fjord_format::superblock::RawSuperblock;
use fjord_format::types::InodeNo;
use fjord_format::xattr::XattrRules;
use fjord_testkit::image::{debugfs, make_sparse};
use fjord_testkit::tools::{command, run};

/// Makes an image with mke2fs; `options` are split at spaces.
pub(crate) fn mke2fs(path: &Path, size_bytes: u64, options: &str) -> Result<()> {
    mke2fs_with(path, size_bytes, options, None)
}

/// The same with the contents of `tree`.
pub(crate) fn mke2fs_of(path: &Path, size_bytes: u64, options: &str, tree: &Path) -> Result<()> {
    mke2fs_with(path, size_bytes, options, Some(tree))
}

fn mke2fs_with(path: &Path, size_bytes: u64, options: &str, tree: Option<&Path>) -> Result<()> {
    make_sparse(path, size_bytes)?;
    let mut mke2fs = command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4"]).args(options.split_whitespace());
    if let Some(tree) = tree {
        mke2fs.arg("-d").arg(tree);
    }
    run(mke2fs.arg(path))?.ok()?;
    Ok(())
}

/// An unmounted image, read whole.
pub(crate) struct FsImage {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// Its bytes.
    pub(crate) bytes: Vec<u8>,
    /// Its superblock.
    pub(crate) sb: RawSuperblock,
    /// Its layout.
    pub(crate) geometry: Geometry,
}

impl FsImage {
    /// Reads an image; the kernel must have unmounted it.
    pub(crate) fn load(path: &Path) -> Result<FsImage> {
        let bytes = std::fs::read(path)?;
        let sb = RawSuperblock::decode(&bytes[1024..2048])?;
        let geometry = Geometry::from_superblock(&sb)?;
        Ok(FsImage { path: path.to_owned(), bytes, sb, geometry })
    }

    /// One block.
    pub(crate) fn block(&self, number: u64) -> &[u8] {
        let size = self.geometry.block_size as usize;
        &self.bytes[number as usize * size..][..size]
    }

    /// The shape of directories.
    pub(crate) fn dir_format(&self) -> DirFormat {
        DirFormat::new(&self.geometry)
    }

    /// What attributes may be.
    pub(crate) fn xattr_rules(&self) -> XattrRules {
        XattrRules::new(&self.geometry)
    }

    /// Offset of an inode in the image.
    pub(crate) fn inode_offset(&self, ino: u64) -> Result<usize> {
        let ino = InodeNo(u32::try_from(ino)?);
        let at = self.geometry.inode_location(ino).context("no such inode")?;
        let (desc_block, offset) = self.geometry.desc_location(at.group).context("no group")?;
        let block = self.geometry.desc_block_location(desc_block).context("no desc block")?;
        let desc = &self.block(block.0)[offset as usize..];
        let desc = &desc[..usize::from(self.geometry.desc_size)];
        let table = GroupDesc::decode(desc, &self.geometry, at.group)?.inode_table;
        let block = table.0 + u64::from(at.table_block);
        Ok(block as usize * self.geometry.block_size as usize + at.offset_bytes as usize)
    }

    /// All bytes of an inode.
    pub(crate) fn inode(&self, ino: u64) -> Result<&[u8]> {
        let start = self.inode_offset(ino)?;
        Ok(&self.bytes[start..start + usize::from(self.geometry.inode_size)])
    }

    /// The bytes of an inode that attributes may take.
    pub(crate) fn xattr_area(&self, ino: u64) -> Result<&[u8]> {
        let inode = self.inode(ino)?;
        let extra = usize::from(u16::from_le_bytes([inode[128], inode[129]]));
        Ok(&inode[128 + extra..])
    }

    /// The inode's attribute block, when it has one.
    pub(crate) fn xattr_block(&self, ino: u64) -> Result<Option<(u64, &[u8])>> {
        let inode = self.inode(ino)?;
        let low = u32::from_le_bytes(inode[0x68..0x6c].try_into()?);
        let high = u16::from_le_bytes(inode[0x76..0x78].try_into()?);
        let number = u64::from(high) << 32 | u64::from(low);
        Ok((number != 0).then(|| (number, self.block(number))))
    }

    /// The inode's `i_block`.
    pub(crate) fn i_block(&self, ino: u64) -> Result<&[u8; 60]> {
        Ok(self.inode(ino)?[0x28..0x28 + 60].try_into()?)
    }

    /// The inode's `i_size`.
    pub(crate) fn size(&self, ino: u64) -> Result<u64> {
        let inode = self.inode(ino)?;
        Ok(u64::from(u32::from_le_bytes(inode[4..8].try_into()?)))
    }

    /// The inode's `i_flags`.
    pub(crate) fn flags(&self, ino: u64) -> Result<u32> {
        Ok(u32::from_le_bytes(self.inode(ino)?[0x20..0x24].try_into()?))
    }

    /// The seed of the checksums that the inode owns.
    pub(crate) fn inode_seed(&self, ino: u64) -> Result<u32> {
        let generation = u32::from_le_bytes(self.inode(ino)?[0x64..0x68].try_into()?);
        let ino = InodeNo(u32::try_from(ino)?);
        Ok(checksum::inode_seed(self.geometry.csum_seed, ino, generation))
    }

    /// Physical numbers of a file's blocks, from its first; asked of debugfs.
    pub(crate) fn physical_blocks(&self, ino: u64) -> Result<Vec<u64>> {
        let text = debugfs(&self.path, &format!("ex <{ino}>"))?;
        let mut blocks = Vec::new();
        for line in text.lines() {
            // "level/ depth  entry/ entries  first - last  first - last  length"
            let numbers: Vec<u64> = line
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            if let [level, depth, _, _, first, last, start, _, _] = numbers[..]
                && level == depth
            {
                ensure!(first == blocks.len() as u64, "a hole in inode {ino}: {line}");
                blocks.extend((0..=last - first).map(|index| start + index));
            }
        }
        Ok(blocks)
    }
}
