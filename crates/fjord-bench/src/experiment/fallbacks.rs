//! How often programs make a policy fall back to a full commit, from fjord's counters.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use super::measure::{self, Outcome};
use super::plan::{Plan, Program};
use crate::error::{BenchError, Result};
use crate::target::{BenchFile, BenchFs, Stand};
use crate::workload::{Sample, VARMAIL_THREAD_COUNT, run_timed, varmail};

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
            let threads = VARMAIL_THREAD_COUNT;
            fs.make_dir("mail").and_then(|()| varmail(&*fs, "mail", threads, plan.turn, plan.quick))
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
