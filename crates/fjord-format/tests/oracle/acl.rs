//! Access control lists: what setfacl, chmod and inheritance make Linux store.

use std::fs::{self, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use fjord_format::acl::Acl;
use fjord_format::xattr::{NameIndex, ValueRef, parse_block, parse_ibody};
use fjord_testkit::image::{KernelMount, Scratch};
use fjord_testkit::tools::{command, run};
use rustix::fs::getxattr;

use crate::fs_image::{FsImage, mke2fs};

const LISTS: [&str; 5] = [
    "u::rw-,g::r--,o::---,u:1000:rwx,m::rwx",
    "u::rwx,g::r-x,o::r--,g:0:r--,g:4294967294:-w-,u:65534:--x,m::r-x",
    "u::rwx,g::rwx,o::rwx,m::---",
    "u::r--,g::rw-,o::r-x",
    "u::-w-,g::--x,o::-w-,u:1:r--,u:2:-w-,u:3:--x,g:1:rwx,g:2:r-x,g:3:-wx,m::rw-",
];

fn setfacl(list: &str, path: &Path) -> Result<()> {
    run(command("setfacl")?.args(["--set", list]).arg(path))?.ok()?;
    Ok(())
}

/// What getxattr gives; `None` when there is no such attribute.
fn attribute(path: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let mut buf = vec![0; 4096];
    match getxattr(path, name, &mut buf) {
        Ok(len) => Ok(Some(buf[..len].to_vec())),
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn access(path: &Path) -> Result<Option<Acl>> {
    let value = attribute(path, "system.posix_acl_access")?.unwrap_or_default();
    Ok(Acl::from_xattr(&value)?)
}

#[test]
fn lists_convert_as_linux_stores_them() -> Result<()> {
    let scratch = Scratch::new("acl")?;
    let path = scratch.join("image");
    mke2fs(&path, 16 << 20, "-b 1024")?;
    let mount = KernelMount::new(&path, "rw,acl")?;
    let mut files = Vec::new();
    for (number, list) in LISTS.iter().enumerate() {
        let file = mount.path().join(number.to_string());
        fs::write(&file, b"")?;
        setfacl(list, &file)?;
        let metadata = fs::metadata(&file)?;
        let value = attribute(&file, "system.posix_acl_access")?;
        files.push((metadata.ino(), metadata.mode() as u16, value));
    }
    mount.unmount()?;
    let image = FsImage::load(&path)?;
    for (ino, mode, value) in files {
        let rules = image.xattr_rules();
        let area = image.xattr_area(ino)?;
        let in_inode = parse_ibody(area, &rules)?;
        let in_block = image.xattr_block(ino)?.map(|(_, block)| parse_block(block, &rules));
        let in_block = in_block.transpose()?.map(|(_, view)| view);
        let mut views = in_inode.into_iter().chain(in_block);
        let entry = views.find_map(|view| view.find(NameIndex::POSIX_ACL_ACCESS, b""));
        let Some(value) = value else {
            ensure!(entry.is_none(), "a list that says no more than the mode is stored");
            continue;
        };
        let ValueRef::Bytes(disk) = entry.context("no list on disk")?.value else {
            anyhow::bail!("the list is in an inode");
        };
        let acl = Acl::from_disk(disk)?.context("an empty list")?;
        ensure!(acl.to_disk() == disk, "encodes otherwise than Linux");
        ensure!(acl.to_xattr() == value, "shown otherwise than by Linux");
        ensure!(Acl::from_xattr(&value)? == Some(acl.clone()), "from the system call");
        ensure!(acl.apply_to_mode(mode) == mode, "mode {mode:o}");
        ensure!(!acl.is_mode_only(), "need not be stored");
    }
    Ok(())
}

#[test]
fn chmod_and_inheritance_follow_linux() -> Result<()> {
    let scratch = Scratch::new("acl")?;
    let path = scratch.join("image");
    mke2fs(&path, 16 << 20, "-b 4096")?;
    let mount = KernelMount::new(&path, "rw,acl")?;
    for (number, list) in LISTS.iter().enumerate() {
        let dir = mount.path().join(number.to_string());
        fs::create_dir(&dir)?;
        run(command("setfacl")?.args(["-d", "--set", list]).arg(&dir))?.ok()?;
        let default = attribute(&dir, "system.posix_acl_default")?.context("no default list")?;
        let default = Acl::from_xattr(&default)?.context("an empty default list")?;
        for mode in [0o000u16, 0o777, 0o640, 0o711, 0o4765, 0o1027] {
            let child = dir.join(format!("f{mode:o}"));
            let mut create = fs::OpenOptions::new();
            create.write(true).create_new(true).mode(u32::from(mode)).open(&child)?;
            let expected = default.inherit(mode | 0o100_000);
            let found = fs::metadata(&child)?.mode() as u16;
            ensure!(found == expected.mode, "{list} {mode:o}: {found:o} {expected:?}");
            // A list that says what the mode says is what a file without one shows.
            ensure!(access(&child)? == expected.access, "{list} {mode:o}");

            let subdir = dir.join(format!("d{mode:o}"));
            fs::DirBuilder::new().mode(u32::from(mode)).create(&subdir)?;
            let inherited = attribute(&subdir, "system.posix_acl_default")?;
            ensure!(inherited == Some(default.to_xattr()), "{list}: default of a directory");

            if let Some(mut acl) = access(&child)? {
                fs::set_permissions(&child, Permissions::from_mode(0o635))?;
                acl.chmod(0o635);
                ensure!(access(&child)? == Some(acl), "{list}: after chmod");
            }
        }
    }
    mount.unmount()
}
