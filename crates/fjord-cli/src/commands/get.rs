//! `fjord get`: copy a file or directory out of an image.

use std::{
    ffi::OsStr,
    fs::{self, File, FileTimes, Permissions},
    io::Write,
    os::unix::{
        ffi::OsStrExt,
        fs::{PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use fjord::{Attr, FileKind, InodeRef, Timespec};
use fjord_format::inode::DeviceNumber;
use indicatif::ProgressBar;
use rustix::fs::Mode;

use super::ls;
use crate::{
    failure::{Context, Failure, Result},
    image, output,
    paths::{self, Last},
};

const COPY_BYTES: usize = 1 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "Modes and times are kept; owners too when root copies, and devices. \
Without root devices are left out; the copy goes on, names them and ends with status 1.\n\n\
Examples:\n  fjord get disk.img /etc/fstab\n  fjord get -r disk.img /var/log ./logs")]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// File or directory in the image
    path: String,
    /// Where to put it; a directory gets it under its own name
    #[arg(default_value = ".")]
    target: PathBuf,
    /// Copy a directory with all that is in it
    #[arg(short, long)]
    recursive: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fs = image::open_to_read(&args.image)?;
    let file = paths::find(&fs, &args.path, Last::Keep)?;
    if file.attr().kind() == FileKind::Directory && !args.recursive {
        return Err(Failure::new(format!("{}: is a directory; copy it with -r", args.path)));
    }
    let name = args.path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let target = match args.target.is_dir() && !name.is_empty() {
        true => args.target.join(name),
        false => args.target.clone(),
    };
    let mut copy = Copy {
        left_out: Vec::new(),
        bar: output::byte_progress(file.attr().size, "copying"),
        keep_owner: rustix::process::geteuid().is_root(),
    };
    copy.any(&file, &target).context(&args.path)?;
    copy.bar.finish_and_clear();
    match copy.left_out.as_slice() {
        [] => Ok(()),
        names => Err(Failure::new(format!(
            "copied, but for these, which need root:\n  {}",
            names.join("\n  ")
        ))),
    }
}

struct Copy {
    /// What could not be made here, with its kind.
    left_out: Vec<String>,
    bar: ProgressBar,
    keep_owner: bool,
}

impl Copy {
    fn any(&mut self, file: &InodeRef, target: &Path) -> Result<()> {
        let attr = file.attr();
        match attr.kind() {
            FileKind::Directory => {
                if !target.is_dir() {
                    fs::create_dir(target).context(target.display())?;
                }
                for name in ls::names(file)? {
                    let child = file.lookup(&name)?;
                    let target = target.join(OsStr::from_bytes(&name));
                    self.any(&child, &target).context(output::name(&name))?;
                }
            }
            FileKind::Regular => self.content(file, target)?,
            FileKind::Symlink => {
                let to = file.read_link()?;
                symlink(OsStr::from_bytes(&to), target).context(target.display())?;
            }
            kind => {
                if !make_node(&attr, target).context(target.display())? {
                    self.left_out.push(format!("{} ({})", target.display(), output::kind(kind)));
                    return Ok(());
                }
            }
        }
        if self.keep_owner {
            std::os::unix::fs::lchown(target, Some(attr.uid), Some(attr.gid))
                .context(target.display())?;
        }
        if attr.kind() != FileKind::Symlink {
            let mode = Permissions::from_mode(u32::from(attr.mode & 0o7777));
            fs::set_permissions(target, mode).context(target.display())?;
            let times = FileTimes::new()
                .set_accessed(system_time(attr.atime))
                .set_modified(system_time(attr.mtime));
            // A file without read permission cannot be opened for this, other than by root.
            // Opening a pipe or a device does something; they go without.
            let plain = matches!(attr.kind(), FileKind::Regular | FileKind::Directory);
            if plain && let Ok(file) = File::open(target) {
                file.set_times(times).context(target.display())?;
            }
        }
        Ok(())
    }

    fn content(&self, file: &InodeRef, target: &Path) -> Result<()> {
        let mut out = File::create(target).context(target.display())?;
        let mut buf = vec![0; COPY_BYTES];
        let mut offset = 0;
        loop {
            let len = file.read(offset, &mut buf)?;
            if len == 0 {
                return Ok(());
            }
            out.write_all(&buf[..len]).context(target.display())?;
            offset += len as u64;
            self.bar.set_position(offset);
        }
    }
}

/// Makes a device, pipe or socket; `false` if this user may not.
fn make_node(attr: &Attr, target: &Path) -> Result<bool> {
    let kind = rustix::fs::FileType::from_raw_mode(u32::from(attr.mode));
    let mode = Mode::from_raw_mode(u32::from(attr.mode) & 0o7777);
    let DeviceNumber { major, minor } = DeviceNumber::from_u32(attr.rdev);
    let device = rustix::fs::makedev(major, minor);
    match rustix::fs::mknodat(rustix::fs::CWD, target, kind, mode, device) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::PERM) => Ok(false),
        Err(e) => Err(std::io::Error::from(e).into()),
    }
}

fn system_time(t: Timespec) -> SystemTime {
    let nsec = Duration::from_nanos(u64::from(t.nsec));
    let whole = Duration::from_secs(t.sec.unsigned_abs());
    let base = SystemTime::UNIX_EPOCH;
    let seconds = if t.sec < 0 { base.checked_sub(whole) } else { base.checked_add(whole) };
    seconds.and_then(|s| s.checked_add(nsec)).unwrap_or(base)
}
