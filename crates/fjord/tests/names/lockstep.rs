//! The same random operations on fjord and on the kernel's ext4: every errno and, from time
//! to time, the whole tree must agree.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use fjord::{Error, FileKind, Fs, InodeRef, RenameFlags, SetAttr, XattrFlags};
use fjord_testkit::image::KernelMount;
use fjord_testkit::rng::{Rng, seed_from_env};
use rustix::fs::{AtFlags, CWD, FileType, Mode};
use rustix::io::Errno;

use crate::support::{Image, errno, finish, root_cred};

const IMMUTABLE: u32 = 0x10;
const APPEND: u32 = 0x20;

#[derive(Debug, Clone)]
enum Op {
    Create(Vec<u8>, u16),
    Mkdir(Vec<u8>, u16),
    Mknod(Vec<u8>, u16, u32),
    Symlink(Vec<u8>, Vec<u8>),
    Link(Vec<u8>, Vec<u8>),
    Unlink(Vec<u8>),
    Rmdir(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>, u32),
    SetXattr(Vec<u8>, Vec<u8>, Vec<u8>, u32),
    RemoveXattr(Vec<u8>, Vec<u8>),
    Flags(Vec<u8>, u32),
    Chmod(Vec<u8>, u16),
}

/// The operation in few letters.
fn describe(op: &Op) -> String {
    let text = match op {
        Op::Create(path, mode) => format!("create {} {mode:o}", path.escape_ascii()),
        Op::Mkdir(path, mode) => format!("mkdir {} {mode:o}", path.escape_ascii()),
        Op::Mknod(path, mode, rdev) => {
            format!("mknod {} {mode:o} {rdev:x}", path.escape_ascii())
        }
        Op::Symlink(path, target) => {
            format!("symlink {} of {}", path.escape_ascii(), target.len())
        }
        Op::Link(old, new) => format!("link {} {}", old.escape_ascii(), new.escape_ascii()),
        Op::Unlink(path) => format!("unlink {}", path.escape_ascii()),
        Op::Rmdir(path) => format!("rmdir {}", path.escape_ascii()),
        Op::Rename(old, new, flags) => {
            format!("rename {} {} {flags}", old.escape_ascii(), new.escape_ascii())
        }
        Op::SetXattr(path, name, value, flags) => {
            let (path, name) = (path.escape_ascii(), name.escape_ascii());
            format!("setxattr {path} {name} of {} {flags}", value.len())
        }
        Op::RemoveXattr(path, name) => {
            format!("removexattr {} {}", path.escape_ascii(), name.escape_ascii())
        }
        Op::Chmod(path, mode) => format!("chmod {} {mode:o}", path.escape_ascii()),
        Op::Flags(path, flags) => format!("flags {} {flags:x}", path.escape_ascii()),
    };
    text.replace(&"x".repeat(8), "").replace(&"y".repeat(8), "")
}

struct Generator {
    rng: Rng,
    long_names: bool,
}

impl Generator {
    fn name(&mut self) -> Vec<u8> {
        let number = self.rng.below(if self.long_names { 40 } else { 7 });
        let mut name = format!("n{number}").into_bytes();
        if self.long_names {
            let filler = [b'x'; 250];
            let len = (number as usize * 37) % 250;
            name.extend_from_slice(&filler[..len]);
        }
        match self.rng.below(400) {
            0 => vec![b'y'; 256],
            1 => b".".to_vec(),
            2 => b"..".to_vec(),
            _ => name,
        }
    }

    fn path(&mut self) -> Vec<u8> {
        let depth = 1 + self.rng.below(4);
        let mut parts: Vec<Vec<u8>> = (0..depth).map(|_| self.name()).collect();
        let last = parts.len() - 1;
        // From the root, `..` would lead Linux out of its mount.
        let first = parts.iter().position(|part| part != b".").unwrap_or(0);
        for (at, part) in parts.iter_mut().enumerate() {
            if part == b".." && (at < last || at <= first) {
                *part = b"n0".to_vec();
            }
        }
        parts.join(&b'/')
    }

