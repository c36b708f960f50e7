//! Listing a directory with cookies that survive changes.
//!
//! A cookie is a position in an order that edits do not change, and the next listing returns all
//! entries from there: an entry that exists all the time is returned exactly once.
//!
//! - Indexed directories, and those that may become indexed (one block or inline, feature
//!   `dir_index`), are listed by hash: 31 bits of the hash, 26 of the minor hash, and 6 that
//!   number the names that agree in all these. `.` and `..` are positions 0 and 1.
//! - Other directories are listed by byte offset; entries never move there.
//!
//! Damage ends no listing: a block with a wrong checksum is passed over, a bad record alone, or with the rest of
//! its block if its length is bad. What is left is listed, and the end of the listing is the error. A failed read of
//! the device ends it.
//!
//! Invariants: positions fit 63 bits (FUSE and `telldir` take signed numbers) and rise from
//! entry to entry; the callback runs without any lock of the directory; no listing that left out damage ends
//! without an error, also one that is taken up again behind it.

use std::ops::RangeInclusive;

use fjord_format::checksum::crc32c;
use fjord_format::dirent::{self, DirEntry as RawEntry, FileType};
use fjord_format::hash::{HashKind, HashVersion, dirhash};
use fjord_format::{InodeNo, LogicalBlock};
use fjord_journal::Buffer;
use rustix::io::Errno;

use super::block::{self, Damage, Located};
use super::{Dir, htree, inline, is_inline, parent_entry};
use crate::attr::FileKind;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::vfs::DirEntry;

/// Low bits of a hash position that number names of equal hash.
const SAME_HASH_BITS: u32 = 6;
const SAME_HASH_MASK: u64 = (1 << SAME_HASH_BITS) - 1;
/// Positions of `.` and `..`.
const DOT: u64 = 0;
const DOTDOT: u64 = 1;
const FIRST_HASHED: u64 = 2;
/// Most leaves with names of one hash before the directory counts as damaged.
const SAME_HASH_LEAVES_MAX: usize = 1024;

/// A copied entry.
struct Item {
    next_cookie: u64,
    ino: InodeNo,
    file_type: FileType,
    name: Box<[u8]>,
}

/// Result of reading the directory under its lock once.
struct Batch {
    items: Vec<Item>,
    /// Where to continue, or `None` at the end.
    next: Option<u64>,
    damage: Damage,
}

