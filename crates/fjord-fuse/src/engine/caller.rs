//! Credentials of a request's caller, beyond the user and group IDs in its header.
//!
//! The kernel does all permission checks on files (`default_permissions`); checks left to the
//! server need a capability or the caller's groups, which are read from /proc by process ID. A
//! caller that is not visible there (another PID namespace, exited) has neither.

use std::fs;

use fjord::Cred;

use crate::{abi::InHeader, child};

const CAP_FSETID: u32 = 4;
const CAP_SYS_ADMIN: u32 = 21;

/// Credentials for the ownership rules of new files.
pub(super) fn cred(header: &InHeader, umask: u32) -> Cred {
    Cred { uid: header.uid, gid: header.gid, groups: Vec::new(), umask: (umask & 0o777) as u16 }
}

/// As [`cred`], with the supplementary groups: for the rules of set-group-ID.
pub(super) fn cred_with_groups(header: &InHeader, umask: u32) -> Cred {
    let groups = status_field(header.pid, "Groups:")
        .map(|list| list.split_whitespace().filter_map(|g| g.parse().ok()).collect())
        .unwrap_or_default();
    Cred { groups, ..cred(header, umask) }
}

/// Whether the caller may administer the system: has CAP_SYS_ADMIN in this user namespace.
pub(super) fn is_admin(header: &InHeader) -> bool {
    has_capability(header, CAP_SYS_ADMIN).unwrap_or(false)
}

/// Whether the caller is the user who serves the mount.
pub(super) fn is_owner(header: &InHeader) -> bool {
    header.uid == rustix::process::geteuid().as_raw()
}

/// Whether set-user-ID and set-group-ID stay when the caller changes a file: with CAP_FSETID in
/// this user namespace. If the caller is not visible, root is assumed to have it; requests in which
/// the kernel says otherwise are always followed.
pub(super) fn keeps_set_ids(header: &InHeader) -> bool {
    has_capability(header, CAP_FSETID).unwrap_or(header.uid == 0)
}

/// Whether the caller has a capability in this user namespace; `None` if it cannot be seen.
fn has_capability(header: &InHeader, capability: u32) -> Option<bool> {
    let hex = status_field(header.pid, "CapEff:")?;
    let has_cap = u64::from_str_radix(hex.trim(), 16).ok()? & (1 << capability) != 0;
    let user_ns = |who: &str| fs::read_link(format!("/proc/{who}/ns/user")).ok();
    Some(has_cap && user_ns(&header.pid.to_string()) == user_ns("self"))
}

fn status_field(pid: u32, field: &str) -> Option<String> {
    if pid == 0 {
        return None;
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(field)).map(str::to_owned)
}

/// Reads `len` bytes (at most 8) at `addr` of the caller's memory. Some ioctls are declared as
/// giving and yet take an argument, which the kernel then does not pass on.
pub(super) fn read_memory(header: &InHeader, addr: u64, len: usize) -> Option<[u8; 8]> {
    let mut bytes = [0u8; 8];
    let len = len.min(bytes.len());
    let pid = libc::pid_t::try_from(header.pid).ok().filter(|&pid| pid > 0)?;
    child::read_memory(pid, usize::try_from(addr).ok()?, &mut bytes[..len]).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_process_can_be_read() {
        let value = 0x1122_3344u32;
        let header = InHeader { pid: std::process::id(), ..Default::default() };
        let bytes = read_memory(&header, &raw const value as u64, 4).unwrap();
        assert_eq!(bytes[..4], value.to_ne_bytes());
        assert_eq!(read_memory(&header, 8, 4), None);
        assert_eq!(read_memory(&InHeader::default(), &raw const value as u64, 4), None);
    }
}
