//! A loop device as the source of a `fuseblk` mount, and the list of loop devices.
//!
//! fjord's own I/O goes to the image file, never through the device: the kernel asks for a block
//! device only because a `fuseblk` mount is one whose sync, syncfs and umount wait for the server.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::ffi::OsStrExt,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::fs::{MemfdFlags, memfd_create};

/// Bytes of the file that stands in for an image which lies in none.
const STAND_IN_BYTES: u64 = 1 << 20;
/// Bytes of a name that memfd_create(2) takes.
const STAND_IN_NAME_MAX: usize = 249;
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo64 {
    lo_device: u64,
    lo_inode: u64,
    lo_rdevice: u64,
    lo_offset: u64,
    lo_sizelimit: u64,
    lo_number: u32,
    lo_encrypt_type: u32,
    lo_encrypt_key_size: u32,
    lo_flags: u32,
    lo_file_name: [u8; 64],
    lo_crypt_name: [u8; 64],
    lo_encrypt_key: [u8; 32],
    lo_init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo64>() == 232 && size_of::<LoopConfig>() == 304);

/// A loop device that detaches itself when its last user (this handle, or a mount) is gone.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    _device: File,
}

impl LoopDevice {
    /// Attaches `image`, or a range of it, to a free loop device.
    ///
    /// # Errors
    /// No loop driver, no permission, no free device.
    pub fn attach(
        image: &Path,
        range: Option<&Range<u64>>,
        read_only: bool,
    ) -> io::Result<LoopDevice> {
        let file = File::options().read(true).write(!read_only).open(image)?;
        LoopDevice::attach_file(&file, image, range, read_only)
    }

    /// Attaches a file in memory that bears the name of `image`, which lies in no file. Nothing of it is ever read.
    ///
    /// # Errors
    /// As [`LoopDevice::attach`].
    pub fn attach_stand_in(image: &Path, read_only: bool) -> io::Result<LoopDevice> {
        let file = File::from(memfd_create(stand_in_name(image), MemfdFlags::CLOEXEC)?);
        file.set_len(STAND_IN_BYTES)?;
        LoopDevice::attach_file(&file, image, None, read_only)
    }

    fn attach_file(
        file: &File,
        image: &Path,
        range: Option<&Range<u64>>,
        read_only: bool,
    ) -> io::Result<LoopDevice> {
        let control = File::options().read(true).write(true).open("/dev/loop-control")?;
        loop {
            // SAFETY: the ioctl takes no argument and returns a number.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = File::options().read(true).write(!read_only).open(&path)?;
            match configure(&device, file, image, range, read_only) {
                Ok(()) => return Ok(LoopDevice { path, _device: device }),
                // Another process has taken this one.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// `/dev/loopN`.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The name of the file that stands in for an image.
fn stand_in_name(image: &Path) -> &[u8] {
    let name = image.as_os_str().as_bytes();
    &name[..name.len().min(STAND_IN_NAME_MAX)]
}

/// The image that lies in no file and for which the file of a loop device stands in; a long name is cut.
pub fn stood_in_for(file: &Path) -> Option<PathBuf> {
    let name = file.as_os_str().as_bytes().strip_prefix(b"/memfd:")?;
    Some(OsStr::from_bytes(name.strip_suffix(b" (deleted)").unwrap_or(name)).into())
}

/// Whether the file of a loop device stands in for this image.
pub fn is_stand_in_for(file: &Path, image: &Path) -> bool {
    stood_in_for(file).is_some_and(|name| name.as_os_str().as_bytes() == stand_in_name(image))
}

fn configure(
    device: &File,
    file: &File,
    image: &Path,
    range: Option<&Range<u64>>,
    read_only: bool,
) -> io::Result<()> {
    let mut name = [0u8; 64];
    let shown = image.as_os_str().as_encoded_bytes();
    let len = shown.len().min(name.len() - 1);
    name[..len].copy_from_slice(&shown[..len]);
    let config = LoopConfig {
        fd: file.as_raw_fd() as u32,
        block_size: 0,
        info: LoopInfo64 {
            lo_device: 0,
            lo_inode: 0,
            lo_rdevice: 0,
            lo_offset: range.map_or(0, |range| range.start),
            lo_sizelimit: range.map_or(0, |range| range.end - range.start),
            lo_number: 0,
            lo_encrypt_type: 0,
            lo_encrypt_key_size: 0,
            lo_flags: LO_FLAGS_AUTOCLEAR | if read_only { LO_FLAGS_READ_ONLY } else { 0 },
            lo_file_name: name,
            lo_crypt_name: [0; 64],
            lo_encrypt_key: [0; 32],
            lo_init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: the kernel reads one `loop_config` through a pointer valid for the call.
    let rc = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A loop device and the file behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopBacking {
    /// `/dev/loopN`.
    pub device: PathBuf,
    /// The file as the kernel names it; ends in ` (deleted)` when it was unlinked.
    pub file: PathBuf,
    /// The bytes of the file; unbounded without a size limit.
    pub range: Range<u64>,
    /// It detaches itself when its last user has gone, as the loop device of a fjord mount does.
    pub is_stand_in: bool,
}

/// The loop devices in use and their files, from sysfs.
pub fn loop_backings() -> Vec<LoopBacking> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("loop")?;
            let value = |name: &str| fs::read_to_string(entry.path().join("loop").join(name)).ok();
            let file = value("backing_file")?;
            let number =
                |name| value(name).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
            let (start, len) = (number("offset"), number("sizelimit"));
            let end = if len == 0 { u64::MAX } else { start.saturating_add(len) };
            Some(LoopBacking {
                device: Path::new("/dev").join(&name),
                file: PathBuf::from(file.trim_end_matches('\n')),
                range: start..end,
                is_stand_in: number("autoclear") == 1,
            })
        })
        .collect()
}

/// Whether two paths name the same block device.
pub(super) fn same_device(a: &Path, b: &Path) -> bool {
    let rdev = |path| fs::metadata(path).ok().filter(|m| m.file_type().is_block_device());
    matches!((rdev(a), rdev(b)), (Some(a), Some(b)) if a.rdev() == b.rdev())
}

/// Whether two paths name the same file, links and bind mounts included.
pub fn same_file(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => a.dev() == b.dev() && a.ino() == b.ino(),
        _ => a == b,
    }
}
