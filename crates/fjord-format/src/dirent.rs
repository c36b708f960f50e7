//! Directory entries in linear directory blocks, htree leaves and inline directories.
//!
//! Invariants: entries of an area follow each other without a gap and the last one ends where
//! the area ends; each `rec_len` is a multiple of four, at least 12 and holds its name; every
//! edit keeps that true. All functions work on an *area*: the block without its checksum tail
//! ([`DirFormat::entries_area`]), or one of the two parts of an inline directory. Bytes of
//! removed names are wiped, as Linux does.
//!
//! Format: Linux `Documentation/filesystems/ext4/directory.rst`, "Linear (Classic) Directories".

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::features::{Incompat, RoCompat};
use crate::geometry::Geometry;
use crate::inode;
use crate::le;
use crate::types::InodeNo;

mod split;

pub use split::{LeafSplit, split_leaf};

const WHAT: &str = "directory block";

/// Longest name of an entry, in bytes.
pub const NAME_LEN_MAX: usize = 255;
/// Bytes of `struct ext4_dir_entry_tail`, the checksum at the end of a block.
pub const DIRENT_TAIL_BYTES: usize = 12;

const HEADER_BYTES: usize = 8;
const REC_LEN_MIN: usize = 12;
const REC_LEN_OFFSET: usize = 4;
const NAME_LEN_OFFSET: usize = 6;
const FILE_TYPE_OFFSET: usize = 7;
/// `det_reserved_ft`: what makes an unused entry the checksum tail.
const FT_DIR_CSUM: u8 = 0xde;

/// Type of the file that an entry names (`EXT4_FT_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FileType {
    /// Not recorded: the inode tells. Also stands for values that ext4 does not define.
    #[default]
    Unknown = 0,
    /// Regular file.
    Regular = 1,
    /// Directory.
    Directory = 2,
    /// Character device.
    CharDevice = 3,
    /// Block device.
    BlockDevice = 4,
    /// Named pipe.
    Fifo = 5,
    /// Socket.
    Socket = 6,
    /// Symbolic link.
    Symlink = 7,
}

impl FileType {
    /// The type that the byte in an entry stands for.
    pub fn from_disk(byte: u8) -> FileType {
        match byte {
            1 => FileType::Regular,
            2 => FileType::Directory,
            3 => FileType::CharDevice,
            4 => FileType::BlockDevice,
            5 => FileType::Fifo,
            6 => FileType::Socket,
            7 => FileType::Symlink,
            _ => FileType::Unknown,
        }
    }

    /// The byte for an entry.
    pub fn to_disk(self) -> u8 {
        self as u8
    }

    /// The type of an inode with this `i_mode`.
    pub fn from_mode(i_mode: u16) -> FileType {
        match i_mode & inode::S_IFMT {
            inode::S_IFIFO => FileType::Fifo,
            inode::S_IFCHR => FileType::CharDevice,
            inode::S_IFDIR => FileType::Directory,
            inode::S_IFBLK => FileType::BlockDevice,
            inode::S_IFREG => FileType::Regular,
            inode::S_IFLNK => FileType::Symlink,
            inode::S_IFSOCK => FileType::Socket,
            _ => FileType::Unknown,
        }
    }
}

/// What the superblock says about the shape of directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirFormat {
    /// Bytes in a block, 1,024 to 65,536.
    pub block_bytes: usize,
    /// Feature `filetype`: entries carry a type byte (else the byte is the name length's high part).
    pub filetype: bool,
    /// Feature `metadata_csum`: blocks end in a checksum.
    pub metadata_csum: bool,
    /// `s_inodes_count`: entries with greater inode numbers are corrupt.
    pub inodes_count: u32,
}

/// One record of a directory area, used or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Bytes from the start of the area.
    pub offset: usize,
    /// Bytes that the record takes, free space after the name included.
    pub rec_len: usize,
    /// The inode named, or `None` when the record is free.
    pub inode: Option<InodeNo>,
    /// Its type, [`FileType::Unknown`] without feature `filetype`.
    pub file_type: FileType,
    /// The name; meaningless for a free record.
    pub name: &'a [u8],
}

