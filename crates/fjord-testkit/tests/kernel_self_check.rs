//! The rig judged by itself: the same script run twice by the kernel must give equal trees, and a
//! changed tree must be noticed. Without this, an equal manifest would prove nothing.

use anyhow::{Result, ensure};
use fjord_testkit::{
    features,
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    script::{Bytes, Executor, KernelExecutor, Op, Outcome, Script},
    tools,
};

fn run_on_kernel(
    set: &str,
    script: &Script,
    scratch: &Scratch,
) -> Result<(Vec<Outcome>, Manifest)> {
    let set = features::by_name(set).expect("a set of the table");
    let img = scratch.join("kernel.img");
    set.make(&img)?;
    let mount = KernelMount::new(&img, "noinit_itable")?;
    let outcomes = KernelExecutor::new(mount.path()).run(script);
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    let mount = KernelMount::new(&img, "ro")?;
    let manifest = Manifest::from_directory(mount.path())?.without_lost_found();
    mount.unmount()?;
    Ok((outcomes, manifest))
}

#[test]
fn same_script_gives_same_tree() -> Result<()> {
    let script = Script::varied(1);
    let (left, left_tree) = run_on_kernel("default", &script, &Scratch::new("self")?)?;
    let (right, right_tree) = run_on_kernel("no-64bit", &script, &Scratch::new("self")?)?;
    let done = left.iter().filter(|outcome| outcome.is_ok()).count();
    println!("{} steps, {done} succeeded, {} entries", left.len(), left_tree.entries.len());
    ensure!(done * 10 > left.len() * 9, "most steps should succeed");
    let differ = script.compare_outcomes(&left, &right);
    ensure!(differ.is_empty(), "outcomes differ:\n{}", differ.join("\n"));
    left_tree.diff(&right_tree, &Compare::SAME_SCRIPT).ok("default", "no-64bit")
}

#[test]
fn the_manifest_notices_each_change() -> Result<()> {
    tools::require_root()?;
    let dir = Scratch::new("notice")?;
    let mut run = KernelExecutor::new(dir.path());
    let file = Bytes::from("f");
    let base = [
        Op::Create { path: file.clone(), mode: 0o644 },
        Op::Write { path: file.clone(), offset: 0, len: 100_000, seed: 1 },
        Op::Create { path: "g".into(), mode: 0o644 },
    ];
    for op in &base {
        run.apply(op).expect("base");
    }
    let changes = [
        Op::Write { path: file.clone(), offset: 99_999, len: 1, seed: 2 },
        Op::Append { path: file.clone(), len: 1, seed: 2 },
        Op::Chmod { path: file.clone(), mode: 0o600 },
        Op::Chown { path: file.clone(), uid: 1, gid: 2 },
        Op::SetXattr { path: file.clone(), name: "user.x".into(), value: vec![1].into(), flags: 0 },
        Op::Link { from: file.clone(), to: "h".into() },
        Op::SetFlags { path: file.clone(), set: 0x40, clear: 0 },
        Op::Fallocate { path: file, mode: 3, offset: 0, len: 65_536 },
        Op::Unlink { path: "g".into() },
    ];
    for op in changes {
        let before = Manifest::from_directory(dir.path())?;
        run.apply(&op).expect("change");
        let after = Manifest::from_directory(dir.path())?;
        ensure!(!before.diff(&after, &Compare::SAME_IMAGE).is_empty(), "not noticed: {op:?}");
    }
    Ok(())
}
