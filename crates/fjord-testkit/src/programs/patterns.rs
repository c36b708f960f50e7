//! The ways in which programs make files and names durable.
//!
//! Owns, for each of them, what Linux' ext4 keeps once the last call of the pattern has returned:
//!
//! | job | calls | then durable |
//! |---|---|---|
//! | `replace-F-D` | write aside, F of the file, rename over, D of the directory | that version or a newer one, whole; the name at any time |
//! | `names-D` | create or unlink, D of the directory | that the name is there, or is not |
//! | `link-D`, `link-file` | link or unlink, D of the directory or fsync of the file | that the link is there, or is not |
//! | `chain-D` | mkdir in mkdir in mkdir, a file, D of all of them | the whole path |
//! | `move-target`, `move-both` | rename between directories, fsync of the new one or of both | the file where it is now; in one of them, and not in both, at any time |
//! | `unnamed` | O_TMPFILE, write, fsync, linkat, fsync of the directory | the name and the content |
//! | `append-o_dsync`, `append-rwf_dsync` | write to a file opened with O_DSYNC, pwritev2 with RWF_DSYNC | what was written |
//! | `append-range` | write, sync_file_range | nothing |
//! | `msync` | stores to a shared mapping, msync(MS_SYNC) | what was stored |
//!
//! F and D are fsync or fdatasync. Sources: fsync(2), open(2), pwritev2(2), sync_file_range(2) and
//! msync(2) of the Linux man-pages; what exceeds them (a link made durable by its file, a
//! rename with one directory synced) follows from ext4's transactions, and Linux itself is put to
//! the same test.
//!
//! Invariant: [`Ledger::names`] has every name that the job ever made since it began, with all
//! states that are possible for it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{IoSlice, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags},
    io::ReadWriteFlags,
    mm::{Advice, MapFlags, MlockFlags, MsyncFlags, ProtFlags},
};

use super::{Counts, Job, Until};
use crate::rng::{Rng, mix, pattern_vec};

/// Names that a job uses in turn.
const SLOTS: u64 = 24;
/// An append-only file is left for the next one at this size.
const LOG_BYTES: u64 = 2 << 20;
/// Broken promises that a message lists.
const SHOWN: usize = 5;
const PAGE: usize = 4096;
const PAGES: usize = 16;
const WORDS: usize = PAGE / 8;

/// A system call that syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// fsync
    Fsync,
    /// fdatasync
    Fdatasync,
}

impl Sync {
    const BOTH: [Sync; 2] = [Sync::Fsync, Sync::Fdatasync];

    fn name(self) -> &'static str {
        match self {
            Sync::Fsync => "fsync",
            Sync::Fdatasync => "fdatasync",
        }
    }

    fn file(self, file: &File) -> std::io::Result<()> {
        match self {
            Sync::Fsync => file.sync_all(),
            Sync::Fdatasync => file.sync_data(),
        }
    }

    fn path(self, path: &Path) -> Result<()> {
        Ok(self.file(&File::open(path)?)?)
    }
}

/// How a file is appended to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Append {
    ODsync,
    RwfDsync,
    Range,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Replace {
        file: Sync,
        directory: Sync,
    },
    Names(Sync),
    /// None: the file is synced instead of the directory.
    Link(Option<Sync>),
    Chain(Sync),
    Move {
        both: bool,
    },
    Unnamed,
    Append(Append),
    Msync,
}

impl Kind {
    fn all() -> Vec<Kind> {
        let replace = Sync::BOTH.into_iter().flat_map(|file| {
            Sync::BOTH.into_iter().map(move |directory| Kind::Replace { file, directory })
        });
        let each = Sync::BOTH
            .into_iter()
            .flat_map(|sync| [Kind::Names(sync), Kind::Link(Some(sync)), Kind::Chain(sync)]);
        let others = [
            Kind::Link(None),
            Kind::Move { both: false },
            Kind::Move { both: true },
            Kind::Unnamed,
            Kind::Append(Append::ODsync),
            Kind::Append(Append::RwfDsync),
            Kind::Append(Append::Range),
            Kind::Msync,
        ];
        replace.chain(each).chain(others).collect()
    }

