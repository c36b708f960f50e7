//! One program under supervision: it ends within a limit, and nothing that it started outlives it.
//!
//! A supervisor is a process of its own (`cargo xtask supervise`, hidden), for each program one, so that
//! several run beside each other and each knows what is its own:
//!
//! - processes: it is a child subreaper (prctl(2)), so whatever the program starts stays below it;
//! - mounts: it has a mount namespace of its own;
//! - loop devices: those of images below its scratch folder, in its own /dev/shm, and on file systems that
//!   it has mounted;
//! - FUSE connections: those of mounts that its namespace and those below it have had, and those that its
//!   processes serve.
//!
//! The output of the program comes through a pipe of the supervisor and is passed on. The supervisor does
//! not wait for the end of that pipe: a process that stays behind would hold it open.
//!
//! Invariant: a supervisor ends, whatever its program does, and whether or not somebody reads what it
//! prints; it makes no system call that waits for a FUSE server before that server is dead and its connection
//! aborted, but for those of [`bounded`], for which nobody waits long.

use std::{
    collections::HashSet,
    ffi::OsString,
    fs::{self, File},
    io::Read,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, WaitOptions, WaitStatus, kill_process},
};

use crate::say;

mod bounded;
mod caller;
mod look;
mod loops;
mod processes;
mod resources;
mod scratch;
mod seen;
mod thaw;

use processes::NAMED_MAX;
pub(crate) use processes::{Process, descendants, descendants_outside, end_children, print_stacks};
use resources::Resources;

/// Exit status of the supervisor for a program that failed.
pub(crate) const FAILED: i32 = 1;
/// … for one that reached its limit.
pub(crate) const HUNG: i32 = 124;
/// … for one that passed and left something behind.
pub(crate) const LEFT_BEHIND: i32 = 125;

/// How long processes that the program started may take to end after it.
const GRACE: Duration = Duration::from_secs(5);
/// How long a killed process may take until the FUSE connections of its mounts are aborted.
const KILLED: Duration = Duration::from_secs(2);
/// How long processes may take to end after that.
const ABORTED: Duration = Duration::from_secs(5);
/// How often the state of processes is looked at.
const POLL: Duration = Duration::from_millis(20);
/// How often the mount namespaces that the program's processes have made are looked at, of whose changes
/// nobody tells.
const LOOK: Duration = Duration::from_secs(1);
/// What is read of the program's output before something else is done, in buffers.
const BUFFERS_AT_ONCE: usize = 16;

/// Load per processor that programs under test make by themselves, at most.
const OWN_LOAD: f64 = 2.0;
/// How many times as long a program may take on a machine that has more to do.
const STRETCH_MAX: f64 = 3.0;

/// A program's limit under this load per processor: the limit is one for a machine that has the time.
fn stretched(limit: Duration, load_per_processor: f64) -> Duration {
    limit.mul_f64((load_per_processor / OWN_LOAD).clamp(1.0, STRETCH_MAX))
}

/// Threads that wanted to run in the last minute, for each processor; 0 where /proc does not tell.
fn load_per_processor() -> f64 {
    let text = look::PROC.text("loadavg").unwrap_or_default();
    let load: f64 = text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    load / std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64)
}

/// Arguments of `cargo xtask supervise`.
#[derive(Debug, Args)]
pub(crate) struct SuperviseArgs {
    /// Seconds until the program is ended; up to three times as many on a loaded machine
    #[arg(long)]
    limit: u64,
    /// Folder for the program's temporary files; removed at the end
    #[arg(long)]
    scratch: PathBuf,
    /// Start the program as a careless caller would: see [`caller`]
    #[arg(long)]
    careless: bool,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// Runs the program and ends this process with its outcome.
pub(crate) fn run(args: &SuperviseArgs) -> Result<()> {
    let stop = listen()?;
    let mut supervisor = Supervisor::start(args, stop)?;
    let outcome = supervisor.wait().unwrap_or_else(Outcome::Lost);
    let mut left = supervisor.clean_up(&outcome);
    left |= scratch::remove(&args.scratch);
    let code = match outcome {
        Outcome::Hung => HUNG,
        Outcome::Stopped => FAILED,
        Outcome::Lost(error) => {
            say!("the supervisor failed: {error:#}");
            FAILED
        }
        Outcome::Ended(status) => {
            if let Some(signal) = status.signal() {
                say!("ended by signal {signal}");
            }
            match status.success() {
                false => FAILED,
                true if left => LEFT_BEHIND,
                true => 0,
            }
        }
    };
    say::exit(code)
}

/// Notes SIGTERM and SIGINT, also where the caller has them blocked or ignored. Call it before any other
/// thread is started: they inherit the mask.
pub(crate) fn hear_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    caller::unblock_signals();
    Ok(stop)
}

