//! How the journal of a configuration works: which of its ways to take in changes and to write commits.
//!
//! Owns [`JournalHow`] and those of a campaign that names none. They take turns with the workloads, and do not
//! multiply them.

use anyhow::{Context, Result};
use fjord::{CommitPipeline, JournalIo, JournalLists, MountOptions};

/// See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalHow {
    /// How changes enter a transaction.
    pub lists: JournalLists,
    /// Who writes commits and checkpoints; with the dual pipeline always those that wait.
    pub io: JournalIo,
    /// Most blocks of a descriptor, so that small commits have several pieces; `None` for as many as fit.
    pub descriptor_blocks_max: Option<usize>,
}

/// Those of a campaign that names none.
pub const JOURNALS: [JournalHow; 4] = [
    JournalHow::new(JournalLists::LockFree, JournalIo::Cooperative, Some(4)),
    JournalHow::new(JournalLists::LockFree, JournalIo::Dedicated, None),
    JournalHow::new(JournalLists::Locked, JournalIo::Cooperative, Some(6)),
    JournalHow::new(JournalLists::Locked, JournalIo::Dedicated, None),
];

impl JournalHow {
    const fn new(
        lists: JournalLists,
        io: JournalIo,
        descriptor_blocks_max: Option<usize>,
    ) -> JournalHow {
        JournalHow { lists, io, descriptor_blocks_max }
    }

    /// That of these options.
    pub fn of(options: &MountOptions) -> JournalHow {
        JournalHow::new(options.journal_lists, options.journal_io, options.descriptor_blocks_max)
    }

    /// Makes it that of these options.
    pub fn apply(self, options: &mut MountOptions) {
        options.journal_lists = self.lists;
        options.journal_io = match options.pipeline {
            CommitPipeline::Dual => JournalIo::Cooperative,
            CommitPipeline::Serial | CommitPipeline::Auto => self.io,
        };
        options.descriptor_blocks_max = self.descriptor_blocks_max;
    }

    /// On the command line: `lockfree,cooperative,4`.
    pub fn name(self) -> String {
        let blocks = self.descriptor_blocks_max.map(|blocks| format!(",{blocks}"));
        format!("{},{}{}", self.lists.name(), self.io.name(), blocks.unwrap_or_default())
    }

    /// The one with this name.
    ///
    /// # Errors
    /// It is none.
    pub fn by_name(name: &str) -> Result<JournalHow> {
        let parse = || {
            let mut words = name.split(',');
            let (lists, io) = (words.next()?, words.next()?);
            let (lists, io) = (JournalLists::by_name(lists)?, JournalIo::by_name(io)?);
            let blocks = match words.next() {
                Some(blocks) => Some(blocks.parse().ok().filter(|blocks| *blocks > 0)?),
                None => None,
            };
            words.next().is_none().then_some(JournalHow::new(lists, io, blocks))
        };
        parse().with_context(|| {
            format!(
                "unknown journal {name:?}; locked or lockfree, dedicated or cooperative[, blocks]"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_back() {
        for how in JOURNALS {
            assert_eq!(JournalHow::by_name(&how.name()).unwrap(), how);
        }
        for name in ["", "locked", "locked,x", "locked,dedicated,0", "locked,dedicated,1,1"] {
            assert!(JournalHow::by_name(name).is_err(), "{name}");
        }
    }
}
