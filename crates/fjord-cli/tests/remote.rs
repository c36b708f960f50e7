//! Images on a Ceph cluster: commands, mounts, who may write, and plain ext4 inside.
//!
//! One cluster serves all of it, since that takes seconds to start: so one test, whose parts are named in what it
//! prints. The rest of what is known of clusters is `cargo xtask ceph campaign`.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord::ImageName;
use fjord_block::FileOptions;
use fjord_testkit::{
    ceph::{Cluster, ClusterOptions},
    cluster_faults::FAULTS,
    cuts::{CUTS, MEANWHILE, Site},
    failover,
    fjord_mount::{FjordMount, fjord, fjord_program, table_line},
    image, order_log, rng, size,
    tools::{self, Output},
};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn images_on_a_cluster() -> Result<()> {
    tools::require_root()?;
    let dir = tempfile::Builder::new().prefix("ceph").tempdir()?;
    let began = Instant::now();
    let cluster = Cluster::start(&dir.path().join("c"), &ClusterOptions::default())?;
    println!("cluster ready after {:?}", began.elapsed());
    type Part = fn(&Cluster, &Path) -> Result<()>;
    let parts: [(&str, Part); 10] = [
        ("a host without Ceph says what to install", no_library),
        ("bad names are refused by what is wrong", bad_names),
        ("commands work on an image that is not mounted", commands),
        ("a mount is plain ext4 to others", mounted),
        ("copies are as of one moment", copied),
        ("epochs are answered in order", ordered),
        ("one host at a time writes", one_writer),
        ("the image can be taken from a host that stands still", stolen),
        ("every promise is kept when a host takes over", failover),
        ("nothing is lost when the cluster fails", faults),
    ];
    for (name, part) in parts {
        let began = Instant::now();
        println!("{name} …");
        part(&cluster, dir.path())?;
        println!("{name}: {:?}", began.elapsed());
    }
    cluster.stop()?;
    ensure!(!dir.path().join("c").exists(), "the cluster left its folder");
    Ok(())
}

/// In runs of all rounds: a host of a cluster of its own is cut off for a short time in each way, and hosts of that
/// are killed and stopped. `cargo xtask ceph cuts` and `campaign` have more of both.
#[test]
fn hosts_on_a_network() -> Result<()> {
    let (cuts, rounds) = size::pick((0, 0), (0, 0), (2, 6));
    if cuts == 0 {
        return Ok(());
    }
    let seed = rng::seed_from_env("hosts", 1);
    // The thread leaves this machine's network.
    let run = move || -> Result<()> {
        let site = Site::new(1)?;
        for (seed, how) in (seed..seed + cuts).flat_map(|seed| CUTS.map(|how| (seed, how))) {
            for meanwhile in MEANWHILE {
                let done = site.cut(seed, how, Duration::from_secs(5), meanwhile)?;
                println!("seed {seed}: {how:?}, {meanwhile:?}: {done:?}");
            }
        }
        let options = failover::Options { rounds, seed, workers: 3, waits: 1 };
        let done = site.failovers(&options)?;
        println!("{done:?}");
        ensure!(done.waited == 1, "no host was killed: another seed");
        site.end()
    };
    std::thread::spawn(run).join().expect("the thread does not panic")
}

/// How long a mount may take to show in the table what has become of it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `fjord ARGS`, which must succeed.
fn ok(args: &[&str]) -> Result<Output> {
    fjord(args, &[])?.expect_code(&[0])
}

fn no_library(cluster: &Cluster, _dir: &Path) -> Result<()> {
    let library = fs::read_dir("/usr/lib")?
        .filter_map(|entry| Some(entry.ok()?.path().join("librbd.so.1")))
        .find(|path| path.exists())
        .context("librbd.so.1 is not below /usr/lib")?;
    let mut hidden = tools::command("unshare")?;
    hidden.args([
        "--mount",
        "sh",
        "-c",
        "mount --bind /dev/null \"$1\" && exec \"$2\" ls \"$3\"",
        "sh",
    ]);
    hidden.arg(library).arg(fjord_program()?).arg(cluster.url("any"));
    let told = tools::run(&mut hidden)?.expect_code(&[1])?;
    ensure!(told.stderr.contains("the package librbd1"), "{}", told.stderr);
    Ok(())
}

