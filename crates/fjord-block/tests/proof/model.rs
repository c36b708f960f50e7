//! A device that may persist in any order it is free to, and the promises it is checked against.
//!
//! The model knows nothing of the scheduler's state: it derives epochs from the script, and keeps
//! for each piece of a write whether it *may* be on the medium (it was dispatched) and whether it
//! *surely* is (FUA, a flush that began after its transfer, or no cache). Order between epochs
//! holds when nothing of epoch k+1 may be there before all of epoch k surely is, and all that had
//! completed when a barrier before was submitted, or, on a device with barriers, before all of it
//! stands in front of a barrier.
//!
//! Failures have a place in the script: a failed ordered write stops what is ordered behind it and
//! nothing before it; a failed flush stops all that is not done.

use std::collections::BTreeMap;
use std::hash::Hash;

use fjord_block::epoch::{Command, CommandId, DeviceTraits, Io, IoKind};
use fjord_block::{IoResult, Order};

/// A piece of a write that was dispatched.
#[derive(Clone, Debug, Hash)]
struct Piece {
    owner: usize,
    len: u64,
    /// A barrier was dispatched with it or after it if it is ordered, else after its transfer.
    fenced: bool,
    command: CommandId,
    transferred: bool,
    surely: bool,
}

/// What the device and its caller saw so far.
#[derive(Clone, Debug, Hash)]
pub(crate) struct Model {
    traits: DeviceTraits,
    script: Vec<Io>,
    pub(crate) pushed_count: usize,
    pieces: Vec<Piece>,
    pub(crate) in_flight: Vec<Command>,
    /// Flushes under way, and the pieces transferred when each began.
    flushing: Vec<(CommandId, Vec<usize>)>,
    /// Results by place in the script.
    pub(crate) results: Vec<Option<bool>>,
    /// For each request, the changes whose results were there when it was submitted.
    done_before: Vec<Vec<usize>>,
    /// The script places of each command's parts.
    owners: BTreeMap<CommandId, Vec<usize>>,
    /// Requests of which a command failed.
    failed: Vec<bool>,
    /// The first ordered write that failed.
    failed_write: Option<usize>,
    /// A flush failed.
    failed_flush: bool,
    pub(crate) failures_left: u32,
}

fn is_ordered(io: &Io) -> bool {
    io.kind.order() != Order::Orderless
}

fn has_fua(io: &Io) -> bool {
    matches!(io.kind, IoKind::Write { fua: true, .. })
}

pub(crate) fn touches(a: &Io, b: &Io) -> bool {
    a.offset < b.offset + b.len && b.offset < a.offset + a.len
}

/// The number of barriers submitted before.
fn epoch_of(script: &[Io], index: usize) -> usize {
    script[..index].iter().filter(|io| io.kind.order() == Order::Barrier).count()
}

impl Model {
    pub(crate) fn new(traits: DeviceTraits, script: &[Io], failures: u32) -> Self {
        Model {
            traits,
            script: script.to_vec(),
            pushed_count: 0,
            pieces: Vec::new(),
            in_flight: Vec::new(),
            flushing: Vec::new(),
            results: vec![None; script.len()],
            done_before: vec![Vec::new(); script.len()],
            owners: BTreeMap::new(),
            failed: vec![false; script.len()],
            failed_write: None,
            failed_flush: false,
            failures_left: failures,
        }
    }

    /// The next request of the script, about to be submitted.
    pub(crate) fn push(&mut self) -> Io {
        let index = self.pushed_count;
        self.pushed_count += 1;
        self.done_before[index] = (0..index)
            .filter(|i| self.script[*i].kind.changes() && self.results[*i] == Some(true))
            .collect();
        self.script[index]
    }

    fn sent_bytes(&self, owner: usize, only: impl Fn(&Piece) -> bool) -> u64 {
        self.pieces.iter().filter(|p| p.owner == owner && only(p)).map(|p| p.len).sum()
    }

