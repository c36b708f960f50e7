//! Loop devices that the program attached.
//!
//! Owns the list of those that were there before it. Invariant: a device is the program's own if it was
//! attached after the start, and its image lies in the program's scratch folder or on a file system that the
//! program has mounted, or the program has mounted the device. A difference of two lists would not tell: other
//! supervisors run at the same time.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::ioctl::{Getter, NoArg, ioctl, opcode};

use super::{
    bounded,
    look::SYS,
    seen::{Seen, disk_sequence},
    thaw,
};

/// How long a loop device that detaches itself may take: its last user may be a program that looks at all
/// block devices for a moment.
const PATIENCE: Duration = Duration::from_secs(10);
/// After this, what is frozen is looked for.
const FROZEN_AFTER: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);

// linux/loop.h.
const LOOP_CLR_FD: u32 = opcode::none(0x4c, 0x01);
const LOOP_GET_STATUS64: u32 = opcode::none(0x4c, 0x05);
/// `struct loop_info64`, which begins with the device number of the image's file system.
type LoopInfo = [u64; 29];

/// One attachment of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) image: PathBuf,
    /// See [`disk_sequence`].
    sequence: String,
}

/// All loop devices that have an image, by name.
pub(super) fn all() -> BTreeMap<String, Attached> {
    let names = SYS.names("block").into_iter().filter(|name| name.starts_with("loop"));
    let attached = |name: String| {
        let image = SYS.text(format!("block/{name}/loop/backing_file")).ok()?;
        // The kernel adds this to the name of a file that is removed.
        let image = image.trim_end_matches('\n').trim_end_matches(" (deleted)").into();
        let sequence = disk_sequence(&name);
        Some((name, Attached { image, sequence }))
    };
    names.filter_map(attached).collect()
}

/// The devices that came after `before` and are the program's own, as far as can be told without opening one:
/// an image may lie on a FUSE mount whose server does not answer.
pub(super) fn known(
    before: &BTreeMap<String, Attached>,
    scratch: &Path,
    seen: &Seen,
) -> BTreeMap<String, Attached> {
    let mut devices = all();
    devices.retain(|name, attached| {
        let is_own =
            attached.image.starts_with(scratch) || seen.has_mounted(name, &attached.sequence);
        is_own && before.get(name) != Some(attached)
    });
    devices
}

/// All of them. Of an image on a file system that is not mounted any more the path tells nothing, and each
/// supervisor has a /dev/shm.
pub(super) fn own(
    before: &BTreeMap<String, Attached>,
    scratch: &Path,
    seen: &Seen,
) -> BTreeMap<String, Attached> {
    let known = known(before, scratch, seen);
    // Those of the runs beside it are not opened: a device that is open does not detach at once.
    let beside = scratch.parent().unwrap_or(scratch);
    let mut devices = all();
    devices.retain(|name, attached| {
        known.contains_key(name)
            || before.get(name) != Some(attached)
                && !attached.image.starts_with(beside)
                && file_system(name, attached).is_some_and(|it| seen.is_mounted(it))
    });
    devices
}

fn open(name: &str) -> Option<File> {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    options.open(Path::new("/dev").join(name)).ok()
}

/// Number of the file system that the image lies on; `None` also if that does not answer. Each attachment is
/// asked once: to open a device delays its end.
fn file_system(name: &str, attached: &Attached) -> Option<u64> {
    static KNOWN: Mutex<BTreeMap<(String, String), Option<u64>>> = Mutex::new(BTreeMap::new());
    let key = (name.to_owned(), attached.sequence.clone());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(key).or_insert_with_key(|(name, sequence)| {
        let device = name.clone();
        let look = move || {
            // SAFETY: the call fills one `struct loop_info64`, which LoopInfo is as large as.
            let info =
                unsafe { ioctl(open(&device)?, Getter::<LOOP_GET_STATUS64, LoopInfo>::new()) };
            info.ok().map(|info| info[0])
        };
        bounded::ask(&format!("{name} {sequence}"), look).flatten()
    })
}

/// Waits for those of `list` that detach themselves; returns those that stay, and whether a frozen file system
/// kept one.
pub(super) fn await_detached(
    list: impl Fn() -> BTreeMap<String, Attached>,
) -> (BTreeMap<String, Attached>, bool) {
    let is_going = |name: &String| {
        let autoclear = SYS.text(format!("block/{name}/loop/autoclear"));
        autoclear.is_ok_and(|value| value.trim_end() == "1")
    };
    let (started, mut looked, mut was_frozen) = (Instant::now(), false, false);
    loop {
        let left = list();
        if !left.keys().any(is_going) || started.elapsed() >= PATIENCE {
            return (left, was_frozen);
        }
        if started.elapsed() >= FROZEN_AFTER && !looked {
            for name in left.keys().filter(|name| is_going(name)) {
                was_frozen |= thaw::device(name);
            }
            looked = true;
        }
        std::thread::sleep(POLL);
    }
}

/// Detaches a device; with a user that remains, it goes with that.
pub(super) fn detach(name: &str) {
    let Some(device) = open(name) else { return };
    // SAFETY: the call takes no argument.
    if let Err(error) = unsafe { ioctl(&device, NoArg::<LOOP_CLR_FD>::new()) } {
        say!("cannot detach {name}: {error}");
    }
}
