//! Renaming: plain, without replacing, exchanging, leaving a whiteout.
//!
//! Invariants: all checks come before the first change; the only changes that can fail for
//! want of space, the whiteout's inode and the new entry, come first and are taken back; no
//! directory ever becomes its own descendant, because renames between directories exclude
//! each other while ancestors are looked at and changed.

use std::collections::HashSet;
use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::InodeNo;
use fjord_format::dirent::FileType;
use fjord_format::inode::InodeFlags;
use fjord_journal::Handle;
use parking_lot::RwLockWriteGuard;
use rustix::io::Errno;

use super::new::{self, Wanted};
use super::{
    add_subdir, check_dir, check_may_add, check_may_remove, child, credits_add_entry,
    credits_new_inode, credits_remove_entry, drop_link, drop_subdir, file_type, links_full,
    note_name_free, note_removed, retry_full, store_changed_dir,
};
use crate::attr::{Cred, S_IFCHR, Timespec};
use crate::dir::{self, Found};
use crate::error::{Error, Result};
use crate::file::writeback;
use crate::fs::FsInner;
use crate::inode::changes::{CommitReason, Fate, Removed, Shown};
use crate::inode::{Inode, InodeState, attr, disk, table};
use crate::vfs::{InodeRef, RenameFlags};

/// Renames `old_name` in `old_dir` to `new_name` in `new_dir`. Returns the inode that lost
/// its name to that, if one did.
///
/// # Errors
/// As `renameat2(2)`: `ENOENT`, `EEXIST`, `EINVAL`, `ENOTEMPTY`, `EISDIR`, `ENOTDIR`, `EBUSY`,
/// `EPERM`, `EMLINK`, `EXDEV`, `ENOSPC`; damage, I/O.
pub(crate) fn rename(
    fs: &Arc<FsInner>,
    old_dir: &Arc<Inode>,
    old_name: &[u8],
    new_dir: &Arc<Inode>,
    new_name: &[u8],
    flags: RenameFlags,
    cred: &Cred,
) -> Result<Option<InodeRef>> {
    check_flags(flags)?;
    for dir in [old_dir, new_dir] {
        check_dir(&dir.state.read())?;
    }
    check_names(old_name, new_name, flags)?;
    if !flags.contains(RenameFlags::EXCHANGE) {
        write_source_first(fs, (old_dir, old_name), (new_dir, new_name))?;
    }
    let call = Call { fs, old_dir, old_name, new_dir, new_name, flags, cred };
    retry_full(fs, || rename_once(&call))
}

fn rename_once(call: &Call<'_>) -> Result<Option<InodeRef>> {
    let Call { fs, old_dir, new_dir, .. } = *call;
    if old_dir.ino == new_dir.ino {
        let dirs = Dirs { old: old_dir.state.write(), new: None };
        return call.run(dirs, &Ancestors::default());
    }
    let _topology = fs.rename_lock.lock();
    let ancestors = Ancestors { of_old: lineage(fs, old_dir)?, of_new: lineage(fs, new_dir)? };
    let new_first = ancestors.of_old.contains(&new_dir.ino)
        || (!ancestors.of_new.contains(&old_dir.ino) && new_dir.ino < old_dir.ino);
    let dirs = if new_first {
        let new = new_dir.state.write();
        Dirs { old: old_dir.state.write(), new: Some(new) }
    } else {
        let old = old_dir.state.write();
        Dirs { old, new: Some(new_dir.state.write()) }
    };
    call.run(dirs, &ancestors)
}

fn check_flags(flags: RenameFlags) -> Result<()> {
    let exchange = flags.contains(RenameFlags::EXCHANGE);
    let unknown = flags.bits() & !RenameFlags::all().bits() != 0;
    if unknown || (exchange && flags.intersects(RenameFlags::NOREPLACE | RenameFlags::WHITEOUT)) {
        return Err(Errno::INVAL.into());
    }
    Ok(())
}

fn check_names(old_name: &[u8], new_name: &[u8], flags: RenameFlags) -> Result<()> {
    if [old_name, new_name].iter().any(|name| matches!(*name, b"." | b"..")) {
        let taken = flags.contains(RenameFlags::NOREPLACE) && matches!(new_name, b"." | b"..");
        return Err(if taken { Errno::EXIST } else { Errno::BUSY }.into());
    }
    dir::check_name(old_name)
}

