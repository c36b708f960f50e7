//! `fjord mkfs` with contents: sizes that are worked out, what is left out, and no root.

use std::{
    fs::{self, File, Permissions},
    io::Read,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::{self, Scratch},
    manifest::Compare,
    tools,
};

/// What nobody can be taken for on every machine.
const NOBODY: u32 = 65534;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

/// Runs a command that must succeed and gives what it printed.
fn run(command: &mut Command) -> Result<String> {
    Ok(tools::run(command)?.ok()?.stdout)
}

fn mkfs(args: &[&str], img: &Path) -> Result<String> {
    run(Command::new(program()).arg("mkfs").args(args).arg(img))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// A tree of all sorts that needs no privilege: many small files, a large one, holes, links.
fn make_tree(at: &Path) -> Result<()> {
    fs::create_dir_all(at.join("deep/er/still"))?;
    // Every image has it; so that the links of the root directory are as many.
    fs::create_dir(at.join("lost+found"))?;
    for index in 0..1500u32 {
        fs::write(at.join(format!("deep/{index}")), vec![b'x'; index as usize % 700])?;
    }
    fs::write(at.join("large"), vec![0x5a; 9_000_001])?;
    fs::hard_link(at.join("large"), at.join("deep/er/again"))?;
    symlink("../large", at.join("deep/fast"))?;
    symlink("far/".repeat(100), at.join("deep/slow"))?;
    let holes = File::create(at.join("holes"))?;
    holes.write_all_at(b"start", 0)?;
    holes.write_all_at(b"middle", 30 << 20)?;
    holes.set_len(1 << 30)?;
    fs::set_permissions(at.join("deep/er"), Permissions::from_mode(0o2750))?;
    Ok(())
}

/// What Linux sees in the image must be the tree.
fn same_for_linux(tree: &Path, img: &Path) -> Result<()> {
    // Reading the source moves its access times.
    let compare = Compare { atime: false, ..Compare::SAME_SCRIPT };
    image::same_on_linux(tree, img, &compare)
}

fn tar(tree: &Path, to: &Path) -> Result<()> {
    let mut tar = tools::command("tar")?;
    tar.args(["-c", "--sparse", "--format=pax", "-f"]).arg(to).arg("-C").arg(tree).arg(".");
    run(&mut tar).map(drop)
}

#[test]
fn sizes_are_worked_out_and_not_wasted() -> Result<()> {
    let scratch = Scratch::new("contents")?;
    let (tree, archive) = (scratch.join("tree"), scratch.join("tree.tar"));
    make_tree(&tree)?;
    tar(&tree, &archive)?;
    let sources = [["--from-dir", text(&tree)], ["--from-tar", text(&archive)]];
    for source in sources {
        for more in [&[][..], &["-b", "4096"], &["-O", "^extent,^64bit"], &["-J", "none"]] {
            let img = scratch.join("image");
            mkfs(&[&source[..], more].concat(), &img)?;
            let size = fs::metadata(&img)?.len();
            ensure!(size < 64 << 20, "{source:?} {more:?}: {size} bytes for 10 MB of contents");
            same_for_linux(&tree, &img).with_context(|| format!("{source:?} {more:?}"))?;
            fs::remove_file(&img)?;
        }
    }
    Ok(())
}

/// More files than the usual ratio has inodes for, and nothing at all.
#[test]
fn inodes_follow_the_contents() -> Result<()> {
    let scratch = Scratch::new("contents")?;
    let (tree, img) = (scratch.join("tree"), scratch.join("image"));
    fs::create_dir(&tree)?;
    mkfs(&["--from-dir", text(&tree)], &img)?;
    image::e2fsck_clean(&img)?;
    fs::create_dir(tree.join("lost+found"))?;
    for index in 0..20_000 {
        File::create(tree.join(format!("{index:06}")))?;
    }
    mkfs(&["--force", "--size", "32M", "--from-dir", text(&tree)], &img)?;
    ensure!(fs::metadata(&img)?.len() == 32 << 20, "the size that was asked for is kept");
    same_for_linux(&tree, &img)?;
    fs::remove_file(&img)?;
    mkfs(&["--from-dir", text(&tree)], &img)?;
    same_for_linux(&tree, &img)
}

#[test]
fn a_stream_has_the_size_it_needs_or_is_given() -> Result<()> {
    let scratch = Scratch::new("contents")?;
    let (tree, archive, img) =
        (scratch.join("tree"), scratch.join("tree.tar"), scratch.join("image"));
    make_tree(&tree)?;
    tar(&tree, &archive)?;
    let stream = |args: &[&str]| -> Result<(Option<i32>, String)> {
        let mut command = Command::new(program());
        command.args(["mkfs", "--from-tar", "-"]).args(args).arg(&img);
        let done = command.stdin(Stdio::from(File::open(&archive)?)).output()?;
        Ok((done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned()))
    };
    let (code, said) = stream(&[])?;
    ensure!(code == Some(0), "{code:?} {said}");
    same_for_linux(&tree, &img)?;
    fs::remove_file(&img)?;
    let (code, said) = stream(&["--size", "9M"])?;
    ensure!(code == Some(1) && said.contains("larger"), "{code:?} {said}");
    ensure!(!img.exists(), "half an image is left behind");
    let (code, said) = stream(&["--size", "48M"])?;
    ensure!(code == Some(0), "{code:?} {said}");
    same_for_linux(&tree, &img)
}

#[test]
fn what_is_left_out_is_told() -> Result<()> {
    let scratch = Scratch::new("contents")?;
    let (tree, img, archive) =
        (scratch.join("tree"), scratch.join("image"), scratch.join("tree.tar"));
    fs::create_dir(&tree)?;
    fs::write(tree.join("file"), b"content")?;
    // A record that fjord does not know.
    let mut tar = tools::command("tar")?;
    tar.args(["-c", "--format=pax", "--pax-option=VENDOR.thing:=1", "-f"]).arg(&archive);
    run(tar.arg("-C").arg(&tree).arg("."))?;
    let mut command = Command::new(program());
    let done = tools::run(command.args(["mkfs", "--from-tar"]).arg(&archive).arg(&img))?.ok()?;
    ensure!(done.stderr.contains("left out: ") && done.stderr.contains("VENDOR.thing"), "{done:?}");
    let told = mkfs(&["--json", "--force", "--from-tar", text(&archive)], &img)?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    let skipped = told["contents"]["skipped"].as_array().context("a list")?;
    ensure!(skipped.len() == 2 && told["contents"]["bytes"] == 7, "{told}");
    Ok(())
}

/// Without root, from a directory and a tar file of the caller's own.
#[test]
fn nobody_makes_images() -> Result<()> {
    tools::usual_umask();
    // Where others may not be let in, the checkout may be.
    let scratch = Scratch::in_memory("contents")?;
    let (tree, archive) = (scratch.join("tree"), scratch.join("tree.tar"));
    let theirs: PathBuf = scratch.join("theirs");
    fs::create_dir(&theirs)?;
    std::os::unix::fs::chown(&theirs, Some(NOBODY), Some(NOBODY))?;
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755))?;
    make_tree(&tree)?;
    fs::set_permissions(tree.join("deep/er"), Permissions::from_mode(0o755))?;
    tar(&tree, &archive)?;
    let fjord = scratch.join("fjord");
    fs::copy(program(), &fjord)?;
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        let id = NOBODY.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(&fjord).args(args);
        tools::run(&mut command)
    };
    for source in [["--from-dir", text(&tree)], ["--from-tar", text(&archive)]] {
        let img = theirs.join("image");
        as_nobody(&[&["mkfs", "--force"], &source[..], &[text(&img)]].concat())?.ok()?;
        ensure!(fs::metadata(&img)?.uid() == NOBODY);
        same_for_linux(&tree, &img)?;
        let stat = image::debugfs(&img, "stat /deep/er/again")?;
        ensure!(stat.contains("User:     0") && stat.contains("Links: 2"), "{stat}");
    }
    // What nobody may not read is named, and no image is left.
    fs::set_permissions(tree.join("large"), Permissions::from_mode(0o600))?;
    let img = theirs.join("other");
    let refused = as_nobody(&["mkfs", "--from-dir", text(&tree), text(&img)])?.expect_code(&[1])?;
    ensure!(refused.stderr.contains("/large") || refused.stderr.contains("again"), "{refused:?}");
    ensure!(!img.exists(), "an image is left behind");
    Ok(())
}

