//! Owners of entries: a map from those of the source to those in the image.
//!
//! Invariant: the first matching rule applies; without one an ID is unchanged.

use std::ops::RangeInclusive;

/// Whether a rule is about users or groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdKind {
    /// User IDs.
    User,
    /// Group IDs.
    Group,
}

/// One rule: IDs of a range become others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    kind: IdKind,
    from: RangeInclusive<u32>,
    /// What the first of them becomes.
    to: u32,
    /// The others become the numbers after it; else all become the same.
    shifts: bool,
}

/// Who owns entries in the image. The default keeps owners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    rules: Vec<Rule>,
}

/// Finds the ID of a name; `None` where there is none.
pub type IdOfName<'a> = &'a dyn Fn(IdKind, &str) -> Option<u32>;

impl Owners {
    /// All entries belong to one user and one group.
    pub fn squashed(uid: u32, gid: u32) -> Owners {
        let rule = |kind, to| Rule { kind, from: 0..=u32::MAX, to, shifts: false };
        Owners { rules: vec![rule(IdKind::User, uid), rule(IdKind::Group, gid)] }
    }

    /// Adds rules, one on each line: `u:FROM=TO` for users, `g:FROM=TO` for groups. `FROM` is an
    /// ID, a name, a range `FIRST-LAST` (whose IDs become `TO` and those after it) or `*` for all
    /// others; `TO` is an ID or a name. Empty lines and what stands after `#` are passed over.
    ///
    /// # Errors
    /// What is wrong with which line.
    pub fn add(&mut self, text: &str, id_of_name: IdOfName<'_>) -> Result<(), String> {
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                self.rules.push(parse(line, id_of_name)?);
            }
        }
        Ok(())
    }

    /// The owner and group that an entry of these gets.
    pub fn map(&self, uid: u32, gid: u32) -> (u32, u32) {
        (self.map_id(IdKind::User, uid), self.map_id(IdKind::Group, gid))
    }

    /// What an ID becomes.
    pub fn map_id(&self, kind: IdKind, id: u32) -> u32 {
        let fits = |rule: &&Rule| rule.kind == kind && rule.from.contains(&id);
        let Some(rule) = self.rules.iter().find(fits) else { return id };
        let behind = if rule.shifts { id - rule.from.start() } else { 0 };
        // The rule was checked to stay below the highest ID.
        rule.to.saturating_add(behind)
    }

    /// Whether every owner stays as it is.
    pub fn keeps_all(&self) -> bool {
        self.rules.is_empty()
    }
}

fn parse(line: &str, id_of_name: IdOfName<'_>) -> Result<Rule, String> {
    let expected = || {
        format!("{line:?} is not a rule for owners; write u:FROM=TO or g:FROM=TO, such as u:1000=0")
    };
    let (kind, rest) = line.split_once(':').ok_or_else(expected)?;
    let kind = match kind.trim() {
        "u" | "uid" => IdKind::User,
        "g" | "gid" => IdKind::Group,
        _ => return Err(expected()),
    };
    let (from, to) = rest.split_once('=').ok_or_else(expected)?;
    let (from, to) = (from.trim(), to.trim());
    let id = |text: &str| -> Result<u32, String> {
        if let Ok(id) = text.parse::<u32>() {
            // (uid_t) -1 means "leave it" to system calls.
            return if id == u32::MAX { Err(expected()) } else { Ok(id) };
        }
        if text.is_empty() || text.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(expected());
        }
        let what = if kind == IdKind::User { "user" } else { "group" };
        let unknown =
            || format!("{line:?}: there is no {what} {text:?} on this machine; give the number");
        id_of_name(kind, text).ok_or_else(unknown)
    };
    let to = id(to)?;
    if from == "*" {
        return Ok(Rule { kind, from: 0..=u32::MAX, to, shifts: false });
    }
    let range = from.split_once('-').and_then(|(first, last)| {
        Some((first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?))
    });
    let Some((first, last)) = range else {
        let from = id(from)?;
        return Ok(Rule { kind, from: from..=from, to, shifts: false });
    };
    if last < first
        || last == u32::MAX
        || to.checked_add(last - first).is_none_or(|id| id == u32::MAX)
    {
        return Err(format!(
            "{line:?}: the range ends before it begins, or exceeds the highest ID"
        ));
    }
    Ok(Rule { kind, from: first..=last, to, shifts: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(kind: IdKind, name: &str) -> Option<u32> {
        (name == "web").then_some(if kind == IdKind::User { 33 } else { 34 })
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let mut owners = Owners::default();
        let text = "# from a build machine\nu:1000=0\ng:web=0 # a name\n\nu:100000-165535=0\nu:*=7";
        owners.add(text, &names).expect("well-formed");
        assert_eq!(owners.map(1000, 1000), (0, 1000));
        assert_eq!(owners.map(100_033, 34), (33, 0));
        assert_eq!(owners.map(165_535, 35), (65_535, 35));
        assert_eq!(owners.map(165_536, 35), (7, 35));
        assert_eq!(Owners::squashed(5, 6).map(1, u32::MAX), (5, 6));
        assert_eq!(Owners::default().map(1, 2), (1, 2));
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for wrong in [
            "1000=0",
            "u:1000",
            "x:1=2",
            "u:=0",
            "u:1=",
            "u:9-3=0",
            "u:0-4294967295=0",
            "u:1-2=4294967294",
            "u:1=4294967295",
            "u:nobody-here=0",
            "u:1=12x",
            "u:1=-1",
        ] {
            assert!(Owners::default().add(wrong, &names).is_err(), "{wrong}");
        }
    }
}
