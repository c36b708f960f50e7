//! Extended attributes: Linux and this crate do the same changes and must write the same bytes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use fjord_format::types::{BlockNo, InodeNo};
use fjord_format::xattr::{
    self, ValueRef, XattrSet, XattrValue, XattrView, entry_hash, full_name, parse_block,
    parse_ibody, split_name, value_hash, verify_block_checksum,
};
use fjord_testkit::image::{KernelMount, Scratch, debugfs_write, e2fsck_clean};
use fjord_testkit::rng::Rng;
use rustix::fs::{XattrFlags, listxattr, removexattr, setxattr};
use rustix::io::Errno;

use crate::fs_image::{FsImage, mke2fs, mke2fs_of};

/// The attributes of one file, placed by the rules of Linux.
#[derive(Default)]
struct Model {
    ibody: XattrSet,
    block: XattrSet,
}

impl Model {
    /// False when there is no room for the value.
    fn set(&mut self, full: &[u8], value: &[u8], area: usize, block: usize) -> Result<bool> {
        let (index, name) = split_name(full).context("no such prefix")?;
        let same = |set: &XattrSet| {
            let old = set.get(index, name).map(|xattr| xattr.value().clone());
            old == Some(XattrValue::Bytes(value.to_vec()))
        };
        if same(&self.ibody) || same(&self.block) {
            return Ok(true);
        }
        let mut ibody = self.ibody.clone();
        ibody.set(index, name, value)?;
        if ibody.ibody_bytes() <= area {
            self.ibody = ibody;
            self.block.remove(index, name);
            return Ok(true);
        }
        let mut in_block = self.block.clone();
        in_block.set(index, name, value)?;
        if in_block.block_bytes() > block {
            return Ok(false);
        }
        self.block = in_block;
        self.ibody.remove(index, name);
        Ok(true)
    }

    fn remove(&mut self, full: &[u8]) -> Result<bool> {
        let (index, name) = split_name(full).context("no such prefix")?;
        Ok(self.ibody.remove(index, name).or_else(|| self.block.remove(index, name)).is_some())
    }
}

fn random_changes(file: &Path, rng: &mut Rng, block_bytes: usize) -> Result<Model> {
    let mut model = Model::default();
    let area = 256 - 160;
    for _ in 0..60 {
        let prefix = *rng.pick(&["user.", "trusted.", "security."]);
        let name = format!("{prefix}{}", "n".repeat(rng.range(1, 9) as usize));
        if rng.percent(30) {
            let removed = match removexattr(file, name.as_str()) {
                Ok(()) => true,
                Err(Errno::NODATA) => false,
                Err(error) => return Err(error.into()),
            };
            ensure!(model.remove(name.as_bytes())? == removed, "{name} removed");
            continue;
        }
        let len = if rng.percent(60) { rng.below(30) } else { rng.magnitude(700) };
        let value: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
        let stored = match setxattr(file, name.as_str(), &value, XattrFlags::empty()) {
            Ok(()) => true,
            Err(Errno::NOSPC) => false,
            Err(error) => return Err(error.into()),
        };
        let ours = model.set(name.as_bytes(), &value, area, block_bytes)?;
        ensure!(ours == stored, "room for {name} of {len} bytes: {ours}");
    }
    Ok(model)
}

/// Decodes and encodes again what an image has for an inode; the bytes must be the same.
fn reencode(image: &FsImage, ino: u64) -> Result<()> {
    let rules = image.xattr_rules();
    let area = image.xattr_area(ino)?;
    if let Some(view) = parse_ibody(area, &rules)? {
        let mut ours = vec![0xff; area.len()];
        XattrSet::from_view(&view)?.encode_ibody(&mut ours)?;
        ensure!(ours == area, "inode {ino}: {ours:x?}\n{area:x?}");
    }
    if let Some((number, block)) = image.xattr_block(ino)? {
        let seed = image.geometry.csum_seed;
        verify_block_checksum(block, seed, BlockNo(number))?;
        let (header, view) = parse_block(block, &rules)?;
        let mut ours = vec![0xff; block.len()];
        XattrSet::from_view(&view)?.encode_block(&mut ours, header.h_refcount)?;
        xattr::set_block_checksum(&mut ours, seed, BlockNo(number))?;
        ensure!(ours == block, "block {number} of inode {ino} differs");
    }
    Ok(())
}

