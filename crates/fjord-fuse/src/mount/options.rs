//! The `-o` list: options of the kernel, of FUSE, and others.
//!
//! The parser handles the options of all file systems in mount(8) and those of FUSE. It returns the
//! others as name and value, for the engine; an unknown option must become an error, it is never
//! ignored silently.

use fjord::AtimeMode;
use fjord::awake::LowLatency;
use rustix::mount::MountFlags;
use thiserror::Error;

use crate::session::Rings;

/// Which FUSE mount type to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MountKind {
    /// `fuseblk` if supported, else `fuse`.
    #[default]
    Auto,
    /// `fuseblk`; fail if unavailable.
    Fuseblk,
    /// `fuse`.
    Fuse,
}

/// Mount options.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// Flags of mount(2).
    pub flags: MountFlags,
    /// Access time updates (by fjord: the kernel leaves them to the server). `flags` has the same
    /// for /proc/mounts.
    pub atime: AtimeMode,
    /// Change the flags of an existing mount.
    pub remount: bool,
    /// Allow access by users other than the one who mounts. `None`: yes for root.
    pub allow_other: Option<bool>,
    /// POSIX ACLs. Without them the kernel spares asking for them.
    pub acl: bool,
    /// Use the kernel's writeback cache.
    pub writeback_cache: bool,
    /// Mount type.
    pub kind: MountKind,
    /// Largest READ, in bytes.
    pub max_read: Option<u32>,
    /// Block size that a fuseblk mount shows, in bytes; the image's when not given.
    pub blksize: Option<u32>,
    /// Source shown in /proc/mounts for plain `fuse`; the image's path when not given.
    pub fsname: Option<String>,
    /// Most worker threads.
    pub threads_max: Option<usize>,
    /// Keep the processors from halting during a rapid sequence of requests.
    pub low_latency: LowLatency,
    /// When requests come over io_uring.
    pub rings: Rings,
}

impl Default for FuseOptions {
    fn default() -> FuseOptions {
        FuseOptions {
            flags: MountFlags::empty(),
            atime: AtimeMode::default(),
            remount: false,
            allow_other: None,
            acl: true,
            writeback_cache: false,
            kind: MountKind::default(),
            max_read: None,
            blksize: None,
            fsname: None,
            threads_max: None,
            low_latency: LowLatency::Auto,
            rings: Rings::WhenCrowded,
        }
    }
}

/// An option with an invalid value.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("mount option {name}={value}: {expected}")]
pub struct OptionError {
    name: String,
    value: String,
    expected: &'static str,
}

/// An option that is not FUSE's: for the engine, or for an error message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unclaimed {
    /// Name.
    pub name: String,
    /// What follows the equals sign.
    pub value: Option<String>,
}

impl FuseOptions {
    /// Whether nothing may be written.
    pub fn read_only(&self) -> bool {
        self.flags.contains(MountFlags::RDONLY)
    }

