//! `fjord sim` as people use it: fjord and the kernel's ext4 on the modelled device, power cuts, and
//! what is left. Needs root.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    fjord_mount::{FjordMount, is_mounted},
    image::{self, KernelMount, Scratch},
    programs, rng,
    tools::{self, Output},
};
use rustix::ioctl::{NoArg, Opcode, ioctl, opcode};

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn fjord(args: &[&str], paths: &[&Path]) -> Result<Output> {
    tools::run(Command::new(program()).args(args).args(paths).stdin(Stdio::null()))
}

/// A modelled device that is taken down when dropped.
struct Sim {
    dir: PathBuf,
}

impl Sim {
    fn new(dir: PathBuf, args: &[&str]) -> Result<Sim> {
        fs::create_dir_all(&dir)?;
        let all: Vec<&str> = ["sim", "--daemon"].into_iter().chain(args.iter().copied()).collect();
        fjord(&all, &[&dir])?.ok()?;
        Ok(Sim { dir })
    }

    fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    fn cut(&self, out: &Path, seed: u64) -> Result<()> {
        let seed = seed.to_string();
        fjord(&["sim", "--seed", &seed, "--out"], &[out, Path::new("--cut"), &self.dir])?.ok()?;
        Ok(())
    }

    fn stats(&self) -> Result<serde_json::Value> {
        let out = fjord(&["sim", "--json", "--stats"], &[&self.dir])?.ok()?;
        Ok(serde_json::from_str(&out.stdout)?)
    }

    fn unmount(self) -> Result<()> {
        fjord(&["umount"], &[&self.dir])?.ok()?;
        ensure!(!is_mounted(&self.dir)?);
        Ok(())
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        if is_mounted(&self.dir).unwrap_or(false) {
            let _ =
                tools::command("umount").and_then(|mut c| tools::run(c.arg("-l").arg(&self.dir)));
        }
    }
}

fn contents(index: u64) -> Vec<u8> {
    index.to_le_bytes().repeat(700)
}

/// Writes files, fsyncs the even ones, and gives the names of those. The odd ones may be lost.
fn write_files(dir: &Path, count: u64) -> Result<Vec<(String, u64)>> {
    let mut promised = Vec::new();
    for index in 0..count {
        let name = format!("file{index}");
        let mut file = File::create(dir.join(&name))?;
        file.write_all(&contents(index))?;
        if index % 2 == 0 {
            file.sync_all()?;
            promised.push((name, index));
        }
    }
    Ok(promised)
}

#[test]
fn what_fjord_promised_is_there_after_a_power_cut() -> Result<()> {
    for (profile, count) in [("ufs", 40), ("plain-ssd", 20), ("supercap-ssd", 40), ("nvme", 40)] {
        let scratch = Scratch::new("sim-fjord")?;
        let sim = Sim::new(scratch.join("sim"), &["--size", "64M", "--profile", profile])?;
        fjord(&["mkfs"], &[&sim.disk()])?.ok()?;
        let mount = FjordMount::with_program(program(), &sim.disk(), &[])?;
        let promised = write_files(mount.path(), count)?;
        let images: Vec<PathBuf> = (0..4).map(|i| scratch.join(&format!("image{i}"))).collect();
        for (seed, path) in images.iter().enumerate() {
            sim.cut(path, seed as u64)?;
        }
        ensure!(File::create(mount.path().join("late")).and_then(|f| f.sync_all()).is_err());
        // The daemon reports that it could not close the image, and is to go all the same.
        drop(mount);
        for img in &images {
            fjord(&["recover"], &[img])?.ok().context(profile)?;
            image::e2fsck_clean(img).context(profile)?;
            for (name, index) in &promised {
                let out = scratch.join("out");
                fjord(&["get"], &[img, Path::new(name), &out])?.ok().context(profile)?;
                ensure!(fs::read(&out)? == contents(*index), "{profile}: {name}");
                fs::remove_file(&out)?;
            }
        }
        ensure!(sim.stats()?["powered"] == false);
        sim.unmount()?;
    }
    Ok(())
}

