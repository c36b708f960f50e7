//! Data of several inodes in one submission: neighbours on the device are one request.
//!
//! Files of a page or two that are written back together lie beside each other. A request for each costs the
//! device, or the file system below, more than their bytes do; Linux's block layer merges them while they wait in
//! a plug.
//!
//! Owns what is merged. Invariants: a batch has a ticket of each request that carries a part of it; only requests of
//! the same class and order are merged; the failure of a merged request is put down to an inode only if a
//! request for its data alone fails too, else it is a warning.

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Device, IoError, Order, Request, Ticket};

use super::in_flight::wait_all;
use super::{Batch, Mode, WriteRun, how};
use crate::fs::FsInner;
use crate::inode::Inode;

/// Bytes of a merged request, at most; a single run may be longer. The largest request that Linux makes by
/// default is as long (`max_sectors_kb` of 1280, rounded down to a power of two).
const MERGED_MAX_BYTES: u64 = 1 << 20;

/// A run on its way into a request.
struct Piece<'a> {
    /// Byte on the device.
    offset: u64,
    len: u64,
    run: &'a WriteRun,
    class: Class,
    order: Order,
    /// Index of its batch.
    owner: usize,
}

/// A request in the making.
struct Merged {
    offset: u64,
    len: u64,
    bufs: Vec<Buf>,
    class: Class,
    order: Order,
    /// Indexes of the batches that it carries parts of, each once for each part.
    owners: Vec<usize>,
}

impl Merged {
    fn takes(&self, piece: &Piece<'_>) -> bool {
        self.offset + self.len == piece.offset
            && self.len + piece.len <= MERGED_MAX_BYTES
            && (self.class, self.order) == (piece.class, piece.order)
    }
}

/// Submits the writes of all these batches that are not submitted yet.
pub(in crate::file) fn submit_together(fs: &FsInner, batches: &mut [(&Inode, &mut Batch)]) {
    if batches.iter().all(|(_, batch)| batch.unsent.is_none()) {
        return;
    }
    let merged = merge(pieces(fs, batches));
    let (mut requests, mut owners) = (Vec::new(), Vec::new());
    for one in merged {
        let Merged { offset, bufs, class, order, owners: of, .. } = one;
        requests.push(Request::Write { offset, bufs, order, fua: false, class });
        owners.push(of);
    }
    let tickets = fs.data_device.submit(requests);
    for (ticket, of) in tickets.into_iter().zip(owners) {
        let is_shared = of.iter().any(|owner| *owner != of[0]);
        for owner in of {
            let batch = &mut batches[owner].1;
            batch.is_merged |= is_shared;
            batch.tickets.push(ticket.clone());
        }
    }
    for (inode, batch) in batches {
        if batch.unsent.take().is_some() {
            inode.quasi_async.began(&batch.tickets);
        }
    }
}

fn pieces<'a>(fs: &FsInner, batches: &'a [(&Inode, &mut Batch)]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for (owner, (inode, batch)) in batches.iter().enumerate() {
        let Some(class) = batch.unsent else { continue };
        let (class, order) = how(fs, inode, Mode::DataFirst(class));
        pieces.extend(batch.runs.iter().map(|run| Piece {
            offset: fs.byte_offset(run.phys),
            len: u64::from(run.len()) * u64::from(fs.geo.block_size),
            run,
            class,
            order,
            owner,
        }));
    }
    pieces.sort_by_key(|piece| piece.offset);
    pieces
}

fn merge(pieces: Vec<Piece<'_>>) -> Vec<Merged> {
    let mut merged: Vec<Merged> = Vec::new();
    for piece in pieces {
        let bufs = piece.run.bufs.iter().cloned();
        match merged.last_mut() {
            Some(last) if last.takes(&piece) && planted(Bug::NeighbourForgotten) => {
                last.owners.push(piece.owner);
            }
            Some(last) if last.takes(&piece) => {
                last.len += piece.len;
                last.bufs.extend(bufs);
                last.owners.push(piece.owner);
            }
            _ => {
                let Piece { offset, len, class, order, owner, .. } = piece;
                let owners = vec![owner];
                merged.push(Merged { offset, len, bufs: bufs.collect(), class, order, owners });
            }
        }
    }
    merged
}

/// Waits for the data of a batch. If a request failed that carried data of other inodes too, the batch's own
/// data is written again alone, so that a bad block costs no file but its own.
pub(super) fn wait(fs: &FsInner, inode: &Inode, batch: &mut Batch) -> Result<(), IoError> {
    let written = wait_all(&batch.tickets);
    if written.is_ok() || !batch.is_merged {
        return written;
    }
    batch.is_merged = false;
    batch.tickets = submit_alone(fs, inode, batch);
    wait_all(&batch.tickets)?;
    if let Err(error) = written {
        fs.warn(format_args!(
            "a write with the data of several files failed ({error}); that of inode {} was written again, alone",
            inode.ino
        ));
    }
    Ok(())
}

fn submit_alone(fs: &FsInner, inode: &Inode, batch: &Batch) -> Vec<Ticket> {
    let (class, order) = how(fs, inode, Mode::DataFirst(Class::Sync));
    let requests = batch.runs.iter().map(|run| run.request(fs, order, class));
    fs.data_device.submit(requests.collect())
}
