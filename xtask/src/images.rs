//! `cargo xtask images`: one image for each feature set, for inspection and experiments.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use fjord_testkit::{
    features::{self, FEATURE_SETS},
    image::KernelMount,
    script::{Executor, KernelExecutor, Script},
    tools,
};

/// Arguments of `cargo xtask images`.
#[derive(Debug, Args)]
pub(crate) struct ImagesArgs {
    /// Directory to make the images in
    dir: PathBuf,
    /// Only this feature set (may be repeated)
    #[arg(long = "set", value_name = "NAME")]
    sets: Vec<String>,
    /// Have the kernel fill them with the varied script of this seed
    #[arg(long, value_name = "SEED")]
    fill: Option<u64>,
}

/// Makes the images.
pub(crate) fn run(args: &ImagesArgs) -> Result<()> {
    std::fs::create_dir_all(&args.dir)?;
    for name in &args.sets {
        features::by_name(name).with_context(|| {
            let names: Vec<&str> = FEATURE_SETS.iter().map(|set| set.name).collect();
            format!("no feature set {name}; known: {}", names.join(", "))
        })?;
    }
    let wanted = |name: &str| args.sets.is_empty() || args.sets.iter().any(|set| set == name);
    for set in FEATURE_SETS.iter().filter(|set| wanted(set.name)) {
        let path = args.dir.join(format!("{}.img", set.name));
        set.make(&path)?;
        let mut note = "empty";
        if let Some(seed) = args.fill {
            if set.kernel_mounts()? {
                let mount = KernelMount::new(&path, "rw,noinit_itable")?;
                KernelExecutor::new(mount.path()).run(&Script::varied(seed));
                mount.unmount()?;
                note = "filled";
            } else {
                tools::skipped(set.name, "this kernel does not mount it; left empty");
            }
        }
        println!("{} ({note}): mke2fs {}", path.display(), set.mke2fs.join(" "));
    }
    Ok(())
}
