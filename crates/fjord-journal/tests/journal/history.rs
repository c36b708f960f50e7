//! What random histories share: the state of each block, what a crash must leave of it, and the
//! cuts that are tried.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::{Buf, DeviceExt, Request};
use fjord_format::jbd2::ChecksumVersion;
use fjord_journal::{Buffer, Handle};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::rig::{Event, Recorder, Rig, Survival, crash, is_whole, set_value};

pub(crate) const SURVIVALS: [Survival; 4] =
    [Survival::All, Survival::None, Survival::Sectors, Survival::Requests];

pub(crate) const CHECKSUMS: [ChecksumVersion; 4] =
    [ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3];

/// What a block is; `F` says when a freed one may be reused.
#[derive(Clone, Debug)]
pub(crate) enum State<F> {
    Metadata(u64),
    Free(F),
    /// Value, and the request that wrote it.
    Data(u64, usize),
}

impl<F> State<F> {
    pub(crate) fn is_metadata(&self) -> bool {
        matches!(self, State::Metadata(_))
    }

    /// The value that must be there after a cut; `None` where anything may.
    fn expected(&self, events: &[Event], cut: usize) -> Option<u64> {
        match self {
            State::Metadata(value) => Some(*value),
            State::Data(value, index) => {
                let mut later = events[..cut].iter().skip(index + 1);
                let is_durable = *index < cut && later.any(|event| matches!(event, Event::Flush));
                is_durable.then_some(*value)
            }
            State::Free(_) => None,
        }
    }
}

/// Blocks by number.
pub(crate) type Blocks<F> = BTreeMap<u64, State<F>>;

/// The buffers that a cache would hold.
#[derive(Default)]
pub(crate) struct Buffers(BTreeMap<u64, Arc<Buffer>>);

impl Buffers {
    pub(crate) fn get(&self, block: u64) -> Option<&Arc<Buffer>> {
        self.0.get(&block)
    }

    /// Sets a block's value; one that was no metadata is new to the journal.
    pub(crate) fn write(
        &mut self,
        rig: &Rig,
        handle: &Handle,
        block: u64,
        was_metadata: bool,
        value: u64,
    ) {
        if !was_metadata && !self.0.get(&block).is_some_and(|old| old.is_dirty()) {
            self.0.remove(&block);
        }
        let buffer = self.0.entry(block).or_insert_with(|| rig.buffer(block));
        let guard = if was_metadata { handle.get_write(buffer) } else { handle.get_create(buffer) };
        set_value(&mut guard.unwrap(), value);
    }
}

/// Writes data to a block, past the journal; what the block is then.
pub(crate) fn write_data<F>(rig: &Rig, block: u64, value: u64) -> State<F> {
    let mut contents = Buf::zeroed(rig.block_size);
    set_value(contents.make_mut(), value);
    let index = rig.device.event_count();
    let request = Request::write(block * rig.block_size as u64, vec![contents]);
    rig.device.submit_one(request).wait().unwrap();
    State::Data(value, index)
}

/// The newest commit that had returned before a cut; `promises` are of requests so far and commit.
pub(crate) fn promised(promises: &[(usize, u32)], cut: usize) -> u32 {
    promises.iter().filter(|(at, _)| *at <= cut).map(|(_, commit)| *commit).max().unwrap_or(0)
}

/// Each block of a recovered image is what it must be after this cut.
pub(crate) fn check_blocks<F>(
    rig: &Rig,
    blocks: &Blocks<F>,
    recovered: &[u8],
    (events, cut): (&[Event], usize),
    context: &str,
) {
    for (&block, state) in blocks {
        let Some(expected) = state.expected(events, cut) else { continue };
        let at = block as usize * rig.block_size;
        let value = rig.value(recovered, block);
        assert!(
            value == expected && is_whole(&recovered[at..at + rig.block_size]),
            "{context}: block {block} has {value}, not {expected}"
        );
    }
}

/// Calls `visit` with each cut of these events, each kind of survival, and the image that it leaves.
pub(crate) fn each_crash(
    start: &[u8],
    events: &[Event],
    seed: u64,
    mut visit: impl FnMut(usize, Survival, Vec<u8>, &mut StdRng),
) {
    let mut rng = StdRng::seed_from_u64(seed);
    for cut in 0..=events.len() {
        for how in SURVIVALS {
            let image = crash(start, events, cut, how, &mut rng);
            visit(cut, how, image, &mut rng);
        }
    }
}

/// Calls `visit` with each third cut, and the image that recovery makes of what it leaves.
pub(crate) fn each_third_recovered(
    rig: &Rig,
    start: &[u8],
    events: &[Event],
    mut visit: impl FnMut(usize, &[u8]),
) {
    let mut rng = StdRng::seed_from_u64(1);
    for cut in (0..=events.len()).step_by(3) {
        let how = SURVIVALS[cut / 3 % 4];
        let device = Arc::new(Recorder::from_image(&crash(start, events, cut, how, &mut rng)));
        rig.open_on(&device).unwrap();
        visit(cut, &device.image());
    }
}
