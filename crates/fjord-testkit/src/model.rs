//! A file system in memory that carries out the same steps as the real ones: the expectation of
//! the stress test.
//!
//! Invariant: whether a step succeeds, and the tree after it, are those of a Linux file system
//! with endless space; which errno a failure has is not modelled (any errno stands for failure).

use std::collections::{BTreeMap, HashMap};

use crate::{
    manifest::{Entry, Kind, Manifest, PIECE_BYTES, Stamp, hash_piece},
    rng,
    script::{Errno, Executor, Op, Outcome},
};

type Id = u64;

#[derive(Debug, Clone)]
struct Node {
    kind: Kind,
    mode: u32,
    nlink: u32,
    data: Vec<u8>,
    target: Vec<u8>,
    rdev: (u32, u32),
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    children: BTreeMap<Vec<u8>, Id>,
}

/// The model.
#[derive(Debug, Clone)]
pub struct Model {
    nodes: HashMap<Id, Node>,
    next: Id,
}

const ROOT: Id = 0;
const FAIL: Errno = Errno(libc::EINVAL);

fn node(kind: Kind, mode: u32) -> Node {
    Node {
        kind,
        mode,
        nlink: if kind == Kind::Directory { 2 } else { 1 },
        data: Vec::new(),
        target: Vec::new(),
        rdev: (0, 0),
        xattrs: BTreeMap::new(),
        children: BTreeMap::new(),
    }
}

impl Default for Model {
    fn default() -> Self {
        Model { nodes: HashMap::from([(ROOT, node(Kind::Directory, 0o755))]), next: 1 }
    }
}

impl Model {
    fn get(&self, id: Id) -> &Node {
        &self.nodes[&id]
    }

