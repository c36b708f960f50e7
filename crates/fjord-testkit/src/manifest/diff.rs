//! Comparison of two manifests, with output a person can read.
//!
//! Invariant: a field is ignored only when [`Compare`] says so.

use std::fmt;

use super::{Entry, Manifest};

/// Flags that a user sets and that mean the same on every image; layout flags (extents, index,
/// inline data, huge file) belong to one image.
const USER_FLAGS: u32 = 0x2003_40F8;

/// How hole maps are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holes {
    /// Range by range.
    Exact,
    /// The data of a file may differ by 128 KiB: allocators may write zeros into small unwritten
    /// ranges.
    Roughly,
    /// Not at all.
    Ignored,
}

/// Which fields count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compare {
    /// Access times.
    pub atime: bool,
    /// Modification times.
    pub mtime: bool,
    /// Change and creation times.
    pub ctime: bool,
    /// Sizes of directories.
    pub directory_size: bool,
    /// Allocated blocks.
    pub blocks: bool,
    /// Hole maps.
    pub holes: Holes,
    /// Flag bits that count.
    pub flags_mask: u32,
    /// Extended attributes.
    pub xattrs: bool,
    /// Link counts and grouping.
    pub links: bool,
    /// Device files, pipes and sockets.
    pub special_files: bool,
}

impl Compare {
    /// Two readers of one image: everything counts.
    pub const SAME_IMAGE: Compare = Compare {
        atime: true,
        mtime: true,
        ctime: true,
        directory_size: true,
        blocks: true,
        holes: Holes::Exact,
        flags_mask: !0,
        xattrs: true,
        links: true,
        special_files: true,
    };

    /// Two images on which the same script ran: all but the time of the run and the layout.
    pub const SAME_SCRIPT: Compare = Compare {
        ctime: false,
        directory_size: false,
        blocks: false,
        holes: Holes::Roughly,
        flags_mask: USER_FLAGS,
        ..Compare::SAME_IMAGE
    };

    /// Against files copied out of an image by debugfs: it keeps times in whole seconds only.
    pub const EXTRACTED: Compare = Compare {
        atime: false,
        mtime: false,
        holes: Holes::Ignored,
        flags_mask: 0,
        xattrs: false,
        links: false,
        special_files: false,
        ..Compare::SAME_SCRIPT
    };
}

/// How two manifests differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Difference {
    /// One line each: path, field, left value, right value.
    pub lines: Vec<String>,
}

impl Difference {
    /// True when nothing differs.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// An error that shows the difference, unless there is none.
    pub fn ok(self, left: &str, right: &str) -> anyhow::Result<()> {
        anyhow::ensure!(self.is_empty(), "{left} (left) and {right} (right) differ:\n{self}");
        Ok(())
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 40;
        for line in self.lines.iter().take(SHOWN) {
            writeln!(f, "  {line}")?;
        }
        if self.lines.len() > SHOWN {
            writeln!(f, "  ... and {} more", self.lines.len() - SHOWN)?;
        }
        Ok(())
    }
}

impl Manifest {
    /// Compares with `other` in the fields that `compare` names.
    pub fn diff(&self, other: &Manifest, compare: &Compare) -> Difference {
        let mut lines = Vec::new();
        for (path, left) in &self.entries {
            if !compare.special_files && is_special(left) {
                continue;
            }
            match other.entries.get(path) {
                None => lines.push(format!("{}: only left ({:?})", show(path), left.kind)),
                Some(right) => compare_entry(&show(path), left, right, compare, &mut lines),
            }
        }
        for (path, right) in &other.entries {
            if !self.entries.contains_key(path) && (compare.special_files || !is_special(right)) {
                lines.push(format!("{}: only right ({:?})", show(path), right.kind));
            }
        }
        Difference { lines }
    }
}

fn is_special(entry: &Entry) -> bool {
    use super::Kind::{Directory, File, Symlink};
    !matches!(entry.kind, File | Directory | Symlink)
}

/// A path for people: lossy text, cut when long.
fn show(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    if text.is_empty() {
        return "/".to_owned();
    }
    if text.chars().count() > 120 {
        let end: String =
            text.chars().rev().take(100).collect::<Vec<_>>().into_iter().rev().collect();
        return format!("…{end}");
    }
    text.into_owned()
}