/// `FJORD_IOC_FDATABARRIER` of `fjord.h`.
const FDATABARRIER: Opcode = opcode::none(b'J', 5);
/// What a device writes as a whole.
const SECTOR_BYTES: usize = 512;
const VALUES: u8 = 60;
/// An fsync comes after this value.
const SYNCED: u8 = 20;

/// Writes ascending values to two files in turn, each behind a barrier of the one before.
fn write_in_order(dir: &Path) -> Result<()> {
    let files = ["even", "odd"].map(|name| File::options().write(true).open(dir.join(name)));
    let [even, odd] = files;
    let files = [even?, odd?];
    for value in 1..=VALUES {
        let file = &files[usize::from(value % 2)];
        file.write_all_at(&[value; SECTOR_BYTES], 0)?;
        // SAFETY: the number names an ioctl without an argument.
        unsafe { ioctl(file, NoArg::<FDATABARRIER>::new()) }?;
        if value == SYNCED {
            files[0].sync_all()?;
        }
    }
    Ok(())
}

#[test]
fn what_a_program_has_put_in_order_is_so_after_a_power_cut() -> Result<()> {
    for options in ["fsync=ijournal,commit=600", "fsync=compound,scheduler=epoch,commit=600"] {
        for profile in ["ufs", "plain-ssd", "supercap-ssd"] {
            let scratch = Scratch::new("sim-order")?;
            let sim = Sim::new(scratch.join("sim"), &["--size", "64M", "--profile", profile])?;
            fjord(&["mkfs"], &[&sim.disk()])?.ok()?;
            let mount = FjordMount::with_program(program(), &sim.disk(), &["-o", options])?;
            for name in ["even", "odd"] {
                fs::write(mount.path().join(name), [0; SECTOR_BYTES])?;
                File::open(mount.path().join(name))?.sync_all()?;
            }
            write_in_order(mount.path())?;
            let images: Vec<PathBuf> = (0..6).map(|i| scratch.join(&format!("image{i}"))).collect();
            for (seed, path) in images.iter().enumerate() {
                sim.cut(path, seed as u64)?;
            }
            drop(mount);
            let found = images.iter().map(|img| values_in(img, &scratch.join("out")));
            for values in found.collect::<Result<Vec<_>>>().context(profile)? {
                let [even, odd] = values;
                let last = even.max(odd);
                println!("{options}, {profile}: up to {last} of {VALUES}");
                ensure!(last >= SYNCED, "{options}, {profile}: {values:?} after an fsync");
                let before = even.min(odd);
                ensure!(before + 1 == last, "{options}, {profile}: {last} without what is before");
            }
            sim.unmount()?;
        }
    }
    Ok(())
}

/// The values of both files in a recovered image; each file has one.
fn values_in(img: &Path, out: &Path) -> Result<[u8; 2]> {
    fjord(&["recover"], &[img])?.ok()?;
    image::e2fsck_clean(img)?;
    let value = |name: &str| {
        fjord(&["get"], &[img, Path::new(name), out])?.ok()?;
        let content = fs::read(out)?;
        fs::remove_file(out)?;
        ensure!(
            content.len() == SECTOR_BYTES && content.iter().all(|byte| *byte == content[0]),
            "{name}"
        );
        Ok(content[0])
    };
    Ok([value("even")?, value("odd")?])
}

