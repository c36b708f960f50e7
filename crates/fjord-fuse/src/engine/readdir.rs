//! READDIR and READDIRPLUS.
//!
//! Entries are collected first and looked up after, because the engine holds the directory while it
//! calls back. Meanwhile no name can be removed: the kernel holds the directory's lock until it has
//! the reply.

use fjord::{FileKind, InodeNo};

use super::{EngineHandler, Outcome, attrs::entry_out};
use crate::{
    abi::*,
    reply::{DirentBuf, Responder},
    request::Request,
};

struct Found {
    ino: InodeNo,
    kind: u32,
    next_cookie: u64,
    name: Vec<u8>,
}

/// The type of an entry as getdents(2) gives it.
fn dirent_type(kind: Option<FileKind>) -> u32 {
    u32::from(match kind {
        Some(FileKind::Regular) => libc::DT_REG,
        Some(FileKind::Directory) => libc::DT_DIR,
        Some(FileKind::Symlink) => libc::DT_LNK,
        Some(FileKind::CharDevice) => libc::DT_CHR,
        Some(FileKind::BlockDevice) => libc::DT_BLK,
        Some(FileKind::Fifo) => libc::DT_FIFO,
        Some(FileKind::Socket) => libc::DT_SOCK,
        None => libc::DT_UNKNOWN,
    })
}

impl EngineHandler {
    pub(super) fn readdir(
        &self,
        request: &Request<'_>,
        args: &ReadIn,
        plus: bool,
        reply: Responder,
    ) -> Outcome<()> {
        let out =
            if plus { self.readdir_plus(request, args) } else { self.readdir_plain(request, args) };
        match out {
            Ok(out) => {
                reply.bytes(out.as_bytes());
                Ok(())
            }
            Err(e) => reply.fail(e),
        }
    }

    fn readdir_plain(&self, request: &Request<'_>, args: &ReadIn) -> Outcome<DirentBuf> {
        let mut out = DirentBuf::new(args.size as usize);
        let read = self.node(request)?.read_dir(args.offset, &mut |e| {
            let kind = dirent_type(e.kind);
            out.push(u64::from(e.ino.0), e.next_cookie, kind, e.name, None)
        });
        // An error after entries is the answer to the next request, which begins behind them.
        if out.as_bytes().is_empty() {
            read?;
        }
        Ok(out)
    }

    fn readdir_plus(&self, request: &Request<'_>, args: &ReadIn) -> Outcome<DirentBuf> {
        let mut out = DirentBuf::new(args.size as usize);
        let mut found = Vec::new();
        let mut room = args.size as usize;
        let read = self.node(request)?.read_dir(args.offset, &mut |e| {
            let len = DirentBuf::entry_len(e.name.len(), true);
            if len > room {
                return false;
            }
            room -= len;
            found.push(Found {
                ino: e.ino,
                kind: dirent_type(e.kind),
                next_cookie: e.next_cookie,
                name: e.name.to_vec(),
            });
            true
        });
        if found.is_empty() {
            read?;
        }
        for f in found {
            let entry = if f.name == b"." || f.name == b".." {
                EntryOut::default()
            } else {
                self.entry_of(f.ino)
            };
            out.push(u64::from(f.ino.0), f.next_cookie, f.kind, &f.name, Some(&entry));
        }
        Ok(out)
    }

    /// The entry for a name that READDIRPLUS found. Node 0 means "no attributes": the kernel looks
    /// the name up when it is used, and that call gets the error.
    fn entry_of(&self, ino: InodeNo) -> EntryOut {
        match self.fs.inode(ino, None) {
            Ok(inode) => {
                let entry = entry_out(&inode, self.writeback_cache);
                self.nodes.remember(&inode);
                entry
            }
            Err(error) => {
                tracing::debug!(ino = ino.0, %error, "an entry's inode cannot be read");
                EntryOut::default()
            }
        }
    }
}
