//! Operations as values, and their text form.
//!
//! Owns [`Op`] and its grammar: one operation per `;`, words apart by spaces, paths relative to
//! the root (`/` is the root). Invariant: [`std::fmt::Display`] and [`std::str::FromStr`] are
//! inverse, so that a finding can print the operations that lead to it.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use fjord::FallocMode;

/// A path from the root, without a slash at its start; empty for the root.
pub type Path = String;

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// An empty file.
    Create(Path),
    /// A directory.
    Mkdir(Path),
    /// A symbolic link with a target of so many bytes.
    Symlink(Path, usize),
    /// A second name (existing file, new name).
    Link(Path, Path),
    /// Removes a name.
    Unlink(Path),
    /// Removes a directory.
    Rmdir(Path),
    /// Renames, replacing what is there.
    Rename(Path, Path),
    /// Swaps two names.
    Exchange(Path, Path),
    /// Sets the size in bytes.
    Truncate(Path, u64),
    /// Writes after the end, so many bytes.
    Append(Path, u64),
    /// Writes at an offset, so many bytes.
    Write(Path, u64, u64),
    /// Writes 4096 bytes at an offset, with the journal's magic number as their first word.
    Magic(Path, u64),
    /// fallocate: mode bits, offset, length in bytes.
    Fallocate(Path, FallocMode, u64, u64),
    /// Sets an attribute to a new value of so many bytes.
    SetXattr(Path, String, usize),
    /// Removes an attribute.
    RemoveXattr(Path, String),
    /// Sets permission bits.
    Chmod(Path, u16),
    /// Sets owner and group.
    Chown(Path, u32),
    /// Keeps the file open until the end of the run.
    Hold(Path),
    /// fsync.
    Fsync(Path),
    /// fdatasync.
    Fdatasync(Path),
    /// fbarrier: order without durability.
    Fbarrier(Path),
    /// fdatabarrier.
    Fdatabarrier(Path),
    /// Writes data to its place, without a promise, as background writeback does.
    Writeback(Path),
    /// syncfs.
    Sync,
    /// Makes the file system so many bytes larger, on a device with room for that.
    Grow(u64),
}

/// The paths of an operation, by reference: the old one of two, and the one it is mainly about.
macro_rules! paths {
    ($op:expr) => {
        match $op {
            Op::Link(from, to) | Op::Rename(from, to) | Op::Exchange(from, to) => {
                [Some(from), Some(to)]
            }
            Op::Create(path)
            | Op::Mkdir(path)
            | Op::Symlink(path, _)
            | Op::Unlink(path)
            | Op::Rmdir(path)
            | Op::Truncate(path, _)
            | Op::Append(path, _)
            | Op::Write(path, ..)
            | Op::Magic(path, _)
            | Op::Fallocate(path, ..)
            | Op::SetXattr(path, ..)
            | Op::RemoveXattr(path, _)
            | Op::Chmod(path, _)
            | Op::Chown(path, _)
            | Op::Hold(path)
            | Op::Fsync(path)
            | Op::Fdatasync(path)
            | Op::Fbarrier(path)
            | Op::Fdatabarrier(path)
            | Op::Writeback(path) => [None, Some(path)],
            Op::Sync | Op::Grow(_) => [None, None],
        }
    };
}

impl Op {
    /// Whether it makes a promise.
    pub fn is_sync(&self) -> bool {
        matches!(self, Op::Fsync(_) | Op::Fdatasync(_) | Op::Sync) || self.is_barrier()
    }

    /// Whether it promises order only.
    pub fn is_barrier(&self) -> bool {
        matches!(self, Op::Fbarrier(_) | Op::Fdatabarrier(_))
    }

    /// The same operation on other paths.
    pub fn map_paths(&self, to: &dyn Fn(&str) -> Path) -> Op {
        let mut op = self.clone();
        paths!(&mut op).into_iter().flatten().for_each(|path| *path = to(path));
        op
    }

