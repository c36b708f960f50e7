//! Targets set up to be measured. Owns the way from a [`Target`] to something that takes calls,
//! and its tear-down.
//!
//! Invariant: whatever was mounted, attached, started or created for a [`Stand`] goes away with
//! it, also when a run ends early by an error.

mod bytes;
mod device;
mod library;
mod model;
mod mount;
mod pool;
mod posix;
mod separate;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use bytes::DirectFile;
pub(crate) use device::Device;
pub use device::DeviceKind;
pub(crate) use library::LibraryFs;
pub(crate) use model::{Model, Trace};
pub(crate) use mount::{KernelMount, Medium, Mount, output_of, run_program};
pub(crate) use posix::PosixFs;

use fjord::MountOptions;
use fjord_block::MemImage;
use fjord_block::sim::SimDevice;

use crate::error::{BenchError, Result};
use crate::options::{How, Options, Target};
use crate::served::Served;

/// How long a device may stay busy before it counts as in use.
const BUSY_PATIENCE: Duration = Duration::from_secs(30);

/// Size of each area for i-transactions that an image gets.
const AREA_BYTES: u64 = 16 << 20;

/// An open file of a target.
pub(crate) trait BenchFile: Send {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Fills `data`.
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    fn sync(&mut self, data_only: bool) -> io::Result<()>;
}

/// The calls of a target. Paths are relative to its root.
pub(crate) trait BenchFs: Send + Sync {
    /// Creates or empties a file, for reading and writing.
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>>;
    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>>;
    fn make_dir(&self, path: &str) -> io::Result<()>;
    fn remove_file(&self, path: &str) -> io::Result<()>;
    fn remove_tree(&self, path: &str) -> io::Result<()>;
    fn sync(&self) -> io::Result<()>;
    /// How fsyncs were served, where the target counts.
    fn served(&self) -> Option<Served> {
        None
    }
}

/// How an image is made and mounted, where not by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Setup {
    /// What the kernel mounts.
    pub(crate) medium: Medium,
    /// Blocks are allocated by write, not by writeback.
    pub(crate) no_delalloc: bool,
    /// Bytes of fjord's cache, and of dirty data in the kernel's.
    pub(crate) cache_bytes: Option<u64>,
    /// Areas for i-transactions; one per processor when not given.
    pub(crate) area_count: Option<usize>,
    /// Groups of a flex group; mke2fs decides when not given.
    pub(crate) flex_group_count: Option<u32>,
    /// File systems of a target that has one for each thread.
    pub(crate) part_count: Option<usize>,
}

/// A target ready to be measured.
pub(crate) struct Stand {
    pub(crate) target: Target,
    /// None only while remounting.
    fs: Option<Arc<dyn BenchFs>>,
    /// Unmounts when dropped; declared after `fs`, so that files close first.
    mount: Option<Mount>,
    /// None for directories, and for a modelled device in this process.
    image: Option<PathBuf>,
    /// The modelled device below, if there is one.
    model: Option<Model>,
    /// The image was made for the stand and goes with it.
    owns_image: bool,
    /// The images of a pool as files, while a target that needs one is mounted.
    as_files: Option<Mount>,
    /// An image in a pool; last, so that nothing uses it any more when it goes.
    pool_image: Option<pool::PoolImage>,
    setup: Setup,
    options: Options,
}

impl Stand {
    /// Makes the image of `target`, and mounts or opens it.
    pub(crate) fn new(target: &Target, options: &Options) -> Result<Stand> {
        let mut stand = Stand::bare(target, Setup::default(), options)?;
        if matches!(target, Target::Directory(_)) {
            // Nothing to make.
        } else if let Some(pool) = &options.pool {
            let name = stand.name_in_pool();
            let made = pool::PoolImage::make(pool, &name, options.image_size_bytes)?;
            if target.has_names() {
                stand.format_on_cluster(made.url())?;
            }
            stand.image = Some(made.url().to_owned());
            stand.pool_image = Some(made);
        } else {
            let image = options.dir.join(format!("{}.img", file_name(target)));
            (stand.image, stand.owns_image) = (Some(image.clone()), true);
            make_file(&image, options.image_size_bytes)?;
            if target.has_names() {
                stand.format(&image, false)?;
            }
        }
        stand.attach()?;
        Ok(stand)
    }