/// LMDB, RocksDB and SQLite sync nothing; their files are as they were at one moment all the same.
#[test]
fn what_syncs_nothing_is_whole_after_a_power_cut() -> Result<()> {
    let seed = rng::seed_from_env("unsynced programs cut", 1);
    for (profile, seed) in [("ufs", seed), ("plain-ssd", seed + 1), ("supercap-ssd", seed + 2)] {
        let scratch = Scratch::new("sim-unsynced")?;
        let sim = Sim::new(scratch.join("sim"), &["--size", "128M", "--profile", profile])?;
        fjord(&["mkfs"], &[&sim.disk()])?.ok()?;
        let options = "data=journal,commit=1";
        let mount = FjordMount::with_program(program(), &sim.disk(), &["-o", options])?;
        let mut jobs = programs::unsynced_jobs(seed);
        let images: Vec<PathBuf> = (0..4).map(|i| scratch.join(&format!("image{i}"))).collect();
        let root = mount.path().to_owned();
        programs::run_until_cut(&mut jobs, &root, Duration::from_millis(1500), || {
            images.iter().zip(seed..).try_for_each(|(img, seed)| sim.cut(img, seed))
        })?;
        drop(mount);
        for img in &images {
            fjord(&["recover"], &[img])?.ok().context(profile)?;
            image::e2fsck_clean(img).context(profile)?;
            let linux = KernelMount::new(img, "rw,noinit_itable")?;
            let found = programs::verify_all(&jobs, linux.path());
            linux.unmount()?;
            found.with_context(|| format!("{profile}, FJORD_SEED={seed}, {}", img.display()))?;
        }
        sim.unmount()?;
    }
    Ok(())
}

/// The kernel's ext4 on a loop device over the same file, direct I/O down to the model.
#[test]
fn what_linux_promised_is_there_after_a_power_cut() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::new("sim-linux")?;
    let sim = Sim::new(scratch.join("sim"), &["--size", "64M", "--profile", "plain-ssd"])?;
    tools::run(tools::command("mke2fs")?.args(["-Fqt", "ext4"]).arg(sim.disk()))?.ok()?;
    let losetup = ["--direct-io=on", "--find", "--show"];
    let device = tools::run(tools::command("losetup")?.args(losetup).arg(sim.disk()))?.ok()?;
    let device = PathBuf::from(device.stdout.trim());
    let before = sim.stats()?;
    let result = linux_until_the_cut(&sim, &device, &scratch.join("image"));
    tools::run(tools::command("losetup")?.arg("-d").arg(&device))?.ok()?;
    let promised = result?;
    let after = sim.stats()?;
    let grew = |name: &str| after[name].as_u64() > before[name].as_u64();
    ensure!(grew("write_count") && grew("flush_count"), "{before} {after}");
    // Linux recovers its own.
    let mount = KernelMount::new(&scratch.join("image"), "")?;
    for (name, index) in &promised {
        ensure!(fs::read(mount.path().join(name))? == contents(*index), "{name}");
    }
    mount.unmount()?;
    image::e2fsck_clean(&scratch.join("image"))?;
    sim.unmount()
}

fn linux_until_the_cut(sim: &Sim, device: &Path, img: &Path) -> Result<Vec<(String, u64)>> {
    let name = device.file_name().context("a device")?.to_string_lossy().into_owned();
    let dio = fs::read_to_string(format!("/sys/block/{name}/loop/dio"))?;
    ensure!(dio.trim() == "1", "the loop device goes through the page cache");
    let dir = tempfile::tempdir()?;
    tools::run(tools::command("mount")?.args(["-t", "ext4"]).arg(device).arg(dir.path()))?.ok()?;
    let promised = write_files(dir.path(), 20);
    let cut = sim.cut(img, 5);
    // With the device gone it cannot be clean.
    let unmounted = image::unmount(dir.path());
    cut?;
    unmounted?;
    promised
}

#[test]
fn time_and_flushes_are_the_models() -> Result<()> {
    let scratch = Scratch::new("sim-time")?;
    let sim = Sim::new(scratch.join("sim"), &["--size", "16M", "--profile", "plain-ssd"])?;
    let disk = File::options().read(true).write(true).open(sim.disk())?;
    let started = Instant::now();
    for index in 0..50_u64 {
        disk.write_all_at(&contents(index)[..4096], index * 4096)?;
        disk.sync_data()?;
    }
    // 2.3 ms each; a real time that is longer is the machine's.
    ensure!(started.elapsed() >= Duration::from_millis(110), "{:?}", started.elapsed());
    let mut back = vec![0; 4096];
    disk.read_exact_at(&mut back, 7 * 4096)?;
    ensure!(back == contents(7)[..4096]);
    let stats = sim.stats()?;
    ensure!(stats["write_count"] == 50 && stats["flush_count"] == 50, "{stats}");
    ensure!(disk.write_at(b"x", 16 << 20).is_err() && disk.set_len(1).is_err());
    let table = fjord(&["sim", "--stats"], &[&sim.dir])?.ok()?.stdout;
    ensure!(table.contains("plain-ssd") && table.contains("50 (200.0 KiB)"), "{table}");
    drop(disk);
    sim.unmount()
}

