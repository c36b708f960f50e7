//! From the bytes of a request to a typed [`Request`], without copying.
//!
//! Invariants: nothing in the bytes is trusted (with virtiofs they come from a guest). A parsed
//! request borrows from the buffer; each slice in it lies inside the buffer; names are non-empty,
//! hold no NUL and no slash and are at most 255 bytes long. Unknown opcodes and malformed bodies
//! become a [`ParseError`] that names the errno to answer with, never a panic.

use crate::abi::*;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// Longest name of a directory entry or of an extended attribute, in bytes.
pub const NAME_LEN_MAX: usize = 255;

/// Errors of parsing a request.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParseError {
    /// The opcode is not known; the kernel falls back or stops asking on ENOSYS.
    #[error("unknown FUSE opcode {0}")]
    UnknownOpcode(u32),
    /// The body is shorter than its structure, or a count or length in it leads outside.
    #[error("malformed FUSE request: {0}")]
    Malformed(&'static str),
    /// A name is longer than [`NAME_LEN_MAX`].
    #[error("name longer than {NAME_LEN_MAX} bytes")]
    NameTooLong,
}

impl ParseError {
    /// The errno to answer with.
    pub fn errno(&self) -> i32 {
        match self {
            ParseError::UnknownOpcode(_) => libc::ENOSYS,
            ParseError::Malformed(_) => libc::EINVAL,
            ParseError::NameTooLong => libc::ENAMETOOLONG,
        }
    }
}