impl DirEntry<'_> {
    /// Whether this is `.` or `..`.
    pub fn is_dot_or_dotdot(&self) -> bool {
        matches!(self.name, b"." | b"..")
    }
}

/// A record as far as searches and insertions look at it: all lengths are checked, the bytes of the name
/// are not. Of a directory they go through it is most of the time.
#[derive(Clone, Copy)]
struct Shape<'a> {
    offset: usize,
    rec_len: usize,
    is_used: bool,
    name: &'a [u8],
}

impl Shape<'_> {
    /// Bytes that a new record could take here.
    fn free_bytes(&self) -> usize {
        match self.is_used {
            true => self.rec_len.saturating_sub(rec_len_for(self.name.len())),
            false => self.rec_len,
        }
    }
}

/// What [`insert`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The entry stands at this offset of the area.
    At(usize),
    /// The name is there already, at this offset; nothing was changed.
    Exists(usize),
    /// The name is not there and no record has room for it; nothing was changed.
    NoRoom,
}

/// Bytes of the shortest record that holds a name of `name_len` bytes.
pub fn rec_len_for(name_len: usize) -> usize {
    name_len.saturating_add(HEADER_BYTES + 3) & !3
}

/// Decodes `rec_len`; blocks of 64 KiB need more than 16 bits for it.
pub fn rec_len_from_disk(raw: u16, block_bytes: usize) -> usize {
    let raw = usize::from(raw);
    if block_bytes < 65_536 {
        raw
    } else if raw == 65_535 || raw == 0 {
        block_bytes
    } else {
        (raw & 65_532) | ((raw & 3) << 16)
    }
}

/// Encodes `rec_len`.
///
/// # Errors
/// [`FormatError::Usage`] when the length is no multiple of four or exceeds the block.
pub fn rec_len_to_disk(rec_len: usize, block_bytes: usize) -> Result<u16> {
    let bad = || {
        FormatError::Usage(format!(
            "directory record of {rec_len} bytes in a block of {block_bytes}"
        ))
    };
    if !rec_len.is_multiple_of(4) || rec_len > block_bytes || block_bytes > 1 << 18 {
        return Err(bad());
    }
    if let Ok(raw) = u16::try_from(rec_len) {
        return Ok(raw);
    }
    if rec_len == block_bytes {
        return Ok(if block_bytes == 65_536 { 65_535 } else { 0 });
    }
    u16::try_from((rec_len & 65_532) | ((rec_len >> 16) & 3)).map_err(|_| bad())
}

impl DirFormat {
    /// The shape of the directories of a file system.
    pub fn new(geometry: &Geometry) -> DirFormat {
        DirFormat {
            block_bytes: geometry.block_size as usize,
            filetype: geometry.features.incompat.contains(Incompat::FILETYPE),
            metadata_csum: geometry.features.ro_compat.contains(RoCompat::METADATA_CSUM),
            inodes_count: geometry.inode_count,
        }
    }

    /// Bytes of a block that hold entries: all but the checksum tail.
    pub fn area_bytes(&self) -> usize {
        self.block_bytes.saturating_sub(if self.metadata_csum { DIRENT_TAIL_BYTES } else { 0 })
    }

