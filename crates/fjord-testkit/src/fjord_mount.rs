//! The `fjord` program as a test sees it: its commands, and a mounted daemon that is always ended.
//!
//! Invariant: when a [`FjordMount`] is gone, so are its process and its mount.

use std::{
    io::Read,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::on_cluster::Moved;
use crate::tools::{self, Output, run};

/// Time a mount may take to appear, and a daemon to end after `umount`.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program: `FJORD_BIN`, or the one beside the running test in the target directory.
pub fn fjord_program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("FJORD_BIN") {
        return Ok(path.into());
    }
    let me = std::env::current_exe()?;
    me.ancestors()
        .skip(1)
        .take(3)
        .map(|dir| dir.join("fjord"))
        .find(|path| path.is_file())
        .context("the fjord program is not built: cargo build -p fjord-cli, or set FJORD_BIN")
}

/// Runs `fjord` with these arguments to its end.
pub fn fjord(args: &[&str], paths: &[&Path]) -> Result<Output> {
    run(Command::new(fjord_program()?).args(args).args(paths))
}

/// A directory on which a fjord daemon serves an image.
#[derive(Debug)]
pub struct FjordMount {
    dir: tempfile::TempDir,
    child: Option<Child>,
    moved: Option<Moved>,
}

impl FjordMount {
    /// Starts `fjord mount ARGS IMAGE DIR` in the foreground and waits until DIR is mounted.
    pub fn new(image: &Path, args: &[&str]) -> Result<Self> {
        Self::with_program(&fjord_program()?, image, args)
    }

    /// The same with a given program.
    pub fn with_program(program: &Path, image: &Path, args: &[&str]) -> Result<Self> {
        Self::start(Command::new(program), image, args)
    }

    /// The same with a command that runs the program, without arguments.
    pub fn start(mut program: Command, image: &Path, args: &[&str]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("fjord-fuse-").tempdir()?;
        let moved = Moved::wanted(image)?;
        let url = moved.as_ref().map(Moved::url);
        let image = url.as_deref().unwrap_or(image);
        let name = program.get_program().to_owned();
        let mut child = tools::hear_signals(&mut program)
            .arg("mount")
            .args(args)
            .arg(image)
            .arg(dir.path())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", name.display()))?;
        let started = Instant::now();
        while !is_mounted(dir.path())? {
            if let Some(status) = child.try_wait()? {
                let mut said = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    stderr.read_to_string(&mut said)?;
                }
                bail!("fjord mount ended with {status} before it had mounted: {said}");
            }
            if started.elapsed() > PATIENCE {
                child.kill()?;
                child.wait()?;
                bail!("fjord mount did not mount within {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(FjordMount { dir, child: Some(child), moved })
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Makes a file, and has it durable: that shows that the mount works. Returns the time it took.
    pub fn fsync_new_file(&self, name: &str) -> Result<Duration> {
        let began = Instant::now();
        let mut file = std::fs::File::create(self.path().join(name))?;
        std::io::Write::write_all(&mut file, name.as_bytes())?;
        file.sync_all()?;
        Ok(began.elapsed())
    }

    /// The daemon's process ID.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// `umount DIR`, then waits for the daemon, which must end with status 0.
    pub fn unmount(mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let unmounted = crate::image::unmount(self.dir.path());
        let started = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                unmounted?;
                ensure!(status.success(), "the daemon ended with {status} after umount");
                return self.bring_back();
            }
            if started.elapsed() > PATIENCE {
                child.kill()?;
                child.wait()?;
                bail!("the daemon did not end within {PATIENCE:?} after umount");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills the daemon with SIGKILL; call [`FjordMount::detach`] when all users have noticed.
    pub fn kill(&mut self) -> Result<()> {
        let Some(child) = self.child.as_mut() else { return Ok(()) };
        child.kill()?;
        let status = child.wait()?;
        ensure!(status.signal() == Some(libc::SIGKILL), "the daemon had ended before: {status}");
        self.child = None;
        self.bring_back()
    }

    /// Sends the daemon a signal, such as `TERM`.
    pub fn signal(&self, name: &str) -> Result<()> {
        let pid = self.pid().to_string();
        run(tools::command("kill")?.args(["-s", name, &pid]))?.ok().map(drop)
    }

    /// Has the kernel abort the connection, by umount(8) `-f`: every request fails. The mount stays while it is in
    /// use.
    pub fn abort(&self) -> Result<()> {
        tools::command("umount")?.arg("-f").arg(self.dir.path()).stderr(Stdio::null()).status()?;
        Ok(())
    }

    /// Makes the image file what the ended daemon has left.
    fn bring_back(&mut self) -> Result<()> {
        self.moved.take().map_or(Ok(()), Moved::bring_back)
    }

    /// Waits until the daemon has ended, for whatever reason; returns what it said. Then call
    /// [`FjordMount::detach`].
    pub fn wait_for_end(&mut self, patience: Duration) -> Result<String> {
        let Some(child) = self.child.as_mut() else { return Ok(String::new()) };
        let started = Instant::now();
        while child.try_wait()?.is_none() {
            if started.elapsed() > patience {
                // So that whoever waits for the mount goes on.
                child.kill()?;
                child.wait()?;
                bail!("the daemon did not end within {patience:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_string(&mut said)?;
        }
        self.child = None;
        self.bring_back()?;
        Ok(said)
    }

    /// Removes the dead mount.
    pub fn detach(self) {}
}

impl Drop for FjordMount {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if is_mounted(self.dir.path()).unwrap_or(false) {
            let _ = tools::command("umount").and_then(|mut c| run(c.arg("-l").arg(self.path())));
        }
    }
}

/// Whether something is mounted on the directory.
pub fn is_mounted(dir: &Path) -> Result<bool> {
    // The table has no symbolic links. The directory itself cannot be resolved if its server is dead.
    let (parent, name) = (dir.parent().context("a parent")?, dir.file_name().context("a name")?);
    let dir = parent.canonicalize()?.join(name);
    Ok(fjord_block::mountinfo::mount_at(&dir)?.is_some())
}

/// The line of /proc/self/mounts for a directory on which one thing is mounted.
///
/// # Errors
/// Nothing is mounted on it.
pub fn table_line(dir: &Path) -> Result<String> {
    let table = std::fs::read_to_string("/proc/self/mounts")?;
    // fstab(5) has the escapes.
    let dir = dir.to_str().context("a plain name")?.replace(' ', "\\040");
    let line = table.lines().find(|line| line.split(' ').nth(1) == Some(&dir));
    Ok(line.context("not mounted")?.to_owned())
}
