//! Devices that an experiment runs on: the disk of a directory, RAM, and the modelled flash.
//!
//! Invariant: what was made for a [`Device`] (file, zram device, server of the model) goes away
//! with it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use fjord_block::sim::Profile;

use super::model::Model;
use super::mount::{Medium, Mount};
use crate::error::{BenchError, Result};
use crate::options::Options;

/// How long a zram device may stay busy after the last file system left it.
const ZRAM_BUSY_MAX: Duration = Duration::from_secs(60);

/// What file systems are put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// An image file in the directory of the run.
    Disk,
    /// A RAM block device.
    Zram,
    /// A modelled flash device.
    Modelled(&'static Profile),
}

impl DeviceKind {
    /// All of them.
    pub const ALL: [DeviceKind; 7] = [
        DeviceKind::Disk,
        DeviceKind::Zram,
        DeviceKind::Modelled(&Profile::UFS),
        DeviceKind::Modelled(&Profile::PLAIN_SSD),
        DeviceKind::Modelled(&Profile::SUPERCAP_SSD),
        DeviceKind::Modelled(&Profile::NVME),
        DeviceKind::Modelled(&Profile::P3700),
    ];

    /// Its name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Disk => "disk",
            DeviceKind::Zram => "zram",
            DeviceKind::Modelled(profile) => profile.name,
        }
    }

    /// The device of a name.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming those there are.
    pub fn from_name(name: &str) -> Result<DeviceKind> {
        DeviceKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known = DeviceKind::ALL.map(DeviceKind::name).join(", ");
            BenchError::Usage(format!("no device {name:?}; known: {known}"))
        })
    }
}

/// A device ready for file systems.
pub(crate) struct Device {
    path: PathBuf,
    kind: DeviceKind,
    /// Serves a modelled device.
    sim: Option<Mount>,
    /// Number of the zram device.
    zram: Option<u32>,
}

impl Device {
    /// Makes a device of `options.image_size_bytes`.
    pub(crate) fn new(kind: DeviceKind, options: &Options) -> Result<Device> {
        let size_bytes = options.image_size_bytes;
        let mut device = Device { path: PathBuf::new(), kind, sim: None, zram: None };
        match kind {
            DeviceKind::Disk => {
                device.path = options.dir.join("disk.img");
                super::make_file(&device.path, size_bytes)?;
            }
            DeviceKind::Zram => {
                let number = add_zram()?;
                device.zram = Some(number);
                device.path = format!("/dev/zram{number}").into();
                write_sys(&zram_dir(number).join("disksize"), &size_bytes.to_string())?;
            }
            DeviceKind::Modelled(profile) => {
                let dir = options.dir.join(profile.name);
                let sim = Mount::sim(&options.fjord_program, profile.name, size_bytes, &dir)?;
                device.path = sim.dir().join("disk");
                device.sim = Some(sim);
            }
        }
        Ok(device)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The model below it, if it is one.
    pub(crate) fn model(&self) -> Option<Model> {
        self.sim.as_ref().map(|sim| Model::Served(sim.dir().to_owned()))
    }

    /// Its constants, if it is modelled.
    pub(crate) fn profile(&self) -> Option<&'static Profile> {
        match self.kind {
            DeviceKind::Modelled(profile) => Some(profile),
            DeviceKind::Disk | DeviceKind::Zram => None,
        }
    }

    /// How the kernel mounts what is on it. Files go past the page cache: only then does a flush
    /// of the file system reach a modelled device as one.
    pub(crate) fn medium(&self) -> Medium {
        match self.kind {
            DeviceKind::Zram => Medium::BlockDevice,
            DeviceKind::Disk | DeviceKind::Modelled(_) => Medium::DirectFile,
        }
    }

    /// Whether blocks are in memory, and are better given back before the next file system.
    pub(crate) fn is_memory(&self) -> bool {
        self.kind != DeviceKind::Disk
    }

    /// Takes it down and tells of failures; dropping does the same silently.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.take_down()
    }

    fn take_down(&mut self) -> Result<()> {
        let mut result = Ok(());
        if let Some(sim) = self.sim.take() {
            result = sim.unmount();
        }
        if let Some(number) = self.zram.take() {
            result = result.and(remove_zram(number));
        }
        if self.kind == DeviceKind::Disk && !self.path.as_os_str().is_empty() {
            // It may be gone already, or never have been made.
            let _ = fs::remove_file(&self.path);
        }
        result
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The error that ended the run is the one to tell.
        let _ = self.take_down();
    }
}

fn zram_dir(number: u32) -> PathBuf {
    format!("/sys/block/zram{number}").into()
}

fn write_sys(path: &Path, value: &str) -> Result<()> {
    try_write_sys(path, value).map_err(BenchError::io(format!("write {}", path.display())))
}

fn try_write_sys(path: &Path, value: &str) -> io::Result<()> {
    let mut file = File::options().write(true).open(path)?;
    io::Write::write_all(&mut file, value.as_bytes())
}

/// Empties a zram device and removes it.
///
/// Others look into a block device as they like: udev when a writer closes it, and the kernel
/// itself for a moment after an unmount. Both let go soon, so a busy device is tried again.
fn remove_zram(number: u32) -> Result<()> {
    let reset = zram_dir(number).join("reset");
    let deadline = Instant::now() + ZRAM_BUSY_MAX;
    loop {
        match try_write_sys(&reset, "1") {
            Err(error)
                if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(50));
            }
            result => {
                result.map_err(BenchError::io(format!(
                    "write {} (is the device mounted elsewhere?)",
                    reset.display()
                )))?;
                break;
            }
        }
    }
    write_sys(Path::new("/sys/class/zram-control/hot_remove"), &number.to_string())
}

/// Adds a zram device; reading the file does that.
fn add_zram() -> Result<u32> {
    let path = "/sys/class/zram-control/hot_add";
    let text = fs::read_to_string(path)
        .map_err(BenchError::io(format!("{path} (zram needs root and its module)")))?;
    text.trim().parse().map_err(|_| BenchError::Io {
        what: path.into(),
        source: io::Error::other(format!("{text:?} is no number of a device")),
    })
}