    /// The entries' part of a whole directory block.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] unless `block` has the file system's block size.
    pub fn entries_area<'a>(&self, block: &'a [u8]) -> Result<&'a [u8]> {
        FormatError::check_len(WHAT, block, self.block_bytes)?;
        le::slice(WHAT, block, 0, self.area_bytes())
    }

    /// The entries' part of a whole directory block, to be edited.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] unless `block` has the file system's block size.
    pub fn entries_area_mut<'a>(&self, block: &'a mut [u8]) -> Result<&'a mut [u8]> {
        FormatError::check_len(WHAT, block, self.block_bytes)?;
        le::slice_mut(WHAT, block, 0, self.area_bytes())
    }

    fn put_rec_len(&self, area: &mut [u8], offset: usize, rec_len: usize) -> Result<()> {
        let raw = rec_len_to_disk(rec_len, self.block_bytes)?;
        le::put_u16(WHAT, area, offset.saturating_add(REC_LEN_OFFSET), raw)
    }

    /// Length of the record at `offset`, if another one or the end can lie behind it.
    fn sound_rec_len(&self, area: &[u8], offset: usize) -> Option<usize> {
        let bytes = area.get(offset..)?;
        let [_, _, _, _, r0, r1, ..] = *bytes.first_chunk::<HEADER_BYTES>()?;
        let rec_len = rec_len_from_disk(u16::from_le_bytes([r0, r1]), self.block_bytes);
        let rest = bytes.len().checked_sub(rec_len)?;
        let is_sound = rec_len >= REC_LEN_MIN
            && rec_len.is_multiple_of(4)
            && (rest == 0 || rest >= REC_LEN_MIN);
        is_sound.then_some(rec_len)
    }

    /// The shape of the record at `offset`, if it breaks no rule about lengths and inode numbers.
    fn shape_at<'a>(&self, area: &'a [u8], offset: usize) -> Option<Shape<'a>> {
        let bytes = area.get(offset..)?;
        let [i0, i1, i2, i3, r0, r1, name_len, _] = *bytes.first_chunk::<HEADER_BYTES>()?;
        let inode = u32::from_le_bytes([i0, i1, i2, i3]);
        let rec_len = rec_len_from_disk(u16::from_le_bytes([r0, r1]), self.block_bytes);
        let name_len = usize::from(name_len);
        let rest = bytes.len().checked_sub(rec_len)?;
        let is_sound = rec_len >= rec_len_for(name_len).max(REC_LEN_MIN)
            && rec_len.is_multiple_of(4)
            && (rest == 0 || rest >= REC_LEN_MIN)
            && inode <= self.inodes_count;
        let name = bytes.get(HEADER_BYTES..HEADER_BYTES.saturating_add(name_len))?;
        is_sound.then_some(Shape { offset, rec_len, is_used: inode != 0, name })
    }

    /// Decodes and checks the record at `offset`.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when the record breaks a rule of the format.
    pub fn entry_at<'a>(&self, area: &'a [u8], offset: usize) -> Result<DirEntry<'a>> {
        let corrupt =
            |detail: &str| FormatError::corrupt(WHAT, format!("entry at byte {offset}: {detail}"));
        let bytes = area.get(offset..).unwrap_or_default();
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(corrupt("no room for its header"));
        };
        let [i0, i1, i2, i3, r0, r1, name_len, type_byte] = *header;
        let inode = u32::from_le_bytes([i0, i1, i2, i3]);
        let rec_len = rec_len_from_disk(u16::from_le_bytes([r0, r1]), self.block_bytes);
        let name_len = usize::from(name_len);
        if rec_len < REC_LEN_MIN || !rec_len.is_multiple_of(4) {
            return Err(corrupt("rec_len is too small or no multiple of four"));
        }
        if rec_len < rec_len_for(name_len) {
            return Err(corrupt("rec_len is too small for the name"));
        }
        let rest = bytes.len().checked_sub(rec_len).ok_or_else(|| corrupt("runs over the end"))?;
        if rest != 0 && rest < REC_LEN_MIN {
            return Err(corrupt("ends too close to the end"));
        }
        if inode > self.inodes_count {
            return Err(corrupt("inode number is out of range"));
        }
        let name = bytes.get(HEADER_BYTES..HEADER_BYTES.saturating_add(name_len));
        let name = name.ok_or_else(|| corrupt("name runs over the end"))?;
        if inode != 0 {
            if name.is_empty() {
                return Err(corrupt("empty name"));
            }
            if name.iter().any(|&byte| byte == 0 || byte == b'/') {
                return Err(corrupt("name has a slash or a zero byte"));
            }
            if !self.filetype && type_byte != 0 {
                return Err(corrupt("name is longer than 255 bytes"));
            }
        }
        let file_type =
            if self.filetype { FileType::from_disk(type_byte) } else { FileType::Unknown };
        let inode = (inode != 0).then_some(InodeNo(inode));
        Ok(DirEntry { offset, rec_len, inode, file_type, name })
    }
}

