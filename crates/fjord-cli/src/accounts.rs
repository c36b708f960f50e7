//! Users and groups of an image, as chown(1) takes them: by number, or by name.
//!
//! Invariant: names are those of the image's own /etc/passwd and /etc/group; only where the image has
//! no such file are they this machine's. Lines that are not well-formed name nobody.

use fjord::{FileKind, Fs};
use fjord_tree::IdKind;
use nix::unistd::User;

use crate::{
    failure::{Context, Failure, Result},
    paths::{self, Last},
    users,
};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Largest file of users or groups that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Bytes of a file that are read at once.
const READ_BYTES: usize = 64 << 10;

/// A new owner, a new group, or both, by what the command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnerChange {
    user: Option<String>,
    group: Option<GroupChange>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum GroupChange {
    Given(String),
    /// The user's own.
    OfUser,
}

impl OwnerChange {
    /// Reads `USER`, `USER:GROUP`, `:GROUP`, or `USER:` for the user and its own group.
    pub(crate) fn parse(text: &str) -> Result<OwnerChange, String> {
        let (user, group) = text.split_once(':').map_or((text, None), |(u, g)| (u, Some(g)));
        if user.is_empty() && group.is_none_or(str::is_empty) {
            return Err("an owner, a group or both are expected, such as 0:0".to_owned());
        }
        let group = group.map(|group| match group {
            "" => GroupChange::OfUser,
            group => GroupChange::Given(group.to_owned()),
        });
        Ok(OwnerChange { user: (!user.is_empty()).then(|| user.to_owned()), group })
    }

    /// The numbers of user and group in an image.
    ///
    /// # Errors
    /// A name that nobody has; a file of names that cannot be read.
    pub(crate) fn resolve(&self, fs: &Fs) -> Result<(Option<u32>, Option<u32>)> {
        let user = self.user.as_deref();
        let uid = user.map(|user| id(fs, IdKind::User, user)).transpose()?;
        let gid = match (&self.group, user) {
            (Some(GroupChange::Given(group)), _) => Some(id(fs, IdKind::Group, group)?),
            (Some(GroupChange::OfUser), Some(user)) => Some(own_group(fs, user)?),
            _ => None,
        };
        Ok((uid, gid))
    }
}

/// A number as the command line has it; a `+` before it says that it is no name.
fn number(text: &str) -> Option<Result<u32>> {
    match text.strip_prefix('+').unwrap_or(text).parse::<u32>() {
        // It stands for no change in chown(2).
        Ok(u32::MAX) => Some(Err(Failure::usage(format!("{text} is too large for an ID")))),
        Ok(id) => Some(Ok(id)),
        Err(_) => None,
    }
}

fn id(fs: &Fs, kind: IdKind, text: &str) -> Result<u32> {
    if let Some(number) = number(text) {
        return number;
    }
    let (path, what) = match kind {
        IdKind::User => (PASSWD, "user"),
        IdKind::Group => (GROUP, "group"),
    };
    let Some(lines) = read(fs, path)? else {
        return users::id(kind, text).map_err(Failure::new);
    };
    let found = fields(&lines).find(|fields| fields.first() == Some(&text));
    let id = found.and_then(|fields| fields.get(2)?.parse::<u32>().ok());
    id.ok_or_else(|| {
        let message = format!("no {what} {text:?} in {path} of the image; give the number");
        Failure::new(message)
    })
}

/// The group of a user, who is given by name, as chown(1) wants it.
fn own_group(fs: &Fs, user: &str) -> Result<u32> {
    let unknown = |why: &str| Failure::new(format!("the group of user {user:?}: {why}; give it"));
    if number(user).is_some() {
        return Err(unknown("a number has none"));
    }
    let Some(lines) = read(fs, PASSWD)? else {
        let found = User::from_name(user).ok().flatten();
        let found = found.ok_or_else(|| unknown("no such user on this machine"))?;
        return Ok(found.gid.as_raw());
    };
    let found = fields(&lines).find(|fields| fields.first() == Some(&user));
    let gid = found.and_then(|fields| fields.get(3)?.parse::<u32>().ok());
    gid.ok_or_else(|| unknown("not in /etc/passwd of the image"))
}

fn fields(lines: &str) -> impl Iterator<Item = Vec<&str>> {
    lines.lines().map(|line| line.split(':').collect())
}

/// The text of a file of names; `None` where the image has none.
fn read(fs: &Fs, path: &str) -> Result<Option<String>> {
    let Ok(file) = paths::find(fs, path, Last::Follow) else { return Ok(None) };
    let attr = file.attr();
    if attr.kind() != FileKind::Regular {
        return Ok(None);
    }
    if attr.size > FILE_BYTES_MAX {
        let mib = FILE_BYTES_MAX >> 20;
        let message = format!("{path} of the image has more than {mib} MiB; give numbers");
        return Err(Failure::new(message));
    }
    let mut bytes = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let count = file.read(bytes.len() as u64, &mut buffer).context(path)?;
        if count == 0 {
            return Ok(Some(String::from_utf8_lossy(&bytes).into_owned()));
        }
        bytes.extend_from_slice(&buffer[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_as_by_chown() {
        let given = |group: &str| Some(GroupChange::Given(group.to_owned()));
        for (text, user, group) in [
            ("a", Some("a"), None),
            ("a:b", Some("a"), given("b")),
            (":b", None, given("b")),
            ("a:", Some("a"), Some(GroupChange::OfUser)),
            ("+7:+8", Some("+7"), given("+8")),
        ] {
            let expected = OwnerChange { user: user.map(str::to_owned), group };
            assert_eq!(OwnerChange::parse(text), Ok(expected), "{text}");
        }
        for wrong in ["", ":"] {
            assert!(OwnerChange::parse(wrong).is_err(), "{wrong:?}");
        }
        assert!(number("4294967295").is_some_and(|number| number.is_err()));
        assert!(matches!(number("+12"), Some(Ok(12))));
        assert!(number("x12").is_none());
    }
}
