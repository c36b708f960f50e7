//! Barrier calls of programs on a mount: `fjord.h`, its examples, and what they order. Needs root and a
//! C compiler.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    tools,
};
use rustix::{
    io::Errno,
    ioctl::{NoArg, Opcode, ioctl, opcode},
};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_fjord");
const FBARRIER: Opcode = opcode::none(b'J', 4);
const FDATABARRIER: Opcode = opcode::none(b'J', 5);
const UNKNOWN: Opcode = opcode::none(b'J', 99);

/// Keeps order without waiting: by the scheduler, and by the policy; and by fsync.
const IN_ORDER: &str = "commit=600,scheduler=epoch,fsync=compound";
const BY_POLICY: &str = "commit=600,scheduler=direct,fsync=ijournal";
const BY_FSYNC: &str = "commit=600,scheduler=direct,fsync=compound";
const ALL: [&str; 3] = [IN_ORDER, BY_POLICY, BY_FSYNC];

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("package")
}

fn place() -> Result<(Scratch, PathBuf)> {
    let scratch = Scratch::new("barrier-calls")?;
    let img = scratch.join("image");
    tools::run(Command::new(PROGRAM).args(["mkfs", "--size", "64M"]).arg(&img))?.ok()?;
    Ok((scratch, img))
}

fn mount(img: &Path, args: &[&str]) -> Result<FjordMount> {
    FjordMount::with_program(Path::new(PROGRAM), img, args)
}

fn stats(mount: &FjordMount) -> Result<Value> {
    let out =
        tools::run(Command::new(PROGRAM).args(["stats", "--json"]).arg(mount.path()))?.ok()?;
    Ok(serde_json::from_str(&out.stdout)?)
}

fn count(stats: &Value, pointer: &str) -> Result<u64> {
    stats.pointer(pointer).and_then(Value::as_u64).with_context(|| format!("{pointer}: {stats}"))
}

fn compile(source: &Path, to: &Path) -> Result<()> {
    let mut cc = tools::command("cc")?;
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"]).arg(package());
    tools::run(cc.arg("-o").arg(to).arg(source))?.ok()?;
    Ok(())
}

fn call<const CALL: Opcode>(file: &File) -> Result<(), Errno> {
    // SAFETY: these ioctls have no argument.
    unsafe { ioctl(file, NoArg::<CALL>::new()) }
}

/// What Linux finds in a copy of the mounted image, after recovery.
fn survivors(img: &Path) -> Result<impl Fn(&str) -> Vec<u8>> {
    let copy = img.with_extension("copy");
    image::copy_sparse(img, &copy)?;
    tools::run(Command::new(PROGRAM).arg("recover").arg(&copy))?.ok()?;
    image::e2fsck_clean(&copy)?;
    let linux = KernelMount::new(&copy, "ro")?;
    let dir = linux.path().to_owned();
    Ok(move |name: &str| {
        let _mounted = &linux;
        fs::read(dir.join(name)).unwrap_or_default()
    })
}

