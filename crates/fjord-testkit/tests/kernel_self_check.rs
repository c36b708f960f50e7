//! The rig judged by itself: the same script run twice by the kernel must give equal trees, and a
//! changed tree must be noticed. Without this, an equal manifest would prove nothing.

use anyhow::{Result, ensure};
use fjord_testkit::{
    features,
    fsx::{self, KernelFile},
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    promise,
    script::{Bytes, Executor, KernelExecutor, Op, Outcome, Script},
    stress, tools,
};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
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
fn the_kernel_passes_fsx() -> Result<()> {
    let scratch = Scratch::new("fsx")?;
    let img = scratch.join("kernel.img");
    features::by_name("default").expect("a set of the table").make(&img)?;
    let mount = KernelMount::new(&img, "noinit_itable")?;
    let mut file = KernelFile::create(&mount.path().join("file"))?;
    let counts = fsx::check(&mut file, fsx::Options::new(1, 3000))?;
    println!("{counts:?}");
    drop(file);
    mount.unmount()
}

#[test]
fn the_kernel_passes_the_stress() -> Result<()> {
    let scratch = Scratch::new("stress")?;
    let img = scratch.join("kernel.img");
    features::by_name("default").expect("a set of the table").make(&img)?;
    let mount = KernelMount::new(&img, "noinit_itable")?;
    let root = mount.path();
    let options = stress::Options { seed: 1, threads: 4, steps: 4000 };
    let expected = stress::run(options, || Box::new(KernelExecutor::new(root)))?;
    expected.verify(&Manifest::from_directory(root)?)?;
    mount.unmount()
}

#[test]
fn the_kernel_keeps_its_promises() -> Result<()> {
    let scratch = Scratch::new("promise")?;
    let img = scratch.join("kernel.img");
    features::by_name("default").expect("a set of the table").make(&img)?;
    for round in 0..5 {
        let mount = KernelMount::new(&img, "noinit_itable")?;
        let stop = AtomicBool::new(false);
        let name = format!("round-{round}");
        let ledgers = std::thread::scope(|scope| {
            let workers = scope.spawn(|| promise::run(mount.path(), &name, round, 3, &stop));
            std::thread::sleep(Duration::from_millis(150 + 100 * round));
            stop.store(true, Ordering::SeqCst);
            // At once, an fsync that the shutdown overtakes returns 0 now and then (Linux 6.18).
            let ledgers = workers.join().expect("the workload does not panic");
            image::shut_down(mount.path())?;
            ledgers
        })?;
        mount.unmount()?;
        let mount = KernelMount::new(&img, "noinit_itable")?;
        for ledger in &ledgers {
            ledger.verify(mount.path())?;
            println!("{} operations, {} fsyncs", ledger.operations, ledger.fsyncs);
        }
        mount.unmount()?;
        image::e2fsck_clean(&img)?;
    }
    Ok(())
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
