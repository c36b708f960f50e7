//! Images that are a part of a disk image: tables as libblkid reads them, and every command on a partition. Needs root.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use fjord::{Error, Fs, MountOptions};
use fjord_format::{FormatError, disk::Table};
use fjord_testkit::{
    fjord_mount::is_mounted,
    image::{self, Scratch},
    rng::{Rng, pattern_vec, seed_from_env},
    tools::{self, Output},
};

/// Size of the disks.
const DISK_BYTES: u64 = 96 << 20;
/// Where the partition with the image lies.
const PART: Range<u64> = 16 << 20..80 << 20;

fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fjord"))
}

/// A disk with this partition table, in the words of sfdisk(8).
fn disk(path: &Path, script: &str) -> Result<()> {
    image::make_sparse(path, DISK_BYTES)?;
    let mut child = tools::command("sfdisk")?
        .arg("--quiet")
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    child.stdin.take().context("a pipe")?.write_all(script.as_bytes())?;
    ensure!(child.wait()?.success(), "sfdisk: {script}");
    Ok(())
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path, args: &[&str]) -> Result<Loop> {
        tools::require_root()?;
        let out = run(tools::command("losetup")?.args(["--find", "--show"]).args(args).arg(file))?;
        Ok(Loop(out.stdout.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = tools::command("losetup").and_then(|mut c| tools::run(c.arg("-d").arg(&self.0)));
    }
}

/// The partitions by number, in bytes, as libblkid reads them.
fn by_partx(path: &Path) -> Result<BTreeMap<u32, Range<u64>>> {
    let columns = ["--raw", "--noheadings", "--output", "NR,START,SECTORS"];
    let said = tools::run(tools::command("partx")?.args(columns).arg(path))?;
    let mut found = BTreeMap::new();
    for line in said.stdout.lines() {
        let numbers: Vec<u64> =
            line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [number, start, count] = numbers[..] else { bail!("partx: {line}") };
        found.insert(u32::try_from(number)?, start * 512..(start + count) * 512);
    }
    Ok(found)
}

fn read_table(path: &Path) -> Result<Option<Table>, Error> {
    let file = File::open(path).expect("the disk opens");
    let size_bytes = file.metadata().expect("its size").len();
    let mut read = |offset: u64, bytes: &mut [u8]| {
        assert!(offset + bytes.len() as u64 <= size_bytes, "a read beyond the end");
        file.read_exact_at(bytes, offset).expect("readable");
        Ok::<(), Error>(())
    };
    Table::read(size_bytes, &mut read)
}

/// The partitions by number, without the extended one.
fn fjords(path: &Path) -> Result<BTreeMap<u32, Range<u64>>> {
    let table = read_table(path)?;
    let partitions = table.map(|table| table.partitions).unwrap_or_default();
    Ok(partitions.into_iter().map(|found| (found.number, found.range)).collect())
}

const GPT: &str = "label: gpt\nstart=2048, size=8192, name=boot\nstart=32768, size=131072, name=root\n\
                   start=180224, size=4096\n";
const LOGICAL: &str = "label: dos\nstart=2048, size=8192, type=83\nstart=16384, size=163840, type=5\n\
                       start=32768, size=8192, type=83\nstart=49152, size=16384, type=82\n\
                       start=81920, size=4096, type=83, bootable\n";

#[test]
fn tables_are_read_as_by_others() -> Result<()> {
    let scratch = Scratch::new("tables")?;
    let path = scratch.join("disk");
    let scripts = [
        GPT,
        LOGICAL,
        "label: dos\nstart=2048, size=8192\nstart=32768, size=8192\n",
        "label: dos\nstart=63, size=8000, type=c\n",
        "label: gpt\ntable-length: 4\n3: start=2048, size=100\n",
        "label: gpt\n",
        "label: dos\n",
    ];
    for script in scripts {
        disk(&path, script)?;
        let mut others = by_partx(&path)?;
        // The extended partition itself.
        if script == LOGICAL {
            ensure!(others.remove(&2).is_some(), "{others:?}");
        }
        ensure!(fjords(&path)? == others, "{script}: {:?}, {others:?}", fjords(&path)?);
        ensure!(others.is_empty() != script.contains("size="), "{script}: {others:?}");
    }
    Ok(())
}

#[test]
fn a_damaged_gpt_is_read_from_its_backup() -> Result<()> {
    let scratch = Scratch::new("backup")?;
    let path = scratch.join("disk");
    // A byte of: the signature, the header, the entries.
    for offset in [512, 512 + 40, 1024 + 3] {
        disk(&path, GPT)?;
        let whole = fjords(&path)?;
        let file = File::options().write(true).open(&path)?;
        file.write_all_at(b"\xa5", offset)?;
        ensure!(fjords(&path)? == whole && by_partx(&path)? == whole, "{offset}");
        file.write_all_at(b"\xa5", DISK_BYTES - 512)?;
        ensure!(read_table(&path).is_err_and(|error| error.is_corrupt()), "{offset}");
    }
    Ok(())
}

/// Any bytes are a table or none: nothing is read beyond the end (checked by the reader), and it ends.
#[test]
fn mutated_tables_are_harmless() -> Result<()> {
    let scratch = Scratch::new("mutated")?;
    let mut rng = Rng::new(seed_from_env("mutated_tables_are_harmless", 3));
    let (mut found, mut none, mut damaged) = (0, 0, 0);
    for script in [GPT, LOGICAL] {
        let path = scratch.join("disk");
        disk(&path, script)?;
        let original = fs::read(&path)?;
        let size_bytes = original.len() as u64;
        // Where the tables are: the front, the backup, the records of logical partitions.
        let places = [0..2048, size_bytes - 1024..size_bytes, 16384 * 512..16384 * 512 + 512];
        for _ in 0..20_000 {
            let mut bytes: BTreeMap<u64, u8> = BTreeMap::new();
            for _ in 0..rng.range(1, 6) {
                let place = rng.pick(&places).clone();
                bytes.insert(rng.range(place.start, place.end), rng.below(256) as u8);
            }
            let mut read = |offset: u64, out: &mut [u8]| {
                let end = offset + out.len() as u64;
                assert!(end <= size_bytes, "a read beyond the end");
                out.copy_from_slice(&original[offset as usize..end as usize]);
                for (at, byte) in bytes.range(offset..end) {
                    out[(at - offset) as usize] = *byte;
                }
                Ok::<(), FormatError>(())
            };
            match Table::read(size_bytes, &mut read) {
                Ok(Some(table)) => {
                    found += 1;
                    ensure!(table.partitions.iter().all(|part| part.range.start < part.range.end));
                }
                Ok(None) => none += 1,
                Err(_) => damaged += 1,
            }
        }
    }
    ensure!(found > 1000 && none > 100 && damaged > 10, "{found} {none} {damaged}");
    Ok(())
}

/// A disk whose bytes outside of one partition are known.
struct Disk {
    scratch: Scratch,
    path: PathBuf,
    before: Vec<u8>,
}

impl Disk {
    /// With an empty partition 2.
    fn new(name: &str) -> Result<Disk> {
        let scratch = Scratch::new(name)?;
        let path = scratch.join("disk.img");
        disk(&path, GPT)?;
        // All that is in no partition and no table, and both neighbours.
        let file = File::options().read(true).write(true).open(&path)?;
        let front = pattern_vec(1, 0, (PART.start - (1 << 20)) as usize);
        file.write_all_at(&front, 1 << 20)?;
        let back = pattern_vec(2, 0, (DISK_BYTES - (1 << 20) - PART.end) as usize);
        file.write_all_at(&back, PART.end)?;
        let before = fs::read(&path)?;
        ensure!(fjords(&path)?.get(&2) == Some(&PART));
        Ok(Disk { scratch, path, before })
    }

    fn name(&self) -> String {
        format!("{}@2", self.path.display())
    }

    /// Runs a shell script that has the image's name as $IMAGE.
    fn shell(&self, script: &str) -> Result<Output> {
        let fjord = env!("CARGO_BIN_EXE_fjord");
        let script = format!("set -e; fjord() {{ '{fjord}' \"$@\"; }}; {script}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).current_dir(self.scratch.path());
        // In its own directory: the scripts quote no blanks.
        tools::run(shell.env("IMAGE", "disk.img@2").env("DISK", "disk.img"))
    }

    /// Nothing outside of the partition has changed.
    fn check(&self, what: &str) -> Result<()> {
        let now = fs::read(&self.path)?;
        ensure!(now.len() == self.before.len(), "{what}: the size");
        let (start, end) = (PART.start as usize, PART.end as usize);
        ensure!(now[..start] == self.before[..start], "{what} wrote before the partition");
        ensure!(now[end..] == self.before[end..], "{what} wrote behind the partition");
        Ok(())
    }

    /// e2fsck and Linux take the partition for whole.
    fn check_image(&self, what: &str) -> Result<()> {
        let (start, len) = (PART.start.to_string(), (PART.end - PART.start).to_string());
        let device = Loop::new(&self.path, &["-o", &start, "--sizelimit", &len])?;
        image::e2fsck_clean(&device.0).with_context(|| what.to_owned()).map(drop)
    }
}

/// A script for each command that works on an image; $IMAGE is an image with a file /f.
const SCRIPTS: &[(&str, &str)] = &[
    (
        "mkfs",
        "fjord mkfs --force -q -L part $IMAGE; fjord mkdir $IMAGE /d; echo text >f; fjord put $IMAGE f /f",
    ),
    ("info", "fjord info $IMAGE | grep -q part"),
    ("ls", "fjord ls $IMAGE | grep -qx f"),
    ("cat", "test \"$(fjord cat $IMAGE /f)\" = text"),
    ("stat", "fjord stat $IMAGE /f"),
    ("tree", "fjord tree $IMAGE | grep -q f"),
    ("put", "head -c 9000000 /dev/zero | tr '\\0' x >big; fjord put $IMAGE big /big"),
    ("get", "fjord get $IMAGE /big out; cmp big out"),
    ("cp", "fjord cp $IMAGE /big /big2"),
    ("mv", "fjord mv $IMAGE /big2 /big3"),
    ("ln", "fjord ln $IMAGE /big3 /big4"),
    ("chmod", "fjord chmod $IMAGE 600 /f"),
    ("chown", "fjord chown $IMAGE 7:8 /f"),
    ("rm", "fjord rm $IMAGE /big3"),
    ("mkdir", "fjord mkdir $IMAGE /e"),
    ("tune", "fjord tune --ijournal 2x1M $IMAGE"),
    ("journal", "fjord journal $IMAGE"),
    (
        "mount",
        "mkdir mnt; fjord mount --daemon $IMAGE mnt; echo more >mnt/g; sync mnt/g; \
         fjord umount mnt; test \"$(fjord cat $IMAGE /g)\" = more",
    ),
    (
        "umount",
        "fjord mount --daemon $IMAGE mnt; fjord umount $IMAGE; \
         fjord mount --daemon -o nofuseblk $IMAGE mnt; fjord umount $IMAGE",
    ),
    ("recover", "fjord recover $IMAGE"),
    ("fsck", "fjord fsck -fp $IMAGE"),
    ("snapshot", "fjord snapshot $IMAGE copy; e2fsck -fn copy; test $(stat -c %s copy) = 67108864"),
    (
        "resize",
        "fjord mkfs --force -q --size 16M $IMAGE; fjord resize $IMAGE; fjord info $IMAGE; \
         if fjord resize $IMAGE +1M; then exit 1; fi",
    ),
];
/// Commands that work on no image.
const OTHERS: [&str; 5] = ["stats", "bench", "sim", "completions", "man"];

/// The commands that `fjord --help` lists.
fn commands() -> Result<BTreeSet<String>> {
    let help = run(program().arg("--help"))?.stdout;
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| line.starts_with("  "));
    let names = lines.filter(|line| !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next().map(str::to_owned));
    Ok(names.filter(|name| name != "help").collect())
}

#[test]
fn every_command_takes_a_partition() -> Result<()> {
    let known = SCRIPTS.iter().map(|(name, _)| *name).chain(OTHERS);
    let known: BTreeSet<String> = known.map(str::to_owned).collect();
    ensure!(commands()? == known, "{:?}, {known:?}", commands()?);
    let disk = Disk::new("commands")?;
    // By number, by --offset, by offset and size in the name.
    for form in ["$IMAGE", "--offset 16M,64M $DISK", "$DISK@offset=16777216+67108864"] {
        for (name, script) in SCRIPTS {
            let script = format!("rm -rf mnt/ copy out; {}", script.replace("$IMAGE", form));
            // A command that makes mnt left it to the next one.
            let script = script
                .replace("rm -rf mnt/", "rmdir mnt 2>/dev/null || true; mkdir -p mnt; rm -rf");
            let script = script.replace("mkdir mnt; fjord mount", "fjord mount");
            disk.shell(&script)?.ok().with_context(|| format!("{name}: {script}"))?;
            disk.check(&format!("{name} ({form})"))?;
            disk.check_image(&format!("{name} ({form})"))?;
        }
    }
    Ok(())
}

/// The library too: a change, and everything that may go wrong with a name.
#[test]
fn the_library_opens_partitions() -> Result<()> {
    let disk = Disk::new("library")?;
    disk.shell("fjord mkfs -q --force $IMAGE")?.ok()?;
    let fs = Fs::open(disk.name(), &MountOptions::default())?;
    fs.write("/f", b"text")?;
    fs.unmount()?;
    disk.check("Fs::open")?;
    disk.check_image("Fs::open")?;
    let refused = |name: String, wanted: &[&str]| -> Result<()> {
        let error = Fs::open(&name, &MountOptions::default()).err().context(name.clone())?;
        let text = error.to_string();
        ensure!(wanted.iter().all(|part| text.contains(part)), "{name}: {text}");
        Ok(())
    };
    let path = disk.path.display();
    refused(format!("{path}@7"), &["no partition 7", "2: an ext2, ext3 or ext4", "\"root\""])?;
    refused(format!("{path}@1"), &["not an ext2"])?;
    refused(format!("{path}@offset=90000000+90000000"), &["100663296 bytes", "180000000"])?;
    refused(format!("{path}"), &["a disk with these partitions (GPT)", "IMAGE@NUMBER"])?;
    // A part that ends with the disk's second table: nobody is told to write over it.
    let error = Fs::open(format!("{path}@offset=45088768"), &MountOptions::default()).err();
    let text = error.context("a wrong offset")?.to_string();
    ensure!(text.contains("check the path and the offset") && !text.contains("--force"), "{text}");
    let plain = disk.scratch.join("plain");
    fs::write(&plain, vec![0; 1 << 20])?;
    refused(format!("{}@1", plain.display()), &["no partition table"])
}

/// Messages say what a file is, and what to type.
#[test]
fn other_formats_are_named() -> Result<()> {
    let disk = Disk::new("formats")?;
    disk.shell("fjord mkfs -q --force $IMAGE")?.ok()?;
    for command in ["ls", "info"] {
        let said = disk.shell(&format!("fjord {command} $DISK"))?;
        let wanted = "such as `fjord ls disk.img@2`";
        ensure!(said.code == Some(1) && said.stderr.contains(wanted), "{}", said.stderr);
        ensure!(said.stderr.trim().lines().count() == 1, "{}", said.stderr);
    }
    let formats: [(usize, &[u8], &str); 5] = [
        (0, b"QFI\xfb\0\0\0\x03", "qemu-img convert -O raw"),
        (0, b"\x3a\xff\x26\xed\x01\0\0\0", "simg2img"),
        (32, b"SIF_MAGIC\0", "apptainer sif dump"),
        (0, b"\x1f\x8b\x08\0", "gzip -dc"),
        (0, b"XFSB", "an XFS file system"),
    ];
    for (offset, bytes, wanted) in formats {
        let mut file = vec![0; 1 << 20];
        file[offset..offset + bytes.len()].copy_from_slice(bytes);
        fs::write(disk.scratch.join("other"), file)?;
        for command in ["ls", "info"] {
            let said = disk.shell(&format!("fjord {command} other"))?;
            ensure!(said.code == Some(1) && said.stderr.contains(wanted), "{}", said.stderr);
        }
    }
    Ok(())
}

/// Partitions of one file are in use at a time; the same bytes are not.
#[test]
fn a_partition_has_one_user() -> Result<()> {
    let disk = Disk::new("users")?;
    disk.shell("fjord mkfs -q --force $IMAGE; fjord mkfs -q --force $DISK@1")?.ok()?;
    let (name, path) = (disk.name(), disk.path.display().to_string());
    let open = |name: &str, read_only| {
        let options = MountOptions { read_only, ..MountOptions::default() };
        Fs::open(name, &MountOptions { lock_timeout: std::time::Duration::ZERO, ..options })
    };
    let first = open(&format!("{path}@1"), false)?;
    let second = open(&name, false)?;
    for (other, read_only) in [
        (name.clone(), false),
        (name.clone(), true),
        (format!("{path}@offset=33554432+1048576"), false),
        (format!("{path}@offset=33554432+1048576"), true),
        (path.clone(), false),
        (path.clone(), true),
    ] {
        let refused = open(&other, read_only).err().context(other.clone())?;
        ensure!(refused.errno() == libc::EBUSY, "{other}: {refused}");
    }
    first.unmount()?;
    second.unmount()?;
    let readers = [open(&name, true)?, open(&name, true)?];
    ensure!(open(&name, false).is_err_and(|error| error.errno() == libc::EBUSY));
    drop(readers);
    open(&name, false)?.unmount()?;
    Ok(())
}

/// A mount holds its bytes by any name; Linux's mount of them, too.
#[test]
fn a_mounted_partition_is_found() -> Result<()> {
    let disk = Disk::new("mounted")?;
    disk.shell("fjord mkfs -q --force $IMAGE; fjord mkfs -q --force $DISK@1; mkdir a b")?.ok()?;
    for list in ["", "-o nofuseblk"] {
        disk.shell(&format!(
            "fjord mount --daemon {list} $IMAGE a; fjord mount --daemon {list} $DISK@1 b"
        ))?
        .ok()?;
        let said = disk.shell("fjord ls $IMAGE")?;
        ensure!(
            said.code == Some(3) && said.stderr.contains("mounted by fjord on"),
            "{}",
            said.stderr
        );
        let said = disk.shell("fjord mkfs --force $DISK@offset=16777216+67108864")?;
        ensure!(said.code == Some(3), "{}", said.stderr);
        disk.shell(
            "echo 1 >a/x; echo 2 >b/x; fjord resize a; fjord umount b; fjord umount $IMAGE",
        )?
        .ok()?;
        ensure!(!is_mounted(&disk.scratch.join("a"))?);
        disk.shell("test $(fjord cat $IMAGE /x) = 1; test $(fjord cat $DISK@1 /x) = 2")?.ok()?;
    }
    // The options of mount(8) and of fstab files.
    disk.shell("fjord mount --daemon -o offset=16777216,sizelimit=67108864 $DISK a; cat a/x; fjord umount a")?
        .ok()?;
    let device = Loop::new(&disk.path, &["-o", "16777216", "--sizelimit", "67108864"])?;
    let script =
        format!("mount {} a; fjord ls $IMAGE 2>&1 || echo code $?; umount a", device.0.display());
    let said = disk.shell(&script)?.ok()?.stdout;
    ensure!(said.contains("mounted by Linux") && said.contains("code 3"), "{said}");
    drop(device);
    disk.check_image("mounts")
}
