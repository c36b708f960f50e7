//! The FUSE wire format: every structure, opcode and flag that crosses the transport.
//!
//! Owns the layout and nothing else. Field names are the kernel's (`include/uapi/linux/fuse.h`,
//! protocol 7.45); a request or reply is native-endian, packed to 64-bit boundaries, and each
//! structure's size is asserted at compile time against the kernel's. No field here is trusted:
//! ranges are checked where a request is parsed ([`crate::request`]).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major version spoken; a kernel with another major is refused.
pub const FUSE_KERNEL_VERSION: u32 = 7;
/// Highest minor version whose structures are known here.
pub const FUSE_KERNEL_MINOR_VERSION: u32 = 45;
/// Oldest minor version served (extended INIT flags, SYNCFS and TMPFILE are optional above it).
pub const FUSE_MIN_MINOR_VERSION: u32 = 31;
/// Node ID of the root directory.
pub const FUSE_ROOT_ID: u64 = 1;
/// Smallest buffer the kernel accepts for a read of the device, in bytes.
pub const FUSE_MIN_READ_BUFFER: usize = 8192;

/// Declares wire structures: `repr(C)`, parsed and written in place, size pinned.
macro_rules! wire {
    ($($(#[$meta:meta])* $name:ident: $size:literal { $($(#[$fmeta:meta])* $field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[expect(missing_docs, reason = "the fields carry the kernel's names and meaning")]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $size, stringify!($name));
    )*};
}

wire! {
    /// Start of every request.
    InHeader: 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64,
        uid: u32, gid: u32, pid: u32,
        /// Length of the extensions at the end of the request, in units of 8 bytes.
        total_extlen: u16,
        padding: u16,
    }
    /// Start of every reply.
    OutHeader: 16 { len: u32, error: i32, unique: u64 }

    /// Attributes of a node.
    FuseAttr: 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// A name's node, its attributes and how long both may be cached.
    EntryOut: 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: FuseAttr,
    }
    /// Attributes and how long they may be cached.
    AttrOut: 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: FuseAttr }

    /// A time in STATX.
    SxTime: 16 { tv_sec: i64, tv_nsec: u32, reserved: i32 }
    /// Attributes as statx(2) has them.
    FuseStatx: 256 {
        mask: u32, blksize: u32, attributes: u64,
        nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16,
        ino: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    /// STATX request.
    StatxIn: 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    /// STATX reply.
    StatxOut: 288 { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: FuseStatx }

    /// STATFS reply.
    StatfsOut: 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6],
    }

    /// FORGET request.
    ForgetIn: 8 { nlookup: u64 }
    /// One node of a BATCH_FORGET.
    ForgetOne: 16 { nodeid: u64, nlookup: u64 }
    /// BATCH_FORGET request, followed by `count` times [`ForgetOne`].
    BatchForgetIn: 8 { count: u32, dummy: u32 }

    /// GETATTR request.
    GetattrIn: 16 { getattr_flags: u32, dummy: u32, fh: u64 }
    /// SETATTR request; `valid` tells which fields count ([`Fattr`]).
    SetattrIn: 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    /// MKNOD request, followed by the name.
    MknodIn: 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
    /// MKDIR request, followed by the name.
    MkdirIn: 8 { mode: u32, umask: u32 }
    /// RENAME request, followed by the old and the new name.
    RenameIn: 8 { newdir: u64 }
    /// RENAME2 request, followed by the old and the new name.
    Rename2In: 16 { newdir: u64, flags: u32, padding: u32 }
    /// LINK request, followed by the new name.
    LinkIn: 8 { oldnodeid: u64 }
    /// OPEN and OPENDIR request.
    OpenIn: 8 { flags: u32, open_flags: u32 }
    /// CREATE and TMPFILE request, followed by the name.
    CreateIn: 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    /// OPEN reply, and second half of the CREATE reply.
    OpenOut: 16 { fh: u64, open_flags: u32, backing_id: i32 }
    /// RELEASE and RELEASEDIR request.
    ReleaseIn: 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    /// FLUSH request.
    FlushIn: 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    /// READ, READDIR and READDIRPLUS request.
    ReadIn: 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// WRITE request, followed by `size` bytes of data.
    WriteIn: 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// WRITE reply.
    WriteOut: 8 { size: u32, padding: u32 }
    /// FSYNC and FSYNCDIR request.
    FsyncIn: 16 { fh: u64, fsync_flags: u32, padding: u32 }
    /// SYNCFS request.
    SyncfsIn: 8 { padding: u64 }
    /// SETXATTR request with SETXATTR_EXT, followed by the name and `size` bytes of value.
    SetxattrIn: 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    /// GETXATTR and LISTXATTR request; GETXATTR is followed by the name.
    GetxattrIn: 8 { size: u32, padding: u32 }
    /// GETXATTR and LISTXATTR reply to a request with `size` 0.
    GetxattrOut: 8 { size: u32, padding: u32 }
    /// ACCESS request.
    AccessIn: 8 { mask: u32, padding: u32 }

    /// INIT request since 7.36.
    InitIn: 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11],
    }
    /// INIT reply.
    InitOut: 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16,
        flags2: u32, max_stack_depth: u32, request_timeout: u16, unused: [u16; 11],
    }
    /// INTERRUPT request.
    InterruptIn: 8 { unique: u64 }
    /// BMAP request.
    BmapIn: 16 { block: u64, blocksize: u32, padding: u32 }
    /// BMAP reply.
    BmapOut: 8 { block: u64 }
    /// IOCTL request, followed by `in_size` bytes.
    IoctlIn: 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    /// IOCTL reply, followed by the output bytes.
    IoctlOut: 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    /// FALLOCATE request.
    FallocateIn: 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    /// LSEEK request.
    LseekIn: 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    /// LSEEK reply.
    LseekOut: 8 { offset: u64 }
    /// A directory entry, followed by the name and padding to 8 bytes.
    Dirent: 24 { ino: u64, off: u64, namelen: u32, type_: u32 }
    /// NOTIFY_INVAL_INODE notification.
    NotifyInvalInodeOut: 24 { ino: u64, off: i64, len: i64 }

    /// What a ring's request and its reply say about themselves.
    FuseUringEntInOut: 32 { flags: u64, commit_id: u64, payload_sz: u32, padding: u32, reserved: u64 }
    /// The memory of a ring's entry beside the payload: [`InHeader`] or [`OutHeader`], and the first
    /// argument of a request.
    FuseUringReqHeader: 288 { in_out: [u64; 16], op_in: [u64; 16], ring_ent_in_out: FuseUringEntInOut }
    /// The command of a ring's submission.
    FuseUringCmdReq: 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6] }
    /// A submission of io_uring (`struct io_uring_sqe` of 128 bytes) with a ring's command in it.
    UringCmdSqe: 128 {
        opcode: u8, flags: u8, ioprio: u16, fd: i32, cmd_op: u32, pad1: u32, addr: u64, len: u32,
        uring_cmd_flags: u32, user_data: u64, buf_index: u16, personality: u16, splice_fd_in: i32,
        cmd: FuseUringCmdReq, unused: [u64; 7],
    }
}

