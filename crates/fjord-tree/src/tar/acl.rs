//! Access lists as star and libarchive and GNU tar write them: text in `SCHILY.acl.access` and
//! `SCHILY.acl.default`.
//!
//! Owns the mapping from names to IDs. Invariant: the result never grants more than the text:
//! entries without an ID are removed, and users that they may have named get no more than they
//! allowed.
//!
//! Format: acl(5), "long text form" and "short text form"; star adds the number as a fourth field.

use std::collections::HashMap;

use fjord_format::acl::{Acl, AclEntry, AclTag};
use nix::unistd::{Group, User};

/// Longest name of an owner that is looked up, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// Most names of a stream that are remembered.
const NAMES_MAX: usize = 10_000;
const PERM_MASK: u16 = 7;

/// Numbers by name: what the stream tells of its owners, then the host.
#[derive(Default)]
pub(crate) struct Owners {
    users: HashMap<Vec<u8>, u32>,
    groups: HashMap<Vec<u8>, u32>,
    ask_host: bool,
}

impl Owners {
    pub(crate) fn new(ask_host: bool) -> Owners {
        Owners { ask_host, ..Owners::default() }
    }

    /// Remembers that an entry has this owner and group.
    pub(crate) fn note(&mut self, user: (&[u8], u32), group: (&[u8], u32)) {
        for (known, (name, id)) in [(&mut self.users, user), (&mut self.groups, group)] {
            let fits = !name.is_empty() && name.len() <= NAME_BYTES_MAX && known.len() < NAMES_MAX;
            if fits && !known.contains_key(name) {
                known.insert(name.to_vec(), id);
            }
        }
    }

    fn user(&self, name: &[u8]) -> Option<u32> {
        self.users.get(name).copied().or_else(|| {
            let name = std::str::from_utf8(name).ok().filter(|_| self.ask_host)?;
            Some(User::from_name(name).ok()??.uid.as_raw())
        })
    }

    fn group(&self, name: &[u8]) -> Option<u32> {
        self.groups.get(name).copied().or_else(|| {
            let name = std::str::from_utf8(name).ok().filter(|_| self.ask_host)?;
            Some(Group::from_name(name).ok()??.gid.as_raw())
        })
    }
}

/// A list with numbers, and whom it lacks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub(crate) acl: Acl,
    /// Entries that were taken out: `user:lisa`.
    pub(crate) unknown: Vec<String>,
}

/// Reads a list. `mode` is that of an entry with an access list; it says what a mask that the text
/// lacks is. Else the text counts alone, since some programs write the owning group's permissions
/// where the mode has the mask. A default list has no mode.
///
/// `None` when the text is no valid list.
pub(crate) fn parse(text: &[u8], mode: Option<u16>, owners: &Owners) -> Option<Numbered> {
    let mut list = List::default();
    for line in text.split(|byte| *byte == b'\n') {
        let line = line.split(|byte| *byte == b'#').next().unwrap_or_default();
        for item in line.split(|byte| *byte == b',') {
            let item = item.trim_ascii();
            if !item.is_empty() {
                list.item(item, owners)?;
            }
        }
    }
    list.finish(mode)
}

/// A list on its way.
#[derive(Default)]
struct List {
    entries: Vec<AclEntry>,
    unknown: Vec<String>,
    /// What named users and groups without a number were allowed, each of them.
    unknown_users: Option<u16>,
    unknown_groups: Option<u16>,
}

fn permissions(text: &[u8]) -> Option<u16> {
    text.iter().try_fold(0, |perm, byte| {
        Some(
            perm | match byte {
                b'r' => 4,
                b'w' => 2,
                b'x' => 1,
                b'-' => 0,
                _ => return None,
            },
        )
    })
}

fn decimal(text: &[u8]) -> Option<u32> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(text).ok()?.parse().ok())?
}

impl List {
    /// `TAG:NAME:PERMISSIONS[:NUMBER]`; mask and others may leave out the empty name.
    fn item(&mut self, item: &[u8], owners: &Owners) -> Option<()> {
        let item = item.strip_prefix(b"default:").unwrap_or(item);
        let fields: Vec<&[u8]> = item.split(|byte| *byte == b':').map(<[u8]>::trim_ascii).collect();
        let (tag, name, perm, number) = match fields[..] {
            [tag, perm] => (tag, &b""[..], perm, None),
            [tag, name, perm] => (tag, name, perm, None),
            [tag, name, perm, number] => (tag, name, perm, Some(number)),
            _ => return None,
        };
        let perm = permissions(perm)?;
        let number = match number {
            Some(number) => Some(decimal(number)?),
            None => decimal(name),
        };
        let tag = match (tag, name) {
            (b"user" | b"u", b"") => AclTag::UserObj,
            (b"group" | b"g", b"") => AclTag::GroupObj,
            (b"mask" | b"m", b"") => AclTag::Mask,
            (b"other" | b"o", b"") => AclTag::Other,
            (b"user" | b"u", _) => match number.or_else(|| owners.user(name)) {
                Some(id) => AclTag::User(id),
                None => {
                    self.unknown("user", name, perm);
                    return Some(());
                }
            },
            (b"group" | b"g", _) => match number.or_else(|| owners.group(name)) {
                Some(id) => AclTag::Group(id),
                None => {
                    self.unknown("group", name, perm);
                    return Some(());
                }
            },
            _ => return None,
        };
        self.entries.push(AclEntry { tag, perm });
        Some(())
    }

    fn unknown(&mut self, kind: &str, name: &[u8], perm: u16) {
        let least = if kind == "user" { &mut self.unknown_users } else { &mut self.unknown_groups };
        *least = Some(least.unwrap_or(PERM_MASK) & perm);
        self.unknown.push(format!("{kind}:{}", String::from_utf8_lossy(name)));
    }