    /// The path it is mainly about: the new one of two; `None` for `sync`.
    pub fn target(&self) -> Option<&str> {
        let [_, target] = paths!(self);
        target.map(String::as_str)
    }

    /// The other path, of an operation on two: the one that is there before.
    pub fn source(&self) -> Option<&str> {
        let [source, _] = paths!(self);
        source.map(String::as_str)
    }
}

/// The directory of a path; the root's is the root.
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}

/// The last name of a path.
pub fn leaf(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

const MODES: [(&str, FallocMode); 5] = [
    ("keep", FallocMode::KEEP_SIZE),
    ("punch", FallocMode::PUNCH_HOLE),
    ("collapse", FallocMode::COLLAPSE_RANGE),
    ("zero", FallocMode::ZERO_RANGE),
    ("insert", FallocMode::INSERT_RANGE),
];

fn mode_text(mode: FallocMode) -> String {
    let names: Vec<_> = MODES.iter().filter(|m| mode.contains(m.1)).map(|m| m.0).collect();
    if names.is_empty() { "plain".into() } else { names.join("+") }
}

fn parse_mode(text: &str) -> Result<FallocMode> {
    let mut mode = FallocMode::empty();
    for part in text.split('+').filter(|part| *part != "plain") {
        let known = MODES.iter().find(|known| known.0 == part);
        mode |= known.with_context(|| format!("{part:?} is not a mode of fallocate"))?.1;
    }
    Ok(mode)
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Path| format!("/{path}");
        match self {
            Op::Create(p) => write!(f, "create {}", path(p)),
            Op::Mkdir(p) => write!(f, "mkdir {}", path(p)),
            Op::Symlink(p, len) => write!(f, "symlink {} {len}", path(p)),
            Op::Link(from, to) => write!(f, "link {} {}", path(from), path(to)),
            Op::Unlink(p) => write!(f, "unlink {}", path(p)),
            Op::Rmdir(p) => write!(f, "rmdir {}", path(p)),
            Op::Rename(from, to) => write!(f, "rename {} {}", path(from), path(to)),
            Op::Exchange(from, to) => write!(f, "exchange {} {}", path(from), path(to)),
            Op::Truncate(p, size) => write!(f, "truncate {} {size}", path(p)),
            Op::Append(p, len) => write!(f, "append {} {len}", path(p)),
            Op::Write(p, offset, len) => write!(f, "write {} {offset} {len}", path(p)),
            Op::Magic(p, offset) => write!(f, "magic {} {offset}", path(p)),
            Op::Fallocate(p, mode, offset, len) => {
                write!(f, "fallocate {} {} {offset} {len}", path(p), mode_text(*mode))
            }
            Op::SetXattr(p, name, len) => write!(f, "setxattr {} {name} {len}", path(p)),
            Op::RemoveXattr(p, name) => write!(f, "rmxattr {} {name}", path(p)),
            Op::Chmod(p, mode) => write!(f, "chmod {} {mode:o}", path(p)),
            Op::Chown(p, id) => write!(f, "chown {} {id}", path(p)),
            Op::Hold(p) => write!(f, "hold {}", path(p)),
            Op::Fsync(p) => write!(f, "fsync {}", path(p)),
            Op::Fdatasync(p) => write!(f, "fdatasync {}", path(p)),
            Op::Fbarrier(p) => write!(f, "fbarrier {}", path(p)),
            Op::Fdatabarrier(p) => write!(f, "fdatabarrier {}", path(p)),
            Op::Writeback(p) => write!(f, "writeback {}", path(p)),
            Op::Sync => f.write_str("sync"),
            Op::Grow(bytes) => write!(f, "grow {bytes}"),
        }
    }
}

