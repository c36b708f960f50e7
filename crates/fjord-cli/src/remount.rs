//! `mount -o remount` as the mount helper: what can be changed while fjord serves, and a message
//! for the rest.
//!
//! A remount is between mount(8) and the kernel, the daemon never hears of it. So the kernel's own
//! flags change (ro, rw, nosuid, ...), and what fjord does by itself does not.

use std::path::Path;

use fjord::AtimeMode;
use fjord_fuse::{
    mount::{self, FuseOptions},
    stats::MountStats,
};
use rustix::mount::MountFlags;

use crate::failure::{Context, Failure, Result};

/// Flags that fjord goes by as well as the kernel.
const OF_FJORD: MountFlags = MountFlags::SYNCHRONOUS.union(MountFlags::NODIRATIME);
/// How access times are kept. A remount that names none of them leaves them as they are.
const ATIME: MountFlags = MountFlags::NOATIME
    .union(MountFlags::NODIRATIME)
    .union(MountFlags::RELATIME)
    .union(MountFlags::STRICTATIME);
/// What mount(8) reads from the mount table and hands back.
const OF_THE_TABLE: [&str; 2] = ["user_id", "group_id"];

/// Changes the mount on `dir` to what the lists of options say.
pub(crate) fn run(dir: &Path, lists: &[String]) -> Result<()> {
    let dir = std::fs::canonicalize(dir).context(dir.display())?;
    let entry = mount::mount_at(&dir).context("/proc/self/mountinfo")?;
    if !entry.is_some_and(|entry| entry.is_fjord()) {
        return Err(Failure::new(format!("{} is not a fjord mount", dir.display())));
    }
    let now = mount::flags_of(&dir)?;
    let mut wanted = FuseOptions { flags: now, ..FuseOptions::default() };
    let mut kept = Vec::new();
    for list in lists {
        let unclaimed = wanted.parse(list)?.into_iter().map(|option| option.name);
        kept.extend(unclaimed.filter(|name| !OF_THE_TABLE.contains(&name.as_str())));
    }
    if atime(wanted.flags) != atime(now) || (wanted.flags ^ now).intersects(OF_FJORD) {
        return Err(fixed(&dir, "a remount cannot change access times and sync"));
    }
    let read_only = MountStats::read(&dir).context(dir.display())?.health.read_only;
    if read_only && !wanted.flags.contains(MountFlags::RDONLY) {
        return Err(fixed(&dir, "it was mounted read-only"));
    }
    mount::remount(&dir, wanted.flags - ATIME)?;
    if !kept.is_empty() {
        tracing::warn!(
            "a remount changes only ro, rw, nosuid, nodev and noexec; unchanged: {}",
            kept.join(", ")
        );
    }
    Ok(())
}

fn fixed(dir: &Path, what: &str) -> Failure {
    Failure::usage(format!(
        "{} cannot be remounted with these options: {what}; run `umount {0}`, then mount it again \
         with the new options",
        dir.display()
    ))
}

fn atime(flags: MountFlags) -> AtimeMode {
    if flags.contains(MountFlags::NOATIME) {
        AtimeMode::Never
    } else if flags.contains(MountFlags::STRICTATIME) || !flags.contains(MountFlags::RELATIME) {
        AtimeMode::Strict
    } else {
        AtimeMode::Relatime
    }
}