#[test]
fn the_examples_run_on_a_mount_and_elsewhere() -> Result<()> {
    let (scratch, img) = place()?;
    let program = scratch.join("barrier");
    compile(&package().join("examples/barrier.c"), &program)?;
    let rust = scratch.join("barrier-rust");
    let mut rustc = tools::command("rustc")?;
    rustc.args(["--edition", "2024", "-o"]).arg(&rust);
    tools::run(rustc.arg(package().join("../examples/barrier.rs")))?.ok()?;
    let elsewhere = scratch.join("elsewhere");
    fs::create_dir(&elsewhere)?;
    for options in ALL {
        let mount = mount(&img, &["-o", options])?;
        for dir in [mount.path(), &elsewhere] {
            tools::run(Command::new(&program).arg(dir))?.ok()?;
            ensure!(fs::read_to_string(dir.join("log"))?.ends_with("begin\nwork\nend\n"));
            ensure!(fs::read(dir.join("state"))? == b"new state\n");
            let mut python = tools::command("python3")?;
            python.arg(package().join("examples/barrier.py"));
            tools::run(python.arg(dir.join("state")).arg("newer"))?.ok()?;
            ensure!(fs::read(dir.join("state"))? == b"newer");
            let records = ["one", "two", "three"];
            let told = tools::run(Command::new(&rust).arg(dir.join("rust")).args(records))?.ok()?;
            ensure!(told.stdout.contains("durable"), "{told:?}");
            ensure!(fs::read_to_string(dir.join("rust"))?.ends_with("one\ntwo\nthree\n"));
        }
        let stats = stats(&mount)?;
        let (ordered, as_fsync) =
            (count(&stats, "/barriers/ordered")?, count(&stats, "/barriers/as_fsync")?);
        // The C program's four calls, Python's one, and Rust's three. An i-transaction does not take a name from a
        // file that was renamed: Python's has the name that C's new file had.
        let expected = match options {
            IN_ORDER => (8, 0),
            BY_POLICY => (7, 1),
            _ => (0, 8),
        };
        ensure!((ordered, as_fsync) == expected, "{options}: {ordered}, {as_fsync}");
        mount.unmount()?;
    }
    Ok(())
}

/// The Rust example has the numbers of the header.
#[test]
fn the_numbers_are_those_of_the_header() -> Result<()> {
    let scratch = Scratch::new("barrier-numbers")?;
    let (source, program) = (scratch.join("numbers.c"), scratch.join("numbers"));
    let text = "#define _GNU_SOURCE\n#include <fjord.h>\n#include <stdio.h>\nint main(void)\n{\n\
                printf(\"%lu %lu %lx\\n\", (unsigned long)FJORD_IOC_FBARRIER, \
                (unsigned long)FJORD_IOC_FDATABARRIER, (unsigned long)FJORD_IOC_EPOCH);\n\
                return fjord_fbarrier(-1) == 0;\n}\n";
    fs::write(&source, text)?;
    compile(&source, &program)?;
    let out = tools::run(&mut Command::new(&program))?.ok()?;
    ensure!(out.stdout == format!("{FBARRIER} {FDATABARRIER} c0184a06\n"));
    let example = fs::read_to_string(package().join("../examples/barrier.rs"))?;
    ensure!(example.contains("0xc018_4a06"));
    Ok(())
}

/// Asks for epochs in every way, right and wrong; the exit code tells which answer was not as it should be.
const EPOCHS: &str = r#"#define _GNU_SOURCE
#include <fjord.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int is_refused(int fd, struct fjord_epoch wrong)
{
	if (fjord_is_durable(fd, &wrong) != -1 || errno != EINVAL)
		return 0;
	return fjord_wait_durable(fd, &wrong) == -1 && errno == EINVAL;
}
int main(int argc, char **argv)
{
	struct fjord_epoch first = { 0 }, second = { 0 }, wrong;
	int fd = open(argv[1], O_RDWR | O_CREAT, 0644), dir = open(argv[2], O_RDONLY);
	if (fd < 0 || dir < 0 || pwrite(fd, argv, 8, 0) != 8)
		return 1;
	if (fjord_fdatabarrier_epoch(fd, &first) != 0 || pwrite(fd, argv, 8, 4096) != 8 ||
	    fjord_fbarrier_epoch(dir, &second) != 0)
		return 2;
	if (first.mount != second.mount || first.number == 0 || second.number <= first.number)
		return 3;
	if (fjord_is_durable(dir, &first) < 0 || fjord_wait_durable(dir, &second) != 0)
		return 4;
	if (fjord_is_durable(fd, &first) != 1 || fjord_is_durable(fd, &second) != 1)
		return 5;
	wrong = second;
	wrong.number += 1000;
	if (!is_refused(fd, wrong))
		return 6;
	wrong = second;
	wrong.mount ^= 1;
	if (!is_refused(dir, wrong))
		return 7;
	wrong = second;
	if (fjord_epoch_call(fd, &wrong, 99) != -1 || errno != EINVAL)
		return 8;
	/* Of another mount, if there was one. */
	if (argc == 5) {
		wrong.mount = strtoull(argv[3], NULL, 10);
		wrong.number = strtoull(argv[4], NULL, 10);
		if (!is_refused(fd, wrong))
			return 9;
	}
	printf("%llu %llu", (unsigned long long)first.mount, (unsigned long long)first.number);
	return 0;
}
"#;

