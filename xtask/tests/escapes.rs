//! Programs that would escape their supervisor: by chains of processes, by mounts that it does not see, by what
//! stays in the kernel without a mount, by output that nobody reads. Each is ended and named, and nothing of
//! somebody else's is touched. Needs root, /dev/fuse and loop devices.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

mod supervised;

use supervised::{LONG, ends, first_ready, supervise, supervise_to_the_limit, xtask};

/// Processes that each start the next, in a session of its own, and end. After a minute they end by themselves.
const CHAIN: &str = r#"
import os, time
end = time.monotonic() + 60
if os.fork(): os._exit(0)
while time.monotonic() < end:
    os.setsid()
    if os.fork(): os._exit(0)
"#;

/// Mounts of FUSE: `serve(directory)` returns the descriptor.
const FUSE: &str = r#"
import ctypes, os, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def serve(directory):
    os.mkdir(directory)
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"none", directory.encode(), b"fuse", 0, options.encode()) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    request = os.read(fuse, 1 << 17)
    unique = struct.unpack_from("<Q", request, 8)[0]
    init = struct.pack("<IIIIHHIIHHI28x", 7, 31, 4096, 0, 1, 1, 4096, 1, 1, 0, 0)
    os.write(fuse, struct.pack("<IiQ", 16 + len(init), 0, unique) + init)
    return fuse
"#;

/// One of its threads waits for an answer of its own: no signal ends it.
const WAITS_FOR_ITSELF: &str = r#"
fuse = serve(sys.argv[1])
threading.Thread(target=os.stat, args=(sys.argv[1] + "/name",)).start()
os.read(fuse, 1 << 17)
print("waits for itself", flush=True)
threading.Event().wait()
"#;

/// Serves a mount that knows no name, and runs a command meanwhile.
const CALLER: &str = r#"
libc.unshare(0x20000)
libc.mount(b"none", b"/", None, 0x44000, None)
directory = sys.argv[1]
fuse = serve(directory)
def answer():
    while True:
        request = os.read(fuse, 1 << 17)
        os.write(fuse, struct.pack("<IiQ", 16, -2, struct.unpack_from("<Q", request, 8)[0]))
threading.Thread(target=answer, daemon=True).start()
code = subprocess.run(sys.argv[2:]).returncode
try: os.stat(directory + "/name")
except OSError as error: print("caller:", code, error.strerror)
os._exit(0)
"#;

/// A script that has `text` as `$TMPDIR/NAME.py`, and then runs `command`.
fn with_python(name: &str, text: &str, command: &str) -> String {
    format!("cat >\"$TMPDIR/{name}.py\" <<'END'\n{text}\nEND\n{command}")
}

/// Waits for the end of a process whose output nobody reads.
fn ends_unread(mut child: Child) -> ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() >= LONG {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The images of all loop devices.
fn images() -> String {
    let devices = Command::new("losetup").args(["--all", "--output", "BACK-FILE"]).output();
    String::from_utf8(devices.unwrap().stdout).unwrap()
}

#[test]
fn a_chain_of_processes_is_ended_and_named() {
    let chain = with_python("chain", CHAIN, "python3 \"$TMPDIR/chain.py\"; echo passed");
    let (code, text) = supervise(&chain);
    assert_eq!(code, Some(125), "{text}");
    assert!(text.starts_with("passed\n"), "{text}");
    assert!(text.contains("left behind: process "), "{text}");
    assert!(!text.contains("cannot be ended"), "{text}");
}

#[test]
fn loop_devices_of_images_in_memory_are_the_programs_own() {
    let (code, text) = supervise(
        "truncate -s 1M /dev/shm/escapes-memory && losetup -f /dev/shm/escapes-memory && \
         mkdir \"$TMPDIR/dir\" && mount -t tmpfs none \"$TMPDIR/dir\" && \
         truncate -s 1M \"$TMPDIR/dir/escapes-tmpfs\" && losetup -f \"$TMPDIR/dir/escapes-tmpfs\" && \
         rm /dev/shm/escapes-memory",
    );
    assert_eq!(code, Some(125), "{text}");
    assert!(text.contains(" of /dev/shm/escapes-memory\n"), "{text}");
    assert!(text.contains("/escapes-tmpfs\n"), "{text}");
    assert!(!images().contains("escapes-memory") && !images().contains("escapes-tmpfs"));
    assert!(!Path::new("/dev/shm/escapes-memory").exists());
}

#[test]
fn a_mounted_loop_device_is_the_programs_own_wherever_its_image_is() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("outside");
    let (code, text) = supervise(&format!(
        "truncate -s 4M '{0}' && mkfs.ext4 -q '{0}' && mkdir \"$TMPDIR/dir\" && \
         mount $(losetup --find --show '{0}') \"$TMPDIR/dir\" && sleep 1.5 && umount \"$TMPDIR/dir\"",
        image.display()
    ));
    assert_eq!(code, Some(125), "{text}");
    assert!(text.contains(&format!(" of {}\n", image.display())), "{text}");
    assert!(!images().contains(&*image.to_string_lossy()));
}

