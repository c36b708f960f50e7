//! SQLite, fed with one transaction after the other.
//!
//! Owns, for each journal mode and each setting of `synchronous`, what SQLite promises of a
//! commit that it has acknowledged when the power fails right after:
//!
//! | journal mode | NORMAL | FULL | EXTRA |
//! |---|---|---|---|
//! | DELETE | all but the newest | all but the newest | all |
//! | TRUNCATE | all but the newest | all | all |
//! | PERSIST | all | all | all |
//! | WAL | all before the last checkpoint | all | all |
//!
//! In each of them the database stays sound, and a transaction whole or absent. Sources:
//! - DELETE: <https://www.sqlite.org/pragma.html#pragma_synchronous>: only EXTRA syncs the
//!   directory after the journal is unlinked, which is the commit. An unlink that is lost brings
//!   back the journal, which rolls back the newest transaction, and that one only: before a
//!   transaction touches the database the directory is synced for the name of its own journal.
//! - TRUNCATE: `pager_end_transaction` of SQLite's `pager.c` syncs the journal after the
//!   truncation if `synchronous` is at least FULL.
//! - PERSIST: `zeroJournalHdr` of `pager.c` syncs the journal after its header is zeroed unless
//!   `synchronous` is OFF.
//! - WAL: the same page: with NORMAL the log is synced before each checkpoint and the
//!   database after it, "but no sync operations occur during most transactions"; from FULL on the
//!   log is synced after each transaction.
//! - NORMAL in the rollback modes: the page knows "a very small (though non-zero) chance" that a
//!   power failure corrupts the database, "on an older filesystem". It comes from a journal whose
//!   header is durable before its pages; its fdatasync covers both, and nothing touches the
//!   database before it has returned. So nothing less is asked of NORMAL here.
//!
//! With OFF nothing is synced, and the database stays sound only where a crash keeps the order of all writes; then
//! nothing is promised but whole transactions up to one of them ([`Database::unsynced`]).
//!
//! `strace` of SQLite 3.40.1 shows the syncs of the table, fdatasync all of them, of directories
//! too.
//!
//! Invariant: a transaction is its number and a seed; which rows the database holds after the
//! first n transactions follows from them alone.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::session::Session;
use super::{Counts, Job, Until};
use crate::{
    rng::{Rng, mix, pattern_vec},
    tools::{self, Output},
};

/// Transactions whose rows stay; older ones are deleted.
const KEPT: usize = 24;
/// A transaction rewrites a row of the one this many before.
const REWRITTEN: usize = 3;
/// With a log, each transaction with this divisor is followed by a checkpoint.
const CHECKPOINT: usize = 8;

/// SQLite skips the sync of a directory that it cannot open (`unixDelete` and `unixSync` of its
/// `os_unix.c`), and then acknowledges what the dead file system does not have.
const DOUBTFUL: &str = "acknowledged while the file system may have been dead already";

/// Which acknowledged transactions must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Each.
    All,
    /// All but the newest.
    AllButNewest,
    /// Those before the last complete checkpoint.
    Checkpointed,
    /// None.
    Nothing,
}

/// A mode of SQLite and what it promises.
#[derive(Debug, Clone, Copy)]
pub struct Mode {
    /// Value of `PRAGMA journal_mode`.
    pub journal: &'static str,
    /// Value of `PRAGMA synchronous`.
    pub synchronous: &'static str,
    /// See the table above.
    pub promise: Promise,
}

const fn mode(journal: &'static str, synchronous: &'static str, promise: Promise) -> Mode {
    Mode { journal, synchronous, promise }
}

/// The table above.
pub const MODES: [Mode; 12] = [
    mode("DELETE", "NORMAL", Promise::AllButNewest),
    mode("DELETE", "FULL", Promise::AllButNewest),
    mode("DELETE", "EXTRA", Promise::All),
    mode("TRUNCATE", "NORMAL", Promise::AllButNewest),
    mode("TRUNCATE", "FULL", Promise::All),
    mode("TRUNCATE", "EXTRA", Promise::All),
    mode("PERSIST", "NORMAL", Promise::All),
    mode("PERSIST", "FULL", Promise::All),
    mode("PERSIST", "EXTRA", Promise::All),
    mode("WAL", "NORMAL", Promise::Checkpointed),
    mode("WAL", "FULL", Promise::All),
    mode("WAL", "EXTRA", Promise::All),
];

/// Modes that sync nothing.
const UNSYNCED: [Mode; 3] = [
    mode("DELETE", "OFF", Promise::Nothing),
    mode("PERSIST", "OFF", Promise::Nothing),
    mode("WAL", "OFF", Promise::Nothing),
];

/// One row: transaction, part, text.
type Row = (usize, usize, String);

