//! Extended attributes: GETXATTR, SETXATTR, LISTXATTR, REMOVEXATTR.

use fjord::{SetAttr, XattrFlags};

use super::{EngineHandler, Outcome, caller};
use crate::{
    abi::*,
    reply::{Errno, Responder},
    request::Request,
};

const ACL_PREFIX: &[u8] = b"system.posix_acl_";
const ACL_ACCESS: &[u8] = b"system.posix_acl_access";
const SELINUX: &[u8] = b"security.selinux";
const TRUSTED_PREFIX: &[u8] = b"trusted.";
const S_ISGID: u16 = 0o2000;

/// Whether the kernel has SELinux, as libselinux finds out.
pub(super) fn has_selinux() -> bool {
    let kinds = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    kinds.lines().any(|line| line.ends_with("selinuxfs"))
}

impl EngineHandler {
    fn check_xattr_name(&self, name: &[u8]) -> Outcome<()> {
        if !self.acl && name.starts_with(ACL_PREFIX) {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        Ok(())
    }

    pub(super) fn getxattr(
        &self,
        request: &Request<'_>,
        size: u32,
        name: &[u8],
        reply: Responder,
    ) -> Outcome<()> {
        let value = self.check_xattr_name(name).and_then(|()| self.node(request)).and_then(|n| {
            let value = n.get_xattr(name)?;
            Ok(value)
        });
        // A program that is told this of one file, as `ls -l`, does not ask for it of the others.
        let value = value.map_err(|e| match e {
            Errno(libc::ENODATA) if !self.selinux && name == SELINUX => Errno(libc::EOPNOTSUPP),
            _ => e,
        });
        sized(value, size, reply)
    }

    pub(super) fn listxattr(
        &self,
        request: &Request<'_>,
        size: u32,
        reply: Responder,
    ) -> Outcome<()> {
        let list = self.node(request).and_then(|n| {
            let names = n.list_xattr()?;
            let trusted = names.iter().any(|n| n.starts_with(TRUSTED_PREFIX));
            let hide_trusted = trusted && !caller::is_admin(request.header);
            let mut list = Vec::new();
            for name in names {
                let hidden = hide_trusted && name.starts_with(TRUSTED_PREFIX)
                    || !self.acl && name.starts_with(ACL_PREFIX);
                if !hidden {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
            }
            Ok(list)
        });
        sized(list, size, reply)
    }

    pub(super) fn setxattr(
        &self,
        request: &Request<'_>,
        flags: u32,
        acl_kill_sgid: bool,
        name: &[u8],
        value: &[u8],
    ) -> Outcome<()> {
        self.check_xattr_name(name)?;
        let node = self.node(request)?;
        let flags = XattrFlags::from_bits(flags).ok_or(Errno(libc::EINVAL))?;
        // The kernel asks for it with default lists too, where ext4 keeps the bit.
        if acl_kill_sgid && name == ACL_ACCESS {
            let mode = node.attr().mode;
            if mode & S_ISGID != 0 {
                let change = SetAttr { mode: Some(mode & !S_ISGID & 0o7777), ..Default::default() };
                node.set_attr(&change, &caller::cred(request.header, 0))?;
            }
        }
        node.set_xattr(name, value, flags)?;
        self.inode_changed(&node)
    }

    pub(super) fn removexattr(&self, request: &Request<'_>, name: &[u8]) -> Outcome<()> {
        self.check_xattr_name(name)?;
        let node = self.node(request)?;
        node.remove_xattr(name)?;
        self.inode_changed(&node)
    }
}

/// Answers with the value, or with its length where the caller asked for no more.
fn sized(value: Outcome<Vec<u8>>, size: u32, reply: Responder) -> Outcome<()> {
    match value {
        Ok(value) if size == 0 => {
            reply.value(&GetxattrOut { size: value.len() as u32, padding: 0 });
        }
        Ok(value) if value.len() > size as usize => return reply.fail(Errno(libc::ERANGE)),
        Ok(value) => reply.bytes(&value),
        Err(e) => return reply.fail(e),
    }
    Ok(())
}
