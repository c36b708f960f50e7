//! `fjord mv`, `cp`, `ln`, `chmod`, `chown`: what coreutils do in Linux's mount of the same image.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools::{self, Output},
};

/// Files, directories, links of all kinds, owners, modes, lists.
const TREE: &str = r#"
    cd "$0"
    mkdir -p dir/sub/deep other empty closed
    for name in file two dir/inner dir/sub/leaf other/inner; do echo "$name" > "$name"; done
    ln file hard; ln -s file link; ln -s dir dirlink; ln -s nowhere dangling; ln -s two single
    mkfifo pipe; mknod null c 1 3; truncate -s 5M holes; echo end >> holes
    chown 1000:1001 file; chown 5:6 dir dir/inner; chown -h 7:8 link
    chmod 4755 two; chmod 2775 dir; chmod 1777 other; chmod 700 closed; chmod 640 dir/inner
    setfattr -n user.x -v y file; setfacl -m u:9:rwx dir/inner
    cp -p two capable; setcap cap_net_raw+ep capable
    echo listed > listed; chmod 600 listed; setfacl -m u:9:rwx listed
    mkdir handing; chmod 2750 handing; chgrp 77 handing
"#;

/// An image with the tree, for fjord and for Linux.
struct Pair {
    _scratch: Scratch,
    ours: PathBuf,
    theirs: PathBuf,
}

impl Pair {
    fn new(name: &str) -> Result<Pair> {
        tools::require_root()?;
        tools::require(&["setfattr", "setfacl", "setcap"])?;
        let scratch = Scratch::new(name)?;
        let (tree, ours, theirs) =
            (scratch.join("tree"), scratch.join("ours"), scratch.join("theirs"));
        fs::create_dir(&tree)?;
        tools::run(Command::new("sh").args(["-e", "-c", TREE]).arg(&tree))?.ok()?;
        let mut mkfs = Command::new(env!("CARGO_BIN_EXE_fjord"));
        mkfs.args(["mkfs", "-q", "-b", "4096", "-s", "32M", "--from-dir"]).arg(&tree).arg(&ours);
        tools::run(&mut mkfs)?.ok()?;
        fs::copy(&ours, &theirs)?;
        Ok(Pair { _scratch: scratch, ours, theirs })
    }

