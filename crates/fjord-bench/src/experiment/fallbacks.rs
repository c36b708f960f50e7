//! How often programs make a policy fall back to a full commit, from fjord's counters.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use super::measure::{self, Outcome};
use super::plan::{Plan, Program};
use crate::error::{BenchError, Result};
use crate::target::{BenchFile, BenchFs, Stand};
use crate::workload::{Sample, Sequence, run_timed};

/// Runs a program on fjord and counts.
pub(super) fn run(program: Program, stand: &Stand, plan: &Plan) -> Result<Outcome> {
    let before = stand.served()?;
    let mut outcome = run_program(program, stand, plan)?;
    outcome.served = Some(stand.served()?.since(&before));
    Ok(outcome)
}

fn run_program(program: Program, stand: &Stand, plan: &Plan) -> Result<Outcome> {
    let what = |name: &str| BenchError::io(format!("{name} on {}", stand.target.name()));
    let fs = stand.fs()?;
    let sample = match program {
        Program::CreateWriteFsync => create_write_fsync(&*fs, plan),
        Program::AppendFsync => append_fsync(&*fs, plan),
        Program::FsMark => measure::fs_mark(&*fs, 4 << 10, 32 << 10, plan.turn),
        Program::Varmail => {
            fs.make_dir("mail").and_then(|()| varmail(&*fs, "mail", VARMAIL_THREAD_COUNT, plan))
        }
        Program::Sqlite(mode) => {
            return sqlite(mount_dir(stand)?, mode, plan).map(|()| Outcome::new());
        }
        Program::Git => return git(mount_dir(stand)?, plan).map(|()| Outcome::new()),
    };
    Ok(Outcome::of_sample(sample.map_err(what("a pattern of calls"))?, 0))
}

fn mount_dir(stand: &Stand) -> Result<&Path> {
    let name = stand.target.name();
    stand.mount_dir().ok_or_else(|| {
        BenchError::Usage(format!("programs need a mount, and {name} is not one; use fjord-fuse"))
    })
}

const BLOCK: [u8; 4096] = [0x5a; 4096];

fn create_write_fsync(fs: &dyn BenchFs, plan: &Plan) -> io::Result<Sample> {
    fs.make_dir("created")?;
    // A directory that was there before, as directories of files to come mostly are.
    fs.sync()?;
    run_timed(2, plan.turn, Ok, |thread: &mut usize, index| {
        let mut file = fs.create(&format!("created/{thread}-{index}"))?;
        file.write_at(0, &BLOCK)?;
        file.sync(false)
    })
}

fn append_fsync(fs: &dyn BenchFs, plan: &Plan) -> io::Result<Sample> {
    let start = |thread: usize| fs.create(&format!("appended-{thread}"));
    run_timed(2, plan.turn, start, |file: &mut Box<dyn BenchFile>, index| {
        file.write_at(index * BLOCK.len() as u64, &BLOCK)?;
        file.sync(false)
    })
}

pub(super) const VARMAIL_THREAD_COUNT: usize = 16;
/// Mails of each thread; Filebench has 1,000 for all.
const MAIL_COUNT: u64 = 62;
/// The mean size of a mail and of what is added to it, in bytes.
pub(super) const MAIL_BYTES: u64 = 16 << 10;

