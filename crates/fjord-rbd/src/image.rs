//! An open image: what it is, and its lock.
//!
//! Owns the image's handle. Invariant: it is closed before the connection is, and after the last request has
//! completed ([`crate::events`] ends first).

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::ptr;
use std::sync::Arc;

use fjord_block::OpenError;

use crate::library::{ConfigOption, EVENT_TYPE_EVENTFD, ImageHandle, LOCK_MODE_EXCLUSIVE, Rbd};
use crate::name::{RbdName, Step};
use crate::pool::{FEATURE_EXCLUSIVE_LOCK, Pool, check};

/// Lists are read with room for so many entries first.
const LIST_LEN: usize = 16;

/// An open image.
pub(crate) struct Image {
    pub(crate) name: RbdName,
    handle: ImageHandle,
    pool: Arc<Pool>,
}

// SAFETY: librbd may be called by any thread with the same handle.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Image {
    /// Opens an image, or a snapshot of one.
    ///
    /// # Errors
    /// `Remote`.
    pub(crate) fn open(
        pool: Arc<Pool>,
        name: RbdName,
        read_only: bool,
    ) -> Result<Image, OpenError> {
        let rbd = &pool.ceph.rbd;
        let open = if read_only { rbd.rbd_open_read_only } else { rbd.rbd_open };
        let snapshot = name.snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let mut handle = ptr::null_mut();
        // SAFETY: the pool is open, and the function writes the handle.
        let code = unsafe { open(pool.handle, name.image.as_ptr(), &raw mut handle, snapshot) };
        check(&name, Step::Open, code)?;
        Ok(Image { name, handle, pool })
    }

    /// The functions, and the handle to call them with.
    pub(crate) fn raw(&self) -> (&'static Rbd, ImageHandle) {
        (&self.pool.ceph.rbd, self.handle)
    }

    /// Completions are told by this eventfd from now on.
    pub(crate) fn notify(&self, eventfd: i32) -> Result<(), OpenError> {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open; the eventfd outlives it.
        let code = unsafe { (rbd.rbd_set_image_notification)(handle, eventfd, EVENT_TYPE_EVENTFD) };
        check(&self.name, Step::Open, code)
    }

    /// Size in bytes at this moment, or the negative errno.
    pub(crate) fn size_bytes(&self) -> Result<u64, i32> {
        let (rbd, handle) = self.raw();
        let mut size_bytes = 0;
        // SAFETY: the image is open, and the function writes the size.
        let code = unsafe { (rbd.rbd_get_size)(handle, &raw mut size_bytes) };
        if code < 0 { Err(code) } else { Ok(size_bytes) }
    }

    /// Bytes that lie in one object one after the other: the size of an object, unless the image is striped.
    pub(crate) fn stripe_unit_bytes(&self) -> Result<u64, OpenError> {
        let (rbd, handle) = self.raw();
        let mut unit_bytes = 0;
        // SAFETY: the image is open, and the function writes the unit.
        let code = unsafe { (rbd.rbd_get_stripe_unit)(handle, &raw mut unit_bytes) };
        check(&self.name, Step::Look, code)?;
        Ok(unit_bytes)
    }

    /// Whether it has the feature that its lock needs.
    pub(crate) fn has_exclusive_lock(&self) -> Result<bool, OpenError> {
        let (rbd, handle) = self.raw();
        let mut features = 0;
        // SAFETY: the image is open, and the function writes the features.
        let code = unsafe { (rbd.rbd_get_features)(handle, &raw mut features) };
        check(&self.name, Step::Look, code)?;
        Ok(features & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// Whether a setting of the pool or of the image has switched librbd's cache on after all.
    pub(crate) fn has_cache(&self) -> Result<bool, OpenError> {
        let (rbd, handle) = self.raw();
        let none = ConfigOption { name: ptr::null_mut(), value: ptr::null_mut(), source: 0 };
        let mut options = vec![none; LIST_LEN];
        let (mut count, mut code);
        loop {
            count = i32::try_from(options.len()).unwrap_or(i32::MAX);
            // SAFETY: the image is open, and there is room for `count` options.
            code = unsafe {
                (rbd.rbd_config_image_list)(handle, options.as_mut_ptr(), &raw mut count)
            };
            if code != -libc::ERANGE || count as usize <= options.len() {
                break;
            }
            options.resize(count as usize, none);
        }
        check(&self.name, Step::Look, code)?;
        let listed = &options[..options.len().min(usize::try_from(count).unwrap_or(0))];
        let is_on = listed.iter().any(|option| {
            // SAFETY: the function has set name and value to strings.
            let (name, value) = unsafe { (text(option.name), text(option.value)) };
            name == c"rbd_cache" && value != c"false" && value != c"0"
        });
        // SAFETY: these are the options that the function has filled.
        unsafe { (rbd.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
        Ok(is_on)
    }

    /// Makes a snapshot: everything that was acknowledged before the call is in it.
    pub(crate) fn snapshot_create(&self, name: &CStr) -> io::Result<()> {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open.
        done(unsafe { (rbd.rbd_snap_create)(handle, name.as_ptr()) })
    }

    /// Removes a snapshot; `ENOENT` if there is none.
    pub(crate) fn snapshot_remove(&self, name: &CStr) -> io::Result<()> {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open.
        done(unsafe { (rbd.rbd_snap_remove)(handle, name.as_ptr()) })
    }

    /// Opens the same image for writing, without its lock. What changes snapshots is then asked of whoever has it.
    pub(crate) fn writable(&self) -> Result<Image, OpenError> {
        Image::open(self.pool.clone(), self.name.clone(), false)
    }

    /// Opens a snapshot of this image.
    pub(crate) fn snapshot(&self, name: &CStr) -> Result<Image, OpenError> {
        let mut snapshot = self.name.clone();
        snapshot.snapshot = Some(name.to_owned());
        Image::open(self.pool.clone(), snapshot, true)
    }

    /// Fills `data` by a call that waits.
    pub(crate) fn read_at(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open, and the buffer lives until the call returns.
        let code = unsafe { (rbd.rbd_read)(handle, offset, data.len(), data.as_mut_ptr().cast()) };
        all_done(code, data.len())
    }

    /// Writes all of `data` by a call that waits until it is stable.
    pub(crate) fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open, and the buffer lives until the call returns.
        let code = unsafe { (rbd.rbd_write)(handle, offset, data.len(), data.as_ptr().cast()) };
        all_done(code, data.len())
    }

    /// Changes the size; returns the negative errno.
    pub(crate) fn resize(&self, size_bytes: u64) -> Result<(), i32> {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open.
        let code = unsafe { (rbd.rbd_resize)(handle, size_bytes) };
        if code < 0 { Err(code) } else { Ok(()) }
    }

    /// Asks for the exclusive lock; returns 0 or a negative errno. May take as long as a holder that has died
    /// stays on record.
    pub(crate) fn lock_acquire(&self) -> i32 {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open.
        unsafe { (rbd.rbd_lock_acquire)(handle, LOCK_MODE_EXCLUSIVE) }
    }

    /// Gives the lock up; returns 0 or a negative errno.
    pub(crate) fn lock_release(&self) -> i32 {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open.
        unsafe { (rbd.rbd_lock_release)(handle) }
    }

    /// Takes the lock away from `owner`, whose client may do nothing in the cluster any more; returns 0 or a
    /// negative errno.
    pub(crate) fn lock_break(&self, owner: &CStr) -> i32 {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open.
        unsafe { (rbd.rbd_lock_break)(handle, LOCK_MODE_EXCLUSIVE, owner.as_ptr()) }
    }

    /// Whether this process has the lock.
    pub(crate) fn is_locked_by_us(&self) -> bool {
        let (rbd, handle) = self.raw();
        let mut is_owner = 0;
        // SAFETY: the image is open, and the function writes the answer.
        let code = unsafe { (rbd.rbd_is_exclusive_lock_owner)(handle, &raw mut is_owner) };
        code >= 0 && is_owner != 0
    }

    /// Who has the lock, by address.
    pub(crate) fn lock_owner(&self) -> Result<Option<CString>, OpenError> {
        let (rbd, handle) = self.raw();
        let mut owners: [*mut c_char; LIST_LEN] = [ptr::null_mut(); LIST_LEN];
        let (mut mode, mut count) = (0, owners.len());
        // SAFETY: the image is open, and there is room for `count` owners.
        let code = unsafe {
            (rbd.rbd_lock_get_owners)(handle, &raw mut mode, owners.as_mut_ptr(), &raw mut count)
        };
        if code == -libc::ENOENT {
            return Ok(None);
        }
        check(&self.name, Step::Lock, code)?;
        // SAFETY: the function has set that many owners to strings.
        let owner = (count > 0).then(|| unsafe { text(owners[0]) }.to_owned());
        // SAFETY: these are the owners that the function has filled.
        unsafe { (rbd.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(owner)
    }
}

/// What a function of librbd returned: 0, or a negative errno.
fn done(code: i32) -> io::Result<()> {
    if code < 0 { Err(io::Error::from_raw_os_error(-code)) } else { Ok(()) }
}

/// What a request of `len` bytes returned: a count, or a negative errno.
fn all_done(code: isize, len: usize) -> io::Result<()> {
    match usize::try_from(code) {
        Ok(count) if count == len => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::from_raw_os_error(code.unsigned_abs() as i32)),
    }
}

/// A string of librbd.
///
/// # Safety
/// `pointer` is null or that of a string that lives as long as the result.
unsafe fn text<'a>(pointer: *const c_char) -> &'a CStr {
    if pointer.is_null() {
        return c"";
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(pointer) }
}

impl Drop for Image {
    fn drop(&mut self) {
        let (rbd, handle) = self.raw();
        // SAFETY: the image is open, and nothing uses it any more.
        let code = unsafe { (rbd.rbd_close)(handle) };
        if code < 0 {
            tracing::warn!(image = %self.name.path().display(), code, "closing the image failed");
        }
    }
}
