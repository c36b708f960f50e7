//! A Ceph cluster on this machine, for tests.
//!
//! Owns its folder: configuration, keys, data, logs and sockets all lie there, and its addresses are local ones.
//! One monitor, as many OSDs as wanted, no manager.
//!
//! Invariants: a process belongs to the cluster if its command line names the cluster's configuration, so it is
//! found whoever started it and however that ended; after [`Cluster::stop`] and [`take_down`] there is neither a
//! process nor the folder. With [`Life::WithStarter`] the kernel kills each process when the thread that started
//! the cluster ends.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, TcpListener},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::tools::{self, run};

/// The programs that make a cluster.
const PROGRAMS: [&str; 6] = ["ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "rbd"];
/// The pool that a cluster begins with.
pub const POOL: &str = "rbd";
/// Bytes of an OSD's device, a sparse file.
const OSD_BYTES: u64 = 32 << 30;
/// Time for the monitor to form its quorum, and for the OSDs to be up.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest path of a socket (`sun_path`), less the longest name of one here.
const DIR_BYTES_MAX: usize = 107 - "/client.admin.1234567.asok".len();

/// What keeps an OSD's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// A sparse file, as on a disk.
    Bluestore,
    /// Memory: quick, and gone when the OSD is killed.
    Memstore,
}

/// How long the processes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Until [`Cluster::stop`], or until the thread that started them ends.
    WithStarter,
    /// Until [`take_down`].
    Detached,
}

/// What a cluster is like.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// OSDs; as many copies of each object.
    pub osd_count: u32,
    /// What keeps the objects.
    pub store: Store,
    /// How long the processes live.
    pub life: Life,
    /// The address of monitor and OSDs.
    pub address: IpAddr,
}

impl Default for ClusterOptions {
    fn default() -> ClusterOptions {
        ClusterOptions {
            osd_count: 1,
            store: Store::Bluestore,
            life: Life::WithStarter,
            address: Ipv4Addr::LOCALHOST.into(),
        }
    }
}

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    options: ClusterOptions,
}

impl Cluster {
    /// Starts a cluster in `dir`, which it owns from then on. What is left of an earlier one there is taken down.
    ///
    /// # Errors
    /// A missing program of Ceph, with its package; a cluster that is not ready within a minute.
    pub fn start(dir: &Path, options: &ClusterOptions) -> Result<Cluster> {
        tools::require(&PROGRAMS)?;
        let dir = std::path::absolute(dir)?;
        let len = dir.as_os_str().len();
        ensure!(len <= DIR_BYTES_MAX, "{}: too long a path for sockets", dir.display());
        take_down(&dir)?;
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        let cluster = Cluster { dir, options: options.clone() };
        match cluster.bring_up() {
            Ok(()) => Ok(cluster),
            Err(error) => {
                // The first error is the one to tell.
                let _ = take_down(&cluster.dir);
                Err(error)
            }
        }
    }

    fn bring_up(&self) -> Result<()> {
        self.write_conf()?;
        self.make_keys()?;
        self.start_monitor()?;
        for id in 0..self.options.osd_count {
            self.make_osd(id)?;
            self.start_osd(id)?;
        }
        self.make_pool(POOL)
    }

    /// A cluster that runs in `dir` already, and goes on to.
    pub fn at(dir: &Path) -> Result<Cluster> {
        let dir = std::path::absolute(dir)?;
        let options = ClusterOptions { life: Life::Detached, ..ClusterOptions::default() };
        let cluster = Cluster { dir, options };
        ensure!(cluster.conf().exists(), "no cluster is in {}", cluster.dir.display());
        Ok(cluster)
    }

    /// The configuration file.
    pub fn conf(&self) -> PathBuf {
        conf_in(&self.dir)
    }

    /// The URL of an image in the pool.
    pub fn url(&self, image: &str) -> String {
        format!("rbd:{POOL}/{image}?conf={}", self.conf().display())
    }

    /// Runs a program of Ceph's with this cluster's configuration, and returns what it printed.
    pub fn tell(&self, program: &str, args: &[&str]) -> Result<String> {
        Ok(run(self.command(program).args(args))?.expect_code(&[0])?.stdout)
    }

