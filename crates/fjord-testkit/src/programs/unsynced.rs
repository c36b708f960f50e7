//! Key-value stores that sync nothing, for file systems that keep the order of all writes: LMDB with `MDB_NOSYNC`,
//! RocksDB as it is by default.
//!
//! What they promise when the power fails: whole transactions, up to one of them. Sources:
//! - LMDB: the manual of `mdb_env_open` on `MDB_NOSYNC`: "if the filesystem preserves write order and the
//!   MDB_WRITEMAP flag is not used, transactions exhibit ACI (atomicity, consistency, isolation) properties and
//!   only lose D (durability)";
//! - RocksDB: "Basic Operations", on asynchronous writes: a crash of the machine may lose the last updates; the log
//!   is read up to the first record that is not whole.
//!
//! Owns the transactions of each store. Invariant: what a store holds after its first n transactions follows from
//! the seeds of these alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::session::Session;
use super::{Counts, Job, Until};
use crate::rng::{Rng, mix, pattern_vec};
use crate::tools;

/// Opens stores of both kinds; see its head.
const PROGRAM: &str = include_str!("unsynced.py");

const KEYS: u64 = 150;
/// Most transactions of a store; then it begins anew.
const TRANSACTIONS_MAX: usize = 1500;
/// Key with the number of the newest transaction.
const NUMBER: &str = "number";

/// What a store holds.
type Contents = BTreeMap<String, String>;

/// A store, and the transactions that were begun.
#[derive(Debug)]
pub struct Store {
    /// `lmdb` or `rocksdb`.
    kind: &'static str,
    name: String,
    /// Seeds of the transactions that were begun, the first is number 1.
    begun: Vec<u64>,
    acknowledged: usize,
    /// Transactions up to this one were found after a recovery.
    settled: usize,
    session: Option<Session>,
    rng: Rng,
    counts: Counts,
}

impl Store {
    /// One of each kind.
    pub fn all(seed: u64) -> Vec<Store> {
        ["lmdb", "rocksdb"].into_iter().map(|kind| Store::new(kind, seed)).collect()
    }

    fn new(kind: &'static str, seed: u64) -> Store {
        let name = format!("unsynced-{kind}");
        let salt = name.bytes().fold(seed, |salt, byte| mix(salt ^ u64::from(byte)));
        Store {
            kind,
            name,
            begun: Vec::new(),
            acknowledged: 0,
            settled: 0,
            session: None,
            rng: Rng::new(salt),
            counts: Counts::default(),
        }
    }

    fn dir(&self, root: &Path) -> PathBuf {
        root.join(&self.name)
    }

    /// What a transaction sets, and what it deletes.
    fn changes(&self, transaction: usize) -> Vec<(String, Option<String>)> {
        let seed = self.begun[transaction - 1];
        let mut rng = Rng::new(seed);
        let count = if rng.percent(10) { 40 } else { rng.range(1, 5) };
        let mut changes: Vec<(String, Option<String>)> = (0..count)
            .map(|part| {
                let key = format!("k{:03}", rng.below(KEYS));
                let value = (!rng.percent(20)).then(|| {
                    let len = rng.magnitude(3000) as usize + 1;
                    let bytes = pattern_vec(mix(seed ^ part), 0, len);
                    bytes.into_iter().map(|byte| char::from(b'a' + byte % 26)).collect()
                });
                (key, value)
            })
            .collect();
        changes.push((NUMBER.to_owned(), Some(transaction.to_string())));
        changes
    }

    /// Contents after the first `count` transactions.
    fn contents(&self, count: usize) -> Contents {
        let mut contents = Contents::new();
        for (key, value) in (1..=count).flat_map(|transaction| self.changes(transaction)) {
            match value {
                Some(value) => drop(contents.insert(key, value)),
                None => drop(contents.remove(&key)),
            }
        }
        contents
    }

    fn program(&self, what: &str, root: &Path) -> Result<Command> {
        // The libraries come with these packages.
        tools::require(&["ldb", tools::LMDB])?;
        let mut python = tools::command("python3")?;
        python.args(["-c", PROGRAM, self.kind, what]).arg(self.dir(root));
        Ok(python)
    }

