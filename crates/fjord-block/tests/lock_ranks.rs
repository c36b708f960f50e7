//! The order of locks: inversions panic, `docs/locking.md` has the ranks of the code, and no lock is
//! outside the wrapper.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fjord_block::lock::Rank;

/// Crates whose threads hold no lock of the system: tools, and what tests it.
const EXEMPT: [&str; 3] = ["fjord-bench", "fjord-crash", "fjord-testkit"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Rows of the tables in `docs/locking.md` that begin with a rank and its name.
fn documented() -> BTreeMap<u16, String> {
    let text = fs::read_to_string(root().join("docs/locking.md")).expect("docs/locking.md");
    let mut rows = BTreeMap::new();
    for line in text.lines() {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let (Some(number), Some(name)) = (cells.next(), cells.next()) else { continue };
        let name = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'));
        let (Ok(number), Some(name)) = (number.parse(), name) else { continue };
        let before = rows.insert(number, name.to_owned());
        assert_eq!(before, None, "rank {number} has two rows");
    }
    rows
}

/// Sources of the crates that are not exempt, without their unit tests.
fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join("crates")).expect("crates") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if !EXEMPT.contains(&name.as_str()) {
            read_sources(&path.join("src"), &mut found);
        }
    }
    found
}

fn read_sources(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs")
            && !path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"))
        {
            let text = fs::read_to_string(&path).expect("a source");
            let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
            found.push((path, text[..end].to_owned()));
        }
    }
}

/// Whether a source names a lock that is not in the order.
fn has_foreign_lock(text: &str) -> bool {
    let is_lock = |word: &str| ["Mutex", "RwLock", "Condvar"].contains(&word);
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code: String = code.flat_map(|line| [line, "\n"]).collect();
    let from_std = code.split("std::sync::").skip(1).any(|rest| {
        let names = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default(),
            None => rest.split([';', '<', '(', ')', ',', ' ', '\n']).next().unwrap_or_default(),
        };
        names.split(|c: char| !c.is_alphanumeric()).any(is_lock)
    });
    from_std || code.contains("parking_lot")
}

#[test]
fn the_documented_ranks_are_those_of_the_code() {
    let code: BTreeMap<_, _> =
        Rank::ALL.iter().map(|rank| (rank.number(), format!("{rank:?}"))).collect();
    assert_eq!(code.len(), Rank::ALL.len());
    assert_eq!(documented(), code);
}

#[test]
fn every_rank_has_a_lock() {
    let sources = sources();
    for rank in Rank::ALL {
        let used = format!("Rank::{rank:?}");
        let is_use = |text: &str| {
            text.match_indices(&used)
                .any(|(at, _)| !text[at + used.len()..].starts_with(|c: char| c.is_alphanumeric()))
        };
        assert!(sources.iter().any(|(_, text)| is_use(text)), "{used} is not used");
    }
}

#[test]
fn no_lock_is_outside_the_order() {
    assert!(has_foreign_lock("use std::sync::{Arc, Mutex};"));
    assert!(has_foreign_lock("static A: std::sync::RwLock<u8> = x;"));
    assert!(has_foreign_lock("use parking_lot::Mutex;"));
    assert!(!has_foreign_lock("use std::sync::{Arc, OnceLock}; use fjord_block::lock::Mutex;"));
    let sources = sources();
    assert!(sources.len() > 100, "{} sources", sources.len());
    // The primitives, and those of a model check.
    let primitives =
        ["primitive.rs", "model.rs"].map(|name| Path::new("fjord-block/src/lock").join(name));
    let is_primitive = |path: &PathBuf| primitives.iter().any(|own| path.ends_with(own));
    let foreign: Vec<_> = sources
        .iter()
        .filter(|(path, text)| !is_primitive(path) && has_foreign_lock(text))
        .map(|(path, _)| path)
        .collect();
    assert!(foreign.is_empty(), "locks outside fjord_block::lock: {foreign:?}");
}

#[cfg(debug_assertions)]
mod order {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Duration;

    use fjord_block::lock::{Condvar, Mutex, MutexGuard, Rank, RwLock, Turn};