    fn op(&mut self) -> Op {
        let a = self.path();
        match self.rng.below(100) {
            0..14 => Op::Create(a, 0o600 + self.rng.below(0o200) as u16),
            14..36 => Op::Mkdir(a, if self.rng.percent(10) { 0o3755 } else { 0o755 }),
            36..40 => {
                let kind = *self.rng.pick(&[0o010_000, 0o020_000, 0o060_000, 0o140_000]);
                Op::Mknod(a, kind | 0o640, self.rng.below(1 << 20) as u32)
            }
            40..45 => {
                let len = *self.rng.pick(&[1, 59, 60, 61, 200, 1000]);
                // To nowhere, in parts that are not too long for a name.
                Op::Symlink(a, (1..=len).map(|at| if at % 90 == 0 { b'/' } else { b't' }).collect())
            }
            45..53 => Op::Link(a, self.path()),
            53..63 => Op::Unlink(a),
            63..70 => Op::Rmdir(a),
            70..90 => {
                let flags = *self.rng.pick(&[0, 0, 0, 1, 2, 2, 4, 5, 3, 6]);
                Op::Rename(a, self.path(), flags)
            }
            90..96 => {
                let name = format!("user.k{}", self.rng.below(4)).into_bytes();
                let len = *self.rng.pick(&[0, 1, 10, 60, 300, 700]);
                Op::SetXattr(a, name, vec![b'v'; len], self.rng.below(3) as u32)
            }
            96..98 => Op::RemoveXattr(a, format!("user.k{}", self.rng.below(4)).into_bytes()),
            98 => Op::Chmod(a, *self.rng.pick(&[0o2755, 0o2775, 0o755])),
            _ => Op::Flags(a, *self.rng.pick(&[0, 0, 0, IMMUTABLE, APPEND])),
        }
    }
}

/// Walks to the last name: its directory and the name.
fn walk<'a>(fs: &Fs, path: &'a [u8]) -> Result<(InodeRef, &'a [u8]), Error> {
    let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    let last = parts.pop().expect("a path has a last name");
    let mut dir = fs.root()?;
    for part in parts {
        dir = dir.lookup(part)?;
        // All symbolic links of this test point to nothing.
        if dir.attr().kind() == FileKind::Symlink {
            return Err(Error::from(Errno::NOENT));
        }
    }
    if dir.attr().kind() != FileKind::Directory {
        return Err(Error::from(Errno::NOTDIR));
    }
    Ok((dir, last))
}

fn resolve(fs: &Fs, path: &[u8]) -> Result<InodeRef, Error> {
    let (dir, last) = walk(fs, path)?;
    dir.lookup(last)
}

fn in_fjord(fs: &Fs, op: &Op) -> i32 {
    let cred = root_cred();
    let run = || -> Result<(), Error> {
        match op {
            Op::Create(path, mode) => {
                let (dir, name) = walk(fs, path)?;
                dir.create(name, *mode, &cred).map(drop)
            }
            Op::Mkdir(path, mode) => {
                let (dir, name) = walk(fs, path)?;
                dir.mkdir(name, *mode, &cred).map(drop)
            }
            Op::Mknod(path, mode, rdev) => {
                let (dir, name) = walk(fs, path)?;
                dir.mknod(name, *mode, *rdev, &cred).map(drop)
            }
            Op::Symlink(path, target) => {
                let (dir, name) = walk(fs, path)?;
                dir.symlink(name, target, &cred).map(drop)
            }
            Op::Link(old, new) => {
                let target = resolve(fs, old)?;
                let (dir, name) = walk(fs, new)?;
                dir.link(&target, name)
            }
            Op::Unlink(path) => {
                let (dir, name) = walk(fs, path)?;
                dir.unlink(name)
            }
            Op::Rmdir(path) => {
                let (dir, name) = walk(fs, path)?;
                dir.rmdir(name)
            }
            Op::Rename(old, new, flags) => {
                let flags = RenameFlags::from_bits_retain(*flags);
                // The system call looks at the flags before it walks.
                let mixed = RenameFlags::NOREPLACE | RenameFlags::WHITEOUT;
                if flags.contains(RenameFlags::EXCHANGE) && flags.intersects(mixed) {
                    return Err(Errno::INVAL.into());
                }
                let (old_dir, old_name) = walk(fs, old)?;
                let (new_dir, new_name) = walk(fs, new)?;
                old_dir.rename(old_name, &new_dir, new_name, flags, &cred)
            }
            Op::SetXattr(path, name, value, flags) => {
                resolve(fs, path)?.set_xattr(name, value, XattrFlags::from_bits_retain(*flags))
            }
            Op::RemoveXattr(path, name) => resolve(fs, path)?.remove_xattr(name),
            Op::Chmod(path, mode) => {
                let inode = resolve(fs, path)?;
                if inode.attr().kind() != FileKind::Directory {
                    return Err(Errno::NOENT.into());
                }
                let change = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                inode.set_attr(&change, &cred).map(drop)
            }
            Op::Flags(path, flags) => {
                let inode = resolve(fs, path)?;
                if !matches!(inode.attr().kind(), FileKind::Regular | FileKind::Directory) {
                    return Err(Errno::NOENT.into());
                }
                let kept = inode.flags() & !(IMMUTABLE | APPEND);
                inode.set_flags(kept | flags)
            }
        }
    };
    errno(&run())
}

