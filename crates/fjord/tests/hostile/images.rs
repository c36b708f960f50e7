//! Damaged images: typed errors, read-only, never a panic, a hang or a flood of memory.

use std::time::Duration;

use anyhow::Result;
use fjord_testkit::hostile::{self, Options, base};
use fjord_testkit::rng::{Rng, seed_from_env};

#[test]
fn sound_images_stay_sound() -> Result<()> {
    for index in 0..base::COUNT {
        let base = base::get(index)?;
        let (summary, wrong) = hostile::run_image(&base.image, &mut Rng::new(index as u64));
        assert!(wrong.is_empty(), "{}: {wrong:?}", base.name);
        assert_eq!(summary.stopped, 0, "{}: {summary:?}", base.name);
        assert!(summary.first_errors.is_empty(), "{}: {summary:?}", base.name);
    }
    Ok(())
}

#[test]
fn damaged_images() -> Result<()> {
    let options = Options {
        seed: seed_from_env("damaged images", 1_000_000),
        rounds: std::env::var("FJORD_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1200),
        threads: 2,
        time_max: Some(Duration::from_secs(60)),
        keep_failed_in: std::env::var_os("FJORD_KEEP_FAILED").map(Into::into),
    };
    let summary = hostile::run(&options)?;
    println!("{summary:?}");
    assert!(summary.opened > summary.cases / 4, "too few images open: {summary:?}");
    Ok(())
}
