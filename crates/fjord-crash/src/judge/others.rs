//! Recoveries by e2fsck and by Linux, compared with ours.
//!
//! Owns [`Judge::compare`] and the conditions under which one of the two is skipped, or excused for
//! changes that it discards. Invariant: each excuse is for one condition seen in the image itself,
//! and is counted.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use fjord::{FileKind, Timespec};
use fjord_journal::recovery::{Case, Plan};
use fjord_testkit::image::KernelMount;
use fjord_testkit::tools;

use super::{Judge, JudgeStats, differ};
use crate::check::{Kind, Problem};
use crate::image::Image;
use crate::tree::Tree;

impl Judge {
    /// Whether the ijournal mark is set.
    fn is_marked(&self, image: &Image) -> bool {
        self.journal(image).is_some_and(|found| found.ijournal().is_some())
    }

    /// Neither e2fsck nor Linux may make anything of an image with live i-transactions.
    fn is_refused(&mut self, dirty: &Image) -> Result<Result<(), Problem>> {
        let path = self.scratch.join("dirty");
        dirty.write_to_file(&path)?;
        let said = tools::run(tools::command("e2fsck")?.arg("-fy").arg(&path))?;
        let refused = said.code.is_some_and(|code| code >= 8);
        if !refused || Image::from_file(&path)?.hash() != dirty.hash() {
            let text =
                format!("e2fsck accepted an image with the ijournal mark: {}", said.stdout.trim());
            return Ok(Err(Problem::new(Kind::Disagrees, text)));
        }
        if KernelMount::new(&path, "rw").is_ok() {
            let text = "Linux mounted an image with the ijournal mark".to_owned();
            return Ok(Err(Problem::new(Kind::Disagrees, text)));
        }
        self.stats.marked += 1;
        Ok(Ok(()))
    }

    /// Lets e2fsck and, where it can, the kernel recover the dirty image, and compares the trees.
    ///
    /// # Errors
    /// Outer: the tools do not run. Inner: the problem.
    pub fn compare(&mut self, dirty: &Image, ours: &Tree) -> Result<Result<(), Problem>> {
        if self.is_marked(dirty) {
            return self.is_refused(dirty);
        }
        let path = self.scratch.join("dirty");
        dirty.write_to_file(&path)?;
        let plan = fjord::inspect::log(&path).ok().flatten();
        let fast_commits = plan.as_ref().is_some_and(has_records);
        let excuses = plan.as_ref().map(Excuses::of).unwrap_or_default();
        for (who, run) in OTHERS {
            if who == PREEN && excuses.torn_commit {
                // As before, but it asks what to do.
                continue;
            }
            if who == "Linux" && !self.features.kernel_mounts()? {
                self.stats.not_for_linux += 1;
                continue;
            }
            dirty.write_to_file(&path)?;
            let began = SystemTime::now();
            match run(&path) {
                Ok(By::Recovered) => {}
                Ok(by) => match excuses.take(by, &mut self.stats) {
                    Ok(()) => continue,
                    Err(problem) => return Ok(Err(problem)),
                },
                Err(error) => {
                    let text = format!("{who} does not recover it: {error:#}");
                    return Ok(Err(Problem::new(Kind::Disagrees, text)));
                }
            }
            if who == PREEN && fast_commits {
                // What it leaves for -f to mend, see there.
                continue;
            }
            self.stats.compared += 1;
            let theirs = Image::from_file(&path)?;
            let mut theirs = match self.recover(&theirs, false) {
                Ok(theirs) => theirs,
                Err(mut problem) => {
                    problem.text = format!("recovered by {who}: {}", problem.text);
                    return Ok(Err(problem));
                }
            };
            if who == "Linux" {
                self.stats.truncations += without_truncation_times(&mut theirs.tree, ours, began);
            }
            self.stats.fast_commits += u64::from(fast_commits);
            let same = if fast_commits && who == "Linux" {
                // Its replay takes an entry that it adds for a change of the directory now.
                without_directory_times(&theirs.tree) == without_directory_times(ours)
            } else {
                theirs.tree == *ours
            };
            if !same {
                let text = format!("recovered by {who}: {}", differ(ours, &theirs.tree));
                return Ok(Err(Problem::new(Kind::Disagrees, text)));
            }
        }
        Ok(Ok(()))
    }
}

/// Conditions under which e2fsck 1.47.0 discards changes that Linux and fjord recover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Excuses {
    /// The last commit block is torn after its first sector.
    torn_commit: bool,
}

impl Excuses {
    /// Changes that e2fsck may discard; `plan` is that of the image's log.
    fn of(plan: &Plan) -> Excuses {
        // Commit blocks before the last one are durable, and so whole.
        let torn_commit = plan.report().cases.contains(&Case::PartialCommitBlock);
        Excuses { torn_commit }
    }

