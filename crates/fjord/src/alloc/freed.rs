//! Blocks and inodes that a transaction freed, until that has committed.
//!
//! Owns the lists of blocks and inodes that each transaction freed (per group with partial
//! commits), and with the option `discard` the runs whose discards are in flight. Invariants:
//! listed blocks are busy in their group; they are released once, after the commit and after their
//! discard; after a failed commit, never.
//!
//! Locking: both mutexes are leaves, never held while a group's lock is taken.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Request, Ticket};
use fjord_format::types::{BlockNo, GroupNo, Tid};
use fjord_journal::Handle;

use super::account::Account;
use super::cells::Cells;
use crate::fs::FsInner;

/// Unit of a commit: a transaction, or the changes of one generation of its handles in a group.
type Key = (Tid, Option<(u32, GroupNo)>);

/// Blocks and inodes freed under one key.
#[derive(Debug, Default)]
struct Freed {
    /// Group, first bit, count of bits.
    blocks: Vec<(GroupNo, u32, u32)>,
    /// Group and bit.
    inodes: Vec<(GroupNo, u32)>,
}

/// Freed blocks and inodes of all pending transactions.
#[derive(Debug)]
pub(super) struct FreedTable {
    by_key: Mutex<HashMap<Key, Freed>>,
    discarding: Mutex<Vec<(Vec<Ticket>, Freed)>>,
}

impl Default for FreedTable {
    fn default() -> FreedTable {
        FreedTable {
            by_key: Mutex::new(Rank::Freed, HashMap::new()),
            discarding: Mutex::new(Rank::Discarding, Vec::new()),
        }
    }
}

impl FreedTable {
    /// Whether blocks wait for discards in flight.
    pub(super) fn is_discarding(&self) -> bool {
        !self.discarding.lock().is_empty()
    }

    /// Releases discarded blocks; with `wait`, waits for all submitted discards.
    pub(super) fn reap(&self, cells: &Cells, account: &Account, wait: bool) {
        let done: Vec<_> = {
            let mut discarding = self.discarding.lock();
            let is_done = |(tickets, _): &mut (Vec<Ticket>, Freed)| {
                wait || tickets.iter().all(Ticket::is_done)
            };
            discarding.extract_if(.., is_done).collect()
        };
        for (tickets, freed) in done {
            for ticket in tickets {
                // A discard is a hint: if it fails, the blocks are still free.
                if let Err(error) = ticket.wait() {
                    tracing::debug!(%error, "discard failed");
                }
            }
            freed.let_go(cells, account);
        }
    }
}

impl Freed {
    fn let_go(self, cells: &Cells, account: &Account) {
        let mut count = 0;
        for (group, first, len) in self.blocks {
            let Some(cell) = cells.get(group.0 as usize) else { continue };
            let mut guard = cell.lock.lock();
            count += u64::from(cell.unpin(guard.get_or_insert_default(), first, len));
            cell.set_trimmed(false);
        }
        account.free_committed(count);
        for (group, bit) in self.inodes {
            let Some(cell) = cells.get(group.0 as usize) else { continue };
            let mut guard = cell.lock.lock();
            let overlay = guard.get_or_insert_default();
            let freed = overlay.busy_inodes.remove(bit..bit.saturating_add(1));
            cell.free_inodes.fetch_add(freed, Ordering::Relaxed);
        }
    }
}

impl FsInner {
    /// Lists a freed run of blocks of a group under the handle's transaction. The run is
    /// busy already; the caller holds no group's lock.
    pub(super) fn list_freed_blocks(&self, h: &Handle, group: GroupNo, first: u32, len: u32) {
        if planted(Bug::DiscardBeforeCommit) && self.options.discard {
            let at = self.geo.group_first_block(group).0 + u64::from(first);
            let (offset, len) = (self.byte_offset(BlockNo(at)), u64::from(len));
            let len = len * u64::from(self.geo.block_size);
            drop(self.device.submit(vec![Request::Discard { offset, len }]));
        }
        self.list_freed(h, group, |freed| match freed.blocks.last_mut() {
            // Truncation frees from the end, so runs often grow at either end.
            Some(last) if last.0 == group && first.checked_add(len) == Some(last.1) => {
                last.1 = first;
                last.2 += len;
            }
            Some(last) if last.0 == group && last.1.checked_add(last.2) == Some(first) => {
                last.2 += len;
            }
            _ => freed.blocks.push((group, first, len)),
        });
    }

    /// The same for an inode.
    pub(super) fn list_freed_inode(&self, h: &Handle, group: GroupNo, bit: u32) {
        self.list_freed(h, group, |freed| freed.inodes.push((group, bit)));
    }

    fn list_freed(&self, h: &Handle, group: GroupNo, add: impl FnOnce(&mut Freed)) {
        let apart = self.commits_groups() && !planted(Bug::FreedOfAllParts);
        // The handle changed the group's bitmap, so its callbacks run when the group commits.
        let key = (h.tid(), apart.then(|| (h.generation(), group)));
        let is_first = {
            let mut table = self.groups.freed.by_key.lock();
            let is_first = !table.contains_key(&key);
            add(table.entry(key).or_default());
            is_first
        };
        if is_first {
            // Nothing under the key can commit before this handle stops, so none is missed.
            h.on_commit(self.release_freed(key));
        }
    }

    /// Callback for the commit that freed them.
    fn release_freed<E>(&self, key: Key) -> impl FnOnce(Result<(), E>) + Send + 'static {
        let (cells, account) = (self.groups.cells.clone(), self.groups.account.clone());
        let table: Arc<FreedTable> = self.groups.freed.clone();
        let discard = (self.options.discard && self.device.capabilities().discard)
            .then(|| (self.device.clone(), self.geo.clone()));
        move |result| {
            if result.is_err() {
                // After a failed commit, the blocks are still in use on disk.
                return;
            }
            let Some(freed) = table.by_key.lock().remove(&key) else { return };
            let Some((device, geo)) = discard else { return freed.let_go(&cells, &account) };
            let block_size = u64::from(geo.block_size);
            let requests = freed.blocks.iter().map(|(group, first, len)| Request::Discard {
                offset: (geo.group_first_block(*group).0 + u64::from(*first)) * block_size,
                len: u64::from(*len) * block_size,
            });
            let tickets = device.submit(requests.collect());
            table.discarding.lock().push((tickets, freed));
            table.reap(&cells, &account, false);
        }
    }
}