    fn name(self) -> String {
        match self {
            Kind::Replace { file, directory } => {
                format!("replace-{}-{}", file.name(), directory.name())
            }
            Kind::Names(sync) => format!("names-{}", sync.name()),
            Kind::Link(sync) => format!("link-{}", sync.map_or("file", Sync::name)),
            Kind::Chain(sync) => format!("chain-{}", sync.name()),
            Kind::Move { both: true } => "move-both".to_owned(),
            Kind::Move { both: false } => "move-target".to_owned(),
            Kind::Unnamed => "unnamed".to_owned(),
            Kind::Append(Append::ODsync) => "append-o_dsync".to_owned(),
            Kind::Append(Append::RwfDsync) => "append-rwf_dsync".to_owned(),
            Kind::Append(Append::Range) => "append-range".to_owned(),
            Kind::Msync => "msync".to_owned(),
        }
    }
}

/// What a name may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Directory,
    /// A file with all of the pattern of a seed.
    Whole {
        seed: u64,
        len: u64,
    },
    /// A file with a part of it, and zeros for what is missing.
    Part {
        seed: u64,
        len: u64,
    },
    /// A file that is judged otherwise.
    Other,
}

impl State {
    /// Whether the name's file, or its absence, fits.
    fn fits(self, found: &Found) -> bool {
        match (self, found) {
            (State::Absent, Found::Absent)
            | (State::Directory, Found::Directory)
            | (State::Other, Found::File(_)) => true,
            (State::Whole { seed, len }, Found::File(content)) => {
                content.len() as u64 == len && *content == pattern_vec(seed, 0, content.len())
            }
            (State::Part { seed, len }, Found::File(content)) => {
                let expected = pattern_vec(seed, 0, content.len());
                let same = |(found, expected): (&u8, &u8)| found == expected || *found == 0;
                content.len() as u64 <= len && content.iter().zip(&expected).all(same)
            }
            _ => false,
        }
    }
}

enum Found {
    Absent,
    Directory,
    File(Vec<u8>),
}

impl Found {
    fn at(path: &Path) -> Result<Found> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Found::Absent),
            Err(error) => Err(error.into()),
            Ok(meta) if meta.is_dir() => Ok(Found::Directory),
            Ok(_) => Ok(Found::File(fs::read(path)?)),
        }
    }

    fn word(&self) -> String {
        match self {
            Found::Absent => "absent".to_owned(),
            Found::Directory => "a directory".to_owned(),
            Found::File(content) => {
                let data = content.iter().filter(|byte| **byte != 0).count();
                format!("a file of {} bytes, {data} of them not zero", content.len())
            }
        }
    }
}

/// An append-only file.
#[derive(Debug, Clone, Copy)]
struct Log {
    seed: u64,
    promised: u64,
    written: u64,
}

/// What the job knows of its directory.
#[derive(Debug, Default)]
struct Ledger {
    /// The directory itself is durable.
    ready: bool,
    /// Names below the directory: the states since the last promise, the last is the current one.
    names: BTreeMap<String, Vec<State>>,
    /// Exactly one of the two names is there.
    either: Vec<(String, String)>,
    logs: BTreeMap<String, Log>,
    /// Versions of the mapped file's pages: promised, stored.
    pages: Vec<(u64, u64)>,
}

impl Ledger {
    fn current(&self, name: &str) -> State {
        self.names.get(name).and_then(|states| states.last()).copied().unwrap_or(State::Absent)
    }

    /// Before a call that changes the name.
    fn begin(&mut self, name: &str, state: State) {
        self.names.entry(name.to_owned()).or_insert_with(|| vec![State::Absent]).push(state);
    }

    /// After a call that makes the name's current state durable.
    fn promise(&mut self, name: &str) {
        if let Some(states) = self.names.get_mut(name) {
            states.drain(..states.len() - 1);
        }
    }

    fn promise_all(&mut self) {
        self.names.values_mut().for_each(|states| drop(states.drain(..states.len() - 1)));
    }
}

/// A job that makes files and names durable in one way.
#[derive(Debug)]
pub struct Pattern {
    kind: Kind,
    name: String,
    rng: Rng,
    ledger: Ledger,
    step: u64,
    counts: Counts,
}