#[test]
fn changes_give_the_bytes_of_linux() -> Result<()> {
    for block_bytes in [1024usize, 4096] {
        let scratch = Scratch::new("xattr")?;
        let path = scratch.join("image");
        mke2fs(&path, 32 << 20, &format!("-I 256 -b {block_bytes}"))?;
        // Without the cache of blocks no block is shared, so that each file's bytes are its own.
        let mount = KernelMount::new(&path, "rw,no_mbcache")?;
        let mut rng = Rng::new(block_bytes as u64);
        let mut models = Vec::new();
        for number in 0..60 {
            let file = mount.path().join(number.to_string());
            fs::write(&file, b"")?;
            let model = random_changes(&file, &mut rng, block_bytes)?;
            models.push((fs::metadata(&file)?.ino(), model));
        }
        mount.unmount()?;
        let image = FsImage::load(&path)?;
        for (ino, model) in models {
            reencode(&image, ino)?;
            let area = image.xattr_area(ino)?;
            let mut ours = vec![0; area.len()];
            model.ibody.encode_ibody(&mut ours)?;
            ensure!(ours == area, "inode {ino}: {ours:x?}\n{area:x?}");
            let block = image.xattr_block(ino)?;
            ensure!(block.is_none() == model.block.is_empty(), "inode {ino}: block");
            if let Some((number, block)) = block {
                let mut ours = vec![0; block.len()];
                model.block.encode_block(&mut ours, 1)?;
                xattr::set_block_checksum(&mut ours, image.geometry.csum_seed, BlockNo(number))?;
                ensure!(ours == block, "block of inode {ino} differs");
            }
        }
    }
    Ok(())
}

#[test]
fn names_are_listed_as_by_linux() -> Result<()> {
    let scratch = Scratch::new("xattr")?;
    let path = scratch.join("image");
    mke2fs(&path, 16 << 20, "-b 4096")?;
    let mount = KernelMount::new(&path, "rw")?;
    let file = mount.path().join("f");
    fs::write(&file, b"")?;
    for name in ["user.a", "trusted.b", "security.c", "user.\u{fc}ml\u{e4}ut", "user.d.e"] {
        setxattr(&file, name, b"value", XattrFlags::empty())?;
    }
    let mut list = vec![0; 4096];
    let len = listxattr(&file, &mut list)?;
    let ino = fs::metadata(&file)?.ino();
    mount.unmount()?;
    let image = FsImage::load(&path)?;
    let rules = image.xattr_rules();
    let view = parse_ibody(image.xattr_area(ino)?, &rules)?;
    let block = image.xattr_block(ino)?.map(|(_, block)| parse_block(block, &rules)).transpose()?;
    let views = view.into_iter().chain(block.map(|(_, view)| view));
    let names = views.flat_map(|view| view.iter().collect::<Vec<_>>());
    let names = names.filter_map(|entry| full_name(entry.index, entry.name));
    let ours = names.fold(Vec::new(), |list, name| [list, name, vec![0]].concat());
    ensure!(ours == list[..len], "{:?}", String::from_utf8_lossy(&ours));
    Ok(())
}

