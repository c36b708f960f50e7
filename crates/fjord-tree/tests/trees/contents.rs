//! Contents from directories and tar streams: e2fsck must find the image clean, and what
//! debugfs or Linux reads back must be what was put in.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use fjord_block::{FileDevice, FileOptions};
use fjord_mkfs::{MkfsOptions, format};
use fjord_testkit::image::{KernelMount, Scratch};
use fjord_testkit::shell::{check, output, run, utf8};
use fjord_tree::{Populated, Rules, Source, TreeError, populate};

/// Makes a new image. It is another file than one that was there: a process that copied the mount
/// namespace meanwhile, such as a test beside this one, keeps the mount of the old image and its loop
/// device, and mount(8) would use that device again for the same file, with what Linux has cached of it.
fn fill(image: &Path, options: &MkfsOptions, source: Source<'_>) -> Result<Populated, TreeError> {
    match fs::remove_file(image) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
        _ => {}
    }
    File::create(image).expect("the image file can be made");
    let device = FileDevice::open(image, &FileOptions::default()).expect("the image opens");
    format(&device, options).expect("formats");
    let mut last = Populated::default();
    let rules = Rules::default();
    let device = Arc::new(device);
    let populated = populate(device, source, &rules, &mut |so_far| last.clone_from(so_far))?;
    assert_eq!((last.entries, last.bytes), (populated.entries, populated.bytes));
    Ok(populated)
}

fn size(mib: u64) -> MkfsOptions {
    MkfsOptions { size_bytes: Some(mib << 20), ..MkfsOptions::default() }
}

/// Files of every kind that needs no privilege.
fn make_tree(tree: &Path) {
    fs::create_dir_all(tree.join("a/b/c/d")).expect("directories");
    fs::create_dir(tree.join("many")).expect("a directory");
    for index in 0..2000 {
        fs::write(tree.join(format!("many/{index:05}")), index.to_string()).expect("a file");
    }
    fs::write(tree.join("empty"), b"").expect("a file");
    fs::write(tree.join("a/large"), (0..5_000_000u32).map(|i| (i >> 8) as u8).collect::<Vec<_>>())
        .expect("a file");
    fs::write(tree.join("a/b/suid"), b"#!/bin/sh\n").expect("a file");
    fs::set_permissions(tree.join("a/b/suid"), fs::Permissions::from_mode(0o6755)).expect("mode");
    fs::set_permissions(tree.join("a/b"), fs::Permissions::from_mode(0o1770)).expect("mode");
    fs::hard_link(tree.join("a/large"), tree.join("a/b/c/same")).expect("a link");
    symlink("../short", tree.join("a/fast")).expect("a link");
    symlink("long/".repeat(100), tree.join("a/slow")).expect("a link");
    fs::write(tree.join("na\u{ef}ve \u{1f40b}\n"), b"odd name").expect("a file");
    fs::write(tree.join("n".repeat(255)), b"long name").expect("a file");
    let sparse = File::create(tree.join("sparse")).expect("a file");
    sparse.write_all_at(b"first", 0).expect("written");
    sparse.write_all_at(&[7; 10_000], 3 << 20).expect("written");
    sparse.set_len(9 << 20).expect("a length");
    let times = ["-d", "1999-12-31 23:59:59.123456789 UTC"];
    for path in ["a/b/c", "a/large", "empty"] {
        run("touch", &["-h", times[0], times[1], utf8(&tree.join(path))]);
    }
}

/// What only root can make: owners, devices, attributes of all kinds.
fn make_privileged(tree: &Path) {
    let at = |name: &str| utf8(&tree.join(name)).to_owned();
    run("mknod", &[&at("null"), "c", "1", "3"]);
    run("mknod", &[&at("disk"), "b", "259", "70000"]);
    run("mkfifo", &[&at("pipe")]);
    run("chown", &["-h", "1000:70000", &at("a/fast")]);
    run("chown", &["4000000:5", &at("a/b/c")]);
    run("python3", &["-c", SET_XATTRS, &at("empty"), &at("a/b/c")]);
}

/// A binary value with line ends, a capability, an access list and a default one.
const SET_XATTRS: &str = r"
import os, sys
file, directory = sys.argv[1:]
os.setxattr(file, 'user.text', b'value')
os.setxattr(file, 'user.binary', bytes(range(256)) * 8 + b'\n5 a=b\n')
os.setxattr(file, 'trusted.mark', b'')
os.setxattr(file, 'security.capability', b'\x01\x00\x00\x02\x00\x0a\x00\x00' + b'\x00' * 12)
acl = bytes.fromhex('0200000001000700ffffffff020006000a00000004000500ffffffff10000700ffffffff20000000ffffffff')
os.setxattr(directory, 'system.posix_acl_access', acl)
os.setxattr(directory, 'system.posix_acl_default', acl)
";