#[test]
fn an_image_is_kept_unless_the_power_was_cut() -> Result<()> {
    let scratch = Scratch::new("sim-image")?;
    let img = scratch.join("image");
    let name = img.to_str().context("a plain name")?;
    let args = ["--image", name, "--profile", "supercap-ssd"];
    let sim =
        Sim::new(scratch.join("sim"), &["--size", "32M", args[0], args[1], args[2], args[3]])?;
    fjord(&["mkfs"], &[&sim.disk()])?.ok()?;
    let in_use = fjord(&["sim", "--profile", "ufs", "--image", name], &[scratch.path()])?;
    ensure!(in_use.code == Some(3), "{in_use:?}");
    sim.unmount()?;
    image::e2fsck_clean(&img)?;
    let before = fs::read(&img)?;
    let sim = Sim::new(scratch.join("sim"), &args)?;
    fjord(&["put"], &[&sim.disk(), &PathBuf::from("/etc/hostname"), Path::new("kept")])?.ok()?;
    sim.cut(&scratch.join("after"), 1)?;
    sim.unmount()?;
    ensure!(fs::read(&img)? == before, "the image changed though the power was cut");
    ensure!(fs::read(scratch.join("after"))? != before);
    Ok(())
}

/// A file system of 1 MiB, unmounted when dropped.
struct Small(PathBuf);