#[test]
fn sources_that_cannot_be_are_refused() -> Result<()> {
    let scratch = Scratch::new("contents")?;
    let img = scratch.join("image");
    let refused = |args: &[&str], code: i32| -> Result<String> {
        let mut command = Command::new(program());
        let done = tools::run(command.arg("mkfs").args(args).arg(&img))?.expect_code(&[code])?;
        ensure!(!img.exists(), "{args:?}: an image is left behind");
        Ok(done.stderr)
    };
    let (missing, pipe, junk) = (scratch.join("none"), scratch.join("pipe"), scratch.join("junk"));
    let said = refused(&["--from-dir", text(&missing)], 1)?;
    ensure!(said.contains(text(&missing)), "{said}");
    refused(&["--from-tar", text(&missing)], 1)?;
    run(Command::new("mkfifo").arg(&pipe))?;
    // It is not waited for: opening it would hang.
    let said = refused(&["--from-tar", text(&pipe)], 2)?;
    ensure!(said.contains("standard input"), "{said}");
    let mut noise = vec![0; 4096];
    File::open("/dev/urandom")?.read_exact(&mut noise)?;
    fs::write(&junk, &noise)?;
    let said = refused(&["--from-tar", text(&junk)], 1)?;
    ensure!(said.contains("tar"), "{said}");
    refused(&["--from-tar", text(&junk), "--from-dir", text(scratch.path())], 2)?;
    Ok(())
}
