//! Excluded members whose content hard links with other names need.
//!
//! Owns the search for them while streams are measured. Invariant: what is remembered is limited;
//! a link to a member beyond that is refused, never made wrong.

use std::collections::{HashMap, HashSet};

use crate::contents::Contents;

/// Most bytes of names of excluded members that are remembered.
const NAME_BYTES_MAX: usize = 64 << 20;
/// Most excluded members that are remembered.
const MEMBERS_MAX: usize = 1 << 18;

/// A member's name as it is compared: without slashes at the ends, double ones and `.`.
pub(crate) fn plain_name(path: &[u8]) -> Vec<u8> {
    let parts = path.split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    parts.join(&b'/')
}

/// Excluded members of the streams so far.
#[derive(Default)]
pub(crate) struct ExcludedMembers {
    /// What each of them would take in the image.
    members: HashMap<Vec<u8>, Contents>,
    name_bytes: usize,
    targets: HashSet<Vec<u8>>,
}

impl ExcludedMembers {
    /// Remembers a member that is no directory.
    pub(crate) fn note(&mut self, name: Vec<u8>, contents: Contents) {
        self.name_bytes = self.name_bytes.saturating_add(name.len());
        if self.name_bytes <= NAME_BYTES_MAX && self.members.len() < MEMBERS_MAX {
            self.members.insert(name, contents);
        }
    }

    /// A hard link that is not excluded names `target`: what comes into the image for it, when
    /// that is an excluded member that none has named before.
    pub(crate) fn link_to(&mut self, target: &[u8]) -> Option<Contents> {
        let (name, contents) = self.members.remove_entry(&plain_name(target))?;
        self.targets.insert(name);
        Some(contents)
    }

    /// The members that hard links name.
    pub(crate) fn into_targets(self) -> HashSet<Vec<u8>> {
        self.targets
    }
}
