//! Programs under supervision, for tests.

use std::{
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

/// Time for a supervised program with a limit of 2 s, whatever it does. The parts of it have bounds of 5,
/// 2 and 5 s; the rest is for a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(120);

pub(crate) fn xtask() -> Command {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
}

/// What came of a shell script under supervision; `$TMPDIR` is its scratch folder.
pub(crate) fn supervise(script: &str) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let scratch = dir.path().join("scratch");
    let mut command = xtask();
    command.args(["supervise", "--limit", "2", "--scratch"]).arg(&scratch);
    let output = ends(command.args(["--", "sh", "-c", script]));
    assert!(!scratch.exists(), "the scratch folder stays");
    let text = String::from_utf8(output.stdout).unwrap();
    (output.status.code(), text)
}

/// Runs to the end of the process and of its output.
pub(crate) fn ends(command: &mut Command) -> Output {
    let started = Instant::now();
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().unwrap();
    assert!(started.elapsed() < LONG, "{:?}", started.elapsed());
    output
}
