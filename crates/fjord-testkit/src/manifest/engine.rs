//! Manifests of images, read through fjord's library.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use fjord::{FileKind, Fs, InodeRef};

use super::{Entry, Kind, Manifest, PIECE_BYTES, Stamp, hash_piece};
use crate::script::{decode_dev, join, list};

impl Manifest {
    /// Reads the whole tree; open the image read-only where access times matter.
    pub fn from_fjord(fs: &Fs) -> Result<Manifest> {
        let mut manifest = Manifest::default();
        let mut inodes = BTreeMap::new();
        let mut pending = vec![(Vec::new(), fs.root()?)];
        while let Some((path, inode)) = pending.pop() {
            let shown = || format!("fjord reading /{}", String::from_utf8_lossy(&path));
            let entry = read_entry(&inode).with_context(shown)?;
            if entry.kind == Kind::Directory {
                for (ino, name) in list(&inode).with_context(shown)? {
                    let child = inode.lookup(&name).with_context(shown)?;
                    ensure!(
                        u64::from(child.ino().0) == ino,
                        "{}: entry {} has inode {ino}, lookup {}",
                        shown(),
                        String::from_utf8_lossy(&name),
                        child.ino().0
                    );
                    pending.push((join(&path, &name), child));
                }
            }
            inodes.insert(path.clone(), u64::from(inode.ino().0));
            manifest.entries.insert(path, entry);
        }
        manifest.group_links(&inodes);
        Ok(manifest)
    }
}

fn stamp(time: fjord::Timespec) -> Stamp {
    Stamp { sec: time.sec, nsec: time.nsec }
}

fn read_entry(inode: &InodeRef) -> Result<Entry> {
    let attr = inode.attr();
    let mode = u32::from(attr.mode);
    let kind = Kind::from_mode(mode).context("unknown file type")?;
    let device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
    // System calls give flags and project of files and directories only.
    let flagged = matches!(kind, Kind::File | Kind::Directory);
    let birth = stamp(attr.crtime);
    let mut entry = Entry {
        kind,
        mode: mode & 0o7777,
        uid: attr.uid,
        gid: attr.gid,
        size: attr.size,
        nlink: attr.nlink,
        blocks_512b: attr.blocks,
        atime: stamp(attr.atime),
        mtime: stamp(attr.mtime),
        ctime: stamp(attr.ctime),
        btime: (birth != Stamp::default()).then_some(birth),
        rdev: if device { decode_dev(attr.rdev) } else { (0, 0) },
        target: Vec::new(),
        xattrs: BTreeMap::new(),
        pieces: BTreeMap::new(),
        data: Vec::new(),
        flags: if flagged { inode.flags() } else { 0 },
        project: if flagged { attr.projid } else { 0 },
        first_name: Vec::new(),
    };
    for name in inode.list_xattr().context("list_xattr")? {
        let value = inode.get_xattr(&name).context("get_xattr")?;
        entry.xattrs.insert(name, value);
    }
    match attr.kind() {
        FileKind::Symlink => entry.target = inode.read_link().context("read_link")?,
        FileKind::Regular => {
            entry.data = data_ranges(inode, attr.size)?;
            entry.pieces = hash_content(inode, attr.size, &entry.data)?;
        }
        _ => {}
    }
    Ok(entry)
}

fn data_ranges(inode: &InodeRef, size: u64) -> Result<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match inode.seek_data(at) {
            Ok(start) => start,
            Err(error) if error.errno() == libc::ENXIO => break,
            Err(error) => return Err(error).context("seek_data"),
        };
        let end = inode.seek_hole(start).context("seek_hole")?;
        ensure!(end > start && start >= at, "seek_data/seek_hole went {at} {start} {end}");
        ranges.push((start, end));
        at = end;
    }
    Ok(ranges)
}

fn hash_content(inode: &InodeRef, size: u64, data: &[(u64, u64)]) -> Result<BTreeMap<u64, u64>> {
    let piece_bytes = PIECE_BYTES as u64;
    let whole = [(0, size)];
    let ranges = if size <= super::READ_WHOLE_BYTES { &whole[..] } else { data };
    let mut pieces = BTreeMap::new();
    let mut buf = vec![0; PIECE_BYTES];
    let mut next = 0;
    for (start, end) in ranges {
        for index in next.max(start / piece_bytes)..end.div_ceil(piece_bytes) {
            let mut len = 0;
            while len < buf.len() {
                let offset = index * piece_bytes + len as u64;
                match inode.read(offset, &mut buf[len..]).context("read")? {
                    0 => break,
                    got => len += got,
                }
            }
            if let Some(hash) = hash_piece(&buf[..len]) {
                pieces.insert(index, hash);
            }
            next = index + 1;
        }
    }
    Ok(pieces)
}
