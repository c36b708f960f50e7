//! OLTP-insert of sysbench on MariaDB, as Figure 14 of *Barrier-Enabled IO Stack for Flash Storage* (FAST '18) has it
//! on MySQL: each insert is a transaction, which fsyncs the server's log.
//!
//! Owns the server: it ends with its turn, whatever becomes of that.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::plan::Plan;
use crate::error::{BenchError, Result};
use crate::target::{Stand, output_of};
use crate::workload::{Sample, Switches, new_histogram};

/// Threads of sysbench, each with a connection.
const CONNECTION_COUNT: u32 = 8;
const ROW_COUNT: u32 = 1_000;
/// The server's log; by default it takes a third of a quick figure's device.
const LOG_SIZE: &str = "--innodb-log-file-size=32M";
/// The server begins or ends within this time, on a slow device too.
const SERVER_PATIENCE: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(20);

/// Inserts for a turn, by a server whose files are on the mount.
pub(super) fn insert(stand: &Stand, plan: &Plan) -> Result<Sample> {
    let name = stand.target.name();
    let dir = stand.mount_dir().ok_or_else(|| {
        BenchError::Usage(format!("MariaDB needs a mount, and {name} is not one; use fjord-fuse"))
    })?;
    let data = dir.join("mariadb");
    copy_dir(&system_tables(stand)?, &data)?;
    stand.fs()?.sync().map_err(BenchError::io(format!("sync {name}")))?;
    let server = Server::start(&data)?;
    sysbench(&server, &["prepare"])?;
    let seconds = plan.turn.as_secs().max(1).to_string();
    let time = format!("--time={seconds}");
    let told = sysbench(&server, &[&time, "--histogram=on", "run"])?;
    server.stop()?;
    fs::remove_dir_all(&data).map_err(BenchError::io(format!("remove {}", data.display())))?;
    sample_of(&told)
}

/// A data directory with the tables that a server begins with; made once for a figure.
fn system_tables(stand: &Stand) -> Result<PathBuf> {
    let made = stand.work_dir().join("mariadb-begin");
    if made.exists() {
        return Ok(made);
    }
    let unfinished = stand.work_dir().join("mariadb-unfinished");
    let arg = format!("--datadir={}", unfinished.display());
    let root = "--auth-root-authentication-method=normal";
    let args = ["--no-defaults", root, "--user=root", LOG_SIZE, &arg];
    output_of("mariadb-install-db", &args, &[])?;
    fs::rename(&unfinished, &made)
        .map_err(BenchError::io(format!("rename {}", unfinished.display())))?;
    Ok(made)
}

fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    let failed = || BenchError::io(format!("copy {}", from.display()));
    fs::create_dir(to).map_err(failed())?;
    for entry in fs::read_dir(from).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        let target = to.join(entry.file_name());
        if entry.file_type().map_err(failed())?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).map_err(failed())?;
        }
    }
    Ok(())
}

/// A running server.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(data: &Path) -> Result<Server> {
        // A path below a deep directory may be too long for a socket.
        let socket = std::env::temp_dir().join(format!("fjord-mariadb-{}", std::process::id()));
        let arg = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let (log, pid) = (data.join("server.log"), data.join("pid"));
        let child = Command::new("mariadbd")
            .args(["--no-defaults", "--user=root", "--skip-networking", LOG_SIZE])
            .args([arg("datadir", data), arg("socket", &socket)])
            .args([arg("log-error", &log), arg("pid-file", &pid)])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|source| BenchError::MissingProgram { program: "mariadbd".into(), source })?;
        let mut server = Server { child, socket };
        let accepts = |server: &mut Server| UnixStream::connect(&server.socket).is_ok();
        server.wait_until(accepts).map_err(|message| BenchError::Command {
            command: "mariadbd".into(),
            message: format!("{message}: {}", fs::read_to_string(&log).unwrap_or_default().trim()),
        })?;
        Ok(server)
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn wait_until(
        &mut self,
        holds: impl Fn(&mut Server) -> bool,
    ) -> std::result::Result<(), String> {
        let deadline = Instant::now() + SERVER_PATIENCE;
        loop {
            if holds(self) {
                return Ok(());
            }
            if self.has_ended() {
                return Err("it ended".into());
            }
            if Instant::now() >= deadline {
                return Err(format!("it took more than {} s", SERVER_PATIENCE.as_secs()));
            }
            thread::sleep(POLL);
        }
    }

    /// Has the server write everything, and end.
    fn stop(mut self) -> Result<()> {
        let failed = |message: String| BenchError::Command { command: "mariadbd".into(), message };
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM).map_err(|errno| failed(format!("SIGTERM: {errno}")))?;
        }
        self.wait_until(Server::has_ended).map_err(failed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended, or nobody waits for it any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

fn sysbench(server: &Server, more: &[&str]) -> Result<String> {
    let socket = format!("--mysql-socket={}", server.socket.display());
    let (rows, threads) =
        (format!("--table-size={ROW_COUNT}"), format!("--threads={CONNECTION_COUNT}"));
    let mut args = vec!["oltp_insert", &socket, "--mysql-user=root", "--mysql-db=test"];
    args.extend(["--tables=1", &rows, &threads]);
    args.extend(more);
    output_of("sysbench", &args, &[])
}

/// What sysbench told: the time, and a histogram of milliseconds with a count at each.
fn sample_of(told: &str) -> Result<Sample> {
    let missing = |what: &str| BenchError::Command {
        command: "sysbench".into(),
        message: format!("it told no {what}: {told}"),
    };
    let mut latency = new_histogram();
    for line in told.lines() {
        let Some((ms, rest)) = line.split_once('|') else { continue };
        let count = rest.split_whitespace().last().and_then(|count| count.parse::<u64>().ok());
        if let (Ok(ms), Some(count)) = (ms.trim().parse::<f64>(), count) {
            latency.saturating_record_n((ms * 1e6) as u64, count);
        }
    }
    if latency.is_empty() {
        return Err(missing("histogram"));
    }
    let total = told.lines().find_map(|line| line.trim().strip_prefix("total time:"));
    let seconds = total.and_then(|text| text.trim().trim_end_matches('s').parse::<f64>().ok());
    let elapsed = Duration::try_from_secs_f64(seconds.ok_or_else(|| missing("time"))?)
        .map_err(|_| missing("time"))?;
    let amount = latency.len() as f64;
    Ok(Sample { amount, elapsed, latency, switches: Switches::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sysbench_tells() {
        let told = "Latency histogram (values are in milliseconds)\n\
                    \x20      value  ------------- distribution ------------- count\n\
                    \x20      0.120 |****                                     11\n\
                    \x20     20.002 |                                         1\n \n\
                    General statistics:\n    total time:                          3.0063s\n";
        let sample = sample_of(told).unwrap();
        assert_eq!((sample.amount, sample.elapsed), (12.0, Duration::from_secs_f64(3.0063)));
        assert_eq!(sample.latency.max() / 1_000_000, 20);
        assert!(sample_of("nothing").is_err());
        assert!(sample_of("   0.1 |*  1\n").is_err(), "no time");
    }
}
