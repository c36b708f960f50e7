//! Directories whose index is full: named as that, and not as a lack of space.

use std::sync::Arc;

use fjord::{Fs, MkfsOptions, MountOptions};
use fjord_block::{Device, MemDevice};
use fjord_tree::{Full, Rules, TreeError, put_stream};

#[test]
fn a_full_index_is_no_lack_of_space() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    let image = MkfsOptions {
        block_size: Some(1024),
        features: "^large_dir".to_owned(),
        ..MkfsOptions::default()
    };
    let fs = Fs::create_on(device, &image, &MountOptions::default()).expect("an image");
    // Long names: three to a block.
    let name = |number: u32| format!("/dir/{number}-{}", "n".repeat(240));
    fs.create_dir("/dir").expect("made");
    fs.write(name(0), b"").expect("made");
    let refused = (1..64_000).find(|number| fs.hard_link(name(0), name(*number)).is_err());
    let refused = refused.expect("full before the limit of links");
    assert!(fs.statfs().blocks_available > 10_000, "there is space");
    let (dir, path) = (fs.resolve("/dir").expect("there"), name(refused));
    let put = put_stream(
        &mut &b"text"[..],
        (&dir, &path.as_bytes()["/dir/".len()..]),
        &Rules::default(),
        &mut |_| {},
    );
    let error = put.expect_err("no room for this name");
    assert!(matches!(error, TreeError::Full { of: Full::Index, .. }), "{error}");
    assert!(error.to_string().contains("large_dir"), "{error}");
    // Names of other parts of the tree still fit.
    fs.create_dir("/other").expect("made");
    fs.unmount().expect("clean");
}
