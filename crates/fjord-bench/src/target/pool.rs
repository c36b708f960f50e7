//! Images in a pool of a Ceph cluster, and what is measured on them: librbd alone, and the pool's images as files
//! for the file systems that need one.
//!
//! Invariant: an image made for a run is removed with its [`PoolImage`].

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fjord::ImageName;
use fjord_block::{AlignedBuf, Buf, DeviceExt, FileOptions, Request, Ticket};
use fjord_rbd::RawImage;

use super::BenchFile;
use super::mount::Mount;
use crate::error::{BenchError, Result};

/// Bytes of a request while an image is filled.
const FILL_BYTES: usize = 4 << 20;
/// Such requests at once.
const FILL_DEPTH: usize = 8;

/// An image that was made for a run.
pub(crate) struct PoolImage {
    url: PathBuf,
}

impl PoolImage {
    /// Makes an image whose objects are all there, so that no target pays for that.
    pub(crate) fn make(pool: &str, name: &str, size_bytes: u64) -> Result<PoolImage> {
        let url = url_in(pool, name);
        let what = format!("make {}", url.display());
        let failed = || BenchError::io(what.clone());
        let to_io = |error: fjord::Error| io::Error::other(error);
        let parsed = ImageName::parse(&url);
        let Some((remote, text)) = parsed.remote().map_err(to_io).map_err(failed())? else {
            let message = format!("{pool} is no pool of a cluster; give it as rbd:POOL");
            return Err(BenchError::Usage(message));
        };
        let made = remote.create(text, size_bytes).map_err(io::Error::other);
        made.map_err(failed())?;
        let image = PoolImage { url };
        image.fill(&parsed, size_bytes).map_err(failed())?;
        Ok(image)
    }

    fn fill(&self, name: &ImageName, size_bytes: u64) -> io::Result<()> {
        let device = name.open(&FileOptions::default(), false).map_err(io::Error::other)?;
        let mut zeroes = AlignedBuf::zeroed(FILL_BYTES);
        // Blocks of zeroes would not be written by all of them.
        zeroes.fill(0xa5);
        let zeroes = Arc::new(zeroes);
        let mut under_way = std::collections::VecDeque::<Ticket>::new();
        for offset in (0..size_bytes).step_by(FILL_BYTES) {
            if under_way.len() == FILL_DEPTH
                && let Some(oldest) = under_way.pop_front()
            {
                oldest.wait()?;
            }
            let len = (size_bytes - offset).min(FILL_BYTES as u64) as usize;
            let buf = Buf::from_slice(&zeroes[..len]);
            under_way.push_back(device.submit_one(Request::write(offset, vec![buf])));
        }
        under_way.into_iter().try_for_each(|ticket| ticket.wait())?;
        device.release();
        Ok(())
    }

    /// Its name.
    pub(crate) fn url(&self) -> &Path {
        &self.url
    }
}

impl Drop for PoolImage {
    fn drop(&mut self) {
        if let Ok(Some((remote, url))) = ImageName::parse(&self.url).remote() {
            // The error that ended the run is the one to tell.
            let _ = remote.remove(url);
        }
    }
}

/// The URL of an image in a pool.
fn url_in(pool: &str, name: &str) -> PathBuf {
    match pool.split_once('?') {
        Some((place, query)) => format!("{place}/{name}?{query}").into(),
        None => format!("{pool}/{name}").into(),
    }
}

/// Serves the images of a pool as files in `dir`, by rbd-fuse.
pub(crate) fn as_files(pool: &str, dir: &Path) -> Result<Mount> {
    let (place, query) = pool.split_once('?').unwrap_or((pool, ""));
    let place = place.split_once(':').map_or(place, |(_, place)| place);
    let mut args: Vec<&OsStr> = ["-f", "-p", place].map(OsStr::new).into();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("conf", file)) => args.extend(["-c", file].map(OsStr::new)),
            _ => {
                let message = format!("rbd-fuse takes a pool and conf=FILE only, not {pair}");
                return Err(BenchError::Usage(message));
            }
        }
    }
    args.push(dir.as_os_str());
    Mount::served("rbd-fuse".as_ref(), &args, dir)
}

/// librbd as a file: a write is stable when it returns.
#[derive(Clone)]
pub(super) struct RbdFile(pub(super) Arc<RawImage>);

impl BenchFile for RbdFile {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, data)
    }

    fn sync(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }
}