impl Pattern {
    /// One of each.
    pub fn all(seed: u64) -> Vec<Pattern> {
        let numbered = Kind::all().into_iter().enumerate();
        numbered
            .map(|(number, kind)| Pattern {
                kind,
                name: kind.name(),
                rng: Rng::new(mix(seed ^ (number as u64 + 1000))),
                ledger: Ledger::default(),
                step: 0,
                counts: Counts::default(),
            })
            .collect()
    }

    /// A new file's content: its seed and length.
    fn content(&mut self) -> (u64, u64) {
        (self.rng.next_u64(), 1 + self.rng.magnitude(40_000))
    }

    /// The directory, the files that the steps start from.
    fn prepare(&mut self, dir: &Path) -> Result<()> {
        fs::create_dir(dir)?;
        File::open(dir.parent().context("the root")?)?.sync_all()?;
        self.ledger.ready = true;
        match self.kind {
            Kind::Link(_) => self.durable_file(dir, "base")?,
            Kind::Move { .. } => {
                for name in ["0", "1"] {
                    self.ledger.begin(name, State::Directory);
                    fs::create_dir(dir.join(name))?;
                }
                for slot in 0..4 {
                    self.durable_file(dir, &format!("0/{slot}"))?;
                    self.ledger.either.push((format!("0/{slot}"), format!("1/{slot}")));
                }
                Sync::Fsync.path(&dir.join("0"))?;
                Sync::Fsync.path(dir)?;
                self.ledger.promise_all();
            }
            Kind::Msync => {
                self.ledger.begin("mapped", State::Other);
                let file = File::create(dir.join("mapped"))?;
                file.write_all_at(&[0; PAGE * PAGES], 0)?;
                file.sync_all()?;
                Sync::Fsync.path(dir)?;
                self.ledger.promise("mapped");
                self.ledger.pages = vec![(0, 0); PAGES];
            }
            _ => {}
        }
        Ok(())
    }

    /// A file with content and a name, all durable.
    fn durable_file(&mut self, dir: &Path, name: &str) -> Result<()> {
        let (seed, len) = self.content();
        self.ledger.begin(name, State::Part { seed, len });
        self.ledger.begin(name, State::Whole { seed, len });
        let file = File::create(dir.join(name))?;
        file.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
        file.sync_all()?;
        Sync::Fsync.path(dir)?;
        self.ledger.promise(name);
        Ok(())
    }

    fn replace(&mut self, dir: &Path, file: Sync, directory: Sync) -> Result<()> {
        let name = format!("file-{}", self.rng.below(3));
        let (seed, len) = self.content();
        let aside = format!("{name}.new");
        self.ledger.begin(&aside, State::Part { seed, len });
        let new = File::create(dir.join(&aside))?;
        new.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
        file.file(&new)?;
        self.ledger.begin(&name, State::Whole { seed, len });
        self.ledger.begin(&aside, State::Absent);
        fs::rename(dir.join(&aside), dir.join(&name))?;
        directory.path(dir)?;
        self.ledger.promise(&name);
        self.ledger.promise(&aside);
        Ok(())
    }

    fn names(&mut self, dir: &Path, sync: Sync) -> Result<()> {
        for _ in 0..self.rng.range(1, 4) {
            let name = format!("name-{}", self.rng.below(SLOTS));
            if self.ledger.current(&name) == State::Absent {
                let (seed, len) = self.content();
                self.ledger.begin(&name, State::Part { seed, len });
                let file = File::create_new(dir.join(&name))?;
                file.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
            } else {
                self.ledger.begin(&name, State::Absent);
                fs::remove_file(dir.join(&name))?;
            }
        }
        sync.path(dir)?;
        self.ledger.promise_all();
        Ok(())
    }

    fn link(&mut self, dir: &Path, sync: Option<Sync>) -> Result<()> {
        let name = format!("link-{}", self.rng.below(SLOTS));
        if self.ledger.current(&name) == State::Absent {
            self.ledger.begin(&name, self.ledger.current("base"));
            fs::hard_link(dir.join("base"), dir.join(&name))?;
        } else {
            self.ledger.begin(&name, State::Absent);
            fs::remove_file(dir.join(&name))?;
        }
        match sync {
            Some(sync) => sync.path(dir)?,
            None => Sync::Fsync.path(&dir.join("base"))?,
        }
        self.ledger.promise(&name);
        Ok(())
    }