    /// All of it is surely on the medium.
    fn is_durable(&self, index: usize) -> bool {
        self.sent_bytes(index, |piece| piece.surely) == self.script[index].len
    }

    fn is_transferred(&self, index: usize) -> bool {
        self.sent_bytes(index, |piece| piece.transferred) == self.script[index].len
    }

    /// A command goes to the device. `owners` are the script places of its parts.
    pub(crate) fn dispatch(&mut self, command: Command, owners: &[usize]) -> Result<(), String> {
        if command.kind == IoKind::Flush {
            self.check_flush()?;
            let transferred =
                (0..self.pieces.len()).filter(|i| self.pieces[*i].transferred).collect();
            self.flushing.push((command.id, transferred));
            self.in_flight.push(command);
            return Ok(());
        }
        let mut offset = command.offset;
        for (part, owner) in command.parts.iter().zip(owners) {
            let io = self.script[*owner];
            if offset != io.offset + part.skip {
                return Err(format!("{command:?} moves bytes of request {owner}"));
            }
            offset += part.len;
            self.check_overlaps(*owner)?;
            if is_ordered(&io) {
                if self.failed_flush || self.follows_failed_write(*owner) {
                    return Err(format!("{command:?} follows a failure"));
                }
                self.check_order(*owner, &command)?;
            }
            if !io.kind.changes() {
                continue;
            }
            self.pieces.push(Piece {
                owner: *owner,
                len: part.len,
                fenced: false,
                command: command.id,
                transferred: false,
                surely: false,
            });
        }
        if offset != command.offset + command.len {
            return Err(format!("{command:?} has another length than its parts"));
        }
        if command.kind.order() == Order::Barrier {
            for piece in &mut self.pieces {
                piece.fenced |= piece.transferred || is_ordered(&self.script[piece.owner]);
            }
        }
        self.owners.insert(command.id, owners.to_vec());
        self.in_flight.push(command);
        Ok(())
    }

    /// Whether it is ordered behind a write that failed.
    fn follows_failed_write(&self, index: usize) -> bool {
        let io = &self.script[index];
        (is_ordered(io) || io.kind == IoKind::Flush)
            && self.failed_write.is_some_and(|failed| failed < index)
    }

    /// After a failure a flush is sent only for a request that the failure does not stop.
    fn check_flush(&self) -> Result<(), String> {
        if self.failed_flush {
            return Err("a flush follows a failed flush".into());
        }
        let served = |index: &usize| {
            let io = &self.script[*index];
            let waits = io.kind.is_flush() || has_fua(io) || is_ordered(io);
            waits && self.results[*index].is_none() && !self.follows_failed_write(*index)
        };
        if self.failed_write.is_some() && !(0..self.pushed_count).any(|index| served(&index)) {
            return Err("a flush follows a failure, and serves no request before it".into());
        }
        Ok(())
    }

    /// Earlier requests on the same bytes are done, later ones have not begun.
    fn check_overlaps(&self, owner: usize) -> Result<(), String> {
        let io = self.script[owner];
        for (index, other) in self.script.iter().enumerate().take(self.pushed_count) {
            let harmless = io.kind == IoKind::Read && other.kind == IoKind::Read;
            if index == owner || harmless || !touches(&io, other) {
                continue;
            }
            if index < owner && self.results[index].is_none() && !self.is_transferred(index) {
                return Err(format!("request {owner} overtakes {index} on the same bytes"));
            }
            if index > owner && self.sent_bytes(index, |_| true) > 0 {
                return Err(format!("request {index} overtook {owner} on the same bytes"));
            }
        }
        Ok(())
    }

