//! What is compared: `std::fs` in a directory, and the path interface of an image.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use fjord::{FileTimes, Fs, OpenOptions, XattrFlags};

/// What both sides can do; paths begin with `/`.
pub(crate) trait Side {
    fn write(&self, path: &str, data: &[u8]) -> io::Result<()>;
    fn read(&self, path: &str) -> io::Result<Vec<u8>>;
    fn read_to_string(&self, path: &str) -> io::Result<String>;
    fn create_dir(&self, path: &str) -> io::Result<()>;
    fn create_dir_all(&self, path: &str) -> io::Result<()>;
    fn remove_file(&self, path: &str) -> io::Result<()>;
    fn remove_dir(&self, path: &str) -> io::Result<()>;
    fn remove_dir_all(&self, path: &str) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    fn copy(&self, from: &str, to: &str) -> io::Result<u64>;
    fn hard_link(&self, from: &str, to: &str) -> io::Result<()>;
    fn symlink(&self, target: &str, path: &str) -> io::Result<()>;
    fn read_link(&self, path: &str) -> io::Result<PathBuf>;
    fn exists(&self, path: &str) -> io::Result<bool>;
    fn stat(&self, path: &str, follow: bool) -> io::Result<Stat>;
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    fn chmod(&self, path: &str, mode: u16) -> io::Result<()>;
    fn set_readonly(&self, path: &str) -> io::Result<()>;
    fn chown(&self, path: &str, owner: Owner, follow: bool) -> io::Result<()>;
    fn set_times(&self, path: &str, seconds: (Option<i64>, Option<i64>)) -> io::Result<()>;
    fn set_xattr(&self, path: &str, name: &str, value: &[u8]) -> io::Result<()>;
    fn get_xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>>;
    fn list_xattr(&self, path: &str) -> io::Result<Vec<String>>;
    fn remove_xattr(&self, path: &str, name: &str) -> io::Result<()>;
    /// Opens with options by letters (`r`, `w`, `a`ppend, `t`runcate, `c`reate, create_`n`ew), writes
    /// `data`, goes to the start and reads to the end.
    fn open(&self, path: &str, how: &str, data: &[u8]) -> io::Result<Vec<u8>>;
}

pub(crate) type Owner = (Option<u32>, Option<u32>);

/// What a user sees of a file; times in whole seconds where the script has set them.
#[derive(Debug, PartialEq)]
pub(crate) struct Stat {
    is: (bool, bool, bool),
    len: Option<u64>,
    mode: u32,
    permissions: (u32, bool),
    owner: (u32, u32),
    nlink: u64,
    old_times: (Option<u64>, Option<u64>),
    has_birth: bool,
}

/// Times of files that the script has not set are of today.
fn old(time: io::Result<SystemTime>) -> Option<u64> {
    let since = time.unwrap().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    Some(since.as_secs()).filter(|seconds| *seconds < 1_000_000_000)
}

fn at(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.unsigned_abs())
}

/// `std::fs` in a directory.
pub(crate) struct Host(pub(crate) tempfile::TempDir);

impl Host {
    fn at(&self, path: &str) -> PathBuf {
        // Not by components: a slash at the end is part of the test.
        format!("{}{path}", self.0.path().display()).into()
    }
}