    /// Takes an `-o` list (`a,b=c`, backslash quotes a comma) into `self`; later options win.
    ///
    /// # Errors
    /// An invalid value of an option.
    pub fn parse(&mut self, list: &str) -> Result<Vec<Unclaimed>, OptionError> {
        let mut unclaimed = Vec::new();
        for item in split_list(list) {
            let (name, value) = match item.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (item, None),
            };
            let claimed = match &value {
                None => self.set_flag(&name),
                Some(value) => self.set_value(&name, value)?,
            };
            if !claimed {
                unclaimed.push(Unclaimed { name, value });
            }
        }
        Ok(unclaimed)
    }

    fn set_flag(&mut self, name: &str) -> bool {
        match name {
            "ro" => self.flags.insert(MountFlags::RDONLY),
            "rw" => self.flags.remove(MountFlags::RDONLY),
            "nosuid" => self.flags.insert(MountFlags::NOSUID),
            "suid" => self.flags.remove(MountFlags::NOSUID),
            "nodev" => self.flags.insert(MountFlags::NODEV),
            "dev" => self.flags.remove(MountFlags::NODEV),
            "noexec" => self.flags.insert(MountFlags::NOEXEC),
            "exec" => self.flags.remove(MountFlags::NOEXEC),
            "sync" => self.flags.insert(MountFlags::SYNCHRONOUS),
            "async" => self.flags.remove(MountFlags::SYNCHRONOUS),
            "dirsync" => self.flags.insert(MountFlags::DIRSYNC),
            "noatime" => self.set_atime(AtimeMode::Never),
            "atime" | "relatime" => self.set_atime(AtimeMode::Relatime),
            "norelatime" | "strictatime" => self.set_atime(AtimeMode::Strict),
            "nostrictatime" => self.set_atime(AtimeMode::Relatime),
            "nosymfollow" => self.flags.insert(MountFlags::NOSYMFOLLOW),
            "symfollow" => self.flags.remove(MountFlags::NOSYMFOLLOW),
            "nodiratime" => self.flags.insert(MountFlags::NODIRATIME),
            "diratime" => self.flags.remove(MountFlags::NODIRATIME),
            "lazytime" => self.flags.insert(MountFlags::LAZYTIME),
            "nolazytime" => self.flags.remove(MountFlags::LAZYTIME),
            "remount" => self.remount = true,
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            "acl" => self.acl = true,
            "noacl" => self.acl = false,
            "writeback_cache" => self.writeback_cache = true,
            "low_latency" => self.low_latency = LowLatency::Always,
            "nolow_latency" => self.low_latency = LowLatency::Never,
            "io_uring" => self.rings = Rings::Always,
            "noio_uring" => self.rings = Rings::Never,
            "fuseblk" | "blkdev" => self.kind = MountKind::Fuseblk,
            "nofuseblk" => self.kind = MountKind::Fuse,
            // fjord leaves permission checks to the kernel in any case.
            "default_permissions" => {}
            // Read by mount(8), init and udev, and passed on.
            "defaults" | "auto" | "noauto" | "user" | "nouser" | "users" | "owner" | "group"
            | "nofail" | "_netdev" | "loop" | "noiversion" | "iversion" | "silent" | "loud"
            | "user_xattr" => {}
            _ => return name.starts_with("x-") || name.starts_with("X-"),
        }
        true
    }

    fn set_atime(&mut self, atime: AtimeMode) {
        self.atime = atime;
        self.flags -= MountFlags::NOATIME | MountFlags::RELATIME | MountFlags::STRICTATIME;
        self.flags |= match atime {
            AtimeMode::Never => MountFlags::NOATIME,
            AtimeMode::Relatime => MountFlags::RELATIME,
            AtimeMode::Strict => MountFlags::STRICTATIME,
        };
    }

    fn set_value(&mut self, name: &str, value: &str) -> Result<bool, OptionError> {
        let bad = |expected| OptionError { name: name.into(), value: value.into(), expected };
        let number = |expected| value.parse::<u32>().map_err(|_| bad(expected));
        match name {
            "max_read" => {
                let len = number("a number of bytes, at least 4096")?;
                if len < 4096 {
                    return Err(bad("a number of bytes, at least 4096"));
                }
                self.max_read = Some(len);
            }
            "blksize" => {
                let len = number("512, 1024, 2048 or 4096")?;
                if !len.is_power_of_two() || !(512..=4096).contains(&len) {
                    return Err(bad("512, 1024, 2048 or 4096"));
                }
                self.blksize = Some(len);
            }
            "max_threads" => {
                let count = number("a number of threads, at least 2")?;
                if count < 2 {
                    return Err(bad("a number of threads, at least 2"));
                }
                self.threads_max = Some(count as usize);
            }
            "fsname" => self.fsname = Some(value.to_owned()),
            "subtype" => {
                if value != "fjord" {
                    return Err(bad("must be fjord"));
                }
            }
            "comment" => {}
            _ => return Ok(name.starts_with("x-") || name.starts_with("X-")),
        }
        Ok(true)
    }
}

fn split_list(list: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut chars = list.chars();
    while let Some(c) = chars.next() {
        let last = items.len() - 1;
        match c {
            ',' => items.push(String::new()),
            '\\' => items[last].extend(chars.next()),
            c => items[last].push(c),
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

/// Quotes a text for a list of options in which commas part.
pub(super) fn quote(text: &str) -> String {
    text.replace('\\', "\\\\").replace(',', "\\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_options_are_claimed_and_later_ones_win() {
        let mut o = FuseOptions::default();
        let rest = o
            .parse("rw,ro,nosuid,nodev,dev,noatime,relatime,x-systemd.automount,nofail,,max_read=65536")
            .unwrap();
        assert_eq!(rest, []);
        assert_eq!(o.flags, MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::RELATIME);
        assert_eq!(o.atime, AtimeMode::Relatime);
        assert_eq!(o.max_read, Some(65536));
        o.parse("rw,fsname=a\\,b").unwrap();
        assert!(!o.read_only());
        assert_eq!(o.fsname.as_deref(), Some("a,b"));
        assert_eq!(split_list(&quote("a,\\b")), ["a,\\b"]);
    }

    #[test]
    fn the_rest_comes_back() {
        let mut o = FuseOptions::default();
        let rest = o.parse("commit=30,nobarrier").unwrap();
        assert_eq!(rest[0], Unclaimed { name: "commit".into(), value: Some("30".into()) });
        assert_eq!(rest[1], Unclaimed { name: "nobarrier".into(), value: None });
    }

    #[test]
    fn bad_values_are_named() {
        let mut o = FuseOptions::default();
        let e = o.parse("blksize=1000").unwrap_err().to_string();
        assert_eq!(e, "mount option blksize=1000: 512, 1024, 2048 or 4096");
        assert!(o.parse("max_read=x").is_err());
        assert!(o.parse("max_threads=1").is_err());
    }
}