#[test]
fn epochs_are_told_and_waited_for() -> Result<()> {
    let (scratch, img) = place()?;
    let (source, program) = (scratch.join("epochs.c"), scratch.join("epochs"));
    fs::write(&source, EPOCHS)?;
    compile(&source, &program)?;
    let mut earlier = String::new();
    for options in ALL {
        let mount = mount(&img, &["-o", options])?;
        let mut command = Command::new(&program);
        command
            .arg(mount.path().join("f"))
            .arg(mount.path())
            .args(earlier.split(' ').filter(|part| !part.is_empty()));
        earlier = tools::run(&mut command)?.ok().with_context(|| options.to_owned())?.stdout;
        mount.unmount()?;
    }
    let elsewhere = tools::run(Command::new(&program).arg(scratch.join("f")).arg(scratch.path()))?;
    ensure!(elsewhere.code == Some(2), "ENOTTY: {elsewhere:?}");
    Ok(())
}

#[test]
fn a_barrier_call_sends_no_flush() -> Result<()> {
    for options in [IN_ORDER, BY_POLICY] {
        let (_scratch, img) = place()?;
        let mount = mount(&img, &["-o", options])?;
        let file = File::create_new(mount.path().join("f"))?;
        file.write_all_at(&[1; 64 << 10], 0)?;
        file.sync_all()?;
        // The first one may mark the journal, durably.
        call::<FDATABARRIER>(&file)?;
        let before = stats(&mount)?;
        // Fewer than would have a commit begin, which makes room in the areas.
        const CALLS: u64 = 80;
        for round in 0..CALLS as u8 {
            file.write_all_at(&[round; 4096], u64::from(round % 16) << 12)?;
            call::<FDATABARRIER>(&file)?;
        }
        let after = stats(&mount)?;
        let more = |pointer: &str| {
            Ok::<_, anyhow::Error>(count(&after, pointer)? - count(&before, pointer)?)
        };
        ensure!(more("/barriers/ordered")? == CALLS);
        let flushes = more("/device/flush_issued_count")?;
        // With the scheduler between epochs, as the device takes them; not one for each call.
        println!("{options}: {CALLS} calls, {flushes} flushes asked for");
        ensure!(options == IN_ORDER || flushes == 0, "{flushes} flushes");
        drop(file);
        mount.unmount()?;
    }
    Ok(())
}

/// A later fsync of another file makes everything before the barrier durable, also what the kernel
/// alone had: pages of a shared mapping, and with --writeback-cache data that were just written.
#[test]
fn data_that_the_kernel_holds_is_ordered() -> Result<()> {
    let (scratch, img) = place()?;
    let (source, program) = (scratch.join("mapped.c"), scratch.join("mapped"));
    let text = "#define _GNU_SOURCE\n#include <fjord.h>\n#include <string.h>\n\
                #include <sys/mman.h>\n#include <unistd.h>\n\
                int main(int argc, char **argv)\n{\n\
                int fd = open(argv[argc - 1], O_RDWR | O_CREAT, 0644);\n\
                if (ftruncate(fd, 8192) != 0) return 1;\n\
                char *at = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);\n\
                if (at == MAP_FAILED) return 2;\n\
                memset(at, 'm', 8192);\n\
                return fjord_fbarrier(fd) != 0;\n}\n";
    fs::write(&source, text)?;
    compile(&source, &program)?;
    for options in ALL {
        for cache in [&[][..], &["--writeback-cache"]] {
            let args: Vec<_> = ["-o", options].into_iter().chain(cache.iter().copied()).collect();
            let mount = mount(&img, &args)?;
            let other = File::create(mount.path().join("other"))?;
            tools::run(Command::new(&program).arg(mount.path().join("mapped")))?.ok()?;
            other.write_all_at(b"later", 0)?;
            other.sync_all()?;
            let survivor = survivors(&img)?;
            ensure!(survivor("other") == b"later");
            ensure!(survivor("mapped") == [b'm'; 8192], "{args:?}: the mapping's pages are lost");
            drop(other);
            fs::remove_file(mount.path().join("mapped"))?;
            mount.unmount()?;
        }
    }
    Ok(())
}

