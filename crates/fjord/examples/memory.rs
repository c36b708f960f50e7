//! An ext4 image that is built in memory and written to a file at the end, sparse.
//!
//!     cargo run -p fjord-fs --example memory -- rootfs.img

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use fjord::{Fs, IjournalAreas, MemDevice, MkfsOptions, MountOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let image = std::env::args_os().nth(1).ok_or("usage: memory IMAGE")?;
    build(Path::new(&image))?;
    println!("{} is ready: mount it, or look into it with debugfs", image.display());
    Ok(())
}

/// Builds a small root file system.
pub(crate) fn build(image: &Path) -> Result<(), Box<dyn Error>> {
    let device = Arc::new(MemDevice::new(64 << 20));
    // Nothing in this image is for fjord alone.
    let plain = MkfsOptions {
        block_size: Some(4096),
        label: b"rootfs".to_vec(),
        ijournal: IjournalAreas::None,
        ..MkfsOptions::default()
    };
    let fs = Fs::create_on(device.clone(), &plain, &MountOptions::default())?;
    for dir in ["/bin", "/etc", "/home/alice", "/tmp"] {
        fs.create_dir_all(dir)?;
    }
    fs.set_permissions("/tmp", 0o1777)?;
    fs.chown("/home/alice", Some(1000), Some(1000))?;
    fs.write("/etc/hostname", "example\n")?;
    fs.write("/bin/hello", "#!/bin/sh\necho hello\n")?;
    fs.set_permissions("/bin/hello", 0o755)?;
    fs.symlink("hello", "/bin/hi")?;
    for entry in fs.walk("/")? {
        let entry = entry?;
        println!(
            "{:06o} {:>6} {}",
            entry.metadata().mode(),
            entry.metadata().len(),
            entry.path().display()
        );
    }
    fs.unmount()?;
    device.snapshot().write_to_file(image)?;
    Ok(())
}