fn compare_entry(
    path: &str,
    left: &Entry,
    right: &Entry,
    compare: &Compare,
    lines: &mut Vec<String>,
) {
    macro_rules! field {
        ($name:ident, $on:expr) => {
            if $on && left.$name != right.$name {
                lines.push(format!(
                    "{path}: {}: {:?} != {:?}",
                    stringify!($name),
                    left.$name,
                    right.$name
                ));
            }
        };
    }
    if left.kind != right.kind {
        lines.push(format!("{path}: kind: {:?} != {:?}", left.kind, right.kind));
        return;
    }
    let directory = left.kind == super::Kind::Directory;
    if left.mode != right.mode {
        lines.push(format!("{path}: mode: {:04o} != {:04o}", left.mode, right.mode));
    }
    field!(uid, true);
    field!(gid, true);
    field!(size, !directory || compare.directory_size);
    field!(nlink, compare.links);
    field!(first_name, compare.links);
    field!(blocks_512b, compare.blocks);
    field!(atime, compare.atime);
    field!(mtime, compare.mtime);
    field!(ctime, compare.ctime);
    field!(btime, compare.ctime);
    field!(rdev, true);
    field!(target, true);
    field!(project, compare.links);
    let (left_flags, right_flags) =
        (left.flags & compare.flags_mask, right.flags & compare.flags_mask);
    if left_flags != right_flags {
        lines.push(format!("{path}: flags: {left_flags:#x} != {right_flags:#x}"));
    }
    compare_content(path, left, right, lines);
    compare_holes(path, left, right, compare.holes, lines);
    if compare.xattrs {
        compare_xattrs(path, left, right, lines);
    }
}

fn compare_content(path: &str, left: &Entry, right: &Entry, lines: &mut Vec<String>) {
    if left.pieces == right.pieces {
        return;
    }
    let mut indexes: Vec<u64> = left.pieces.keys().chain(right.pieces.keys()).copied().collect();
    indexes.sort_unstable();
    indexes.dedup();
    let bad: Vec<String> = indexes
        .into_iter()
        .filter(|i| left.pieces.get(i) != right.pieces.get(i))
        .map(|i| {
            let which = match (left.pieces.get(&i), right.pieces.get(&i)) {
                (Some(_), None) => " (right all zeros)",
                (None, Some(_)) => " (left all zeros)",
                _ => "",
            };
            format!("{:#x}{which}", i * super::PIECE_BYTES as u64)
        })
        .collect();
    let shown = bad.len().min(6);
    lines.push(format!(
        "{path}: content differs in {} pieces of 64 KiB: {}",
        bad.len(),
        bad[..shown].join(", ")
    ));
}

fn compare_holes(path: &str, left: &Entry, right: &Entry, how: Holes, lines: &mut Vec<String>) {
    const SLACK_BYTES: u64 = 128 << 10;
    let bytes = |entry: &Entry| entry.data.iter().map(|(start, end)| end - start).sum::<u64>();
    let differ = match how {
        Holes::Exact => left.data != right.data,
        Holes::Roughly => bytes(left).abs_diff(bytes(right)) > SLACK_BYTES,
        Holes::Ignored => false,
    };
    if differ {
        let brief = |ranges: &[(u64, u64)]| {
            let shown: Vec<String> =
                ranges.iter().take(8).map(|(s, e)| format!("{s:#x}..{e:#x}")).collect();
            let more = if ranges.len() > 8 { ", …" } else { "" };
            format!("[{}{more}]", shown.join(", "))
        };
        lines.push(format!("{path}: data ranges: {} != {}", brief(&left.data), brief(&right.data)));
    }
}

fn compare_xattrs(path: &str, left: &Entry, right: &Entry, lines: &mut Vec<String>) {
    for (name, value) in &left.xattrs {
        let name_text = String::from_utf8_lossy(name);
        match right.xattrs.get(name) {
            None => lines.push(format!("{path}: xattr {name_text}: only left")),
            Some(other) if other != value => lines.push(format!(
                "{path}: xattr {name_text}: {} bytes {:02x?} != {} bytes {:02x?}",
                value.len(),
                &value[..value.len().min(16)],
                other.len(),
                &other[..other.len().min(16)]
            )),
            Some(_) => {}
        }
    }
    for name in right.xattrs.keys().filter(|name| !left.xattrs.contains_key(*name)) {
        lines.push(format!("{path}: xattr {}: only right", String::from_utf8_lossy(name)));
    }
}