/// Length of an INIT request from kernels before 7.36, in bytes.
pub const FUSE_COMPAT_INIT_IN_SIZE: usize = 16;

/// Declares the opcodes once, with their numbers and the way back from a number.
macro_rules! opcodes {
    ($($name:ident = $num:literal),* $(,)?) => {
        /// What a request asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        #[expect(missing_docs, reason = "the variants carry the kernel's names")]
        pub enum Opcode { $($name = $num),* }
        impl Opcode {
            /// The opcode with this number, if it is known here.
            pub fn from_raw(raw: u32) -> Option<Opcode> {
                match raw { $($num => Some(Opcode::$name),)* _ => None }
            }
        }
    };
}

opcodes! {
    Lookup = 1, Forget = 2, Getattr = 3, Setattr = 4, Readlink = 5, Symlink = 6, Mknod = 8,
    Mkdir = 9, Unlink = 10, Rmdir = 11, Rename = 12, Link = 13, Open = 14, Read = 15, Write = 16,
    Statfs = 17, Release = 18, Fsync = 20, Setxattr = 21, Getxattr = 22, Listxattr = 23,
    Removexattr = 24, Flush = 25, Init = 26, Opendir = 27, Readdir = 28, Releasedir = 29,
    Fsyncdir = 30, Getlk = 31, Setlk = 32, Setlkw = 33, Access = 34, Create = 35, Interrupt = 36,
    Bmap = 37, Destroy = 38, Ioctl = 39, Poll = 40, NotifyReply = 41, BatchForget = 42,
    Fallocate = 43, Readdirplus = 44, Rename2 = 45, Lseek = 46, CopyFileRange = 47,
    SetupMapping = 48, RemoveMapping = 49, Syncfs = 50, Tmpfile = 51, Statx = 52,
    CopyFileRange64 = 53,
}

#[expect(missing_docs, reason = "the constants carry the kernel's names")]
mod flags {
    use bitflags::bitflags;