impl Side for Host {
    fn write(&self, path: &str, data: &[u8]) -> io::Result<()> {
        std::fs::write(self.at(path), data)
    }
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        std::fs::read(self.at(path))
    }
    fn read_to_string(&self, path: &str) -> io::Result<String> {
        std::fs::read_to_string(self.at(path))
    }
    fn create_dir(&self, path: &str) -> io::Result<()> {
        std::fs::create_dir(self.at(path))
    }
    fn create_dir_all(&self, path: &str) -> io::Result<()> {
        std::fs::create_dir_all(self.at(path))
    }
    fn remove_file(&self, path: &str) -> io::Result<()> {
        std::fs::remove_file(self.at(path))
    }
    fn remove_dir(&self, path: &str) -> io::Result<()> {
        std::fs::remove_dir(self.at(path))
    }
    fn remove_dir_all(&self, path: &str) -> io::Result<()> {
        std::fs::remove_dir_all(self.at(path))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.at(from), self.at(to))
    }
    fn copy(&self, from: &str, to: &str) -> io::Result<u64> {
        std::fs::copy(self.at(from), self.at(to))
    }
    fn hard_link(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::hard_link(self.at(from), self.at(to))
    }
    fn symlink(&self, target: &str, path: &str) -> io::Result<()> {
        std::os::unix::fs::symlink(target, self.at(path))
    }
    fn read_link(&self, path: &str) -> io::Result<PathBuf> {
        std::fs::read_link(self.at(path))
    }
    fn exists(&self, path: &str) -> io::Result<bool> {
        std::fs::exists(self.at(path))
    }
    fn stat(&self, path: &str, follow: bool) -> io::Result<Stat> {
        let path = self.at(path);
        let metadata =
            if follow { std::fs::metadata(path) } else { std::fs::symlink_metadata(path) }?;
        let permissions = metadata.permissions();
        Ok(Stat {
            is: (metadata.is_file(), metadata.is_dir(), metadata.is_symlink()),
            len: metadata.is_file().then_some(metadata.len()),
            mode: metadata.mode(),
            permissions: (permissions.mode() & 0o7777, permissions.readonly()),
            owner: (metadata.uid(), metadata.gid()),
            nlink: metadata.nlink(),
            old_times: (old(metadata.accessed()), old(metadata.modified())),
            has_birth: metadata.created().is_ok(),
        })
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.at(path))?;
        let name = |entry: std::fs::DirEntry| {
            let kind = entry.file_type().unwrap();
            let kind = (kind.is_file(), kind.is_dir(), kind.is_symlink());
            let path = entry.path();
            let path = path.strip_prefix(self.0.path()).unwrap();
            format!("{} {kind:?} /{}", entry.file_name().display(), path.display())
        };
        let mut names: Vec<String> =
            entries.map(|entry| Ok(name(entry?))).collect::<io::Result<_>>()?;
        names.sort();
        Ok(names)
    }
    fn chmod(&self, path: &str, mode: u16) -> io::Result<()> {
        std::fs::set_permissions(self.at(path), PermissionsExt::from_mode(mode.into()))
    }
    fn set_readonly(&self, path: &str) -> io::Result<()> {
        let path = self.at(path);
        let mut permissions = std::fs::metadata(&path)?.permissions();
        permissions.set_readonly(true);
        std::fs::set_permissions(path, permissions)
    }
    fn chown(&self, path: &str, (uid, gid): Owner, follow: bool) -> io::Result<()> {
        let path = self.at(path);
        if follow {
            std::os::unix::fs::chown(path, uid, gid)
        } else {
            std::os::unix::fs::lchown(path, uid, gid)
        }
    }
    fn set_times(&self, path: &str, (atime, mtime): (Option<i64>, Option<i64>)) -> io::Result<()> {
        let mut times = std::fs::FileTimes::new();
        times = atime.map_or(times, |seconds| times.set_accessed(at(seconds)));
        times = mtime.map_or(times, |seconds| times.set_modified(at(seconds)));
        std::fs::File::open(self.at(path))?.set_times(times)
    }
    fn set_xattr(&self, path: &str, name: &str, value: &[u8]) -> io::Result<()> {
        let flags = rustix::fs::XattrFlags::empty();
        Ok(rustix::fs::setxattr(self.at(path), name, value, flags)?)
    }
    fn get_xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut value = vec![0; 4096];
        match rustix::fs::getxattr(self.at(path), name, &mut value) {
            Ok(len) => {
                value.truncate(len);
                Ok(Some(value))
            }
            Err(rustix::io::Errno::NODATA) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
    fn list_xattr(&self, path: &str) -> io::Result<Vec<String>> {
        let mut names = vec![0u8; 4096];
        let len = rustix::fs::listxattr(self.at(path), &mut names)?;
        let names = names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let mut names: Vec<String> =
            names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        names.retain(|name| !name.starts_with("security.selinux"));
        Ok(names)
    }
    fn remove_xattr(&self, path: &str, name: &str) -> io::Result<()> {
        Ok(rustix::fs::removexattr(self.at(path), name)?)
    }
    fn open(&self, path: &str, how: &str, data: &[u8]) -> io::Result<Vec<u8>> {
        let has = |letter| how.contains(letter);
        let mut options = std::fs::OpenOptions::new();
        options.read(has('r')).write(has('w')).append(has('a')).truncate(has('t'));
        options.create(has('c')).create_new(has('n')).mode(0o600);
        use_file(options.open(self.at(path))?, data)
    }
}

fn use_file(mut file: impl Read + Write + Seek, data: &[u8]) -> io::Result<Vec<u8>> {
    file.write_all(data)?;
    file.seek(SeekFrom::Start(0))?;
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content)
}

/// The path interface of an image.
pub(crate) struct Image(pub(crate) Fs);

