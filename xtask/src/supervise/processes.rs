//! Processes below this one, as proc(5) shows them.
//!
//! Owns no state. Everything read here may have ended before it is read: what cannot be read is left out.
//! Of the processes of others only `stat` is read here: the arguments of a process are in its memory, which is locked
//! while one of its threads waits for a FUSE server in mprotect(2) or the like.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process};

use super::{bounded, look::PROC};

/// Processes that are named while they are killed: a chain, in which each starts the next, has any number.
pub(super) const NAMED_MAX: usize = 10;

/// A process that runs.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    parent: i32,
    state: char,
    /// Each argument ends with a zero byte, as in proc(5).
    command: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Process { pid, state, command, .. } = self;
        let command = command.trim_end_matches('\0').replace('\0', " ");
        write!(f, "{} (state {state}): {command}", pid.as_raw_nonzero())
    }
}

impl Process {
    /// None if there is no such process any more, or only its exit status.
    fn read(pid: i32) -> Option<Process> {
        Process::read_without_command(pid).map(Process::with_command)
    }

    fn read_without_command(pid: i32) -> Option<Process> {
        let (state, parent) = state_and_parent(&PROC.text(format!("{pid}/stat")).ok()?)?;
        // A process whose first thread has ended is a zombie with threads.
        if matches!(state, 'Z' | 'X') && PROC.names(format!("{pid}/task")).len() <= 1 {
            return None;
        }
        Some(Process { pid: Pid::from_raw(pid)?, parent, state, command: String::new() })
    }

    fn with_command(self) -> Process {
        let pid = self.pid.as_raw_nonzero().get();
        let file = format!("{pid}/cmdline");
        let read = bounded::ask(&file.clone(), move || PROC.text(file).unwrap_or_default());
        // Without an answer, or without memory of its own any more.
        let command = read.filter(|command| !command.is_empty()).unwrap_or_else(|| name(pid));
        Process { command, ..self }
    }

    /// Its folder in /proc.
    pub(super) fn folder(&self) -> String {
        self.pid.as_raw_nonzero().to_string()
    }

    /// The folders of its threads in /proc. They tell of files and mounts also when the first thread has
    /// ended.
    pub(super) fn threads(&self) -> BTreeSet<String> {
        let dir = format!("{}/task", self.folder());
        PROC.names(&dir).into_iter().map(|thread| format!("{dir}/{thread}")).collect()
    }

    /// The program as it was called, and its arguments.
    pub(crate) fn arguments(&self) -> impl Iterator<Item = &str> {
        self.command.trim_end_matches('\0').split('\0')
    }
}

/// State and parent in the text of `/proc/PID/stat`. The name, in parentheses, may hold anything.
fn state_and_parent(stat: &str) -> Option<(char, i32)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

/// Name of a process, also of one that has ended and was not waited for.
fn name(pid: i32) -> String {
    format!("[{}]", PROC.text(format!("{pid}/comm")).unwrap_or_default().trim_end())
}

fn numbers() -> impl Iterator<Item = i32> {
    PROC.names(".").into_iter().filter_map(|name| name.parse().ok())
}

/// All processes that run, without their commands.
pub(super) fn all() -> Vec<Process> {
    numbers().filter_map(Process::read_without_command).collect()
}

/// The children of this process, those that have ended included: quick to tell, and so soon enough for a
/// process that lives no longer than it takes to look at all.
pub(super) fn children() -> HashSet<Pid> {
    let threads = PROC.names("self/task").into_iter();
    let lists = threads.map(|thread| PROC.text(format!("self/task/{thread}/children")));
    if let Ok(lists) = lists.collect::<Result<Vec<_>, _>>() {
        let numbers = lists.iter().flat_map(|list| list.split_whitespace());
        return numbers.filter_map(|number| Pid::from_raw(number.parse().ok()?)).collect();
    }
    // A kernel without such lists.
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let is_child = |pid: &i32| {
        let stat = PROC.text(format!("{pid}/stat")).unwrap_or_default();
        state_and_parent(&stat).is_some_and(|(_, parent)| parent == own)
    };
    numbers().filter(is_child).filter_map(Pid::from_raw).collect()
}