/// A database in one mode, and the transactions that it acknowledged.
#[derive(Debug)]
pub struct Database {
    name: String,
    mode: Mode,
    /// Seeds of the transactions that were begun, the first is number 1.
    begun: Vec<u64>,
    /// Transactions up to this one were acknowledged.
    acknowledged: usize,
    /// Transactions up to this one were found after a recovery, or checkpointed.
    settled: usize,
    session: Option<Session>,
    rng: Rng,
    counts: Counts,
}

impl Database {
    /// One for each mode.
    pub fn all(seed: u64) -> Vec<Database> {
        MODES.iter().map(|mode| Database::new(*mode, seed)).collect()
    }

    /// Those that sync nothing.
    pub fn unsynced(seed: u64) -> Vec<Database> {
        UNSYNCED.iter().map(|mode| Database::new(*mode, seed)).collect()
    }

    fn new(mode: Mode, seed: u64) -> Self {
        let name = format!("sqlite-{}-{}", mode.journal, mode.synchronous).to_lowercase();
        let salt = name.bytes().fold(seed, |salt, byte| mix(salt ^ u64::from(byte)));
        Database {
            name,
            mode,
            begun: Vec::new(),
            acknowledged: 0,
            settled: 0,
            session: None,
            rng: Rng::new(salt),
            counts: Counts::default(),
        }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The database file.
    pub fn file(&self, root: &Path) -> PathBuf {
        root.join(&self.name).join("db")
    }

    /// Transactions up to this one must be there.
    fn floor(&self) -> usize {
        match self.mode.promise {
            Promise::All => self.acknowledged,
            Promise::AllButNewest => self.acknowledged.saturating_sub(1).max(self.settled),
            Promise::Checkpointed | Promise::Nothing => self.settled,
        }
    }

    /// The text of a transaction's row.
    fn body(&self, transaction: usize, part: usize) -> String {
        let seed = mix(self.begun[transaction - 1] ^ part as u64);
        let len = Rng::new(seed).magnitude(4000) as usize;
        let bytes = pattern_vec(seed, 0, len);
        bytes.into_iter().map(|byte| char::from(b'a' + byte % 26)).collect()
    }

    /// How many rows a transaction inserts; now and then more than SQLite's cache holds.
    fn parts(&self, transaction: usize) -> usize {
        let mut rng = Rng::new(self.begun[transaction - 1]);
        if rng.percent(10) { 40 } else { rng.range(1, 5) as usize }
    }

    /// The rows after the first `last` transactions.
    fn rows(&self, last: usize) -> Vec<Row> {
        let first = (last + 1).saturating_sub(KEPT).max(1);
        let transactions = (first..=last).flat_map(|transaction| {
            (0..self.parts(transaction)).map(move |part| (transaction, part))
        });
        transactions
            .map(|(transaction, part)| {
                let by = transaction + REWRITTEN;
                let body = if part == 0 && by <= last {
                    self.body(by, usize::MAX)
                } else {
                    self.body(transaction, part)
                };
                (transaction, part, body)
            })
            .collect()
    }

    /// Statements of a transaction; the first also makes the tables.
    fn statements(&self, transaction: usize) -> String {
        let mut sql = String::from("BEGIN;\n");
        if transaction == 1 {
            sql.push_str("CREATE TABLE state(n INTEGER);\nINSERT INTO state VALUES(0);\n");
            sql.push_str("CREATE TABLE t(tx INTEGER, part INTEGER, body TEXT);\n");
            sql.push_str("CREATE UNIQUE INDEX k ON t(tx, part);\nCREATE INDEX b ON t(body);\n");
        }
        for part in 0..self.parts(transaction) {
            let body = self.body(transaction, part);
            sql.push_str(&format!("INSERT INTO t VALUES({transaction},{part},'{body}');\n"));
        }
        if let Some(before) = transaction.checked_sub(REWRITTEN).filter(|before| *before > 0) {
            let body = self.body(transaction, usize::MAX);
            sql.push_str(&format!("UPDATE t SET body='{body}' WHERE tx={before} AND part=0;\n"));
        }
        if let Some(old) = transaction.checked_sub(KEPT) {
            sql.push_str(&format!("DELETE FROM t WHERE tx<={old};\n"));
        }
        sql.push_str(&format!("UPDATE state SET n={transaction};\nCOMMIT;\n"));
        sql.push_str(&format!("SELECT 'acknowledged {transaction}';\n"));
        sql
    }

    fn transact(&mut self, session: &mut Session, until: &Until<'_>) -> Result<()> {
        self.begun.push(self.rng.next_u64());
        let transaction = self.begun.len();
        session.say(&self.statements(transaction))?;
        session.expect(&format!("acknowledged {transaction}"))?;
        ensure!(!until.is_dying(), DOUBTFUL);
        self.acknowledged = transaction;
        self.counts.acknowledged += 1;
        if self.mode.journal == "WAL" && transaction.is_multiple_of(CHECKPOINT) {
            session.say("PRAGMA wal_checkpoint;\n")?;
            let said = session.line()?;
            let numbers: Vec<&str> = said.split('|').collect();
            ensure!(
                numbers.len() == 3 && numbers[0] == "0" && numbers[1] == numbers[2],
                "a checkpoint of the only connection is not complete: {said}"
            );
            ensure!(!until.is_dying(), DOUBTFUL);
            if self.mode.promise != Promise::Nothing {
                self.settled = transaction;
            }
        }
        Ok(())
    }

    /// Number of transactions in the database and its rows; none if it has no tables.
    fn read(&self, root: &Path) -> Result<(usize, Vec<Row>)> {
        let file = self.file(root);
        if !file.exists() {
            return Ok((0, Vec::new()));
        }
        let sql = "PRAGMA integrity_check; SELECT n FROM state; SELECT tx, part, body FROM t ORDER BY tx, part;";
        let said = tools::run(tools::command("sqlite3")?.arg("-batch").arg(&file).arg(sql))?;
        let Output { stdout, stderr, code, .. } = &said;
        let mut lines = stdout.lines();
        let check = lines.next().unwrap_or_default();
        ensure!(check == "ok", "integrity_check says: {stdout}{stderr}");
        if stderr.contains("no such table: state") {
            return Ok((0, Vec::new()));
        }
        ensure!(*code == Some(0), "sqlite3 fails: {stderr}");
        let number = lines.next().and_then(|line| line.parse().ok());
        let number = number.with_context(|| format!("no number of transactions: {stdout}"))?;
        let row = |line: &str| -> Option<Row> {
            let mut fields = line.splitn(3, '|');
            let transaction = fields.next()?.parse().ok()?;
            Some((transaction, fields.next()?.parse().ok()?, fields.next()?.to_owned()))
        };
        let rows = lines.map(|line| row(line).with_context(|| format!("an odd row: {line}")));
        Ok((number, rows.collect::<Result<_>>()?))
    }

    fn start(&self, root: &Path) -> Result<Session> {
        let file = self.file(root);
        std::fs::create_dir_all(root.join(&self.name))?;
        let sqlite3 = &mut tools::command("sqlite3")?;
        let mut session = Session::new(sqlite3.args(["-batch", "-bail"]).arg(&file))?;
        let Mode { journal, synchronous, .. } = self.mode;
        // A small cache makes large transactions spill pages into the database before they commit.
        session.say(&format!(
            "PRAGMA cache_size=12;\nPRAGMA synchronous={synchronous};\n\
             PRAGMA journal_mode={journal};\nPRAGMA synchronous;\n"
        ))?;
        session.expect(&journal.to_lowercase())?;
        session.expect(match synchronous {
            "OFF" => "0",
            "NORMAL" => "1",
            "FULL" => "2",
            _ => "3",
        })?;
        Ok(session)
    }
}

impl Job for Database {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, root: &Path, until: &Until<'_>) -> Result<()> {
        let mut session = self.start(root)?;
        let mut outcome = Ok(());
        while outcome.is_ok() && !until.is_enough() {
            outcome = self.transact(&mut session, until);
        }
        // It lives on: at its end SQLite would checkpoint.
        self.session = Some(session);
        outcome
    }

