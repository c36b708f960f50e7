//! Rules about the sources: which module may know what, and where a rule of another program is told.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules that policies are built on.
const BELOW_POLICIES: [&str; 2] = ["inode", "map"];
/// What may know which policies there are: they themselves, the option and its name, the crate's
/// interface, the mount that makes one, and recovery, which chooses one.
const KNOW_POLICIES: [&str; 7] =
    ["fsync/", "options.rs", "lib.rs", "vfs.rs", "fs/mod.rs", "fs/mount.rs", "fs/recover.rs"];
/// Ways to tell one policy from another.
const POLICY_NAMES: [&str; 4] =
    ["FsyncPolicyKind", "FsyncPolicy", "options.fsync", "fsync_policy.name"];
/// The page on fast commits and other replays.
const PAGE: &str = "docs/fast-commit-compatibility.md";
/// The module that it is about.
const OWNER: &str = "crates/fjord-format/src/jbd2/fast_commit/compat.rs";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The Rust sources below `dir`, by their path from there.
fn sources(dir: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(next) = dirs.pop() {
        let entries = fs::read_dir(&next).unwrap_or_else(|error| panic!("{next:?}: {error}"));
        for entry in entries {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(dir).expect("it is below").to_string_lossy();
                found.push((name.into_owned(), read(&path)));
            }
        }
    }
    found.sort();
    found
}

fn engine() -> Vec<(String, String)> {
    let sources = sources(&repository().join("crates/fjord/src"));
    assert!(sources.len() > 80, "{} sources of the engine", sources.len());
    sources
}

/// The code of a line, without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Whether `code` names the module `fsync`: as a word of its own that is not a method.
fn names_fsync(code: &str) -> bool {
    const WORD: &str = "fsync";
    code.match_indices(WORD).any(|(at, _)| {
        let before = code[..at].bytes().next_back();
        let after = code[at + WORD.len()..].bytes().next();
        !before.is_some_and(|byte| is_of_word(byte) || byte == b'.' || byte == b'"')
            && !after.is_some_and(is_of_word)
    })
}

/// Whether `text` has `words`, the last of them whole.
fn has_word(text: &str, words: &str) -> bool {
    let ends = |at: usize| text[at + words.len()..].bytes().next();
    text.match_indices(words).any(|(at, _)| !ends(at).is_some_and(is_of_word))
}

/// Whether `code` tells policies apart.
fn names_policy(code: &str) -> bool {
    POLICY_NAMES.iter().any(|name| has_word(code, name))
}

/// Lines of code in `sources` that a rule is broken in.
fn broken(sources: &[(String, String)], is_bad: impl Fn(&str) -> bool) -> Vec<String> {
    let lines = sources.iter().flat_map(|(name, text)| {
        text.lines().enumerate().map(move |(index, line)| (name, index + 1, line))
    });
    lines
        .filter(|(_, _, line)| is_bad(code(line)))
        .map(|(name, number, line)| format!("{name}:{number}: {}", line.trim()))
        .collect()
}

#[test]
fn inodes_and_maps_need_nothing_of_fsync() {
    let below: Vec<_> = engine()
        .into_iter()
        .filter(|(name, _)| BELOW_POLICIES.iter().any(|dir| name.starts_with(&format!("{dir}/"))))
        .collect();
    assert!(below.len() > 12, "{} sources", below.len());
    let found = broken(&below, names_fsync);
    assert!(found.is_empty(), "they know fsync: {found:#?}");
}

#[test]
fn only_the_mount_knows_which_policy_it_has() {
    let others: Vec<_> = engine()
        .into_iter()
        .filter(|(name, _)| !KNOW_POLICIES.iter().any(|known| name.starts_with(known)))
        .collect();
    for module in ["dir/mod.rs", "alloc/inodes.rs", "orphan.rs", "namei/mod.rs", "inode/mod.rs"] {
        assert!(others.iter().any(|(name, _)| name == module), "{module} is not looked at");
    }
    let found = broken(&others, names_policy);
    assert!(found.is_empty(), "a capability of the policy should say it: {found:#?}");
}

#[test]
fn the_rules_bite() {
    for line in [
        "use crate::fsync::Fallback;",
        "use crate::{fsync, file};",
        "    crate::fsync::fsync(fs, inode, false)?;",
        "use crate::fsync as sync;",
    ] {
        assert!(names_fsync(code(line)), "{line}");
    }
    for line in [
        "/// See [`crate::fsync`].",
        "    small_fsync_ns: AtomicU64,",
        "    file.fsync(false)?; // by crate::fsync",
        "fs.fsync_policy.commits_groups()",
    ] {
        assert!(!names_fsync(code(line)), "{line}");
        assert!(!names_policy(code(line)), "{line}");
    }
    for line in [
        "if fs.options.fsync != FsyncPolicyKind::FastCommit {",
        "match self.options.fsync {",
        "if fs.fsync_policy.name() == \"group\" {",
        "fn of(policy: &dyn FsyncPolicy) {}",
    ] {
        assert!(names_policy(code(line)), "{line}");
    }
}

/// The limits of a release of e2fsck are told by the owner of the rules, not where they are obeyed. What
/// orphans have to do with it is another matter.
#[test]
fn limits_of_other_replays_are_told_in_one_place() {
    let mut found = Vec::new();
    for name in ["fjord", "fjord-journal", "fjord-format"] {
        for (path, text) in sources(&repository().join("crates").join(name).join("src")) {
            let is_known = OWNER.ends_with(&format!("{name}/src/{path}"))
                || (name, path.as_str()) == ("fjord", "orphan.rs");
            if !is_known && text.contains("1.47") {
                found.push(format!("{name}/src/{path}"));
            }
        }
    }
    assert!(found.is_empty(), "they tell of e2fsck 1.47: {found:?}");
}

/// The rows of the page, cell by cell.
fn rows(page: &str) -> Vec<Vec<&str>> {
    page.lines()
        .filter(|line| line.starts_with("| "))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect()
}

/// Words in backquotes.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Each rule has a row, each row a place and tests, and all of them exist.
#[test]
fn the_page_names_rules_places_and_tests_that_exist() {
    let page = read(&repository().join(PAGE));
    let rows: Vec<_> = rows(&page).into_iter().filter(|row| row.len() == 4).collect();
    let rows = &rows[1..];
    assert!(rows.len() > 10, "{} rows", rows.len());
    let owner = read(&repository().join(OWNER));
    for rule in owner.lines().filter_map(|line| line.strip_prefix("pub fn ")) {
        let name = rule.split('(').next().unwrap_or_default();
        let name = format!("`compat::{name}`");
        assert!(rows.iter().any(|row| row[2].contains(&name)), "no row has {name}");
    }
    let all: Vec<String> =
        sources(&repository().join("crates")).into_iter().map(|(_, text)| text).collect();
    for row in rows {
        let is_there = |start: &str| all.iter().any(|text| has_word(text, start));
        assert!(quoted(row[2]).count() > 0 && quoted(row[3]).count() > 0, "{row:?}");
        for name in quoted(row[2]) {
            let last = name.rsplit("::").next().unwrap_or(name);
            let is_there =
                ["fn", "mod", "struct"].iter().any(|kind| is_there(&format!("{kind} {last}")));
            assert!(is_there, "{name} of {row:?} does not exist");
        }
        for name in quoted(row[3]) {
            assert!(
                is_there(&format!("#[test]\n    fn {name}"))
                    || is_there(&format!("#[test]\nfn {name}")),
                "{name} of {row:?} is no test"
            );
        }
    }
}
