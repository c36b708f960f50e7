//! Indexed directories: Linux and this crate do the same operations and must build the same
//! blocks; e2fsck then judges ours in the place of Linux's.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use crate::fs_image::{FsImage, mke2fs};
use anyhow::{Context, Result, bail, ensure};
use fjord_format::dirent::{self, DirFormat, FileType, Inserted};
use fjord_format::hash::{HashKind, HashSeed, HashVersion, dirhash};
use fjord_format::htree::{self, Depth, DxKind};
use fjord_format::superblock::FsFlags;
use fjord_format::types::{InodeNo, LogicalBlock};
use fjord_testkit::image::{KernelMount, Scratch, debugfs_write, e2fsck_clean};
use fjord_testkit::rng::Rng;
use fjord_testkit::tools::{command, run};

/// A directory in memory, edited by the rules of Linux with the functions of this crate.
struct Directory {
    format: DirFormat,
    depth: Depth,
    version: HashVersion,
    seed: HashSeed,
    inode: InodeNo,
    blocks: Vec<Vec<u8>>,
    indexed: bool,
}

/// Place and length of a record and, when it is used, what it says.
type Record = (usize, usize, Option<(InodeNo, FileType, Vec<u8>)>);

/// One step of the way from the root to a leaf: block and entry in it.
type Path = Vec<(usize, usize)>;

impl Directory {
    fn new(image: &FsImage, inode: u64, parent: u64) -> Result<Directory> {
        let format = image.dir_format();
        let mut first = vec![0; format.block_bytes];
        let inode = InodeNo(u32::try_from(inode)?);
        dirent::init_first_block(&mut first, &format, inode, InodeNo(u32::try_from(parent)?))?;
        let unsigned = image.sb.flags().contains(FsFlags::UNSIGNED_HASH);
        Ok(Directory {
            format,
            depth: Depth::of(&image.geometry),
            version: HashVersion::from_disk(image.sb.s_def_hash_version, unsigned)?,
            seed: HashSeed(image.sb.hash_seed()),
            inode,
            blocks: vec![first],
            indexed: false,
        })
    }

    fn kind(block: usize) -> DxKind {
        if block == 0 { DxKind::Root } else { DxKind::Node }
    }

    fn probe(&self, hash: u32) -> Result<(Path, usize)> {
        let (info, mut entries) = htree::parse_root(&self.blocks[0], &self.format, self.depth)?;
        let mut path = vec![(0, entries.search(hash))];
        for _ in 0..info.indirect_levels {
            let (_, index) = path[path.len() - 1];
            let block = entries.block(index)?.0 as usize;
            entries = htree::parse_node(&self.blocks[block], &self.format)?;
            path.push((block, entries.search(hash)));
        }
        let (_, index) = path[path.len() - 1];
        Ok((path, entries.block(index)?.0 as usize))
    }

    fn insert_at(&mut self, block: usize, name: &[u8], inode: InodeNo) -> Result<bool> {
        let area = self.format.entries_area_mut(&mut self.blocks[block])?;
        match dirent::insert(area, &self.format, name, inode, FileType::Regular)? {
            Inserted::At(_) => Ok(true),
            Inserted::NoRoom => Ok(false),
            Inserted::Exists(_) => bail!("{name:?} is there already"),
        }
    }

    fn append(&mut self) -> (LogicalBlock, Vec<u8>) {
        self.blocks.push(Vec::new());
        (LogicalBlock((self.blocks.len() - 1) as u32), vec![0; self.format.block_bytes])
    }

    fn add(&mut self, name: &[u8], inode: InodeNo) -> Result<()> {
        if !self.indexed {
            if self.insert_at(0, name, inode)? {
                return Ok(());
            }
            let (at, mut leaf) = self.append();
            let root = &mut self.blocks[0];
            htree::make_indexed(root, &mut leaf, &self.format, self.version, at)?;
            self.blocks[at.0 as usize] = leaf;
            self.indexed = true;
            return self.split_and_add(vec![(0, 0)], at.0 as usize, name, inode);
        }
        let hash = dirhash(name, self.version, self.seed).hash;
        loop {
            let (path, leaf) = self.probe(hash)?;
            if self.insert_at(leaf, name, inode)? {
                return Ok(());
            }
            if !self.make_index_room(&path)? {
                return self.split_and_add(path, leaf, name, inode);
            }
        }
    }

    fn is_full(&self, block: usize) -> Result<bool> {
        let kind = Self::kind(block);
        Ok(htree::parse(&self.blocks[block], kind, &self.format)?.is_full())
    }

