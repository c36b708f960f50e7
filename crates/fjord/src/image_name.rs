//! Names of images: a file or block device, a part of one, or an image on a cluster.
//!
//! - `disk.img`: all of it;
//! - `disk.img@2`: the second partition of its partition table (GPT or MBR);
//! - `disk.img@offset=1048576` and `disk.img@offset=1048576+67108864`: from a byte on, and so many bytes;
//! - `rbd:pool/image`: an image on a Ceph cluster ([`fjord_rbd`]).
//!
//! Owns [`ImageName`], and the kinds of images that URLs name. Invariants: a path that exists is never taken for the
//! name of a part; a name that begins with a kind's prefix is never a path (`./rbd:file` is one).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fjord_block::{Device, FileDevice, FileOptions, OpenError, Remote, RemoteOptions};
use fjord_format::disk::Table;
use rustix::fs::OFlags;

use crate::disk::Partitions;
use crate::error::{Error, Result};

/// The name of an image, taken apart.
///
/// ```
/// use std::path::Path;
/// use fjord::ImageName;
///
/// let whole = ImageName::parse(Path::new("disk.img"));
/// assert_eq!(whole.path(), Path::new("disk.img"));
/// assert!(!whole.is_part());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    path: PathBuf,
    part: Option<Part>,
    /// Its index in [`REMOTES`], if a URL names it.
    remote: Option<usize>,
}

/// The kinds of images that URLs name.
static REMOTES: [&dyn Remote; 1] = [fjord_rbd::RBD];

/// What `off_t` can count.
const FILE_SIZE_MAX_BYTES: u64 = i64::MAX as u64;

/// A part of a file or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// A partition by its number.
    Number(u32),
    /// To the end, if no size is given.
    Bytes { offset: u64, size: Option<u64> },
}

impl Part {
    fn parse(text: &[u8]) -> Option<Part> {
        let number = |text: &str| {
            let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_plain.then(|| text.parse().ok()).flatten()
        };
        let text = std::str::from_utf8(text).ok()?;
        let Some(bytes) = text.strip_prefix("offset=") else {
            return Some(Part::Number(u32::try_from(number(text)?).ok()?));
        };
        let (offset, size) = match bytes.split_once('+') {
            Some((offset, size)) => (offset, Some(number(size)?)),
            None => (bytes, None),
        };
        Some(Part::Bytes { offset: number(offset)?, size })
    }
}

impl ImageName {
    /// Takes a name apart. What exists under the whole name is that; so is a name whose first part does not
    /// exist.
    pub fn parse(name: &Path) -> ImageName {
        let whole = |remote| ImageName { path: name.to_owned(), part: None, remote };
        let bytes = name.as_os_str().as_bytes();
        let is_its = |remote: &&dyn Remote| bytes.starts_with(remote.prefix().as_bytes());
        if let Some(index) = REMOTES.iter().position(is_its) {
            return whole(Some(index));
        }
        let Some(at) = bytes.iter().rposition(|byte| *byte == b'@') else {
            return whole(None);
        };
        let path = Path::new(OsStr::from_bytes(&bytes[..at]));
        match Part::parse(&bytes[at + 1..]) {
            Some(part) if name.symlink_metadata().is_err() && path.exists() => {
                ImageName { path: path.to_owned(), part: Some(part), remote: None }
            }
            _ => whole(None),
        }
    }

    /// The name of the bytes of `path` from `offset_bytes` on: `size_bytes` of them, or all.
    pub fn of_bytes(path: &Path, offset_bytes: u64, size_bytes: Option<u64>) -> PathBuf {
        let mut name = OsString::from(path);
        name.push(format!("@offset={offset_bytes}"));
        if let Some(size_bytes) = size_bytes {
            name.push(format!("+{size_bytes}"));
        }
        name.into()
    }

    /// The kind of images that it belongs to and its URL, if it lies on no file or device.
    ///
    /// # Errors
    /// `Usage` for a URL that is not UTF-8.
    pub fn remote(&self) -> Result<Option<(&'static dyn Remote, &str)>> {
        let Some(index) = self.remote else { return Ok(None) };
        match self.path.to_str() {
            Some(url) => Ok(Some((REMOTES[index], url))),
            None => Err(Error::Usage(format!("{}: not UTF-8", self.path.display()))),
        }
    }

    /// Whether it is an image on a cluster.
    pub fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// The name as it stays valid in another working directory.
    ///
    /// # Errors
    /// Those of [`std::path::absolute`].
    pub fn absolute(name: &Path) -> io::Result<PathBuf> {
        match ImageName::parse(name).is_remote() {
            true => Ok(name.to_owned()),
            false => std::path::absolute(name),
        }
    }

    /// The file or device; of an image on a cluster its URL.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a part of the file or device.
    pub fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The bytes of the file that are the image; `None` for all. Reads the partition table.
    ///
    /// # Errors
    /// `Open` if the file cannot be read; `Usage` if it has no such partition; `Corrupt` for a damaged
    /// partition table.
    pub fn range(&self) -> Result<Option<Range<u64>>> {
        match self.part {
            None => Ok(None),
            Some(Part::Number(number)) => self.partition(number).map(Some),
            Some(Part::Bytes { offset, size: Some(size) }) => {
                let end = offset.checked_add(size).filter(|end| *end <= FILE_SIZE_MAX_BYTES);
                end.map(|end| Some(offset..end)).ok_or_else(|| self.beyond_any_file(offset, size))
            }
            Some(Part::Bytes { offset, size: None }) => {
                let (_, size_bytes) = self.open_to_look()?;
                if offset > FILE_SIZE_MAX_BYTES {
                    return Err(self.beyond_any_file(offset, 1));
                }
                Ok(Some(offset..size_bytes.max(offset)))
            }
        }
    }

