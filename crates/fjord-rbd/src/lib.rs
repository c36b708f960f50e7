//! Images on a Ceph cluster: RADOS block devices.
//!
//! [`RBD`] makes of a name such as `rbd:pool/image` a [`fjord_block::Device`]. librbd is loaded when the first
//! image is opened (`library`). Layers, from the caller down:
//! - `device`: requests and tickets; `lock`: who may write;
//! - `snapshot`: copies as of one moment;
//! - `raw`: librbd alone, for comparisons;
//! - `events`: requests under way;
//! - `image`, `pool`: handles of librbd and librados, each with its functions;
//! - `name`: names taken apart.

mod device;
mod events;
mod image;
mod library;
mod lock;
mod name;
mod pool;
mod raw;
mod snapshot;

use std::sync::Arc;

use fjord_block::{Device, OpenError, Remote, RemoteOptions};

use device::RbdDevice;
use image::Image;
use name::RbdName;
use pool::Pool;

pub use raw::RawImage;

/// The images of Ceph clusters: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=FILE&id=USER]`.
pub static RBD: &dyn Remote = &Rbd;

#[derive(Debug)]
struct Rbd;

impl Remote for Rbd {
    fn prefix(&self) -> &'static str {
        name::PREFIX
    }

    fn open(&self, name: &str, options: &RemoteOptions<'_>) -> Result<Arc<dyn Device>, OpenError> {
        Ok(Arc::new(RbdDevice::open(RbdName::parse(name)?, options)?))
    }

    fn create(&self, name: &str, size_bytes: u64) -> Result<(), OpenError> {
        let name = RbdName::parse(name)?;
        if name.snapshot.is_some() {
            return Err(name.failed(libc::EINVAL, "a snapshot cannot be made here; name an image"));
        }
        Pool::connect(&name)?.create(&name, size_bytes)
    }

    fn is_in_use(&self, name: &str) -> Result<bool, OpenError> {
        let name = RbdName::parse(name)?;
        let pool = Arc::new(Pool::connect(&name)?);
        Ok(Image::open(pool, name, true)?.lock_owner()?.is_some())
    }

    fn remove(&self, name: &str) -> Result<(), OpenError> {
        let name = RbdName::parse(name)?;
        Pool::connect(&name)?.remove(&name)
    }
}
