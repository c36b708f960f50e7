//! `fjord put`: copy a file or directory into an image.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use fjord::{Cred, FileKind, InodeRef, SetAttr, SetTime, Timespec};
use indicatif::ProgressBar;

use super::mkdir::parse_mode;
use crate::{
    failure::{Context, Failure, Result},
    image, output,
    paths::{self, Last},
};

const COPY_BYTES: usize = 1 << 20;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Modes, owners and times are kept. `-` as the source reads standard input.\n\n\
Examples:\n  fjord put disk.img hello.txt /srv/\n  fjord put -r disk.img ./site /srv/www\n  \
tar c . | fjord put disk.img - /backup.tar"
)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// File or directory to copy, or - for standard input
    source: PathBuf,
    /// Where to put it; a directory (or a path that ends in a slash) gets it under its own name
    path: String,
    /// Copy a directory with all that is in it
    #[arg(short, long)]
    recursive: bool,
    /// Owner of what is copied, instead of its own
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    owner: Option<(u32, u32)>,
    /// Permission bits of a file, octal, instead of its own
    #[arg(short, long, value_parser = parse_mode)]
    mode: Option<u16>,
}

/// Two numbers with a colon between them.
pub(super) fn parse_owner(text: &str) -> Result<(u32, u32), String> {
    text.split_once(':')
        .and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)))
        .ok_or_else(|| "two numbers are expected, such as 0:0".into())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let from_stdin = args.source.as_os_str() == "-";
    let total = if from_stdin { 0 } else { measure(&args.source, args.recursive)? };
    image::change(&args.image, |fs| {
        let (dir, name) = target(fs, args)?;
        let copy = Copy { args, bar: output::byte_progress(total, "copying") };
        if from_stdin {
            let file = replace(&dir, &name, args.mode.unwrap_or(0o644)).context(&args.path)?;
            copy.content(&mut io::stdin().lock(), &file)?;
        } else {
            copy.any(&args.source, &dir, &name).context(args.source.display())?;
        }
        copy.bar.finish_and_clear();
        Ok(())
    })
}

/// Bytes of regular files below `source`; refuses early what the copy would refuse late.
fn measure(source: &Path, recursive: bool) -> Result<u64> {
    let meta = fs::symlink_metadata(source).context(source.display())?;
    if !meta.is_dir() {
        return Ok(if meta.is_file() { meta.len() } else { 0 });
    }
    if !recursive {
        return Err(Failure::new(format!("{}: is a directory; copy it with -r", source.display())));
    }
    let mut total = 0;
    for entry in fs::read_dir(source).context(source.display())? {
        total += measure(&entry.context(source.display())?.path(), true)?;
    }
    Ok(total)
}

/// The directory and name that the copy gets.
fn target(fs: &fjord::Fs, args: &Args) -> Result<(InodeRef, Vec<u8>)> {
    let found = paths::find(fs, &args.path, Last::Follow);
    let is_dir = found.as_ref().is_ok_and(|f| f.attr().kind() == FileKind::Directory);
    let own_name = args.source.file_name().filter(|n| *n != "-");
    match (found, own_name) {
        (Ok(dir), Some(name)) if is_dir => Ok((dir, name.as_bytes().to_vec())),
        (Err(e), _) if args.path.ends_with('/') => Err(e),
        _ => paths::parent(fs, &args.path),
    }
}

/// A new regular file in place of whatever file has the name.
fn replace(dir: &InodeRef, name: &[u8], mode: u16) -> Result<InodeRef> {
    match dir.lookup(name) {
        Ok(old) if old.attr().kind() == FileKind::Directory => {
            return Err(Failure::new("a directory is in the way"));
        }
        Ok(_) => dir.unlink(name)?,
        Err(e) if e.errno() == libc::ENOENT => {}
        Err(e) => return Err(e.into()),
    }
    Ok(dir.create(name, mode, &Cred::root())?)
}

struct Copy<'a> {
    args: &'a Args,
    bar: ProgressBar,
}

impl Copy<'_> {
    fn any(&self, source: &Path, dir: &InodeRef, name: &[u8]) -> Result<()> {
        let meta = fs::symlink_metadata(source)?;
        let kind = meta.file_type();
        let mode = (meta.mode() & 0o7777) as u16;
        let cred = Cred::root();
        let made = if kind.is_dir() {
            let made = match dir.lookup(name) {
                Ok(old) if old.attr().kind() == FileKind::Directory => old,
                _ => dir.mkdir(name, mode, &cred)?,
            };
            for entry in fs::read_dir(source)? {
                let entry = entry?;
                let path = entry.path();
                self.any(&path, &made, entry.file_name().as_bytes()).context(path.display())?;
            }
            made
        } else if kind.is_file() {
            let made = replace(dir, name, self.args.mode.unwrap_or(mode))?;
            self.content(&mut File::open(source)?, &made)?;
            made
        } else if kind.is_symlink() {
            let target = fs::read_link(source)?;
            dir.symlink(name, target.as_os_str().as_bytes(), &cred)?
        } else {
            let rdev = u32::try_from(meta.rdev())
                .map_err(|_| Failure::new("its device number does not fit"))?;
            dir.mknod(name, meta.mode() as u16, rdev, &cred)?
        };
        self.attributes(&made, &meta, kind.is_symlink())
    }

    fn content(&self, source: &mut dyn Read, file: &InodeRef) -> Result<()> {
        let mut buf = vec![0; COPY_BYTES];
        let mut offset = 0;
        loop {
            let len = source.read(&mut buf)?;
            if len == 0 {
                return Ok(());
            }
            let mut written = 0;
            while written < len {
                written += file.write(offset + written as u64, &buf[written..len])?;
            }
            offset += len as u64;
            self.bar.inc(len as u64);
        }
    }

    fn attributes(&self, file: &InodeRef, meta: &fs::Metadata, is_symlink: bool) -> Result<()> {
        let (uid, gid) = self.args.owner.unwrap_or((meta.uid(), meta.gid()));
        let time = |sec, nsec: i64| {
            Some(SetTime::At(Timespec { sec, nsec: u32::try_from(nsec).unwrap_or(0) }))
        };
        let mode = (meta.mode() & 0o7777) as u16;
        let mode = if meta.is_file() { self.args.mode.unwrap_or(mode) } else { mode };
        let change = SetAttr {
            uid: Some(uid),
            gid: Some(gid),
            // After the owner, whose change drops set-user-ID.
            mode: (!is_symlink).then_some(mode),
            atime: time(meta.atime(), meta.atime_nsec()),
            mtime: time(meta.mtime(), meta.mtime_nsec()),
            ..Default::default()
        };
        file.set_attr(&change, &Cred::root())?;
        Ok(())
    }
}
