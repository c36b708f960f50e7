//! What a recovered tree must show.
//!
//! Owns the comparison of a [`Tree`] with a [`Model`] at a cut, and [`Problem`], what can be
//! wrong. Each aspect of each object must be one of its admissible versions; content is compared
//! byte by byte, since parts of a write may be there.

use fjord::{DataMode, FileKind};

use crate::content::{BLOCK_BYTES, Content};
use crate::model::{History, Model, Object, ObjectId, ROOT, Slot};
use crate::tree::{Seen, Tree};

/// The kinds of finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The image does not mount, or a file cannot be read.
    RecoveryFailed,
    /// e2fsck finds fault with the recovered image.
    Fsck,
    /// Something promised is gone, or older than promised.
    PromiseLost,
    /// A file shows bytes that were never written to it there.
    ForeignBytes,
    /// A name, inode, size or attribute that never was.
    Invented,
    /// Recovering again, or after a cut inside recovery, gives something else.
    NotIdempotent,
    /// Linux or e2fsck recover the image to another tree.
    Disagrees,
    /// The engine failed while the workload ran.
    EngineFailed,
}

/// A finding without its case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?}: {text}")]
pub struct Problem {
    /// Its kind.
    pub kind: Kind,
    /// What is wrong where.
    pub text: String,
}

impl Problem {
    /// A problem.
    pub fn new(kind: Kind, text: impl Into<String>) -> Problem {
        Problem { kind, text: text.into() }
    }
}

/// Compares a recovered tree with what a cut at `cut` may leave.
///
/// # Errors
/// The first problem.
pub fn check(tree: &Tree, model: &Model, cut: u64, data: DataMode) -> Result<(), Problem> {
    for (ino, seen) in &tree.inodes {
        let Some(id) = find(model, *ino, seen) else {
            let names: Vec<_> = seen.names.iter().map(|name| &name.1).collect();
            let text = format!("inode {ino} (named {names:?}) was never made");
            return Err(Problem::new(Kind::Invented, text));
        };
        object(tree, model, id, seen, cut, data)?;
    }
    slots(tree, model, cut)?;
    for (id, object) in model.objects().iter().enumerate() {
        let there = tree.inodes.get(&object.ino).is_some_and(|seen| same(object, seen));
        if id != ROOT && !there && !object.names.admissible(cut).any(|names| names.is_empty()) {
            let text = format!("{} is not there", describe(object));
            return Err(Problem::new(Kind::PromiseLost, text));
        }
    }
    Ok(())
}

fn same(object: &Object, seen: &Seen) -> bool {
    object.generation == seen.generation && object.kind == seen.kind
}

fn find(model: &Model, ino: u64, seen: &Seen) -> Option<ObjectId> {
    model.objects().iter().position(|object| object.ino == ino && same(object, seen))
}

fn describe(object: &Object) -> String {
    let names: Vec<_> = object.names.ever().flatten().map(|slot| slot.1.as_str()).collect();
    format!("{:?} {} (names over time: {names:?})", object.kind, object.ino)
}

/// A value must be admissible; says whether it is too old or was never there.
fn one_of<T: PartialEq + Clone + std::fmt::Debug>(
    history: &History<T>,
    value: &T,
    cut: u64,
    what: impl Fn() -> String,
) -> Result<(), Problem> {
    if history.admissible(cut).any(|version| version == value) {
        return Ok(());
    }
    let wanted: Vec<_> = history.admissible(cut).collect();
    let old = history.ever().any(|version| version == value);
    let kind = if old { Kind::PromiseLost } else { Kind::Invented };
    let text = format!("{}: found {value:?}, admissible {wanted:?}", what());
    Err(Problem::new(kind, shorten(text)))
}