#[test]
fn a_loop_device_of_a_run_beside_it_stays() {
    let dir = tempfile::tempdir().unwrap();
    let start = |name: &str, script: &str| {
        let mut command = xtask();
        command.args(["supervise", "--limit", "100", "--scratch"]).arg(dir.path().join(name));
        command.args(["--", "sh", "-c", script]).current_dir(&dir);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let wait = "until test -e \"$OLDPWD/$1\"; do sleep 0.02; done";
    let wait = |file: &str| format!("OLDPWD=$PWD; set -- {file}; {wait}\n");
    // It starts first, so that the device of the other is one that has come since; and it has mounted one of
    // that name before.
    let mounts = "
        image=\"$TMPDIR/image\"; dir=\"$TMPDIR/dir\"
        truncate -s 4M \"$image\" && mkfs.ext4 -q \"$image\" && mkdir \"$dir\" || exit 1
        device=$(losetup --find --show \"$image\") && mount $device \"$dir\" && sleep 1.5 || exit 1
        umount \"$dir\" && losetup -d $device && echo $device >name && mv name started || exit 1\n";
    let ends_first = start("first", &format!("{mounts}{}", wait("attached")));
    let attaches = start(
        "second",
        &format!(
            "{} truncate -s 1M /dev/shm/escapes-beside; \
             device=$(cat started); losetup $device /dev/shm/escapes-beside || \
             device=$(losetup --find --show /dev/shm/escapes-beside) || exit 1; touch attached\n{}\
             losetup $device && losetup -d $device",
            wait("started"),
            wait("over")
        ),
    );
    let output = ends_first.wait_with_output().unwrap();
    fs::write(dir.path().join("over"), "").unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), &*text), (Some(0), ""));
    let output = attaches.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
}

/// A file system has a number while it is mounted; then that is another's.
#[test]
fn a_file_system_of_another_with_a_number_that_the_program_had_stays() {
    let [dir, others] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let script = "for n in 1 2 3 4 5 6 7 8 9; do
                      mkdir \"$TMPDIR/$n\" && mount -t tmpfs none \"$TMPDIR/$n\" || exit 1
                  done
                  sleep 1.5 && stat -c %d \"$TMPDIR\"/[1-9] >numbers && umount \"$TMPDIR\"/[1-9] && \
                  mv numbers free && until test -e over; do sleep 0.02; done";
    let mut command = xtask();
    command.args(["supervise", "--limit", "100", "--scratch"]).arg(dir.path().join("scratch"));
    command.args(["--", "sh", "-c", script]).current_dir(&dir);
    let supervised = command.stdout(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !dir.path().join("free").exists() && started.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(20));
    }
    let numbers = fs::read_to_string(dir.path().join("free")).unwrap();
    let numbers: Vec<u64> = numbers.lines().map(|line| line.parse().unwrap()).collect();
    // The kernel gives the lowest that is free; what runs beside this test may have taken one.
    let mut mounts = Vec::new();
    let has_number = loop {
        let mountpoint = others.path().join(mounts.len().to_string());
        fs::create_dir(&mountpoint).unwrap();
        run("mount", &["-t", "tmpfs", "none", mountpoint.to_str().unwrap()]);
        let is_it = numbers.contains(&fs::metadata(&mountpoint).unwrap().dev());
        mounts.push(mountpoint);
        if is_it || mounts.len() == 200 {
            break is_it;
        }
    };
    let image = mounts[mounts.len() - 1].join("image");
    fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    let device = run("losetup", &["--find", "--show", image.to_str().unwrap()]);
    fs::write(dir.path().join("over"), "").unwrap();
    let output = supervised.wait_with_output().unwrap();
    let detached = Command::new("losetup").args(["--detach", &device]).status().unwrap();
    mounts.iter().for_each(|dir| drop(run("umount", &["-l", dir.to_str().unwrap()])));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), &*text), (Some(0), ""));
    assert!(detached.success(), "the device of another was detached");
    assert!(has_number, "none of 200 file systems had one of {numbers:?}");
}