/// Walks the records of an area; see [`records`].
#[derive(Clone, Debug)]
pub struct Records<'a> {
    format: DirFormat,
    area: &'a [u8],
    offset: usize,
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<DirEntry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.offset >= self.area.len() {
            return None;
        }
        let entry = self.format.entry_at(self.area, self.offset);
        let rec_len = match &entry {
            Ok(entry) => Some(entry.rec_len),
            Err(_) => self.format.sound_rec_len(self.area, self.offset),
        };
        self.offset = rec_len.map_or(self.area.len(), |len| self.offset.saturating_add(len));
        Some(entry)
    }
}

/// The shapes of the records of an area; errors as of [`records`], but for the bytes of names.
fn shapes<'a>(area: &'a [u8], format: &DirFormat) -> impl Iterator<Item = Result<Shape<'a>>> {
    let format = *format;
    let mut offset = 0;
    std::iter::from_fn(move || {
        if offset >= area.len() {
            return None;
        }
        if let Some(shape) = format.shape_at(area, offset) {
            offset = offset.saturating_add(shape.rec_len);
            return Some(Ok(shape));
        }
        let mut damaged = Records { format, area, offset };
        let error = damaged.next()?.err()?;
        offset = damaged.offset;
        Some(Err(error))
    })
}

/// Every record of the area, free ones too. After an error come the records behind it, if the length of the
/// damaged one is sound.
pub fn records<'a>(area: &'a [u8], format: &DirFormat) -> Records<'a> {
    Records { format: *format, area, offset: 0 }
}

/// The used entries of the area, `.` and `..` among them. Errors as of [`records`].
pub fn entries<'a>(
    area: &'a [u8],
    format: &DirFormat,
) -> impl Iterator<Item = Result<DirEntry<'a>>> + use<'a> {
    records(area, format).filter(|entry| entry.as_ref().map_or(true, |e| e.inode.is_some()))
}

/// The entry with this name, also behind damage.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record breaks a rule about lengths or inode numbers, and no other has the
/// name.
pub fn find<'a>(area: &'a [u8], format: &DirFormat, name: &[u8]) -> Result<Option<DirEntry<'a>>> {
    let mut damage = None;
    for shape in shapes(area, format) {
        match shape {
            Ok(shape) if shape.is_used && same_name(shape.name, name) => {
                match format.entry_at(area, shape.offset) {
                    Ok(entry) => return Ok(Some(entry)),
                    Err(error) => damage = damage.or(Some(error)),
                }
            }
            Ok(_) => {}
            Err(error) => damage = damage.or(Some(error)),
        }
    }
    damage.map_or(Ok(None), Err)
}

/// Whether two names are the same. Names of one length in a directory often differ in their last byte only, so that is
/// looked at first: a call of memcmp for each entry is half the time of a search.
fn same_name(one: &[u8], other: &[u8]) -> bool {
    one.last() == other.last() && one == other
}