#[test]
fn values_in_inodes_hash_as_in_linux() -> Result<()> {
    let scratch = Scratch::new("xattr")?;
    let path = scratch.join("image");
    mke2fs(&path, 32 << 20, "-O ea_inode -b 1024")?;
    let mount = KernelMount::new(&path, "rw")?;
    let mut files = Vec::new();
    for size in [998usize, 3000, 4096, 65_000] {
        let file = mount.path().join(size.to_string());
        fs::write(&file, b"")?;
        let value: Vec<u8> = (0..size).map(|byte| (byte * 7) as u8).collect();
        setxattr(&file, "user.small", b"beside", XattrFlags::empty())?;
        setxattr(&file, "user.big", &value, XattrFlags::empty())?;
        setxattr(&file, "trusted.b\u{e9}", &value[1..], XattrFlags::empty())?;
        files.push((fs::metadata(&file)?.ino(), value));
    }
    mount.unmount()?;
    e2fsck_clean(&path)?;
    let image = FsImage::load(&path)?;
    let rules = image.xattr_rules();
    let mut elsewhere = 0;
    for (ino, value) in files {
        reencode(&image, ino)?;
        let view = parse_ibody(image.xattr_area(ino)?, &rules)?;
        let block = image.xattr_block(ino)?.map(|(_, b)| parse_block(b, &rules)).transpose()?;
        for view in view.into_iter().chain(block.map(|(_, view)| view)) {
            for entry in view.iter() {
                let ValueRef::EaInode { inode, size_bytes } = entry.value else { continue };
                let value = if entry.name == b"big" { &value[..] } else { &value[1..] };
                ensure!(size_bytes as usize == value.len(), "size of {:?}", entry.name);
                let hash = value_hash(image.geometry.csum_seed, value);
                let raw = image.inode(u64::from(inode.0))?;
                ensure!(raw[8..12] == hash.to_le_bytes(), "i_atime keeps the value's hash");
                ensure!(entry_hash(entry.name, &hash.to_le_bytes()) == entry.e_hash, "e_hash");
                let mut ours = XattrSet::new();
                ours.set_ea_inode(entry.index, entry.name, inode, size_bytes, hash)?;
                let ours = ours.iter().next().context("just set")?.e_hash();
                ensure!(ours == entry.e_hash, "e_hash of a set");
                elsewhere += 1;
            }
        }
    }
    ensure!(elsewhere >= 4, "only {elsewhere} values got an inode");
    Ok(())
}

#[test]
fn attributes_of_e2fsprogs_decode_and_encode() -> Result<()> {
    let scratch = Scratch::new("xattr")?;
    let path = scratch.join("image");
    let tree = scratch.join("tree");
    fs::create_dir(&tree)?;
    fs::write(tree.join("f"), b"")?;
    fs::write(tree.join("g"), b"")?;
    mke2fs_of(&path, 16 << 20, "-b 1024", &tree)?;
    let mut requests = vec![];
    for number in 0..8 {
        requests.push(format!("ea_set f user.name{number} {}", "v".repeat(number * 9 + 1)));
        requests.push(format!("ea_set g trusted.k{} short", "k".repeat(number)));
    }
    requests.push("ea_rm f user.name3".into());
    debugfs_write(&path, &requests)?;
    let image = FsImage::load(&path)?;
    let rules = image.xattr_rules();
    let mut count = 0;
    for ino in 11..=u64::from(InodeNo::GOOD_OLD_FIRST.0) + 4 {
        let area = image.xattr_area(ino)?;
        let mut again = XattrSet::new();
        if let Some(view) = parse_ibody(area, &rules)? {
            let set = XattrSet::from_view(&view)?;
            let mut ours = vec![0; area.len()];
            set.encode_ibody(&mut ours)?;
            again = XattrSet::from_view(&parse_ibody(&ours, &rules)?.context("magic")?)?;
            ensure!(again.len() == set.len(), "inode {ino}");
        }
        if let Some((number, block)) = image.xattr_block(ino)? {
            verify_block_checksum(block, image.geometry.csum_seed, BlockNo(number))?;
            let (header, view) = parse_block(block, &rules)?;
            let mut ours = vec![0; block.len()];
            XattrSet::from_view(&view)?.encode_block(&mut ours, header.h_refcount)?;
            // e2fsprogs sets the hashes of entries, but not of blocks ("never share").
            let (_, again) = parse_block(&ours, &rules)?;
            let hashes = |view: &XattrView<'_>| {
                view.iter().map(|entry| (entry.name.to_vec(), entry.e_hash)).collect::<Vec<_>>()
            };
            let (mut theirs, mut ours) = (hashes(&view), hashes(&again));
            theirs.sort();
            ours.sort();
            ensure!(ours == theirs, "hashes of the entries of inode {ino}");
            count += view.iter().count();
        }
        count += again.len();
    }
    ensure!(count == 15, "{count} attributes");
    Ok(())
}