    fn beyond_any_file(&self, offset: u64, size: u64) -> Error {
        let file = self.path.display();
        Error::Usage(format!("{file}: no file has bytes {offset}+{size}; check offset and size"))
    }

    /// Opens and locks the image; `options.range` is set by the name. `steal` takes an image on a cluster from
    /// another host.
    ///
    /// # Errors
    /// As [`ImageName::range`] and [`FileDevice::open`], or [`Remote::open`].
    pub fn open(&self, options: &FileOptions, steal: bool) -> Result<Arc<dyn Device>> {
        let Some((remote, url)) = self.remote()? else {
            return Ok(Arc::new(self.open_file(options)?));
        };
        let tell = |what: &str| tracing::warn!("{what}");
        let options = RemoteOptions { read_only: options.read_only, steal, tell: &tell };
        remote.open(url, &options).map_err(|error| Error::Open(Arc::new(error)))
    }

    /// Opens and locks a file or block device, or the part of it that this name is.
    ///
    /// # Errors
    /// As [`ImageName::range`] and [`FileDevice::open`].
    pub fn open_file(&self, options: &FileOptions) -> Result<FileDevice> {
        let options = FileOptions { range: self.range()?, ..options.clone() };
        FileDevice::open(&self.path, &options).map_err(|error| Error::Open(Arc::new(error)))
    }

    /// The file, and its size in bytes.
    fn open_to_look(&self) -> Result<(File, u64)> {
        let failed = |error| Error::Open(Arc::new(error));
        FileDevice::check_kind(&self.path).map_err(failed)?;
        // The path may have become a pipe.
        let opened = File::options()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&self.path);
        let sized = opened.and_then(|mut file| {
            let size_bytes = file.seek(SeekFrom::End(0))?;
            Ok((file, size_bytes))
        });
        sized.map_err(|source| failed(OpenError::Os { path: self.path.clone(), source }))
    }

    fn partition(&self, number: u32) -> Result<Range<u64>> {
        let (mut file, size_bytes) = self.open_to_look()?;
        let mut read = |offset, bytes: &mut [u8]| {
            let read = file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(bytes));
            read.map_err(|source| {
                Error::Open(Arc::new(OpenError::Os { path: self.path.clone(), source }))
            })
        };
        let name = self.path.display();
        let Some(table) = Table::read(size_bytes, &mut read)? else {
            return Err(Error::Usage(format!(
                "{name} has no partition table; give its name without @{number}"
            )));
        };
        if let Some(found) = table.partitions.iter().find(|found| found.number == number) {
            return Ok(found.range.clone());
        }
        let found = Partitions::look(table, size_bytes, &mut read)?;
        Err(Error::Usage(format!("{name} has no partition {number}; it has {found}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_path_or_a_part_of_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        for name in ["disk", "odd@7", "both", "both@1"] {
            std::fs::write(path(name), "").expect("a file");
        }
        let part = |name: &str| {
            let name = ImageName::parse(&path(name));
            (name.path.strip_prefix(dir.path()).expect("inside").to_owned(), name.part)
        };
        let bytes = |offset, size| Some(Part::Bytes { offset, size });
        for (name, wanted) in [
            ("disk", ("disk", None)),
            ("disk@2", ("disk", Some(Part::Number(2)))),
            ("disk@offset=512", ("disk", bytes(512, None))),
            ("disk@offset=512+1024", ("disk", bytes(512, Some(1024)))),
            ("odd@7", ("odd@7", None)),
            ("odd@7@3", ("odd@7", Some(Part::Number(3)))),
            ("both@1", ("both@1", None)),
            ("missing@1", ("missing@1", None)),
            ("disk@", ("disk@", None)),
            ("disk@+1", ("disk@+1", None)),
            ("disk@1x", ("disk@1x", None)),
            ("disk@offset=1+", ("disk@offset=1+", None)),
            ("disk@99999999999", ("disk@99999999999", None)),
        ] {
            assert_eq!(part(name), (PathBuf::from(wanted.0), wanted.1), "{name}");
        }
    }

    #[test]
    fn a_url_names_an_image_on_a_cluster() {
        let name = |text: &str| ImageName::parse(Path::new(text));
        let remote = name("rbd:pool/image@then?id=me");
        let (kind, url) = remote.remote().expect("UTF-8").expect("it is one");
        assert_eq!((kind.prefix(), url), ("rbd:", "rbd:pool/image@then?id=me"));
        assert!(!remote.is_part());
        assert!(!name("./rbd:file").is_remote() && !name("/rbd:file").is_remote());
        let stays = ImageName::absolute(Path::new("rbd:pool/image")).expect("a name");
        assert_eq!(stays, Path::new("rbd:pool/image"));
    }

    #[test]
    fn a_part_ends_within_what_a_file_can_have() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        for (bytes, end) in [
            ("9223372036854775806+1", Some(9_223_372_036_854_775_807)),
            ("9223372036854775807+1", None),
            ("18446744073709551615+5", None),
            ("18446744073709551615", None),
        ] {
            let mut name = OsString::from(file.path());
            name.push(format!("@offset={bytes}"));
            let range = ImageName::parse(Path::new(&name)).range();
            assert_eq!(range.ok().flatten().map(|range| range.end), end, "{bytes}");
        }
    }
}
