//! Sequences of operations on existing files.
//!
//! Owns [`Filling`], which follows a sequence as it is generated: it creates missing files and
//! directories first, and drops most operations that would still be refused.
//!
//! Invariant: its state of the tree equals the real tree, unless an operation fails for lack of
//! space or of a feature.

use std::collections::{BTreeMap, BTreeSet};

use fjord::FallocMode;

use crate::ops::{Op, parent};

/// Of the operations that do not fit one in so many stays: refusals are to be met, too.
const MISFIT_EVERY: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Dir,
    Symlink,
}

/// Kind of the file of a name.
#[derive(Debug)]
struct Node {
    kind: Kind,
    size: u64,
    xattrs: BTreeSet<String>,
}

/// A sequence that makes the files and directories that its operations want to find.
#[derive(Debug, Default)]
pub(crate) struct Filling {
    ops: Vec<Op>,
    nodes: Vec<Node>,
    /// Nodes by path; the root is not in it.
    names: BTreeMap<String, usize>,
    misfits: usize,
}

impl Filling {
    /// A sequence on a tree that these operations make.
    pub(crate) fn on(setup: &[Op]) -> Filling {
        let mut filling = Filling::default();
        setup.iter().for_each(|op| filling.apply(op));
        filling
    }

    /// How many operations there are.
    pub(crate) fn len(&self) -> usize {
        self.ops.len()
    }

    /// The sequence.
    pub(crate) fn into_ops(self) -> Vec<Op> {
        self.ops
    }

    /// Appends an operation, and before it the operations that it needs; or, most likely, nothing
    /// if it does not fit.
    pub(crate) fn push(&mut self, op: Op) {
        let wanted = match &op {
            Op::Create(path) | Op::Mkdir(path) | Op::Symlink(path, _) => vec![parent(path)],
            Op::Rename(from, to) | Op::Link(from, to) => vec![parent(to), from],
            _ => op.source().into_iter().chain(op.target()).collect(),
        };
        let make = if matches!(op, Op::Rmdir(_)) { Op::Mkdir } else { Op::Create };
        for path in wanted {
            let is_parent = op.target().map(parent) == Some(path);
            self.need(path, if is_parent { Op::Mkdir } else { make });
        }
        if !self.fits(&op) {
            self.misfits += 1;
            if !self.misfits.is_multiple_of(MISFIT_EVERY) {
                return;
            }
        }
        self.add(op);
    }

    fn add(&mut self, op: Op) {
        if self.fits(&op) {
            self.apply(&op);
        }
        self.ops.push(op);
    }

    fn need(&mut self, path: &str, make: fn(String) -> Op) {
        if path.is_empty() || self.names.contains_key(path) {
            return;
        }
        self.need(parent(path), Op::Mkdir);
        let op = make(path.to_owned());
        if self.fits(&op) {
            self.add(op);
        }
    }

    fn node(&self, path: &str) -> Option<&Node> {
        self.names.get(path).map(|&node| &self.nodes[node])
    }

    fn is_dir(&self, path: &str) -> bool {
        path.is_empty() || self.node(path).is_some_and(|node| node.kind == Kind::Dir)
    }

    fn is_empty_dir(&self, path: &str) -> bool {
        self.is_dir(path) && !self.names.keys().any(|name| parent(name) == path)
    }

    /// Whether the operation will be carried out.
    fn fits(&self, op: &Op) -> bool {
        let is_new = |path: &str| self.is_dir(parent(path)) && self.node(path).is_none();
        let file = |path: &str| self.node(path).filter(|node| node.kind == Kind::File);
        match op {
            Op::Create(path) | Op::Mkdir(path) | Op::Symlink(path, _) => is_new(path),
            Op::Link(from, to) => {
                self.node(from).is_some_and(|node| node.kind != Kind::Dir) && is_new(to)
            }
            Op::Unlink(path) => self.node(path).is_some() && !self.is_dir(path),
            Op::Rmdir(path) => !path.is_empty() && self.is_empty_dir(path),
            Op::Rename(from, to) => {
                let same_kind = self.is_dir(from) == self.is_dir(to);
                let replaces = same_kind && (!self.is_dir(to) || self.is_empty_dir(to));
                self.node(from).is_some()
                    && self.is_dir(parent(to))
                    && !is_in(to, from)
                    && (self.node(to).is_none() || replaces)
            }
            Op::Exchange(a, b) => {
                let both = self.node(a).is_some() && self.node(b).is_some();
                both && !is_in(a, b) && !is_in(b, a)
            }
            Op::Fallocate(path, mode, offset, len) => file(path).is_some_and(|node| {
                (!mode.contains(FallocMode::COLLAPSE_RANGE) || offset + len < node.size)
                    && (!mode.contains(FallocMode::INSERT_RANGE) || *offset < node.size)
            }),
            Op::Truncate(path, _)
            | Op::Append(path, _)
            | Op::Write(path, ..)
            | Op::Magic(path, _) => file(path).is_some(),
            Op::SetXattr(path, ..) => {
                self.node(path).is_some_and(|node| node.kind != Kind::Symlink)
            }
            Op::RemoveXattr(path, name) => {
                self.node(path).is_some_and(|node| node.xattrs.contains(name))
            }
            Op::Sync => true,
            _ => op.target().is_some_and(|path| path.is_empty() || self.node(path).is_some()),
        }
    }