fn bad_names(cluster: &Cluster, dir: &Path) -> Result<()> {
    let conf = cluster.conf();
    let conf = conf.display();
    let no_key = dir.join("no-key.conf");
    let text = fs::read_to_string(cluster.conf())?;
    let without = text.lines().filter(|line| !line.starts_with("keyring"));
    fs::write(&no_key, without.map(|line| format!("{line}\n")).collect::<String>())?;
    let no_key = no_key.display();
    for (name, wanted) in [
        ("rbd:rbd".to_string(), "one or two slashes"),
        ("rbd:rbd/x?user=me".to_string(), "neither conf=FILE nor id=USER"),
        ("rbd:rbd/x?conf=/nowhere".to_string(), "there is no such file"),
        (format!("rbd:rbd/x?conf={no_key}"), "no keyring"),
        (format!("rbd:rbd/x?conf={conf}&id=nobody"), "the user (`?id=`)"),
        (format!("rbd:nopool/x?conf={conf}"), "the cluster has no such pool"),
        (format!("rbd:rbd/nothing?conf={conf}"), "no such image or snapshot"),
    ] {
        for command in ["ls", "recover"] {
            let told = fjord(&[command, &name], &[])?;
            ensure!(
                told.code == Some(1) || told.code == Some(2),
                "{command} {name}: {:?}",
                told.code
            );
            ensure!(told.stderr.contains(wanted), "{command} {name}: {}", told.stderr);
        }
    }
    Ok(())
}

fn commands(cluster: &Cluster, dir: &Path) -> Result<()> {
    let url = cluster.url("commands");
    ok(&["mkfs", "--quiet", "--size", "256M", &url])?;
    let again = fjord(&["mkfs", "--size", "256M", &url], &[])?;
    ensure!(again.stderr.contains("already contains an ext"), "{}", again.stderr);
    let source = dir.join("source");
    fs::write(&source, b"content")?;
    let source = source.to_str().expect("a plain path");
    ok(&["put", &url, source, "/file"])?;
    ensure!(ok(&["cat", &url, "/file"])?.stdout == "content");
    ensure!(ok(&["ls", &url])?.stdout.contains("file"));
    ensure!(ok(&["info", &url])?.stdout.contains("Needs recovery:           no"));
    cluster.tell("rbd", &["snap", "create", "rbd/commands@then"])?;
    ok(&["rm", &url, "/file"])?;
    long_output_reaches_a_pipe(&url, dir)?;
    ok(&["put", &url, source, "/other"])?;
    let snapshot = url.replacen("commands", "commands@then", 1);
    ensure!(ok(&["cat", &snapshot, "/file"])?.stdout == "content");
    let refused = fjord(&["rm", &snapshot, "/file"], &[])?;
    ensure!(refused.stderr.contains("a snapshot cannot be written"), "{}", refused.stderr);
    ok(&["resize", &url, "512M"])?;
    let size = cluster.tell("rbd", &["info", "rbd/commands", "--format", "json"])?;
    ensure!(size.contains(&format!("\"size\":{}", 512 << 20)), "{size}");
    checked_in_place(cluster, dir, &url)?;
    export_and_check(cluster, dir, "commands")
}

/// Standard output and error as one pipe, which librados makes nonblocking: of a file only what the pipe holds came out.
fn long_output_reaches_a_pipe(url: &str, dir: &Path) -> Result<()> {
    let long = dir.join("long");
    fs::write(&long, vec![b'x'; 1 << 20])?;
    ok(&["put", url, long.to_str().expect("a plain path"), "/long"])?;
    let mut cat = tools::command("sh")?;
    // It is not read before it is full.
    cat.args(["-c", "\"$1\" cat \"$2\" /long 2>&1 | (sleep 0.5; wc -c)", "sh"]);
    let told = tools::run(cat.arg(fjord_program()?).arg(url))?.expect_code(&[0])?;
    ensure!(told.stdout.trim() == "1048576", "{}", told.stdout);
    Ok(())
}

/// e2fsck sees the image as a file, and repairs it there.
fn checked_in_place(cluster: &Cluster, dir: &Path, url: &str) -> Result<()> {
    let clean = ok(&["fsck", "-fn", url])?;
    ensure!(clean.stdout.contains("/commands: "), "{}", clean.stdout);
    // Made wrong in a file, and imported.
    let path = dir.join("wrong.img");
    let file = path.to_str().expect("a plain path");
    cluster.tell("rbd", &["export", "--no-progress", "rbd/commands", file])?;
    let mut edit = tools::command("debugfs")?;
    edit.args(["-w", "-R", "set_inode_field /other links_count 7", file]);
    tools::run(&mut edit)?.expect_code(&[0])?;
    cluster.tell("rbd", &["import", "--no-progress", file, "rbd/wrong"])?;
    let url = &cluster.url("wrong");
    fjord(&["fsck", "-fn", url], &[])?.expect_code(&[4])?;
    fjord(&["fsck", "-fp", url], &[])?.expect_code(&[1])?;
    ok(&["fsck", "-fn", url])?;
    Ok(())
}

