//! Directory entries of a log, as changes to the directories on disk.
//!
//! Invariant: each name has its entry on disk, so that only the difference is applied.

use std::collections::HashMap;
use std::sync::Arc;

use fjord_format::types::InodeNo;

use crate::dir;
use crate::error::Result;
use crate::fs::FsInner;
use crate::replay;

/// A name in a directory.
pub(super) type Slot = (InodeNo, Vec<u8>);

/// One name.
#[derive(Clone, Copy, Debug)]
struct Name {
    /// What the directory had.
    base: Option<InodeNo>,
    /// What it is to have.
    now: Option<InodeNo>,
}

/// The names that a log speaks of.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashMap<Slot, Name>,
    /// In the order in which they came up, so that parents come before what is in them.
    order: Vec<Slot>,
}

impl Names {
    /// What a name stands for by now. `made` says whether the directory is made by the log.
    pub(super) fn get(
        &mut self,
        fs: &Arc<FsInner>,
        slot: &Slot,
        made: bool,
    ) -> Result<Option<InodeNo>> {
        if let Some(name) = self.known.get(slot) {
            return Ok(name.now);
        }
        let base = if made { None } else { find(fs, slot)? };
        self.known.insert(slot.clone(), Name { base, now: base });
        self.order.push(slot.clone());
        Ok(base)
    }

    /// Lets a name that was looked at stand for something else.
    pub(super) fn set(&mut self, slot: &Slot, now: Option<InodeNo>) {
        if let Some(name) = self.known.get_mut(slot) {
            name.now = now;
        }
    }

    /// Entries to be removed: those whose name has another meaning now.
    pub(super) fn removed(&self) -> impl Iterator<Item = (&Slot, InodeNo)> {
        self.changed().filter_map(|(slot, name)| Some((slot, name.base?)))
    }

    /// Entries to be added, parents first.
    pub(super) fn added(&self) -> impl Iterator<Item = (&Slot, InodeNo)> {
        self.changed().filter_map(|(slot, name)| Some((slot, name.now?)))
    }

    fn changed(&self) -> impl Iterator<Item = (&Slot, &Name)> {
        let named = self.order.iter().filter_map(|slot| Some((slot, self.known.get(slot)?)));
        named.filter(|(_, name)| name.base != name.now)
    }
}

fn find(fs: &Arc<FsInner>, (parent, name): &Slot) -> Result<Option<InodeNo>> {
    let parent = replay::directory(fs, *parent)?;
    let state = parent.state.read();
    Ok(dir::find(fs, &parent, &state, name)?.map(|found| found.ino))
}
