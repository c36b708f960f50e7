//! librbd and librados, loaded when the first image is opened.
//!
//! Owns the two libraries and the addresses of the functions that fjord calls. So the program runs on hosts
//! without Ceph; there, opening an image says which package is missing.
//!
//! Invariant: the libraries are never unloaded, so an address stays valid. The signatures are those of
//! `rbd/librbd.h` and `rados/librados.h`, whose C interfaces (`librbd.so.1`, `librados.so.2`) are stable.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use fjord_block::OpenError;
use libc::{iovec, size_t, ssize_t};
use libloading::Library;

use crate::name::RbdName;

/// `rados_t`: a connection to a cluster.
pub(crate) type RadosHandle = *mut c_void;
/// `rados_ioctx_t`: a pool, and a namespace in it.
pub(crate) type PoolHandle = *mut c_void;
/// `rbd_image_t`: an open image.
pub(crate) type ImageHandle = *mut c_void;
/// `rbd_completion_t`: a request under way.
pub(crate) type CompletionHandle = *mut c_void;

/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(crate) const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// `EVENT_TYPE_EVENTFD`: completions are told by an eventfd.
pub(crate) const EVENT_TYPE_EVENTFD: c_int = 2;

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConfigOption {
    pub(crate) name: *mut c_char,
    pub(crate) value: *mut c_char,
    pub(crate) source: c_int,
}

macro_rules! functions {
    ($(#[$about:meta])* $table:ident of $file:literal: $(fn $name:ident($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        $(#[$about])*
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl $table {
            fn load() -> Result<$table, libloading::Error> {
                // SAFETY: the initialisers of Ceph's libraries have no conditions on the caller; the signatures
                // are those of its headers, and the library is never unloaded, so the addresses stay valid.
                unsafe {
                    let library = Library::new($file)?;
                    let table = $table {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                    };
                    std::mem::forget(library);
                    Ok(table)
                }
            }
        }
    };
}

functions! {
    /// Functions of librados.
    Rados of "librados.so.2":
    fn rados_create(*mut RadosHandle, *const c_char) -> c_int;
    fn rados_conf_read_file(RadosHandle, *const c_char) -> c_int;
    fn rados_conf_set(RadosHandle, *const c_char, *const c_char) -> c_int;
    fn rados_connect(RadosHandle) -> c_int;
    fn rados_shutdown(RadosHandle);
    fn rados_ioctx_create(RadosHandle, *const c_char, *mut PoolHandle) -> c_int;
    fn rados_ioctx_set_namespace(PoolHandle, *const c_char);
    fn rados_ioctx_destroy(PoolHandle);
}

functions! {
    /// Functions of librbd.
    Rbd of "librbd.so.1":
    fn rbd_create2(PoolHandle, *const c_char, u64, u64, *mut c_int) -> c_int;
    fn rbd_remove(PoolHandle, *const c_char) -> c_int;
    fn rbd_open(PoolHandle, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    fn rbd_open_read_only(PoolHandle, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    fn rbd_close(ImageHandle) -> c_int;
    fn rbd_get_size(ImageHandle, *mut u64) -> c_int;
    fn rbd_get_stripe_unit(ImageHandle, *mut u64) -> c_int;
    fn rbd_get_features(ImageHandle, *mut u64) -> c_int;
    fn rbd_resize(ImageHandle, u64) -> c_int;
    fn rbd_config_image_list(ImageHandle, *mut ConfigOption, *mut c_int) -> c_int;
    fn rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
    fn rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    fn rbd_lock_release(ImageHandle) -> c_int;
    fn rbd_lock_break(ImageHandle, c_int, *const c_char) -> c_int;
    fn rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
    fn rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
    fn rbd_is_exclusive_lock_owner(ImageHandle, *mut c_int) -> c_int;
    fn rbd_set_image_notification(ImageHandle, c_int, c_int) -> c_int;
    fn rbd_poll_io_events(ImageHandle, *mut CompletionHandle, c_int) -> c_int;
    fn rbd_snap_create(ImageHandle, *const c_char) -> c_int;
    fn rbd_snap_remove(ImageHandle, *const c_char) -> c_int;
    fn rbd_write(ImageHandle, u64, size_t, *const c_char) -> ssize_t;
    fn rbd_read(ImageHandle, u64, size_t, *mut c_char) -> ssize_t;
    fn rbd_aio_create_completion(*mut c_void, *const c_void, *mut CompletionHandle) -> c_int;
    fn rbd_aio_get_arg(CompletionHandle) -> *mut c_void;
    fn rbd_aio_get_return_value(CompletionHandle) -> ssize_t;
    fn rbd_aio_release(CompletionHandle);
    fn rbd_aio_writev(ImageHandle, *const iovec, c_int, u64, CompletionHandle) -> c_int;
    fn rbd_aio_readv(ImageHandle, *const iovec, c_int, u64, CompletionHandle) -> c_int;
    fn rbd_aio_discard(ImageHandle, u64, u64, CompletionHandle) -> c_int;
    fn rbd_aio_write_zeroes(ImageHandle, u64, size_t, CompletionHandle, c_int, c_int) -> c_int;
    fn rbd_aio_flush(ImageHandle, CompletionHandle) -> c_int;
}

/// Both libraries.
pub(crate) struct Ceph {
    pub(crate) rados: Rados,
    pub(crate) rbd: Rbd,
}

impl Ceph {
    /// The libraries, loaded by the first call.
    ///
    /// # Errors
    /// `Remote` with the name of the package if they are not installed.
    pub(crate) fn get(name: &RbdName) -> Result<&'static Ceph, OpenError> {
        static CEPH: OnceLock<Result<Ceph, String>> = OnceLock::new();
        let load = || -> Result<Ceph, libloading::Error> {
            Ok(Ceph { rados: Rados::load()?, rbd: Rbd::load()? })
        };
        let loaded = CEPH.get_or_init(|| load().map_err(|error| error.to_string()));
        loaded.as_ref().map_err(|why| {
            let advice =
                "install Ceph's client library: the package librbd1 (Debian, Ubuntu, Fedora, SUSE)";
            name.failed(libc::ENOPKG, format!("{why}; {advice}"))
        })
    }
}