impl Small {
    fn new(dir: PathBuf) -> Result<Small> {
        fs::create_dir(&dir)?;
        let mut mount = tools::command("mount")?;
        tools::run(mount.args(["-t", "tmpfs", "-o", "size=1M", "none"]).arg(&dir))?.ok()?;
        Ok(Small(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = tools::command("umount").and_then(|mut c| tools::run(c.arg("-l").arg(&self.0)));
    }
}

#[test]
fn what_cannot_be_written_back_is_told() -> Result<()> {
    let scratch = Scratch::new("sim-full")?;
    let small = Small::new(scratch.join("small"))?;
    let img = small.0.join("image");
    File::create(&img)?.set_len(32 << 20)?;
    let name = img.to_str().context("a plain name")?;
    let args = ["--image", name, "--profile", "supercap-ssd"];
    let sim = Sim::new(scratch.join("sim"), &args)?;
    File::options().write(true).open(sim.disk())?.write_all_at(&[7; 4 << 20], 0)?;
    let dir = sim.dir.clone();
    let out = fjord(&["umount"], &[&dir])?;
    ensure!(out.code == Some(1) && out.stderr.contains("could not be written"), "{out:?}");
    ensure!(!is_mounted(&dir)?);
    ensure!(fs::read(&img)?.iter().all(|byte| *byte == 0), "the old contents are gone");
    ensure!(fs::read_dir(&small.0)?.count() == 1, "a part of the new image is left");

    let sim = Sim::new(scratch.join("sim"), &args)?;
    File::options().write(true).open(sim.disk())?.write_all_at(&[7; 4 << 20], 0)?;
    File::open(sim.disk())?.sync_all()?;
    let part = small.0.join("part");
    let out = fjord(&["sim", "--out"], &[&part, Path::new("--cut"), &sim.dir])?;
    ensure!(out.code == Some(1) && out.stderr.contains("part"), "{out:?}");
    ensure!(!part.exists(), "a part of the image is left");
    // The moment is not lost.
    sim.cut(&scratch.join("whole"), 1)?;
    ensure!(fs::read(scratch.join("whole"))?[..4 << 20] == [7; 4 << 20]);
    sim.unmount()
}

#[test]
fn bad_use_is_named() -> Result<()> {
    let scratch = Scratch::new("sim-bad")?;
    let dir = scratch.path();
    let absent = dir.join("absent");
    for (args, path, code, words) in [
        (&["sim"][..], dir, 2, "--profile"),
        (&["sim", "--profile", "floppy"], dir, 2, "supercap-ssd"),
        (&["sim", "--profile", "ufs", "--size", "1000"], dir, 2, "multiple of 4K"),
        (&["sim", "--profile", "ufs"], &absent, 1, "mkdir"),
        (&["sim", "--cut"], dir, 2, "--out"),
        (&["sim", "--profile", "ufs", "--cut"], dir, 2, "cannot be used with"),
        (&["sim", "--stats"], dir, 1, "nothing is mounted"),
        (&["sim", "--stats"], Path::new("/proc"), 1, "another mount"),
        (&["sim", "--out", "/dev/null", "--cut"], dir, 1, "nothing is mounted"),
    ] {
        let out = fjord(args, &[path])?;
        ensure!(out.code == Some(code), "{args:?} ended with {:?}: {}", out.code, out.stderr);
        ensure!(out.stderr.contains(words), "{args:?}: {}", out.stderr);
        ensure!(!out.stderr.contains("panicked"), "{}", out.stderr);
    }
    let sim = Sim::new(scratch.join("sim"), &["--size", "16M", "--profile", "nvme"])?;
    let twice = fjord(&["sim", "--profile", "nvme"], &[&sim.dir])?;
    ensure!(twice.code == Some(3), "{twice:?}");
    // Child and parent have one message between them.
    let twice = fjord(&["sim", "--daemon", "--profile", "nvme"], &[&sim.dir])?;
    ensure!(twice.code == Some(3) && twice.stderr.matches("fjord: ").count() == 1, "{twice:?}");
    // A path that cannot be written is told before the power goes.
    for path in ["/absent/x", "/dev/full", "/dev"] {
        let out = fjord(&["sim", "--out", path, "--cut"], &[&sim.dir])?;
        ensure!(out.code == Some(1) && out.stderr.contains(path), "{out:?}");
        ensure!(sim.stats()?["powered"] == true, "{path} cost the power");
    }
    ensure!(fs::write(sim.dir.join("control"), "explode").is_err());
    ensure!(fs::read(sim.dir.join("image")).is_err(), "an image before the cut");
    ensure!(fs::write(sim.dir.join("new"), "x").is_err() && fs::remove_file(sim.disk()).is_err());
    ensure!(fs::read_dir(&sim.dir)?.count() == 5);
    sim.unmount()
}

/// Queue depth over time, transfers and persist order, as they happened.
#[test]
fn the_trace_tells_what_happened() -> Result<()> {
    let scratch = Scratch::new("sim-trace")?;
    let sim = Sim::new(scratch.join("dev"), &["--profile", "ufs", "--size", "16M"])?;
    let trace = sim.dir.join("trace");
    ensure!(fs::read(&trace).is_err_and(|e| e.raw_os_error() == Some(libc::ENODATA)));
    fs::write(sim.dir.join("control"), "trace")?;
    let disk = File::options().write(true).open(sim.disk())?;
    for index in [3_u64, 1, 2] {
        disk.write_all_at(&[index as u8; 4096], index * 4096)?;
    }
    disk.sync_all()?;
    let text = fs::read_to_string(&trace)?;
    let events: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
    let kind = |wanted: &'static str| events.iter().filter(move |event| event[0] == wanted);
    ensure!(kind("transfer").count() == 3, "{text}");
    let persists: Vec<u64> = kind("persist").map(|e| e[4].parse()).collect::<Result<_, _>>()?;
    ensure!(persists == [3 * 4096, 4096, 2 * 4096], "one after the other: {text}");
    ensure!(kind("queue").any(|e| e[2] == "1") && kind("queue").any(|e| e[2] == "0"), "{text}");
    let times: Vec<u64> = events.iter().map(|e| e[1].parse()).collect::<Result<_, _>>()?;
    ensure!(times.is_sorted(), "{text}");
    ensure!(!fs::read_to_string(&trace)?.contains("persist"), "it was taken away");
    drop(disk);
    sim.unmount()
}