    /// The message of the panic in `act`.
    fn refused(act: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(act)).expect_err("an inversion");
        panic.downcast_ref::<String>().expect("a message").clone()
    }

    #[test]
    fn an_inversion_panics_with_both_names() {
        let (low, high) = (Mutex::new(Rank::Resize, ()), Mutex::new(Rank::Rename, ()));
        let message = refused(|| {
            let _high = high.lock();
            let _low = low.lock();
        });
        assert!(message.contains("Resize (rank 110)"), "{message}");
        assert!(message.contains("Rename (rank 120)"), "{message}");
        // Nothing is held any more.
        let _low = low.lock();
        let _high = high.lock();
    }

    #[test]
    fn the_order_of_release_does_not_matter() {
        let (low, mid) = (Mutex::new(Rank::Resize, ()), Mutex::new(Rank::Rename, ()));
        let high = RwLock::new(Rank::InodeState, ());
        let first = low.lock();
        let second = high.write();
        drop(first);
        let message = refused(|| drop(mid.lock()));
        assert!(message.contains("InodeState"), "{message}");
        drop(second);
        let _mid = mid.lock();
        let _high = high.read();
    }

    #[test]
    fn one_rank_twice_needs_keys_in_order() {
        let locks = [RwLock::new(Rank::InodeState, ()), RwLock::new(Rank::InodeState, ())];
        let message = refused(|| {
            let _first = locks[0].read();
            let _second = locks[1].read();
        });
        assert!(message.contains("InodeState"), "{message}");
        refused(|| {
            let _same = (locks[0].read(), locks[0].read());
        });
        refused(|| {
            let _second = locks[1].write_in_order(2);
            let _first = locks[0].read_in_order(1);
        });
        let _first = locks[0].write();
        let _second = locks[1].write_in_order(1);
    }

    #[test]
    fn an_attempt_is_exempt_and_counts_afterwards() {
        let (low, high) = (Mutex::new(Rank::Resize, ()), Mutex::new(Rank::InodeState, ()));
        let mid = Mutex::new(Rank::Rename, ());
        let held = high.lock();
        let tried = low.try_lock().expect("it is free");
        drop(held);
        let _mid = mid.lock();
        drop(tried);
        refused(|| drop(low.lock()));
    }

    #[test]
    fn a_wait_needs_the_highest_lock() {
        let (low, high) = (Mutex::new(Rank::Resize, ()), Mutex::new(Rank::Rename, ()));
        let wake = Condvar::new();
        let wait = |guard: &mut MutexGuard<'_, ()>| {
            assert!(wake.wait_for(guard, Duration::from_millis(1)).timed_out());
        };
        refused(|| {
            let mut first = low.lock();
            let _second = high.lock();
            wait(&mut first);
        });
        let _first = low.lock();
        let mut second = high.lock();
        wait(&mut second);
        refused(|| drop(low.lock()));
    }

    #[test]
    fn an_unlocked_lock_is_not_held() {
        let (low, high) = (Mutex::new(Rank::Resize, 1), Mutex::new(Rank::Rename, ()));
        let mut guard = high.lock();
        let seen = MutexGuard::unlocked(&mut guard, || *low.lock());
        assert_eq!(seen, 1);
        refused(|| drop(low.lock()));
    }

    #[test]
    fn a_lock_made_by_hand_has_a_rank() {
        let flag = Mutex::new(Rank::JournalState, false);
        let checkpoint = Mutex::new(Rank::Checkpoint, ());
        let take = || {
            let turn = Turn::wait_for(Rank::CommitLock);
            *flag.lock() = true;
            turn.taken()
        };
        let held = take();
        refused(|| drop(take()));
        let guard = checkpoint.lock();
        drop(held);
        let message = refused(|| drop(take()));
        assert!(message.contains("Checkpoint"), "{message}");
        drop(Turn::try_for(Rank::CommitLock).taken());
        drop(guard);
        drop(take());
    }

    #[test]
    fn the_lock_of_a_new_value_keeps_no_order() {
        let (parent, child) =
            (RwLock::new(Rank::InodeState, ()), RwLock::new(Rank::InodeState, ()));
        let handle = Turn::wait_for(Rank::Handle).taken();
        let new = child.write_unshared();
        refused(|| drop(parent.read()));
        let message = catch_unwind(AssertUnwindSafe(|| drop(child.write_unshared())));
        assert!(message.is_err(), "another holder");
        drop((handle, new));
    }
}
