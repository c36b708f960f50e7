//! The promise of `data=journal` and whole commits: after a power cut, everything is as it was at one point in the
//! order of all calls.
//!
//! Owns the comparison of a tree with each state that the model has had. It is stricter than
//! [`crate::check`], which asks each aspect for itself. Invariant: only calls that are one step in the engine
//! are judged ([`is_one_step`]).

use fjord::FallocMode;

use crate::check::{Found, Kind, Problem, names_seen};
use crate::model::{History, Model, ROOT};
use crate::ops::Op;
use crate::tree::Tree;

/// Most bytes that a write may have to be one step on the small logs of explored images.
const BYTES_MAX: u64 = 16 << 10;

/// Whether a call is in one transaction: all but long writes, and those that change blocks of a range.
pub fn is_one_step(op: &Op) -> bool {
    match op {
        Op::Append(_, len) | Op::Write(_, _, len) => *len <= BYTES_MAX,
        Op::Fallocate(_, mode, ..) => (*mode - FallocMode::KEEP_SIZE).is_empty(),
        Op::Grow(_) => false,
        _ => true,
    }
}

/// Moments that are still possible.
struct Moments {
    /// When the newest change that each has began, ascending; the first is the beginning.
    ends: Vec<u64>,
    possible: Vec<bool>,
    /// What was compared last while one was possible, and before it.
    last: String,
}

impl Moments {
    fn new(model: &Model, cut: u64) -> Moments {
        let mut ends = model.stamps();
        ends.retain(|&end| end < cut);
        ends.push(0);
        ends.sort_unstable();
        ends.dedup();
        Moments { possible: vec![true; ends.len()], ends, last: String::new() }
    }

    /// Keeps those at which the aspect was as `is_as_seen` wants it.
    fn keep<T: PartialEq + Clone>(
        &mut self,
        history: &History<T>,
        is_as_seen: impl Fn(&T) -> bool,
        what: impl Fn() -> String,
    ) -> Result<(), Problem> {
        let before = self.range();
        for (end, possible) in self.ends.iter().zip(&mut self.possible) {
            *possible &= is_as_seen(history.at(*end));
        }
        if self.possible.contains(&true) {
            self.last = what();
            return Ok(());
        }
        let text = format!(
            "no moment has all that is there: the rest is as after changes {before}, {} too, and not {}",
            self.last,
            what()
        );
        Err(Problem::new(Kind::OrderBroken, text))
    }

    /// The first and the last that are possible.
    fn range(&self) -> String {
        let mut possible = self.ends.iter().zip(&self.possible).filter(|(_, possible)| **possible);
        let first = possible.next().map_or(0, |it| *it.0);
        format!("{first} to {}", possible.next_back().map_or(first, |it| *it.0))
    }
}

/// Compares a tree with all moments before `cut`.
///
/// # Errors
/// `OrderBroken` if it is like none of them.
pub(crate) fn check(tree: &Tree, found: &Found, model: &Model, cut: u64) -> Result<(), Problem> {
    let mut moments = Moments::new(model, cut);
    for (id, object) in model.objects().iter().enumerate() {
        let seen = tree.inodes.get(&object.ino).filter(|_| found.get(&object.ino) == Some(&id));
        let of = |aspect: &'static str| move || format!("the {aspect} of inode {}", object.ino);
        let Some(seen) = seen else {
            if id != ROOT {
                moments.keep(&object.names, |names| names.is_empty(), of("absence"))?;
            }
            continue;
        };
        if id != ROOT {
            let names = names_seen(seen, found);
            moments.keep(&object.names, |then| *then == names, of("names"))?;
        }
        moments.keep(&object.attrs, |then| *then == seen.attrs, of("attributes"))?;
        moments.keep(&object.xattrs, |then| *then == seen.xattrs, of("extended attributes"))?;
        moments.keep(&object.content, |then| *then == seen.content, of("content"))?;
    }
    Ok(())
}