/// A file that replaces another one gets its data on the device first, so that a crash never
/// shows the new name with neither content (`auto_da_alloc`).
fn write_source_first(
    fs: &Arc<FsInner>,
    (old_dir, old_name): (&Arc<Inode>, &[u8]),
    (new_dir, new_name): (&Arc<Inode>, &[u8]),
) -> Result<()> {
    let peek = |inode: &Arc<Inode>, name: &[u8]| -> Result<Option<InodeNo>> {
        let state = inode.state.read();
        check_dir(&state)?;
        Ok(dir::find(fs, inode, &state, name)?.map(|found| found.ino))
    };
    let Some(source) = peek(old_dir, old_name)? else { return Err(Errno::NOENT.into()) };
    if peek(new_dir, new_name)?.is_none() {
        return Ok(());
    }
    // An inode with dirty pages is in memory; any other has nothing to write.
    match fs.inodes.peek(source) {
        Some(inode) if inode.pages.has_dirty() => writeback::flush_for_rename(fs, &inode),
        _ => Ok(()),
    }
}

/// Directories above the two of a rename, themselves included; empty in a rename inside one.
#[derive(Default)]
struct Ancestors {
    of_old: HashSet<InodeNo>,
    of_new: HashSet<InodeNo>,
}

/// The directory and all above it. Called under `rename_lock`, so that they stay that.
fn lineage(fs: &Arc<FsInner>, start: &Arc<Inode>) -> Result<HashSet<InodeNo>> {
    let mut seen = HashSet::new();
    let mut inode = start.clone();
    loop {
        if !seen.insert(inode.ino) {
            let detail = format!("inode {} is its own ancestor", inode.ino);
            return Err(Error::corrupt("directory", detail));
        }
        if inode.ino == InodeNo::ROOT {
            return Ok(seen);
        }
        let parent = {
            let state = inode.state.read();
            check_dir(&state)?;
            dir::parent(fs, &inode, &state)?
        };
        inode = table::get(fs, parent)?;
    }
}

/// The locked directories of a rename.
struct Dirs<'a> {
    old: RwLockWriteGuard<'a, InodeState>,
    /// `None` when it is the same one.
    new: Option<RwLockWriteGuard<'a, InodeState>>,
}

impl Dirs<'_> {
    fn of_old(&mut self) -> &mut InodeState {
        &mut self.old
    }

    fn of_new(&mut self) -> &mut InodeState {
        match &mut self.new {
            Some(new) => new,
            None => &mut self.old,
        }
    }
}

/// What a rename was asked to do.
struct Call<'a> {
    fs: &'a Arc<FsInner>,
    old_dir: &'a Arc<Inode>,
    old_name: &'a [u8],
    new_dir: &'a Arc<Inode>,
    new_name: &'a [u8],
    flags: RenameFlags,
    cred: &'a Cred,
}

/// The inodes that a rename moves or replaces, locked.
struct Moving<'a> {
    source: &'a Arc<Inode>,
    source_state: RwLockWriteGuard<'a, InodeState>,
    target: Option<(&'a Arc<Inode>, RwLockWriteGuard<'a, InodeState>)>,
}

impl<'a> Moving<'a> {
    /// Locks in order: directories first, then by number.
    fn lock(source: &'a Arc<Inode>, target: Option<&'a Arc<Inode>>) -> Moving<'a> {
        let Some(target) = target else {
            return Moving { source, source_state: source.state.write(), target: None };
        };
        // Whether an inode is a directory never changes.
        let key = |inode: &Arc<Inode>| (!inode.state.read().is_dir(), inode.ino);
        if key(source) < key(target) {
            let source_state = source.state.write();
            Moving { source, source_state, target: Some((target, target.state.write())) }
        } else {
            let target_state = target.state.write();
            let source_state = source.state.write();
            Moving { source, source_state, target: Some((target, target_state)) }
        }
    }
}