/// The order promise of the block layer, by the requests as the cluster answered them.
fn ordered(cluster: &Cluster, _dir: &Path) -> Result<()> {
    let url = cluster.url("ordered");
    cluster.tell("rbd", &["create", "--size", "64M", "rbd/ordered"])?;
    let seed = rng::seed_from_env("ordered", 1);
    for seed in seed..seed + size::pick(1, 3, 30) {
        let device = ImageName::parse(Path::new(&url)).open(&FileOptions::default(), false)?;
        println!("  seed {seed}: {:?}", order_log::check_device(device.clone(), seed)?);
        device.release();
    }
    Ok(())
}

/// Copies of a mounted image, of one that is not mounted, and of a snapshot.
fn copied(cluster: &Cluster, dir: &Path) -> Result<()> {
    let url = cluster.url("copied");
    ok(&["mkfs", "--quiet", "--size", "128M", &url])?;
    let mount = FjordMount::new(Path::new(&url), &["-o", "nofuseblk"])?;
    let content = vec![7; 3 << 20];
    fs::write(mount.path().join("file"), &content)?;
    let copy = |source: &str| -> Result<()> {
        let out = dir.join("copy.img");
        fjord(&["snapshot", "--force", source], &[&out])?.expect_code(&[0])?;
        image::e2fsck_clean(&out)?;
        let file = fjord(&["cat"], &[&out, Path::new("/file")])?.expect_code(&[0])?;
        ensure!(file.stdout.len() == content.len(), "{source}: {} bytes", file.stdout.len());
        Ok(())
    };
    copy(mount.path().to_str().expect("a plain path"))?;
    // As another host does, which has no lock.
    copy(&from_another_host(&url))?;
    // It is crash-consistent: its journal is dirty.
    cluster.tell("rbd", &["snap", "create", "rbd/copied@then"])?;
    mount.unmount()?;
    copy(&url)?;
    copy(&url.replacen("copied", "copied@then", 1))?;
    let left = cluster.tell("rbd", &["snap", "ls", "rbd/copied", "--format", "json"])?;
    ensure!(!left.contains("fjord-copy"), "{left}");
    Ok(())
}

/// Some rounds of what `cargo xtask ceph campaign` has hundreds of.
fn failover(cluster: &Cluster, _dir: &Path) -> Result<()> {
    let seed = rng::seed_from_env("failover", 1);
    let options = failover::Options { rounds: size::pick(2, 3, 12), seed, workers: 4, waits: 0 };
    println!("{:?}", failover::run(cluster, &options)?);
    Ok(())
}

/// The quick ones of what `cargo xtask ceph faults` has.
fn faults(cluster: &Cluster, _dir: &Path) -> Result<()> {
    let seed = rng::seed_from_env("faults", 1);
    for fault in FAULTS.iter().filter(|fault| fault.is_quick) {
        let began = Instant::now();
        // sync(2) of other tests on this machine would wait for a mount of type fuseblk.
        fault.run(cluster, seed, &["-o", "nofuseblk"])?;
        println!("  {}: {:?}", fault.name, began.elapsed());
    }
    Ok(())
}

/// Another name of the image: this host's mount table does not tell that it is mounted here.
fn from_another_host(url: &str) -> String {
    format!("{url}&id=admin")
}

/// The image is plain ext4 to e2fsck.
fn export_and_check(cluster: &Cluster, dir: &Path, name: &str) -> Result<()> {
    let file = dir.join(format!("{name}.img"));
    let path = file.to_str().expect("a plain path");
    cluster.tell("rbd", &["export", "--no-progress", &format!("rbd/{name}"), path])?;
    let checked = tools::run(tools::command("e2fsck")?.args(["-f", "-n"]).arg(&file))?;
    checked.expect_code(&[0])?;
    Ok(())
}

