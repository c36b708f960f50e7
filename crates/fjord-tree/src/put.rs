//! Copies entries of the host, or a stream, into an existing image.

use std::io::Read;
use std::path::Path;

use fjord::{InodeRef, Timespec};

use crate::builder::{Builder, COPY_BYTES, Meta, New, Populated, Progress, Spot};
use crate::error::{Result, TreeError};
use crate::host::read;
use crate::marks::Marks;
use crate::rules::Rules;

/// Where a copy goes in the image.
#[derive(Clone)]
pub enum Destination {
    /// To this name in this directory.
    Name(InodeRef, Vec<u8>),
    /// What the source directory has goes into this directory.
    Contents(InodeRef),
}

/// Copies a file, or a directory with all that is in it, into an image. A file in the image that has
/// the name of a new one is replaced when that is complete; directories are merged. What cannot be
/// copied below `source` is listed and left out, unless the others would fail too.
///
/// # Errors
/// [`TreeError::Source`] when `source` itself cannot be read; [`TreeError::Full`], after which an
/// entry that did not fit leaves what was there before; [`TreeError::InTheWay`];
/// [`TreeError::Engine`].
pub fn put(
    source: &Path,
    destination: &Destination,
    rules: &Rules,
    progress: Progress<'_>,
) -> Result<Populated> {
    match destination {
        Destination::Name(dir, name) => {
            let fs = dir.fs();
            let mut builder = Builder::over(&fs, rules, progress);
            read::from_path(&mut builder, source, dir, name)?;
            builder.finish()
        }
        Destination::Contents(dir) => {
            let fs = dir.fs();
            let mut builder = Builder::over(&fs, rules, progress);
            read::contents_of(&mut builder, source, dir)?;
            builder.finish()
        }
    }
}

/// Permission bits of a file that comes from a stream, unless the rules say otherwise.
const STREAM_MODE: u16 = 0o644;

/// Copies a stream into a regular file of an image. It belongs to root, unless the rules say
/// otherwise.
///
/// # Errors
/// As [`put`].
pub fn put_stream(
    stream: &mut dyn Read,
    (dir, name): (&InodeRef, &[u8]),
    rules: &Rules,
    progress: Progress<'_>,
) -> Result<Populated> {
    let fs = dir.fs();
    let mut builder = Builder::over(&fs, rules, progress);
    let (mode, now) = (STREAM_MODE, Timespec::now());
    let meta = Meta {
        mode,
        uid: 0,
        gid: 0,
        atime: now,
        mtime: now,
        xattrs: Vec::new(),
        marks: Marks::default(),
    };
    let spot = Spot { parent: dir, name, path: name };
    let mut buffer = vec![0; COPY_BYTES];
    builder.place(spot, New::File, &mut |builder, inode| {
        let mut offset = 0;
        loop {
            let count = match stream.read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(source) => {
                    return Err(TreeError::Source { path: "standard input".to_owned(), source });
                }
                Ok(count) => count,
            };
            if count == 0 {
                return builder.apply(inode, name, &meta);
            }
            builder.write(inode, name, offset, &buffer[..count])?;
            offset += count as u64;
        }
    })?;
    builder.count_entry();
    builder.finish()
}