fn in_kernel(root: &Path, op: &Op) -> i32 {
    let at = |path: &[u8]| root.join(OsStr::from_bytes(path));
    let run = || -> Result<(), Errno> {
        match op {
            Op::Create(path, mode) => {
                use rustix::fs::OFlags;
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDONLY;
                rustix::fs::open(at(path), flags, Mode::from_raw_mode(u32::from(*mode))).map(drop)
            }
            Op::Mkdir(path, mode) => {
                rustix::fs::mkdir(at(path), Mode::from_raw_mode(u32::from(*mode)))
            }
            Op::Mknod(path, mode, rdev) => {
                let kind = FileType::from_raw_mode(u32::from(*mode));
                let mode = Mode::from_raw_mode(u32::from(*mode));
                let (major, minor) = (*rdev >> 8 & 0xfff, *rdev & 0xff | (*rdev >> 12 & 0xfff00));
                let dev = rustix::fs::makedev(major, minor);
                rustix::fs::mknodat(CWD, at(path), kind, mode, dev)
            }
            Op::Symlink(path, target) => rustix::fs::symlink(OsStr::from_bytes(target), at(path)),
            Op::Link(old, new) => rustix::fs::linkat(CWD, at(old), CWD, at(new), AtFlags::empty()),
            Op::Unlink(path) => rustix::fs::unlink(at(path)),
            Op::Rmdir(path) => rustix::fs::rmdir(at(path)),
            Op::Rename(old, new, flags) => {
                let flags = rustix::fs::RenameFlags::from_bits_retain(*flags);
                rustix::fs::renameat_with(CWD, at(old), CWD, at(new), flags)
            }
            Op::SetXattr(path, name, value, flags) => rustix::fs::lsetxattr(
                at(path),
                OsStr::from_bytes(name),
                value,
                rustix::fs::XattrFlags::from_bits_retain(*flags),
            ),
            Op::RemoveXattr(path, name) => {
                rustix::fs::lremovexattr(at(path), OsStr::from_bytes(name))
            }
            Op::Chmod(path, mode) => {
                let kind = FileType::from_raw_mode(rustix::fs::lstat(at(path))?.st_mode);
                if kind != FileType::Directory {
                    return Err(Errno::NOENT);
                }
                rustix::fs::chmod(at(path), Mode::from_raw_mode(u32::from(*mode)))
            }
            Op::Flags(path, flags) => {
                use rustix::fs::{IFlags, OFlags};
                let kind = FileType::from_raw_mode(rustix::fs::lstat(at(path))?.st_mode);
                if !matches!(kind, FileType::RegularFile | FileType::Directory) {
                    return Err(Errno::NOENT);
                }
                let file = rustix::fs::open(at(path), OFlags::RDONLY, Mode::empty())?;
                let kept = rustix::fs::ioctl_getflags(&file)?.bits() & !(IMMUTABLE | APPEND);
                rustix::fs::ioctl_setflags(&file, IFlags::from_bits_retain(kept | flags))
            }
        }
    };
    run().err().map_or(0, Errno::raw_os_error)
}

/// What both sides tell about one path.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    nlink: u64,
    uid: u32,
    gid: u32,
    rdev: u64,
    /// Of files and links; how many blocks a directory takes is its own affair.
    size: Option<u64>,
    target: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

fn fjord_tree(fs: &Fs) -> BTreeMap<Vec<u8>, Seen> {
    let mut tree = BTreeMap::new();
    let mut pending = vec![(Vec::new(), fs.root().expect("root"))];
    while let Some((path, inode)) = pending.pop() {
        let attr = inode.attr();
        let names = inode.list_xattr().expect("list");
        let xattrs = names.into_iter().map(|name| {
            let value = inode.get_xattr(&name).expect("get");
            (name, value)
        });
        let is_dir = attr.kind() == FileKind::Directory;
        let is_link = attr.kind() == FileKind::Symlink;
        let seen = Seen {
            mode: u32::from(attr.mode),
            nlink: u64::from(attr.nlink),
            uid: attr.uid,
            gid: attr.gid,
            rdev: u64::from(attr.rdev),
            size: (!is_dir).then_some(attr.size),
            target: if is_link { inode.read_link().expect("target") } else { Vec::new() },
            xattrs: xattrs.collect(),
        };
        if is_dir {
            for (name, ino) in crate::support::names(&inode) {
                let child = inode.lookup(&name).expect("a listed name is found");
                assert_eq!(child.ino().0, ino);
                let mut below = path.clone();
                below.extend_from_slice(b"/");
                below.extend_from_slice(&name);
                pending.push((below, child));
            }
        }
        tree.insert(path, seen);
    }
    tree
}