    fn chain(&mut self, dir: &Path, sync: Sync) -> Result<()> {
        let top = format!("chain-{}", self.rng.below(SLOTS));
        let [middle, low] = [format!("{top}/b"), format!("{top}/b/c")];
        let file = format!("{low}/file");
        if self.ledger.current(&top) == State::Absent {
            for name in [&top, &middle, &low] {
                self.ledger.begin(name, State::Directory);
                fs::create_dir(dir.join(name))?;
            }
            let (seed, len) = self.content();
            self.ledger.begin(&file, State::Part { seed, len });
            self.ledger.begin(&file, State::Whole { seed, len });
            let new = File::create(dir.join(&file))?;
            new.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
            sync.file(&new)?;
            let mut parents = [dir.to_owned(), dir.join(&top), dir.join(&middle), dir.join(&low)];
            if self.rng.percent(50) {
                parents.reverse();
            }
            parents.iter().try_for_each(|parent| sync.path(parent))?;
        } else {
            for name in [&file, &low, &middle, &top] {
                self.ledger.begin(name, State::Absent);
            }
            fs::remove_dir_all(dir.join(&top))?;
            sync.path(dir)?;
        }
        for name in [&top, &middle, &low, &file] {
            self.ledger.promise(name);
        }
        Ok(())
    }

    fn rename(&mut self, dir: &Path, both: bool) -> Result<()> {
        let slot = self.rng.below(4);
        let [mut from, mut to] = [format!("0/{slot}"), format!("1/{slot}")];
        if self.ledger.current(&from) == State::Absent {
            std::mem::swap(&mut from, &mut to);
        }
        let state = self.ledger.current(&from);
        self.ledger.begin(&from, State::Absent);
        self.ledger.begin(&to, state);
        fs::rename(dir.join(&from), dir.join(&to))?;
        Sync::Fsync.path(&dir.join(&to[..1]))?;
        self.ledger.promise(&to);
        if both {
            Sync::Fsync.path(&dir.join(&from[..1]))?;
            self.ledger.promise(&from);
        }
        Ok(())
    }

