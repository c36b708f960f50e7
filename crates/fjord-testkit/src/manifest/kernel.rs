//! Manifests of directories, read through system calls: kernel ext4 and FUSE mounts alike.
//!
//! Invariant: reading changes nothing; mount read-only where access times matter.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt},
    },
    path::Path,
};

use anyhow::{Context, Result};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, SeekFrom, Statx, StatxFlags, StatxTimestamp},
    io::Errno,
};

use super::{Entry, Kind, Manifest, PIECE_BYTES, READ_WHOLE_BYTES, Stamp, hash_piece};
use crate::script::fsxattr;

impl Manifest {
    /// Reads the tree below `root`. Does not cross into other file systems' content knowingly.
    pub fn from_directory(root: &Path) -> Result<Manifest> {
        let mut manifest = Manifest::default();
        let mut inodes = BTreeMap::new();
        // A linked file is read once: reading leaves pages that count as data in a second hole map.
        let mut linked: BTreeMap<u64, Entry> = BTreeMap::new();
        let mut pending = vec![Vec::new()];
        while let Some(path) = pending.pop() {
            let full =
                if path.is_empty() { root.to_owned() } else { root.join(OsStr::from_bytes(&path)) };
            let ino = std::fs::symlink_metadata(&full)?.ino();
            let entry = match linked.get(&ino) {
                Some(entry) => entry.clone(),
                None => read_entry(&full).with_context(|| format!("reading {}", full.display()))?,
            };
            if entry.kind != Kind::Directory && entry.nlink > 1 {
                linked.insert(ino, entry.clone());
            }
            if entry.kind == Kind::Directory {
                for child in std::fs::read_dir(&full)? {
                    let name = child?.file_name();
                    let mut below = path.clone();
                    if !below.is_empty() {
                        below.push(b'/');
                    }
                    below.extend_from_slice(name.as_bytes());
                    pending.push(below);
                }
            }
            inodes.insert(path.clone(), ino);
            manifest.entries.insert(path, entry);
        }
        manifest.group_links(&inodes);
        Ok(manifest)
    }
}

fn stamp(time: StatxTimestamp) -> Stamp {
    Stamp { sec: time.tv_sec, nsec: time.tv_nsec }
}

fn read_entry(path: &Path) -> Result<Entry> {
    let stat: Statx = rustix::fs::statx(
        CWD,
        path,
        AtFlags::SYMLINK_NOFOLLOW,
        StatxFlags::BASIC_STATS | StatxFlags::BTIME,
    )?;
    let mode = u32::from(stat.stx_mode);
    let kind = Kind::from_mode(mode).context("unknown file type")?;
    let mut entry = Entry {
        kind,
        mode: mode & 0o7777,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        size: stat.stx_size,
        nlink: stat.stx_nlink,
        blocks_512b: stat.stx_blocks,
        atime: stamp(stat.stx_atime),
        mtime: stamp(stat.stx_mtime),
        ctime: stamp(stat.stx_ctime),
        btime: (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| stamp(stat.stx_btime)),
        rdev: (stat.stx_rdev_major, stat.stx_rdev_minor),
        target: Vec::new(),
        xattrs: read_xattrs(path)?,
        pieces: BTreeMap::new(),
        data: Vec::new(),
        flags: 0,
        project: 0,
        first_name: Vec::new(),
    };
    match kind {
        Kind::Symlink => entry.target = std::fs::read_link(path)?.as_os_str().as_bytes().to_vec(),
        Kind::File => {
            let file = open(path, OFlags::empty())?;
            read_flags(&file, &mut entry)?;
            entry.data = data_ranges(&file, entry.size)?;
            entry.pieces = hash_content(&file, entry.size, &entry.data)?;
        }
        Kind::Directory => read_flags(&open(path, OFlags::DIRECTORY)?, &mut entry)?,
        _ => {}
    }
    Ok(entry)
}

fn open(path: &Path, extra: OFlags) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | extra;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

/// Flags and project; zero where the file system has no such call.
fn read_flags(file: &File, entry: &mut Entry) -> Result<()> {
    entry.flags = match rustix::fs::ioctl_getflags(file) {
        Ok(flags) => flags.bits(),
        Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS) => 0,
        Err(error) => return Err(error).context("FS_IOC_GETFLAGS"),
    };
    entry.project = match fsxattr::get(file) {
        Ok(attr) => attr.project,
        Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS) => 0,
        Err(error) => return Err(error).context("FS_IOC_FSGETXATTR"),
    };
    Ok(())
}

fn read_xattrs(path: &Path) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut names = vec![0u8; 64 << 10];
    let len = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error).context("llistxattr"),
    };
    let mut xattrs = BTreeMap::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0u8; 64 << 10];
        let len = rustix::fs::lgetxattr(path, name, &mut value[..])
            .with_context(|| format!("lgetxattr {}", String::from_utf8_lossy(name)))?;
        value.truncate(len);
        xattrs.insert(name.to_vec(), value);
    }
    Ok(xattrs)
}

fn data_ranges(file: &File, size: u64) -> Result<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error).context("SEEK_DATA"),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).context("SEEK_HOLE")?;
        anyhow::ensure!(end > start && start >= at, "SEEK_DATA/SEEK_HOLE went {at} {start} {end}");
        ranges.push((start, end));
        at = end;
    }
    Ok(ranges)
}

fn hash_content(file: &File, size: u64, data: &[(u64, u64)]) -> Result<BTreeMap<u64, u64>> {
    let piece_bytes = PIECE_BYTES as u64;
    let whole = [(0, size)];
    let ranges = if size <= READ_WHOLE_BYTES { &whole[..] } else { data };
    let mut pieces = BTreeMap::new();
    let mut buf = vec![0; PIECE_BYTES];
    let mut next = 0;
    for (start, end) in ranges {
        for index in next.max(start / piece_bytes)..end.div_ceil(piece_bytes) {
            let len = read_full(file, &mut buf, index * piece_bytes)
                .with_context(|| format!("reading at {:#x}", index * piece_bytes))?;
            if let Some(hash) = hash_piece(&buf[..len]) {
                pieces.insert(index, hash);
            }
            next = index + 1;
        }
    }
    Ok(pieces)
}

fn read_full(file: &File, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64)? {
            0 => break,
            got => done += got,
        }
    }
    Ok(done)
}