fn tar(dir: &Path, tree: &Path, args: &[&str]) -> PathBuf {
    let path = dir.join("tar");
    let mut all = vec!["-c", "-f", utf8(&path), "-C", utf8(tree)];
    all.extend_from_slice(args);
    all.push(".");
    run("tar", &all);
    path
}

const PAX: &[&str] = &["--format=pax", "--xattrs", "--xattrs-include=*", "-S"];

fn compare_by_debugfs(dir: &Path, image: &Path, tree: &Path) {
    check(image);
    let out = dir.join("out");
    fs::create_dir(&out).expect("a directory");
    run("debugfs", &["-R", &format!("rdump / {}", utf8(&out)), utf8(image)]);
    fs::remove_dir(out.join("lost+found")).expect("it is there and empty");
    run("diff", &["-r", "--no-dereference", utf8(tree), utf8(&out)]);
    fs::remove_dir_all(&out).expect("removed");
}

#[test]
fn a_tree_goes_in_and_comes_out() {
    let dir = Scratch::in_memory("trees").expect("a temporary directory");
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    // Not inline_data: debugfs 1.47 pads what it reads of such files.
    for features in ["", "^extent,^64bit", "^has_journal"] {
        let options = MkfsOptions { features: features.to_owned(), ..size(64) };
        let populated = fill(&image, &options, Source::Directory(&tree)).expect("fits");
        assert!(populated.skipped.is_empty(), "{:?}", populated.skipped);
        assert!(populated.bytes < 6 << 20, "holes were written");
        compare_by_debugfs(dir.path(), &image, &tree);
    }
}

#[test]
fn tar_streams_of_all_formats_go_in_and_come_out() {
    let dir = Scratch::in_memory("trees").expect("a temporary directory");
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    for args in [
        PAX,
        &["--format=gnu"],
        &["--format=gnu", "-S"],
        &["--format=pax", "-S", "--sparse-version=0.0"],
        &["--format=pax", "-S", "--sparse-version=0.1"],
        &["--format=pax", "-S", "--sparse-version=1.0"],
    ] {
        let path = tar(dir.path(), &tree, args);
        let mut stream = File::open(&path).expect("tar made it");
        let populated = fill(&image, &size(64), Source::Tar(&mut stream)).expect("fits");
        assert!(populated.skipped.is_empty(), "{args:?}: {:?}", populated.skipped);
        if args.contains(&"-S") {
            assert!(populated.bytes < 6 << 20, "{args:?}: holes were written");
        }
        compare_by_debugfs(dir.path(), &image, &tree);
    }
}

#[test]
fn what_does_not_fit_leaves_a_clean_image() {
    let dir = Scratch::in_memory("trees").expect("a temporary directory");
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    let error = fill(&image, &size(4), Source::Directory(&tree)).expect_err("cannot fit");
    assert!(error.to_string().contains("larger"), "{error}");
    check(&image);
    let error = fill(&image, &size(8), Source::Directory(Path::new("/no/such"))).expect_err("none");
    assert!(matches!(error, TreeError::Source { .. }), "{error}");
    check(&image);
}

#[test]
fn streams_that_are_cut_or_hostile_are_refused() {
    let dir = Scratch::in_memory("trees").expect("a temporary directory");
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    let whole = fs::read(tar(dir.path(), &tree, PAX)).expect("tar made it");
    for (len, told) in [
        (0, "empty"),
        (100, "not a tar stream"),
        (512, "ends early"),
        (10_000, "ends early"),
        (whole.len() / 2, "ends early"),
    ] {
        let mut stream = &whole[..len];
        let error = fill(&image, &size(64), Source::Tar(&mut stream)).expect_err("cut off");
        assert!(error.to_string().contains(told), "{error}");
        check(&image);
    }
    let path = dir.path().join("outside");
    fs::write(dir.path().join("secret"), b"x").expect("a file");
    run("tar", &["-P", "-c", "-f", utf8(&path), "-C", utf8(&tree), "../secret"]);
    let mut stream = File::open(&path).expect("tar made it");
    let error = fill(&image, &size(16), Source::Tar(&mut stream)).expect_err("leads outside");
    assert!(error.to_string().contains("'..'"), "{error}");
}