    fn unnamed(&mut self, dir: &Path) -> Result<()> {
        let name = format!("name-{}", self.rng.below(SLOTS));
        if self.ledger.current(&name) != State::Absent {
            self.ledger.begin(&name, State::Absent);
            fs::remove_file(dir.join(&name))?;
        }
        let (seed, len) = self.content();
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(dir, flags, Mode::from_raw_mode(0o644))?);
        file.write_all_at(&pattern_vec(seed, 0, len as usize), 0)?;
        file.sync_all()?;
        self.ledger.begin(&name, State::Whole { seed, len });
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::linkat(CWD, path, CWD, dir.join(&name), AtFlags::SYMLINK_FOLLOW)?;
        Sync::Fsync.path(dir)?;
        self.ledger.promise(&name);
        Ok(())
    }

    fn append(&mut self, dir: &Path, how: Append) -> Result<()> {
        let full = |log: &Log| log.written >= LOG_BYTES;
        let (name, fresh) = match self.ledger.logs.last_key_value() {
            Some((name, log)) if !full(log) => (name.clone(), false),
            _ => (format!("log-{:04}", self.ledger.logs.len()), true),
        };
        let mut options = File::options();
        options.append(true).create(fresh);
        if how == Append::ODsync {
            options.custom_flags(libc::O_DSYNC);
        }
        if fresh {
            let seed = self.rng.next_u64();
            self.ledger.logs.insert(name.clone(), Log { seed, promised: 0, written: 0 });
            self.ledger.begin(&name, State::Other);
        }
        let mut file = options.open(dir.join(&name))?;
        if fresh {
            Sync::Fsync.path(dir)?;
            self.ledger.promise(&name);
        }
        for _ in 0..self.rng.range(1, 5) {
            let len = 1 + self.rng.magnitude(30_000);
            let log = self.ledger.logs.get_mut(&name).context("made above")?;
            let data = pattern_vec(log.seed, log.written, len as usize);
            let offset = log.written;
            log.written += len;
            match how {
                Append::ODsync => file.write_all(&data)?,
                Append::RwfDsync => {
                    let flags = ReadWriteFlags::DSYNC | ReadWriteFlags::APPEND;
                    let done = rustix::io::pwritev2(&file, &[IoSlice::new(&data)], 0, flags)?;
                    ensure!(done as u64 == len, "pwritev2 wrote {done} of {len} bytes");
                }
                Append::Range => {
                    file.write_all(&data)?;
                    sync_file_range(&file, offset, len)?;
                }
            }
            if how != Append::Range {
                log.promised = log.written;
            }
        }
        Ok(())
    }

    fn msync(&mut self, dir: &Path) -> Result<()> {
        let file = File::options().read(true).write(true).open(dir.join("mapped"))?;
        let mapping = Mapping::new(&file)?;
        for _ in 0..self.rng.range(1, 6) {
            let mut changed = Vec::new();
            for _ in 0..self.rng.range(1, 5) {
                let page = self.rng.below(PAGES as u64) as usize;
                self.ledger.pages[page].1 += 1;
                mapping.store(page, self.ledger.pages[page].1);
                changed.push(page);
            }
            mapping.msync()?;
            for page in changed {
                self.ledger.pages[page].0 = self.ledger.pages[page].1;
            }
        }
        Ok(())
    }

    fn verify_logs(&self, dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
        for (name, log) in &self.ledger.logs {
            let Found::File(found) = Found::at(&dir.join(name))? else { continue };
            let len = found.len() as u64;
            if !(log.promised..=log.written).contains(&len) {
                let Log { promised, written, .. } = log;
                wrong.push(format!("{name}: {len} bytes, promised {promised}, written {written}"));
            }
            let expected = pattern_vec(log.seed, 0, found.len());
            let bad = |at: &usize| {
                found[*at] != expected[*at] && ((*at as u64) < log.promised || found[*at] != 0)
            };
            if let Some(at) = (0..found.len()).find(bad) {
                wrong.push(format!("{name}: wrong at byte {at}, promised {}", log.promised));
            }
        }
        Ok(())
    }

    /// Pages may be a mixture of stores since the last msync, by words.
    fn verify_pages(&self, dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
        if self.ledger.pages.is_empty() {
            return Ok(());
        }
        let Found::File(found) = Found::at(&dir.join("mapped"))? else { return Ok(()) };
        if found.len() != PAGE * PAGES {
            wrong.push(format!("the mapped file has {} bytes", found.len()));
            return Ok(());
        }
        for (page, (promised, stored)) in self.ledger.pages.iter().enumerate() {
            let words = found[page * PAGE..][..PAGE].chunks_exact(8);
            let bad = words.enumerate().find(|(index, bytes)| {
                !(*promised..=*stored).any(|version| word(page, version, *index) == **bytes)
            });
            if let Some((index, bytes)) = bad {
                let older = (0..*promised).rev().find(|old| word(page, *old, index) == *bytes);
                wrong.push(format!(
                    "page {page}, word {index}: promised version {promised}, stored {stored}, found \
                     {older:?}"
                ));
            }
        }
        Ok(())
    }
}