    fn get_mut(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).expect("ids in use are in the map")
    }

    fn find(&self, path: &[u8]) -> Result<Id, Errno> {
        let mut at = ROOT;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            at = *self.get(at).children.get(name).ok_or(Errno(libc::ENOENT))?;
        }
        Ok(at)
    }

    fn parent<'p>(&self, path: &'p [u8]) -> Result<(Id, &'p [u8]), Errno> {
        let split = path.iter().rposition(|byte| *byte == b'/');
        let (dir, name) = split.map_or((&path[..0], path), |at| (&path[..at], &path[at + 1..]));
        let dir = self.find(dir)?;
        if self.get(dir).kind != Kind::Directory || name.is_empty() || name.len() > 255 {
            return Err(FAIL);
        }
        Ok((dir, name))
    }

    fn insert(&mut self, path: &[u8], new: Node) -> Result<Id, Errno> {
        let (dir, name) = self.parent(path)?;
        if self.get(dir).children.contains_key(name) {
            return Err(Errno(libc::EEXIST));
        }
        let id = self.next;
        self.next += 1;
        if new.kind == Kind::Directory {
            self.get_mut(dir).nlink += 1;
        }
        self.nodes.insert(id, new);
        self.get_mut(dir).children.insert(name.to_vec(), id);
        Ok(id)
    }

    fn remove(&mut self, path: &[u8], directory: bool) -> Outcome {
        let (dir, name) = self.parent(path)?;
        let id = *self.get(dir).children.get(name).ok_or(Errno(libc::ENOENT))?;
        let is_dir = self.get(id).kind == Kind::Directory;
        if is_dir != directory || (is_dir && !self.get(id).children.is_empty()) {
            return Err(FAIL);
        }
        self.get_mut(dir).children.remove(name);
        self.drop_link(id, dir);
        Ok(())
    }

    /// Takes a removed name's link from its node, and the node away with the last.
    fn drop_link(&mut self, id: Id, parent: Id) {
        if self.get(id).kind == Kind::Directory {
            self.get_mut(parent).nlink -= 1;
            self.nodes.remove(&id);
            return;
        }
        let node = self.get_mut(id);
        node.nlink -= 1;
        if node.nlink == 0 {
            self.nodes.remove(&id);
        }
    }

    fn file(&mut self, path: &[u8]) -> Result<&mut Node, Errno> {
        let id = self.find(path)?;
        let node = self.get_mut(id);
        if node.kind == Kind::File { Ok(node) } else { Err(FAIL) }
    }

    fn inside(&self, id: Id, ancestor: Id) -> bool {
        id == ancestor || self.get(ancestor).children.values().any(|child| self.inside(id, *child))
    }

    fn rename(&mut self, from: &[u8], to: &[u8], flags: u32) -> Outcome {
        let (from_dir, from_name) = self.parent(from)?;
        let (to_dir, to_name) = self.parent(to)?;
        let source = *self.get(from_dir).children.get(from_name).ok_or(Errno(libc::ENOENT))?;
        let target = self.get(to_dir).children.get(to_name).copied();
        let is_dir = |model: &Model, id: Id| model.get(id).kind == Kind::Directory;
        if is_dir(self, source) && self.inside(to_dir, source) {
            return Err(FAIL);
        }
        if flags & libc::RENAME_EXCHANGE != 0 {
            let target = target.ok_or(Errno(libc::ENOENT))?;
            if is_dir(self, target) && self.inside(from_dir, target) {
                return Err(FAIL);
            }
            self.get_mut(from_dir).children.insert(from_name.to_vec(), target);
            self.get_mut(to_dir).children.insert(to_name.to_vec(), source);
            self.move_subdir_count(source, from_dir, to_dir);
            self.move_subdir_count(target, to_dir, from_dir);
            return Ok(());
        }
        if let Some(target) = target {
            if flags & libc::RENAME_NOREPLACE != 0 {
                return Err(Errno(libc::EEXIST));
            }
            if target == source {
                return Ok(());
            }
            if is_dir(self, target) != is_dir(self, source) || !self.get(target).children.is_empty()
            {
                return Err(FAIL);
            }
            self.drop_link(target, to_dir);
        }
        self.get_mut(from_dir).children.remove(from_name);
        self.get_mut(to_dir).children.insert(to_name.to_vec(), source);
        self.move_subdir_count(source, from_dir, to_dir);
        Ok(())
    }

    fn move_subdir_count(&mut self, id: Id, from_dir: Id, to_dir: Id) {
        if self.get(id).kind == Kind::Directory {
            self.get_mut(from_dir).nlink -= 1;
            self.get_mut(to_dir).nlink += 1;
        }
    }

    /// The tree as a manifest; fields that the model does not keep are zero.
    pub fn manifest(&self) -> Manifest {
        let mut manifest = Manifest::default();
        let mut ids = BTreeMap::new();
        let mut pending = vec![(Vec::new(), ROOT)];
        while let Some((path, id)) = pending.pop() {
            let node = self.get(id);
            for (name, child) in &node.children {
                let mut below: Vec<u8> = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(name);
                pending.push((below, *child));
            }
            ids.insert(path.clone(), id);
            manifest.entries.insert(path, entry(node));
        }
        manifest.group_links(&ids);
        manifest
    }
}

fn entry(node: &Node) -> Entry {
    let pieces = node.data.chunks(PIECE_BYTES).enumerate();
    Entry {
        kind: node.kind,
        mode: if node.kind == Kind::Symlink { 0o777 } else { node.mode },
        uid: 0,
        gid: 0,
        size: if node.kind == Kind::Symlink { node.target.len() } else { node.data.len() } as u64,
        nlink: node.nlink,
        blocks_512b: 0,
        atime: Stamp::default(),
        mtime: Stamp::default(),
        ctime: Stamp::default(),
        btime: None,
        rdev: node.rdev,
        target: node.target.clone(),
        xattrs: node.xattrs.clone(),
        pieces: pieces.filter_map(|(i, p)| Some((i as u64, hash_piece(p)?))).collect(),
        data: Vec::new(),
        flags: 0,
        project: 0,
        first_name: Vec::new(),
    }
}

/// Writes a pattern into a vector, growing it.
fn store(data: &mut Vec<u8>, offset: u64, len: u64, seed: u64) {
    if len == 0 {
        return;
    }
    let (start, end) = (offset as usize, (offset + len) as usize);
    if data.len() < end {
        data.resize(end, 0);
    }
    rng::pattern(seed, offset, &mut data[start..end]);
}