    bitflags! {
        /// INIT flags; bits 32 and up travel in `flags2`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct InitFlags: u64 {
            const ASYNC_READ = 1 << 0;
            const POSIX_LOCKS = 1 << 1;
            const ATOMIC_O_TRUNC = 1 << 3;
            const EXPORT_SUPPORT = 1 << 4;
            const BIG_WRITES = 1 << 5;
            const DONT_MASK = 1 << 6;
            const SPLICE_WRITE = 1 << 7;
            const SPLICE_MOVE = 1 << 8;
            const SPLICE_READ = 1 << 9;
            const FLOCK_LOCKS = 1 << 10;
            const HAS_IOCTL_DIR = 1 << 11;
            const AUTO_INVAL_DATA = 1 << 12;
            const DO_READDIRPLUS = 1 << 13;
            const READDIRPLUS_AUTO = 1 << 14;
            const ASYNC_DIO = 1 << 15;
            const WRITEBACK_CACHE = 1 << 16;
            const NO_OPEN_SUPPORT = 1 << 17;
            const PARALLEL_DIROPS = 1 << 18;
            const HANDLE_KILLPRIV = 1 << 19;
            const POSIX_ACL = 1 << 20;
            const ABORT_ERROR = 1 << 21;
            const MAX_PAGES = 1 << 22;
            const CACHE_SYMLINKS = 1 << 23;
            const NO_OPENDIR_SUPPORT = 1 << 24;
            const EXPLICIT_INVAL_DATA = 1 << 25;
            const MAP_ALIGNMENT = 1 << 26;
            const SUBMOUNTS = 1 << 27;
            const HANDLE_KILLPRIV_V2 = 1 << 28;
            const SETXATTR_EXT = 1 << 29;
            const INIT_EXT = 1 << 30;
            const SECURITY_CTX = 1 << 32;
            const HAS_INODE_DAX = 1 << 33;
            const CREATE_SUPP_GROUP = 1 << 34;
            const HAS_EXPIRE_ONLY = 1 << 35;
            const DIRECT_IO_ALLOW_MMAP = 1 << 36;
            const PASSTHROUGH = 1 << 37;
            const NO_EXPORT_SUPPORT = 1 << 38;
            const HAS_RESEND = 1 << 39;
            const ALLOW_IDMAP = 1 << 40;
            const OVER_IO_URING = 1 << 41;
            const REQUEST_TIMEOUT = 1 << 42;
        }

        /// Which fields of [`SetattrIn`] count.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Fattr: u32 {
            const MODE = 1 << 0;
            const UID = 1 << 1;
            const GID = 1 << 2;
            const SIZE = 1 << 3;
            const ATIME = 1 << 4;
            const MTIME = 1 << 5;
            const FH = 1 << 6;
            const ATIME_NOW = 1 << 7;
            const MTIME_NOW = 1 << 8;
            const LOCKOWNER = 1 << 9;
            const CTIME = 1 << 10;
            const KILL_SUIDGID = 1 << 11;
        }

        /// What the kernel may do with an open file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct OpenReplyFlags: u32 {
            const DIRECT_IO = 1 << 0;
            const KEEP_CACHE = 1 << 1;
            const NONSEEKABLE = 1 << 2;
            const CACHE_DIR = 1 << 3;
            const STREAM = 1 << 4;
            const NOFLUSH = 1 << 5;
            const PARALLEL_DIRECT_WRITES = 1 << 6;
        }
    }
}
pub use flags::{Fattr, InitFlags, OpenReplyFlags};

/// OPEN and CREATE: drop set-user-ID and set-group-ID on truncation.
pub const FUSE_OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// WRITE: comes from the page cache; the file handle is a guess.
pub const FUSE_WRITE_CACHE: u32 = 1 << 0;
/// WRITE: drop set-user-ID and set-group-ID.
pub const FUSE_WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// FSYNC: data only.
pub const FUSE_FSYNC_FDATASYNC: u32 = 1 << 0;
/// GETATTR and STATX: the file handle counts.
pub const FUSE_GETATTR_FH: u32 = 1 << 0;
/// IOCTL: the caller is a 32-bit program.
pub const FUSE_IOCTL_32BIT: u32 = 1 << 3;
/// SETXATTR: an access ACL is set by a user outside the owning group; drop set-group-ID.
pub const FUSE_SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// Notification code of [`NotifyInvalInodeOut`].
pub const FUSE_NOTIFY_INVAL_INODE: i32 = 2;
/// Ring command: here is the memory of an entry; fetch a request.
pub const FUSE_IO_URING_CMD_REGISTER: u32 = 1;
/// Ring command: the entry's reply is there; fetch the next request.
pub const FUSE_IO_URING_CMD_COMMIT_AND_FETCH: u32 = 2;
/// `_IOR(229, 0, u32)`: binds a fresh /dev/fuse descriptor to an existing connection.
pub const FUSE_DEV_IOC_CLONE: u32 = 0x8004_e500;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_init_flags_travel_in_flags2() {
        let flags = InitFlags::SECURITY_CTX | InitFlags::INIT_EXT;
        assert_eq!((flags.bits() >> 32) as u32, 1);
        assert_eq!(flags.bits() as u32, 1 << 30);
    }

    #[test]
    fn opcodes_go_both_ways() {
        for raw in 0..64 {
            if let Some(op) = Opcode::from_raw(raw) {
                assert_eq!(op as u32, raw);
            }
        }
        assert_eq!(Opcode::from_raw(51), Some(Opcode::Tmpfile));
        assert_eq!(Opcode::from_raw(4096), None);
    }
}
