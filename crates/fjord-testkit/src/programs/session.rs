//! A running program that is fed line by line.
//!
//! Owns the process and its pipes. Invariant: it does not outlive its [`Session`].

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// A program, killed when dropped.
#[derive(Debug)]
pub(super) struct Session {
    program: String,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Session {
    pub(super) fn new(command: &mut Command) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn()?;
        let stdin = child.stdin.take().context("stdin is piped")?;
        let stdout = BufReader::new(child.stdout.take().context("stdout is piped")?);
        Ok(Session { program, child, stdin, stdout })
    }

    pub(super) fn say(&mut self, text: &str) -> Result<()> {
        // A failing program closes its input; what it says then tells more.
        if self.stdin.write_all(text.as_bytes()).is_err() {
            return Err(self.failed());
        }
        Ok(())
    }

    /// The next line of its output.
    pub(super) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            return Err(self.failed());
        }
        Ok(line.trim_end().to_owned())
    }

    pub(super) fn expect(&mut self, line: &str) -> Result<()> {
        let said = self.line()?;
        ensure!(said == line, "{} says {said:?}, expected {line:?}", self.program);
        Ok(())
    }

    /// Why it ended.
    fn failed(&mut self) -> anyhow::Error {
        let _ = self.child.kill();
        let status = self.child.wait();
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        anyhow::anyhow!("{} ended ({status:?}): {said}", self.program)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
