//! The surroundings that a caller may leave to a program, all at once: nohup(1), a service manager, a shell
//! script in another country.
//!
//! Owns no state.

use std::{io, os::unix::process::CommandExt, process::Command};

/// Signals that are ignored, and those that are blocked.
const IGNORED: [libc::c_int; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGPIPE];
const BLOCKED: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGPIPE, libc::SIGTERM];

/// Has the program start with signals ignored and blocked, standard input closed, the umask 077, no HOME,
/// Turkish letters and the time of Kathmandu.
pub(super) fn careless(command: &mut Command) {
    command.env_remove("HOME").env("LANG", "tr_TR.UTF-8").env("TZ", "Asia/Kathmandu");
    // SAFETY: the closure makes async-signal-safe calls only.
    unsafe { command.pre_exec(in_child) };
}

/// Undoes what such a caller has blocked.
pub(super) fn unblock_signals() {
    // SAFETY: a signal set is plain data, and the pointers are valid.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

fn in_child() -> io::Result<()> {
    // SAFETY: a signal set is plain data, and all pointers are valid; the child uses descriptor 0 no more.
    unsafe {
        let mut blocked = std::mem::zeroed();
        libc::sigemptyset(&raw mut blocked);
        for signal in BLOCKED {
            libc::sigaddset(&raw mut blocked, signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut());
        for signal in IGNORED {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::umask(0o077);
        libc::close(0);
    }
    Ok(())
}