    fn end(&mut self) {
        self.session = None;
    }

    fn verify(&self, root: &Path) -> Result<()> {
        let (number, rows) = self.read(root)?;
        let (floor, newest) = (self.floor(), self.begun.len());
        ensure!(
            (floor..=newest).contains(&number),
            "{number} transactions are there; {} were acknowledged, up to {floor} must be there, \
             {newest} were begun",
            self.acknowledged
        );
        let expected = self.rows(number);
        let differs =
            (0..rows.len().max(expected.len())).find(|at| rows.get(*at) != expected.get(*at));
        if let Some(at) = differs {
            let short = |row: Option<&Row>| match row {
                Some((transaction, part, body)) => {
                    format!("transaction {transaction} part {part} of {} bytes", body.len())
                }
                None => "nothing".to_owned(),
            };
            bail!(
                "after {number} transactions ({} rows for {}): found {}, expected {}",
                rows.len(),
                expected.len(),
                short(rows.get(at)),
                short(expected.get(at))
            );
        }
        Ok(())
    }

    fn go_on(&mut self, root: &Path) -> Result<()> {
        let (number, _) = self.read(root)?;
        self.counts.lost_as_permitted += self.acknowledged.saturating_sub(number) as u64;
        self.begun.truncate(number);
        if self.rng.percent(15) {
            let dir = root.join(&self.name);
            if dir.exists() {
                std::fs::remove_dir_all(&dir)?;
                // A database that comes back would be an older one.
                std::fs::File::open(root)?.sync_all()?;
            }
            self.begun.clear();
        }
        self.acknowledged = self.begun.len();
        self.settled = self.begun.len();
        Ok(())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