/// Calls `visit` for the entries from `cookie` (0: the start) on until it returns `false`.
///
/// # Errors
/// `ENOTDIR`, `ENOENT` for a directory that was removed; I/O; damage, after all entries that can be read.
pub(crate) fn read_dir(
    fs: &FsInner,
    inode: &Inode,
    cookie: u64,
    visit: &mut dyn FnMut(DirEntry<'_>) -> bool,
) -> Result<()> {
    let mut cookie = cookie;
    loop {
        let batch = {
            let state = inode.state.read();
            if !state.is_dir() {
                return Err(Errno::NOTDIR.into());
            }
            if state.dead || state.disk.links_count == 0 {
                return Ok(());
            }
            collect(&Dir::new(fs, inode, &state), &state, cookie)?
        };
        if let Some(damage) = batch.damage.first {
            inode.listing_damage.get_or_init(|| Box::new(damage));
        }
        for item in &batch.items {
            let entry = DirEntry {
                ino: item.ino,
                kind: kind(item.file_type),
                name: &item.name,
                next_cookie: item.next_cookie,
            };
            if !visit(entry) {
                return Ok(());
            }
        }
        match batch.next {
            Some(next) if next > cookie => cookie = next,
            _ => {
                return inode
                    .listing_damage
                    .get()
                    .map_or(Ok(()), |damage| Err(Error::clone(damage)));
            }
        }
    }
}

fn kind(file_type: FileType) -> Option<FileKind> {
    Some(match file_type {
        FileType::Unknown => return None,
        FileType::Regular => FileKind::Regular,
        FileType::Directory => FileKind::Directory,
        FileType::CharDevice => FileKind::CharDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::Symlink => FileKind::Symlink,
    })
}

fn collect(dir: &Dir<'_>, state: &InodeState, cookie: u64) -> Result<Batch> {
    if dir.is_listed_without_index(state) {
        // Positions of the root of the index are those of no name.
        let mut damage = Damage::default();
        let mut items = match cookie <= DOTDOT {
            true => dots(dir, state, cookie, &mut damage)?,
            false => Vec::new(),
        };
        let rest = collect_by_offset(dir, state, cookie)?;
        items.extend(rest.items);
        return Ok(Batch { items, damage: damage.or(rest.damage), ..rest });
    }
    let by_hash = dir.params.dir_index
        && (dir.is_indexed(state) || is_inline(state) || block::count(dir, state)? <= 1);
    if by_hash {
        collect_by_hash(dir, state, cookie)
    } else if is_inline(state) {
        let (mut items, mut damage) = (Vec::new(), Damage::default());
        let read = inline::each(dir, state, |ino, file_type, name, position, next_cookie| {
            if position >= cookie {
                items.push(Item { next_cookie, ino, file_type, name: name.into() });
            }
        });
        damage.pass(read)?;
        Ok(Batch { items, next: None, damage })
    } else {
        collect_by_offset(dir, state, cookie)
    }
}

/// The entries of the block that `cookie` lies in, or of the next one that has any.
fn collect_by_offset(dir: &Dir<'_>, state: &InodeState, cookie: u64) -> Result<Batch> {
    let bits = dir.fs.geo.block_size_bits;
    let blocks = u64::from(block::count(dir, state)?);
    let mut items = Vec::new();
    let without_index = dir.is_listed_without_index(state);
    if without_index && cookie > blocks << bits {
        // The file system has turned read-only in the middle of a listing, which would end here.
        return Err(dir.corrupt("its index is damaged: begin the listing anew"));
    }
    let mut lblk = (cookie >> bits).max(u64::from(without_index));
    let mut damage = Damage::default();
    while lblk < blocks && items.is_empty() && !damage.is_too_much() {
        let here = LogicalBlock(u32::try_from(lblk).unwrap_or(u32::MAX));
        let Some(located) = damage.pass_map(block::locate(dir, state, here))? else {
            lblk += 1;
            continue;
        };
        let at = match located {
            Located::Hole(len) => {
                lblk = lblk.saturating_add(u64::from(len));
                continue;
            }
            Located::At(at) => at,
        };
        let read = match without_index {
            true => block::read_leaf_or_node(dir, state, here, at),
            false => block::read_leaf_at(dir, here, at).map(Some),
        };
        if let Some(Some(buffer)) = damage.pass(read)? {
            let read = each_entry(dir, here, &buffer, |entry, ino| {
                let position = (lblk << bits).saturating_add(entry.offset as u64);
                let next_cookie = position.saturating_add(entry.rec_len as u64);
                // From the start of the block: the record at the cookie may be gone.
                if position >= cookie {
                    let (file_type, name) = (entry.file_type, entry.name.into());
                    items.push(Item { next_cookie, ino, file_type, name });
                }
            });
            damage.pass(read)?;
        }
        lblk += 1;
    }
    let goes_on = lblk < blocks && !damage.is_too_much();
    Ok(Batch { items, next: goes_on.then_some(lblk << bits), damage })
}

/// Calls `visit` for the used entries of a block that are not damaged; the error is of the first that is.
fn each_entry(
    dir: &Dir<'_>,
    lblk: LogicalBlock,
    buffer: &Buffer,
    mut visit: impl FnMut(&RawEntry<'_>, InodeNo),
) -> Result<()> {
    let bytes = buffer.read();
    let area = dir.format().entries_area(&bytes).map_err(dir.damaged(lblk))?;
    let mut damage = Damage::default();
    for entry in dirent::entries(area, dir.format()) {
        if let Some(entry) = damage.pass(entry.map_err(dir.damaged(lblk)))?
            && let Some(ino) = entry.inode
        {
            visit(&entry, ino);
        }
    }
    damage.into_result()
}

/// Names of some leaves, to be sorted by hash.
struct Gathered<'a> {
    dir: Dir<'a>,
    version: HashVersion,
    /// Position without the number among equals, then the entry.
    names: Vec<(u64, InodeNo, FileType, Box<[u8]>)>,
    damage: Damage,
}

impl<'a> Gathered<'a> {
    fn new(dir: &Dir<'a>, version: HashVersion) -> Gathered<'a> {
        Gathered { dir: *dir, version, names: Vec::new(), damage: Damage::default() }
    }

    /// Adds a name of a leaf for `hashes` (`None`: for all), which lies there at `offset`.
    fn add(
        &mut self,
        (ino, file_type, name): (InodeNo, FileType, &[u8]),
        hashes: Option<&RangeInclusive<u32>>,
        offset: usize,
    ) {
        if name == b"." || name == b".." {
            return;
        }
        let hash = dirhash(name, self.version, self.dir.params.hash_seed);
        // The legacy hash has no minor part, and its collisions are common.
        let minor = match self.version.kind {
            HashKind::Legacy => crc32c(0, name),
            HashKind::HalfMd4 | HashKind::Tea => hash.minor_hash,
        };
        let (mut major, mut minor) = (hash.hash, u64::from(minor) & !SAME_HASH_MASK);
        if let Some(hashes) = hashes
            && !hashes.contains(&major)
        {
            // Its own hash would lead the next batch past other leaves, or back.
            (major, minor) = (*hashes.start(), (offset as u64) << SAME_HASH_BITS);
            let name = String::from_utf8_lossy(name);
            let damage =
                self.dir.corrupt(format_args!("{name:?} lies among names of other hashes"));
            self.damage.first.get_or_insert(damage);
        }
        let position = (u64::from(major >> 1) << 32 | minor) + FIRST_HASHED;
        self.names.push((position, ino, file_type, name.into()));
    }

    fn add_leaf(
        &mut self,
        state: &InodeState,
        lblk: LogicalBlock,
        hashes: Option<&RangeInclusive<u32>>,
    ) -> Result<()> {
        let dir = self.dir;
        let read = block::read_leaf(&dir, state, lblk).and_then(|buffer| {
            each_entry(&dir, lblk, &buffer, |entry, ino| {
                self.add((ino, entry.file_type, entry.name), hashes, entry.offset);
            })
        });
        self.damage.pass(read)?;
        Ok(())
    }

    /// Sorts and numbers the names; drops those before `cookie`.
    fn into_batch(mut self, cookie: u64) -> Batch {
        self.names.sort_unstable_by(|a, b| (a.0, &a.3).cmp(&(b.0, &b.3)));
        let mut items = Vec::with_capacity(self.names.len());
        let (mut last, mut number) = (None, 0);
        for (base, ino, file_type, name) in self.names {
            number = if last == Some(base) { SAME_HASH_MASK.min(number + 1) } else { 0 };
            last = Some(base);
            let position = base + number;
            if position >= cookie {
                items.push(Item { next_cookie: position + 1, ino, file_type, name });
            }
        }
        Batch { items, next: None, damage: self.damage }
    }
}

fn dots(dir: &Dir<'_>, state: &InodeState, cookie: u64, damage: &mut Damage) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    let mut push = |position: u64, ino: InodeNo, name: &[u8]| {
        let file_type = FileType::Directory;
        items.push(Item { next_cookie: position + 1, ino, file_type, name: name.into() });
    };
    if cookie == DOT {
        push(DOT, dir.inode.ino, b".");
    }
    if cookie <= DOTDOT
        && let Some(parent) = damage.pass(parent_entry(dir, state))?
    {
        push(DOTDOT, parent.ino, b"..");
    }
    Ok(items)
}

fn collect_by_hash(dir: &Dir<'_>, state: &InodeState, cookie: u64) -> Result<Batch> {
    let mut damage = Damage::default();
    let mut items = dots(dir, state, cookie, &mut damage)?;
    let cookie = cookie.max(FIRST_HASHED);
    let batch = if dir.is_indexed(state) {
        collect_leaf(dir, state, cookie)?
    } else {
        let mut gathered = Gathered::new(dir, dir.default_hash()?);
        if is_inline(state) {
            let read = inline::each(dir, state, |ino, file_type, name, _, _| {
                gathered.add((ino, file_type, name), None, 0);
            });
            gathered.damage.pass(read)?;
        } else if block::count(dir, state)? > 0 {
            gathered.add_leaf(state, LogicalBlock(0), None)?;
        }
        gathered.into_batch(cookie)
    };
    items.extend(batch.items);
    Ok(Batch { items, damage: damage.or(batch.damage), ..batch })
}

/// The names of the first leaf with any at or after `cookie`, and the position after it.
/// Leaves that share names of one hash count as one.
fn collect_leaf(dir: &Dir<'_>, state: &InodeState, cookie: u64) -> Result<Batch> {
    let major = u32::try_from((cookie - FIRST_HASHED) >> 32).unwrap_or(u32::MAX >> 1);
    let (mut path, _) = htree::probe(dir, state, |_| major.saturating_mul(2))?;
    let mut damage = Damage::default();
    loop {
        let mut gathered = Gathered::new(dir, path.version);
        let mut leaves = 0;
        let next = loop {
            gathered.add_leaf(state, path.leaf, Some(&path.leaf_hashes(dir)?))?;
            leaves += 1;
            if leaves > SAME_HASH_LEAVES_MAX {
                return Err(dir.corrupt("too many leaves with names of one hash"));
            }
            let next = path.next_hash(dir)?;
            if !path.advance(dir, state)? {
                break None;
            }
            match next {
                Some(hash) if hash & 1 == 1 => {}
                other => break other,
            }
        };
        let mut batch = gathered.into_batch(cookie);
        damage = damage.or(std::mem::take(&mut batch.damage));
        let Some(next) = next else { return Ok(Batch { damage, ..batch }) };
        if !batch.items.is_empty() {
            let behind = (u64::from(next >> 1) << 32) + FIRST_HASHED;
            // A name in the wrong leaf must not be returned twice.
            let last = batch.items.last().map_or(behind, |item| item.next_cookie);
            batch.next = Some(behind.max(last));
            return Ok(Batch { damage, ..batch });
        }
    }
}
