//! `fjord put` and `fjord get`: what cp -a keeps is kept, both ways; what cannot be is told; what was
//! there stays until the new one is complete.

use std::{
    ffi::OsStr,
    fs::{self, File, Permissions},
    io::Write,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools::{self, Output},
};

/// What nobody can be taken for on every machine.
const NOBODY: u32 = 65534;
/// The exit code of what was done but for what is listed.
const INCOMPLETE: i32 = 6;

fn fjord(command: &[&str], img: &Path, rest: &[&str]) -> Result<Output> {
    let program = env!("CARGO_BIN_EXE_fjord");
    tools::run(Command::new(program).args(command).arg(img).args(rest))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

fn shell(script: &str, args: &[&Path]) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-e", "-c", script, "sh"]).args(args);
    tools::run(&mut command)?.ok().map(drop)
}

/// Attributes of every name space, with a binary value and a long one.
const XATTRS: &str = r"
import os, sys
os.chdir(sys.argv[1])
os.setxattr('file', 'user.text', b'value')
os.setxattr('file', 'user.binary', bytes(range(256)) * 4)
os.setxattr('file', 'trusted.mark', b'')
os.setxattr('plain', 'security.capability', b'\x01\x00\x00\x02\x00\x0a\x00\x00' + b'\x00' * 12)
os.setxattr('link', 'trusted.of-the-link', b'x', follow_symlinks=False)
os.setxattr('disk', 'trusted.of-the-device', b'y')
os.setxattr('dir', 'user.of-the-directory', b'z')
";

