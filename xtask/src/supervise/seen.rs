//! What the program's mounts were while it ran: FUSE connections and devices that no list shows later.
//!
//! Owns the record of them. A mount that umount(2) has detached, or whose namespace has ended, is in no mount
//! table any more, and what it was made of may stay. Invariant: nothing is recorded that the supervisor had
//! from its caller, by a mount or by a descriptor.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path, PathBuf},
};

use fjord_block::mountinfo::{self, MountEntry};
use rustix::fs::{Mode, OFlags, makedev, openat};

use super::{
    look::{self, CONNECTIONS, PROC, SYS},
    processes::{self, Process, descendants},
};

/// Device number of a mounted file system.
pub(super) type Device = (u32, u32);

/// Mounts of this process' namespace.
pub(super) fn mounts() -> Vec<MountEntry> {
    // PROC is there, or no supervisor has started.
    mountinfo::parse(&PROC.read("self/mountinfo").unwrap_or_default())
}

pub(super) fn device(mount: &MountEntry) -> Device {
    (mount.dev_major, mount.dev_minor)
}

pub(super) fn is_fuse(mount: &MountEntry) -> bool {
    mount.fs_type.starts_with("fuse") && mount.fs_type != "fusectl"
}

/// Name of the connection of a mount: its device number, as one number of 12 + 20 bits.
fn connection((major, minor): Device) -> String {
    ((major << 20) | minor).to_string()
}

/// What the program has had.
#[derive(Debug)]
pub(super) struct Seen {
    /// What the caller had mounted, or served.
    foreign: BTreeSet<Device>,
    foreign_connections: BTreeSet<String>,
    /// Mount namespaces of others, which a process of the program may enter. Of those that outlive the
    /// supervisor: the number of one that has ended may be that of a new one.
    foreign_namespaces: BTreeSet<PathBuf>,
    /// Each with its folder in [`CONNECTIONS`]: the name may be that of another program's later.
    connections: Vec<(String, File)>,
    /// File systems that it has mounted. The number of one that is gone may be that of another program's.
    mounted: BTreeSet<Device>,
    /// Block devices that it has mounted, with the [`disk_sequence`] of that time: another program's may get
    /// the name later.
    devices: BTreeSet<(String, String)>,
}

impl Seen {
    /// Nothing yet; what is mounted now is the caller's.
    pub(super) fn nothing() -> Seen {
        Seen {
            foreign: mounts().iter().map(device).collect(),
            foreign_connections: served("self"),
            foreign_namespaces: namespaces_of_callers(),
            connections: Vec::new(),
            mounted: BTreeSet::new(),
            devices: BTreeSet::new(),
        }
    }

    /// Adds the mounts that this namespace has now.
    pub(super) fn note_own(&mut self) {
        self.add(mounts);
    }

    /// Also those of the namespaces that the program's processes have made, for which all are looked at.
    pub(super) fn note(&mut self) {
        self.note_own();
        self.note_below(&descendants());
    }

    /// Adds what is mounted in the namespaces of `processes`.
    fn note_below(&mut self, processes: &[Process]) {
        for folder in self.namespaces(processes) {
            let file = folder + "/mountinfo";
            self.add(|| mountinfo::parse(&PROC.read(&file).unwrap_or_default()));
        }
    }

    /// One thread, as its folder in /proc, for each mount namespace that the program has made.
    pub(super) fn namespaces(&self, processes: &[Process]) -> Vec<String> {
        let own = namespace("self");
        let mut found = BTreeMap::new();
        for folder in processes.iter().flat_map(Process::threads) {
            let is_new =
                |it: &PathBuf| Some(it) != own.as_ref() && !self.foreign_namespaces.contains(it);
            if let Some(namespace) = namespace(&folder).filter(is_new) {
                found.entry(namespace).or_insert(folder);
            }
        }
        found.into_values().collect()
    }

    /// Adds the connections that processes serve, if the kernel tells (Linux 6.18 does).
    fn note_served(&mut self, processes: &[Process]) {
        for thread in processes.iter().flat_map(Process::threads) {
            served(&thread).into_iter().for_each(|name| self.add_connection(name));
        }
    }

    /// Adds a connection that is the program's own now, unless it is known or the caller's.
    fn add_connection(&mut self, name: String) {
        self.connections.retain(|(_, folder)| has_connection(folder));
        if self.foreign_connections.contains(&name)
            || self.connections.iter().any(|(known, _)| *known == name)
        {
            return;
        }
        if let Ok(folder) = CONNECTIONS.open(&name, OFlags::PATH | OFlags::DIRECTORY) {
            self.connections.push((name, folder));
        }
    }

    /// Adds a file system that the supervisor has mounted for the program.
    pub(super) fn add_own(&mut self, dir: &Path) {
        let new = mounts().into_iter().rev().find(|mount| mount.mountpoint == dir);
        if let Some(new) = new {
            self.foreign.remove(&device(&new));
            self.add(|| vec![new.clone()]);
        }
    }

