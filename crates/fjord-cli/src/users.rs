//! Users and groups, by number or by name on this machine.

use fjord_tree::IdKind;
use nix::unistd::{Group, User};

/// The ID of a name on this machine.
pub(crate) fn id_of_name(kind: IdKind, name: &str) -> Option<u32> {
    match kind {
        IdKind::User => Some(User::from_name(name).ok()??.uid.as_raw()),
        IdKind::Group => Some(Group::from_name(name).ok()??.gid.as_raw()),
    }
}

/// A user or group by number or name. A `+` prefix marks a number that is not a name.
pub(crate) fn id(kind: IdKind, text: &str) -> Result<u32, String> {
    let number = text.strip_prefix('+').unwrap_or(text);
    match number.parse::<u32>() {
        Ok(u32::MAX) => Err(format!("{text:?} is not a valid ID; the highest is 4294967294")),
        Ok(id) => Ok(id),
        Err(_) => id_of_name(kind, text).ok_or_else(|| {
            let what = if kind == IdKind::User { "user" } else { "group" };
            format!("there is no {what} {text:?} on this machine; give the number")
        }),
    }
}

/// A user and a group, such as `1000:1000` or `root:www-data`.
pub(crate) fn owner(text: &str) -> Result<(u32, u32), String> {
    let expected = "expected a user and a group, such as 0:0";
    let (user, group) = text.split_once(':').ok_or(expected)?;
    if user.is_empty() || group.is_empty() {
        return Err(expected.to_owned());
    }
    Ok((id(IdKind::User, user)?, id(IdKind::Group, group)?))
}

/// User and group of this process.
pub(crate) fn caller() -> (u32, u32) {
    (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw())
}

/// The permission bits that this process leaves out of new files.
pub(crate) fn umask() -> u16 {
    use nix::sys::stat::{Mode, umask};
    // There is no way to ask without setting it; no other thread makes files meanwhile.
    let found = umask(Mode::empty());
    umask(found);
    (found.bits() & 0o777) as u16
}
