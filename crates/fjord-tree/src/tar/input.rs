//! Sources of tar streams: files, and standard input.
//!
//! Invariant: an input that was measured reads the same bytes again: a file is rewound to where it
//! was, what comes through a pipe is kept in an unnamed temporary file meanwhile.

use std::fs::{File, FileType};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::error::TarError;
use super::stream::TarReader;
use crate::error::{Result, TreeError};

/// How tar streams are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TarOptions {
    /// The streams are layers of an OCI image: whiteouts remove what lower layers have, entries
    /// replace anything, and links on the way are followed inside the image.
    pub layers: bool,
    /// Names in access lists that the stream gives no number are looked up on the host.
    pub ask_host: bool,
}

impl Default for TarOptions {
    fn default() -> TarOptions {
        TarOptions { layers: false, ask_host: true }
    }
}

/// A tar stream, compressed or not, that can be measured before it is put into an image.
#[derive(Debug)]
pub struct TarInput {
    name: String,
    file: File,
    /// Where the stream starts; `None` for a pipe, which can be read only once.
    start: Option<u64>,
}

fn unreadable(name: &str, source: io::Error) -> TreeError {
    TreeError::Tar { name: name.to_owned(), source: TarError::Read(source) }
}

fn can_seek(kind: FileType) -> bool {
    kind.is_file() || kind.is_block_device()
}

impl TarInput {
    /// Opens a file, or a pipe that the shell has opened (`<(...)`). A named pipe is not opened, as
    /// that may wait forever.
    ///
    /// # Errors
    /// [`TreeError::Tar`] when it cannot be opened; [`TreeError::Usage`] when it is no file.
    pub fn open(path: &Path) -> Result<TarInput> {
        let name = path.display().to_string();
        let kind = path.metadata().map_err(|source| unreadable(&name, source))?.file_type();
        let is_open = ["/dev/fd", "/proc/self/fd"].iter().any(|dir| path.starts_with(dir));
        if !can_seek(kind) && !is_open {
            return Err(TreeError::Usage(format!(
                "{name} is not a regular file; give the stream as standard input: --from-tar -"
            )));
        }
        let file = File::open(path).map_err(|source| unreadable(&name, source))?;
        Ok(TarInput { name, file, start: can_seek(kind).then_some(0) })
    }

    /// Takes standard input, from where it is.
    ///
    /// # Errors
    /// [`TreeError::Tar`] when it is closed.
    pub fn stdin() -> Result<TarInput> {
        TarInput::of_descriptor("standard input", io::stdin().as_fd())
    }

    fn of_descriptor(name: &str, descriptor: std::os::fd::BorrowedFd<'_>) -> Result<TarInput> {
        let unreadable = |source| unreadable(name, source);
        let mut file = File::from(descriptor.try_clone_to_owned().map_err(unreadable)?);
        let kind = file.metadata().map_err(unreadable)?.file_type();
        let start =
            if can_seek(kind) { Some(file.stream_position().map_err(unreadable)?) } else { None };
        Ok(TarInput { name: name.to_owned(), file, start })
    }

    /// What messages call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it can be measured without keeping it.
    pub fn can_seek(&self) -> bool {
        self.start.is_some()
    }

    /// Reads the whole stream with `read`, and then is as before. A pipe is copied to a temporary
    /// file on the way.
    pub(crate) fn measured<T>(
        &mut self,
        read: impl FnOnce(&mut TarReader<'_>) -> Result<T, TarError>,
    ) -> Result<T> {
        let measured = match self.start {
            Some(start) => {
                let measured =
                    TarReader::of_file(&self.file, false).and_then(|mut reader| read(&mut reader));
                self.file.seek(SeekFrom::Start(start)).map_err(|e| unreadable(&self.name, e))?;
                measured
            }
            None => self.spool(read),
        };
        measured.map_err(|source| TreeError::Tar { name: self.name.clone(), source })
    }

    fn spool<T>(
        &mut self,
        read: impl FnOnce(&mut TarReader<'_>) -> Result<T, TarError>,
    ) -> Result<T, TarError> {
        let dir = std::env::temp_dir();
        let failed = |source| TarError::Spool { dir: dir.display().to_string(), source };
        let mut kept = tempfile::tempfile_in(&dir).map_err(failed)?;
        let mut tee = Tee { from: &self.file, to: &kept, failed: None };
        let measured = TarReader::new(&mut tee, false).and_then(|mut reader| read(&mut reader));
        if let Some(error) = tee.failed.take() {
            return Err(failed(error));
        }
        let measured = measured?;
        kept.rewind().map_err(failed)?;
        (self.file, self.start) = (kept, Some(0));
        Ok(measured)
    }

    /// Reads the stream from its start.
    pub(crate) fn reader(&self, ask_host: bool) -> Result<TarReader<'_>, TarError> {
        match self.start {
            Some(start) => {
                (&self.file).seek(SeekFrom::Start(start)).map_err(TarError::Read)?;
                TarReader::of_file(&self.file, ask_host)
            }
            None => TarReader::new(&self.file, ask_host),
        }
    }
}

/// Copies what is read.
struct Tee<'f> {
    from: &'f File,
    to: &'f File,
    failed: Option<io::Error>,
}

impl Read for Tee<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buf)?;
        if let Err(error) = self.to.write_all(&buf[..count]) {
            let kind = error.kind();
            self.failed = Some(error);
            return Err(kind.into());
        }
        Ok(count)
    }
}
