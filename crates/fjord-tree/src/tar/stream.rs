//! Reads tar streams: old, ustar, GNU, star and pax headers with their extensions.
//!
//! Owns what ends a stream: its end of file. End marks (zero blocks) may be missing, and entries
//! may follow them, as in streams that were concatenated. Invariants: an end of file within an
//! entry is an error; nothing is allocated by a length that was not checked, and what one entry
//! makes the reader keep is limited.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

use fjord::Timespec;

use super::acl::{self, Owners};
use super::compress::Plain;
use super::error::{EntryError, HeaderError, TarError, short};
use super::header::{BLOCK, Format, Header, text};
use super::pax::{Records, decimal, libarchive_xattr, parse_time};
use super::sparse::{DataMap, PaxSparse, Piece, check_pieces, further_pieces, header_map};

/// Most bytes that extend one entry: room for many attributes of 64 KiB and large maps of holes.
const EXTENDED_BYTES_MAX: u64 = 16 << 20;
/// Most bytes of records for all entries that follow.
const GLOBAL_BYTES_MAX: u64 = 64 << 10;
/// Longest name or target, in bytes.
const NAME_BYTES_MAX: usize = 64 << 10;
/// Most attributes of one entry.
const XATTRS_MAX: usize = 4096;
/// Most things of one entry that are named as left out.
const IGNORED_MAX: usize = 100;

const ACCESS_XATTR: &[u8] = b"system.posix_acl_access";
const DEFAULT_XATTR: &[u8] = b"system.posix_acl_default";

type Result<T, E = TarError> = std::result::Result<T, E>;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TarKind {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
    /// No file of its own: a volume label, a part of another entry.
    Other(u8),
}

/// One entry, extensions applied. Its data is read with [`TarReader::read_data`].
#[derive(Debug)]
pub(crate) struct TarEntry {
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: TarKind,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Timespec,
    pub(crate) atime: Option<Timespec>,
    pub(crate) device: (u32, u32),
    /// Size of the file in bytes.
    pub(crate) size: u64,
    /// Where the data goes: offset and length of each piece, in order.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Names of extended records that say something fjord does not take over.
    pub(crate) ignored: Vec<String>,
    /// What of it cannot be kept: access lists and entries of them, inode flags.
    pub(crate) unkept: Vec<String>,
}

impl TarEntry {
    fn ignore(&mut self, what: String) {
        if self.ignored.len() < IGNORED_MAX && !self.ignored.contains(&what) {
            self.ignored.push(what);
        }
    }

    fn lose(&mut self, what: &str) {
        if !self.unkept.iter().any(|line| line == what) {
            self.unkept.push(what.to_owned());
        }
    }

    fn has_xattr(&self, name: &[u8]) -> bool {
        self.xattrs.iter().any(|(have, _)| have == name)
    }
}

/// A tar stream.
pub(crate) struct TarReader<'a> {
    inner: Plain<'a>,
    /// Bytes read so far.
    at: u64,
    data_left: u64,
    padding: u64,
    /// A block that was looked at before its time.
    peeked: Option<[u8; BLOCK]>,
    /// Data that was read to see whether it is a header, and how much of it is read again. Not in `at`.
    ahead: Option<([u8; BLOCK], usize)>,
    /// What holds for all entries that follow.
    global: BTreeMap<Vec<u8>, Vec<u8>>,
    owners: Owners,
    /// Path of the entry that is being read, for messages.
    current: Vec<u8>,
    end_marked: bool,
    is_pax: bool,
}

/// What comes before the header of an entry.
#[derive(Default)]
struct Extensions {
    /// The last extended header, as it is: GNU tar and Go take no other one.
    records: Option<Vec<u8>>,
    long_path: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    bytes: u64,
}

impl Extensions {
    fn is_empty(&self) -> bool {
        self.records.is_none() && self.long_path.is_none() && self.long_link.is_none()
    }
}

/// What records say that is not kept as it is.
#[derive(Default)]
struct Applied {
    sparse: PaxSparse,
    /// Bytes of data in the stream.
    stored: u64,
    /// Size with holes where the header's field has no room.
    star_real_size: Option<u64>,
    /// The path, instead of one that says that the file is sparse.
    sparse_name: Option<Vec<u8>>,
    user: Vec<u8>,
    group: Vec<u8>,
    access_list: Option<Vec<u8>>,
    default_list: Option<Vec<u8>>,
    selinux: Option<Vec<u8>>,
}

