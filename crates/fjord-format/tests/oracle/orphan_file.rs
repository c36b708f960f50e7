//! Blocks of the orphan file, empty as mke2fs makes them and filled as Linux does.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use anyhow::{Result, ensure};
use fjord_format::orphan_file;
use fjord_format::types::{BlockNo, InodeNo};
use fjord_testkit::image::{KernelMount, Scratch, copy_sparse};

use crate::fs_image::{FsImage, mke2fs};

#[test]
fn blocks_of_linux_verify_and_seal_to_the_same_bytes() -> Result<()> {
    let scratch = Scratch::new("orphan")?;
    let path = scratch.join("image");
    let busy = scratch.join("busy");
    mke2fs(&path, 32 << 20, "-O orphan_file -b 4096")?;
    let mount = KernelMount::new(&path, "rw")?;
    let mut open = Vec::new();
    for number in 0..20 {
        let file = mount.path().join(number.to_string());
        open.push(File::create(&file)?);
        fs::remove_file(&file)?;
    }
    // The journal's checkpoint writes the orphan file's blocks to their home locations.
    rustix::fs::syncfs(File::open(mount.path())?)?;
    let mut inodes: Vec<u64> = Vec::new();
    for file in &open {
        inodes.push(file.metadata()?.ino());
    }
    freeze_copy(&mount, &path, &busy)?;
    drop(open);
    mount.unmount()?;

    let mut found = Vec::new();
    for (image, used) in [(&path, 0), (&busy, inodes.len())] {
        let image = FsImage::load(image)?;
        let orphan_ino = u64::from(image.sb.s_orphan_file_inum.get());
        let seed = Some(image.inode_seed(orphan_ino)?);
        let mut count = 0;
        for number in image.physical_blocks(orphan_ino)? {
            let block = image.block(number);
            orphan_file::verify(block, seed, BlockNo(number))?;
            ensure!(orphan_file::verify(block, seed, BlockNo(number + 1)).is_err(), "wrong place");
            let mut ours = vec![0; block.len()];
            for (slot, inode) in orphan_file::orphans(block) {
                orphan_file::set_slot(&mut ours, slot, Some(inode))?;
                found.push(inode);
                count += 1;
            }
            orphan_file::seal(&mut ours, seed, BlockNo(number))?;
            ensure!(ours == block, "sealed block differs");
            let slots = orphan_file::slot_count(block.len());
            let free = (0..slots).find(|&slot| orphan_file::orphans(block).all(|(s, _)| s != slot));
            ensure!(orphan_file::free_slot(block, 0) == free, "first free slot");
        }
        ensure!(count == used, "{count} orphans in place of {used}");
    }
    let mut expected: Vec<InodeNo> = inodes.into_iter().map(|ino| InodeNo(ino as u32)).collect();
    found.sort();
    expected.sort();
    ensure!(found == expected, "{found:?} in place of {expected:?}");
    Ok(())
}

/// Copies the image while the file system is frozen, so that the copy has no journal to replay.
fn freeze_copy(mount: &KernelMount, from: &std::path::Path, to: &std::path::Path) -> Result<()> {
    use fjord_testkit::tools::{command, run};
    run(command("fsfreeze")?.arg("-f").arg(mount.path()))?.ok()?;
    let copied = copy_sparse(from, to);
    run(command("fsfreeze")?.arg("-u").arg(mount.path()))?.ok()?;
    copied
}
