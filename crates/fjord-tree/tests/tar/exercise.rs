//! What must hold for any bytes as a tar stream. Shared by the mutation tests and the fuzz target
//! `tar_stream`.

use std::fs;
use std::sync::Arc;

use fjord_block::Device;
use fjord_mkfs::{MkfsOptions, format};
use fjord_testkit::image::Scratch;
use fjord_tree::{Contents, Rules, Source, TarInput, TarOptions, TreeError, populate};

/// Size of the image that a stream is put into.
const IMAGE_BYTES: u64 = 8 << 20;

/// Puts a stream into a new image on `device`. It must end in an image, or in an error that a bad stream may
/// have, and what can be put in can be measured first.
///
/// # Panics
/// One of these does not hold; `what` names the stream.
pub(crate) fn put_in(
    device: Arc<dyn Device>,
    bytes: &[u8],
    layers: bool,
    what: &str,
) -> Result<(), TreeError> {
    let options = MkfsOptions { size_bytes: Some(IMAGE_BYTES), ..MkfsOptions::default() };
    let dir = Scratch::in_memory("tar").expect("a directory");
    let path = dir.join("stream");
    fs::write(&path, bytes).expect("written");
    format(&*device, &options).expect("formats");
    let inputs = [TarInput::open(&path).expect("opens")];
    let options = TarOptions { layers, ask_host: false };
    let measured = Contents::of_tar(&mut &bytes[..], &Rules::default());
    let source = Source::Tars(&inputs, &options);
    let done = populate(device, source, &Rules::default(), &mut |_| {}).map(drop);
    if let (Err(measured), Ok(())) = (&measured, &done) {
        panic!("{what}: put in, but not measured: {measured}");
    }
    match &done {
        Ok(()) => {}
        Err(TreeError::Tar { .. } | TreeError::Full { .. } | TreeError::LinkTooLong { .. }) => {}
        // Names that are too long, lists that are invalid, sizes beyond ext4's.
        Err(TreeError::Engine { source: fjord::Error::Posix(_), .. }) => {}
        Err(other) => panic!("{what}: {other:?}"),
    }
    done
}