fn mounted(cluster: &Cluster, dir: &Path) -> Result<()> {
    // Made by mke2fs, filled by Linux.
    let file = dir.join("linux.img");
    File::create(&file)?.set_len(128 << 20)?;
    let made = tools::run(tools::command("mke2fs")?.args(["-q", "-t", "ext4"]).arg(&file))?;
    made.expect_code(&[0])?;
    {
        let linux = image::KernelMount::new(&file, "")?;
        fs::write(linux.path().join("from-linux"), b"hello")?;
        linux.unmount()?;
    }
    let path = file.to_str().expect("a plain path");
    cluster.tell("rbd", &["import", "--no-progress", path, "rbd/mounted"])?;
    let url = cluster.url("mounted");
    let mount = FjordMount::new(Path::new(&url), &[])?;
    ensure!(fs::read(mount.path().join("from-linux"))? == b"hello");
    for index in 0..50 {
        let mut file = File::create(mount.path().join(format!("file-{index}")))?;
        file.write_all(&vec![index; 5000])?;
        file.sync_all()?;
    }
    ok(&["umount", &url])?;
    drop(mount);
    export_and_check(cluster, dir, "mounted")?;
    let linux = image::KernelMount::new(&dir.join("mounted.img"), "")?;
    for index in 0..50 {
        let found = fs::read(linux.path().join(format!("file-{index}")))?;
        ensure!(found == vec![index; 5000], "file-{index}");
    }
    linux.unmount()
}

fn one_writer(cluster: &Cluster, _dir: &Path) -> Result<()> {
    let url = cluster.url("one");
    ok(&["mkfs", "--quiet", "--size", "128M", &url])?;
    let mut first = FjordMount::new(Path::new(&url), &[])?;
    let began = Instant::now();
    let refused = fjord(&["put", &url, "/etc/hostname", "/x"], &[])?;
    ensure!(refused.stderr.contains("is mounted by fjord on"), "{}", refused.stderr);
    let refused = fjord(&["recover", &from_another_host(&url)], &[])?;
    ensure!(refused.stderr.contains("is in use by the client"), "{}", refused.stderr);
    ensure!(began.elapsed() < Duration::from_secs(10), "refused after {:?}", began.elapsed());
    // Who only looks needs no lock.
    ok(&["info", &from_another_host(&url)])?;
    let mut file = File::create(first.path().join("promised"))?;
    file.write_all(b"kept")?;
    file.sync_all()?;
    drop(file);
    first.kill()?;
    first.detach();
    let second = FjordMount::new(Path::new(&from_another_host(&url)), &["--steal"])?;
    ensure!(fs::read(second.path().join("promised"))? == b"kept");
    second.unmount()
}

fn stolen(cluster: &Cluster, dir: &Path) -> Result<()> {
    let url = cluster.url("stolen");
    ok(&["mkfs", "--quiet", "--size", "128M", &url])?;
    let mut first = FjordMount::new(Path::new(&url), &[])?;
    let mut file = File::create(first.path().join("file"))?;
    file.write_all(b"promised")?;
    file.sync_all()?;
    first.fsync_new_file("clean")?;
    let pid = Pid::from_raw(first.pid() as i32).expect("a process");
    kill_process(pid, Signal::STOP)?;
    let second = FjordMount::new(Path::new(&from_another_host(&url)), &["--steal"])?;
    kill_process(pid, Signal::CONT)?;
    file.write_all(b" and more")?;
    let error = file.sync_all().expect_err("the fsync of a host that lost its lock");
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    // Also where there is nothing to write.
    let clean = File::open(first.path().join("clean"))?;
    let error = clean.sync_all().expect_err("the fsync of a clean file there");
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    let error = File::create(first.path().join("new")).expect_err("a new file there");
    ensure!(error.raw_os_error() == Some(libc::EROFS), "{error}");
    drop(file);
    // The mount table tells it once no file is open for writing; syncfs(2) still says that not all is durable.
    let began = Instant::now();
    while !table_line(first.path())?.split([' ', ',']).any(|word| word == "ro") {
        ensure!(began.elapsed() < PATIENCE, "the mount table does not show ro");
        std::thread::sleep(Duration::from_millis(10));
    }
    let synced = rustix::fs::syncfs(File::open(first.path())?);
    ensure!(synced == Err(rustix::io::Errno::IO), "syncfs there: {synced:?}");
    ensure!(fs::read(second.path().join("file"))? == b"promised");
    first.kill()?;
    first.detach();
    second.unmount()?;
    export_and_check(cluster, dir, "stolen")?;
    ensure!(ok(&["cat", &url, "/file"])?.stdout == "promised");
    Ok(())
}