    /// Formats `device` for `target`, and mounts or opens it.
    pub(crate) fn on(
        target: &Target,
        device: &Device,
        setup: &Setup,
        options: &Options,
    ) -> Result<Stand> {
        let setup = Setup { medium: device.medium(), ..setup.clone() };
        let mut stand = Stand::bare(target, setup, options)?;
        if target.how().native {
            stand.model = Some(stand.native_model(device)?);
        } else if !matches!(target, Target::Directory(_)) {
            stand.model = device.model();
            stand.image = Some(device.path().to_owned());
            if target.has_names() {
                stand.format(device.path(), device.is_memory())?;
            }
        }
        stand.attach()?;
        Ok(stand)
    }

    /// A modelled device in this process, formatted like the others.
    fn native_model(&self, device: &Device) -> Result<Model> {
        let Some(profile) = device.profile() else {
            let name = self.target.name();
            return Err(BenchError::Usage(format!("{name} runs on modelled devices only")));
        };
        let image = self.options.dir.join(format!("{}.native", file_name(&self.target)));
        let failed = || BenchError::io(format!("create {}", image.display()));
        let file = fs::File::create(&image).map_err(failed())?;
        file.set_len(self.options.image_size_bytes).map_err(failed())?;
        let formatted = self.format(&image, true);
        let contents = formatted.and_then(|()| MemImage::from_file(&image).map_err(failed()));
        // It goes also if it was not formatted.
        let _ = fs::remove_file(&image);
        Ok(Model::Native(Arc::new(SimDevice::with_contents(profile, contents?))))
    }

    /// The modelled device below.
    ///
    /// # Errors
    /// [`BenchError::Usage`] if the device is not modelled.
    pub(crate) fn model(&self) -> Result<&Model> {
        let name = self.target.name();
        let missing = || BenchError::Usage(format!("{name}: the device is not modelled"));
        self.model.as_ref().ok_or_else(missing)
    }

    fn bare(target: &Target, setup: Setup, options: &Options) -> Result<Stand> {
        if target.needs_root() && !rustix::process::geteuid().is_root() {
            return Err(BenchError::NotRoot { target: target.name() });
        }
        let mut stand = Stand {
            target: target.clone(),
            fs: None,
            mount: None,
            image: None,
            model: None,
            owns_image: false,
            as_files: None,
            pool_image: None,
            setup,
            options: options.clone(),
        };
        if let Target::Directory(path) = target {
            stand.fs = Some(Arc::new(PosixFs::in_new_dir(path)?));
        }
        Ok(stand)
    }

    /// Formats the image with what the target's policy needs.
    fn format(&self, image: &Path, discard: bool) -> Result<()> {
        let policy = self.target.policy().map_or("", |policy| policy.name());
        let mut args: Vec<String> = Vec::new();
        if self.target == Target::KernelFastCommit || policy == "fast-commit" {
            args.extend(["-O".into(), "fast_commit".into()]);
        }
        if let Some(count) = self.setup.flex_group_count {
            args.extend(["-G".into(), count.to_string()]);
        }
        if let Some(bytes) = self.options.journal_size_bytes {
            args.extend(["-J".into(), format!("size={}", bytes >> 20)]);
        }
        // What is discarded reads as zeroes, so nothing need be written there.
        let extended = if discard {
            "discard,lazy_itable_init=0,lazy_journal_init=1"
        } else {
            "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
        };
        let mut all = vec!["-q", "-F", "-t", "ext4", "-b", "4096", "-E", extended];
        all.extend(args.iter().map(String::as_str));
        mke2fs(&all, image)?;
        if policy == "ijournal" {
            let areas = format!("{}x{AREA_BYTES}", self.area_count());
            let program = self.options.fjord_program.display().to_string();
            run_program(&program, &["tune", "--ijournal", &areas], &[image])?;
        }
        Ok(())
    }

