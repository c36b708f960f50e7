//! Programs under supervision, for tests.

use std::{
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

/// Time for a supervised program, whatever it does. What follows its limit has bounds of 5, 2 and 5 s; the rest
/// is for a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(300);
/// Limit of a program that ends by itself.
const LIMIT: Duration = Duration::from_secs(150);
/// Limits of a program that does not: the first one within which it gets to where it hangs.
pub(crate) const LIMITS: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(15), LIMIT];

pub(crate) fn xtask() -> Command {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
}

/// What came of a shell script under supervision that ends by itself; `$TMPDIR` is its scratch folder.
pub(crate) fn supervise(script: &str) -> (Option<i32>, String) {
    within(LIMIT, script)
}

/// What came of a shell script under supervision that prints `ready` and hangs.
pub(crate) fn supervise_to_the_limit(script: &str, ready: &str) -> (Option<i32>, String) {
    let runs = LIMITS.into_iter().map(|limit| within(limit, script));
    first_ready(runs, ready)
}

/// The first of the runs that got as far as `ready`, or else the last.
pub(crate) fn first_ready(
    runs: impl Iterator<Item = (Option<i32>, String)>,
    ready: &str,
) -> (Option<i32>, String) {
    let mut last = None;
    for run in runs {
        let is_ready = run.1.contains(ready);
        last = Some(run);
        if is_ready {
            break;
        }
    }
    last.unwrap()
}

fn within(limit: Duration, script: &str) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let scratch = dir.path().join("scratch");
    let limit = limit.as_secs().to_string();
    let mut command = xtask();
    command.args(["supervise", "--limit", &limit, "--scratch"]).arg(&scratch);
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
