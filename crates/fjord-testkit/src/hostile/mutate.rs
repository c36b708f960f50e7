//! Mutations of an image.
//!
//! Owns the choice of what to damage and how. All choices come from one [`Choices`], a seeded
//! generator or the bytes of a fuzzer, so that they repeat. Invariant: a mutation changes bytes
//! of known structures only; never file data.

use fjord_block::MemImage;
use fjord_format::geometry::Geometry;

use super::base::Base;
use super::places::{self, Kind, Place};
use super::seal;
use crate::rng::Rng;

/// A source of decisions.
pub trait Choices {
    /// A number in `0..bound`; 0 when `bound` is 0.
    fn below(&mut self, bound: u64) -> u64;

    /// True `percent` times in a hundred.
    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

impl Choices for Rng {
    fn below(&mut self, bound: u64) -> u64 {
        Rng::below(self, bound)
    }
}

/// Decisions from a fuzzer's bytes; zeros when they are used up.
#[derive(Debug, Clone)]
pub struct Bytes<'a>(pub &'a [u8]);

impl Choices for Bytes<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        let need = if bound <= 1 << 8 {
            1
        } else if bound <= 1 << 16 {
            2
        } else {
            8
        };
        let (now, later) = self.0.split_at(self.0.len().min(need));
        self.0 = later;
        let value = now.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        if bound == 0 { 0 } else { value % bound }
    }
}

/// All kinds, each as likely as the others whatever the number of its places.
const KINDS: [Kind; 14] = [
    Kind::Superblock,
    Kind::Descriptor,
    Kind::BlockBitmap,
    Kind::InodeBitmap,
    Kind::Inode,
    Kind::Extents,
    Kind::Indirect,
    Kind::Dirents,
    Kind::Htree,
    Kind::Xattrs,
    Kind::Value,
    Kind::OrphanFile,
    Kind::JournalSuper,
    Kind::Log,
];

/// Fields of an inode: offset and length in bytes.
const INODE_FIELDS: [(usize, usize); 18] = [
    (0x00, 2), // mode
    (0x04, 4), // size, low
    (0x14, 4), // deletion time, next orphan
    (0x1a, 2), // links
    (0x1c, 4), // blocks
    (0x20, 4), // flags
    (0x28, 2), // first word of the map: magic of an extent header
    (0x2a, 2), // its entries
    (0x2c, 2), // its capacity
    (0x2e, 2), // its depth
    (0x34, 4), // first entry
    (0x38, 2),
    (0x3c, 4),
    (0x58, 4), // indirect pointers
    (0x68, 4), // attribute block
    (0x6c, 4), // size, high
    (0x76, 2), // attribute block, high
    (0x80, 2), // extra size
];

/// Damages a copy of `base` in one to four places; says what it did.
pub fn mutate(base: &Base, choices: &mut dyn Choices) -> (MemImage, Vec<String>) {
    let mut image = base.image.clone();
    let Some((_, geo)) = places::layout(&base.image) else { return (image, Vec::new()) };
    let mut done = Vec::new();
    for _ in 0..1 + choices.below(4).min(choices.below(4)) {
        let Some(place) = pick(base, choices) else { continue };
        let what = change(base, &geo, &mut image, &place, choices);
        // Most with a right checksum: what lies behind the check is what matters.
        let sealed = choices.percent(80);
        if sealed {
            seal::seal(&mut image, &geo, &place);
        }
        done.push(format!("{:?} at {:#x}: {what}, sealed {sealed}", place.kind, place.at));
    }
    (image, done)
}

fn pick(base: &Base, choices: &mut dyn Choices) -> Option<Place> {
    let present: Vec<Kind> =
        KINDS.into_iter().filter(|kind| base.places.iter().any(|p| p.kind == *kind)).collect();
    let kind = *present.get(choices.below(present.len() as u64) as usize)?;
    let of_kind: Vec<&Place> = base.places.iter().filter(|place| place.kind == kind).collect();
    // The first ones are the ones that every operation meets.
    let span = if choices.percent(30) { of_kind.len().min(4) } else { of_kind.len() };
    of_kind.get(choices.below(span as u64) as usize).map(|place| **place)
}