/// The operation of a request, with its arguments.
#[derive(Debug)]
#[expect(missing_docs, reason = "variants and fields carry the kernel's names")]
pub enum Op<'a> {
    Lookup {
        name: &'a [u8],
    },
    Forget {
        nlookup: u64,
    },
    BatchForget {
        nodes: &'a [ForgetOne],
    },
    Getattr(&'a GetattrIn),
    Setattr(&'a SetattrIn),
    Statx(&'a StatxIn),
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        args: &'a MknodIn,
        name: &'a [u8],
    },
    Mkdir {
        args: &'a MkdirIn,
        name: &'a [u8],
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    /// RENAME and RENAME2.
    Rename {
        newdir: u64,
        flags: u32,
        name: &'a [u8],
        newname: &'a [u8],
    },
    Link {
        oldnodeid: u64,
        newname: &'a [u8],
    },
    Open(&'a OpenIn),
    Read(&'a ReadIn),
    Write {
        args: &'a WriteIn,
        data: &'a [u8],
    },
    Statfs,
    Release(&'a ReleaseIn),
    Fsync(&'a FsyncIn),
    Setxattr {
        flags: u32,
        acl_kill_sgid: bool,
        name: &'a [u8],
        value: &'a [u8],
    },
    Getxattr {
        size: u32,
        name: &'a [u8],
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Flush(&'a FlushIn),
    Init {
        args: InitIn,
    },
    Opendir(&'a OpenIn),
    Readdir(&'a ReadIn),
    Readdirplus(&'a ReadIn),
    Releasedir(&'a ReleaseIn),
    Fsyncdir(&'a FsyncIn),
    Access(&'a AccessIn),
    Create {
        args: &'a CreateIn,
        name: &'a [u8],
    },
    Tmpfile(&'a CreateIn),
    Interrupt(&'a InterruptIn),
    Bmap(&'a BmapIn),
    Destroy,
    Ioctl {
        args: &'a IoctlIn,
        input: &'a [u8],
    },
    Fallocate(&'a FallocateIn),
    Lseek(&'a LseekIn),
    Syncfs,
    /// Known to the protocol, not served: the kernel has a fallback of its own (locks, poll,
    /// copy_file_range) or never asks without having been told to (DAX mappings).
    Unserved(Opcode),
}

/// A request: caller, node and operation.
#[derive(Debug)]
pub struct Request<'a> {
    /// Node, caller and the number that the reply must carry.
    pub header: &'a InHeader,
    /// The operation and its arguments.
    pub op: Op<'a>,
}

/// Reads the header alone, so that even a request that cannot be parsed gets a reply.
pub fn parse_header(bytes: &[u8]) -> Result<&InHeader, ParseError> {
    let (header, _) = InHeader::ref_from_prefix(bytes)
        .map_err(|_| ParseError::Malformed("shorter than its header"))?;
    if header.len as usize != bytes.len() {
        return Err(ParseError::Malformed("length in the header differs from the bytes received"));
    }
    Ok(header)
}

/// Parses a whole request. `bytes` must be aligned to 8 bytes, which each transport guarantees.
pub fn parse(bytes: &[u8]) -> Result<Request<'_>, ParseError> {
    let header = parse_header(bytes)?;
    let opcode = Opcode::from_raw(header.opcode).ok_or(ParseError::UnknownOpcode(header.opcode))?;
    let body = &bytes[size_of::<InHeader>()..];
    let ext_len = usize::from(header.total_extlen) * 8;
    let body_len =
        body.len().checked_sub(ext_len).ok_or(ParseError::Malformed("extensions too long"))?;
    Ok(Request { header, op: parse_op(opcode, Body(&body[..body_len]))? })
}

fn parse_op(opcode: Opcode, mut body: Body<'_>) -> Result<Op<'_>, ParseError> {
    Ok(match opcode {
        Opcode::Lookup => Op::Lookup { name: body.lookup_name()? },
        Opcode::Forget => Op::Forget { nlookup: body.take::<ForgetIn>()?.nlookup },
        Opcode::BatchForget => {
            let count = body.take::<BatchForgetIn>()?.count as usize;
            let (nodes, _) = <[ForgetOne]>::ref_from_prefix_with_elems(body.0, count)
                .map_err(|_| ParseError::Malformed("fewer nodes than the count says"))?;
            Op::BatchForget { nodes }
        }
        Opcode::Getattr => Op::Getattr(body.take()?),
        Opcode::Setattr => Op::Setattr(body.take()?),
        Opcode::Statx => Op::Statx(body.take()?),
        Opcode::Readlink => Op::Readlink,
        Opcode::Symlink => Op::Symlink { name: body.name()?, target: body.string()? },
        Opcode::Mknod => Op::Mknod { args: body.take()?, name: body.name()? },
        Opcode::Mkdir => Op::Mkdir { args: body.take()?, name: body.name()? },
        Opcode::Unlink => Op::Unlink { name: body.name()? },
        Opcode::Rmdir => Op::Rmdir { name: body.name()? },
        Opcode::Rename => {
            let newdir = body.take::<RenameIn>()?.newdir;
            Op::Rename { newdir, flags: 0, name: body.name()?, newname: body.name()? }
        }
        Opcode::Rename2 => {
            let args: &Rename2In = body.take()?;
            let (newdir, flags) = (args.newdir, args.flags);
            Op::Rename { newdir, flags, name: body.name()?, newname: body.name()? }
        }
        Opcode::Link => {
            let oldnodeid = body.take::<LinkIn>()?.oldnodeid;
            Op::Link { oldnodeid, newname: body.name()? }
        }
        Opcode::Open => Op::Open(body.take()?),
        Opcode::Opendir => Op::Opendir(body.take()?),
        Opcode::Create => Op::Create { args: body.take()?, name: body.name()? },
        // The name of an unnamed file is a place-holder of the kernel's.
        Opcode::Tmpfile => Op::Tmpfile(body.take()?),
        Opcode::Read => Op::Read(body.take()?),
        Opcode::Readdir => Op::Readdir(body.take()?),
        Opcode::Readdirplus => Op::Readdirplus(body.take()?),
        Opcode::Write => {
            let args: &WriteIn = body.take()?;
            Op::Write { args, data: body.exactly(args.size as usize)? }
        }
        Opcode::Release => Op::Release(body.take()?),
        Opcode::Releasedir => Op::Releasedir(body.take()?),
        Opcode::Fsync => Op::Fsync(body.take()?),
        Opcode::Fsyncdir => Op::Fsyncdir(body.take()?),
        Opcode::Flush => Op::Flush(body.take()?),
        Opcode::Statfs => Op::Statfs,
        Opcode::Syncfs => Op::Syncfs,
        Opcode::Destroy => Op::Destroy,
        _ => return parse_rare_op(opcode, body),
    })
}

fn parse_rare_op(opcode: Opcode, mut body: Body<'_>) -> Result<Op<'_>, ParseError> {
    Ok(match opcode {
        Opcode::Setxattr => {
            let args: &SetxattrIn = body.take()?;
            let name = body.xattr_name()?;
            let acl_kill_sgid = args.setxattr_flags & FUSE_SETXATTR_ACL_KILL_SGID != 0;
            let value = body.exactly(args.size as usize)?;
            Op::Setxattr { flags: args.flags, acl_kill_sgid, name, value }
        }
        Opcode::Getxattr => {
            let size = body.take::<GetxattrIn>()?.size;
            Op::Getxattr { size, name: body.xattr_name()? }
        }
        Opcode::Listxattr => Op::Listxattr { size: body.take::<GetxattrIn>()?.size },
        Opcode::Removexattr => Op::Removexattr { name: body.xattr_name()? },
        Opcode::Access => Op::Access(body.take()?),
        Opcode::Init => Op::Init { args: body.init()? },
        Opcode::Interrupt => Op::Interrupt(body.take()?),
        Opcode::Bmap => Op::Bmap(body.take()?),
        Opcode::Ioctl => {
            let args: &IoctlIn = body.take()?;
            Op::Ioctl { args, input: body.exactly(args.in_size as usize)? }
        }
        Opcode::Fallocate => Op::Fallocate(body.take()?),
        Opcode::Lseek => Op::Lseek(body.take()?),
        other => Op::Unserved(other),
    })
}

/// What is left of a request's body.
struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    fn take<T: FromBytes + Immutable + KnownLayout>(&mut self) -> Result<&'a T, ParseError> {
        let (value, rest) = T::ref_from_prefix(self.0)
            .map_err(|_| ParseError::Malformed("shorter than its structure"))?;
        self.0 = rest;
        Ok(value)
    }

    /// The next string, without its NUL.
    fn string(&mut self) -> Result<&'a [u8], ParseError> {
        let end = self
            .0
            .iter()
            .position(|&b| b == 0)
            .ok_or(ParseError::Malformed("string without an end"))?;
        let string = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Ok(string)
    }

    /// The next string as a name to look up: `.` and `..` are allowed.
    fn lookup_name(&mut self) -> Result<&'a [u8], ParseError> {
        let name = self.string()?;
        if name.is_empty() || name.contains(&b'/') {
            return Err(ParseError::Malformed("not a name"));
        }
        if name.len() > NAME_LEN_MAX {
            return Err(ParseError::NameTooLong);
        }
        Ok(name)
    }

    /// The next string as the name of a directory entry to make or remove.
    fn name(&mut self) -> Result<&'a [u8], ParseError> {
        let name = self.lookup_name()?;
        if name == b"." || name == b".." {
            return Err(ParseError::Malformed("not a name"));
        }
        Ok(name)
    }

    fn xattr_name(&mut self) -> Result<&'a [u8], ParseError> {
        let name = self.string()?;
        match name.len() {
            0 => Err(ParseError::Malformed("empty attribute name")),
            1..=NAME_LEN_MAX => Ok(name),
            _ => Err(ParseError::NameTooLong),
        }
    }

    fn exactly(&mut self, len: usize) -> Result<&'a [u8], ParseError> {
        if self.0.len() != len {
            return Err(ParseError::Malformed("payload differs from its stated size"));
        }
        Ok(std::mem::take(&mut self.0))
    }

    /// INIT in its old (16 bytes) or extended (64 bytes) form.
    fn init(&mut self) -> Result<InitIn, ParseError> {
        let mut padded = [0u8; size_of::<InitIn>()];
        if self.0.len() < FUSE_COMPAT_INIT_IN_SIZE {
            return Err(ParseError::Malformed("shorter than its structure"));
        }
        let len = self.0.len().min(padded.len());
        padded[..len].copy_from_slice(&self.0[..len]);
        InitIn::read_from_bytes(&padded).map_err(|_| ParseError::Malformed("INIT"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    /// A buffer with the alignment a transport gives.
    #[repr(align(8))]
    struct Aligned([u8; 4096]);

    fn request(opcode: u32, extlen: u16, body: &[&[u8]]) -> (Box<Aligned>, usize) {
        let body = body.concat();
        let len = size_of::<InHeader>() + body.len();
        let header = InHeader {
            len: len as u32,
            opcode,
            unique: 2,
            nodeid: 1,
            total_extlen: extlen,
            ..Default::default()
        };
        let mut buf = Box::new(Aligned([0; 4096]));
        buf.0[..40].copy_from_slice(header.as_bytes());
        buf.0[40..len].copy_from_slice(&body);
        (buf, len)
    }

    #[test]
    fn names_are_checked() {
        let (buf, len) = request(1, 0, &[b"ab\0"]);
        assert!(matches!(parse(&buf.0[..len]).unwrap().op, Op::Lookup { name: b"ab" }));
        for (name, errno) in [
            (&b"ab"[..], libc::EINVAL),
            (b"\0", libc::EINVAL),
            (b"a/b\0", libc::EINVAL),
            (&[&[b'x'; 256][..], b"\0"].concat(), libc::ENAMETOOLONG),
        ] {
            let (buf, len) = request(1, 0, &[name]);
            assert_eq!(parse(&buf.0[..len]).unwrap_err().errno(), errno);
        }
        let (buf, len) = request(10, 0, &[b"..\0"]);
        assert_eq!(parse(&buf.0[..len]).unwrap_err().errno(), libc::EINVAL);
    }

    #[test]
    fn sizes_must_agree_with_the_payload() {
        let args = WriteIn { size: 5, ..Default::default() };
        let (buf, len) = request(16, 0, &[args.as_bytes(), b"hello"]);
        assert!(matches!(parse(&buf.0[..len]).unwrap().op, Op::Write { data: b"hello", .. }));
        let (buf, len) = request(16, 0, &[args.as_bytes(), b"hell"]);
        assert!(parse(&buf.0[..len]).is_err());
        let count = BatchForgetIn { count: u32::MAX, dummy: 0 };
        let (buf, len) = request(42, 0, &[count.as_bytes(), ForgetOne::default().as_bytes()]);
        assert!(parse(&buf.0[..len]).is_err());
    }

    #[test]
    fn extensions_are_cut_off() {
        let (buf, len) = request(1, 1, &[b"name\0", &[7; 8]]);
        assert!(matches!(parse(&buf.0[..len]).unwrap().op, Op::Lookup { name: b"name" }));
        let (buf, len) = request(1, 9, &[b"name\0"]);
        assert!(parse(&buf.0[..len]).is_err());
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut buf = Box::new(Aligned([0; 4096]));
        for _ in 0..200_000 {
            let len = (seed >> 32) as usize % 200;
            for b in &mut buf.0[..len] {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                *b = seed as u8 & (seed >> 8) as u8;
            }
            if len >= 40 {
                buf.0[..4].copy_from_slice(&(len as u32).to_ne_bytes());
                buf.0[4..8].copy_from_slice(&((seed >> 40) as u32 % 56).to_ne_bytes());
                buf.0[36..38].copy_from_slice(&((seed >> 20) as u16 % 4).to_ne_bytes());
            }
            let _ = parse(&buf.0[..len]);
        }
    }
}