    /// Splits the highest index block that must be split; false when the lowest has room or the
    /// way is still the same.
    fn make_index_room(&mut self, path: &Path) -> Result<bool> {
        let mut level = path.len() - 1;
        if !self.is_full(path[level].0)? {
            return Ok(false);
        }
        while level > 0 && self.is_full(path[level - 1].0)? {
            level -= 1;
        }
        let block = path[level].0;
        let (at, mut new) = self.append();
        if level == 0 {
            htree::grow_root(&mut self.blocks[0], &mut new, &self.format, self.depth, at)?;
        } else {
            let split = htree::split_node(&mut self.blocks[block], &mut new, &self.format)?;
            let (parent, index) = path[level - 1];
            let kind = Self::kind(parent);
            let parent = &mut self.blocks[parent];
            htree::insert(parent, kind, &self.format, index, split.hash, at)?;
        }
        self.blocks[at.0 as usize] = new;
        Ok(true)
    }

    fn split_and_add(
        &mut self,
        path: Path,
        leaf: usize,
        name: &[u8],
        inode: InodeNo,
    ) -> Result<()> {
        let hash = dirhash(name, self.version, self.seed).hash;
        let (at, mut new) = self.append();
        let split = dirent::split_leaf(
            &mut self.blocks[leaf],
            &mut new,
            &self.format,
            self.version,
            self.seed,
        )?;
        self.blocks[at.0 as usize] = new;
        let (parent, index) = path[path.len() - 1];
        let kind = Self::kind(parent);
        let parent = &mut self.blocks[parent];
        htree::insert(parent, kind, &self.format, index, split.index_hash(), at)?;
        let target = if hash >= split.first_hash { at.0 as usize } else { leaf };
        ensure!(self.insert_at(target, name, inode)?, "no room after a split");
        Ok(())
    }

    fn delete(&mut self, name: &[u8]) -> Result<()> {
        let hash = dirhash(name, self.version, self.seed).hash;
        let leaf = if self.indexed { self.probe(hash)?.1 } else { 0 };
        let area = self.format.entries_area_mut(&mut self.blocks[leaf])?;
        let found = dirent::find(area, &self.format, name)?.context("name not found")?;
        let offset = found.offset;
        dirent::remove(area, &self.format, offset)?;
        Ok(())
    }

    /// Which blocks hold index entries.
    fn index_blocks(&self) -> Result<Vec<bool>> {
        let mut is_index = vec![false; self.blocks.len()];
        if !self.indexed {
            return Ok(is_index);
        }
        let (info, entries) = htree::parse_root(&self.blocks[0], &self.format, self.depth)?;
        let mut level = vec![0usize];
        let mut next: Vec<usize> = Vec::new();
        for index in 0..entries.count() {
            next.push(entries.block(index)?.0 as usize);
        }
        for _ in 0..=info.indirect_levels {
            level.iter().for_each(|&block| is_index[block] = true);
            level = std::mem::take(&mut next);
            if level.iter().any(|&block| is_index[block]) {
                bail!("a loop in the index");
            }
            for &block in &level {
                let Ok(entries) = htree::parse_node(&self.blocks[block], &self.format) else {
                    continue;
                };
                for index in 0..entries.count() {
                    next.push(entries.block(index)?.0 as usize);
                }
            }
        }
        Ok(is_index)
    }

    fn seal(&mut self, inode_seed: u32) -> Result<()> {
        let index = self.index_blocks()?;
        for (number, block) in self.blocks.iter_mut().enumerate() {
            if index[number] {
                let kind = Self::kind(number);
                htree::set_checksum(block, kind, &self.format, inode_seed)?;
            } else {
                dirent::set_checksum(block, &self.format, inode_seed)?;
            }
        }
        Ok(())
    }

    /// The records of a leaf as they can be compared: leftovers of free ones left out.
    fn records(&self, block: &[u8]) -> Result<Vec<Record>> {
        let area = self.format.entries_area(block)?;
        let strip = |record: dirent::DirEntry<'_>| {
            let used = record.inode.map(|ino| (ino, record.file_type, record.name.to_vec()));
            (record.offset, record.rec_len, used)
        };
        let records = dirent::records(area, &self.format).map(|record| record.map(strip));
        Ok(records.collect::<Result<_, _>>()?)
    }

    /// Compares with what Linux wrote, and checks the checksums there.
    fn compare(&self, image: &FsImage, physical: &[u64]) -> Result<()> {
        ensure!(physical.len() == self.blocks.len(), "{} blocks", physical.len());
        let seed = image.inode_seed(u64::from(self.inode.0))?;
        let index = self.index_blocks()?;
        for (number, ours) in self.blocks.iter().enumerate() {
            let theirs = image.block(physical[number]);
            if index[number] {
                let kind = Self::kind(number);
                htree::verify_checksum(theirs, kind, &self.format, seed)?;
                ensure!(
                    htree::parse(theirs, kind, &self.format)?
                        == htree::parse(ours, kind, &self.format)?,
                    "index block {number} differs"
                );
            } else {
                dirent::verify_checksum(theirs, &self.format, seed)?;
                let (ours, theirs) = (self.records(ours)?, self.records(theirs)?);
                ensure!(ours == theirs, "leaf {number} differs: {ours:?}\n{theirs:?}");
            }
        }
        Ok(())
    }
}