    /// Takes over what an operation does that fits.
    fn apply(&mut self, op: &Op) {
        let mut make = |path: &String, kind: Kind| {
            self.names.insert(path.clone(), self.nodes.len());
            self.nodes.push(Node { kind, size: 0, xattrs: BTreeSet::new() });
        };
        match op {
            Op::Create(path) => make(path, Kind::File),
            Op::Mkdir(path) => make(path, Kind::Dir),
            Op::Symlink(path, _) => make(path, Kind::Symlink),
            Op::Link(from, to) => {
                let node = self.names.get(from).copied();
                self.names.extend(node.map(|node| (to.clone(), node)));
            }
            Op::Unlink(path) | Op::Rmdir(path) => drop(self.names.remove(path)),
            Op::Rename(from, to) if self.names.get(from) == self.names.get(to) => {}
            Op::Rename(from, to) => {
                self.names.remove(to);
                let moved = self.take(from);
                self.put(to, moved);
            }
            Op::Exchange(a, b) => {
                let (of_a, of_b) = (self.take(a), self.take(b));
                self.put(a, of_b);
                self.put(b, of_a);
            }
            _ => {
                let node = op.target().and_then(|path| self.names.get(path));
                if let Some(&node) = node {
                    change(&mut self.nodes[node], op);
                }
            }
        }
    }

    /// Takes a name and all below it away; gives them by the rest of their paths.
    fn take(&mut self, path: &str) -> Vec<(String, usize)> {
        let all: Vec<String> =
            self.names.keys().filter(|name| is_in(name, path)).cloned().collect();
        let taken = all.into_iter().filter_map(|name| {
            let node = self.names.remove(&name)?;
            Some((name[path.len()..].to_owned(), node))
        });
        taken.collect()
    }

    fn put(&mut self, path: &str, names: Vec<(String, usize)>) {
        self.names.extend(names.into_iter().map(|(rest, node)| (format!("{path}{rest}"), node)));
    }
}

/// Whether a path is another one, or lies below it.
fn is_in(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// What an operation on one file changes of it, as far as others ask for it.
fn change(node: &mut Node, op: &Op) {
    match op {
        Op::Truncate(_, size) => node.size = *size,
        Op::Append(_, len) => node.size += len,
        Op::Write(_, offset, len) => node.size = node.size.max(offset + len),
        Op::Magic(_, offset) => node.size = node.size.max(offset + 4096),
        Op::Fallocate(_, mode, offset, len) => {
            if mode.contains(FallocMode::COLLAPSE_RANGE) {
                node.size -= len;
            } else if mode.contains(FallocMode::INSERT_RANGE) {
                node.size += len;
            } else if !mode.contains(FallocMode::KEEP_SIZE) {
                node.size = node.size.max(offset + len);
            }
        }
        Op::SetXattr(_, name, _) => drop(node.xattrs.insert(name.clone())),
        Op::RemoveXattr(_, name) => drop(node.xattrs.remove(name)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;

    fn filled(setup: &str, text: &str) -> String {
        let parse = |text| ops::parse(text).expect("operations");
        let mut filling = Filling::on(&parse(setup));
        parse(text).into_iter().for_each(|op| filling.push(op));
        ops::format(&filling.into_ops())
    }

    #[test]
    fn what_is_missing_is_made_first() {
        assert_eq!(filled("", "append /d/a 5"), "mkdir /d; create /d/a; append /d/a 5");
        assert_eq!(filled("mkdir /d", "rmdir /d/e"), "mkdir /d/e; rmdir /d/e");
        let moved = filled("create /a", "rename /a /d/b; fsync /a; fsync /d/b");
        assert_eq!(moved, "mkdir /d; rename /a /d/b; create /a; fsync /a; fsync /d/b");
    }

    #[test]
    fn what_would_be_refused_is_left_out() {
        let setup = "mkdir /d; create /d/a; append /d/a 5000; symlink /s 5";
        for misfit in [
            "create /d",
            "rmdir /d",
            "unlink /d",
            "rename /d /d/e",
            "rename /d/a /d",
            "link /d /e",
            "append /d 5",
            "append /s 5",
            "rmxattr /d/a user.x",
            "fallocate /d/a collapse 0 8192",
            "fallocate /d/a insert 8192 4096",
            "create /d/a",
        ] {
            assert_eq!(filled(setup, misfit), "", "{misfit}");
        }
    }

    #[test]
    fn a_directory_moves_with_what_is_in_it() {
        let setup = "mkdir /d; create /d/a; mkdir /e; create /e/b";
        let text = "rename /d /f; fsync /f/a; exchange /f /e; fsync /e/a; fsync /f/b; rmdir /e";
        assert_eq!(
            filled(setup, text),
            "rename /d /f; fsync /f/a; exchange /f /e; fsync /e/a; fsync /f/b"
        );
    }
}