    /// The same for an image in a pool, which mke2fs cannot reach.
    fn format_on_cluster(&self, url: &Path) -> Result<()> {
        let policy = self.target.policy().map_or("", |policy| policy.name());
        let mut args: Vec<String> =
            ["mkfs", "-q", "--force", "-b", "4096"].map(String::from).into();
        if self.target == Target::KernelFastCommit || policy == "fast-commit" {
            args.extend(["-O".into(), "fast_commit".into()]);
        }
        if let Some(bytes) = self.options.journal_size_bytes {
            args.extend(["-J".into(), format!("{bytes}")]);
        }
        let areas = match policy {
            "ijournal" => format!("{}x{AREA_BYTES}", self.area_count()),
            _ => "none".into(),
        };
        args.extend(["--ijournal".into(), areas]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run_program(&self.options.fjord_program.display().to_string(), &args, &[url])
    }

    fn area_count(&self) -> usize {
        let processor_count = std::thread::available_parallelism().map_or(1, usize::from);
        self.setup.area_count.unwrap_or(processor_count)
    }

    /// The name of its image in a pool, where concurrent runs have theirs too.
    fn name_in_pool(&self) -> String {
        format!("fjord-bench.{}.{}", std::process::id(), file_name(&self.target))
    }

    /// Where a target of the kernel finds its image.
    fn file_for_kernel(&mut self, image: &Path) -> Result<PathBuf> {
        let Some(pool) = &self.options.pool else { return Ok(image.to_owned()) };
        let dir = self.options.dir.join(format!("{}.files", file_name(&self.target)));
        let files = pool::as_files(pool, &dir)?;
        self.as_files = Some(files);
        Ok(dir.join(self.name_in_pool()))
    }

    /// The calls of the target.
    pub(crate) fn fs(&self) -> Result<Arc<dyn BenchFs>> {
        self.fs
            .clone()
            .ok_or_else(|| BenchError::Usage(format!("{} is not mounted", self.target.name())))
    }

    /// Empties every cache between the files and the disk: unmounts, drops what the host caches
    /// (as root), and mounts again.
    pub(crate) fn remount(&mut self) -> Result<()> {
        if let Target::Directory(_) = self.target {
            self.fs()?.sync().map_err(BenchError::io("sync"))?;
            drop_host_caches();
            return Ok(());
        }
        self.detach()?;
        drop_host_caches();
        self.attach()
    }

    fn attach(&mut self) -> Result<()> {
        if let (true, Some(Model::Native(device))) = (self.target.how().native, &self.model) {
            let order = self.target.how().order;
            return self.serve(LibraryFs::on(device.clone(), &self.engine_options(), order)?);
        }
        let Some(image) = &self.image.clone() else { return Ok(()) };
        let dir = self.options.dir.join(format!("{}.mnt", file_name(&self.target)));
        let file = if self.target.is_kernels() || self.target == Target::Fuse2fs {
            self.file_for_kernel(image)?
        } else {
            PathBuf::new()
        };
        let setup = &self.setup;
        let mount = match &self.target {
            Target::Raw if self.options.pool.is_some() => {
                return self.serve(bytes::RawFs::on_cluster(image)?);
            }
            Target::Raw => return self.serve(bytes::RawFs::open(image)?),
            Target::Block => return self.serve(bytes::BlockFs::open(image)?),
            Target::Library(how) if how.separate => {
                let Some(count) = setup.part_count else {
                    let name = self.target.name();
                    return Err(BenchError::Usage(format!("{name} is for the figures parallel-*")));
                };
                let made = separate::SeparateFs::make(image, count, &self.engine_options());
                return self.serve(made?);
            }
            Target::Library(_) => {
                let order = self.target.how().order;
                return self.serve(LibraryFs::open(image, &self.engine_options(), order)?);
            }
            Target::Directory(_) => return Ok(()),
            Target::Kernel
            | Target::KernelFastCommit
            | Target::KernelNoBarrier
            | Target::KernelDataJournal => {
                let how = KernelMount {
                    medium: setup.medium,
                    no_delalloc: setup.no_delalloc,
                    no_barrier: self.target == Target::KernelNoBarrier,
                    data_journal: self.target == Target::KernelDataJournal,
                    dirty_bytes_max: setup.cache_bytes,
                };
                Mount::kernel(&file, &dir, &how)?
            }
            Target::Fuse2fs => Mount::fuse2fs(&file, &dir)?,
            Target::Fuse(_) => {
                Mount::fjord(&self.options.fjord_program, &self.fuse_args(), image, &dir)?
            }
        };
        self.serve(PosixFs::new(mount.dir()))?;
        self.mount = Some(mount);
        Ok(())
    }

    fn serve(&mut self, fs: impl BenchFs + 'static) -> Result<()> {
        self.fs = Some(Arc::new(fs));
        Ok(())
    }

    /// Options of the engine inside this process.
    fn engine_options(&self) -> MountOptions {
        let default = self.target.how().engine_options();
        MountOptions {
            delalloc: !self.setup.no_delalloc,
            cache_size_bytes: self.setup.cache_bytes.unwrap_or(default.cache_size_bytes),
            ..default
        }
    }

    /// The same as arguments of `fjord mount`, before those of the caller.
    fn fuse_args(&self) -> Vec<String> {
        let cache_size = self.setup.cache_bytes.map(|bytes| format!("cache_size={bytes}"));
        let no_delalloc = self.setup.no_delalloc.then(|| "nodelalloc".into());
        let more = cache_size.into_iter().chain(no_delalloc).collect();
        mount_args(self.target.how(), more, &self.options)
    }

    /// How fsyncs were served since the image was opened.
    ///
    /// # Errors
    /// [`BenchError::Usage`] for a target that does not count.
    pub(crate) fn served(&self) -> Result<Served> {
        let no_counters = || {
            let name = self.target.name();
            BenchError::Usage(format!("{name} does not count its fsyncs; take fjord's targets"))
        };
        let Some(dir) = self.mount_dir() else {
            return self.fs()?.served().ok_or_else(no_counters);
        };
        if !matches!(self.target, Target::Fuse(_)) {
            return Err(no_counters());
        }
        let program = self.options.fjord_program.display().to_string();
        let text = mount::output_of(&program, &["stats", "--json"], &[dir])?;
        Served::from_json(&text).ok_or_else(|| BenchError::Command {
            command: "fjord stats --json".into(),
            message: format!("no counters of fsync in {text}"),
        })
    }

    /// Where it is mounted, if it is.
    pub(crate) fn mount_dir(&self) -> Option<&Path> {
        self.mount.as_ref().map(Mount::dir)
    }

    /// A directory beside the images, which goes with them.
    pub(crate) fn work_dir(&self) -> &Path {
        &self.options.dir
    }

    fn detach(&mut self) -> Result<()> {
        self.fs = None;
        let mounts = [self.mount.take(), self.as_files.take()];
        mounts.into_iter().flatten().try_for_each(Mount::unmount)
    }

    /// Takes everything down and tells of failures; dropping does the same silently.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.detach()
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // The error that ended the run is the one to tell.
        let _ = self.detach();
        if let Some(image) = self.image.as_ref().filter(|_| self.owns_image) {
            let _ = fs::remove_file(image);
        }
    }
}

