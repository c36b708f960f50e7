//! `fjord cat`: write files to standard output.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use fjord::FileKind;

use crate::{
    failure::{Context, Failure, Result},
    image,
    paths::{self, Last},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord cat disk.img /etc/fstab")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Files in the image
    #[arg(required = true)]
    paths: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fs = image::open_to_read(&args.image)?;
    let mut out = io::stdout().lock();
    let mut buf = vec![0; 1 << 20];
    for path in &args.paths {
        let file = paths::find(&fs, path, Last::Follow)?;
        if file.attr().kind() != FileKind::Regular {
            return Err(Failure::new(format!("{path}: not a regular file")));
        }
        let mut offset = 0;
        loop {
            let len = file.read(offset, &mut buf).context(path)?;
            if len == 0 {
                break;
            }
            match out.write_all(&buf[..len]) {
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
            offset += len as u64;
        }
    }
    Ok(out.flush()?)
}
