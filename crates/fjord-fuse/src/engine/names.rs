//! Names: LOOKUP, the making, linking, moving and removing of files.

use fjord::{Cred, InodeRef, RenameFlags};

use super::{
    EngineHandler, Outcome,
    attrs::{entry_out, negative_entry},
    caller,
};
use crate::{
    abi::*,
    reply::{Errno, Responder},
    request::Request,
};

const PERMISSION_BITS: u32 = 0o7777;

/// Set-group-ID of a file that its group may execute.
const SET_GROUP_ID: u32 = libc::S_ISGID | libc::S_IXGRP;

impl EngineHandler {
    /// Counts a lookup and makes the entry that hands the inode over.
    fn hand_over(&self, inode: InodeRef) -> EntryOut {
        let entry = entry_out(&inode, self.writeback_cache);
        self.nodes.remember(&inode);
        entry
    }

    fn new_file_cred(&self, request: &Request<'_>, mode: u32, umask: u32) -> Cred {
        // Without ACLs the kernel has applied the umask already.
        let umask = if self.acl { umask } else { 0 };
        // Only these bits depend on the supplementary groups, which are costly to find out.
        let is_set_gid = mode & SET_GROUP_ID == SET_GROUP_ID;
        match is_set_gid {
            true => caller::cred_with_groups(request.header, umask),
            false => caller::cred(request.header, umask),
        }
    }

    pub(super) fn lookup(&self, request: &Request<'_>, name: &[u8]) -> Outcome<EntryOut> {
        if name == b"." || name == b".." {
            return self.lookup_handle(request, name);
        }
        match self.node(request)?.lookup(name) {
            Ok(inode) => Ok(self.hand_over(inode)),
            Err(e) if e.errno() == libc::ENOENT => Ok(negative_entry()),
            Err(e) => Err(e.into()),
        }
    }

    /// LOOKUP of `.` and `..`: the kernel has a file handle and no node for it.
    fn lookup_handle(&self, request: &Request<'_>, name: &[u8]) -> Outcome<EntryOut> {
        let inode = self.node(request)?;
        let inode = if name == b".." { inode.lookup(b"..")? } else { inode };
        Ok(self.hand_over(inode))
    }

    pub(super) fn readlink(&self, request: &Request<'_>, reply: Responder) -> Outcome<()> {
        let target = match self.node(request).and_then(|n| Ok(n.read_link()?)) {
            Ok(target) => target,
            Err(e) => return reply.fail(e),
        };
        reply.bytes(&target);
        Ok(())
    }

    pub(super) fn symlink(
        &self,
        request: &Request<'_>,
        name: &[u8],
        target: &[u8],
    ) -> Outcome<EntryOut> {
        let cred = self.new_file_cred(request, 0, 0);
        let dir = self.node(request)?;
        let inode = dir.symlink(name, target, &cred)?;
        self.names_changed(&dir)?;
        Ok(self.hand_over(inode))
    }

    pub(super) fn mknod(
        &self,
        request: &Request<'_>,
        args: &MknodIn,
        name: &[u8],
    ) -> Outcome<EntryOut> {
        let cred = self.new_file_cred(request, args.mode, args.umask);
        let dir = self.node(request)?;
        let inode = dir.mknod(name, args.mode as u16, args.rdev, &cred)?;
        self.names_changed(&dir)?;
        Ok(self.hand_over(inode))
    }

    pub(super) fn mkdir(
        &self,
        request: &Request<'_>,
        args: &MkdirIn,
        name: &[u8],
    ) -> Outcome<EntryOut> {
        let cred = self.new_file_cred(request, args.mode, args.umask);
        let mode = (args.mode & PERMISSION_BITS) as u16;
        let dir = self.node(request)?;
        let inode = dir.mkdir(name, mode, &cred)?;
        self.names_changed(&dir)?;
        Ok(self.hand_over(inode))
    }

    pub(super) fn unlink(&self, request: &Request<'_>, name: &[u8]) -> Outcome<()> {
        let dir = self.node(request)?;
        dir.unlink(name)?;
        self.names_changed(&dir)
    }

    pub(super) fn rmdir(&self, request: &Request<'_>, name: &[u8]) -> Outcome<()> {
        let dir = self.node(request)?;
        dir.rmdir(name)?;
        self.names_changed(&dir)
    }

    pub(super) fn rename(
        &self,
        request: &Request<'_>,
        newdir: u64,
        flags: u32,
        name: &[u8],
        newname: &[u8],
    ) -> Outcome<()> {
        let flags = RenameFlags::from_bits(flags).ok_or(Errno(libc::EINVAL))?;
        let newdir = self.node_by_id(newdir)?;
        let cred = caller::cred(request.header, 0);
        let dir = self.node(request)?;
        dir.rename(name, &newdir, newname, flags, &cred)?;
        self.names_changed(&newdir)?;
        self.names_changed(&dir)
    }

    pub(super) fn link(
        &self,
        request: &Request<'_>,
        oldnodeid: u64,
        newname: &[u8],
    ) -> Outcome<EntryOut> {
        let target = self.node_by_id(oldnodeid)?;
        let dir = self.node(request)?;
        dir.link(&target, newname)?;
        self.names_changed(&dir)?;
        Ok(self.hand_over(target))
    }

    pub(super) fn create(
        &self,
        request: &Request<'_>,
        args: &CreateIn,
        name: &[u8],
        reply: Responder,
    ) -> Outcome<()> {
        let cred = self.new_file_cred(request, args.mode, args.umask);
        let mode = (args.mode & PERMISSION_BITS) as u16;
        let created = self.node(request).and_then(|dir| {
            let inode = dir.create(name, mode, &cred)?;
            self.names_changed(&dir)?;
            Ok(inode)
        });
        self.created(request, created, args.flags, reply)
    }

    pub(super) fn tmpfile(
        &self,
        request: &Request<'_>,
        args: &CreateIn,
        reply: Responder,
    ) -> Outcome<()> {
        let cred = self.new_file_cred(request, args.mode, args.umask);
        let mode = (args.mode & PERMISSION_BITS) as u16;
        let created = self.node(request).and_then(|dir| Ok(dir.tmpfile(mode, &cred)?));
        self.created(request, created, args.flags, reply)
    }

    /// Answers CREATE and TMPFILE: an entry and an open file in one reply.
    fn created(
        &self,
        request: &Request<'_>,
        created: Outcome<InodeRef>,
        open_flags: u32,
        reply: Responder,
    ) -> Outcome<()> {
        use zerocopy::IntoBytes;
        let inode = match created {
            Ok(inode) => inode,
            Err(e) => return reply.fail(e),
        };
        let fh = self.handles.open(&inode, open_flags, request.header.uid, || {});
        let entry = self.hand_over(inode);
        let open = OpenOut { fh, open_flags: Self::OPEN_FLAGS.bits(), backing_id: 0 };
        reply.gather(&[entry.as_bytes(), open.as_bytes()]);
        Ok(())
    }
}