impl Side for Image {
    fn write(&self, path: &str, data: &[u8]) -> io::Result<()> {
        Ok(self.0.write(path, data)?)
    }
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        Ok(self.0.read(path)?)
    }
    fn read_to_string(&self, path: &str) -> io::Result<String> {
        Ok(self.0.read_to_string(path)?)
    }
    fn create_dir(&self, path: &str) -> io::Result<()> {
        Ok(self.0.create_dir(path).map(drop)?)
    }
    fn create_dir_all(&self, path: &str) -> io::Result<()> {
        Ok(self.0.create_dir_all(path).map(drop)?)
    }
    fn remove_file(&self, path: &str) -> io::Result<()> {
        Ok(self.0.remove_file(path)?)
    }
    fn remove_dir(&self, path: &str) -> io::Result<()> {
        Ok(self.0.remove_dir(path)?)
    }
    fn remove_dir_all(&self, path: &str) -> io::Result<()> {
        Ok(self.0.remove_dir_all(path)?)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(self.0.rename(from, to)?)
    }
    fn copy(&self, from: &str, to: &str) -> io::Result<u64> {
        Ok(self.0.copy(from, to)?)
    }
    fn hard_link(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(self.0.hard_link(from, to)?)
    }
    fn symlink(&self, target: &str, path: &str) -> io::Result<()> {
        Ok(self.0.symlink(target, path).map(drop)?)
    }
    fn read_link(&self, path: &str) -> io::Result<PathBuf> {
        Ok(self.0.read_link(path)?)
    }
    fn exists(&self, path: &str) -> io::Result<bool> {
        Ok(self.0.try_exists(path)?)
    }
    fn stat(&self, path: &str, follow: bool) -> io::Result<Stat> {
        let metadata = if follow { self.0.metadata(path) } else { self.0.symlink_metadata(path) }?;
        let permissions = metadata.permissions();
        Ok(Stat {
            is: (metadata.is_file(), metadata.is_dir(), metadata.is_symlink()),
            len: metadata.is_file().then_some(metadata.len()),
            mode: metadata.mode(),
            permissions: (permissions.mode() & 0o7777, permissions.readonly()),
            owner: (metadata.uid(), metadata.gid()),
            nlink: metadata.nlink(),
            old_times: (
                old(metadata.accessed().map_err(Into::into)),
                old(metadata.modified().map_err(Into::into)),
            ),
            has_birth: metadata.created().is_ok(),
        })
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let name = |entry: fjord::OwnedDirEntry| {
            let kind = entry.file_type().unwrap();
            let kind = (kind.is_file(), kind.is_dir(), kind.is_symlink());
            format!("{} {kind:?} {}", entry.file_name().display(), entry.path().display())
        };
        let entries = self.0.read_dir(path)?;
        let mut names: Vec<String> =
            entries.map(|entry| Ok(name(entry?))).collect::<io::Result<_>>()?;
        names.sort();
        Ok(names)
    }
    fn chmod(&self, path: &str, mode: u16) -> io::Result<()> {
        Ok(self.0.set_permissions(path, mode)?)
    }
    fn set_readonly(&self, path: &str) -> io::Result<()> {
        let mut permissions = self.0.metadata(path)?.permissions();
        permissions.set_readonly(true);
        Ok(self.0.set_permissions(path, permissions)?)
    }
    fn chown(&self, path: &str, (uid, gid): Owner, follow: bool) -> io::Result<()> {
        Ok(if follow { self.0.chown(path, uid, gid) } else { self.0.lchown(path, uid, gid) }?)
    }
    fn set_times(&self, path: &str, (atime, mtime): (Option<i64>, Option<i64>)) -> io::Result<()> {
        let mut times = FileTimes::new();
        times = atime.map_or(times, |seconds| times.set_accessed(at(seconds)));
        times = mtime.map_or(times, |seconds| times.set_modified(at(seconds)));
        Ok(self.0.set_times(path, times)?)
    }
    fn set_xattr(&self, path: &str, name: &str, value: &[u8]) -> io::Result<()> {
        Ok(self.0.set_xattr(path, name, value, XattrFlags::empty())?)
    }
    fn get_xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.get_xattr(path, name)?)
    }
    fn list_xattr(&self, path: &str) -> io::Result<Vec<String>> {
        let names = self.0.list_xattr(path)?;
        Ok(names.into_iter().map(|name| name.into_string().unwrap()).collect())
    }
    fn remove_xattr(&self, path: &str, name: &str) -> io::Result<()> {
        Ok(self.0.remove_xattr(path, name)?)
    }
    fn open(&self, path: &str, how: &str, data: &[u8]) -> io::Result<Vec<u8>> {
        let has = |letter| how.contains(letter);
        let mut options = OpenOptions::new();
        options.read(has('r')).write(has('w')).append(has('a')).truncate(has('t'));
        options.create(has('c')).create_new(has('n')).mode(0o600);
        // Through a shared reference, as `&std::fs::File` can be used.
        use_file(&options.open(&self.0, path)?, data)
    }
}
