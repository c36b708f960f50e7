//! The visible tree of a recovered file system.
//!
//! Owns [`Tree`], read through the engine. Invariant: it holds no access or change times and no
//! block counts, so two recoveries of one image give equal trees.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use fjord::{FileKind, Fs, InodeNo, InodeRef};

use crate::content::{BLOCK_BYTES, Content};
use crate::model::{Attrs, Xattrs};

/// Files up to this size are read whole; of larger ones what the map of holes calls data.
const READ_WHOLE_BYTES: u64 = 8 << 20;
const DEPTH_MAX: usize = 64;

/// An inode with all its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its generation.
    pub generation: u32,
    /// Its kind.
    pub kind: FileKind,
    /// Its attributes.
    pub attrs: Attrs,
    /// Content of a regular file.
    pub content: Content,
    /// Extended attributes.
    pub xattrs: Xattrs,
    /// Where a symbolic link points.
    pub target: Option<Vec<u8>>,
    /// Directory (inode number) and name.
    pub names: BTreeSet<(u64, String)>,
}

/// Inodes by number, as reached from the root. `lost+found` is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// The inodes.
    pub inodes: BTreeMap<u64, Seen>,
}

/// The attributes of an inode that are compared.
pub fn attrs(inode: &InodeRef) -> Attrs {
    let attr = inode.attr();
    Attrs { mode: attr.mode & 0o7777, uid: attr.uid, gid: attr.gid, mtime: attr.mtime }
}

impl Tree {
    /// Reads everything.
    ///
    /// # Errors
    /// Whatever the engine cannot read.
    pub fn read(fs: &Fs) -> Result<Tree> {
        let mut tree = Tree::default();
        let root = fs.root().context("the root directory")?;
        tree.visit(&root, None, 0)?;
        Ok(tree)
    }

    fn visit(&mut self, inode: &InodeRef, name: Option<(u64, String)>, depth: usize) -> Result<()> {
        ensure!(depth <= DEPTH_MAX, "a directory lies in itself");
        let ino = u64::from(inode.ino().0);
        if let Some(seen) = self.inodes.get_mut(&ino) {
            ensure!(seen.kind != FileKind::Directory, "directory {ino} has two names");
            seen.names.extend(name);
            return Ok(());
        }
        let kind = inode.attr().kind();
        self.inodes.insert(ino, see(inode, kind, name)?);
        if kind != FileKind::Directory {
            return Ok(());
        }
        let mut entries: Vec<(InodeNo, String)> = Vec::new();
        inode.read_dir(0, &mut |entry| {
            entries.push((entry.ino, String::from_utf8_lossy(entry.name).into_owned()));
            true
        })?;
        for (number, name) in entries {
            if name == "." || name == ".." || (depth == 0 && name == "lost+found") {
                continue;
            }
            let child = inode.lookup(name.as_bytes());
            let child = child.with_context(|| format!("{name:?} in directory {ino}"))?;
            ensure!(child.ino() == number, "{name:?} in directory {ino} is listed as {number}");
            self.visit(&child, Some((ino, name)), depth + 1)?;
        }
        Ok(())
    }
}

fn see(inode: &InodeRef, kind: FileKind, name: Option<(u64, String)>) -> Result<Seen> {
    let ino = inode.ino();
    let content = match kind {
        FileKind::Regular => read(inode).with_context(|| format!("content of inode {ino}"))?,
        _ => Content::default(),
    };
    let target = match kind {
        FileKind::Symlink => Some(inode.read_link().with_context(|| format!("link {ino}"))?),
        _ => None,
    };
    let xattrs = xattrs(inode).with_context(|| format!("attributes of inode {ino}"))?;
    Ok(Seen {
        generation: inode.attr().generation,
        kind,
        attrs: attrs(inode),
        content,
        xattrs,
        target,
        names: name.into_iter().collect(),
    })
}

fn xattrs(inode: &InodeRef) -> Result<Xattrs> {
    let mut xattrs = Xattrs::new();
    for name in inode.list_xattr()? {
        let value = inode.get_xattr(&name)?;
        xattrs.insert(String::from_utf8_lossy(&name).into_owned(), value);
    }
    Ok(xattrs)
}

fn read(file: &InodeRef) -> Result<Content> {
    let size = file.attr().size;
    let mut content = Content::default();
    let mut at = 0;
    // Most files are small, and there may be a thousand of them.
    let mut buf = vec![0; size.min(64 * BLOCK_BYTES) as usize];
    while at < size {
        if size > READ_WHOLE_BYTES {
            at = match file.seek_data(at) {
                Ok(start) => start / BLOCK_BYTES * BLOCK_BYTES,
                Err(error) if error.is(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
        }
        let take = buf.len().min((size - at) as usize);
        match file.read(at, &mut buf[..take])? {
            0 => bail!("the file ends at {at}, before its size {size}"),
            count => {
                content.write(at, &buf[..count]);
                at += count as u64;
            }
        }
    }
    content.set_size(size);
    Ok(content)
}