impl Job for Pattern {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, root: &Path, until: &Until<'_>) -> Result<()> {
        let dir = root.join(&self.name);
        self.prepare(&dir)?;
        while !until.is_enough() {
            match self.kind {
                Kind::Replace { file, directory } => self.replace(&dir, file, directory)?,
                Kind::Names(sync) => self.names(&dir, sync)?,
                Kind::Link(sync) => self.link(&dir, sync)?,
                Kind::Chain(sync) => self.chain(&dir, sync)?,
                Kind::Move { both } => self.rename(&dir, both)?,
                Kind::Unnamed => self.unnamed(&dir)?,
                Kind::Append(how) => self.append(&dir, how)?,
                Kind::Msync => self.msync(&dir)?,
            }
            self.step += 1;
            self.counts.acknowledged += 1;
        }
        Ok(())
    }

    fn verify(&self, root: &Path) -> Result<()> {
        let dir = root.join(&self.name);
        if !dir.exists() {
            ensure!(!self.ledger.ready, "the directory is gone");
            return Ok(());
        }
        let mut wrong = Vec::new();
        for (name, states) in &self.ledger.names {
            let found = Found::at(&dir.join(name))?;
            if !states.iter().any(|state| state.fits(&found)) {
                wrong.push(format!("{name} is {}; possible: {states:?}", found.word()));
            }
        }
        let there = |name: &str| dir.join(name).symlink_metadata().is_ok();
        // A file that no promise covers yet may be in neither.
        let promised = |name: &String| self.ledger.names.contains_key(name);
        for (one, other) in self.ledger.either.iter().filter(|(_, other)| promised(other)) {
            if there(one) == there(other) {
                let both = if there(one) { "both" } else { "neither" };
                wrong.push(format!("{both} of {one} and {other} are there"));
            }
        }
        for name in names_below(&dir)? {
            if !self.ledger.names.contains_key(&name) {
                wrong.push(format!("{name} was never made"));
            }
        }
        self.verify_logs(&dir, &mut wrong)?;
        self.verify_pages(&dir, &mut wrong)?;
        let more = wrong.len().saturating_sub(SHOWN);
        let shown = wrong[..wrong.len() - more].join("\n  ");
        ensure!(wrong.is_empty(), "after {} steps: {shown}\n  and {more} more", self.step);
        Ok(())
    }

    fn go_on(&mut self, root: &Path) -> Result<()> {
        let dir = root.join(&self.name);
        if dir.exists() {
            fs::remove_dir_all(dir)?;
            // What comes back would be the job's next directory.
            Sync::Fsync.path(root)?;
        }
        self.ledger = Ledger::default();
        self.step = 0;
        Ok(())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// All names below a directory, relative to it.
fn names_below(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut open: Vec<PathBuf> = vec![PathBuf::new()];
    while let Some(relative) = open.pop() {
        for child in fs::read_dir(dir.join(&relative))? {
            let child = child?;
            let path = relative.join(child.file_name());
            names.push(path.to_str().context("a plain name")?.to_owned());
            if child.file_type()?.is_dir() {
                open.push(path);
            }
        }
    }
    Ok(names)
}

/// A word of a page in one of its versions; version 0 is zeros.
fn word(page: usize, version: u64, index: usize) -> [u8; 8] {
    if version == 0 {
        return [0; 8];
    }
    mix(mix(version) ^ (page * WORDS + index) as u64).to_le_bytes()
}

fn sync_file_range(file: &File, offset: u64, len: u64) -> Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes numbers only, and the descriptor is open.
    let rc = unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, len as i64, flags) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error()).context("sync_file_range");
    }
    Ok(())
}

/// A shared mapping of the pages of a file, locked in memory: a page that had to be read again
/// after the file system died would end the process (SIGBUS).
struct Mapping(*mut u64);

impl Mapping {
    fn new(file: &File) -> Result<Self> {
        // SAFETY: the kernel chooses the address, so no memory in use is replaced.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PAGE * PAGES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let mapping = Mapping(start.cast());
        // Where a page cannot be read, this fails; mlock would try forever (Linux 6.18).
        // SAFETY: the range is the mapping made above, and stays as it is.
        unsafe { rustix::mm::madvise(start, PAGE * PAGES, Advice::LinuxPopulateRead)? };
        // SAFETY: as before.
        unsafe { rustix::mm::mlock_with(start, PAGE * PAGES, MlockFlags::ONFAULT)? };
        Ok(mapping)
    }

    fn store(&self, page: usize, version: u64) {
        for index in 0..WORDS {
            let word = u64::from_ne_bytes(word(page, version, index));
            // SAFETY: page and index lie within the mapping, which lives as long as self; it is
            // aligned to pages. Volatile, since the kernel reads it behind the compiler's back.
            unsafe { self.0.add(page * WORDS + index).write_volatile(word) };
        }
    }

    fn msync(&self) -> Result<()> {
        // SAFETY: the range is the mapping.
        unsafe { rustix::mm::msync(self.0.cast(), PAGE * PAGES, MsyncFlags::SYNC)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), PAGE * PAGES) };
    }
}
