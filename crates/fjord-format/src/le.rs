//! Little-endian fields in byte slices whose layout depends on other fields.
//!
//! Invariant: an access out of bounds is a typed error on reading and on writing, never a panic.

use crate::error::{FormatError, Result};

fn truncated(structure: &'static str, bytes: &[u8], need_bytes: usize) -> FormatError {
    FormatError::Truncated { structure, need_bytes, got_bytes: bytes.len() }
}

/// `len` bytes from `offset` on.
pub(crate) fn slice<'a>(
    structure: &'static str,
    bytes: &'a [u8],
    offset: usize,
    len: usize,
) -> Result<&'a [u8]> {
    let end = offset.saturating_add(len);
    bytes.get(offset..end).ok_or_else(|| truncated(structure, bytes, end))
}

/// `len` bytes from `offset` on, to be written.
pub(crate) fn slice_mut<'a>(
    structure: &'static str,
    bytes: &'a mut [u8],
    offset: usize,
    len: usize,
) -> Result<&'a mut [u8]> {
    let end = offset.saturating_add(len);
    let error = truncated(structure, bytes, end);
    bytes.get_mut(offset..end).ok_or(error)
}

/// The `N` bytes from `offset` on, by value.
fn array<const N: usize>(structure: &'static str, bytes: &[u8], offset: usize) -> Result<[u8; N]> {
    bytes
        .get(offset..)
        .and_then(|rest| rest.first_chunk::<N>())
        .copied()
        .ok_or_else(|| truncated(structure, bytes, offset.saturating_add(N)))
}

/// The 16-bit field at `offset`.
pub(crate) fn get_u16(structure: &'static str, bytes: &[u8], offset: usize) -> Result<u16> {
    array(structure, bytes, offset).map(u16::from_le_bytes)
}

/// The 32-bit field at `offset`.
pub(crate) fn get_u32(structure: &'static str, bytes: &[u8], offset: usize) -> Result<u32> {
    array(structure, bytes, offset).map(u32::from_le_bytes)
}

/// Writes `field` at `offset`.
pub(crate) fn put(
    structure: &'static str,
    bytes: &mut [u8],
    offset: usize,
    field: &[u8],
) -> Result<()> {
    slice_mut(structure, bytes, offset, field.len())?.copy_from_slice(field);
    Ok(())
}

/// Writes a 16-bit field at `offset`.
pub(crate) fn put_u16(
    structure: &'static str,
    bytes: &mut [u8],
    offset: usize,
    value: u16,
) -> Result<()> {
    put(structure, bytes, offset, &value.to_le_bytes())
}

/// Writes a 32-bit field at `offset`.
pub(crate) fn put_u32(
    structure: &'static str,
    bytes: &mut [u8],
    offset: usize,
    value: u32,
) -> Result<()> {
    put(structure, bytes, offset, &value.to_le_bytes())
}