/// Filebench's varmail in a directory: delete one; create one, append, fsync; read one, append, fsync; read one.
pub(super) fn varmail(
    fs: &dyn BenchFs,
    dir: &str,
    thread_count: usize,
    plan: &Plan,
) -> io::Result<Sample> {
    let clock = AtomicU64::new(1);
    let data = vec![0x5a; 2 * MAIL_BYTES as usize];
    let start = |thread: usize| -> io::Result<(usize, Vec<u64>, Sequence)> {
        let count = if plan.quick { 4 } else { MAIL_COUNT };
        for index in 0..count {
            fs.create(&mail(dir, thread, index))?.write_at(0, &data[..MAIL_BYTES as usize])?;
        }
        sync_after_last(fs, thread, thread_count)?;
        let seed = clock.fetch_add(1, Ordering::Relaxed);
        Ok((thread, vec![MAIL_BYTES; count as usize], Sequence::new(seed)))
    };
    run_timed(thread_count, plan.turn, start, |(thread, sizes, sequence), _| {
        let mut pick = |sizes: &Vec<u64>| (sequence.next() % sizes.len() as u64) as usize;
        let (gone, old, read) = (pick(sizes), pick(sizes), pick(sizes));
        let added = 1 + sequence.next() % (2 * MAIL_BYTES - 1);
        fs.remove_file(&mail(dir, *thread, gone as u64))?;
        let mut file = fs.create(&mail(dir, *thread, gone as u64))?;
        file.write_at(0, &data[..added as usize])?;
        file.sync(false)?;
        sizes[gone] = added;
        let mut file = fs.open(&mail(dir, *thread, old as u64))?;
        file.read_at(0, &mut vec![0; sizes[old] as usize])?;
        // A mailbox does not grow forever.
        if sizes[old] < 16 * MAIL_BYTES {
            file.write_at(sizes[old], &data[..added as usize])?;
            sizes[old] += added;
        }
        file.sync(false)?;
        fs.open(&mail(dir, *thread, read as u64))?.read_at(0, &mut vec![0; sizes[read] as usize])
    })
}

/// Makes the files that threads begin with durable, once the last thread has its own.
pub(super) fn sync_after_last(
    fs: &dyn BenchFs,
    thread: usize,
    thread_count: usize,
) -> io::Result<()> {
    if thread + 1 == thread_count { fs.sync() } else { Ok(()) }
}

fn mail(dir: &str, thread: usize, index: u64) -> String {
    format!("{dir}/{thread}-{index}")
}

/// Runs a program with `input` in `dir`.
fn program(dir: &Path, name: &str, args: &[&str], input: &str) -> Result<()> {
    let failed = || BenchError::io(format!("run {name}"));
    let mut child = Command::new(name)
        .args(args)
        .current_dir(dir)
        .env("HOME", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| BenchError::MissingProgram { program: name.into(), source })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends early says why by its status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed())?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(BenchError::Command { command: format!("{name} {}", args.join(" ")), message })
}

/// Inserts and updates, each a transaction.
fn sqlite(dir: &Path, mode: &str, plan: &Plan) -> Result<()> {
    let count = if plan.quick { 10 } else { 300 };
    let mut script = format!(
        "PRAGMA journal_mode={mode};\nPRAGMA synchronous=FULL;\n\
         CREATE TABLE mail(id INTEGER PRIMARY KEY, body TEXT);\n"
    );
    for index in 0..count {
        script.push_str("INSERT INTO mail(body) VALUES(hex(randomblob(400)));\n");
        if index % 3 == 2 {
            script.push_str(&format!(
                "UPDATE mail SET body=hex(randomblob(500)) WHERE id={};\n",
                index / 2
            ));
        }
    }
    program(dir, "sqlite3", &["-bail", &format!("{mode}.db")], &script)
}

/// Commits of a few files each, with all that git can fsync.
fn git(dir: &Path, plan: &Plan) -> Result<()> {
    let repository = dir.join("repository");
    let io = || BenchError::io(format!("use {}", repository.display()));
    fs::create_dir(&repository).map_err(io())?;
    let settings = [
        ["-c", "core.fsync=all"],
        ["-c", "core.fsyncMethod=fsync"],
        ["-c", "user.name=bench"],
        ["-c", "user.email=bench@localhost"],
        ["-c", "gc.auto=0"],
    ];
    let git = |args: &[&str]| {
        let all: Vec<&str> = settings.iter().flatten().chain(args).copied().collect();
        program(&repository, "git", &all, "")
    };
    git(&["init", "-q"])?;
    for commit in 0..if plan.quick { 2 } else { 20 } {
        for index in 0..5 {
            let text = format!("{commit} {index}\n").repeat(100);
            fs::write(repository.join(format!("file{index}")), text).map_err(io())?;
        }
        git(&["add", "."])?;
        git(&["commit", "-qm", "more"])?;
    }
    Ok(())
}