struct Case {
    mke2fs: &'static str,
    hash: HashKind,
    unsigned: bool,
    links: usize,
    name_bytes: (u64, u64),
    levels: u8,
}

fn random_name(rng: &mut Rng, number: usize, bytes: (u64, u64)) -> Vec<u8> {
    let len = rng.range(bytes.0, bytes.1) as usize;
    let mut name = format!("{number:x}.").into_bytes();
    while name.len() < len {
        let byte = rng.range(1, 256) as u8;
        name.push(if byte == b'/' { b'_' } else { byte });
    }
    name
}

fn run_case(case: &Case) -> Result<()> {
    let scratch = Scratch::new("htree")?;
    let path = scratch.join("image");
    // With another seed of the hash the blocks fill up otherwise, to another depth perhaps.
    let seed = "-E hash_seed=2b7f9a34-55c1-4a0e-8d8e-6c1f0e9b4d21";
    mke2fs(&path, 96 << 20, &format!("{} {seed}", case.mke2fs))?;
    let hash = ["legacy", "half_md4", "tea"]
        [usize::from(HashVersion { kind: case.hash, unsigned: false }.to_disk())];
    run(command("tune2fs")?.args(["-E", &format!("hash_alg={hash}")]).arg(&path))?.ok()?;
    let flags = if case.unsigned { 2 } else { 1 };
    debugfs_write(&path, &[format!("set_super_value flags {flags}")])?;

    let mount = KernelMount::new(&path, "rw")?;
    let dir = mount.path().join("d");
    fs::create_dir(&dir)?;
    let target = mount.path().join("target");
    fs::write(&target, b"")?;
    let target_ino = InodeNo(u32::try_from(fs::metadata(&target)?.ino())?);
    let dir_ino = fs::metadata(&dir)?.ino();
    let image = FsImage::load(&path)?;
    let mut ours = Directory::new(&image, dir_ino, 2)?;
    let mut rng = Rng::new(11);
    let link = |name: &[u8]| fs::hard_link(&target, dir.join(std::ffi::OsStr::from_bytes(name)));
    let mut names = Vec::new();
    for number in 0..case.links {
        let name = random_name(&mut rng, number, case.name_bytes);
        link(&name)?;
        ours.add(&name, target_ino)?;
        names.push(name);
        // Names also go, and their room is taken again.
        if rng.percent(20) {
            let name = names.swap_remove(rng.below(names.len() as u64) as usize);
            fs::remove_file(dir.join(std::ffi::OsStr::from_bytes(&name)))?;
            ours.delete(&name)?;
        }
    }
    mount.unmount()?;

    let image = FsImage::load(&path)?;
    let physical = image.physical_blocks(dir_ino)?;
    ours.compare(&image, &physical)?;
    let (info, _) = htree::parse_root(&ours.blocks[0], &ours.format, ours.depth)?;
    ensure!(info.indirect_levels == case.levels, "{} levels", info.indirect_levels);

    ours.seal(image.inode_seed(dir_ino)?)?;
    let mut bytes = image.bytes.clone();
    for (block, number) in ours.blocks.iter().zip(&physical) {
        let start = *number as usize * block.len();
        bytes[start..start + block.len()].copy_from_slice(block);
    }
    fs::write(&path, bytes)?;
    e2fsck_clean(&path)?;
    Ok(())
}

#[test]
fn two_levels_of_small_blocks() -> Result<()> {
    run_case(&Case {
        mke2fs: "-b 1024",
        hash: HashKind::HalfMd4,
        unsigned: false,
        links: 6000,
        name_bytes: (60, 250),
        levels: 1,
    })
}

#[test]
fn unsigned_tea_without_checksums() -> Result<()> {
    run_case(&Case {
        mke2fs: "-b 4096 -O ^metadata_csum",
        hash: HashKind::Tea,
        unsigned: true,
        links: 3000,
        name_bytes: (10, 100),
        levels: 0,
    })
}

#[test]
fn legacy_hash_without_file_types() -> Result<()> {
    run_case(&Case {
        mke2fs: "-b 2048 -O ^filetype",
        hash: HashKind::Legacy,
        unsigned: true,
        links: 3000,
        name_bytes: (3, 30),
        levels: 0,
    })
}

#[test]
fn three_levels_with_large_dir() -> Result<()> {
    run_case(&Case {
        mke2fs: "-b 1024 -O large_dir -N 64",
        hash: HashKind::HalfMd4,
        unsigned: true,
        links: 30_000,
        name_bytes: (235, 254),
        levels: 2,
    })
}