/// Whether the area names nothing but `.` and `..`.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record breaks a rule.
pub fn is_empty(area: &[u8], format: &DirFormat) -> Result<bool> {
    for entry in entries(area, format) {
        if !entry?.is_dot_or_dotdot() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a name of `name_len` bytes could be inserted.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record breaks a rule about lengths or inode numbers.
pub fn has_room(area: &[u8], format: &DirFormat, name_len: usize) -> Result<bool> {
    let need = rec_len_for(name_len);
    for shape in shapes(area, format) {
        if shape?.free_bytes() >= need {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Bytes of the largest record that a new entry could get.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record breaks a rule about lengths or inode numbers.
pub fn largest_room_bytes(area: &[u8], format: &DirFormat) -> Result<usize> {
    let mut largest = 0;
    for shape in shapes(area, format) {
        largest = largest.max(shape?.free_bytes());
    }
    Ok(largest)
}

/// Puts a new entry at the first place with room, unless the name is there already. The whole
/// area is searched for the name.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record breaks a rule about lengths or inode numbers, [`FormatError::Usage`] for a
/// name that no entry can hold (empty, longer than 255 bytes, with a slash or zero byte) or inode 0.
pub fn insert(
    area: &mut [u8],
    format: &DirFormat,
    name: &[u8],
    inode: InodeNo,
    file_type: FileType,
) -> Result<Inserted> {
    check_new_entry(format, name, inode)?;
    let need = rec_len_for(name.len());
    let mut place = None;
    for shape in shapes(area, format) {
        let shape = shape?;
        if shape.is_used && same_name(shape.name, name) {
            return Ok(Inserted::Exists(shape.offset));
        }
        if place.is_none() && shape.free_bytes() >= need {
            place = Some((shape.offset, shape.rec_len, shape.free_bytes()));
        }
    }
    let Some((offset, rec_len, free)) = place else {
        return Ok(Inserted::NoRoom);
    };
    // A used record keeps what its name needs; the new one takes the free space after it.
    let kept = rec_len.saturating_sub(free);
    if kept != 0 {
        format.put_rec_len(area, offset, kept)?;
    }
    let offset = offset.saturating_add(kept);
    write_entry(area, format, offset, free, name, inode, file_type)?;
    Ok(Inserted::At(offset))
}

fn check_new_entry(format: &DirFormat, name: &[u8], inode: InodeNo) -> Result<()> {
    let bad_name = name.is_empty() || name.iter().any(|&byte| byte == 0 || byte == b'/');
    if bad_name || name.len() > NAME_LEN_MAX {
        return Err(FormatError::Usage("a name must be 1 to 255 bytes without '/' or NUL".into()));
    }
    if inode.0 == 0 || inode.0 > format.inodes_count {
        return Err(FormatError::Usage(format!("inode number {inode} does not exist")));
    }
    Ok(())
}

fn write_entry(
    area: &mut [u8],
    format: &DirFormat,
    offset: usize,
    rec_len: usize,
    name: &[u8],
    inode: InodeNo,
    file_type: FileType,
) -> Result<()> {
    let name_len = u8::try_from(name.len())
        .map_err(|_| FormatError::Usage("a name must be at most 255 bytes".into()))?;
    let raw_rec_len = rec_len_to_disk(rec_len, format.block_bytes)?;
    let record = le::slice_mut(WHAT, area, offset, rec_len)?;
    le::put_u32(WHAT, record, 0, inode.0)?;
    le::put_u16(WHAT, record, REC_LEN_OFFSET, raw_rec_len)?;
    let type_byte = if format.filetype { file_type.to_disk() } else { 0 };
    le::put(WHAT, record, NAME_LEN_OFFSET, &[name_len, type_byte])?;
    le::put(WHAT, record, HEADER_BYTES, name)
}

/// Removes the entry at `offset`: its space goes to the record before it, its bytes are wiped.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record up to it breaks a rule; [`FormatError::Usage`] when no
/// used entry starts at `offset`.
pub fn remove(area: &mut [u8], format: &DirFormat, offset: usize) -> Result<()> {
    let mut before: Option<(usize, usize)> = None;
    let mut found = None;
    for entry in records(area, format) {
        let entry = entry?;
        if entry.offset >= offset {
            found = (entry.offset == offset && entry.inode.is_some()).then_some(entry.rec_len);
            break;
        }
        before = Some((entry.offset, entry.rec_len));
    }
    let Some(rec_len) = found else {
        return Err(FormatError::Usage(format!("no directory entry starts at byte {offset}")));
    };
    match before {
        Some((before_offset, before_len)) => {
            format.put_rec_len(area, before_offset, before_len.saturating_add(rec_len))?;
            le::slice_mut(WHAT, area, offset, rec_len)?.fill(0);
        }
        None => {
            le::slice_mut(WHAT, area, offset, REC_LEN_OFFSET)?.fill(0);
            let wiped = offset.saturating_add(NAME_LEN_OFFSET);
            le::slice_mut(WHAT, area, wiped, rec_len.saturating_sub(NAME_LEN_OFFSET))?.fill(0);
        }
    }
    Ok(())
}

/// Lets the used entry at `offset` name another inode (rename over a name, a moved directory's
/// `..`). The name stays.
///
/// # Errors
/// [`FormatError::Corrupt`] or [`FormatError::Usage`] as for [`remove`].
pub fn set_inode(
    area: &mut [u8],
    format: &DirFormat,
    offset: usize,
    inode: InodeNo,
    file_type: FileType,
) -> Result<()> {
    if inode.0 == 0 || inode.0 > format.inodes_count {
        return Err(FormatError::Usage(format!("inode number {inode} does not exist")));
    }
    if format.entry_at(area, offset)?.inode.is_none() {
        return Err(FormatError::Usage(format!("no directory entry starts at byte {offset}")));
    }
    le::put_u32(WHAT, area, offset, inode.0)?;
    if format.filetype {
        let type_offset = offset.saturating_add(FILE_TYPE_OFFSET);
        le::put(WHAT, area, type_offset, &[file_type.to_disk()])?;
    }
    Ok(())
}

/// Makes the area one free record.
///
/// # Errors
/// [`FormatError::Usage`] when the area is too small for a record.
pub fn init_area(area: &mut [u8], format: &DirFormat) -> Result<()> {
    if area.len() < REC_LEN_MIN {
        return Err(FormatError::Usage("directory area of less than 12 bytes".into()));
    }
    area.fill(0);
    format.put_rec_len(area, 0, area.len())
}

/// Lets the last record reach to the end of `area`, of which only the first `old_bytes` were an
/// area before; with `old_bytes` of 0 all becomes one free record.
///
/// # Errors
/// [`FormatError::Corrupt`] when a record breaks a rule, [`FormatError::Usage`] when `area` is
/// not longer than before or what is added cannot be part of a record.
pub fn extend_area(area: &mut [u8], format: &DirFormat, old_bytes: usize) -> Result<()> {
    if old_bytes == 0 {
        return init_area(area, format);
    }
    let added = area.len().checked_sub(old_bytes).ok_or_else(|| {
        FormatError::Usage(format!("directory area of {old_bytes} bytes cannot shrink"))
    })?;
    let mut last = (0, 0);
    for entry in records(le::slice(WHAT, area, 0, old_bytes)?, format) {
        let entry = entry?;
        last = (entry.offset, entry.rec_len);
    }
    area.get_mut(old_bytes..).unwrap_or_default().fill(0);
    format.put_rec_len(area, last.0, last.1.saturating_add(added))
}

/// Makes `block` an empty directory block, with its tail (checksum not yet set).
///
/// # Errors
/// [`FormatError::Truncated`] unless `block` has the file system's block size.
pub fn init_block(block: &mut [u8], format: &DirFormat) -> Result<()> {
    init_area(format.entries_area_mut(block)?, format)?;
    init_tail(block, format)
}

/// Makes `block` the first block of a new directory: `.`, `..` and the tail.
///
/// # Errors
/// [`FormatError::Truncated`] unless `block` has the file system's block size;
/// [`FormatError::Usage`] for inode numbers that do not exist.
pub fn init_first_block(
    block: &mut [u8],
    format: &DirFormat,
    inode: InodeNo,
    parent: InodeNo,
) -> Result<()> {
    let area = format.entries_area_mut(block)?;
    area.fill(0);
    for (name, target) in [(&b"."[..], inode), (b"..", parent)] {
        check_new_entry(format, name, target)?;
    }
    let dot_bytes = rec_len_for(1);
    let dotdot_bytes = area.len().saturating_sub(dot_bytes);
    write_entry(area, format, 0, dot_bytes, b".", inode, FileType::Directory)?;
    write_entry(area, format, dot_bytes, dotdot_bytes, b"..", parent, FileType::Directory)?;
    init_tail(block, format)
}

/// The `..` entry of a directory's first block, where it must be the second record.
///
/// # Errors
/// [`FormatError::Corrupt`] when the block does not begin with `.` and `..`.
pub fn dotdot<'a>(area: &'a [u8], format: &DirFormat) -> Result<DirEntry<'a>> {
    let corrupt = |detail: &str| FormatError::corrupt(WHAT, detail);
    let dot = format.entry_at(area, 0)?;
    if dot.name != b"." || dot.inode.is_none() {
        return Err(corrupt("the first entry is not '.'"));
    }
    if dot.rec_len >= area.len() {
        return Err(corrupt("'.' is the only entry"));
    }
    let dotdot = format.entry_at(area, dot.rec_len)?;
    if dotdot.name != b".." || dotdot.inode.is_none() {
        return Err(corrupt("the second entry is not '..'"));
    }
    Ok(dotdot)
}

/// Writes the tail of a block, checksum zero. Does nothing without `metadata_csum`.
///
/// # Errors
/// [`FormatError::Truncated`] unless `block` has the file system's block size.
pub fn init_tail(block: &mut [u8], format: &DirFormat) -> Result<()> {
    if !format.metadata_csum {
        return Ok(());
    }
    let tail = le::slice_mut(WHAT, block, format.area_bytes(), DIRENT_TAIL_BYTES)?;
    tail.fill(0);
    le::put_u16(WHAT, tail, REC_LEN_OFFSET, DIRENT_TAIL_BYTES as u16)?;
    le::put(WHAT, tail, FILE_TYPE_OFFSET, &[FT_DIR_CSUM])
}

/// Whether `block` ends in a well-formed checksum tail.
pub fn has_tail(block: &[u8], format: &DirFormat) -> bool {
    let Ok(tail) = le::slice(WHAT, block, format.area_bytes(), DIRENT_TAIL_BYTES) else {
        return false;
    };
    let rec_len = le::get_u16(WHAT, tail, REC_LEN_OFFSET).unwrap_or(0);
    le::get_u32(WHAT, tail, 0) == Ok(0)
        && usize::from(rec_len) == DIRENT_TAIL_BYTES
        && le::slice(WHAT, tail, NAME_LEN_OFFSET, 2) == Ok(&[0, FT_DIR_CSUM])
}

/// Checks the checksum of a leaf or linear block; passes without `metadata_csum`.
/// `inode_seed` is [`checksum::inode_seed`] of the directory.
///
/// # Errors
/// [`FormatError::Corrupt`] without a tail, [`FormatError::Checksum`] for a wrong checksum.
pub fn verify_checksum(block: &[u8], format: &DirFormat, inode_seed: u32) -> Result<()> {
    if !format.metadata_csum {
        return Ok(());
    }
    if !has_tail(block, format) {
        return Err(FormatError::corrupt(WHAT, "the block has no checksum tail"));
    }
    let computed = checksum::crc32c(inode_seed, format.entries_area(block)?);
    let stored = le::get_u32(WHAT, block, format.area_bytes().saturating_add(HEADER_BYTES))?;
    FormatError::check_checksum(WHAT, stored, computed)
}

/// Sets the checksum of a leaf or linear block; does nothing without `metadata_csum`.
///
/// # Errors
/// [`FormatError::Corrupt`] when the block has no tail to hold it.
pub fn set_checksum(block: &mut [u8], format: &DirFormat, inode_seed: u32) -> Result<()> {
    if !format.metadata_csum {
        return Ok(());
    }
    if !has_tail(block, format) {
        return Err(FormatError::corrupt(WHAT, "the block has no checksum tail"));
    }
    let computed = checksum::crc32c(inode_seed, format.entries_area(block)?);
    le::put_u32(WHAT, block, format.area_bytes().saturating_add(HEADER_BYTES), computed)
}
