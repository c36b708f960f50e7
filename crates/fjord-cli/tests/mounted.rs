//! The fjord program mounted, under models and ordinary programs.
//!
//! One test at a time holds the machine: they measure nothing, but with two cores two daemons under
//! load only slow each other down and blur which one failed.

use std::{fs, path::Path, sync::Mutex};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features::{self, FeatureSet},
    fjord_mount::FjordMount,
    fsx::{self, KernelFile},
    image::{self, KernelMount, Scratch},
    io_uring,
    manifest::{Compare, Manifest},
    rng,
    script::{Executor, KernelExecutor, Op, Script},
    size::pick,
    stress,
    tools::{self, run},
    workloads,
};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn set(name: &str) -> &'static FeatureSet {
    features::by_name(name).expect("a set of the table")
}

fn mount(image: &Path, args: &[&str]) -> Result<FjordMount> {
    FjordMount::with_program(Path::new(env!("CARGO_BIN_EXE_fjord")), image, args)
}

/// Runs a test on a mount of a new default image, checks the image after it; gives the test the
/// scratch directory too.
fn mounted(args: &[&str], test: impl FnOnce(&Path, &Scratch) -> Result<()>) -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let scratch = Scratch::new("mounted")?;
    let img = scratch.join("image");
    set("default").make(&img)?;
    let mount = mount(&img, args)?;
    test(mount.path(), &scratch)?;
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn fsx_finds_nothing() -> Result<()> {
    let first = rng::seed_from_env("mounted fsx", 1);
    mounted(&[], |dir, _| {
        (first..first + pick(1, 1, 3)).try_for_each(|seed| {
            let mut file = KernelFile::create(&dir.join(format!("file-{seed}")))?;
            let options = fsx::Options::new(seed, pick(10_000, 50_000, 100_000));
            let counts = fsx::check(&mut file, options)?;
            println!("seed {seed}: {counts:?}");
            Ok(())
        })
    })
}

#[test]
fn stress_from_many_threads() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let scratch = Scratch::new("mounted")?;
    let img = scratch.join("image");
    set("default").make(&img)?;
    let mount = mount(&img, &[])?;
    let seed = rng::seed_from_env("mounted stress", 1);
    let root = mount.path().to_owned();
    let options = stress::Options { seed, threads: 8, steps: pick(300, 1500, 3000) };
    let expected = stress::run(options, || Box::new(KernelExecutor::new(&root)))?;
    expected.verify(&Manifest::from_directory(&root)?).context("through the mount")?;
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    let mount = KernelMount::new(&img, "ro")?;
    expected.verify(&Manifest::from_directory(mount.path())?).context("seen by Linux")?;
    mount.unmount()
}

/// The script without what FUSE does not pass on.
fn script_for_fuse() -> Script {
    const SHIFTS: u32 = (libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) as u32;
    let mut script = Script::varied(rng::seed_from_env("mounted script", 1));
    script.ops.retain(|op| !matches!(op, Op::Fallocate { mode, .. } if mode & SHIFTS != 0));
    script
}

#[test]
fn the_script_gives_what_linux_gives() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let script = script_for_fuse();
    let scratch = Scratch::in_memory("mounted")?;
    let (ours, theirs) = (scratch.join("fjord.img"), scratch.join("linux.img"));
    set("default").make(&ours)?;
    set("default").make(&theirs)?;
    let fuse = mount(&ours, &[])?;
    let found = KernelExecutor::new(fuse.path()).run(&script);
    fuse.unmount()?;
    image::e2fsck_clean(&ours)?;
    let linux = KernelMount::new(&theirs, "noinit_itable")?;
    let expected = KernelExecutor::new(linux.path()).run(&script);
    linux.unmount()?;
    let differ = script.compare_outcomes(&expected, &found);
    ensure!(differ.is_empty(), "outcomes of Linux and fjord differ:\n{}", differ.join("\n"));
    let tree = |img: &Path| -> Result<Manifest> {
        let mount = KernelMount::new(img, "ro")?;
        let tree = Manifest::from_directory(mount.path())?.without_lost_found();
        mount.unmount()?;
        Ok(tree)
    };
    tree(&theirs)?.diff(&tree(&ours)?, &Compare::SAME_SCRIPT).ok("run on Linux", "run on fjord")
}

#[test]
fn fio_verifies() -> Result<()> {
    mounted(&[], |dir, _| workloads::fio(dir, 24))
}

