//! Hosts of their own: network namespaces on one bridge, whose cables can be pulled.
//!
//! Owns the namespaces. [`Network::enter`] puts the calling thread, and so all that it starts from then on, into a
//! new one with the bridge; each [`Host`] is a further one, which a process holds that the kernel kills with the
//! thread that made it.
//!
//! Invariant: nothing of it is left when the thread and what it has started have ended, however they end.

use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::{
    process::{Signal, set_parent_process_death_signal},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space},
};

use crate::tools::{self, run};

/// The name of the bridge.
const BRIDGE: &str = "bridge";
/// Time for the kernel to make a namespace.
const PATIENCE: Duration = Duration::from_secs(10);

/// The network, seen from where the cluster is.
#[derive(Debug)]
pub struct Network(());

/// A host on the network.
#[derive(Debug)]
pub struct Host {
    holder: Child,
    /// Its end of the cable at the bridge.
    cable: String,
}

impl Network {
    /// Makes the network; the calling thread, and what it starts from then on, are at the bridge.
    ///
    /// # Errors
    /// Whoever is not root may not; missing programs.
    pub fn enter() -> Result<Network> {
        tools::require_root()?;
        tools::require(&["ip", "iptables", "unshare"])?;
        // SAFETY: only the network of this thread changes; no descriptor or memory does.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .context("making a network namespace")?;
        let address = format!("{}/24", address(1));
        ip(&["link", "set", "lo", "up"])?;
        ip(&["link", "add", BRIDGE, "type", "bridge"])?;
        ip(&["addr", "add", &address, "dev", BRIDGE])?;
        ip(&["link", "set", BRIDGE, "up"])?;
        Ok(Network(()))
    }

    /// The address of whoever is at the bridge.
    pub fn address(&self) -> IpAddr {
        address(1)
    }

    /// A host, by its number from 2 on.
    pub fn host(&self, number: u8) -> Result<Host> {
        let mut holder = Command::new("unshare");
        holder.args(["--net", "sleep", "infinity"]);
        holder.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: one system call between fork and exec.
        unsafe {
            holder.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let host = Host { holder: holder.spawn()?, cable: format!("cable-{number}") };
        let ours = std::fs::read_link("/proc/thread-self/ns/net")?;
        let began = Instant::now();
        // Another namespace, and the program that stays in it.
        while std::fs::read_link(host.namespace())? == ours {
            ensure!(began.elapsed() < PATIENCE, "the host's namespace is not made");
            thread::sleep(Duration::from_millis(2));
        }
        let pid = host.holder.id().to_string();
        ip(&["link", "add", &host.cable, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
        ip(&["link", "set", &host.cable, "master", BRIDGE, "up"])?;
        let address = format!("{}/24", address(number));
        for args in [
            &["addr", "add", &address, "dev", "eth0"][..],
            &["link", "set", "eth0", "up"],
            &["link", "set", "lo", "up"],
        ] {
            run(host.enter(Command::new("ip").args(args))?)?.ok()?;
        }
        Ok(host)
    }
}

impl Host {
    fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    /// Lets a program run on the host.
    pub fn enter<'a>(&self, command: &'a mut Command) -> Result<&'a mut Command> {
        let namespace = File::open(self.namespace())?;
        // SAFETY: one system call between fork and exec; the descriptor lives as long as the closure.
        unsafe {
            command.pre_exec(move || {
                let kind = Some(LinkNameSpaceType::Network);
                Ok(move_into_link_name_space(namespace.as_fd(), kind)?)
            });
        }
        Ok(command)
    }

    /// Has each packet to and from the host lost with this probability; 0 for none.
    pub fn lose(&self, percent: u8) -> Result<()> {
        let iptables = |args: &[&str]| {
            let mut command = tools::command("iptables")?;
            run(self.enter(command.args(["-w"]).args(args))?)?.ok().map(drop)
        };
        iptables(&["-F"])?;
        if percent == 0 {
            return Ok(());
        }
        let probability = format!("{:.2}", f64::from(percent) / 100.0);
        let random = ["-m", "statistic", "--mode", "random", "--probability", &probability];
        for chain in ["INPUT", "OUTPUT"] {
            iptables(&[&["-A", chain][..], &random, &["-j", "DROP"]].concat())?;
        }
        Ok(())
    }

    /// Pulls the host's cable, or plugs it in again.
    pub fn cut(&self, is_cut: bool) -> Result<()> {
        ip(&["link", "set", &self.cable, if is_cut { "down" } else { "up" }])
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The kernel ends it in any case.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

fn address(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, number).into()
}

fn ip(args: &[&str]) -> Result<()> {
    run(Command::new("ip").args(args))?.ok().map(drop)
}