    fn finish(mut self, mode: Option<u16>) -> Option<Numbered> {
        let named = |tag| matches!(tag, AclTag::User(_) | AclTag::Group(_));
        self.entries.sort_by_key(|entry| entry.tag.sort_key());
        // One number by two names: both entries hold.
        self.entries.dedup_by(|later, kept| {
            let same = later.tag == kept.tag && named(kept.tag);
            if same {
                kept.perm &= later.perm;
            }
            same
        });
        self.limit_the_unknown();
        let has_named = self.entries.iter().any(|entry| named(entry.tag));
        let has_mask = self.entries.iter().any(|entry| entry.tag == AclTag::Mask);
        if has_named && !has_mask {
            // It is what the mode has for the group.
            let perm = mode.map_or(PERM_MASK, |mode| mode >> 3 & PERM_MASK);
            self.entries.push(AclEntry { tag: AclTag::Mask, perm });
            self.entries.sort_by_key(|entry| entry.tag.sort_key());
        }
        Some(Numbered { acl: Acl::new(self.entries)?, unknown: self.unknown })
    }

    /// A user without a number may be a member of any group, or nobody of them; a member of a
    /// group without a number may be anybody.
    fn limit_the_unknown(&mut self) {
        let users = self.unknown_users.unwrap_or(PERM_MASK);
        let groups = self.unknown_groups.unwrap_or(PERM_MASK);
        let mask = self.entries.iter().find(|entry| entry.tag == AclTag::Mask);
        let mask = mask.map_or(PERM_MASK, |entry| entry.perm);
        for entry in &mut self.entries {
            entry.perm &= match entry.tag {
                AclTag::GroupObj | AclTag::Group(_) => users,
                // The mask limited what is gone, but does not limit the others.
                AclTag::Other if !self.unknown.is_empty() => users & groups & mask,
                _ => PERM_MASK,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners() -> Owners {
        let mut owners = Owners::new(false);
        owners.note((b"lisa", 502), (b"toolies", 102));
        owners
    }

    /// A list as short text.
    fn shown(text: &str, mode: u16) -> Option<String> {
        let found = parse(text.as_bytes(), Some(mode), &owners())?;
        let entries = found.acl.entries().iter().map(|entry| {
            let perm = entry.perm;
            match entry.tag {
                AclTag::UserObj => format!("u::{perm}"),
                AclTag::User(id) => format!("u:{id}:{perm}"),
                AclTag::GroupObj => format!("g::{perm}"),
                AclTag::Group(id) => format!("g:{id}:{perm}"),
                AclTag::Mask => format!("m::{perm}"),
                AclTag::Other => format!("o::{perm}"),
            }
        });
        let unknown = found.unknown.iter().map(|who| format!("-{who}"));
        Some(entries.chain(unknown).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn texts_of_several_programs() {
        let star = "user::rwx,user:lisa:r-x:7,group::r-x,group:x:rwx:102,mask::rwx,other::--x";
        assert_eq!(shown(star, 0o771).as_deref(), Some("u::7 u:7:5 g::5 g:102:7 m::7 o::1"));
        let libarchive = "user::rw-,group::r--,other::r--,user:lisa:rw-:1,user:9:r--,mask::r--";
        assert_eq!(shown(libarchive, 0o644).as_deref(), Some("u::6 u:1:6 u:9:4 g::4 m::4 o::4"));
        let gnu = "user::rw-\nuser:lisa:rw-\t#effective:r--\ngroup::r--\nmask::r--\nother::---\n";
        assert_eq!(shown(gnu, 0o640).as_deref(), Some("u::6 u:502:6 g::4 m::4 o::0"));
        let solaris = "user::rw-,group::r--,group:toolies:rw-,mask:rw-,other:---";
        assert_eq!(shown(solaris, 0o660).as_deref(), Some("u::6 g::4 g:102:6 m::6 o::0"));
        assert_eq!(shown("u::rw,g::r,o::", 0o640).as_deref(), Some("u::6 g::4 o::0"));
        for bad in ["", "user::rwx", "user::rwz,group::r,other::r", "user::r,group:r:r:r:r,other:r"]
        {
            assert_eq!(shown(bad, 0o777), None, "{bad:?}");
        }
    }

    #[test]
    fn nothing_widens() {
        // Somebody without a number was shut out: all that may be him are.
        let text = "user::rw-,user:mallory:---,group::rw-,group:toolies:rw-,mask::rw-,other::r--";
        assert_eq!(
            shown(text, 0o664).as_deref(),
            Some("u::6 g::0 g:102:0 m::6 o::0 -user:mallory")
        );
        let text = "user::rw-,group::rw-,group:crew:-w-,mask::rw-,other::rw-";
        assert_eq!(shown(text, 0o666).as_deref(), Some("u::6 g::6 m::6 o::2 -group:crew"));
        // What is gone was masked.
        let text = "user::rw-,user:eve:rw-,group::r--,mask::---,other::r--";
        assert_eq!(shown(text, 0o604).as_deref(), Some("u::6 g::4 m::0 o::0 -user:eve"));
        // Without a mask the mode's group bits are the limit.
        let text = "user::rw-,user:lisa:rw-,group::r--,other::---";
        assert_eq!(shown(text, 0o640).as_deref(), Some("u::6 u:502:6 g::4 m::4 o::0"));
        // One number, two names.
        let text = "user::rw-,user:lisa:rw-,user:502:r--,group::r--,mask::rw-,other::---";
        assert_eq!(shown(text, 0o660).as_deref(), Some("u::6 u:502:4 g::4 m::6 o::0"));
    }
}