/// Creates a file whose blocks are all written, so that no target pays for their allocation.
fn make_file(path: &Path, size_bytes: u64) -> Result<()> {
    let failed = || BenchError::io(format!("create {}", path.display()));
    drop(fs::File::create(path).map_err(failed())?);
    let mut file = DirectFile::open(path).map_err(failed())?;
    file.fill(size_bytes).map_err(failed())
}

/// Arguments of `fjord mount`: what a target asks for, `more` options, then those of the caller.
pub(crate) fn mount_args(how: How, more: Vec<String>, options: &Options) -> Vec<String> {
    let mut words = how.mount_words();
    words.extend(more);
    let mut args = if words.is_empty() { Vec::new() } else { vec!["-o".into(), words.join(",")] };
    args.extend(options.fjord_mount_args.iter().cloned());
    args
}

/// The target's name without what is awkward in names of files.
pub(crate) fn file_name(target: &Target) -> String {
    target.name().replace([':', '/'], "-")
}

/// Drops the page cache of the host, as far as we may.
fn drop_host_caches() {
    rustix::fs::sync();
    // Without root the caches stay warm for every target alike.
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}

/// Formats an image. A device whose last mount is gone may stay busy for a moment: other programs
/// hold copies of it in mount namespaces of their own.
fn mke2fs(args: &[&str], image: &Path) -> Result<()> {
    let deadline = Instant::now() + BUSY_PATIENCE;
    loop {
        match run_program("mke2fs", args, &[image]) {
            Err(BenchError::Command { message, .. })
                if message.contains("in use by the system") && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(200));
            }
            outcome => return outcome,
        }
    }
}