/// Runs a command that must succeed; what it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn what_others_mount_in_a_namespace_that_the_program_has_entered_stays() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (image, mountpoint) = (place("image"), place("mnt"));
    fs::create_dir(&mountpoint).unwrap();
    fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    run("mkfs.ext4", &["-q", &image]);
    let script = format!(
        "nsenter --mount=/proc/{}/ns/mnt sleep 100 & touch inside
         until test -e over; do sleep 0.02; done; kill $!; wait",
        std::process::id()
    );
    let mut command = xtask();
    command.args(["supervise", "--limit", "100", "--scratch"]).arg(dir.path().join("scratch"));
    command.args(["--", "sh", "-c", &script]).current_dir(&dir);
    let supervised = command.stdout(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !dir.path().join("inside").exists() && started.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(20));
    }
    let device = run("losetup", &["--find", "--show", &image]);
    run("mount", &[&device, &mountpoint]);
    // The supervisor has the time to look.
    std::thread::sleep(Duration::from_millis(2500));
    run("umount", &[&mountpoint]);
    fs::write(dir.path().join("over"), "").unwrap();
    let output = supervised.wait_with_output().unwrap();
    let stays = images().contains(&image);
    run("losetup", &["--detach", &device]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), &*text), (Some(0), ""));
    assert!(stays, "the device of another was detached");
}

#[test]
fn connections_of_mounts_in_namespaces_of_the_program_are_aborted() {
    let serve = format!("{FUSE}{WAITS_FOR_ITSELF}");
    // The second hides from the supervisor where the kernel lists connections.
    for hide in ["", "mount -t tmpfs none /sys; "] {
        let run = format!("{hide}unshare --mount python3 \"$TMPDIR/serve.py\" \"$TMPDIR/dir\"");
        let script = with_python("serve", &serve, &run);
        let (code, text) = supervise_to_the_limit(&script, "waits for itself\n");
        assert_eq!(code, Some(124), "{text}");
        assert!(text.contains("waits for itself\n"), "{text}");
        assert!(text.contains("aborted FUSE connection"), "{text}");
        assert!(!text.contains("cannot be ended"), "{text}");
    }
}

#[test]
fn mounts_of_the_caller_stay() {
    let run = |limit: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("caller.py"), format!("{FUSE}{CALLER}")).unwrap();
        fs::write(path("serve.py"), format!("{FUSE}{WAITS_FOR_ITSELF}")).unwrap();
        let mut caller = Command::new("python3");
        caller.arg(path("caller.py")).arg(path("mounted")).arg(env!("CARGO_BIN_EXE_xtask"));
        caller.args(["supervise", "--limit", limit, "--scratch"]).arg(path("scratch"));
        // It copies the caller's mount, and waits for one of its own until that is aborted.
        caller.args(["--", "unshare", "--mount", "python3"]).arg(path("serve.py")).arg(path("own"));
        // As in a run: only the first process drops such mounts.
        let output = ends(caller.env("FJORD_XTASK_NAMESPACE", "0"));
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (_, text) = first_ready(["2", "15", "150"].into_iter().map(run), "waits for itself\n");
    assert_eq!(text.matches("aborted FUSE connection").count(), 1, "{text}");
    assert!(text.ends_with("caller: 124 No such file or directory\n"), "{text}");
}

/// Makes an image and mounts it on `$TMPDIR/dir`.
const MOUNT: &str = "mkdir \"$TMPDIR/dir\" && truncate -s 8M \"$TMPDIR/escapes-frozen\" && \
    mkfs.ext4 -q \"$TMPDIR/escapes-frozen\" && mount -o loop \"$TMPDIR/escapes-frozen\" \"$TMPDIR/dir\"";

