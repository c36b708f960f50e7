//! Owners, modes and devices without root: fakeroot, maps of owners, one owner for all; and what is
//! left out by patterns.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools::{self, Output},
};

/// What nobody can be taken for on every machine.
const NOBODY: u32 = 65534;

fn fjord(args: &[&str]) -> Result<Output> {
    tools::run(Command::new(env!("CARGO_BIN_EXE_fjord")).args(args))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// What Linux sees in an image, or in one directory of it.
fn seen(img: &Path, dir: &str) -> Result<Manifest> {
    image::e2fsck_clean(img)?;
    let mount = KernelMount::new(img, "ro")?;
    let found = Manifest::from_directory(&mount.path().join(dir))?.without_lost_found();
    mount.unmount()?;
    Ok(found)
}

/// Builds a tree with owners and devices that only fakeroot has, and copies it every way. $1 is
/// fjord, $2 mke2fs.
const IN_FAKEROOT: &str = r#"
    cd "$0"
    mkdir -p tree/sub
    echo program > tree/program; echo data > tree/sub/data; ln -s data tree/sub/link
    mknod tree/null c 1 3; mknod tree/disk b 259 70000; mkfifo tree/pipe
    chown -h 1000:70000 tree/sub/link; chown 33:34 tree/program tree/disk; chown 5:6 tree/sub; chown 0:0 tree
    chmod 4711 tree/program; chmod 2775 tree/sub
    setcap cap_net_raw+ep tree/sub/data
    "$2" -q -t ext4 -d tree theirs 16M
    "$1" mkfs -s 16M --from-dir tree ours > /dev/null
    "$1" mkfs -s 16M put > /dev/null
    "$1" put -r put tree /
    "$1" get -r put /tree out
    tell() { (cd "$1"; find . -exec stat -c '%n %f %u:%g %t:%T %h' {} + | sort; getcap -r .); }
    tell tree > told; tell out | diff told - >&2
"#;

#[test]
fn fakeroot_is_obeyed() -> Result<()> {
    tools::usual_umask();
    tools::require(&["fakeroot", "setcap"])?;
    let scratch = Scratch::new("fakeroot")?;
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o777))?;
    // Where the tests are built others may not be let in.
    let fjord = scratch.join("fjord");
    fs::copy(env!("CARGO_BIN_EXE_fjord"), &fjord)?;
    let mut command = tools::command("setpriv")?;
    let id = NOBODY.to_string();
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "fakeroot", "sh", "-e", "-c"]);
    let mke2fs = tools::find("mke2fs").unwrap_or_default();
    command.arg(IN_FAKEROOT).arg(scratch.path()).arg(&fjord).arg(mke2fs);
    tools::run(command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))?.ok()?;
    let theirs = seen(&scratch.join("theirs"), "")?;
    let program = &theirs.entries[&b"program"[..]];
    ensure!((program.uid, program.gid, program.mode) == (33, 34, 0o4711), "mke2fs -d obeys it");
    // mke2fs gives new times to some entries.
    // The root of an image has one directory more.
    let compare = Compare { atime: false, mtime: false, links: false, ..Compare::SAME_SCRIPT };
    for (img, dir) in [("ours", ""), ("put", "tree")] {
        theirs.diff(&seen(&scratch.join(img), dir)?, &compare).ok("mke2fs -d", img)?;
    }
    Ok(())
}

/// A tree of several owners, with access control lists that name some. Needs root.
fn make_tree(at: &Path) -> Result<()> {
    tools::require_root()?;
    tools::require(&["setfacl"])?;
    fs::create_dir_all(at.join("dir"))?;
    let script = r#"
        cd "$0"
        for name in a b c dir/d; do echo "$name" > "$name"; done
        ln -s a link; chown -h 100010:100010 link
        chown 1000:1000 a; chown 100000:165535 b; chown 7:8 c; chown 1001:100001 dir/d dir
        setfacl -m u:1000:r,u:100007:rw,g:100008:x,u:9:r,u:100000:rw a; chown 3:4 .
        chmod 4755 c
    "#;
    tools::run(Command::new("sh").args(["-e", "-c", script]).arg(at))?.ok().map(drop)
}

fn owners(found: &Manifest) -> BTreeMap<String, (u32, u32)> {
    let line = |(path, entry): (&Vec<u8>, &fjord_testkit::manifest::Entry)| {
        (String::from_utf8_lossy(path).into_owned(), (entry.uid, entry.gid))
    };
    found.entries.iter().map(line).collect()
}

/// The tree in an image, once by mkfs and once by put, made with these options.
fn both(scratch: &Scratch, tree: &Path, options: &[&str]) -> Result<[Manifest; 2]> {
    let img = scratch.join("image");
    fjord(&[&["mkfs", "-f", "--from-dir", text(tree)], options, &[text(&img)]].concat())?.ok()?;
    let made = seen(&img, "")?;
    fjord(&["mkfs", "-f", "-s", "16M", "-b", "4096", text(&img)])?.ok()?;
    fjord(&[&["put", "-r"], options, &[text(&img), text(tree), "/x"]].concat())?.ok()?;
    Ok([made, seen(&img, "x")?])
}

fn expected(owners: [(&str, (u32, u32)); 7]) -> BTreeMap<String, (u32, u32)> {
    owners.into_iter().map(|(name, owner)| (name.to_owned(), owner)).collect()
}

