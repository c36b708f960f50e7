//! The kernel's log: why it refuses an image, which the error of a mount does not tell.

use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
};

/// What the kernel logs from a moment on. Empty where the log cannot be read, as in some containers.
#[derive(Debug)]
pub struct KernelLog(Option<File>);

impl KernelLog {
    /// The log from now on.
    pub fn from_now() -> Self {
        let open = || {
            let mut file =
                OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
            file.seek(SeekFrom::End(0))?;
            std::io::Result::Ok(file)
        };
        KernelLog(open().ok())
    }

    /// The messages since then, or since the last call, that contain one of `words`.
    pub fn lines_with(&mut self, words: &[&str]) -> Vec<String> {
        const RECORD_BYTES: usize = 8192;
        let mut lines = Vec::new();
        let mut record = vec![0; RECORD_BYTES];
        while let Some(file) = &mut self.0 {
            let len = match file.read(&mut record) {
                Ok(0) => break,
                Ok(len) => len,
                // Records were overwritten before they were read: the next ones are there.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
                Err(_) => break,
            };
            // Priority, number and time; the message; lines of properties.
            let text = String::from_utf8_lossy(&record[..len]);
            let message = text.split_once(';').map_or("", |(_, rest)| rest);
            let line = message.lines().next().unwrap_or_default();
            if words.iter().any(|word| line.contains(word)) {
                lines.push(line.to_owned());
            }
        }
        lines
    }
}