impl FromStr for Op {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Op> {
        let mut words = text.split_whitespace();
        let verb = words.next().context("an empty operation")?;
        let mut word = || words.next().with_context(|| format!("{text:?}: a word is missing"));
        let mut path = || word().map(|word| word.trim_start_matches('/').to_owned());
        let op = match verb {
            "create" => Op::Create(path()?),
            "mkdir" => Op::Mkdir(path()?),
            "symlink" => Op::Symlink(path()?, written(word()?)? as usize),
            "link" => Op::Link(path()?, path()?),
            "unlink" => Op::Unlink(path()?),
            "rmdir" => Op::Rmdir(path()?),
            "rename" => Op::Rename(path()?, path()?),
            "exchange" => Op::Exchange(path()?, path()?),
            "truncate" => Op::Truncate(path()?, word()?.parse()?),
            "append" => Op::Append(path()?, written(word()?)?),
            "write" => Op::Write(path()?, word()?.parse()?, written(word()?)?),
            "magic" => Op::Magic(path()?, word()?.parse()?),
            "fallocate" => {
                let path = path()?;
                Op::Fallocate(path, parse_mode(word()?)?, word()?.parse()?, word()?.parse()?)
            }
            "setxattr" => Op::SetXattr(path()?, word()?.to_owned(), written(word()?)? as usize),
            "rmxattr" => Op::RemoveXattr(path()?, word()?.to_owned()),
            "chmod" => Op::Chmod(path()?, u16::from_str_radix(word()?, 8)?),
            "chown" => Op::Chown(path()?, word()?.parse()?),
            "hold" => Op::Hold(path()?),
            "fsync" => Op::Fsync(path()?),
            "fdatasync" => Op::Fdatasync(path()?),
            "fbarrier" => Op::Fbarrier(path()?),
            "fdatabarrier" => Op::Fdatabarrier(path()?),
            "writeback" => Op::Writeback(path()?),
            "sync" => Op::Sync,
            "grow" => Op::Grow(word()?.parse()?),
            _ => bail!("{verb:?} is not an operation"),
        };
        if words.next().is_some() {
            bail!("{text:?}: too many words");
        }
        Ok(op)
    }
}

/// Most bytes that an operation may write: all of them are in memory, more than once.
const WRITTEN_BYTES_MAX: u64 = 256 << 20;

/// The number of bytes that an operation writes.
fn written(word: &str) -> Result<u64> {
    let len = word.parse()?;
    ensure!(
        len <= WRITTEN_BYTES_MAX,
        "{len} bytes are too many for one write; the maximum is {WRITTEN_BYTES_MAX}"
    );
    Ok(len)
}

/// Operations from their text form.
///
/// # Errors
/// An unknown operation, missing or unreadable words.
pub fn parse(text: &str) -> Result<Vec<Op>> {
    text.split(';').filter(|part| !part.trim().is_empty()).map(str::parse).collect()
}

/// Operations of several threads, separated by `||`.
///
/// # Errors
/// As [`parse`].
pub fn parse_threads(text: &str) -> Result<Vec<Vec<Op>>> {
    text.split("||").map(parse).collect()
}

/// The text form of the operations of several threads.
pub fn format_threads(threads: &[Vec<Op>]) -> String {
    threads.iter().map(|ops| format(ops)).collect::<Vec<_>>().join(" || ")
}

/// The text form of operations.
pub fn format(ops: &[Op]) -> String {
    ops.iter().map(Op::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let text = "create /a; mkdir /d; symlink /d/s 70; link /a /d/b; unlink /a; rmdir /d; \
                    rename /d/b /c; exchange /c /d; truncate /c 5; append /c 9; write /c 1 2; magic /c 0; \
                    fallocate /c keep+punch 0 4096; fallocate /c plain 0 1; setxattr /c user.x 7; \
                    rmxattr /c user.x; chmod /c 640; chown /c 7; hold /c; fsync /; fdatasync /c; fbarrier /d; \
                    fdatabarrier /c; writeback /c; sync; grow 4096";
        let ops = parse(text).unwrap();
        assert_eq!(ops.len(), 26);
        assert_eq!(parse(&format(&ops)).unwrap(), ops);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["fly /a", "create", "truncate /a x", "sync now", "fallocate /a up 0 1"]
            .into_iter()
            .chain(["append /a 9000000000000000000", "write /a 0 1000000000000"])
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
