//! The judges of `programs`, judged: Linux' own ext4 passes them, and each notices what it is
//! there to notice.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    image::Scratch,
    programs::{
        self, Job, Until,
        sqlite::{Database, Promise},
    },
    rng,
    tools::{self, run},
};

/// Without fast commits: about one in seven of such series ends with a damaged image on Linux 6.18
/// itself (a size of 0, a wrong link count, a malformed database, a mount that fails).
#[test]
fn linux_keeps_all_that_is_asked() -> Result<()> {
    let seed = rng::seed_from_env("programs on Linux", 1);
    let set = features::by_name("default").context("a set of the table")?;
    let summary = programs::on_linux(set, 16, seed)?;
    println!("{summary:?}");
    ensure!(summary.counts.acknowledged > 0, "nothing was acknowledged");
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("cp").arg("-a").arg(from).arg(to))?.ok()?;
    Ok(())
}

/// Lets a job take `before` steps, then `lost` more, and puts back what was there before these.
fn lose_newest(job: &mut dyn Job, before: u64, lost: u64) -> Result<Scratch> {
    let root = Scratch::in_memory("judge")?;
    let aside = Scratch::in_memory("judge-old")?;
    let steps = AtomicU64::new(0);
    let (live, old) = (root.join(job.name()), aside.join(job.name()));
    let enough = || {
        let step = steps.fetch_add(1, Ordering::SeqCst);
        if step == before {
            copy(&live, &old).expect("a plain copy");
        }
        step == before + lost
    };
    job.run(root.path(), &Until::enough(&enough))?;
    job.end();
    fs::remove_dir_all(&live)?;
    copy(&old, &live)?;
    Ok(root)
}

#[test]
fn each_judge_notices_a_lost_step() -> Result<()> {
    for (job, again) in programs::jobs(1).iter_mut().zip(&mut programs::jobs(1)) {
        // Nothing is promised of it.
        if job.name() == "append-range" {
            continue;
        }
        let whole = lose_newest(again.as_mut(), 40, 0)?;
        again.verify(whole.path()).with_context(|| format!("{}, nothing lost", job.name()))?;
        // A checkpoint is among them, and an odd number of moves does not end where it began.
        let root = lose_newest(job.as_mut(), 40, 9)?;
        let found = job.verify(root.path());
        println!("{}: {found:?}", job.name());
        ensure!(found.is_err(), "{}: nine lost steps are not noticed", job.name());
    }
    Ok(())
}

#[test]
fn the_newest_transaction_may_be_lost_where_sqlite_says_so() -> Result<()> {
    for seed in 0..2 {
        for mut job in Database::all(seed) {
            let root = lose_newest(&mut job, 17, 1)?;
            let found = job.verify(root.path());
            let permitted = job.mode().promise != Promise::All;
            ensure!(found.is_ok() == permitted, "{}: one lost: {found:?}", job.name());
            let root = Database::all(seed + 7).into_iter().find(|other| other.name() == job.name());
            let mut job = root.context("the same mode")?;
            let root = lose_newest(&mut job, 17, 2)?;
            let found = job.verify(root.path());
            // No checkpoint among those two.
            let permitted = job.mode().promise == Promise::Checkpointed;
            ensure!(found.is_ok() == permitted, "{}: two lost: {found:?}", job.name());
        }
    }
    Ok(())
}

#[test]
fn a_damaged_database_is_noticed() -> Result<()> {
    for mut job in Database::all(3) {
        let root = lose_newest(&mut job, 20, 0)?;
        let file = job.file(root.path());
        let sql = |sql: &str| -> Result<()> {
            run(tools::command("sqlite3")?.arg(&file).arg(sql))?.ok()?;
            Ok(())
        };
        job.verify(root.path())?;
        let aside = root.join("aside");
        sql(&format!("VACUUM INTO '{}'", aside.display()))?;
        for (damage, what) in [
            ("DELETE FROM t WHERE tx=20 AND part=0", "half a transaction"),
            ("INSERT INTO t VALUES(21,0,'x')", "a row of a transaction never begun"),
            ("UPDATE t SET body='x' WHERE tx=12 AND part=0", "another row"),
            ("UPDATE state SET n=21", "more transactions than were begun"),
            ("DROP TABLE state", "no table"),
        ] {
            sql(damage)?;
            let found = job.verify(root.path());
            ensure!(found.is_err(), "{}: {what} is not noticed", job.name());
            for name in ["db-wal", "db-shm", "db-journal"] {
                let _ = fs::remove_file(file.with_file_name(name));
            }
            fs::copy(&aside, &file)?;
            job.verify(root.path()).with_context(|| format!("put right after {what}"))?;
        }
        let mut bytes = fs::read(&file)?;
        bytes[2 * 4096..3 * 4096].fill(0x5a);
        fs::write(&file, bytes)?;
        let found = job.verify(root.path()).expect_err("a page of nonsense");
        ensure!(format!("{found:#}").contains("integrity_check"), "{found:#}");
    }
    Ok(())
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for child in fs::read_dir(dir)? {
        let path = child?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Files and names that are there, gone, empty or partial against what was promised.
#[test]
fn damaged_files_and_names_are_noticed() -> Result<()> {
    let mut judged = 0;
    for job in &mut programs::jobs(5) {
        if job.name().starts_with("sqlite") || job.name() == "append-range" {
            continue;
        }
        let root = lose_newest(job.as_mut(), 90, 0)?;
        let dir = root.join(job.name());
        let stray = dir.join("stray");
        fs::write(&stray, "x")?;
        ensure!(job.verify(root.path()).is_err(), "{}: a stray name", job.name());
        fs::remove_file(stray)?;
        job.verify(root.path())?;
        for path in files_below(&dir)?.into_iter().take(3) {
            let name = path.display();
            let content = fs::read(&path)?;
            judged += 1;
            let notices = |what: &str| -> Result<()> {
                ensure!(job.verify(root.path()).is_err(), "{}: {name} {what}", job.name());
                Ok(())
            };
            // What is promised of the names alone says nothing of their files' bytes.
            if !job.name().starts_with("names") {
                fs::write(&path, &content[..content.len() / 2])?;
                notices("cut in half")?;
                fs::write(&path, "")?;
                notices("empty")?;
            }
            let mut other = content.clone();
            other[0] ^= 0x10;
            fs::write(&path, &other)?;
            notices("with another byte")?;
            // Other links of the file show it too.
            fs::write(&path, &content)?;
            fs::remove_file(&path)?;
            notices("absent")?;
            fs::write(&path, &content)?;
            job.verify(root.path()).with_context(|| format!("{name}, put right"))?;
        }
    }
    ensure!(judged >= 20, "only {judged} files were there to be damaged");
    Ok(())
}