impl<'a> TarReader<'a> {
    /// Reads a stream, compressed or not. `ask_host`: names in access lists that the stream gives
    /// no number are looked up on the host.
    pub(crate) fn new(stream: impl Read + 'a, ask_host: bool) -> Result<TarReader<'a>> {
        Ok(TarReader::of(Plain::of_stream(stream)?, ask_host))
    }

    /// Reads a file from where it is, compressed or not.
    pub(crate) fn of_file(file: &'a File, ask_host: bool) -> Result<TarReader<'a>> {
        Ok(TarReader::of(Plain::of_file(file)?, ask_host))
    }

    fn of(inner: Plain<'a>, ask_host: bool) -> TarReader<'a> {
        TarReader {
            inner,
            at: 0,
            data_left: 0,
            padding: 0,
            peeked: None,
            ahead: None,
            global: BTreeMap::new(),
            owners: Owners::new(ask_host),
            current: Vec::new(),
            end_marked: false,
            is_pax: false,
        }
    }

    /// Reads data of the entry that came last; 0 at its end.
    pub(crate) fn read_data(&mut self, buf: &mut [u8]) -> Result<usize> {
        let want = self.data_left.min(buf.len() as u64) as usize;
        if want == 0 {
            return Ok(0);
        }
        let count = self.fill(&mut buf[..want])?;
        if count < want {
            return Err(self.cut());
        }
        self.data_left -= want as u64;
        Ok(want)
    }

    /// Reads as much as there is, at most all of `buf`.
    fn fill(&mut self, buf: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        if let Some((block, from)) = self.ahead.take() {
            done = (BLOCK - from).min(buf.len());
            buf[..done].copy_from_slice(&block[from..from + done]);
            self.ahead = Some((block, from + done)).filter(|(_, from)| *from < BLOCK);
        }
        while done < buf.len() {
            match self.inner.read(&mut buf[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.at = self.at.saturating_add(done as u64);
        Ok(done)
    }

    fn cut(&self) -> TarError {
        let entry = match &self.current[..] {
            [] => "a header".to_owned(),
            path => format!("the entry {}", short(path)),
        };
        TarError::Cut { at: self.at, entry }
    }

    fn skip_rest(&mut self) -> Result<()> {
        let rest = self.data_left.saturating_add(self.padding);
        (self.data_left, self.padding) = (0, 0);
        if rest == 0 {
            return Ok(());
        }
        // All of it is data or padding.
        let ahead = self.ahead.take().map_or(0, |(_, from)| (BLOCK - from) as u64);
        let skipped = self.inner.skip(rest.saturating_sub(ahead))?.saturating_add(ahead);
        self.at = self.at.saturating_add(skipped);
        if skipped < rest { Err(self.cut()) } else { Ok(()) }
    }

    /// The next block; `None` at the end of the stream.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>> {
        if let Some(block) = self.peeked.take() {
            return Ok(Some(block));
        }
        let mut block = [0; BLOCK];
        match self.fill(&mut block)? {
            0 => Ok(None),
            BLOCK => Ok(Some(block)),
            // Some programs pad to other sizes behind the end mark.
            _ if self.end_marked && block == [0; BLOCK] => Ok(None),
            _ if self.at < BLOCK as u64 => Err(not_tar(&block)),
            _ => Err(self.cut()),
        }
    }

    fn bad(&self, reason: HeaderError) -> TarError {
        TarError::Header { at: self.at.saturating_sub(BLOCK as u64), reason }
    }

    fn begin_data(&mut self, size: u64) {
        self.data_left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    /// The data of an extension, whole.
    fn extension(&mut self, size: u64, max: u64) -> Result<Vec<u8>> {
        if size > max {
            return Err(self.bad(HeaderError::ExtendedSize { bytes: size, max }));
        }
        self.begin_data(size);
        let mut data = vec![0; size as usize];
        self.read_data(&mut data)?;
        self.skip_rest()?;
        Ok(data)
    }

    /// A name in data of its own.
    fn long_name(&mut self, size: u64) -> Result<Vec<u8>> {
        let data = self.extension(size, EXTENDED_BYTES_MAX)?;
        Ok(text(&data).to_vec())
    }

    /// The next header of any kind; `None` at the end of the stream.
    fn header(&mut self) -> Result<Option<Header>> {
        loop {
            let peeked = if self.peeked.is_some() { BLOCK as u64 } else { 0 };
            let start = self.at.saturating_sub(peeked);
            let Some(block) = self.block()? else {
                return if start == 0 { Err(TarError::Empty) } else { Ok(None) };
            };
            let header = Header(block);
            if header.is_zero() {
                self.end_marked = true;
                continue;
            }
            return match header.check_sum() {
                Ok(()) => Ok(Some(header)),
                Err(_) if start == 0 => Err(not_tar(&block)),
                Err(_) if self.end_marked => Err(TarError::Trailing { at: start }),
                Err(reason) => Err(self.bad(reason)),
            };
        }
    }

    /// The next entry, or `None` at the end.
    pub(crate) fn next_entry(&mut self) -> Result<Option<TarEntry>> {
        self.skip_rest()?;
        self.current.clear();
        let mut extensions = Extensions::default();
        loop {
            let header = self.header()?;
            if self.end_marked && !extensions.is_empty() {
                return Err(self.bad(HeaderError::Orphan));
            }
            let Some(header) = header else {
                return if extensions.is_empty() { Ok(None) } else { Err(self.cut()) };
            };
            self.end_marked = false;
            let size = header.size().map_err(|reason| self.bad(reason))?;
            match header.type_flag() {
                b'x' | b'X' => {
                    extensions.bytes = extensions.bytes.saturating_add(size);
                    let left = EXTENDED_BYTES_MAX.saturating_sub(extensions.bytes - size);
                    extensions.records = Some(self.extension(size, left)?);
                    self.is_pax = true;
                }
                b'g' => self.global_records(size)?,
                b'L' => extensions.long_path = Some(self.long_name(size)?),
                b'K' => extensions.long_link = Some(self.long_name(size)?),
                _ => return self.entry(&header, size, extensions).map(Some),
            }
        }
    }

    fn global_records(&mut self, size: u64) -> Result<()> {
        self.is_pax = true;
        let data = self.extension(size, GLOBAL_BYTES_MAX)?;
        for record in Records(&data) {
            let (key, value) = record.map_err(|reason| self.bad(reason))?;
            // What git writes into each archive says nothing of entries.
            if key != b"comment" {
                self.global.insert(key.to_vec(), value.to_vec());
            }
        }
        let bytes: usize = self.global.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes as u64 > GLOBAL_BYTES_MAX {
            let (bytes, max) = (bytes as u64, GLOBAL_BYTES_MAX);
            return Err(self.bad(HeaderError::ExtendedSize { bytes, max }));
        }
        Ok(())
    }

    fn entry(&mut self, header: &Header, size: u64, extensions: Extensions) -> Result<TarEntry> {
        let (mut entry, mut applied) =
            plain_entry(header, size).map_err(|reason| self.bad(reason))?;
        // Records count before long names, which count before the header.
        if let Some(path) = extensions.long_path {
            entry.path = path;
        }
        if let Some(link) = extensions.long_link {
            entry.link = link;
        }
        self.apply_records(&mut entry, &mut applied, extensions.records.as_deref())
            .map_err(|reason| self.bad(reason))?;
        if let Some(path) = applied.sparse_name.take() {
            entry.path = path;
        }
        self.current.clone_from(&entry.path);
        let longest = entry.path.len().max(entry.link.len());
        if longest > NAME_BYTES_MAX {
            let reason = HeaderError::NameSize { bytes: longest, max: NAME_BYTES_MAX };
            return Err(self.bad(reason));
        }
        // Before there was a type for directories, and in some programs still.
        if entry.kind == TarKind::File && entry.path.ends_with(b"/") {
            entry.kind = TarKind::Directory;
        }
        let user = (&applied.user[..], entry.uid);
        self.owners.note(user, (&applied.group, entry.gid));
        self.attributes(&mut entry, &mut applied)?;
        self.data(header, &mut entry, applied)?;
        Ok(entry)
    }

    /// Global records that no record of the entry replaces, then those of the entry.
    fn apply_records(
        &self,
        entry: &mut TarEntry,
        applied: &mut Applied,
        own: Option<&[u8]>,
    ) -> Result<(), HeaderError> {
        if !self.global.is_empty() {
            // In an order of its own, so that the same stream gives the same image.
            let mut global: BTreeMap<&[u8], &[u8]> =
                self.global.iter().map(|(key, value)| (&key[..], &value[..])).collect();
            for record in Records(own.unwrap_or_default()) {
                global.remove(record?.0);
            }
            for (key, value) in global {
                apply_record(entry, applied, key, value)?;
            }
        }
        for record in Records(own.unwrap_or_default()) {
            let (key, value) = record?;
            apply_record(entry, applied, key, value)?;
        }
        Ok(())
    }

    /// Access lists become attributes, unless they came as such.
    fn attributes(&self, entry: &mut TarEntry, applied: &mut Applied) -> Result<()> {
        let no_list = |list| TarError::Entry {
            path: short(&entry.path),
            reason: EntryError::AccessList(list),
        };
        let lists = [
            ("SCHILY.acl.access", ACCESS_XATTR, applied.access_list.take(), Some(entry.mode)),
            ("SCHILY.acl.default", DEFAULT_XATTR, applied.default_list.take(), None),
        ];
        let mut found = Vec::new();
        for (key, xattr, text, mode) in lists {
            let Some(text) = text.filter(|_| !entry.has_xattr(xattr)) else { continue };
            let list = acl::parse(&text, mode, &self.owners).ok_or_else(|| no_list(key))?;
            found.push((key, xattr, list));
        }
        for (key, xattr, list) in found {
            let unknown = list.unknown.iter().take(IGNORED_MAX);
            entry.unkept.extend(unknown.map(|who| {
                format!(
                    "{key}: {who}: the name has no ID; the entry was removed without granting \
                         more permissions"
                )
            }));
            entry.xattrs.push((xattr.to_vec(), list.acl.to_xattr()));
        }
        if let Some(mut label) = applied.selinux.take()
            && !entry.has_xattr(b"security.selinux")
        {
            label.push(0);
            entry.xattrs.push((b"security.selinux".to_vec(), label));
        }
        Ok(())
    }

    /// Finds out where the data of the entry goes.
    fn data(&mut self, header: &Header, entry: &mut TarEntry, applied: Applied) -> Result<()> {
        let stored = self.stored(header, entry, applied.stored)?;
        entry.size = stored;
        if header.type_flag() == b'S' {
            let map = header_map(header).map_err(|reason| self.bad(reason))?;
            entry.pieces = map.pieces;
            entry.size = applied.star_real_size.unwrap_or(map.real_size);
            let mut goes_on = map.goes_on;
            while goes_on {
                let Some(block) = self.block()? else { return Err(self.cut()) };
                goes_on =
                    further_pieces(&block, &mut entry.pieces).map_err(|reason| self.bad(reason))?;
            }
            self.begin_data(stored);
        } else {
            self.begin_data(stored);
            if applied.sparse.map_in_data().map_err(|reason| self.bad(reason))? {
                entry.pieces = self.map_in_data()?;
            } else if applied.sparse.real_size.is_some() {
                entry.pieces = applied.sparse.pieces;
            } else {
                entry.pieces = vec![(0, stored)];
            }
            entry.size = applied.sparse.real_size.unwrap_or(stored);
        }
        if entry.kind == TarKind::File {
            check_pieces(&entry.pieces, entry.size, self.data_left)
                .map_err(|reason| self.bad(reason))?;
        } else {
            (entry.pieces, entry.size) = (Vec::new(), 0);
        }
        Ok(())
    }

    /// Bytes of data that follow the header and are still to be read. Only files have any, and lists of
    /// directories and, in pax streams, hard links. Where another entry states a size, what follows tells.
    fn stored(&mut self, header: &Header, entry: &mut TarEntry, stated: u64) -> Result<u64> {
        match entry.kind {
            TarKind::File | TarKind::Other(_) => Ok(stated),
            TarKind::Directory if header.type_flag() == b'D' => Ok(stated),
            // As bsdtar: pax allows data, and some programs state the target's size without any.
            TarKind::HardLink if self.is_pax => {
                Ok(if stated == 0 || self.header_follows()? { 0 } else { stated })
            }
            TarKind::HardLink if header.format() == Format::Gnu => Ok(0),
            _ => {
                if self.skip_stray_data(stated)? && entry.kind != TarKind::HardLink {
                    // Those of a hard link are its target's.
                    entry.lose(&format!(
                        "{stated} bytes of data, which this type of file cannot have"
                    ));
                }
                Ok(0)
            }
        }
    }

    /// After an entry that has no data of its own but states a size: some programs write that much, others
    /// nothing. A header whose checksum fits, or the end, is what it is; anything else is data. Whether
    /// there were any but zeros.
    fn skip_stray_data(&mut self, stated: u64) -> Result<bool> {
        let blocks = stated.div_ceil(BLOCK as u64);
        for number in 1..=blocks {
            let Some(block) = self.block()? else { return Ok(false) };
            let next = Header(block);
            if next.is_zero() {
                continue;
            }
            if next.check_sum().is_ok() {
                self.peeked = Some(block);
                return Ok(false);
            }
            self.padding = (blocks - number).saturating_mul(BLOCK as u64);
            self.skip_rest()?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Whether the next block is a header, or there is none.
    fn header_follows(&mut self) -> Result<bool> {
        let Some(block) = self.block()? else { return Ok(true) };
        let next = Header(block);
        if !next.is_zero() && next.check_sum().is_ok() {
            self.peeked = Some(block);
            return Ok(true);
        }
        self.at = self.at.saturating_sub(BLOCK as u64);
        self.ahead = Some((block, 0));
        Ok(false)
    }

    /// The map that a pax sparse file of version 1.0 begins with.
    fn map_in_data(&mut self) -> Result<Vec<Piece>> {
        let mut map = DataMap::default();
        loop {
            let mut block = [0; BLOCK];
            if self.read_data(&mut block)? < BLOCK {
                return Err(self.bad(HeaderError::Sparse("ends early")));
            }
            if map.block(&block).map_err(|reason| self.bad(reason))? {
                return Ok(map.pieces());
            }
        }
    }
}

fn not_tar(block: &[u8; BLOCK]) -> TarError {
    let mut start = [0; 8];
    start.copy_from_slice(&block[..8]);
    TarError::NotTar { start }
}

fn kind(flag: u8) -> TarKind {
    match flag {
        0 | b'0' | b'7' | b'S' => TarKind::File,
        b'1' => TarKind::HardLink,
        b'2' => TarKind::Symlink,
        b'3' => TarKind::CharDevice,
        b'4' => TarKind::BlockDevice,
        b'5' | b'D' => TarKind::Directory,
        b'6' => TarKind::Fifo,
        // Of Solaris, star and GNU: parts of entries, and what says nothing of files.
        b'A' | b'E' | b'I' | b'M' | b'N' | b'V' => TarKind::Other(flag),
        // POSIX: other types are read as regular files.
        _ => TarKind::File,
    }
}

/// What the header alone says.
fn plain_entry(header: &Header, stored: u64) -> Result<(TarEntry, Applied), HeaderError> {
    let kind = kind(header.type_flag());
    let is_device = matches!(kind, TarKind::CharDevice | TarKind::BlockDevice);
    let seconds = |sec| Timespec { sec, nsec: 0 };
    let entry = TarEntry {
        path: header.path(),
        link: header.link(),
        kind,
        mode: header.mode()?,
        uid: header.uid()?,
        gid: header.gid()?,
        mtime: seconds(header.mtime()?),
        atime: header.atime()?.map(seconds),
        device: if is_device { header.device()? } else { (0, 0) },
        size: 0,
        pieces: Vec::new(),
        xattrs: Vec::new(),
        ignored: Vec::new(),
        unkept: Vec::new(),
    };
    let (user, group) = header.owner_names();
    let (user, group) = (user.to_vec(), group.to_vec());
    Ok((entry, Applied { stored, user, group, ..Applied::default() }))
}

fn apply_record(
    entry: &mut TarEntry,
    applied: &mut Applied,
    key: &[u8],
    value: &[u8],
) -> Result<(), HeaderError> {
    if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
        return put_xattr(entry, name.to_vec(), value.to_vec());
    }
    if value.is_empty() {
        // An empty value takes back what was said before.
        return Ok(());
    }
    let name = || String::from_utf8_lossy(&key[..key.len().min(256)]).into_owned();
    let malformed = || HeaderError::Value(name());
    let whole = || decimal(value).ok_or_else(malformed);
    let id = || u32::try_from(whole()?).map_err(|_| malformed());
    match key {
        b"path" => entry.path = value.to_vec(),
        b"GNU.sparse.name" => applied.sparse_name = Some(value.to_vec()),
        b"linkpath" => entry.link = value.to_vec(),
        b"size" => applied.stored = whole()?,
        b"uid" => entry.uid = id()?,
        b"gid" => entry.gid = id()?,
        b"uname" => applied.user = value.to_vec(),
        b"gname" => applied.group = value.to_vec(),
        b"mtime" => entry.mtime = parse_time(value).ok_or_else(malformed)?,
        b"atime" => entry.atime = Some(parse_time(value).ok_or_else(malformed)?),
        b"SCHILY.devmajor" => entry.device.0 = id()?,
        b"SCHILY.devminor" => entry.device.1 = id()?,
        b"SCHILY.acl.access" => applied.access_list = Some(value.to_vec()),
        b"SCHILY.acl.default" => applied.default_list = Some(value.to_vec()),
        b"SCHILY.acl.ace" => entry.lose("SCHILY.acl.ace: ext4 has no NFSv4 access lists"),
        b"SCHILY.fflags" => entry.lose("SCHILY.fflags: inode flags are not copied"),
        b"RHT.security.selinux" => applied.selinux = Some(value.to_vec()),
        b"hdrcharset" if !matches!(value, b"BINARY" | b"ISO-IR 10646 2000 UTF-8") => {
            let charset = String::from_utf8_lossy(&value[..value.len().min(256)]);
            entry.ignore(format!("hdrcharset {charset} (names are kept byte by byte)"));
        }
        // Of the file system that the tar was made on, or nothing that ext4 keeps.
        b"ctime"
        | b"comment"
        | b"hdrcharset"
        | b"SCHILY.dev"
        | b"SCHILY.ino"
        | b"SCHILY.nlink"
        | b"SCHILY.filetype"
        | b"SCHILY.tarfiletype"
        | b"LIBARCHIVE.creationtime" => {}
        b"SCHILY.realsize" => applied.star_real_size = Some(whole()?),
        _ if key.starts_with(b"GNU.sparse.") => {
            if !applied.sparse.record(key, value)? {
                entry.ignore(name());
            }
        }
        _ => match key.strip_prefix(b"LIBARCHIVE.xattr.") {
            Some(attribute) => {
                let (attribute, value) =
                    libarchive_xattr(attribute, value).ok_or_else(malformed)?;
                if !entry.has_xattr(&attribute) {
                    put_xattr(entry, attribute, value)?;
                }
            }
            None => entry.ignore(name()),
        },
    }
    Ok(())
}

fn put_xattr(entry: &mut TarEntry, name: Vec<u8>, value: Vec<u8>) -> Result<(), HeaderError> {
    if name.contains(&0) {
        return Err(HeaderError::Value("SCHILY.xattr".to_owned()));
    }
    // A later record replaces an earlier one of the same name.
    entry.xattrs.retain(|(have, _)| *have != name);
    if entry.xattrs.len() == XATTRS_MAX {
        return Err(HeaderError::Attributes(XATTRS_MAX));
    }
    entry.xattrs.push((name, value));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_an_error() {
        for bytes in [&[1u8; 512][..], &[0xff; 700], b"short", b""] {
            let mut stream = bytes;
            let mut reader = TarReader::new(&mut stream, false).expect("nothing to unpack");
            assert!(reader.next_entry().is_err());
        }
    }
}