impl Call<'_> {
    fn is_cross(&self) -> bool {
        self.old_dir.ino != self.new_dir.ino
    }

    fn run(&self, mut dirs: Dirs<'_>, ancestors: &Ancestors) -> Result<Option<InodeRef>> {
        let fs = self.fs;
        check_dir(dirs.of_old())?;
        check_dir(dirs.of_new())?;
        let old = dir::find(fs, self.old_dir, dirs.of_old(), self.old_name)?.ok_or(Errno::NOENT)?;
        // A source that is missing counts before a new name that cannot be.
        dir::check_name(self.new_name)?;
        let new = dir::find(fs, self.new_dir, dirs.of_new(), self.new_name)?;
        let exchange = self.flags.contains(RenameFlags::EXCHANGE);
        match new {
            Some(_) if self.flags.contains(RenameFlags::NOREPLACE) => {
                return Err(Errno::EXIST.into());
            }
            None if exchange => return Err(Errno::NOENT.into()),
            _ => {}
        }
        if ancestors.of_new.contains(&old.ino) {
            return Err(Errno::INVAL.into());
        }
        if new.is_some_and(|new| ancestors.of_old.contains(&new.ino)) {
            return Err(if exchange { Errno::INVAL } else { Errno::NOTEMPTY }.into());
        }
        if new.is_some_and(|new| new.ino == old.ino) {
            return Ok(None);
        }
        let source = child(fs, self.old_dir, old.ino)?;
        let target = new.map(|new| child(fs, self.new_dir, new.ino)).transpose()?;
        if exchange {
            let moving = Moving::lock(&source, target.as_ref());
            self.exchange(&mut dirs, moving)?;
            return Ok(None);
        }
        {
            let mut moving = Moving::lock(&source, target.as_ref());
            self.check_plain(&mut dirs, &moving)?;
            self.plain(&mut dirs, &mut moving, new.as_ref())?;
        }
        Ok(target.map(|target| InodeRef::new(fs, target)))
    }

    fn check_plain(&self, dirs: &mut Dirs<'_>, moving: &Moving<'_>) -> Result<()> {
        let source = &moving.source_state;
        check_may_remove(dirs.of_old(), source)?;
        match &moving.target {
            None => check_may_add(dirs.of_new())?,
            Some((target, state)) => {
                check_may_remove(dirs.of_new(), state)?;
                match (source.is_dir(), state.is_dir()) {
                    (true, false) => return Err(Errno::NOTDIR.into()),
                    (false, true) => return Err(Errno::ISDIR.into()),
                    _ => {}
                }
                if target.ino == InodeNo::ROOT {
                    return Err(Errno::BUSY.into());
                }
            }
        }
        check_project(dirs.of_new(), source)?;
        if !source.is_dir() {
            return Ok(());
        }
        match &moving.target {
            Some((target, state)) if !dir::is_empty(self.fs, target, state)? => {
                return Err(Errno::NOTEMPTY.into());
            }
            None if self.is_cross() && links_full(self.fs, dirs.of_new()) => {
                return Err(Errno::MLINK.into());
            }
            _ => {}
        }
        self.check_parent(moving.source, source, self.old_dir)
    }

    /// Fails if a directory that is to move does not think that `parent` is its parent.
    fn check_parent(&self, inode: &Inode, state: &InodeState, parent: &Inode) -> Result<()> {
        if self.is_cross() && dir::parent(self.fs, inode, state)? != parent.ino {
            let detail = format!("inode {} has another parent than {}", inode.ino, parent.ino);
            return Err(Error::corrupt("directory", detail));
        }
        Ok(())
    }

    fn credits(&self) -> u32 {
        let fs = self.fs;
        let whiteout =
            if self.flags.contains(RenameFlags::WHITEOUT) { credits_new_inode(fs) } else { 0 };
        credits_add_entry(fs) + 2 * credits_remove_entry() + whiteout
    }

    fn plain(
        &self,
        dirs: &mut Dirs<'_>,
        moving: &mut Moving<'_>,
        new: Option<&Found>,
    ) -> Result<()> {
        let fs = self.fs;
        let mut h = fs.start(self.credits())?;
        let whiteout = match self.flags.contains(RenameFlags::WHITEOUT) {
            true => Some(self.make_whiteout(&h, dirs.of_old())?),
            false => None,
        };
        if let Err(error) = self.take_new_name(&h, dirs, moving, new) {
            if let Some(whiteout) = &whiteout {
                new::take_back(fs, &h, whiteout, &mut whiteout.state.write())?;
            }
            return Err(error);
        }
        if planted(Bug::RenameInTwo) {
            h = fs.split_change(h)?;
        }
        self.leave_old_name(&h, dirs, whiteout.as_ref())?;
        let time = fs.now();
        self.count_links(&h, dirs, moving, time)?;
        self.note_moved(
            &h,
            dirs.of_old(),
            self.old_name,
            (moving.source, &mut moving.source_state),
        );
        if let Some((target, state)) = &mut moving.target {
            note_removed(fs, &h, dirs.of_new(), self.new_name, (target.ino, state));
        }
        if self.is_cross() {
            store_changed_dir(fs, &h, self.new_dir, dirs.of_new(), time)?;
        }
        store_changed_dir(fs, &h, self.old_dir, dirs.of_old(), time)?;
        h.stop();
        Ok(())
    }

    /// Lets the new name stand for the source.
    fn take_new_name(
        &self,
        h: &Handle,
        dirs: &mut Dirs<'_>,
        moving: &Moving<'_>,
        new: Option<&Found>,
    ) -> Result<()> {
        let (fs, ino) = (self.fs, moving.source.ino);
        let kind = file_type(&moving.source_state);
        match new {
            Some(new) => dir::replace(fs, h, self.new_dir, dirs.of_new(), new, ino, kind),
            None => dir::insert(fs, h, self.new_dir, dirs.of_new(), self.new_name, ino, kind),
        }
    }

    /// Takes the old name away, or gives it to the whiteout.
    fn leave_old_name(
        &self,
        h: &Handle,
        dirs: &mut Dirs<'_>,
        whiteout: Option<&Arc<Inode>>,
    ) -> Result<()> {
        let fs = self.fs;
        // Where the entry stands may have changed with the new name.
        let old = dir::find(fs, self.old_dir, dirs.of_old(), self.old_name)?.ok_or_else(|| {
            Error::corrupt("directory", format!("inode {}: a name is gone", self.old_dir.ino))
        })?;
        let Some(whiteout) = whiteout else {
            return dir::remove(fs, h, self.old_dir, dirs.of_old(), &old);
        };
        let kind = FileType::CharDevice;
        dir::replace(fs, h, self.old_dir, dirs.of_old(), &old, whiteout.ino, kind)
    }

    /// Notes for fsync that an inode left a name for another one.
    fn note_moved(
        &self,
        h: &Handle,
        dir_state: &mut InodeState,
        name: &[u8],
        (inode, state): (&Inode, &mut InodeState),
    ) {
        let (fate, shown) = (Fate::Moved, Shown::Other);
        let removed = Removed { tid: h.tid(), ino: inode.ino, fate, shown };
        note_name_free(self.fs, dir_state, name, removed);
        state.changes.require_commit(h.tid(), CommitReason::Rename);
    }

    fn make_whiteout(&self, h: &Handle, dir_state: &InodeState) -> Result<Arc<Inode>> {
        let (fs, dir) = (self.fs, self.old_dir);
        let wanted = Wanted { mode: S_IFCHR, rdev: 0, cred: self.cred };
        let inode = new::allocate(fs, h, dir, dir_state, &wanted)?;
        let mut state = inode.state.write();
        let done = new::prepare(fs, h, (dir, dir_state), &inode, &mut state, self.cred);
        state.disk.links_count = 1;
        state.changes.born(h.tid());
        state.changes.require_commit(h.tid(), CommitReason::Rename);
        if let Err(error) = done.and_then(|()| disk::store(fs, h, &inode, &mut state)) {
            new::take_back(fs, h, &inode, &mut state)?;
            return Err(error);
        }
        drop(state);
        Ok(inode)
    }

    /// Link counts, `..` and times of the inodes that were moved or replaced.
    fn count_links(
        &self,
        h: &Handle,
        dirs: &mut Dirs<'_>,
        moving: &mut Moving<'_>,
        time: Timespec,
    ) -> Result<()> {
        let fs = self.fs;
        if moving.source_state.is_dir() {
            drop_subdir(dirs.of_old());
            if moving.target.is_none() {
                add_subdir(dirs.of_new());
            }
            if self.is_cross() {
                let state = &mut moving.source_state;
                dir::set_parent(fs, h, moving.source, state, self.new_dir.ino)?;
            }
        }
        attr::set_ctime(&mut moving.source_state.disk, time);
        disk::store(fs, h, moving.source, &mut moving.source_state)?;
        if let Some((target, state)) = &mut moving.target {
            drop_link(fs, h, target, state, time)?;
        }
        Ok(())
    }

    fn exchange(&self, dirs: &mut Dirs<'_>, mut moving: Moving<'_>) -> Result<()> {
        let fs = self.fs;
        let Some((target, mut target_state)) = moving.target.take() else {
            return Err(Errno::NOENT.into());
        };
        let (source, mut source_state) = (moving.source, moving.source_state);
        check_may_remove(dirs.of_old(), &source_state)?;
        check_may_remove(dirs.of_new(), &target_state)?;
        check_project(dirs.of_new(), &source_state)?;
        check_project(dirs.of_old(), &target_state)?;
        let (source_is_dir, target_is_dir) = (source_state.is_dir(), target_state.is_dir());
        if source_is_dir {
            self.check_parent(source, &source_state, self.old_dir)?;
        }
        if target_is_dir {
            self.check_parent(target, &target_state, self.new_dir)?;
        }
        let counts_change = self.is_cross() && source_is_dir != target_is_dir;
        if counts_change {
            let gains = if source_is_dir { dirs.of_new() } else { dirs.of_old() };
            if links_full(fs, gains) {
                return Err(Errno::MLINK.into());
            }
        }
        let h = fs.start(2 * credits_remove_entry() + 2 * disk::STORE_CREDITS)?;
        self.swap_entries(
            &h,
            dirs,
            (source.ino, file_type(&source_state)),
            (target.ino, file_type(&target_state)),
        )?;
        if counts_change {
            let (gains, loses) = if source_is_dir { (true, false) } else { (false, true) };
            add_subdir(if gains { dirs.of_new() } else { dirs.of_old() });
            drop_subdir(if loses { dirs.of_new() } else { dirs.of_old() });
        }
        self.note_moved(&h, dirs.of_old(), self.old_name, (source, &mut source_state));
        self.note_moved(&h, dirs.of_new(), self.new_name, (target, &mut target_state));
        let time = fs.now();
        for (inode, state, parent) in
            [(source, &mut source_state, self.new_dir), (target, &mut target_state, self.old_dir)]
        {
            if state.is_dir() && self.is_cross() {
                dir::set_parent(fs, &h, inode, state, parent.ino)?;
            }
            attr::set_ctime(&mut state.disk, time);
            disk::store(fs, &h, inode, state)?;
        }
        if self.is_cross() {
            store_changed_dir(fs, &h, self.new_dir, dirs.of_new(), time)?;
        }
        store_changed_dir(fs, &h, self.old_dir, dirs.of_old(), time)?;
        h.stop();
        Ok(())
    }

    fn swap_entries(
        &self,
        h: &Handle,
        dirs: &mut Dirs<'_>,
        (source, source_type): (InodeNo, FileType),
        (target, target_type): (InodeNo, FileType),
    ) -> Result<()> {
        let fs = self.fs;
        let gone = || Error::corrupt("directory", "a name that was found is gone");
        let old = dir::find(fs, self.old_dir, dirs.of_old(), self.old_name)?.ok_or_else(gone)?;
        let new = dir::find(fs, self.new_dir, dirs.of_new(), self.new_name)?.ok_or_else(gone)?;
        dir::replace(fs, h, self.new_dir, dirs.of_new(), &new, source, source_type)?;
        dir::replace(fs, h, self.old_dir, dirs.of_old(), &old, target, target_type)
    }
}

/// Fails if the directory hands its project to new entries and the inode has another one.
fn check_project(dir: &InodeState, inode: &InodeState) -> Result<()> {
    let inherits = dir.disk.flags.contains(InodeFlags::PROJINHERIT);
    if inherits && dir.disk.projid != inode.disk.projid { Err(Errno::XDEV.into()) } else { Ok(()) }
}
