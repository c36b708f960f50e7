//! Tar streams: [`stream`] reads headers and data, [`extract`] puts entries into an image.

pub(crate) mod extract;
pub(crate) mod stream;