/// Notes signals, and the end of the parent as one.
fn listen() -> Result<Arc<AtomicBool>> {
    let stop = hear_signals()?;
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    Ok(stop)
}

/// How the program came to its end.
#[derive(Debug)]
enum Outcome {
    Ended(ExitStatus),
    /// It reached its limit.
    Hung,
    /// The supervisor was told to end.
    Stopped,
    /// The supervisor could not wait for it.
    Lost(anyhow::Error),
}

struct Supervisor {
    pid: Pid,
    output: File,
    started: Instant,
    limit: Duration,
    stop: Arc<AtomicBool>,
    resources: Resources,
    /// Processes that were called left behind.
    named: HashSet<Pid>,
}

impl Supervisor {
    fn start(args: &SuperviseArgs, stop: Arc<AtomicBool>) -> Result<Supervisor> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        resources::enter_namespace()?;
        fs::create_dir_all(&args.scratch)
            .with_context(|| format!("cannot make {}", args.scratch.display()))?;
        let (program, arguments) = args.program.split_first().context("no program is named")?;
        let resources = Resources::now(&args.scratch, program.as_ref())?;
        let scratch = &resources.scratch;
        let (output, writer) = std::io::pipe()?;
        let mut command = Command::new(program);
        if args.careless {
            caller::careless(&mut command);
        }
        let child = command
            .args(arguments)
            .env("TMPDIR", scratch)
            .env("FJORD_SCRATCH", scratch)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = Pid::from_raw(i32::try_from(child.id())?).context("a process ID")?;
        let output = File::from(std::os::fd::OwnedFd::from(output));
        rustix::io::ioctl_fionbio(&output, true)?;
        Ok(Supervisor {
            pid,
            output,
            started: Instant::now(),
            limit: Duration::from_secs(args.limit),
            stop,
            resources,
            named: HashSet::new(),
        })
    }

    /// Waits until the program ends, or until it is to be ended.
    fn wait(&mut self) -> Result<Outcome> {
        let changes = resources::MountChanges::open()?;
        let mut looked = Instant::now();
        loop {
            if self.pause(&changes)? {
                self.resources.seen.note_own();
            }
            if looked.elapsed() >= LOOK {
                self.resources.seen.note();
                looked = Instant::now();
            }
            self.forward();
            if let Some(status) = self.reap()?.program {
                return Ok(Outcome::Ended(status));
            }
            if self.stop.load(Ordering::SeqCst) {
                say!("told to end; what runs:");
                print_stacks(&descendants());
                return Ok(Outcome::Stopped);
            }
            let taken = self.started.elapsed();
            if taken >= self.limit && taken >= stretched(self.limit, load_per_processor()) {
                say!("hung: it did not end within {} s; what runs:", taken.as_secs());
                print_stacks(&descendants());
                return Ok(Outcome::Hung);
            }
        }
    }

    /// Until something is printed or mounted, [`POLL`] at most; whether a mount came or went.
    fn pause(&self, changes: &resources::MountChanges) -> Result<bool> {
        let has_room = say::has_room();
        let output = if has_room { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [PollFd::new(&self.output, output), PollFd::new(changes, PollFlags::PRI)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: POLL.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) | Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        // At the end of the pipe poll(2) returns at once.
        if fds[0].revents().contains(PollFlags::HUP) {
            std::thread::sleep(POLL);
        }
        Ok(fds[1].revents().intersects(PollFlags::PRI | PollFlags::ERR))
    }

    /// Passes on what the pipe holds, in parts, so that a program that never stops to print cannot hold the
    /// supervisor up. Says whether there may be more. A program that prints what nobody reads waits.
    fn forward(&mut self) -> bool {
        let mut buffer = [0; 64 << 10];
        for _ in 0..BUFFERS_AT_ONCE {
            if !say::has_room() {
                return false;
            }
            match self.output.read(&mut buffer) {
                Ok(0) => return false,
                Ok(length) => say::bytes(&buffer[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if error.kind() != std::io::ErrorKind::WouldBlock {
                        say!("cannot read the program's output: {error}");
                    }
                    return false;
                }
            }
        }
        true
    }

    /// Takes the status of all children that have ended.
    fn reap(&self) -> Result<Reaped> {
        let mut program = None;
        loop {
            let ended = match rustix::process::wait(WaitOptions::NOHANG) {
                Err(rustix::io::Errno::CHILD) => return Ok(Reaped { program, all: true }),
                Ok(None) => return Ok(Reaped { program, all: false }),
                Err(rustix::io::Errno::INTR) => continue,
                ended => ended?,
            };
            if let Some((pid, status)) = ended
                && pid == self.pid
            {
                program = Some(exit_status(status));
            }
        }
    }

    /// Ends what is left, names it, and says whether there was something. After a failure, processes
    /// are no fault of their own.
    fn clean_up(&mut self, outcome: &Outcome) -> bool {
        let grace = if matches!(outcome, Outcome::Ended(_)) { GRACE } else { Duration::ZERO };
        let mut left = !self.await_end(grace);
        if left {
            for process in descendants() {
                self.named.insert(process.pid);
                say!("left behind: process {process}");
            }
            self.end_processes();
        }
        left |= self.resources.take_down_new();
        // What a process printed that could not be ended is not waited for.
        let started = Instant::now();
        while self.forward() && started.elapsed() < KILLED {}
        left
    }

    /// Waits until no process is left, up to `patience`; says whether none is. Every process whose parent
    /// has ended is a child of this one, so that without a child there is no process. To look for them in
    /// /proc would not tell: a chain, in which each starts the next and ends, need not be seen.
    fn await_end(&mut self, patience: Duration) -> bool {
        let started = Instant::now();
        loop {
            self.forward();
            // An error of the wait shows as processes that are left.
            if self.reap().is_ok_and(|reaped| reaped.all) {
                return true;
            }
            if started.elapsed() >= patience {
                return false;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Kills all, and frees those that do not end even so: a process in umount(2) of a mount that it serves
    /// waits for itself.
    fn end_processes(&mut self) {
        self.resources.seen.note();
        let started = Instant::now();
        let (mut freed, mut before) = (false, HashSet::new());
        while !self.reap().is_ok_and(|reaped| reaped.all) {
            let children = processes::children();
            for child in &children {
                // It may have ended meanwhile, but nobody else can have its number before it is waited for.
                let _ = kill_process(*child, Signal::KILL);
                self.name(*child);
            }
            if started.elapsed() >= KILLED && !freed {
                say!("killed and still there:");
                print_stacks(&descendants());
                self.resources.free_processes();
                freed = true;
            }
            if started.elapsed() >= KILLED + ABORTED {
                for process in descendants() {
                    say!("cannot be ended: process {process}");
                }
                return;
            }
            // Of a chain there is another child each time, to be killed before it starts the next.
            if children == before {
                for process in descendants() {
                    let _ = kill_process(process.pid, Signal::KILL);
                }
                let _ = self.await_end(POLL);
            }
            before = children;
        }
        if self.named.is_empty() {
            say!("left behind: processes that could not be looked at");
        }
    }

    /// Names a child that was not there before.
    fn name(&mut self, child: Pid) {
        if self.named.len() < NAMED_MAX && self.named.insert(child) {
            say!("left behind: process {}", processes::describe(child));
        }
    }
}

/// What a wait for children came to.
struct Reaped {
    /// The end of the program.
    program: Option<ExitStatus>,
    /// There is no child any more.
    all: bool,
}

fn exit_status(status: WaitStatus) -> ExitStatus {
    ExitStatus::from_raw(status.as_raw())
}

/// A supervisor's command line; the program and its arguments follow.
pub(crate) fn command(
    limit: Duration,
    scratch: &std::path::Path,
    is_careless: bool,
) -> Result<Command> {
    ensure!(limit >= Duration::from_secs(1), "a limit below one second");
    // Its name does not lead there any more once a build has replaced the file.
    let mut command = Command::new("/proc/self/exe");
    command.arg("supervise").arg("--limit").arg(limit.as_secs().to_string());
    command.arg("--scratch").arg(scratch).args(is_careless.then_some("--careless")).arg("--");
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loaded_machine_gives_a_program_more_time() {
        let limit = Duration::from_secs(300);
        assert_eq!(stretched(limit, 0.0), limit);
        assert_eq!(stretched(limit, 2.0), limit);
        assert_eq!(stretched(limit, 4.0), 2 * limit);
        assert_eq!(stretched(limit, 40.0), 3 * limit);
        assert!(load_per_processor() >= 0.0);
    }
}
