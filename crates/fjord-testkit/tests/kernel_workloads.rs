//! The workloads on the kernel's own ext4: they must pass there before they may judge fjord.

use std::path::Path;

use anyhow::Result;
use fjord_testkit::{
    features,
    image::{self, KernelMount, Scratch},
    workloads,
};

fn on_kernel(test: impl FnOnce(&Path, &Scratch) -> Result<()>) -> Result<()> {
    let scratch = Scratch::in_memory("workload")?;
    let img = scratch.join("kernel.img");
    features::by_name("default").expect("a set of the table").make(&img)?;
    let mount = KernelMount::new(&img, "noinit_itable")?;
    test(mount.path(), &scratch)?;
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn programs() -> Result<()> {
    on_kernel(|dir, _| workloads::fio(dir, 8))?;
    on_kernel(|dir, _| workloads::sqlite_databases(dir))?;
    on_kernel(|dir, _| workloads::git(dir))?;
    on_kernel(|dir, scratch| workloads::tar_tree(dir, &scratch.join("tree.tar")))
}

#[test]
fn many_entries() -> Result<()> {
    on_kernel(|dir, _| workloads::large_directory(dir, 20_000))
}

#[test]
fn full() -> Result<()> {
    let scratch = Scratch::in_memory("full")?;
    let img = scratch.join("small.img");
    workloads::make_small(&img, &[])?;
    let mount = KernelMount::new(&img, "noinit_itable")?;
    // Linux may refuse blocks that a removal has freed until a commit.
    let settle = || Ok(rustix::fs::syncfs(std::fs::File::open(mount.path())?)?);
    let survivors = workloads::fill_up(mount.path(), settle)?;
    let old = mount.path().to_owned();
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    let mount = KernelMount::new(&img, "ro")?;
    survivors.check_at(&old, mount.path())?;
    mount.unmount()
}