#[test]
fn frozen_file_systems_are_thawed() {
    let freeze = format!("{MOUNT} && fsfreeze -f \"$TMPDIR/dir\"");
    let scripts = [
        freeze.clone(),
        // A mount that is gone, and the file system stays.
        format!("{freeze} && umount -l \"$TMPDIR/dir\""),
        format!("unshare --mount sh -c '{freeze}'"),
        // A process that no signal ends.
        format!("{freeze}; touch \"$TMPDIR/dir/file\" & sleep 0.5"),
        format!("unshare --mount sh -c '{freeze}; touch \"$TMPDIR/dir/file\"' & sleep 0.5"),
    ];
    let thaws = |script: &str| {
        let (code, text) = supervise(script);
        assert_eq!(code, Some(125), "{script}: {text}");
        assert!(text.contains("left behind: frozen file system on "), "{script}: {text}");
        assert!(!text.contains("cannot"), "{script}: {text}");
    };
    // Each waits for most of its time.
    std::thread::scope(|scope| {
        for script in &scripts {
            scope.spawn(|| thaws(script));
        }
    });
    assert!(!images().contains("/scratch/escapes-frozen"), "{}", images());
}

#[test]
fn what_is_in_the_way_of_the_scratch_folders_end_is_named() {
    let (code, text) =
        supervise("mkdir \"$TMPDIR/a\" && echo >\"$TMPDIR/a/b\" && chattr +i \"$TMPDIR/a/b\"");
    assert_eq!(code, Some(125), "{text}");
    assert!(text.contains("left behind: ") && text.contains("/scratch/a/b: "), "{text}");
}

#[test]
fn a_mount_over_proc_hides_nothing() {
    let (code, text) = supervise("mount -t tmpfs none /proc; setsid sleep 1061 & echo passed");
    assert_eq!(code, Some(125), "{text}");
    assert!(text.contains("left behind: process ") && text.contains(": sleep 1061\n"), "{text}");
    assert!(text.contains("left behind: mount of tmpfs on /proc\n"), "{text}");
}

#[test]
fn a_limit_holds_for_a_program_that_prints_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let supervised = |output: Stdio| {
        let mut command = xtask();
        command.args(["supervise", "--limit", "2", "--scratch"]).arg(dir.path().join("scratch"));
        command.args(["--", "sh", "-c", "yes & yes & yes & yes"]);
        command.stdout(output).spawn().unwrap()
    };
    assert_eq!(ends_unread(supervised(Stdio::null())).code(), Some(124));
    // A pipe that nobody reads.
    let mut child = supervised(Stdio::piped());
    let _unread = child.stdout.take();
    assert_eq!(ends_unread(child).code(), Some(124));
}

/// A program that prints so many bytes.
fn prints(dir: &Path, bytes: u64) -> PathBuf {
    let program = dir.join("prints");
    let text = format!("#!/bin/sh\nhead -c {bytes} /dev/zero | tr '\\0' 'x'\n");
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program
}

#[test]
fn of_long_output_a_part_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = xtask();
    let output = ends(command.args(["test", "--program"]).arg(prints(dir.path(), 32 << 20)));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text.len() < 10 << 20, "{}", text.len());
    assert!(text.contains("x\n[25165824 bytes of output are left out here]\nx"));
    assert!(text.ends_with("x\n1 passed, 0 failed, 0 skipped\n"));
}

#[test]
fn a_run_whose_output_nobody_reads_ends() {
    let dir = tempfile::tempdir().unwrap();
    let program = prints(dir.path(), 1_000_000);
    let mut command = xtask();
    command.args(["test", "--run-limit", "2", "--program"]).arg(&program);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let _unread = child.stdout.take();
    assert_eq!(ends_unread(child).code(), Some(1));
}

#[test]
fn a_name_that_matches_no_program_is_an_error() {
    let mut command = xtask();
    command.args(["test", "--only", "xtask: unit", "--only", "nosuchname"]);
    let output = command.stderr(Stdio::piped()).stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("nosuchname") && !error.contains("xtask: unit"), "{error}");
}