fn fallocate(data: &mut Vec<u8>, mode: u32, offset: u64, len: u64) -> Outcome {
    const KEEP: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
    const PUNCH: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
    const ZERO: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;
    if len == 0 {
        return Err(FAIL);
    }
    let end = (offset + len) as usize;
    if mode & KEEP == 0 && data.len() < end {
        data.resize(end, 0);
    }
    if mode & (PUNCH | ZERO) != 0 {
        let (start, end) = ((offset as usize).min(data.len()), end.min(data.len()));
        data[start..end].fill(0);
    }
    Ok(())
}

impl Executor for Model {
    fn apply(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Mkdir { path, mode } => {
                self.insert(path, node(Kind::Directory, *mode)).map(drop)?
            }
            Op::Create { path, mode } => self.insert(path, node(Kind::File, *mode)).map(drop)?,
            Op::Mknod { path, kind, mode, rdev } => {
                self.insert(path, Node { rdev: *rdev, ..node(*kind, *mode) })?;
            }
            Op::Symlink { path, target } => {
                let target = target.0.clone();
                self.insert(path, Node { target, ..node(Kind::Symlink, 0o777) })?;
            }
            Op::Write { path, offset, len, seed } => {
                store(&mut self.file(path)?.data, *offset, *len, *seed);
            }
            Op::Append { path, len, seed } => {
                let data = &mut self.file(path)?.data;
                store(data, data.len() as u64, *len, *seed);
            }
            Op::Truncate { path, size } => self.file(path)?.data.resize(*size as usize, 0),
            Op::Fallocate { path, mode, offset, len } => {
                fallocate(&mut self.file(path)?.data, *mode, *offset, *len)?;
            }
            Op::Unlink { path } => self.remove(path, false)?,
            Op::Rmdir { path } => self.remove(path, true)?,
            Op::WriteUnlinked { path, len, seed } => {
                self.file(path)?;
                let id = self.find(path)?;
                self.remove(path, false)?;
                if let Some(node) = self.nodes.get_mut(&id) {
                    // Other names are left. The pattern starts at zero wherever it lands.
                    node.data.extend(rng::pattern_vec(*seed, 0, *len as usize));
                }
            }
            Op::Rename { from, to, flags } => self.rename(from, to, *flags)?,
            Op::Link { from, to } => {
                let id = self.find(from)?;
                let (dir, name) = self.parent(to)?;
                if self.get(id).kind == Kind::Directory || self.get(dir).children.contains_key(name)
                {
                    return Err(FAIL);
                }
                self.get_mut(dir).children.insert(name.to_vec(), id);
                self.get_mut(id).nlink += 1;
            }
            Op::Tmpfile { dir, link, len, seed } => {
                if self.get(self.find(dir)?).kind != Kind::Directory {
                    return Err(FAIL);
                }
                if let Some(path) = link {
                    let mut new = node(Kind::File, 0o640);
                    store(&mut new.data, 0, *len, *seed);
                    self.insert(path, new)?;
                }
            }
            Op::SetXattr { path, name, value, .. } => {
                let id = self.find(path)?;
                self.get_mut(id).xattrs.insert(name.0.clone(), value.0.clone());
            }
            Op::RemoveXattr { path, name } => {
                let id = self.find(path)?;
                self.get_mut(id).xattrs.remove(&name.0).ok_or(Errno(libc::ENODATA))?;
            }
            Op::Chmod { path, mode } => {
                let id = self.find(path)?;
                self.get_mut(id).mode = *mode;
            }
            Op::Fsync { path } => {
                if !matches!(self.get(self.find(path)?).kind, Kind::File | Kind::Directory) {
                    return Err(FAIL);
                }
            }
            Op::Chown { .. } | Op::SetTimes { .. } | Op::SetFlags { .. } => {}
            Op::SetProject { .. } | Op::StampAll { .. } => {}
        }
        Ok(())
    }

    fn read_file(&mut self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        Ok(self.file(path)?.data.clone())
    }
}