#[test]
fn owners_are_mapped() -> Result<()> {
    let scratch = Scratch::new("mapped")?;
    let tree = scratch.join("tree");
    make_tree(&tree)?;
    let rules = scratch.join("rules");
    fs::write(&rules, "# of a container\nu:100000-165535=0\ng:100000-165535=0\n\nu:root=42\n")?;
    let map = expected([
        ("", (3, 4)),
        ("a", (0, 1000)),
        ("b", (0, 65535)),
        ("c", (7, 8)),
        ("dir", (1001, 1)),
        ("dir/d", (1001, 1)),
        ("link", (10, 10)),
    ]);
    let by_file = ["--owner-map", text(&rules), "--owner-map", "u:1000=0"];
    let by_rules = ["--owner-map", "u:1000=root,u:100000-165535=0,g:100000-165535=0"];
    for options in [&by_file[..], &by_rules] {
        for found in both(&scratch, &tree, options)? {
            ensure!(owners(&found) == map, "{options:?}: {:?}", owners(&found));
            // Whom access control lists name is mapped as well.
            let list = &found.entries[&b"a"[..]].xattrs[&b"system.posix_acl_access"[..]];
            let named: Vec<u32> = list[4..]
                .chunks(8)
                .filter(|entry| matches!(entry[0], 2 | 8))
                .map(|entry| u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]))
                .collect();
            ensure!(named == [0, 7, 9, 8], "{named:?}");
            ensure!(list[14] == 4, "two that became one have the rights of both");
        }
    }
    for (rule, word) in [
        ("u:1000", "u:1000"),
        ("u:nobody-of-that-name=0", "nobody-of-that-name"),
        ("u:5-3=0", "range"),
        ("x:1=2", "x:1=2"),
    ] {
        let args = ["mkfs", "-f", "--from-dir", text(&tree), "--owner-map", rule];
        let said = fjord(&[&args[..], &[text(&scratch.join("none"))]].concat())?;
        ensure!(said.code != Some(0) && said.stderr.contains(word), "{said:?}");
        ensure!(!scratch.join("none").exists());
    }
    Ok(())
}

#[test]
fn one_owner_for_all() -> Result<()> {
    let scratch = Scratch::new("squashed")?;
    let tree = scratch.join("tree");
    make_tree(&tree)?;
    for found in both(&scratch, &tree, &["--squash-owner", "5:root"])? {
        ensure!(owners(&found).values().all(|owner| *owner == (5, 0)), "{:?}", owners(&found));
        ensure!(found.entries[&b"c"[..]].mode == 0o4755, "its mode is lost");
    }
    // The owner of the root directory alone; of all in put.
    let [made, put] = both(&scratch, &tree, &["--owner", "11:12"])?;
    ensure!(owners(&made)[""] == (11, 12) && owners(&made)["c"] == (7, 8), "{:?}", owners(&made));
    ensure!(owners(&put).values().all(|owner| *owner == (11, 12)), "{:?}", owners(&put));
    let both = ["mkfs", "--squash-owner", "1:1", "--owner-map", "u:1=2", "-s", "16M", "none"];
    fjord(&both)?.expect_code(&[2])?;
    Ok(())
}

#[test]
fn patterns_leave_entries_out() -> Result<()> {
    let scratch = Scratch::new("exclude")?;
    let (tree, list): (PathBuf, PathBuf) = (scratch.join("tree"), scratch.join("list"));
    for dir in ["src/build", "build/deep", "cache", "src/cache"] {
        fs::create_dir_all(tree.join(dir))?;
    }
    for file in ["a.o", "keep.o", "src/b.o", "src/b.c", "build/deep/x", "src/build/y", "cache/z"] {
        fs::write(tree.join(file), vec![b'x'; 3 << 20])?;
    }
    fs::write(&list, "# objects\n*.o\n!keep.o\n\n/build\n")?;
    let paths = |found: &Manifest| {
        let names = found.entries.keys().map(|path| String::from_utf8_lossy(path).into_owned());
        names.collect::<Vec<_>>().join(" ").trim().to_owned()
    };
    let options = ["--exclude-from", text(&list), "--exclude", "cache/"];
    for found in both(&scratch, &tree, &options)? {
        ensure!(paths(&found) == "keep.o src src/b.c src/build src/build/y", "{}", paths(&found));
    }
    // What is left out takes no space, and need not be readable.
    let img = scratch.join("image");
    let made = ["mkfs", "-f", "--from-dir", text(&tree), "--exclude", "*", text(&img)];
    fjord(&made)?.ok()?;
    ensure!(fs::metadata(&img)?.len() < 20 << 20, "the size is that of all");
    // The same of a tar file.
    let archive = scratch.join("tar");
    tools::run(tools::command("tar")?.arg("-cf").arg(&archive).arg("-C").arg(&tree).arg("."))?
        .ok()?;
    let from = ["--from-tar", text(&archive), text(&img)];
    fjord(&[&["mkfs", "-f"], &options[..], &from].concat())?.ok()?;
    let found = seen(&img, "")?;
    ensure!(paths(&found) == "keep.o src src/b.c src/build src/build/y", "{}", paths(&found));
    let said = fjord(&["mkfs", "--exclude", "a[z-a]", "-s", "16M", "none"])?.expect_code(&[2])?;
    ensure!(said.stderr.contains("a[z-a]"), "{said:?}");
    Ok(())
}
