//! A connection to a cluster, and a pool there.
//!
//! Owns the connection: dropped last, after the images that were opened through it.

use std::ffi::{CStr, CString};
use std::ptr;

use fjord_block::OpenError;
use rustix::fs::{fcntl_getfl, fcntl_setfl};

use crate::library::{Ceph, PoolHandle, RadosHandle};
use crate::name::{RbdName, Step};

/// How long to try to reach a monitor, in seconds.
const CONNECT_TIMEOUT_S: &CStr = c"30";

/// A pool, and the connection.
pub(crate) struct Pool {
    pub(crate) ceph: &'static Ceph,
    cluster: RadosHandle,
    /// Null until it is opened.
    pub(crate) handle: PoolHandle,
}

// SAFETY: librados and librbd may be called by any thread with the same handles.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Connects, and opens the pool and namespace of `name`.
    ///
    /// # Errors
    /// `Remote`: no library, no configuration, no monitor that answers, a wrong key, no such pool.
    pub(crate) fn connect(name: &RbdName) -> Result<Pool, OpenError> {
        let ceph = Ceph::get(name)?;
        let mut cluster = ptr::null_mut();
        // SAFETY: the function writes the handle and copies the user's name.
        let create = || unsafe { (ceph.rados.rados_create)(&raw mut cluster, name.id.as_ptr()) };
        let code = with_flags_of_stderr_kept(create);
        check(name, Step::Configuration, code)?;
        // From here on drop closes it.
        let mut pool = Pool { ceph, cluster, handle: ptr::null_mut() };
        pool.configure(name)?;
        // SAFETY: the handle is open.
        let code = unsafe { (ceph.rados.rados_connect)(cluster) };
        check(name, Step::Connect, code)?;
        // SAFETY: the handle is connected; the function writes the pool's handle.
        let code = unsafe {
            (ceph.rados.rados_ioctx_create)(cluster, name.pool.as_ptr(), &raw mut pool.handle)
        };
        check(name, Step::Pool, code)?;
        if let Some(namespace) = &name.namespace {
            // SAFETY: the pool's handle is open.
            unsafe { (ceph.rados.rados_ioctx_set_namespace)(pool.handle, namespace.as_ptr()) };
        }
        Ok(pool)
    }

    fn configure(&mut self, name: &RbdName) -> Result<(), OpenError> {
        let rados = &self.ceph.rados;
        let conf = name.conf.as_ref().map_or(ptr::null(), |conf| conf.as_ptr());
        // SAFETY: the handle is open and not connected; null stands for the usual file.
        let code = unsafe { (rados.rados_conf_read_file)(self.cluster, conf) };
        check(name, Step::Configuration, code)?;
        // Acknowledged writes have to be stable: the order of everything above is built on it.
        let settings = [(c"rbd_cache", c"false"), (c"client_mount_timeout", CONNECT_TIMEOUT_S)];
        for (key, value) in settings {
            // SAFETY: as above.
            let code =
                unsafe { (rados.rados_conf_set)(self.cluster, key.as_ptr(), value.as_ptr()) };
            check(name, Step::Configuration, code)?;
        }
        Ok(())
    }

    /// Makes an image.
    pub(crate) fn create(&self, name: &RbdName, size_bytes: u64) -> Result<(), OpenError> {
        // The exclusive lock is what fences; the others are for speed and are Ceph's defaults.
        const FEATURES: u64 =
            FEATURE_LAYERING | FEATURE_EXCLUSIVE_LOCK | FEATURE_OBJECT_MAP | FEATURE_FAST_DIFF;
        let (image, mut order) = (&name.image, 0);
        // SAFETY: the pool is open; 0 stands for the usual size of objects.
        let code = unsafe {
            let create = self.ceph.rbd.rbd_create2;
            create(self.handle, image.as_ptr(), size_bytes, FEATURES, &raw mut order)
        };
        check(name, Step::Create, code)
    }

    /// Removes an image.
    pub(crate) fn remove(&self, name: &RbdName) -> Result<(), OpenError> {
        let image: &CString = &name.image;
        // SAFETY: the pool is open.
        let code = unsafe { (self.ceph.rbd.rbd_remove)(self.handle, image.as_ptr()) };
        check(name, Step::Remove, code)
    }
}

/// `RBD_FEATURE_LAYERING` and the next of `rbd/features.h`.
const FEATURE_LAYERING: u64 = 1 << 0;
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
const FEATURE_OBJECT_MAP: u64 = 1 << 3;
const FEATURE_FAST_DIFF: u64 = 1 << 4;

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: each handle is open, and nothing else uses it: images hold the pool.
        unsafe {
            if !self.handle.is_null() {
                (self.ceph.rados.rados_ioctx_destroy)(self.handle);
            }
            (self.ceph.rados.rados_shutdown)(self.cluster);
        }
    }
}

/// librados makes standard error nonblocking if it is a pipe: so also standard output, where it is the same pipe
/// (`2>&1 |`), and for all processes that have it. A long output then fails with EAGAIN.
fn with_flags_of_stderr_kept<T>(act: impl FnOnce() -> T) -> T {
    let flags = fcntl_getfl(rustix::stdio::stderr());
    let done = act();
    // Where it is closed there is nothing to keep.
    let _ = flags.and_then(|flags| fcntl_setfl(rustix::stdio::stderr(), flags));
    done
}

/// The error of a negative code.
pub(crate) fn check(name: &RbdName, step: Step, code: i32) -> Result<(), OpenError> {
    if code < 0 { Err(name.refused(step, code)) } else { Ok(()) }
}