/// Entries of every kind, with every attribute that cp -a keeps. Needs root.
fn make_tree(at: &Path) -> Result<()> {
    tools::require_root()?;
    tools::require(&["setfacl"])?;
    fs::create_dir_all(at.join("dir/deep/er"))?;
    fs::write(at.join("file"), vec![0x5a; 300_001])?;
    fs::write(at.join("plain"), b"program")?;
    fs::write(at.join("empty"), b"")?;
    fs::hard_link(at.join("file"), at.join("dir/again"))?;
    fs::hard_link(at.join("file"), at.join("dir/deep/thrice"))?;
    symlink("dir/deep", at.join("link"))?;
    symlink("far/".repeat(60), at.join("dir/slow"))?;
    fs::hard_link(at.join("link"), at.join("dir/link-again"))?;
    fs::write(at.join(OsStr::from_bytes(b"odd \xff\n name")), b"odd")?;
    fs::write(at.join("n".repeat(255)), b"long")?;
    let holes = File::create(at.join("holes"))?;
    holes.write_all_at(b"start", 0)?;
    holes.write_all_at(&[7; 9000], 50 << 20)?;
    holes.set_len(1 << 30)?;
    let script = r#"
        cd "$1"
        mkfifo -m 640 pipe; mknod disk b 259 70000; mknod null c 1 3
        python3 -c 'import socket,sys; socket.socket(socket.AF_UNIX).bind("dir/socket")'
        chown 1000:70000 file; chown -h 4000000:5 link; chown 7:8 dir/deep pipe disk
        chmod 6755 plain; chmod 000 empty; chmod 3771 dir/deep; chmod 2750 dir
        setfacl -m u:1000:rwx,g:5:r file; setfacl -m d:u:1000:rwx,u:3:x dir
        touch -d '1999-12-31 23:59:59.123456789 UTC' file dir/deep/er
        touch -d '1931-02-03 04:05:06.7 UTC' empty
        touch -h -d '2039-01-02 03:04:05.000000006 UTC' link dir/slow pipe disk dir/socket
    "#;
    shell(script, &[at])?;
    tools::run(Command::new("python3").args(["-c", XATTRS]).arg(at))?.ok()?;
    shell(r#"cd "$1"; touch -d '2001-02-03 04:05:06.5 UTC' dir/deep dir ."#, &[at])
}

/// All that cp -a keeps counts.
const CP: Compare = Compare { atime: false, flags_mask: 0, ..Compare::SAME_SCRIPT };

fn same(left: &Path, right: &Path) -> Result<()> {
    let (left, right) = (Manifest::from_directory(left)?, Manifest::from_directory(right)?);
    left.diff(&right, &CP).ok("expected", "found")
}

fn new_image(at: &Path, size: &str) -> Result<()> {
    fjord(&["mkfs", "--size", size, "-b", "4096"], at, &[])?.ok().map(drop)
}

/// An image, a tree, and what cp -a makes of the tree.
fn place(name: &str) -> Result<(Scratch, PathBuf, PathBuf, PathBuf)> {
    let scratch = Scratch::new(name)?;
    let (img, tree, copy) = (scratch.join("image"), scratch.join("tree"), scratch.join("copy"));
    make_tree(&tree)?;
    shell(r#"cp -a "$1" "$2""#, &[&tree, &copy])?;
    same(&tree, &copy).context("the tree and cp -a's copy of it")?;
    new_image(&img, "64M")?;
    Ok((scratch, img, tree, copy))
}

/// What Linux sees in a directory of the image must be the tree.
fn linux_sees(img: &Path, dir: &str, tree: &Path) -> Result<()> {
    image::e2fsck_clean(img)?;
    let mount = KernelMount::new(img, "ro")?;
    same(tree, &mount.path().join(dir))?;
    mount.unmount()
}

#[test]
fn every_kind_of_entry_goes_in_and_comes_out_as_cp_keeps_it() -> Result<()> {
    let (scratch, img, tree, copy) = place("copies")?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/srv"])?.ok()?;
    linux_sees(&img, "srv", &copy)?;
    // Not only what fjord put there: Linux's copy of it.
    let mount = KernelMount::new(&img, "rw")?;
    shell(r#"cp -a "$1/srv" "$1/linux""#, &[mount.path()])?;
    mount.unmount()?;
    for from in ["/srv", "/linux"] {
        let out = scratch.join("out").join(from.trim_start_matches('/'));
        fs::create_dir_all(scratch.join("out"))?;
        fjord(&["get", "-r"], &img, &[from, text(&out)])?.ok()?;
        same(&copy, &out).with_context(|| from.to_owned())?;
        let used = fs::metadata(out.join("holes"))?.blocks() * 512;
        ensure!(used < 1 << 20, "{used} bytes for the holes");
        // Again, over what is there.
        fjord(&["get", "-r"], &img, &[from, text(&scratch.join("out"))])?.ok()?;
        same(&copy, &out).with_context(|| format!("{from} again"))?;
    }
    Ok(())
}

#[test]
fn single_entries_keep_all_too() -> Result<()> {
    let (scratch, img, tree, copy) = place("single")?;
    fjord(&["mkdir"], &img, &["/one"])?.ok()?;
    fs::create_dir(scratch.join("one"))?;
    fs::create_dir(scratch.join("out"))?;
    for name in ["file", "plain", "empty", "link", "pipe", "disk", "null", "holes"] {
        fjord(&["put"], &img, &[text(&tree.join(name)), "/one/"])?.ok()?;
        shell(r#"cp -a "$1" "$2""#, &[&copy.join(name), &scratch.join("one")])?;
        fjord(&["get"], &img, &[&format!("/one/{name}"), text(&scratch.join("out"))])?.ok()?;
    }
    let root = scratch.join("one");
    for out in ["out", "linux"] {
        if out == "linux" {
            let mount = KernelMount::new(&img, "ro")?;
            shell(r#"cp -a "$1/one" "$2""#, &[mount.path(), &scratch.join(out)])?;
            mount.unmount()?;
        }
        let out = scratch.join(out);
        shell(r#"touch -r "$1" "$2"; chmod --reference "$1" "$2""#, &[&root, &out])?;
        same(&root, &out)?;
    }
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Rights that a directory hands on do not get to copies, whichever way.
#[test]
fn nothing_is_inherited_from_the_directory_of_the_copy() -> Result<()> {
    let (scratch, img, tree, copy) = place("inherited")?;
    let mount = KernelMount::new(&img, "rw")?;
    let script =
        r#"mkdir "$1/in" && setfacl -m d:u:1234:rwx,d:g:77:rwx "$1/in" && chmod 2777 "$1/in""#;
    shell(script, &[mount.path()])?;
    mount.unmount()?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/in/"])?.ok()?;
    linux_sees(&img, "in/tree", &copy)?;
    shell(&script.replace("$1/in", "$1"), &[&scratch.join("out")])?;
    fjord(&["get", "-r"], &img, &["/in/tree", text(&scratch.join("out"))])?.ok()?;
    same(&copy, &scratch.join("out/tree"))
}

#[test]
fn a_second_copy_refreshes_the_first() -> Result<()> {
    let (scratch, img, tree, copy) = place("refresh")?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/srv"])?.ok()?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/srv/"])?.ok()?;
    linux_sees(&img, "srv/tree", &copy)?;
    // Other targets, contents and kinds; links that are apart now.
    let script = r#"
        cd "$1"
        ln -sfn elsewhere link; rm dir/slow; echo now-a-file > dir/slow
        rm null; ln -s file null; rm pipe; mknod pipe c 1 5
        rm dir/again; echo alone > dir/again; ln -f plain dir/deep/thrice
        setfacl -b file; setfacl -b -k dir; chmod 700 dir; echo more >> plain
    "#;
    shell(script, &[&tree])?;
    // The directory has lists in the image that the source has no more.
    fs::remove_dir_all(&copy)?;
    shell(r#"cp -a "$1" "$2""#, &[&tree, &copy])?;
    for _ in 0..2 {
        fjord(&["put", "-r"], &img, &[&format!("{}/.", text(&tree)), "/srv/tree"])?.ok()?;
        linux_sees(&img, "srv/tree", &copy)?;
    }
    let out = scratch.join("out");
    shell(r#"cp -a "$1" "$2"; cd "$2"; rm link; ln -s /etc link"#, &[&tree, &out])?;
    fjord(&["get", "-r"], &img, &["/srv/tree", text(scratch.path())])?.ok()?;
    fjord(&["get", "-r"], &img, &["/srv/tree/.", text(&out)])?.ok()?;
    same(&copy, &out)?;
    same(&copy, &tree)
}

/// The names in the root directory of an image.
fn root_names(img: &Path) -> Result<String> {
    Ok(fjord(&["ls"], img, &["/"])?.ok()?.stdout)
}

fn free_blocks(img: &Path) -> Result<String> {
    let dump = tools::run(tools::command("dumpe2fs")?.arg("-h").arg(img))?.ok()?.stdout;
    Ok(dump.lines().find(|line| line.starts_with("Free blocks:")).unwrap_or_default().to_owned())
}

#[test]
fn what_does_not_fit_leaves_the_old_one_and_nothing_else() -> Result<()> {
    let scratch = Scratch::new("full")?;
    let img = scratch.join("image");
    for options in [&["-b", "4096"][..], &["-b", "1024", "-O", "^extent,^64bit"], &["-J", "none"]] {
        fjord(&[&["mkfs", "-f", "-s", "12M"], options].concat(), &img, &[])?.ok()?;
        let (old, new) = (scratch.join("old"), scratch.join("new"));
        fs::write(&old, vec![1; 1 << 20])?;
        fs::write(&new, (0..20u32 << 20).map(|at| (at >> 10) as u8).collect::<Vec<u8>>())?;
        fjord(&["put"], &img, &[text(&old), "/f"])?.ok()?;
        let (names, free) = (root_names(&img)?, free_blocks(&img)?);
        for target in ["/f", "/other"] {
            let done = fjord(&["put"], &img, &[text(&new), target])?.expect_code(&[1])?;
            ensure!(done.stderr.contains("no space left in the image"), "{done:?}");
            ensure!(!done.stderr.contains("attribute"), "{done:?}");
            ensure!(root_names(&img)? == names, "something is left behind");
            ensure!(free_blocks(&img)? == free, "{target}: space is lost");
        }
        // From a stream whose end nobody knows.
        let mut put = Command::new(env!("CARGO_BIN_EXE_fjord"));
        put.arg("put").arg(&img).args(["-", "/f"]).stdin(Stdio::from(File::open(&new)?));
        ensure!(put.output()?.status.code() == Some(1));
        ensure!(root_names(&img)? == names && free_blocks(&img)? == free);
        let out = scratch.join("out");
        fjord(&["get"], &img, &["/f", text(&out)])?.ok()?;
        ensure!(fs::read(&out)? == fs::read(&old)?, "the old content is lost");
        image::e2fsck_clean(&img)?;
    }
    Ok(())
}

#[test]
fn a_killed_put_leaves_the_old_one_and_nothing_else() -> Result<()> {
    let scratch = Scratch::new("killed")?;
    let img = scratch.join("image");
    new_image(&img, "300M")?;
    let old = scratch.join("old");
    fs::write(&old, b"old")?;
    fjord(&["put"], &img, &[text(&old), "/f"])?.ok()?;
    let names = root_names(&img)?;
    let mut put = Command::new(env!("CARGO_BIN_EXE_fjord"));
    let mut child = put.arg("put").arg(&img).args(["-", "/f"]).stdin(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().context("piped")?;
    // More than stays in memory.
    stdin.write_all(&vec![2; 200 << 20])?;
    child.kill()?;
    child.wait()?;
    drop(stdin);
    fjord(&["recover"], &img, &[])?.ok()?;
    ensure!(root_names(&img)? == names, "{}", root_names(&img)?);
    ensure!(fjord(&["cat"], &img, &["/f"])?.ok()?.stdout == "old");
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn a_killed_get_leaves_the_old_one_and_nothing_else() -> Result<()> {
    let scratch = Scratch::new("killed-get")?;
    let (img, out) = (scratch.join("image"), scratch.join("out"));
    new_image(&img, "64M")?;
    fs::write(scratch.join("f"), vec![3; 20 << 20])?;
    fjord(&["put"], &img, &[text(&scratch.join("f")), "/"])?.ok()?;
    fs::create_dir(&out)?;
    fs::write(out.join("f"), b"old")?;
    // The signal for a file that grows too long is not caught.
    let mut get = Command::new("sh");
    get.args(["-c", r#"ulimit -c 0; ulimit -f 4096; exec "$@""#, "sh"]);
    get.arg(env!("CARGO_BIN_EXE_fjord")).arg("get").arg(&img).arg("/f").arg(&out);
    let ended = get.stderr(Stdio::null()).status()?;
    ensure!(ended.code().is_none(), "{ended:?}");
    ensure!(fs::read_dir(&out)?.count() == 1, "something is left behind");
    ensure!(fs::read(out.join("f"))? == b"old");
    fjord(&["get"], &img, &["/f", text(&out)])?.ok()?;
    ensure!(fs::read(out.join("f"))? == fs::read(scratch.join("f"))?);
    ensure!(fs::read_dir(&out)?.count() == 1, "something is left behind");
    Ok(())
}

#[test]
fn what_is_in_the_way_is_told() -> Result<()> {
    let scratch = Scratch::new("way")?;
    let (img, tree) = (scratch.join("image"), scratch.join("tree"));
    new_image(&img, "16M")?;
    fs::create_dir_all(tree.join("x"))?;
    fs::write(scratch.join("x"), b"file")?;
    fjord(&["put"], &img, &[text(&scratch.join("x")), "/tree/"])?.expect_code(&[1])?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/"])?.ok()?;
    let said = fjord(&["put"], &img, &[text(&scratch.join("x")), "/tree"])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("/x: a directory exists there"), "{said:?}");
    fjord(&["rm", "-r"], &img, &["/tree"])?.ok()?;
    fjord(&["put"], &img, &[text(&scratch.join("x")), "/tree"])?.ok()?;
    let said = fjord(&["put", "-r"], &img, &[text(&tree), "/"])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("something other than a directory exists there"), "{said:?}");
    // The same on the way out.
    let out = scratch.join("out");
    fs::create_dir_all(out.join("tree"))?;
    let said = fjord(&["get"], &img, &["/tree", text(&out)])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("a directory exists there"), "{said:?}");
    fs::write(out.join("lost+found"), b"")?;
    let said = fjord(&["get", "-r"], &img, &["/", text(&out)])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("something other than a directory exists there"), "{said:?}");
    ensure!(fs::read_dir(&out)?.count() == 2, "something is left behind");
    Ok(())
}

/// A link that an earlier copy left does not lead the next one elsewhere.
#[test]
fn copies_stay_where_they_belong() -> Result<()> {
    let scratch = Scratch::new("inside")?;
    let (img, out) = (scratch.join("image"), scratch.join("out"));
    new_image(&img, "16M")?;
    let victim = scratch.join("victim");
    fs::create_dir_all(victim.join("dir"))?;
    fs::write(victim.join("file"), b"precious")?;
    let tree = scratch.join("tree");
    fs::create_dir_all(tree.join("dir"))?;
    for name in ["file", "dir/file"] {
        fs::write(tree.join(name), b"from the image")?;
    }
    fjord(&["put", "-r"], &img, &[text(&tree), "/"])?.ok()?;
    fs::create_dir(&out)?;
    symlink(victim.join("file"), out.join("file"))?;
    symlink(victim.join("dir"), out.join("dir"))?;
    let said = fjord(&["get", "-r"], &img, &["/tree/.", text(&out)])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("exists there"), "{said:?}");
    fs::remove_file(out.join("dir"))?;
    fjord(&["get", "-r"], &img, &["/tree/.", text(&out)])?.ok()?;
    ensure!(fs::read(victim.join("file"))? == b"precious", "a link was followed");
    ensure!(fs::read_dir(victim.join("dir"))?.count() == 0, "a link was followed");
    ensure!(fs::read(out.join("file"))? == b"from the image");
    // A link that the caller names is followed, as cp does.
    symlink("file", out.join("named"))?;
    fjord(&["get"], &img, &["/tree/dir/file", text(&out.join("named"))])?.ok()?;
    ensure!(fs::symlink_metadata(out.join("named"))?.is_symlink());
    Ok(())
}

/// Neither does one that a copy of another image left under the very name that the copy gets.
#[test]
fn a_copied_link_does_not_lead_the_next_copy_elsewhere() -> Result<()> {
    let scratch = Scratch::new("led")?;
    let (img, victim, out) = (scratch.join("image"), scratch.join("victim"), scratch.join("out"));
    for dir in [&victim, &out] {
        fs::create_dir(dir)?;
    }
    fs::write(victim.join("file"), b"precious")?;
    new_image(&img, "16M")?;
    let tree = scratch.join("tree");
    fs::create_dir_all(tree.join("links"))?;
    fs::create_dir_all(tree.join("real/d"))?;
    symlink(&victim, tree.join("links/d"))?;
    symlink(victim.join("file"), tree.join("links/file"))?;
    fs::write(tree.join("real/d/evil"), b"evil")?;
    fs::write(tree.join("real/file"), b"evil")?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/x"])?.ok()?;
    // The target itself may be a link.
    let target = scratch.join("target");
    symlink(&out, &target)?;
    let get = |path: &str| fjord(&["get", "-r"], &img, &[path, text(&target)]);
    get("/x/links/d")?.ok()?;
    get("/x/links/file")?.ok()?;
    let said = get("/x/real/d")?.expect_code(&[1])?;
    ensure!(said.stderr.contains("target/d: something other than a directory exists"), "{said:?}");
    get("/x/real/file")?.ok()?;
    ensure!(fs::read_dir(&victim)?.count() == 1, "a link was followed");
    ensure!(fs::read(victim.join("file"))? == b"precious", "a link was followed");
    ensure!(fs::symlink_metadata(out.join("file"))?.is_file());
    fs::remove_file(out.join("d"))?;
    get("/x/real/d")?.ok()?;
    ensure!(fs::read(out.join("d/evil"))? == b"evil");
    Ok(())
}

#[test]
fn a_slash_after_a_link_names_its_directory() -> Result<()> {
    let (scratch, img, tree, copy) = place("slash")?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/d"])?.ok()?;
    fjord(&["ln", "-s"], &img, &["d", "/ld"])?.ok()?;
    let out = scratch.join("out");
    fjord(&["get", "-r"], &img, &["/ld/", text(&out)])?.ok()?;
    same(&copy, &out)?;
    fjord(&["get", "-r"], &img, &["/ld/", text(&out)])?.ok()?;
    same(&copy, &out.join("ld"))?;
    fjord(&["get"], &img, &["/ld", text(&scratch.join("link"))])?.ok()?;
    ensure!(fs::symlink_metadata(scratch.join("link"))?.is_symlink());
    // A link is not replaced by what is to go into its directory.
    for path in ["/ld/", "/d/file/"] {
        let mut put = Command::new(env!("CARGO_BIN_EXE_fjord"));
        put.arg("put").arg(&img).args(["-", path]).stdin(Stdio::null());
        ensure!(put.output()?.status.code() == Some(1), "{path}");
        let put = fjord(&["put"], &img, &[text(&tree.join("plain")), path])?;
        put.expect_code(&[if path == "/ld/" { 0 } else { 1 }])?;
    }
    ensure!(fjord(&["stat"], &img, &["/ld"])?.ok()?.stdout.contains("link"));
    Ok(())
}

/// One entry that the format does not hold is listed; the others, and their directory, are copied.
#[test]
fn an_entry_that_does_not_fit_does_not_stop_the_others() -> Result<()> {
    tools::require_root()?;
    tools::require(&["setfattr"])?;
    let scratch = Scratch::new("fit")?;
    let (small, large, tree) = (scratch.join("small"), scratch.join("large"), scratch.join("t"));
    fjord(&["mkfs", "--size", "16M", "-b", "1024"], &small, &[])?.ok()?;
    new_image(&large, "16M")?;
    fs::create_dir_all(tree.join("dir"))?;
    for name in ["dir/after", "dir/marked", "last"] {
        fs::write(tree.join(name), name)?;
    }
    symlink("t".repeat(1500), tree.join("dir/link"))?;
    let script = r#"
        cd "$1"
        setfattr -n user.large -v $(head -c 2500 /dev/zero | tr '\0' x) dir/marked
        chown 1000:1001 dir; chmod 2751 dir; touch -d '2001-02-03 04:05:06.5 UTC' dir
    "#;
    shell(script, &[&tree])?;
    let said = fjord(&["put", "-r"], &small, &[text(&tree), "/t"])?.expect_code(&[INCOMPLETE])?;
    ensure!(said.stderr.contains("dir/link") && said.stderr.contains("1024 bytes"), "{said:?}");
    ensure!(said.stderr.contains("user.large: 2500 bytes"), "{said:?}");
    let copy = scratch.join("copy");
    shell(r#"cp -a "$1" "$2"; setfattr -x user.large "$2/dir/marked""#, &[&tree, &copy])?;
    fs::remove_file(copy.join("dir/link"))?;
    shell(r#"touch -r "$1/dir" "$2/dir""#, &[&tree, &copy])?;
    linux_sees(&small, "t", &copy)?;
    // The way out, to a file system with the same limits.
    fjord(&["put", "-r"], &large, &[text(&tree), "/t"])?.ok()?;
    fjord(&["rm", "-r"], &small, &["/t"])?.ok()?;
    let mount = KernelMount::new(&small, "rw")?;
    let said = fjord(&["get", "-r"], &large, &["/t", text(mount.path())])?;
    let said = said.expect_code(&[INCOMPLETE])?;
    ensure!(said.stderr.contains("dir/link") && said.stderr.contains("user.large"), "{said:?}");
    same(&copy, &mount.path().join("t"))?;
    mount.unmount()?;
    Ok(())
}

/// Nor does one whose name is in use; and a full image leaves no directory without its mode.
#[test]
fn directories_are_complete_after_a_failure() -> Result<()> {
    let scratch = Scratch::new("complete")?;
    let (img, tree) = (scratch.join("image"), scratch.join("t"));
    new_image(&img, "12M")?;
    fs::create_dir_all(tree.join("dir/a"))?;
    fs::write(tree.join("dir/a/file"), b"a")?;
    fs::write(tree.join("dir/b"), b"b")?;
    fs::set_permissions(tree.join("dir"), Permissions::from_mode(0o751))?;
    let other = scratch.join("other");
    fs::create_dir_all(&other)?;
    fs::write(other.join("a"), b"in the way")?;
    fjord(&["put", "-r"], &img, &[&format!("{}/.", text(&other)), "/"])?.ok()?;
    fjord(&["mkdir", "-p", "-m", "700"], &img, &["/t/dir", "/u/dir"])?.ok()?;
    fjord(&["mv"], &img, &["/a", "/t/dir/a"])?.ok()?;
    let said = fjord(&["put", "-r"], &img, &[text(&tree), "/"])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("dir/a: ") && said.stderr.contains("1 entr"), "{said:?}");
    ensure!(fjord(&["cat"], &img, &["/t/dir/b"])?.ok()?.stdout == "b");
    let mode = |path: &str| -> Result<bool> {
        Ok(fjord(&["stat"], &img, &[path])?.ok()?.stdout.contains("0751"))
    };
    ensure!(mode("/t/dir")?, "{}", fjord(&["stat"], &img, &["/t/dir"])?.stdout);
    // The same inside the image, and on the way out.
    fjord(&["mv"], &img, &["/t/dir/a", "/u/dir/a"])?.ok()?;
    fjord(&["mkdir"], &img, &["/t/dir/a"])?.ok()?;
    fjord(&["mkdir"], &img, &["/new"])?.ok()?;
    let said = fjord(&["cp", "-a"], &img, &["/t/.", "/u"])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("dir/a: "), "{said:?}");
    ensure!(mode("/u/dir")? && fjord(&["cat"], &img, &["/u/dir/b"])?.ok()?.stdout == "b");
    let out = scratch.join("out");
    fs::create_dir_all(out.join("dir"))?;
    fs::write(out.join("dir/a"), b"in the way")?;
    fs::set_permissions(out.join("dir"), Permissions::from_mode(0o700))?;
    fjord(&["get", "-r"], &img, &["/t/.", text(&out)])?.expect_code(&[1])?;
    ensure!(fs::metadata(out.join("dir"))?.mode() & 0o7777 == 0o751);
    ensure!(fs::read(out.join("dir/b"))? == b"b");
    // Full: an end, but with its mode.
    fs::write(tree.join("dir/c"), vec![1; 20 << 20])?;
    fs::write(tree.join("dir/d"), b"d")?;
    let said = fjord(&["put", "-r"], &img, &[text(&tree), "/full"])?.expect_code(&[1])?;
    ensure!(said.stderr.contains("no space left in the image"), "{said:?}");
    ensure!(mode("/full/dir")?);
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Deeper trees than a copy holds open are refused by a message that says so.
#[test]
fn trees_that_are_too_deep_are_told() -> Result<()> {
    let scratch = Scratch::new("depth")?;
    let (img, tree) = (scratch.join("image"), scratch.join("t"));
    new_image(&img, "32M")?;
    fs::create_dir(&tree)?;
    let script = "import os, sys\nos.chdir(sys.argv[1])\nfor _ in range(520):\n  os.mkdir('d'); os.chdir('d')\n";
    tools::run(Command::new("python3").args(["-c", script]).arg(&tree))?.ok()?;
    fs::write(tree.join("last"), b"last")?;
    let limit = "more than 500 levels deep";
    let new = scratch.join("new");
    let said = fjord(&["mkfs", "--from-dir", text(&tree)], &new, &[])?.expect_code(&[1])?;
    ensure!(said.stderr.contains(limit), "{said:?}");
    let said = fjord(&["put", "-r"], &img, &[text(&tree), "/t"])?.expect_code(&[1])?;
    ensure!(said.stderr.contains(limit) && said.stderr.len() < 1000, "{said:?}");
    ensure!(fjord(&["cat"], &img, &["/t/last"])?.ok()?.stdout == "last");
    image::e2fsck_clean(&img)?;
    Ok(())
}

fn as_nobody(fjord: &Path, args: &[&str]) -> Result<Output> {
    let mut command = tools::command("setpriv")?;
    let id = NOBODY.to_string();
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(fjord).args(args);
    tools::run(&mut command)
}

#[test]
fn what_cannot_be_kept_is_told() -> Result<()> {
    tools::usual_umask();
    let (scratch, img, tree, _) = place("unkept")?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/srv"])?.ok()?;
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755))?;
    fs::set_permissions(&img, Permissions::from_mode(0o666))?;
    let (theirs, program) = (scratch.join("theirs"), scratch.join("fjord"));
    fs::create_dir(&theirs)?;
    std::os::unix::fs::chown(&theirs, Some(NOBODY), Some(NOBODY))?;
    // Where the tests are built others may not be let in.
    fs::copy(env!("CARGO_BIN_EXE_fjord"), &program)?;
    let get = |more: &[&str], from: &str| {
        as_nobody(&program, &[&["get", "-r"], more, &[text(&img), from, text(&theirs)]].concat())
    };
    let said = get(&[], "/srv")?.expect_code(&[INCOMPLETE])?.stderr;
    for what in ["disk: a device", "null: a device", "trusted.mark", "plain: set-user-ID"] {
        ensure!(said.contains(what), "{what}: {said}");
    }
    ensure!(said.contains("security.capability") && !said.contains("owner 1000"), "{said}");
    ensure!(!theirs.join("srv/null").exists());
    let stat = fs::metadata(theirs.join("srv/plain"))?;
    ensure!(stat.mode() & 0o7777 == 0o755 && stat.uid() == NOBODY, "{:o}", stat.mode());
    ensure!(fs::read(theirs.join("srv/file"))? == fs::read(tree.join("file"))?);
    // Owners are only tried when they are asked for.
    let said = get(&["--same-owner"], "/srv/file")?.expect_code(&[INCOMPLETE])?.stderr;
    ensure!(said.contains("owner 1000:70000"), "{said}");
    fjord(&["mkdir"], &img, &["/easy"])?.ok()?;
    fs::write(theirs.join("easy"), b"")?;
    fjord(&["put"], &img, &[text(&theirs.join("easy")), "/easy/"])?.ok()?;
    get(&[], "/easy/easy")?.ok()?;
    // On the way in: what may not be read.
    fs::set_permissions(tree.join("dir"), Permissions::from_mode(0o700))?;
    let put = ["put", "-r", text(&img), text(&tree), "/theirs"];
    let said = as_nobody(&program, &put)?.expect_code(&[INCOMPLETE])?.stderr;
    ensure!(said.contains("/empty: cannot be read") && said.contains("/dir: cannot"), "{said}");
    ensure!(fjord(&["ls"], &img, &["/theirs"])?.ok()?.stdout.contains("file"));
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// On a file system without access control lists nobody gets rights that the list did not give.
#[test]
fn a_list_that_is_lost_widens_nothing() -> Result<()> {
    tools::usual_umask();
    let (scratch, img, tree, _) = place("widened")?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/srv"])?.ok()?;
    let below = scratch.join("below");
    fs::create_dir(&below)?;
    let script = r#"
        mount -t ramfs none "$3"
        code=0; "$1" get "$2" /srv/file "$3" || code=$?
        stat -c %a "$3/file"; exit $code
    "#;
    let mut command = tools::command("unshare")?;
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    command.arg(env!("CARGO_BIN_EXE_fjord")).arg(&img).arg(&below);
    let said = tools::run(&mut command)?.expect_code(&[INCOMPLETE])?;
    ensure!(said.stderr.contains("attribute system.posix_acl_access"), "{said:?}");
    let before = fs::metadata(tree.join("file"))?.mode() & 0o777;
    ensure!(before == 0o674 && said.stdout == "644\n", "{before:o} became {said:?}");
    Ok(())
}

#[test]
fn a_dash_is_standard_output() -> Result<()> {
    let scratch = Scratch::new("dash")?;
    let (img, dir) = (scratch.join("image"), scratch.join("dir"));
    new_image(&img, "16M")?;
    fs::create_dir(&dir)?;
    fs::write(scratch.join("f"), b"content\n")?;
    symlink("f", scratch.join("l"))?;
    for name in ["f", "l"] {
        fjord(&["put"], &img, &[text(&scratch.join(name)), "/"])?.ok()?;
    }
    let get = |args: &[&str]| -> Result<Output> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fjord"));
        tools::run(command.current_dir(&dir).arg("get").args(args))
    };
    for name in ["/f", "/l"] {
        ensure!(get(&[text(&img), name, "-"])?.ok()?.stdout == "content\n");
    }
    ensure!(fs::read_dir(&dir)?.count() == 0, "a file named -");
    let said = get(&["-r", text(&img), "/", "-"])?.expect_code(&[2])?;
    ensure!(said.stderr.contains("is a directory"), "{said:?}");
    get(&[text(&img), "/f", "./-"])?.ok()?;
    ensure!(fs::read(dir.join("-"))? == b"content\n");
    get(&[text(&img), "/f", "/dev/null"])?.ok()?;
    ensure!(!fs::metadata("/dev/null")?.is_file());
    Ok(())
}

/// Permission bits of a file, and its access list without comments, as Linux shows them.
fn permissions(img: &Path, path: &str) -> Result<String> {
    let mount = KernelMount::new(img, "ro")?;
    let file = mount.path().join(path);
    let list = tools::run(tools::command("getfacl")?.args(["-cnp"]).arg(&file))?.ok()?.stdout;
    let mode = fs::metadata(&file)?.mode() & 0o7777;
    mount.unmount()?;
    Ok(format!("{mode:o} {}", list.split_whitespace().collect::<Vec<_>>().join(" ")))
}

/// `put -m` limits an access list as chmod(2) does on Linux.
#[test]
fn a_mode_limits_the_access_list() -> Result<()> {
    tools::require_root()?;
    tools::require(&["setfacl", "getfacl"])?;
    let scratch = Scratch::new("put-mode")?;
    let (img, file) = (scratch.join("image"), scratch.join("s"));
    fs::write(&file, b"secret")?;
    shell(r#"chmod 640 "$1"; setfacl -m u:1234:rwx,g::r,m::rwx "$1""#, &[&file])?;
    new_image(&img, "16M")?;
    // What Linux makes of it.
    let mount = KernelMount::new(&img, "rw")?;
    for mode in ["600", "644", "4751"] {
        let script = r#"cp -a "$1" "$2/linux$3"; chmod "$3" "$2/linux$3""#;
        shell(script, &[&file, mount.path(), Path::new(mode)])?;
    }
    mount.unmount()?;
    for mode in ["600", "644", "4751"] {
        let name = format!("fjord{mode}");
        fjord(&["put", "-m", mode], &img, &[text(&file), &format!("/{name}")])?.ok()?;
        // Again, over what is there, with other owners.
        let more = ["--owner-map", "u:0=0", text(&file), &format!("/{name}")];
        fjord(&["put", "-m", mode], &img, &more)?.ok()?;
        let (ours, linux) =
            (permissions(&img, &name)?, permissions(&img, &format!("linux{mode}"))?);
        ensure!(ours == linux, "{mode}: {ours}, Linux {linux}");
    }
    let found = permissions(&img, "fjord600")?;
    ensure!(found.starts_with("600 ") && found.contains("mask::---"), "{found}");
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// One damaged file, and attributes that no program can read: the rest is copied, and what is not is listed.
#[test]
fn a_copy_goes_on_beside_damage() -> Result<()> {
    let scratch = Scratch::in_memory("get")?;
    let image = scratch.join("image");
    image::make_sparse(&image, 16 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&image))?.ok()?;
    let tree = scratch.join("tree");
    fs::create_dir_all(tree.join("dir/below"))?;
    for name in ["dir/a", "dir/bad", "dir/below/bad", "dir/below/c", "dir/z"] {
        fs::write(tree.join(name), name)?;
    }
    symlink("a", tree.join("dir/link"))?;
    fjord(&["put", "-r"], &image, &[text(&tree.join("dir")), "/"])?.ok()?;
    let set = image::debugfs_write(&image, &["ea_set /dir/link user.x value".into()])?;
    ensure!(!set.contains("ea_set:"), "{set}");

    let out = scratch.join("out");
    fs::create_dir(&out)?;
    let said = fjord(&["get", "-r"], &image, &["/dir", text(&out)])?;
    let said = said.expect_code(&[INCOMPLETE])?.stderr;
    ensure!(said.contains("link: attribute user.x"), "{said}");
    ensure!(fs::read_link(out.join("dir/link"))? == Path::new("a"));
    fs::remove_dir_all(out.join("dir"))?;

    // The head of the extent tree.
    let requests = ["dir/bad", "dir/below/bad"].map(|name| format!("sif /{name} block[0] 0x5555"));
    image::debugfs_write(&image, &requests)?;
    let said = fjord(&["get", "-r"], &image, &["/dir", text(&out)])?;
    let said = said.expect_code(&[4])?.stderr;
    for told in ["dir/bad", "dir/below/bad", "2 entries were not copied"] {
        let line = said.lines().find(|line| line.contains(told)).unwrap_or_default();
        ensure!(line.starts_with(&format!("fjord: {}: ", image.display())), "{told}: {said}");
    }
    for name in ["dir/a", "dir/below/c", "dir/z"] {
        ensure!(fs::read_to_string(out.join(name))? == name, "{name}");
    }
    ensure!(fs::read_link(out.join("dir/link"))? == Path::new("a"));
    ensure!(!out.join("dir/bad").exists() && !out.join("dir/below/bad").exists());

    // A listing shows the others too: an inode of no type.
    image::debugfs_write(&image, &["sif /dir/z mode 0170000".into()])?;
    let said = fjord(&["ls", "-la"], &image, &["/dir"])?.expect_code(&[4])?;
    ensure!(
        said.stderr.contains("one damaged entry or part of a directory is not listed"),
        "{}",
        said.stderr
    );
    ensure!(said.stderr.starts_with(&format!("fjord: {}: /dir/z: ", image.display())), "{said:?}");
    let names: Vec<&str> =
        said.stdout.lines().filter_map(|line| line.split(' ').next_back()).collect();
    ensure!(names == [".", "..", "a", "bad", "below", "a"], "{names:?}");
    Ok(())
}

/// Letters that ls(1) has.
#[test]
fn ls_takes_the_letters_of_coreutils() -> Result<()> {
    let scratch = Scratch::in_memory("ls")?;
    let (image, file) = (scratch.join("image"), scratch.join("file"));
    fs::write(&file, vec![1; 1536])?;
    fjord(&["mkfs", "--size", "16M"], &image, &[])?.ok()?;
    fjord(&["put"], &image, &[text(&file), "/file"])?.ok()?;
    ensure!(fjord(&["ls", "-1"], &image, &[])?.ok()?.stdout == "file\nlost+found\n");
    for (letters, size) in [("-lah", " 1.5 KiB "), ("-la", " 1536 ")] {
        let listed = fjord(&["ls", letters], &image, &[])?.ok()?.stdout;
        let line = listed.lines().find(|line| line.ends_with(" file")).unwrap_or_default();
        ensure!(line.contains(size), "{letters}: {listed}");
        ensure!(listed.lines().any(|line| line.ends_with(" ..")), "{letters}: {listed}");
    }
    ensure!(fjord(&["ls", "--help"], &image, &[])?.ok()?.stdout.contains("human-readable"));
    Ok(())
}

/// A file with more names than ext4 allows: the further ones are those of a copy. The size has room for it.
#[test]
fn a_file_with_too_many_names_is_copied() -> Result<()> {
    const NAMES: u32 = 65_003;
    let scratch = Scratch::in_memory("links")?;
    let (tree, image) = (scratch.join("tree"), scratch.join("image"));
    fs::create_dir(&tree)?;
    fs::write(tree.join("n0"), vec![7; 3_000_000])?;
    for number in 1..NAMES {
        fs::hard_link(tree.join("n0"), tree.join(format!("n{number}")))?;
    }
    let mut mkfs = Command::new(env!("CARGO_BIN_EXE_fjord"));
    let said = tools::run(mkfs.arg("mkfs").arg("--from-dir").arg(&tree).arg(&image))?;
    let said = said.expect_code(&[6])?.stderr;
    ensure!(said.contains("65000 names"), "{said}");
    image::e2fsck_clean(&image)?;
    let mount = KernelMount::new(&image, "ro")?;
    let mut links = [0, 0];
    for number in 0..NAMES {
        let found = fs::metadata(mount.path().join(format!("n{number}")))?;
        ensure!(found.len() == 3_000_000, "n{number}: {found:?}");
        links[usize::from(found.nlink() == 3)] += 1;
    }
    ensure!(links == [65_000, 3], "{links:?}");
    mount.unmount()
}

/// Values that lie in inodes of their own are counted for the default size.
#[test]
fn attributes_in_inodes_of_their_own_fit_the_default_size() -> Result<()> {
    let scratch = Scratch::new("values")?;
    let (tree, image) = (scratch.join("tree"), scratch.join("image"));
    fs::create_dir(&tree)?;
    for number in 0..3000u32 {
        let (path, mut value) = (tree.join(format!("f{number}")), vec![7; 2900]);
        value[..4].copy_from_slice(&number.to_le_bytes());
        File::create(&path)?;
        rustix::fs::setxattr(&path, "user.large", &value, rustix::fs::XattrFlags::CREATE)?;
    }
    let mut mkfs = Command::new(env!("CARGO_BIN_EXE_fjord"));
    mkfs.args(["mkfs", "-q", "-b", "1024", "-O", "ea_inode", "--from-dir"]).arg(&tree);
    tools::run(mkfs.arg(&image))?.ok()?;
    image::e2fsck_clean(&image)?;
    let mount = KernelMount::new(&image, "ro")?;
    let linux = Manifest::from_directory(mount.path())?.without_lost_found();
    ensure!(linux.entries.len() == 3001, "{} entries", linux.entries.len());
    ensure!(linux.entries.values().filter(|entry| entry.xattrs.len() == 1).count() == 3000);
    mount.unmount()
}