/// Everything that `find` can tell of a tree, and all attributes.
fn listing(tree: &Path) -> String {
    let tree = utf8(tree);
    let format = "%P|%y|%m|%U|%G|%s|%T@|%l|%n\n";
    let args = [tree, "-mindepth", "1", "-not", "-path", "*/lost+found", "-printf", format];
    let text = run("find", &args);
    let mut lines: Vec<String> = text
        .lines()
        .map(|line| {
            // Sizes of directories differ between file systems.
            let mut fields: Vec<&str> = line.split('|').collect();
            if fields.get(1) == Some(&"d") {
                fields[5] = "";
            }
            fields.join("|")
        })
        .collect();
    lines.sort();
    let dump = run("python3", &["-c", LIST_XATTRS, tree]);
    lines.join("\n") + &dump
}

const LIST_XATTRS: &str = r"
import os, sys
os.chdir(sys.argv[1])
for top, dirs, files in os.walk('.'):
    dirs[:] = sorted(d for d in dirs if d != 'lost+found')
    for name in sorted(dirs + files):
        path = os.path.join(top, name)
        stat = os.lstat(path)
        attrs = {n: os.getxattr(path, n, follow_symlinks=False)
                 for n in sorted(os.listxattr(path, follow_symlinks=False))}
        device = (os.major(stat.st_rdev), os.minor(stat.st_rdev))
        print(repr(path), stat.st_mtime_ns, device, attrs)
";

#[test]
fn linux_sees_the_same_tree() {
    let dir = Scratch::in_memory("trees").expect("a temporary directory");
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    make_tree(&tree);
    make_privileged(&tree);
    let told = listing(&tree);
    assert!(told.contains("security.capability") && told.contains("posix_acl_default"));
    let compare = |populated: Populated, expected: &str| {
        assert!(populated.skipped.is_empty(), "{:?}", populated.skipped);
        check(&image);
        let mounted = KernelMount::new(&image, "rw").expect("Linux mounts it");
        let found = listing(mounted.path());
        for (found, expected) in found.lines().zip(expected.lines()) {
            assert_eq!(found, expected);
        }
        assert_eq!(found.lines().count(), expected.lines().count());
        run(
            "diff",
            &[
                "-r",
                "--no-dereference",
                "-x",
                "lost+found",
                "-x",
                "null",
                "-x",
                "disk",
                "-x",
                "pipe",
                utf8(&tree),
                utf8(mounted.path()),
            ],
        );
        let blocks = fs::metadata(mounted.path().join("sparse")).expect("it is there").blocks();
        assert!(blocks < 100, "{blocks} blocks");
    };
    for features in ["", "ea_inode", "inline_data", "^extent,^64bit"] {
        // The attributes of one file need a block of 4 KiB.
        let block_size = Some(4096);
        let options = MkfsOptions { features: features.to_owned(), block_size, ..size(64) };
        compare(fill(&image, &options, Source::Directory(&tree)).expect("fits"), &told);
    }
    let path = tar(dir.path(), &tree, PAX);
    let mut stream = File::open(&path).expect("tar made it");
    let options = MkfsOptions { block_size: Some(4096), ..size(64) };
    compare(fill(&image, &options, Source::Tar(&mut stream)).expect("fits"), &told);
    // A second opinion on the stream itself.
    let listed = output("tar", &["-t", "-f", utf8(&path)]);
    assert!(listed.status.success());
}

/// A process in a mount namespace of its own, which keeps the mounts that were there when it began.
struct Keeper(Child);

impl Keeper {
    fn new() -> Keeper {
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--propagation", "private", "sh", "-c", "echo; read end"]);
        let mut child =
            unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("unshare starts");
        let said = child.stdout.as_mut().expect("piped").read(&mut [0]).expect("it has begun");
        assert_eq!(said, 1, "unshare needs root");
        Keeper(child)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Its standard input ends.
        drop(self.0.stdin.take());
        self.0.wait().expect("it ends");
    }
}

#[test]
fn mounts_that_others_keep_do_not_matter() {
    let dir = Scratch::in_memory("trees").expect("a temporary directory");
    let image = dir.path().join("image");
    let mut keepers = Vec::new();
    for name in ["one", "two", "three"] {
        let tree = dir.path().join(name);
        fs::create_dir(&tree).expect("a directory");
        fs::write(tree.join(name), name).expect("a file");
        fill(&image, &size(16), Source::Directory(&tree)).expect("fits");
        let mounted = KernelMount::new(&image, "rw").expect("Linux mounts it");
        keepers.push(Keeper::new());
        assert_eq!(fs::read_to_string(mounted.path().join(name)).expect("Linux sees it"), name);
    }
}
