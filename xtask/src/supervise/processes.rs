//! Processes below this one, as proc(5) shows them.
//!
//! Owns no state. Everything read here may have ended before it is read: what cannot be read is left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
};

use rustix::process::Pid;

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
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (state, parent) = state_and_parent(&stat)?;
        // A process whose first thread has ended is a zombie with threads.
        let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        if matches!(state, 'Z' | 'X') && threads <= 1 {
            return None;
        }
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut command = String::from_utf8_lossy(&line).into_owned();
        if command.is_empty() {
            // Without memory of its own any more.
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            command = format!("[{}]", name.trim_end());
        }
        Some(Process { pid: Pid::from_raw(pid)?, parent, state, command })
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

/// All processes that run.
fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(Process::read).collect()
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
        let mut children = by_parent.remove(&parent).unwrap_or_default();
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
        for thread in threads(process) {
            print_thread(&thread);
        }
    }
}

fn threads(process: &Process) -> BTreeSet<PathBuf> {
    let dir = format!("/proc/{}/task", process.pid.as_raw_nonzero());
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn print_thread(dir: &Path) {
    let text = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
    let state = state_and_parent(&text("stat")).map_or('?', |(state, _)| state);
    let number = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    say!("    thread {number} {} {state} {}", text("comm").trim_end(), text("wchan"));
    for line in text("stack").lines() {
        say!("        {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

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