    fn transact(&mut self, session: &mut Session, until: &Until<'_>) -> Result<()> {
        self.begun.push(self.rng.next_u64());
        let transaction = self.begun.len();
        let mut text = String::new();
        for (key, value) in self.changes(transaction) {
            match value {
                Some(value) => text.push_str(&format!("set {key} {value}\n")),
                None => text.push_str(&format!("del {key}\n")),
            }
        }
        text.push_str(&format!("commit {transaction}\n"));
        session.say(&text)?;
        session.expect(&format!("acknowledged {transaction}"))?;
        if !until.is_dying() {
            self.acknowledged = transaction;
            self.counts.acknowledged += 1;
        }
        Ok(())
    }

    /// What the store holds.
    fn read(&self, root: &Path) -> Result<Contents> {
        if !self.dir(root).exists() {
            return Ok(Contents::new());
        }
        let said = tools::run(&mut self.program("read", root)?)?.ok()?.stdout;
        let pair = |line: &str| {
            let (key, value) = line.split_once(' ').context("a line without a value")?;
            Ok((key.to_owned(), value.to_owned()))
        };
        said.lines().map(pair).collect()
    }

    fn number(contents: &Contents) -> Result<usize> {
        match contents.get(NUMBER) {
            Some(number) => Ok(number.parse()?),
            None if contents.is_empty() => Ok(0),
            None => bail!("{} keys, and no number", contents.len()),
        }
    }
}

/// Until the file system is dead, where it is to die, so that it dies in the middle of something.
fn goes_on(until: &Until<'_>) -> bool {
    !until.is_enough() || until.is_dying()
}

impl Job for Store {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, root: &Path, until: &Until<'_>) -> Result<()> {
        std::fs::create_dir_all(self.dir(root))?;
        let mut session = Session::new(&mut self.program("write", root)?)?;
        let mut outcome = Ok(());
        while outcome.is_ok() && goes_on(until) && self.begun.len() < TRANSACTIONS_MAX {
            outcome = self.transact(&mut session, until);
        }
        // It lives on: at its end a store would tidy up.
        self.session = Some(session);
        outcome
    }

    fn end(&mut self) {
        self.session = None;
    }

    fn verify(&self, root: &Path) -> Result<()> {
        let found = self.read(root)?;
        let number = Self::number(&found)?;
        ensure!(
            (self.settled..=self.begun.len()).contains(&number),
            "{number} transactions are there, of {} that were begun; {} were found before",
            self.begun.len(),
            self.settled
        );
        let expected = self.contents(number);
        let differs = |key: &&String| found.get(*key) != expected.get(*key);
        if let Some(key) = found.keys().chain(expected.keys()).find(differs) {
            bail!("after {number} transactions {key:?} is not as they left it");
        }
        if self.kind == "rocksdb" && self.dir(root).exists() {
            let mut ldb = tools::command("ldb")?;
            let db = format!("--db={}", self.dir(root).display());
            let said = tools::run(ldb.args([&db, "checkconsistency"]))?.ok()?.stdout;
            ensure!(said.contains("OK"), "ldb checkconsistency says {said}");
        }
        Ok(())
    }

    fn go_on(&mut self, root: &Path) -> Result<()> {
        let number = Self::number(&self.read(root)?)?;
        self.counts.lost_as_permitted += self.acknowledged.saturating_sub(number) as u64;
        self.begun.truncate(number);
        if self.rng.percent(15) || number == TRANSACTIONS_MAX {
            let dir = self.dir(root);
            if dir.exists() {
                std::fs::remove_dir_all(&dir)?;
                // A store that comes back would be an older one.
                std::fs::File::open(root)?.sync_all()?;
            }
            self.begun.clear();
        }
        self.acknowledged = self.begun.len();
        // What was found is durable: a recovery has written it.
        self.settled = self.begun.len();
        Ok(())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// Syncs the file system all the time, so that something is on its way to the disk whenever it dies. No store asked
/// for that, so none may rely on it.
#[derive(Debug)]
pub struct Syncs;

impl Job for Syncs {
    fn name(&self) -> &str {
        "unsynced-syncs"
    }

    fn run(&mut self, root: &Path, until: &Until<'_>) -> Result<()> {
        let root = std::fs::File::open(root)?;
        while goes_on(until) {
            rustix::fs::syncfs(&root)?;
        }
        Ok(())
    }

    fn verify(&self, _root: &Path) -> Result<()> {
        Ok(())
    }

    fn go_on(&mut self, _root: &Path) -> Result<()> {
        Ok(())
    }

    fn counts(&self) -> Counts {
        Counts::default()
    }
}
