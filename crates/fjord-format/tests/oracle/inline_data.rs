//! Inline files and directories as Linux lays them out.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, ensure};
use fjord_format::dirent::{self, DirFormat, FileType};
use fjord_format::inline_data::{self, InlineData, InlineDir};
use fjord_format::types::InodeNo;
use fjord_format::xattr::parse_ibody;
use fjord_testkit::image::{KernelMount, Scratch, e2fsck_clean};

use crate::fs_image::{FsImage, mke2fs};

const INLINE_DATA_FL: u32 = 0x1000_0000;

fn is_inline(image: &FsImage, ino: u64) -> Result<bool> {
    Ok(image.flags(ino)? & INLINE_DATA_FL != 0)
}

fn parse(image: &FsImage, ino: u64) -> Result<InlineData<'_>> {
    let view = parse_ibody(image.xattr_area(ino)?, &image.xattr_rules())?;
    Ok(InlineData::parse(image.i_block(ino)?, view.as_ref())?)
}

#[test]
fn files_are_split_and_measured_as_by_linux() -> Result<()> {
    for inode_bytes in [256u64, 512] {
        let scratch = Scratch::new("inline")?;
        let path = scratch.join("image");
        let options = format!("-O inline_data -I {inode_bytes} -b 4096 -N 1024");
        mke2fs(&path, 32 << 20, &options)?;
        let mount = KernelMount::new(&path, "rw")?;
        let mut files = Vec::new();
        // An empty file has no data yet, inline or not.
        for size in 1..inode_bytes {
            let file = mount.path().join(size.to_string());
            let data: Vec<u8> = (0..size).map(|byte| byte as u8 ^ 0x5a).collect();
            fs::write(&file, &data)?;
            files.push((fs::metadata(&file)?.ino(), data));
        }
        mount.unmount()?;
        let image = FsImage::load(&path)?;
        let longest =
            inline_data::capacity_bytes(usize::from(image.geometry.inode_size) - 160, None);
        for (ino, data) in files {
            ensure!(
                is_inline(&image, ino)? == (data.len() <= longest),
                "{} bytes in an inode of {inode_bytes}, longest {longest}",
                data.len()
            );
            if data.len() > longest {
                continue;
            }
            let inline = parse(&image, ino)?;
            ensure!(inline.contents(data.len() as u64)? == data, "{} bytes differ", data.len());
            let (head, tail) = inline_data::split(&data);
            ensure!(&head == inline.head && inline.tail.starts_with(tail), "split otherwise");
            let view = parse_ibody(image.xattr_area(ino)?, &image.xattr_rules())?;
            let area_bytes = image.xattr_area(ino)?.len();
            ensure!(
                inline_data::capacity_bytes(area_bytes, view.as_ref()) == longest,
                "capacity with {} bytes in",
                data.len()
            );
        }
    }
    Ok(())
}

/// Length, inode and name of a record.
type Record = (usize, Option<InodeNo>, Vec<u8>);

/// Records of an area as they can be compared: leftovers of free ones left out.
fn records(area: &[u8], format: &DirFormat) -> Result<Vec<Record>> {
    let strip = |record: dirent::DirEntry<'_>| {
        (record.rec_len, record.inode, record.inode.map_or(Vec::new(), |_| record.name.to_vec()))
    };
    Ok(dirent::records(area, format).map(|r| r.map(strip)).collect::<Result<_, _>>()?)
}

#[test]
fn directories_grow_and_leave_the_inode_as_in_linux() -> Result<()> {
    let scratch = Scratch::new("inline")?;
    let path = scratch.join("image");
    mke2fs(&path, 32 << 20, "-O inline_data -I 256 -b 1024")?;
    // Directory k of the same names has k of them: the states of one directory as it grows.
    let names: Vec<String> = (0..12).map(|n| format!("name-{n}-{}", "x".repeat(n % 5))).collect();
    let mount = KernelMount::new(&path, "rw")?;
    let target = mount.path().join("target");
    fs::write(&target, b"")?;
    let target_ino = InodeNo(fs::metadata(&target)?.ino() as u32);
    let mut dirs = Vec::new();
    for count in 0..=names.len() {
        let dir = mount.path().join(format!("d{count}"));
        fs::create_dir(&dir)?;
        for name in &names[..count] {
            fs::hard_link(&target, dir.join(name))?;
        }
        dirs.push(fs::metadata(&dir)?.ino());
    }
    mount.unmount()?;
    e2fsck_clean(&path)?;

    let image = FsImage::load(&path)?;
    let format = image.dir_format();
    let mut head = [0; 60];
    inline_data::init_dir(&mut head, &format, InodeNo(2))?;
    let mut tail: Vec<u8> = Vec::new();
    let mut converted = false;
    for (count, &ino) in dirs.iter().enumerate() {
        if count > 0 {
            let name = names[count - 1].as_bytes();
            converted = !add(&mut head, &mut tail, &format, name, target_ino)?;
        }
        ensure!(is_inline(&image, ino)? != converted, "{count} names");
        if converted {
            compare_converted(&image, ino, &head, &tail, names[count - 1].as_bytes(), target_ino)?;
            break;
        }
        let data = parse(&image, ino)?;
        let theirs = InlineDir::parse(data, &format)?;
        ensure!(theirs.parent == InodeNo(2), "parent");
        ensure!(image.size(ino)? == data.room_bytes() as u64, "i_size counts the room");
        ensure!(records(theirs.head, &format)? == records(&head[4..], &format)?, "{count}: head");
        ensure!(records(theirs.tail, &format)? == records(&tail, &format)?, "{count}: tail");
    }
    ensure!(converted && !tail.is_empty(), "the test's names must fill the inode");
    Ok(())
}

/// Adds a name as Linux does: in `i_block`, else in the attribute, which gets all the room there
/// is the first time; false when neither has room.
fn add(
    head: &mut [u8; 60],
    tail: &mut Vec<u8>,
    format: &DirFormat,
    name: &[u8],
    inode: InodeNo,
) -> Result<bool> {
    let inserted = |area: &mut [u8]| dirent::insert(area, format, name, inode, FileType::Regular);
    if matches!(inserted(inline_data::dir_head_mut(head))?, dirent::Inserted::At(_)) {
        return Ok(true);
    }
    if tail.is_empty() {
        tail.resize(inline_data::capacity_bytes(256 - 160, None) - 60, 0);
        dirent::extend_area(tail, format, 0)?;
    }
    Ok(matches!(inserted(tail)?, dirent::Inserted::At(_)))
}

fn compare_converted(
    image: &FsImage,
    ino: u64,
    head: &[u8; 60],
    tail: &[u8],
    name: &[u8],
    target: InodeNo,
) -> Result<()> {
    let format = image.dir_format();
    let dir = InlineDir::parse(InlineData { head, tail }, &format)?;
    let mut block = vec![0; format.block_bytes];
    dir.to_block(&mut block, &format, InodeNo(ino as u32))?;
    let area = format.entries_area_mut(&mut block)?;
    dirent::insert(area, &format, name, target, FileType::Regular)?;
    dirent::set_checksum(&mut block, &format, image.inode_seed(ino)?)?;
    let physical = image.physical_blocks(ino)?;
    let theirs = image.block(*physical.first().context("no block")?);
    dirent::verify_checksum(theirs, &format, image.inode_seed(ino)?)?;
    let theirs = records(format.entries_area(theirs)?, &format)?;
    ensure!(theirs == records(format.entries_area(&block)?, &format)?, "the block differs");
    Ok(())
}