    /// Runs one command line of coreutils, in which paths begin with a slash. `true` if it worked.
    fn fjord(&self, line: &str) -> Result<Output> {
        let mut words = line.split(' ');
        let mut command = Command::new("sh");
        command.args(["-c", r#"umask 027; exec "$0" "$@""#, env!("CARGO_BIN_EXE_fjord")]);
        command.args(words.next()).arg(&self.ours).args(words);
        tools::run(&mut command)
    }

    /// Runs all lines on both images and compares what came of them, line by line and at the end.
    fn compare(&self, lines: &[&str]) -> Result<()> {
        let mount = KernelMount::new(&self.theirs, "rw")?;
        for line in lines {
            let ours = self.fjord(line)?;
            let mut command = Command::new("sh");
            // Theirs are relative: what begins with a slash is the root of the image.
            let words: Vec<String> = line.split(' ').map(relative).collect();
            let script = format!("umask 027; cd \"$0\"; exec {}", words.join(" "));
            let theirs = tools::run(command.args(["-c", &script]).arg(mount.path()))?;
            let worked = |output: &Output| output.code == Some(0);
            ensure!(worked(&ours) == worked(&theirs), "{line}: {ours:?} but {theirs:?}");
        }
        mount.unmount()?;
        let (ours, theirs) = (seen(&self.ours)?, seen(&self.theirs)?);
        // Times of copies are those of the moment.
        let compare = Compare { atime: false, mtime: false, ..Compare::SAME_SCRIPT };
        theirs.diff(&ours, &compare).ok("coreutils", "fjord")
    }
}

fn relative(word: &str) -> String {
    match word.strip_prefix('/') {
        Some("") => ".".to_owned(),
        Some(rest) => format!("./{rest}"),
        None => word.to_owned(),
    }
}

fn seen(img: &Path) -> Result<Manifest> {
    image::e2fsck_clean(img)?;
    let mount = KernelMount::new(img, "ro")?;
    let found = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    Ok(found)
}

#[test]
fn mv_is_that_of_coreutils() -> Result<()> {
    Pair::new("mv")?.compare(&[
        "mv /file /renamed",
        "mv /renamed /dir",
        "mv /two /link /other",
        "mv /missing /x",
        "mv /missing /capable /empty",
        "mv /dir/inner /other",
        "mv -n /dir/sub/leaf /other/inner",
        "mv /empty /dir/new",
        "mv /closed /other/",
        "mv /dir /dir/sub/x",
        "mv /other /pipe",
        "mv /pipe /other",
        "mv /other/pipe /dir/sub",
        "mv /dir/sub /other",
        "mv /other/sub /dir",
        "mv /hard /dir/renamed",
        "mv /dangling /null /nowhere",
        "mv /dangling /gone/x",
        "mv /holes /holes",
        "mv /holes /newdir/",
        "mv /dirlink /moved",
        "mv /null /moved",
        "mv /dir/capable /dir/capable",
        "mv /other /other/sub",
    ])
}

#[test]
fn cp_is_that_of_coreutils() -> Result<()> {
    Pair::new("cp")?.compare(&[
        "cp /file /copy",
        "cp /link /followed",
        "cp /two /capable /other",
        "cp /file /two",
        "cp /dir /nodir",
        "cp -r /dir /tree",
        "cp -a /file /hard /link /pipe /null /dirlink /dangling /capable /holes /handing",
        "cp -a /dir /file /hard /link /pipe /null /dirlink /dangling /capable /holes /closed",
        "cp -p /capable /kept",
        "cp -r /link /dangling /handing",
        "cp /two /handing/new",
        "cp -r /other /handing",
        "cp -n /two /other/inner",
        "cp /file /file",
        "cp /missing /x",
        "cp /file /missing/x",
        "cp /file /missing/",
        "cp -a /dir /other",
        "cp /dir/sub/leaf /other",
        "cp /two /dir/sub /other",
        "cp -r /closed /file",
        "cp -a /dir/. /other",
        "cp -r /other/. /fresh",
        "cp /dir/. /fresh",
        "cp /two /single",
        "cp -a /other/inner /single",
        "cp /two /dangling",
        "cp /two /listed",
        "cp /capable /listed",
        "cp -a /pipe /single",
        "cp -r /missing /dir /handing",
        "cp -R /dir /again",
        "cp -rp /dir /keeping",
        "cp -n /two /closed/new",
    ])
}

/// A path that ends in a slash is that of a directory, not of a link to it.
#[test]
fn a_slash_at_the_end_is_that_of_coreutils() -> Result<()> {
    let pair = Pair::new("slash")?;
    // Here rm(1) would empty the directory and then fail.
    for line in ["rm -r /dirlink/", "rm -rf /dirlink/"] {
        let said = pair.fjord(line)?.expect_code(&[1])?.stderr;
        ensure!(said.contains("/dirlink/: is a symbolic link"), "{said}");
    }
    pair.compare(&[
        "cp -a /dirlink/ /backup",
        "cp -r /dirlink/ /two",
        "cp -a /dirlink/ /other",
        "cp -r /dirlink/. /closed",
        "cp /file/ /new",
        "cp -a /link/ /new",
        "cp -a /dangling/ /new",
        "cp /two /file/",
        "mv /dirlink/ /dir",
        "mv /dirlink/ /moved",
        "mv /file/ /moved",
        "mv /empty/ /moved",
        "rm /file/",
        "rm -f /file/",
        "rm -r /moved/",
        "chown -h 3:4 /dirlink/",
        "rm -r /dirlink",
    ])
}

#[test]
fn what_fails_does_not_stop_the_others() -> Result<()> {
    let pair = Pair::new("others")?;
    let said = pair.fjord("rm /nope /two /dir /single")?.expect_code(&[1])?.stderr;
    ensure!(said.contains("/nope: ") && said.contains("/dir: is a directory"), "{said}");
    let said = pair.fjord("mkdir /other /new /gone/x /newer")?.expect_code(&[1])?.stderr;
    ensure!(said.contains("/other: ") && said.contains("/gone"), "{said}");
    // The same lines again have no other outcome.
    Pair::new("others-compared")?.compare(&[
        "rm /nope /two /dir /single",
        "rm -f /nope /hard",
        "mkdir -m 755 /other /new /gone/x /newer",
        "mkdir -p -m 755 /file/x /new /newest",
    ])?;
    let names = pair.fjord("ls /")?.ok()?.stdout;
    ensure!(!names.contains("two") && !names.contains("single"), "{names}");
    ensure!(names.contains("new\n") && names.contains("newer\n"), "{names}");
    Ok(())
}

#[test]
fn ln_is_that_of_coreutils() -> Result<()> {
    Pair::new("ln")?.compare(&[
        "ln /file /more",
        "ln /file /dir",
        "ln /link /linklink",
        "ln /dir /hardlink",
        "ln /file /two",
        "ln -f /file /two",
        "ln -f /file /hard",
        "ln -s some/text /symbolic",
        "ln -s some/text /symbolic",
        "ln -sf other/text /symbolic",
        "ln -s text /dirlink",
        "ln -sfn text /dirlink",
        "ln -sf text /dir",
        "ln -s text /dir/sub",
        "ln -s a b /empty",
        "ln -s a b /file",
        "ln /missing /x",
        "ln /missing /two /other",
        "ln /file /missing/x",
    ])
}

#[test]
fn chmod_is_that_of_coreutils() -> Result<()> {
    Pair::new("chmod")?.compare(&[
        "chmod 600 /file",
        "chmod 750 /dir",
        "chmod 00755 /handing",
        "chmod u+x,go=r /link",
        "chmod -R u=rwX,go=rX /dir",
        "chmod +x /holes",
        "chmod a-s /two",
        "chmod a-x /capable",
        "chmod -w /holes",
        "chmod o=g /dir/inner",
        "chmod g+s,+t /empty",
        "chmod 777 /missing",
        "chmod 999 /file",
        "chmod u+q /file",
        "chmod -R 700 /missing /other /closed",
        "chmod +111 /file",
        "chmod =750 /dir/sub",
        "chmod u+1 /two",
        "chmod 640 /dangling",
        "chmod -R a+X /dirlink /dir",
        "chmod g=u /listed",
    ])
}

#[test]
fn chown_is_that_of_coreutils() -> Result<()> {
    Pair::new("chown")?.compare(&[
        "chown 10 /file",
        "chown 11:12 /two",
        "chown :13 /capable",
        "chown root: /hard",
        "chown -h 14:15 /link",
        "chown 16:17 /dirlink",
        "chown -R 18:root /dir /dirlink",
        "chown nobody-of-that-name /file",
        "chown 19 /missing /holes",
        "chown +20:+21 /pipe",
        "chown -R 22 /dangling /link",
        "chown 23 /dangling",
        "chown 4294967295 /file",
        "chown 24: /file",
        "chown 0: /handing",
    ])
}

/// A file that is replaced by `cp` or `ln -f` has its old content until the new one is there: what
/// opens it in the image has one of them, and its other names keep the old one.
#[test]
fn a_replaced_file_keeps_its_other_names() -> Result<()> {
    let pair = Pair::new("replaced")?;
    for line in ["cp /two /file", "ln -f /capable /dir/inner"] {
        pair.fjord(line)?.ok()?;
    }
    let cat =
        |path: &str| -> Result<String> { Ok(pair.fjord(&format!("cat {path}"))?.ok()?.stdout) };
    ensure!(cat("/file")? == "two\n" && cat("/hard")? == "file\n");
    ensure!(cat("/dir/inner")? == "two\n");
    // A link that leads through the root of the image, not of this machine.
    for line in ["ln -s /dir/sub/../sub/leaf /absolute", "cp /two /absolute"] {
        pair.fjord(line)?.ok()?;
    }
    ensure!(cat("/dir/sub/leaf")? == "two\n");
    // Where the copy has no room, the old file stays.
    let large = pair.ours.with_file_name("large");
    fs::write(&large, vec![b'x'; 12 << 20])?;
    let mut put = Command::new(env!("CARGO_BIN_EXE_fjord"));
    put.arg("put").args([&pair.ours, &large]).arg("/large");
    tools::run(&mut put)?.ok()?;
    let full = pair.fjord("cp /large /hard")?.expect_code(&[1])?;
    ensure!(full.stderr.contains("no space left"), "{full:?}");
    ensure!(cat("/hard")? == "file\n");
    let names = pair.fjord("ls /")?.ok()?.stdout;
    ensure!(!names.contains(".fjord"), "{names}");
    image::e2fsck_clean(&pair.ours).map(drop)
}

/// Times and holes, which the comparison with coreutils leaves out.
#[test]
fn an_archive_copy_keeps_times_and_holes() -> Result<()> {
    let pair = Pair::new("archive")?;
    pair.fjord("cp -a /holes /file /dir /link /null /other")?.ok()?;
    let mount = KernelMount::new(&pair.ours, "ro")?;
    let meta = |name: &str| fs::symlink_metadata(mount.path().join(name));
    for name in ["holes", "file", "dir", "dir/inner", "dir/sub", "link", "null"] {
        let (original, copy) = (meta(name)?, meta(&format!("other/{name}"))?);
        let times = |m: &fs::Metadata| (m.mtime(), m.mtime_nsec(), m.atime(), m.atime_nsec());
        ensure!(times(&original) == times(&copy), "{name}: {original:?} {copy:?}");
        ensure!(original.blocks() == copy.blocks() || original.is_dir(), "{name}");
    }
    mount.unmount()
}

/// Names in the image mean its own users, whatever this machine has.
#[test]
fn owners_are_those_of_the_image() -> Result<()> {
    let pair = Pair::new("names")?;
    let dir = pair.ours.parent().context("a directory")?;
    for (name, text) in [
        (
            "passwd",
            "root:x:0:0::/:/bin/sh\n# a line\nshort\nkeeper:x:4001:4002:::\nbad:x:many:0::\n",
        ),
        ("group", "wheel:x:4003:\nroot:x:4004:keeper\n"),
    ] {
        fs::write(dir.join(name), text)?;
        let mut put = Command::new(env!("CARGO_BIN_EXE_fjord"));
        put.arg("put").args([&pair.ours, &dir.join(name)]).arg("/");
        tools::run(&mut put)?.ok()?;
    }
    pair.fjord("chown 1:1 /two /pipe /null /other")?.ok()?;
    // Without them in /etc they are only files.
    ensure!(pair.fjord("chown keeper /two")?.code == Some(1));
    pair.fjord("mkdir /etc")?.ok()?;
    pair.fjord("mv /passwd /group /etc")?.ok()?;
    for line in
        ["chown keeper /two", "chown keeper: /pipe", "chown root:root /other", "chown :wheel /file"]
    {
        pair.fjord(line)?.ok()?;
    }
    for (line, words) in [
        ("chown daemon /file", "/etc/passwd of the image"),
        ("chown :daemon /file", "/etc/group of the image"),
        ("chown bad /file", "/etc/passwd of the image"),
        ("chown 7: /file", "give it"),
    ] {
        let said = pair.fjord(line)?.expect_code(&[1])?;
        ensure!(said.stderr.contains(words), "{line}: {said:?}");
    }
    let mount = KernelMount::new(&pair.ours, "ro")?;
    for (name, uid, gid) in
        [("two", 4001, 1), ("pipe", 4001, 4002), ("other", 0, 4004), ("file", 1000, 4003)]
    {
        let meta = fs::symlink_metadata(mount.path().join(name))?;
        ensure!((meta.uid(), meta.gid()) == (uid, gid), "{name}: {meta:?}");
    }
    mount.unmount()
}

/// In a damaged image a directory may lie in itself; walks end all the same.
#[test]
fn a_directory_in_itself_is_reported() -> Result<()> {
    let pair = Pair::new("loop")?;
    image::debugfs_write(&pair.ours, &["link /dir /dir/sub/loop".to_owned()])?;
    for line in [
        "chmod -R 700 /dir",
        "chown -R 1 /dir",
        "rm -r /dir",
        "cp -r /dir /new",
        "mv /dir /dir/sub/x",
    ] {
        let said = pair.fjord(line)?.expect_code(&[1, 2, 4])?;
        ensure!(!said.stderr.is_empty(), "{line}: {said:?}");
    }
    let said = pair.fjord("chmod -R 700 /dir")?.expect_code(&[4])?;
    ensure!(said.stderr.contains("/dir/sub/loop") && said.stderr.contains("e2fsck"), "{said:?}");
    Ok(())
}

#[test]
fn wrong_use_is_told() -> Result<()> {
    let pair = Pair::new("use")?;
    let before = fs::read(&pair.ours)?;
    for (line, code, word) in [
        ("mv /file", 2, "fjord mv <IMAGE> <SOURCE>... <TARGET>"),
        ("cp /file", 2, "fjord cp <IMAGE> <SOURCE>... <TARGET>"),
        ("ln /file", 2, "fjord ln <IMAGE> <TARGET>... <LINK>"),
        ("chmod 644", 2, "PATHS"),
        ("chmod 888 /file", 2, "octal"),
        ("chown : /file", 2, "owner"),
    ] {
        let said = pair.fjord(line)?.expect_code(&[code])?;
        ensure!(said.stderr.contains(word), "{line}: {said:?}");
    }
    ensure!(fs::read(&pair.ours)? == before, "a refused command changed the image");
    for (line, word) in [
        ("mv /dir /dir/sub/x", "/dir, to /dir/sub/x: a directory cannot be moved into itself"),
        ("mv /missing /two /x", "/x: is not a directory"),
        ("mv /missing /x", "/missing"),
        ("mv /other /dir/inner/x", "/dir/inner/x: its parent"),
        ("chmod -R 600 /missing", "/missing"),
        ("cp /two /dangling", "/dangling"),
        ("cp -r /dir/.. /other", "name"),
        ("cp -r /dir /dir/sub/x", "into itself"),
        ("cp /dir /x", "-r"),
        ("ln /dir /x", "-s"),
        ("ln /file /two", "-f"),
        ("mv /file /missing/", "slash"),
    ] {
        let said = pair.fjord(line)?.expect_code(&[1, 2])?;
        ensure!(said.stderr.contains(word), "{line}: {said:?}");
    }
    let help = tools::run(Command::new(env!("CARGO_BIN_EXE_fjord")).args(["chown", "--help"]))?;
    ensure!(help.ok()?.stdout.contains("Examples:"));
    image::e2fsck_clean(&pair.ours).map(drop).context("after refused commands")
}

/// With SOURCE_DATE_EPOCH equal changes of equal images give equal bytes, at any time.
#[test]
fn edits_are_repeated_byte_by_byte() -> Result<()> {
    let scratch = Scratch::new("repeat")?;
    let source = scratch.join("source");
    fs::create_dir_all(source.join("sub/deep"))?;
    for number in 0..200 {
        fs::write(source.join(format!("sub/file-{number}")), vec![number as u8; 700 * number])?;
    }
    std::os::unix::fs::symlink("sub", source.join("link"))?;
    let script = "fjord put -r $IMAGE source /copy; fjord mkdir -p $IMAGE /a/b; fjord cp -r $IMAGE /copy /a/b; \
                  fjord mv $IMAGE /a/b/copy/sub/file-7 /a/seven; fjord rm -r $IMAGE /copy/sub/deep /copy/sub/file-9; \
                  fjord chmod $IMAGE 640 /copy/sub/file-8; fjord chown $IMAGE 7:8 /copy; \
                  fjord ln $IMAGE /a/seven /a/eight; echo text | fjord put $IMAGE - /from-stdin";
    let edited = |name: &str, made: &Path, epoch: Option<&str>| -> Result<Vec<u8>> {
        let img = scratch.join(name);
        image::copy_sparse(made, &img)?;
        let fjord = env!("CARGO_BIN_EXE_fjord");
        let script = format!("set -e; fjord() {{ '{fjord}' \"$@\"; }}; {script}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).current_dir(scratch.path()).env("IMAGE", name);
        epoch.map(|epoch| shell.env("SOURCE_DATE_EPOCH", epoch));
        tools::run(&mut shell)?.ok()?;
        image::e2fsck_clean(&img)?;
        Ok(fs::read(&img)?)
    };
    for features in ["", "metadata_csum,orphan_file", "fast_commit,inline_data", "^has_journal"] {
        let made = scratch.join("made");
        let program = env!("CARGO_BIN_EXE_fjord");
        let mut mkfs = Command::new(program);
        mkfs.args(["mkfs", "-q", "--force", "--size", "64M"]);
        if features == "^has_journal" {
            mkfs.args(["--ijournal", "none"]);
        }
        tools::run(mkfs.args(["-O", features]).arg(&made))?.ok()?;
        let one = edited("one", &made, Some("1700000000"))?;
        // The clock and the access times of the source are others.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        fs::read(source.join("sub/file-3"))?;
        let two = edited("two", &made, Some("1700000000"))?;
        let others = one.iter().zip(&two).filter(|(a, b)| a != b).count();
        ensure!(others == 0, "{features}: {others} bytes differ");
        // The comparison would see a clock.
        let plain = edited("three", &made, None)?;
        ensure!(plain != one, "{features}: without the variable too");
    }
    Ok(())
}