    /// A program of Ceph's, to be run with this cluster's configuration.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("-c").arg(self.conf());
        command
    }

    /// Kills a daemon, such as `mon.a` or `osd.0`, and waits for its end.
    pub fn kill(&self, daemon: &str) -> Result<()> {
        let (kind, id) = daemon.split_once('.').context("a daemon is named as osd.0")?;
        let is_it = |args: &[String]| {
            args[0].ends_with(&format!("ceph-{kind}"))
                && args.windows(2).any(|pair| pair[0] == "-i" && pair[1] == id)
        };
        let found = processes(&self.conf())?.into_iter().filter(|(_, args)| is_it(args));
        let pids: Vec<Pid> = found.map(|(pid, _)| pid).collect();
        ensure!(!pids.is_empty(), "{daemon} does not run");
        kill_all(&pids)
    }

    /// Kills all daemons.
    pub fn kill_all(&self) -> Result<()> {
        let found = processes(&self.conf())?;
        kill_all(&found.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>())
    }

    /// Starts all daemons after [`Cluster::kill_all`].
    pub fn start_all(&self) -> Result<()> {
        self.start_monitor()?;
        (0..self.options.osd_count).try_for_each(|id| self.start_osd(id))
    }

    /// Stops all OSDs, so that nothing answers, or lets them go on.
    pub fn pause_osds(&self, stops: bool) -> Result<()> {
        let signal = if stops { Signal::STOP } else { Signal::CONT };
        for (pid, args) in processes(&self.conf())? {
            if args[0].ends_with("ceph-osd") {
                kill_process(pid, signal)?;
            }
        }
        Ok(())
    }

    /// Makes the OSDs take any content for more than they have room for, or no longer.
    pub fn be_full(&self, is_full: bool) -> Result<()> {
        let ratios = [("nearfull", "0.85"), ("backfillfull", "0.9"), ("full", "0.95")];
        for (name, usual) in ratios {
            let ratio = if is_full { "0.00001" } else { usual };
            self.tell("ceph", &["osd", &format!("set-{name}-ratio"), ratio])?;
        }
        let began = Instant::now();
        let says_full = || -> Result<bool> {
            let dump = self.tell("ceph", &["osd", "dump"])?;
            Ok(dump.lines().any(|line| line.starts_with("pool ") && line.contains(",full")))
        };
        while says_full()? != is_full {
            ensure!(began.elapsed() < PATIENCE, "the pool does not change to full={is_full}");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Starts the monitor, and waits until it answers.
    pub fn start_monitor(&self) -> Result<()> {
        self.start_daemon("mon", "a")?;
        self.tell("ceph", &["--connect-timeout", "60", "mon", "stat"]).map(drop)
    }

    /// Starts an OSD, and waits until it is up.
    pub fn start_osd(&self, id: u32) -> Result<()> {
        self.start_daemon("osd", &id.to_string())?;
        let began = Instant::now();
        loop {
            let dump = self.tell("ceph", &["osd", "dump"])?;
            let name = format!("osd.{id} up");
            if dump.lines().any(|line| line.starts_with(&name)) {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                bail!(
                    "osd.{id} is not up; its log: {}",
                    self.dir.join(format!("osd.{id}.log")).display()
                );
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Adds a user's key to the keyring that the configuration names.
    pub fn add_key(&self, user: &str) -> Result<()> {
        let key = self.tell("ceph", &["auth", "get", user])?;
        let path = self.dir.join("keyring");
        let mut keyring = fs::OpenOptions::new().append(true).open(&path)?;
        std::io::Write::write_all(&mut keyring, key.as_bytes())
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Makes a pool for images.
    pub fn make_pool(&self, pool: &str) -> Result<()> {
        self.tell("ceph", &["osd", "pool", "create", pool, "8", "8"])?;
        self.tell("rbd", &["pool", "init", pool]).map(drop)
    }

    /// Ends all processes and removes the folder.
    pub fn stop(self) -> Result<()> {
        take_down(&self.dir)
    }

    fn write_conf(&self) -> Result<()> {
        let ClusterOptions { osd_count, store, address, .. } = self.options;
        let [v2, v1] = free_ports(address)?;
        let dir = self.dir.display();
        let fsid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let store = match store {
            Store::Bluestore => "bluestore",
            Store::Memstore => "memstore",
        };
        let conf = format!(
            "[global]
fsid = {fsid}
mon host = [v2:{address}:{v2}/0,v1:{address}:{v1}/0]
public addr = {address}
cluster addr = {address}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {dir}/keyring
run dir = {dir}
pid file =
admin socket = {dir}/$name.$pid.asok
log file = {dir}/$name.log
osd pool default size = {osd_count}
osd pool default min size = {min}
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
[mon]
mon data = {dir}/mon.a
paxos propose interval = 0.05
paxos min wait = 0.02
mon cluster log file = {dir}/cluster.log
[osd]
osd data = {dir}/osd.$id
keyring = {dir}/osd.$id/keyring
osd objectstore = {store}
bluestore block create = true
bluestore block size = {OSD_BYTES}
memstore device bytes = {OSD_BYTES}
osd memory target = 1073741824
[client]
log file =
admin socket =
",
            fsid = fsid.trim(),
            min = osd_count.div_ceil(2),
        );
        fs::write(self.conf(), conf).context("writing the configuration")
    }

    /// The monitor's and the administrator's keys, and the monitor's store.
    fn make_keys(&self) -> Result<()> {
        let keyring = self.dir.join("keyring");
        let make = |args: &[&str]| -> Result<()> {
            let made = run(Command::new("ceph-authtool").arg(&keyring).args(args))?;
            made.expect_code(&[0]).map(drop)
        };
        make(&["--create-keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"])?;
        let caps = ["mon", "osd", "mds", "mgr"].map(|kind| ["--cap", kind, "allow *"]);
        make(&[&["--gen-key", "-n", "client.admin"][..], caps.as_flattened()].concat())?;
        let map = self.dir.join("monmap");
        let text = fs::read_to_string(self.conf())?;
        let value = |key: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            found.with_context(|| format!("no {key}"))
        };
        let (fsid, host) = (value("fsid")?, value("mon host")?);
        let mut monmap = Command::new("monmaptool");
        monmap.args(["--create", "--clobber", "--fsid", fsid, "--addv", "a", host]).arg(&map);
        run(&mut monmap)?.expect_code(&[0])?;
        let mut mkfs = self.command("ceph-mon");
        mkfs.args(["--mkfs", "-i", "a", "--monmap"]).arg(&map).arg("--keyring").arg(&keyring);
        run(&mut mkfs)?.expect_code(&[0]).map(drop)
    }

    /// An OSD's identity, key and store.
    fn make_osd(&self, id: u32) -> Result<()> {
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let key = run(Command::new("ceph-authtool").arg("--gen-print-key"))?.expect_code(&[0])?;
        let (uuid, key) = (uuid.trim(), key.stdout.trim().to_owned());
        let secret = self.dir.join("osd.secret");
        fs::write(&secret, format!("{{\"cephx_secret\": \"{key}\"}}"))?;
        let mut new = self.command("ceph");
        new.args(["osd", "new", uuid, &id.to_string(), "-i"]).arg(&secret);
        run(&mut new)?.expect_code(&[0])?;
        let data = self.dir.join(format!("osd.{id}"));
        fs::create_dir_all(&data)?;
        fs::write(data.join("keyring"), format!("[osd.{id}]\n\tkey = {key}\n"))?;
        let mut mkfs = self.command("ceph-osd");
        mkfs.args(["-i", &id.to_string(), "--mkfs", "--osd-uuid", uuid]);
        run(&mut mkfs)?.expect_code(&[0]).map(drop)
    }

    fn start_daemon(&self, kind: &str, id: &str) -> Result<()> {
        let program = format!("ceph-{kind}");
        let mut command = self.command(&program);
        command.args(["-f", "-i", id]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let is_detached = self.options.life == Life::Detached;
        // SAFETY: only system calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                if is_detached {
                    rustix::process::setsid()?;
                } else {
                    set_parent_process_death_signal(Some(Signal::KILL))?;
                }
                Ok(())
            });
        }
        command.spawn().with_context(|| format!("starting {program}"))?;
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.options.life == Life::WithStarter {
            // Drop cannot report errors; the kernel kills the processes in any case.
            let _ = take_down(&self.dir);
        }
    }
}

fn conf_in(dir: &Path) -> PathBuf {
    dir.join("ceph.conf")
}

/// Ends whatever runs of a cluster in `dir`, and removes the folder. Nothing there is no error.
pub fn take_down(dir: &Path) -> Result<()> {
    let dir = std::path::absolute(dir)?;
    let found = processes(&conf_in(&dir))?;
    kill_all(&found.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>())?;
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The daemons of the cluster with this configuration, with their command lines.
fn processes(conf: &Path) -> Result<Vec<(Pid, Vec<String>)>> {
    let conf = conf.to_string_lossy();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else { continue };
        // It may have ended meanwhile.
        let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
        let args: Vec<String> = line
            .split(|byte| *byte == 0)
            .map(|arg| String::from_utf8_lossy(arg).into_owned())
            .collect();
        let is_daemon = args[0].ends_with("ceph-mon") || args[0].ends_with("ceph-osd");
        if is_daemon && args.iter().any(|arg| *arg == conf) {
            found.push((pid, args));
        }
    }
    Ok(found)
}

/// Kills processes, and waits until they are gone.
fn kill_all(pids: &[Pid]) -> Result<()> {
    for pid in pids {
        // It may have ended meanwhile.
        let _ = kill_process(*pid, Signal::KILL);
    }
    let began = Instant::now();
    for pid in pids {
        while is_running(*pid) {
            ensure!(began.elapsed() < PATIENCE, "process {pid:?} does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// Whether it is neither gone nor a zombie; one of ours is reaped.
fn is_running(pid: Pid) -> bool {
    // An error means that it is no child of ours.
    let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| !stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z")))
}

/// Two ports that nobody has at the moment.
fn free_ports(address: IpAddr) -> Result<[u16; 2]> {
    let listeners = [TcpListener::bind((address, 0))?, TcpListener::bind((address, 0))?];
    let [a, b] = listeners.map(|it| it.local_addr().map(|it| it.port()));
    Ok([a?, b?])
}
