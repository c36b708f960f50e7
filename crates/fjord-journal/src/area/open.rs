//! Open barriers: those whose calls have returned, and whose write has not been submitted.
//!
//! While a write of barriers is on its way the next ones gather here, so that a stream of calls costs the device one
//! write for many. A file that comes again is taken into the i-transaction which it has here, so that an
//! overwritten block is written once. Then what is in between comes with what is behind it: so all that gather
//! here are found by recovery together, or none.
//!
//! Owns the i-transactions until they are put together. Invariants:
//! - all are of one transaction, and lie one after the other in one piece of an area;
//! - each names the last of all as a barrier before it, so that none counts alone;
//! - nothing else gets its place among barriers meanwhile: whoever needs one submits these first.

use fjord_block::Buf;
use fjord_format::ijournal::{AreaFormat, Order};
use fjord_format::types::Tid;

use super::ring::Reserved;
use super::unplaced::UnplacedITransaction;
use crate::error::Result;

/// Most bytes that gather. Then they are submitted, whatever is on its way.
const OPEN_BYTES_MAX: u64 = 1 << 20;

/// An i-transaction among open barriers.
#[derive(Debug)]
struct Member {
    /// Its number among the barriers of the transaction.
    number: u32,
    transaction: UnplacedITransaction,
    /// Blocks that are reserved for it.
    blocks: u32,
}

/// Barriers that are not submitted.
#[derive(Debug)]
pub(crate) struct OpenBarriers {
    pub(crate) tid: Tid,
    pub(crate) place: Reserved,
    format: AreaFormat,
    members: Vec<Member>,
}

/// A way for a later barrier to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Joining {
    /// The member that takes it in; `None`: it becomes one.
    into: Option<usize>,
    /// Blocks of that member then.
    blocks: u32,
    /// Blocks to reserve in addition.
    pub(crate) more: u32,
}

impl OpenBarriers {
    /// The first one, which has this number; `place` is for it.
    pub(crate) fn new(
        format: AreaFormat,
        place: Reserved,
        number: u32,
        transaction: UnplacedITransaction,
    ) -> OpenBarriers {
        let (tid, blocks) = (transaction.tid, place.len);
        let members = vec![Member { number, transaction, blocks }];
        OpenBarriers { tid, place, format, members }
    }

    /// How many i-transactions there are.
    pub(crate) fn count(&self) -> u64 {
        self.members.len() as u64
    }

    /// How a barrier of `blocks` blocks can join. `None` if these have to be submitted first.
    pub(crate) fn joining(&self, later: &UnplacedITransaction, blocks: u32) -> Option<Joining> {
        if later.tid != self.tid {
            return None;
        }
        let takes_in = |member: &Member| member.transaction.can_take_in(later);
        let into = self.members.iter().rposition(takes_in);
        let joining = match into.and_then(|at| self.members.get(at)) {
            Some(member) => {
                let with = member.transaction.blocks_max_with(later, &self.format)?;
                let blocks = with.max(member.blocks);
                Joining { into, blocks, more: blocks - member.blocks }
            }
            None => Joining { into: None, blocks, more: blocks },
        };
        let bytes = u64::from(self.place.len + joining.more) * self.format.block_size as u64;
        (bytes <= OPEN_BYTES_MAX).then_some(joining)
    }

    /// Lets a barrier join; the blocks are reserved. `number` is what it gets if it becomes a member. Whether it has.
    pub(crate) fn join(
        &mut self,
        joining: Joining,
        number: u32,
        later: UnplacedITransaction,
    ) -> bool {
        self.place.len += joining.more;
        match joining.into.and_then(|at| self.members.get_mut(at)) {
            Some(member) => {
                member.blocks = joining.blocks;
                member.transaction.take_in(later);
                false
            }
            None => {
                let blocks = joining.blocks;
                self.members.push(Member { number, transaction: later, blocks });
                true
            }
        }
    }

    /// The blocks to write, one after the other. `order` gives the place among barriers of an own number and the last
    /// one of all.
    pub(crate) fn put_together(
        self,
        mut order: impl FnMut(u32, u32) -> Option<Order>,
    ) -> Result<Option<Vec<Buf>>> {
        let last = self.members.last().map_or(0, |member| member.number);
        let mut blocks = Vec::with_capacity(self.place.len as usize);
        for member in self.members {
            let Some(order) = order(member.number, last) else { return Ok(None) };
            blocks.append(&mut member.transaction.put_together(&self.format, &order)?);
        }
        Ok(Some(blocks))
    }
}