#[test]
fn sqlite_keeps_its_databases() -> Result<()> {
    mounted(&[], |dir, _| workloads::sqlite_databases(dir))
}

#[test]
fn git_clones_and_checks() -> Result<()> {
    mounted(&[], |dir, _| workloads::git(dir))
}

#[test]
fn tar_unpacks_a_real_tree() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let scratch = Scratch::new("mounted")?;
    let (img, archive) = (scratch.join("image"), scratch.join("tree.tar"));
    set("default").make(&img)?;
    let first = mount(&img, &[])?;
    workloads::tar_tree(first.path(), &archive)?;
    first.unmount()?;
    let again = mount(&img, &[])?;
    workloads::tar_compare(again.path(), &archive).context("after a remount")?;
    again.unmount()?;
    image::e2fsck_clean(&img)?;
    let linux = KernelMount::new(&img, "ro")?;
    workloads::tar_compare(linux.path(), &archive).context("seen by Linux")?;
    linux.unmount()
}

#[test]
fn a_large_directory() -> Result<()> {
    let count = pick(5_000, 50_000, 200_000);
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let scratch = Scratch::new("mounted")?;
    let img = scratch.join("image");
    image::make_sparse(&img, 1 << 30)?;
    run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4", "-N", "250000"]).arg(&img))?
        .ok()?;
    let fuse = mount(&img, &[])?;
    workloads::large_directory(fuse.path(), count)?;
    fuse.unmount()?;
    image::e2fsck_clean(&img)?;
    let linux = KernelMount::new(&img, "ro")?;
    workloads::large_directory_check(linux.path(), count).context("seen by Linux")?;
    linux.unmount()
}

#[test]
fn attribute_programs_work() -> Result<()> {
    mounted(&[], |dir, _| {
        let file = dir.join("file");
        std::fs::write(&file, "content")?;
        let tool = |program: &str, args: &[&str]| -> Result<String> {
            Ok(run(tools::command(program)?.args(args).arg(&file))?.ok()?.stdout)
        };
        tool("setfacl", &["-m", "u:1234:rw,g:77:r"])?;
        let acl = tool("getfacl", &["-p", "-n"])?;
        ensure!(acl.contains("user:1234:rw-") && acl.contains("group:77:r--"), "getfacl: {acl}");
        tool("setfattr", &["-n", "user.color", "-v", "green"])?;
        let value = tool("getfattr", &["--absolute-names", "--only-values", "-n", "user.color"])?;
        ensure!(value == "green", "getfattr: {value}");
        tool("chattr", &["+i"])?;
        ensure!(std::fs::write(&file, "other").is_err(), "an immutable file was written");
        tool("chattr", &["-i"])?;
        Ok(())
    })
}

/// The server's rings of io_uring.
fn ring_count(server: &FjordMount) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(format!("/proc/{}/fd", server.pid()))? {
        let target = fs::read_link(entry?.path());
        count += usize::from(target.is_ok_and(|to| to.as_os_str() == "anon_inode:[io_uring]"));
    }
    Ok(count)
}

/// Eight callers ask for names that are not there.
fn crowd(dir: &Path) {
    std::thread::scope(|scope| {
        for caller in 0..8 {
            let ask = move || (0..2000).all(|n| !dir.join(format!("{caller}-{n}")).exists());
            scope.spawn(ask);
        }
    });
}

/// Until then requests come over /dev/fuse; with `noio_uring` always.
#[test]
fn many_callers_are_served_over_io_uring() -> Result<()> {
    if !io_uring::is_offered()? {
        return Ok(());
    }
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let scratch = Scratch::in_memory("rings")?;
    let img = scratch.join("image");
    set("default").make(&img)?;
    let never = mount(&img, &["-o", "noio_uring"])?;
    let without = ring_count(&never)?;
    for round in 0..3 {
        // What was not there once is remembered.
        let dir = never.path().join(format!("never-{round}"));
        fs::create_dir(&dir)?;
        crowd(&dir);
    }
    ensure!(ring_count(&never)? == without);
    never.unmount()?;
    let mount = mount(&img, &[])?;
    let mut round = 0;
    while ring_count(&mount)? == without {
        ensure!(round < 100, "requests still come over /dev/fuse");
        let dir = mount.path().join(format!("round-{round}"));
        fs::create_dir(&dir)?;
        crowd(&dir);
        round += 1;
    }
    let data = rng::pattern_vec(1, 0, 3 << 20);
    fs::write(mount.path().join("after"), &data)?;
    ensure!(fs::read(mount.path().join("after"))? == data);
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}