/// Kills all children, and what falls to this subreaper from them, until there is none or `patience` is over;
/// returns some of them, described. Nothing else may wait for children any more.
pub(crate) fn end_children(patience: Duration) -> Vec<String> {
    let started = Instant::now();
    let mut found = BTreeMap::new();
    loop {
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        let children = children();
        if children.is_empty() || started.elapsed() >= patience {
            return found.into_values().collect();
        }
        for child in children {
            // It may have ended meanwhile, but keeps its number until it is waited for.
            let _ = kill_process(child, Signal::KILL);
            // One that has ended by itself is only waited for.
            let has_ended =
                Process::read(child.as_raw_nonzero().get()).is_none_or(|it| it.state == 'Z');
            if found.len() < NAMED_MAX && !has_ended {
                found.entry(child.as_raw_nonzero()).or_insert_with(|| describe(child));
            }
        }
    }
}

/// Number and name of a child, which may have ended.
pub(super) fn describe(child: Pid) -> String {
    let pid = child.as_raw_nonzero().get();
    Process::read(pid)
        .map_or_else(|| format!("{pid}: {}", name(pid)), |process| process.to_string())
}

/// The processes that this one has started, and those that they have started.
pub(crate) fn descendants() -> Vec<Process> {
    descendants_outside(|_| false)
}

/// The same without those for which `leave_out` holds, and what they have started.
pub(crate) fn descendants_outside(leave_out: impl Fn(&Process) -> bool) -> Vec<Process> {
    let mut by_parent: BTreeMap<i32, Vec<Process>> = BTreeMap::new();
    for process in all() {
        by_parent.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut parents = vec![rustix::process::getpid().as_raw_nonzero().get()];
    while let Some(parent) = parents.pop() {
        let children = by_parent.remove(&parent).unwrap_or_default().into_iter();
        let mut children: Vec<Process> = children.map(Process::with_command).collect();
        children.retain(|child| !leave_out(child));
        parents.extend(children.iter().map(|child| child.pid.as_raw_nonzero().get()));
        found.extend(children);
    }
    found
}

/// Prints what each thread waits for.
pub(crate) fn print_stacks(processes: &[Process]) {
    for process in processes {
        say!("  process {process}");
        for thread in process.threads() {
            print_thread(&thread);
        }
    }
}

fn print_thread(folder: &str) {
    let text = |name: &str| PROC.text(format!("{folder}/{name}")).unwrap_or_default();
    let state = state_and_parent(&text("stat")).map_or('?', |(state, _)| state);
    let number = folder.rsplit('/').next().unwrap_or_default();
    say!("    thread {number} {} {state} {}", text("comm").trim_end(), text("wchan"));
    for line in text("stack").lines() {
        say!("        {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        path::Path,
        process::{Command, Stdio},
    };

    #[test]
    fn a_name_may_hold_parentheses() {
        assert_eq!(state_and_parent("7 (a) S 1 (b)) D 42 7 7 0"), Some(('D', 42)));
        assert_eq!(state_and_parent("7 (a"), None);
    }

    #[test]
    fn children_of_children_are_found_and_zombies_are_not() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 97 & echo; read line; kill -KILL $!"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0];
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut line).unwrap();
        let named = |word| descendants().iter().any(|process| process.to_string().ends_with(word));
        // Between fork(2) and execve(2) the child has its parent's name.
        while !named("sleep 97") {
            std::thread::yield_now();
        }
        drop(shell.stdin.take());
        let pid = i32::try_from(shell.id()).unwrap();
        while Process::read(pid).is_some() {
            std::thread::yield_now();
        }
        assert!(Path::new(&format!("/proc/{pid}/stat")).exists(), "it is a zombie");
        shell.wait().unwrap();
    }
}