    /// Adds what a mount table has.
    fn add(&mut self, table: impl Fn() -> Vec<MountEntry>) {
        let (mut devices, mut connections) = (Vec::new(), Vec::new());
        for mount in table() {
            let device = device(&mount);
            if self.foreign.contains(&device) {
                continue;
            }
            if is_fuse(&mount) {
                connections.push((mount.mount_id, connection(device)));
            }
            if let Some(name) = block_device(device) {
                let sequence = disk_sequence(&name);
                devices.push((mount.mount_id, (name, sequence)));
            }
            self.mounted.insert(device);
        }
        devices.retain(|(_, disk)| !self.devices.contains(disk));
        let known: BTreeSet<String> =
            self.connections.iter().map(|(name, _)| name.clone()).collect();
        connections.iter().for_each(|(_, name)| self.add_connection(name.clone()));
        let is_new = |(name, _): &(String, File)| !known.contains(name);
        if devices.is_empty() && !self.connections.iter().any(is_new) {
            return;
        }
        // Still mounted: it was not attached, or the number given, anew before that was looked up.
        let now = table();
        let is_still = |id| now.iter().any(|mount| mount.mount_id == id);
        devices.retain(|(id, _)| is_still(*id));
        self.devices.extend(devices.into_iter().map(|(_, disk)| disk));
        connections.retain(|(id, _)| is_still(*id));
        self.connections.retain(|(name, _)| {
            known.contains(name) || connections.iter().any(|(_, still)| still == name)
        });
    }

    pub(super) fn is_foreign(&self, mount: &MountEntry) -> bool {
        self.foreign.contains(&device(mount))
    }

    /// Whether the program has mounted this block device, with what is attached to it now.
    pub(super) fn has_mounted(&self, name: &str, sequence: &str) -> bool {
        self.devices.contains(&(name.to_owned(), sequence.to_owned()))
    }

    /// Whether the program has mounted the file system that has this number now, as stat(2) has it.
    pub(super) fn is_mounted(&self, number: u64) -> bool {
        let is_it = |(major, minor): &Device| makedev(*major, *minor) == number;
        self.mounted.iter().any(is_it) && !self.mounted_by_others().iter().any(is_it)
    }

    /// File systems in the mount namespaces of all other processes.
    fn mounted_by_others(&self) -> BTreeSet<Device> {
        let own = descendants();
        let mut namespaces: BTreeSet<PathBuf> = namespace("self").into_iter().collect();
        namespaces.extend(own.iter().flat_map(Process::threads).filter_map(|it| namespace(&it)));
        let own: BTreeSet<String> = own.iter().map(Process::folder).collect();
        let mut found = BTreeSet::new();
        for folder in processes::all().iter().map(Process::folder) {
            let is_others = !own.contains(&folder)
                && namespace(&folder).is_some_and(|it| namespaces.insert(it));
            if is_others {
                let table = PROC.read(folder + "/mountinfo").unwrap_or_default();
                found.extend(mountinfo::parse(&table).iter().map(device));
            }
        }
        found
    }

    /// Ends the connections that are still there, and those of `fuseblk` mounts of these devices: whoever
    /// waits for one gets an error.
    pub(super) fn abort(&mut self, devices: impl Iterator<Item = String>) {
        let processes = descendants();
        self.note_below(&processes);
        self.note_served(&processes);
        let of_device = devices.filter_map(|name| {
            let number = SYS.text(format!("block/{name}/dev")).ok()?;
            let (major, minor) = number.trim_end().split_once(':')?;
            Some(connection((major.parse().ok()?, minor.parse().ok()?)))
        });
        of_device.for_each(|name| self.add_connection(name));
        for (name, folder) in &self.connections {
            match look::write_below(folder, "abort", "1") {
                Ok(()) => say!("aborted FUSE connection {name}"),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => say!("cannot abort FUSE connection {name}: {error}"),
            }
        }
    }
}

/// The mount namespace of a process or thread.
fn namespace(folder: &str) -> Option<PathBuf> {
    PROC.link(format!("{folder}/ns/mnt")).ok()
}

/// The mount namespaces of the caller and of the first process.
fn namespaces_of_callers() -> BTreeSet<PathBuf> {
    let parent = rustix::process::getppid().map_or(1, |pid| pid.as_raw_nonzero().get());
    [1, parent].iter().filter_map(|pid| namespace(&pid.to_string())).collect()
}

/// The FUSE connections that a process or thread has a descriptor of.
fn served(folder: &str) -> BTreeSet<String> {
    let dir = format!("{folder}/fd");
    let fuse = PROC.names(&dir).into_iter().filter(|number| {
        PROC.link(format!("{dir}/{number}")).is_ok_and(|file| file == Path::new("/dev/fuse"))
    });
    let of_descriptor = |number: String| {
        let text = PROC.text(format!("{folder}/fdinfo/{number}")).ok()?;
        let name = text.lines().find_map(|line| line.strip_prefix("fuse_connection:"))?;
        Some(name.trim().to_owned())
    };
    fuse.filter_map(of_descriptor).collect()
}

/// Whether the connection of a folder is still there.
fn has_connection(folder: &File) -> bool {
    openat(folder, "abort", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).is_ok()
}

/// Counts what was attached to a block device so far, where the kernel does.
pub(super) fn disk_sequence(name: &str) -> String {
    SYS.text(format!("block/{name}/diskseq")).unwrap_or_default()
}

/// The name of the disk with this number, or of the disk that it is a partition of.
fn block_device((major, minor): Device) -> Option<String> {
    let path = SYS.link(format!("dev/block/{major}:{minor}")).ok()?;
    let mut parts = path.iter().skip_while(|part| *part != "block");
    parts.nth(1)?.to_str().map(str::to_owned)
}
