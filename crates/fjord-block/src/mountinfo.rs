//! The mount table, from `/proc/self/mountinfo` (proc(5)).
//!
//! Owns no state. Invariant: names have no escapes: the kernel writes a blank as `\040`.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// Subtype of the mounts that modelled devices are files of.
pub const SIM_SUBTYPE: &str = "fjord-sim";

/// One mount of this namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Unique while the mount exists.
    pub mount_id: u64,
    /// Device number of the mounted file system.
    pub dev_major: u32,
    /// See `dev_major`.
    pub dev_minor: u32,
    /// Directory that it is mounted on.
    pub mountpoint: PathBuf,
    /// File system type with subtype, such as `fuseblk.fjord`.
    pub fs_type: String,
    /// What is mounted: a device, an image, or any text.
    pub source: PathBuf,
}

impl MountEntry {
    /// Whether fjord serves it.
    pub fn is_fjord(&self) -> bool {
        matches!(self.fs_type.as_str(), "fuseblk.fjord" | "fuse.fjord")
    }

    /// Whether it is a modelled device (`fjord sim`).
    pub fn is_sim(&self) -> bool {
        self.fs_type.strip_prefix("fuse.") == Some(SIM_SUBTYPE)
    }
}

/// All mounts, bottom first, so that the last entry with a mountpoint is the visible one.
///
/// # Errors
/// /proc is not mounted.
pub fn mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?))
}

/// The mounts in the text of a mountinfo file. Lines that cannot be read are left out.
pub fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

/// The uppermost mount on exactly this directory, an absolute path without symbolic links.
///
/// # Errors
/// As [`mounts`].
pub fn mount_at(dir: &Path) -> io::Result<Option<MountEntry>> {
    Ok(mounts()?.into_iter().rev().find(|m| m.mountpoint == dir))
}

/// `id parent major:minor root mountpoint options [fields] - type source super-options`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&b| b == b' ');
    let number = |field| std::str::from_utf8(field).ok();
    let mount_id = number(fields.next()?)?.parse().ok()?;
    let (major, minor) = number(fields.nth(1)?)?.split_once(':')?;
    let mountpoint = fields.nth(1)?;
    fields.by_ref().find(|f| *f == b"-")?;
    let fs_type = fields.next()?;
    let source = fields.next()?;
    Some(MountEntry {
        mount_id,
        dev_major: major.parse().ok()?,
        dev_minor: minor.parse().ok()?,
        mountpoint: unescape(mountpoint),
        fs_type: String::from_utf8_lossy(fs_type).into_owned(),
        source: unescape(source),
    })
}

/// The kernel writes blank, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) =
            (first, tail)
        {
            out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_escapes_and_optional_fields() {
        let line = b"36 35 0:57 / /mnt/a\\040b rw,noatime shared:1 master:2 - fuseblk.fjord \
                     /dev/loop0 rw,user_id=0";
        let m = parse_line(line).unwrap();
        assert_eq!(m.mountpoint, Path::new("/mnt/a b"));
        assert_eq!((m.mount_id, m.dev_major, m.dev_minor), (36, 0, 57));
        assert_eq!(m.source, Path::new("/dev/loop0"));
        assert!(m.is_fjord());
        assert_eq!(parse_line(b""), None);
        assert_eq!(parse_line(b"1 2 0:3 / /mnt"), None);
        assert_eq!(unescape(b"a\\9\\134\\"), Path::new("a\\9\\\\"));
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(mount_at(Path::new("/")).unwrap().is_some());
    }
}