/// By the mount option, and by the attribute, which a file gets from its directory.
#[test]
fn fsync_of_unmodified_programs_can_order_only() -> Result<()> {
    let (_scratch, img) = place()?;
    let fsync = |mount: &FjordMount, name: &str| -> Result<(u64, u64)> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(mount.path().join(name))?;
        file.write_all_at(b"changed", 0)?;
        let asked = |stats: &Value| -> Result<(u64, u64)> {
            Ok((count(stats, "/fsync/calls")?, count(stats, "/barriers/fsyncs")?))
        };
        let (calls, in_order) = asked(&stats(mount)?)?;
        file.sync_all()?;
        let (calls_now, in_order_now) = asked(&stats(mount)?)?;
        Ok((calls_now - calls, in_order_now - in_order))
    };
    let plain = mount(&img, &["-o", "commit=600"])?;
    let dir = plain.path().join("dir");
    fs::create_dir(&dir)?;
    let mut setfattr = tools::command("setfattr")?;
    tools::run(setfattr.args(["-n", "user.fjord.order_only", "-v", "1"]).arg(&dir))?.ok()?;
    fs::write(dir.join("f"), b"made")?;
    fs::write(plain.path().join("g"), b"made")?;
    tools::run(Command::new("sync").arg("-f").arg(&dir))?.ok()?;
    ensure!(fsync(&plain, "dir/f")? == (0, 1));
    ensure!(fsync(&plain, "g")? == (1, 0));
    let shown = tools::run(Command::new(PROGRAM).arg("stats").arg(plain.path()))?.ok()?.stdout;
    ensure!(shown.contains("fsync for order") && shown.contains("1 calls"), "{shown}");
    plain.unmount()?;

    let whole = mount(&img, &["-o", "commit=600,order_only"])?;
    ensure!(fsync(&whole, "g")? == (0, 1));
    let shown = tools::run(Command::new(PROGRAM).arg("stats").arg(whole.path()))?.ok()?.stdout;
    ensure!(shown.contains("warning: order_only: fsync"), "{shown}");
    whole.unmount()
}

#[test]
fn directories_read_only_mounts_and_unknown_calls() -> Result<()> {
    let (_scratch, img) = place()?;
    for options in ALL {
        let mount = mount(&img, &["-o", options])?;
        fs::create_dir_all(mount.path().join("d"))?;
        fs::write(mount.path().join("d/f"), b"named")?;
        let dir = File::open(mount.path().join("d"))?;
        call::<FBARRIER>(&dir).context("fbarrier of a directory")?;
        call::<FDATABARRIER>(&dir).context("fdatabarrier of a directory")?;
        let read_only = File::open(mount.path().join("d/f"))?;
        call::<FBARRIER>(&read_only).context("a descriptor for reading")?;
        ensure!(call::<UNKNOWN>(&dir) == Err(Errno::NOTTY));
        ensure!(call::<UNKNOWN>(&read_only) == Err(Errno::NOTTY));
        // The name is before whatever is durable now.
        let other = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(mount.path().join("g"))?;
        other.sync_all()?;
        ensure!(survivors(&img)?("d/f") == b"named", "{options}");
        drop((dir, read_only, other));
        mount.unmount()?;
    }
    let mount = mount(&img, &["-o", "ro"])?;
    let file = File::open(mount.path().join("d/f"))?;
    call::<FBARRIER>(&file).context("a read-only mount")?;
    file.sync_all().context("fsync on a read-only mount")?;
    drop(file);
    mount.unmount()
}
