//! `fjord mv`, `cp`, `ln`, `chmod`, `chown`: what coreutils do in Linux's mount of the same image.

use std::{
    fs,
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
    ln file hard; ln -s file link; ln -s dir dirlink; ln -s nowhere dangling
    mkfifo pipe; mknod null c 1 3; truncate -s 5M holes; echo end >> holes
    chown 1000:1001 file; chown 5:6 dir dir/inner; chown -h 7:8 link
    chmod 4755 two; chmod 2775 dir; chmod 1777 other; chmod 700 closed; chmod 640 dir/inner
    setfattr -n user.x -v y file; setfacl -m u:9:rwx dir/inner
    cp -p two capable; setcap cap_net_raw+ep capable
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
    ])
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
    ])
}

#[test]
fn wrong_use_is_told() -> Result<()> {
    let pair = Pair::new("use")?;
    let before = fs::read(&pair.ours)?;
    for (line, code, word) in [
        ("mv /file", 2, "SOURCE"),
        ("cp /file", 2, "SOURCE"),
        ("ln /file", 2, "TARGET"),
        ("chmod 644", 2, "PATHS"),
        ("chmod 888 /file", 2, "octal"),
        ("chown : /file", 2, "owner"),
    ] {
        let said = pair.fjord(line)?.expect_code(&[code])?;
        ensure!(said.stderr.contains(word), "{line}: {said:?}");
    }
    ensure!(fs::read(&pair.ours)? == before, "a refused command changed the image");
    for (line, word) in [
        ("mv /dir /dir/sub/x", "into itself"),
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