    /// All earlier epochs come before this write, whatever the device does, and so do the changes
    /// that had completed when a barrier before was submitted.
    fn check_order(&self, owner: usize, command: &Command) -> Result<(), String> {
        let epoch = epoch_of(&self.script, owner);
        let by_itself = matches!(command.kind, IoKind::Write { fua: true, .. });
        let earlier = |index: &usize| {
            is_ordered(&self.script[*index]) && epoch_of(&self.script, *index) < epoch
        };
        let earlier: Vec<_> = (0..self.pushed_count).filter(earlier).collect();
        let barriers = earlier.iter().filter(|i| self.script[**i].kind.order() == Order::Barrier);
        let completed = barriers.flat_map(|barrier| self.done_before[*barrier].iter());
        for index in earlier.iter().chain(completed).copied() {
            let fenced = self.traits.native_barrier
                && !by_itself
                && self.sent_bytes(index, |piece| piece.fenced) == self.script[index].len;
            if !fenced && !self.is_durable(index) {
                return Err(format!("request {owner} of epoch {epoch} may persist before {index}"));
            }
        }
        Ok(())
    }

    /// The device reports a command.
    pub(crate) fn complete(&mut self, at: usize, well: bool) -> Command {
        let command = self.in_flight.remove(at);
        if !well {
            self.failures_left -= 1;
            self.failed_flush |= command.kind == IoKind::Flush;
            for owner in self.owners.get(&command.id).into_iter().flatten().copied() {
                self.failed[owner] = true;
                if is_ordered(&self.script[owner]) {
                    let first = self.failed_write.map_or(owner, |first| first.min(owner));
                    self.failed_write = Some(first);
                }
            }
        }
        self.owners.remove(&command.id);
        if let Some(at) = self.flushing.iter().position(|(id, _)| *id == command.id) {
            let (_, covered) = self.flushing.remove(at);
            if well {
                covered.into_iter().for_each(|piece| self.pieces[piece].surely = true);
            }
        } else if well {
            let fua = self.traits.fua && matches!(command.kind, IoKind::Write { fua: true, .. });
            for piece in self.pieces.iter_mut().filter(|piece| piece.command == command.id) {
                piece.transferred = true;
                piece.surely = fua || !self.traits.volatile_cache;
            }
        }
        command
    }

    /// The scheduler reports a request.
    pub(crate) fn done(&mut self, index: usize, result: &IoResult) -> Result<(), String> {
        if self.results[index].replace(result.is_ok()).is_some() {
            return Err(format!("request {index} has two results"));
        }
        if result.is_err() {
            return self.check_failed(index);
        }
        let io = self.script[index];
        if self.failed[index]
            || self.follows_failed_write(index)
            || (self.failed_flush && io.kind.is_flush())
        {
            return Err(format!("request {index} succeeds after a failure"));
        }
        match io.kind {
            IoKind::Flush | IoKind::FlushCompleted => {
                let waits_ordered = io.kind == IoKind::Flush;
                let ordered = (0..index).filter(|i| waits_ordered && is_ordered(&self.script[*i]));
                for write in ordered.chain(self.done_before[index].iter().copied()) {
                    if !self.is_durable(write) {
                        return Err(format!("flush {index} is done before {write} is durable"));
                    }
                }
            }
            IoKind::Write { fua: true, .. } if !self.is_durable(index) => {
                return Err(format!("FUA write {index} is done before it is durable"));
            }
            IoKind::Read => {}
            _ if !self.is_transferred(index) => {
                return Err(format!("request {index} is done before its transfer"));
            }
            _ => {}
        }
        Ok(())
    }

    /// A request fails by itself, behind an ordered write that failed, or for want of a flush.
    fn check_failed(&self, index: usize) -> Result<(), String> {
        let io = &self.script[index];
        let stopped = self.failed_flush && (io.kind.is_flush() || is_ordered(io) || has_fua(io));
        if self.failed[index] || stopped || self.follows_failed_write(index) {
            return Ok(());
        }
        Err(format!("request {index} fails, and nothing before it has"))
    }

    /// A request of the script.
    pub(crate) fn io(&self, index: usize) -> Io {
        self.script[index]
    }

    /// What must hold when nothing more can happen.
    pub(crate) fn check_end(&self) -> Result<(), String> {
        match self.results[..self.pushed_count].iter().position(Option::is_none) {
            Some(index) => Err(format!("request {index} hangs")),
            None => Ok(()),
        }
    }
}
