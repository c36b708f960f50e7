//! Counts of tests, and the time of each stage.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::budgets::Stage;

/// What has run so far.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    pub(crate) stages: Vec<Stage>,
}

impl Totals {
    /// Runs a stage that prepares the tests; its outcome counts as one test.
    pub(crate) fn prepare(&mut self, name: &str, run: impl FnOnce() -> Result<()>) {
        println!("== {name}");
        let started = Instant::now();
        let outcome = run();
        let stage = Stage::new(name, started.elapsed(), outcome.is_ok(), false);
        self.end(stage, &outcome, &Counts::default());
    }

    /// Adds a stage that has ended; its outcome counts as one test unless it counted tests itself.
    pub(crate) fn end(&mut self, stage: Stage, outcome: &Result<()>, counts: &Counts) {
        self.passed += counts.passed;
        self.failed += counts.failed;
        self.skipped += counts.ignored;
        match outcome {
            Err(error) => {
                println!("FAILED {}: {error:#}", stage.name);
                self.failed += u64::from(counts.failed == 0);
            }
            Ok(()) => self.passed += u64::from(counts.passed + counts.failed == 0),
        }
        // Where the output goes through a pipe, somebody may be watching it.
        let _ = std::io::stdout().flush();
        self.stages.push(stage);
    }

    /// Time of all stages that run tests, one after the other.
    pub(crate) fn tests_time(&self) -> Duration {
        self.stages.iter().filter(|stage| stage.is_test).map(|stage| stage.time).sum()
    }
}

/// Counts in the output of a test program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl Counts {
    /// Adds those of a closing line of the test harness; other lines have none.
    pub(crate) fn add(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        for part in rest.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_summed() {
        let mut counts = Counts::default();
        counts.add("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.1s");
        counts
            .add("test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        counts.add("test some::name ... ok");
        assert_eq!(counts, Counts { passed: 4, failed: 2, ignored: 1 });
    }

    #[test]
    fn a_stage_without_tests_counts_once() {
        let mut totals = Totals::default();
        totals.prepare("good", || Ok(()));
        totals.prepare("bad", || anyhow::bail!("no"));
        let counts = Counts { passed: 5, failed: 1, ignored: 0 };
        let stage = Stage::new("counted", Duration::ZERO, false, true);
        totals.end(stage, &Err(anyhow::anyhow!("status 101")), &counts);
        assert_eq!((totals.passed, totals.failed), (6, 2));
    }
}