fn change(
    base: &Base,
    geo: &Geometry,
    image: &mut MemImage,
    place: &Place,
    choices: &mut dyn Choices,
) -> String {
    let mut bytes = vec![0; place.len];
    if image.read_at(place.at, &mut bytes).is_err() {
        return "nothing".into();
    }
    let what = match choices.below(12) {
        0 => {
            let at = offset(place, choices, 1);
            let bit = 1 << choices.below(8);
            bytes[at] ^= bit;
            format!("byte {at} ^ {bit:#x}")
        }
        1 => swap_content(base, image, place, &mut bytes, choices),
        2 if choices.percent(30) => {
            let byte = if choices.percent(50) { 0 } else { 0xff };
            let from = offset(place, choices, 1);
            bytes[from..].fill(byte);
            format!("{byte:#x} from {from} on")
        }
        3 | 4 => {
            let (at, value) = (offset(place, choices, 2), number(geo, place, choices) as u16);
            put(&mut bytes, at, &value.to_le_bytes());
            format!("16 bits at {at} = {value:#x}")
        }
        5 if matches!(place.kind, Kind::JournalSuper | Kind::Log) => {
            let (at, value) = (offset(place, choices, 4), number(geo, place, choices) as u32);
            put(&mut bytes, at, &value.to_be_bytes());
            format!("32 bits at {at} = {value:#x}, big-endian")
        }
        6 => {
            let at = offset(place, choices, 4);
            let delta = choices.below(9) as u32;
            let old =
                bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            put(&mut bytes, at, &old.wrapping_add(delta).wrapping_sub(4).to_le_bytes());
            format!("32 bits at {at}: {old} + {delta} - 4")
        }
        _ => {
            let (at, value) = (offset(place, choices, 4), number(geo, place, choices) as u32);
            put(&mut bytes, at, &value.to_le_bytes());
            format!("32 bits at {at} = {value:#x}")
        }
    };
    // It was read from there.
    let _ = image.write_at(place.at, &bytes);
    what
}

/// The content of another place of the same kind: a child that is its own parent, a directory
/// block of another directory.
fn swap_content(
    base: &Base,
    image: &MemImage,
    place: &Place,
    bytes: &mut [u8],
    choices: &mut dyn Choices,
) -> String {
    let others: Vec<&Place> =
        base.places.iter().filter(|o| o.kind == place.kind && o.len == place.len).collect();
    let Some(other) = others.get(choices.below(others.len() as u64) as usize) else {
        return "nothing".into();
    };
    // Places of one length; a failed read leaves the bytes.
    let _ = image.read_at(other.at, bytes);
    format!("content of {:#x}", other.at)
}

/// An offset for a value of `width` bytes, most often where a structure keeps its header.
fn offset(place: &Place, choices: &mut dyn Choices, width: usize) -> usize {
    if place.kind == Kind::Inode && choices.percent(75) {
        let (at, _) = INODE_FIELDS[choices.below(INODE_FIELDS.len() as u64) as usize];
        return at.min(place.len - width);
    }
    let span = if choices.percent(60) { place.len.min(96) } else { place.len };
    let at = choices.below(span as u64) as usize;
    (at / width * width).min(place.len - width)
}

/// A number that some field may take for a block, an inode, a count or a length.
fn number(geo: &Geometry, place: &Place, choices: &mut dyn Choices) -> u64 {
    let block = u64::from(geo.block_size);
    let table: [u64; 22] = [
        0,
        1,
        2,
        3,
        7,
        8,
        11,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        geo.block_count,
        geo.block_count - 1,
        u64::from(geo.inode_count),
        u64::from(geo.inode_count) + 1,
        block,
        block - 8,
        // A loop: the structure itself.
        place.at / block,
        geo.first_data_block.0 + 1,
        0xf30a,
    ];
    match choices.below(4) {
        0 => choices.below(geo.block_count),
        1 => choices.below(1 << 32),
        2 => choices.below(300),
        _ => table[choices.below(table.len() as u64) as usize],
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(slot) = bytes.get_mut(at..at + value.len()) {
        slot.copy_from_slice(value);
    }
}
