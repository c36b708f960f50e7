//! Programs that never end, and programs that leave something behind: the runner ends them, names what
//! they left, and goes on. Needs root, /dev/fuse and a loop device.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

mod supervised;

use supervised::{LIMITS, ends, first_ready, supervise, supervise_to_the_limit, xtask};

/// A server of a `fuseblk` mount that unmounts it by itself: umount(2) sends DESTROY and waits for the
/// answer, which nobody gives. The state that no signal ends.
const SELF_UNMOUNT: &str = r#"
import ctypes, os, struct, subprocess, sys
image, directory = sys.argv[1:]
with open(image, "wb") as file: file.truncate(1 << 20)
os.mkdir(directory)
loop = subprocess.check_output(["losetup", "--find", "--show", image], text=True).strip()
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,blksize=512"
if libc.mount(loop.encode(), directory.encode(), b"fuseblk", 0, options.encode()) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
request = os.read(fuse, 1 << 17)
unique = struct.unpack_from("<Q", request, 8)[0]
init = struct.pack("<IIIIHHIIHHI28x", 7, 31, 4096, 0, 1, 1, 4096, 1, 1, 0, 0)
os.write(fuse, struct.pack("<IiQ", 16 + len(init), 0, unique) + init)
print("unmounts itself", flush=True)
libc.umount2(directory.encode(), 0)
"#;

#[test]
fn the_status_and_the_output_are_those_of_the_program() {
    assert_eq!(supervise("echo out; echo err >&2"), (Some(0), "out\nerr\n".to_owned()));
    assert_eq!(supervise("exit 7").0, Some(1));
    let (code, text) = supervise("kill -KILL $$");
    assert_eq!((code, &*text), (Some(1), "ended by signal 9\n"));
}

#[test]
fn a_program_that_never_ends_is_ended_and_its_stacks_are_shown() {
    let (code, text) = supervise_to_the_limit("sleep 1009 & sleep 1013", "nanosleep");
    assert_eq!(code, Some(124), "{text}");
    assert!(text.contains("hung: it did not end within "), "{text}");
    assert!(text.contains(": sleep 1009\n") && text.contains(": sleep 1013\n"), "{text}");
    assert!(text.contains("nanosleep"), "no stacks: {text}");
}

#[test]
fn a_daemon_that_holds_the_pipe_is_ended_and_named() {
    let (code, text) = supervise("setsid sleep 1019 & echo passed");
    assert_eq!(code, Some(125), "{text}");
    assert!(text.starts_with("passed\n"), "{text}");
    assert!(text.contains("left behind: process ") && text.contains("sleep 1019"), "{text}");
}

#[test]
fn a_process_that_ends_soon_after_its_program_is_not_left_behind() {
    let (code, text) = supervise("sleep 0.2 & echo passed");
    assert_eq!((code, &*text), (Some(0), "passed\n"));
}

#[test]
fn mounts_and_loop_devices_are_taken_down_and_named() {
    let (code, text) = supervise(
        "mkdir \"$TMPDIR/a b\" && mount -t tmpfs none \"$TMPDIR/a b\" && \
         truncate -s 1M \"$TMPDIR/left\" && losetup -f \"$TMPDIR/left\"",
    );
    assert_eq!(code, Some(125), "{text}");
    assert!(text.contains("left behind: mount of tmpfs on ") && text.contains("/a b\n"), "{text}");
    assert!(text.contains("left behind: loop device loop"), "{text}");
    let devices = Command::new("losetup").arg("--all").output().unwrap();
    let devices = String::from_utf8(devices.stdout).unwrap();
    assert!(!devices.contains("/scratch/left"), "{devices}");
}

#[test]
fn a_server_that_waits_for_its_own_answer_is_ended() {
    let script = format!(
        "cat >\"$TMPDIR/serve.py\" <<'END'\n{SELF_UNMOUNT}\nEND\n\
        python3 \"$TMPDIR/serve.py\" \"$TMPDIR/image\" \"$TMPDIR/dir\""
    );
    let (code, text) = supervise_to_the_limit(&script, "unmounts itself\n");
    assert_eq!(code, Some(124), "{text}");
    assert!(text.contains("unmounts itself\n"), "{text}");
    assert!(text.contains("fuse_send_destroy") || text.contains("request_wait_answer"), "{text}");
    assert!(text.contains("aborted FUSE connection"), "{text}");
    assert!(!text.contains("cannot be ended"), "{text}");
}

/// An executable shell script.
fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Status and output of a whole run.
fn run_of(command: &mut Command) -> (Option<i32>, String) {
    let output = ends(command);
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_run_goes_on_after_a_hang() {
    let dir = tempfile::tempdir().unwrap();
    let scripts = [
        script(dir.path(), "hangs", "exec sleep 1021"),
        script(dir.path(), "leaves", "setsid sleep 1031 &"),
        script(
            dir.path(),
            "fails",
            "echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored'; exit 101",
        ),
        script(dir.path(), "passes", "echo 'test result: ok. 5 passed; 0 failed; 1 ignored'"),
    ];
    let within = |limit: Duration| {
        let mut command = xtask();
        command.args(["test", "--limit", &limit.as_secs().to_string()]);
        for script in &scripts {
            command.arg("--program").arg(script);
        }
        run_of(&mut command)
    };
    // A loaded machine takes long for the others, too.
    let all = "8 passed, 4 failed, 1 skipped\n";
    let (code, text) = first_ready(LIMITS.into_iter().map(within), all);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("/hangs: it hung, and was ended (limit "), "{text}");
    assert!(text.contains("/leaves: it left something behind\n"), "{text}");
    assert!(text.contains("/fails: it failed\n"), "{text}");
    assert!(text.ends_with(all), "{text}");
}

#[test]
fn a_run_that_reaches_its_limit_ends_and_shows_what_hung() {
    let dir = tempfile::tempdir().unwrap();
    let hangs = script(dir.path(), "hangs", "sleep 1039 & exec sleep 1049");
    let within = |limit: Duration| {
        let mut command = xtask();
        command.args(["test", "--run-limit", &limit.as_secs().to_string(), "--program"]);
        run_of(command.arg(&hangs))
    };
    // A loaded machine takes long to start the program.
    let (code, text) = first_ready(LIMITS.into_iter().map(within), "nanosleep");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("the run ends: it reached its limit of "), "{text}");
    assert!(text.contains("sleep 1039") && text.contains("sleep 1049"), "{text}");
    assert!(text.contains("nanosleep"), "no stacks: {text}");
}

#[test]
fn a_run_that_is_told_to_end_ends_what_it_has_started() {
    let dir = tempfile::tempdir().unwrap();
    let pid_file = dir.path().join("pid");
    let waits =
        script(dir.path(), "waits", &format!("echo $$ >'{}'; exec sleep 1033", pid_file.display()));
    let mut command = xtask();
    let mut run =
        command.arg("test").arg("--program").arg(&waits).stdout(Stdio::piped()).spawn().unwrap();
    let pid = loop {
        let text = fs::read_to_string(&pid_file).unwrap_or_default();
        if let Some(pid) = text.strip_suffix('\n') {
            break pid.to_owned();
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(Command::new("kill").arg(run.id().to_string()).status().unwrap().success());
    let mut text = String::new();
    std::io::Read::read_to_string(run.stdout.as_mut().unwrap(), &mut text).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains("the run ends: a signal told it to"), "{text}");
    // A zombie has no arguments.
    let left = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    assert!(left.is_empty(), "{}: {text}", String::from_utf8_lossy(&left));
}