fn kernel_tree(root: &Path) -> BTreeMap<Vec<u8>, Seen> {
    let mut tree = BTreeMap::new();
    let mut pending = vec![(Vec::new(), root.to_owned())];
    while let Some((path, full)) = pending.pop() {
        let stat = std::fs::symlink_metadata(&full).expect("stat");
        let seen = Seen {
            mode: stat.mode(),
            nlink: stat.nlink(),
            uid: stat.uid(),
            gid: stat.gid(),
            rdev: stat.rdev(),
            size: (!stat.is_dir()).then_some(stat.size()),
            target: match stat.is_symlink() {
                true => {
                    std::fs::read_link(&full).expect("link").into_os_string().into_encoded_bytes()
                }
                false => Vec::new(),
            },
            xattrs: kernel_xattrs(&full),
        };
        if stat.is_dir() {
            for entry in std::fs::read_dir(&full).expect("read_dir") {
                let name = entry.expect("entry").file_name();
                let mut below: Vec<u8> = path.clone();
                below.extend_from_slice(b"/");
                below.extend_from_slice(name.as_bytes());
                pending.push((below, full.join(name)));
            }
        }
        tree.insert(path, seen);
    }
    tree
}

fn kernel_xattrs(path: &PathBuf) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0u8; 65536];
    let used = rustix::fs::llistxattr(path, &mut list[..]).expect("list");
    let names = list[..used].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0u8; 65536];
            let used =
                rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).expect("get");
            value.truncate(used);
            (name.to_vec(), value)
        })
        .collect()
}

fn compare(fs: &Fs, kernel: &Path, after: &str) {
    let ours = fjord_tree(fs);
    let theirs = kernel_tree(kernel);
    for (path, seen) in &theirs {
        assert_eq!(
            ours.get(path),
            Some(seen),
            "{after}: {:?} (left: fjord, right: Linux)",
            String::from_utf8_lossy(path)
        );
    }
    assert_eq!(ours.len(), theirs.len(), "{after}: fjord has names that Linux has not");
}

fn run(set: &str, mke2fs: &[&str], long_names: bool, steps: u32) {
    let seed = seed_from_env(&format!("lockstep {set}"), 1);
    let ours = Image::new(64, mke2fs);
    let theirs = Image::new(64, mke2fs);
    let kernel = KernelMount::new(theirs.path(), "rw").expect("kernel mount");
    rustix::process::umask(Mode::empty());
    let mut fs = ours.open();
    let mut generator = Generator { rng: Rng::new(seed), long_names };
    for step in 0..steps {
        let op = generator.op();
        let theirs = in_kernel(kernel.path(), &op);
        let got = in_fjord(&fs, &op);
        assert_eq!(got, theirs, "step {step}: {} (left: fjord, right: Linux)", describe(&op));
        if step % 1500 == 1499 {
            compare(&fs, kernel.path(), &format!("after step {step}"));
            finish(fs);
            ours.check();
            fs = ours.open();
            compare(&fs, kernel.path(), &format!("after step {step}, mounted again"));
        }
    }
    finish(fs);
    ours.check();
    let again = KernelMount::new(ours.path(), "ro").expect("Linux mounts what fjord wrote");
    let (read, expected) = (kernel_tree(again.path()), kernel_tree(kernel.path()));
    assert!(read == expected, "Linux reads something else from fjord's image");
    again.unmount().expect("unmount");
    kernel.unmount().expect("unmount");
}

#[test]
fn default_features() {
    run("default", &["-t", "ext4"], false, 15000);
}

#[test]
fn small_blocks_and_long_names() {
    run("1k", &["-t", "ext4", "-b", "1024"], true, 15000);
}

#[test]
fn inline_data() {
    run("inline", &["-t", "ext4", "-O", "inline_data"], false, 15000);
}

#[test]
fn inline_data_and_long_names() {
    run("inline-long", &["-t", "ext4", "-I", "512", "-O", "inline_data"], true, 15000);
}

#[test]
fn ea_inode_small_blocks() {
    run("ea_inode", &["-t", "ext4", "-b", "1024", "-O", "ea_inode"], true, 12000);
}

#[test]
fn orphan_file() {
    run("orphan_file", &["-t", "ext4", "-O", "orphan_file"], false, 12000);
}

#[test]
fn no_checksums_no_index() {
    run("plain", &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^dir_index"], true, 12000);
}

#[test]
fn ext3() {
    run("ext3", &["-t", "ext3", "-b", "1024"], true, 12000);
}

#[test]
fn ext2() {
    run("ext2", &["-t", "ext2", "-b", "1024"], true, 12000);
}

#[test]
fn small_inodes() {
    run("inode-128", &["-t", "ext4", "-I", "128"], false, 9000);
}