fn shorten(mut text: String) -> String {
    if text.len() > 800 {
        let mut end = 800;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

fn object(
    tree: &Tree,
    model: &Model,
    id: ObjectId,
    seen: &Seen,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    let object = &model.objects()[id];
    let what = |aspect: &'static str| move || format!("{aspect} of {}", describe(object));
    if seen.target != object.target {
        let text = format!("the target of {} is {:?}", describe(object), seen.target);
        return Err(Problem::new(Kind::ForeignBytes, shorten(text)));
    }
    one_of(&object.attrs, &seen.attrs, cut, what("attributes"))?;
    one_of(&object.xattrs, &seen.xattrs, cut, what("extended attributes"))?;
    if object.kind == FileKind::Regular {
        content(&object.content, &seen.content, cut, data)
            .map_err(|p| Problem::new(p.kind, format!("{}: {}", describe(object), p.text)))?;
    }
    if id == ROOT {
        return Ok(());
    }
    let mut names = std::collections::BTreeSet::new();
    for (dir, name) in &seen.names {
        let parent = tree.inodes.get(dir).and_then(|seen| find(model, *dir, seen));
        let Some(parent) = parent else {
            let text = format!("{name:?} lies in inode {dir}, which was never made");
            return Err(Problem::new(Kind::Invented, text));
        };
        names.insert((parent, name.clone()));
    }
    one_of(&object.names, &names, cut, what("names"))
}

fn slots(tree: &Tree, model: &Model, cut: u64) -> Result<(), Problem> {
    let mut shown: std::collections::BTreeMap<Slot, ObjectId> = std::collections::BTreeMap::new();
    for (ino, seen) in &tree.inodes {
        for (dir, name) in &seen.names {
            let dir = tree.inodes.get(dir).and_then(|seen_dir| find(model, *dir, seen_dir));
            if let (Some(dir), Some(id)) = (dir, find(model, *ino, seen)) {
                shown.insert((dir, name.clone()), id);
            }
        }
    }
    for (slot, history) in model.slots() {
        let value = shown.get(slot).copied();
        one_of(history, &value, cut, || format!("object at {:?} in directory {}", slot.1, slot.0))?;
    }
    Ok(())
}

/// Sizes that a cut may leave: those of the versions, and while a file grew, those between.
fn size_fits(history: &History<Content>, size: u64, cut: u64) -> bool {
    let mut before = None;
    history.admissible(cut).map(Content::size_bytes).any(|now| {
        let grew = before.is_some_and(|before| before <= size && size <= now);
        before = Some(now);
        now == size || grew
    })
}

fn content(
    history: &History<Content>,
    seen: &Content,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    let admissible = history.admissible(cut);
    if admissible.clone().any(|version| version == seen) {
        return Ok(());
    }
    if !size_fits(history, seen.size_bytes(), cut) {
        let sizes: Vec<_> = admissible.map(Content::size_bytes).collect();
        let text = format!("size {}, admissible {sizes:?}", seen.size_bytes());
        return Err(Problem::new(Kind::PromiseLost, shorten(text)));
    }
    let mut numbers: Vec<u64> = admissible.clone().flat_map(Content::blocks).collect();
    numbers.extend(seen.blocks());
    numbers.sort_unstable();
    numbers.dedup();
    for number in numbers {
        let found = seen.block(number);
        if !admissible.clone().any(|version| version.block(number) == found) {
            block(history, seen, number, cut, data)?;
        }
    }
    Ok(())
}

fn block(
    history: &History<Content>,
    seen: &Content,
    number: u64,
    cut: u64,
    data: DataMode,
) -> Result<(), Problem> {
    let versions: Vec<&[u8; BLOCK_BYTES as usize]> =
        history.admissible(cut).map(|version| version.block(number)).collect();
    let base = number * BLOCK_BYTES;
    let end = (seen.size_bytes().saturating_sub(base)).min(BLOCK_BYTES) as usize;
    for (index, byte) in seen.block(number)[..end].iter().enumerate() {
        if versions.iter().any(|version| version[index] == *byte) {
            continue;
        }
        let first = versions[0][index];
        let fixed = first != 0 && versions.iter().all(|version| version[index] == first);
        if data == DataMode::Writeback && !fixed {
            continue;
        }
        let written = history.ever().any(|version| version.block(number)[index] == *byte);
        let kind = if *byte == 0 || written { Kind::PromiseLost } else { Kind::ForeignBytes };
        let text =
            format!("byte {} is {byte:#04x}, admissible e.g. {first:#04x}", base + index as u64);
        return Err(Problem::new(kind, text));
    }
    Ok(())
}
