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

/// Keeps order without waiting, and by fsync.
const IN_ORDER: &str = "commit=600,scheduler=epoch,fsync=compound";
const BY_FSYNC: &str = "commit=600";

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
    let elsewhere = scratch.join("elsewhere");
    fs::create_dir(&elsewhere)?;
    for options in [IN_ORDER, BY_FSYNC] {
        let mount = mount(&img, &["-o", options])?;
        for dir in [mount.path(), &elsewhere] {
            tools::run(Command::new(&program).arg(dir))?.ok()?;
            ensure!(fs::read_to_string(dir.join("log"))?.ends_with("begin\nwork\nend\n"));
            ensure!(fs::read(dir.join("state"))? == b"new state\n");
            let mut python = tools::command("python3")?;
            python.arg(package().join("examples/barrier.py"));
            tools::run(python.arg(dir.join("state")).arg("newer"))?.ok()?;
            ensure!(fs::read(dir.join("state"))? == b"newer");
        }
        let stats = stats(&mount)?;
        let (ordered, as_fsync) =
            (count(&stats, "/barriers/ordered")?, count(&stats, "/barriers/as_fsync")?);
        let is_in_order = options == IN_ORDER;
        let expected = if is_in_order { (5, 0) } else { (0, 5) };
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
                printf(\"%lu %lu\\n\", (unsigned long)FJORD_IOC_FBARRIER, \
                (unsigned long)FJORD_IOC_FDATABARRIER);\nreturn fjord_fbarrier(-1) == 0;\n}\n";
    fs::write(&source, text)?;
    compile(&source, &program)?;
    let out = tools::run(&mut Command::new(&program))?.ok()?;
    ensure!(out.stdout == format!("{FBARRIER} {FDATABARRIER}\n"));
    let example = fs::read_to_string(package().join("../examples/barrier.rs"))?;
    ensure!(example.contains("opcode::none(b'J', 5)"));
    Ok(())
}

#[test]
fn a_barrier_call_sends_no_flush() -> Result<()> {
    let (_scratch, img) = place()?;
    let mount = mount(&img, &["-o", IN_ORDER])?;
    let file = File::create_new(mount.path().join("f"))?;
    file.write_all_at(&[1; 64 << 10], 0)?;
    file.sync_all()?;
    let before = count(&stats(&mount)?, "/device/flush_issued_count")?;
    for round in 0..200_u8 {
        file.write_all_at(&[round; 4096], u64::from(round % 16) << 12)?;
        call::<FDATABARRIER>(&file)?;
    }
    let stats = stats(&mount)?;
    ensure!(count(&stats, "/barriers/ordered")? == 200);
    let flushes = count(&stats, "/device/flush_issued_count")? - before;
    // Between epochs, as the device takes them; not one for each call.
    println!("200 calls, {flushes} flushes asked for");
    drop(file);
    mount.unmount()
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
    for options in [IN_ORDER, BY_FSYNC] {
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

#[test]
fn directories_read_only_mounts_and_unknown_calls() -> Result<()> {
    let (_scratch, img) = place()?;
    for options in [IN_ORDER, BY_FSYNC] {
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
