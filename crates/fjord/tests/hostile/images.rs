//! Damaged images: typed errors, read-only, never a panic, a hang or a flood of memory.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fjord::{Error, FileDevice, FileOptions, Fs, MkfsOptions, MountOptions};
use fjord_block::MemDevice;
use fjord_testkit::hostile::{self, Options, base};
use fjord_testkit::image;
use fjord_testkit::rng::{Rng, seed_from_env};
use fjord_testkit::size::pick;

/// The yardstick for all else: without damage nothing is found, and e2fsck agrees afterwards.
#[test]
fn sound_images_stay_sound() -> Result<()> {
    let seed = seed_from_env("sound images", 1);
    for round in 0..pick(1, 1, 4) * base::COUNT {
        let base = base::get(round)?;
        let device = Arc::new(MemDevice::from_image(&base.image));
        let mut rng = Rng::new(seed.wrapping_add(round as u64));
        let (summary, wrong) = hostile::run_device(&device, &mut rng);
        let title = format!("{}, round {round}", base.name);
        assert!(wrong.is_empty(), "{title}: {wrong:?}");
        assert_eq!(summary.stopped, 0, "{title}: {summary:?}");
        assert!(summary.first_errors.is_empty(), "{title}: {summary:?}");
        image::e2fsck_clean_in_memory(&device.snapshot()).context(title)?;
    }
    Ok(())
}

#[test]
fn damaged_images() -> Result<()> {
    let options = Options {
        seed: seed_from_env("damaged images", 1_000_000),
        rounds: std::env::var("FJORD_ROUNDS")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(|| pick(60, 240, 1200)),
        threads: 2,
        time_max: Some(Duration::from_secs(60)),
        keep_failed_in: std::env::var_os("FJORD_KEEP_FAILED").map(Into::into),
    };
    let summary = hostile::run(&options)?;
    println!("{summary:?}");
    assert!(summary.opened > summary.cases / 4, "too few images open: {summary:?}");
    Ok(())
}

/// Damage that is seen above the directories stops changes as any other does: a root that is none, and a directory
/// that contains itself, met by a walk and by a removal.
#[test]
fn damage_of_the_tree_is_noted() -> Result<()> {
    type Meet = fn(&Fs) -> fjord::Result<()>;
    let walk: Meet = |fs| fs.walk("/")?.try_for_each(|entry| entry.map(drop));
    let cases: [(&str, Meet); 3] = [
        ("set_inode_field <2> mode 0100644", |fs| fs.root().map(drop)),
        ("link /dir /dir/again", walk),
        ("link /dir /dir/again", |fs| fs.remove_dir_all("/dir")),
    ];
    for (request, meet) in cases {
        let file = tempfile::NamedTempFile::new()?;
        image::make_sparse(file.path(), 16 << 20)?;
        let device = FileDevice::open(file.path(), &FileOptions::default())?;
        let fs =
            Fs::create_on(Arc::new(device), &MkfsOptions::default(), &MountOptions::default())?;
        fs.create_dir("/dir")?;
        fs.unmount()?;
        image::debugfs_write(file.path(), &[request.to_owned()])?;
        let fs = Fs::open(file.path(), &MountOptions::default())?;
        let Err(error) = meet(&fs) else { bail!("{request}: no error") };
        ensure!(matches!(error, Error::Corrupt { .. }), "{request}: {error}");
        ensure!(fs.stats().failure.is_some(), "{request}: {error}, yet still writable");
    }
    Ok(())
}