    /// Counts an excuse, if there is one for this.
    fn take(self, by: By, stats: &mut JudgeStats) -> Result<(), Problem> {
        let what = match by {
            By::Recovered => return Ok(()),
            By::GaveUpCommit if self.torn_commit => {
                stats.torn_commits += 1;
                return Ok(());
            }
            By::NotAnnounced => "a log that the superblock does not refer to",
            By::GaveUpCommit => "a transaction whose commit block is valid",
            By::GaveUpLog => "a log that Linux and fjord replay",
        };
        Err(Problem::new(Kind::Disagrees, format!("e2fsck discards {what}")))
    }
}

/// What became of a recovery by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// It recovered the image.
    Recovered,
    /// It gave up the last transaction for a torn commit block. Linux and fjord accept one whose
    /// first sector is whole, e2fsck 1.47.0 does not.
    GaveUpCommit,
    /// It discarded the whole log, as e2fsck 1.47.0 does for a valid fast-commit area that begins
    /// with the head of another transaction.
    GaveUpLog,
    /// As at boot (`-p`) it leaves a log alone that the superblock does not speak of; with `-y` it
    /// replays it.
    NotAnnounced,
}

/// e2fsck as at boot.
const PREEN: &str = "e2fsck -p";

type Recover = fn(&Path) -> Result<By>;

/// Those who recover an image, and how.
const OTHERS: [(&str, Recover); 3] =
    [("e2fsck -fy", by_e2fsck), (PREEN, preen), ("Linux", by_linux)];

fn by_e2fsck(path: &Path) -> Result<By> {
    let keep = ["-E", "no_optimize_extents"];
    let mut e2fsck = tools::command("e2fsck")?;
    let said = tools::run(e2fsck.arg("-fy").args(keep).arg(path))?;
    let said = said.expect_code(&[0, 1])?;
    let all = said.stdout + &said.stderr;
    Ok(if all.contains("was corrupt, replay was aborted") {
        By::GaveUpCommit
    } else if all.contains("while recovering journal") {
        By::GaveUpLog
    } else {
        By::Recovered
    })
}

/// As at boot: `e2fsck -p` replays the journal and takes the rest for whole. Its replay of fast commits
/// leaves blocks uncounted and inodes without names, with images of Linux too, for `-f` to mend; what it
/// writes back from before the replay must not be wrong.
fn preen(path: &Path) -> Result<By> {
    let said = tools::run(tools::command("e2fsck")?.arg("-p").arg(path))?;
    if said.code == Some(4) && said.stdout.contains("needs_recovery flag is clear") {
        return Ok(By::NotAnnounced);
    }
    said.expect_code(&[0, 1])?;
    let said = tools::run(tools::command("e2fsck")?.arg("-fn").arg(path))?;
    let sound = !said.stdout.contains("count wrong");
    ensure!(sound, "damage is left behind e2fsck -p: {}", said.stdout.trim());
    Ok(By::Recovered)
}

fn by_linux(path: &Path) -> Result<By> {
    KernelMount::new(path, "rw")?.unmount()?;
    let said = tools::run(tools::command("e2fsck")?.arg("-fn").arg(path))?;
    ensure!(said.code == Some(0), "e2fsck finds damage behind it: {}", said.stdout.trim());
    Ok(By::Recovered)
}

fn has_records(plan: &Plan) -> bool {
    !plan.report().fast_commit_records.is_empty()
}

/// Takes back the times that Linux gave to files when it mounted the image: those whose truncation it
/// completed. No file had such a time before. Returns how many there are.
fn without_truncation_times(theirs: &mut Tree, ours: &Tree, mounted: SystemTime) -> u64 {
    /// The kernel stamps with the time of its last tick.
    const TICK: Duration = Duration::from_millis(10);
    let mounted = mounted.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(TICK);
    let mut count = 0;
    for (number, seen) in &mut theirs.inodes {
        let mtime = seen.attrs.mtime;
        let since_epoch = u64::try_from(mtime.sec).map(|sec| Duration::new(sec, mtime.nsec));
        let is_new = since_epoch.is_ok_and(|time| time >= mounted);
        if let Some(before) = ours.inodes.get(number)
            && (seen.kind, is_new) == (FileKind::Regular, true)
        {
            seen.attrs.mtime = before.attrs.mtime;
            count += 1;
        }
    }
    count
}

fn without_directory_times(tree: &Tree) -> Tree {
    let mut tree = tree.clone();
    for seen in tree.inodes.values_mut().filter(|seen| seen.kind == FileKind::Directory) {
        seen.attrs.mtime = Timespec::default();
    }
    tree
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excuse_is_for_one_thing() {
        let torn_commit = Excuses { torn_commit: true };
        let mut stats = JudgeStats::default();
        assert!(Excuses::default().take(By::GaveUpCommit, &mut stats).is_err());
        assert!(torn_commit.take(By::GaveUpLog, &mut stats).is_err());
        assert!(torn_commit.take(By::NotAnnounced, &mut stats).is_err());
        assert_eq!(stats, JudgeStats::default());
        assert!(torn_commit.take(By::GaveUpCommit, &mut stats).is_ok());
        assert_eq!(stats.torn_commits, 1);
    }
}
