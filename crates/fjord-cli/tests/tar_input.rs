//! `fjord mkfs --from-tar`: streams on standard input, compressed ones, layers.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools,
};

fn mkfs() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fjord"));
    command.arg("mkfs");
    command
}

fn make_tree(at: &Path) -> Result<()> {
    fs::create_dir_all(at.join("dir/sub"))?;
    fs::create_dir(at.join("lost+found"))?;
    fs::write(at.join("dir/large"), fjord_testkit::rng::pattern_vec(5, 0, 3_000_000))?;
    for index in 0..300 {
        fs::write(at.join(format!("dir/sub/{index}")), format!("{index}").repeat(index))?;
    }
    fs::hard_link(at.join("dir/large"), at.join("dir/sub/again"))?;
    symlink("../large", at.join("dir/sub/link"))?;
    Ok(())
}

/// Makes a tar stream, through a filter when one is given.
fn tar(tree: &Path, to: &Path, filter: &[&str]) -> Result<()> {
    let mut tar = tools::command("tar")?;
    tar.args(["-c", "--format=pax"]).args(filter).arg("-f").arg(to).arg("-C").arg(tree).arg(".");
    tools::run(&mut tar)?.ok().map(drop)
}

/// What Linux sees in the image must be the tree.
fn same_for_linux(tree: &Path, img: &Path) -> Result<()> {
    // Reading the source moves its access times.
    let compare = Compare { atime: false, ..Compare::SAME_SCRIPT };
    image::same_on_linux(tree, img, &compare)
}

/// Runs it with these bytes coming through a pipe.
fn piped(command: &mut Command, bytes: &[u8]) -> Result<Output> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().context("piped")?;
    let bytes = bytes.to_vec();
    // Who refuses a stream does not read all of it.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&bytes)));
    let done = child.wait_with_output()?;
    ensure!(writer.join().is_ok());
    Ok(done)
}

fn succeeded(done: &Output) -> Result<()> {
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{}: {said}", done.status);
    Ok(())
}

fn refused(done: &Output, code: i32, told: &[&str]) -> Result<()> {
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.code() == Some(code), "{}: {said}", done.status);
    ensure!(told.iter().all(|part| said.contains(part)), "{said}");
    Ok(())
}

/// What can seek is measured where it is: nothing is kept, and reading starts where it stands.
#[test]
fn a_file_on_standard_input_needs_no_size() -> Result<()> {
    let scratch = Scratch::in_memory("tar-input")?;
    let (tree, archive, img) = (scratch.join("tree"), scratch.join("tar"), scratch.join("image"));
    make_tree(&tree)?;
    for (filter, start) in [(&[][..], 0), (&["--gzip"], 0), (&[], 1000)] {
        tar(&tree, &archive, filter)?;
        let bytes = fs::read(&archive)?;
        fs::write(&archive, [&vec![b'#'; start], &bytes[..]].concat())?;
        let mut stdin = File::open(&archive)?;
        stdin.seek(SeekFrom::Start(start as u64))?;
        let mut command = mkfs();
        // Temporary files cannot be made.
        command.args(["--force", "--from-tar", "-"]).arg(&img).env("TMPDIR", "/nonexistent");
        succeeded(&command.stdin(Stdio::from(stdin)).output()?)?;
        same_for_linux(&tree, &img)?;
        let size = fs::metadata(&img)?.len();
        ensure!(size < 24 << 20, "{size} bytes for 3 MB of contents");
        fs::remove_file(&img)?;
    }
    Ok(())
}

#[test]
fn a_pipe_needs_no_size() -> Result<()> {
    let scratch = Scratch::in_memory("tar-input")?;
    let (tree, archive, img) = (scratch.join("tree"), scratch.join("tar"), scratch.join("image"));
    let spool = scratch.join("spool");
    fs::create_dir(&spool)?;
    make_tree(&tree)?;
    for filter in ["--no-auto-compress", "--gzip", "--zstd", "--xz"] {
        tar(&tree, &archive, &[filter])?;
        let bytes = fs::read(&archive)?;
        let mut command = mkfs();
        command.args(["--from-tar", "-"]).arg(&img).env("TMPDIR", &spool);
        succeeded(&piped(&mut command, &bytes)?).context(filter)?;
        same_for_linux(&tree, &img).context(filter)?;
        let size = fs::metadata(&img)?.len();
        ensure!(size < 24 << 20, "{size} bytes for 3 MB of contents");
        ensure!(fs::read_dir(&spool)?.next().is_none(), "something is left in TMPDIR");
        fs::remove_file(&img)?;
        // The file by its name.
        succeeded(&mkfs().arg("--from-tar").arg(&archive).arg(&img).output()?).context(filter)?;
        same_for_linux(&tree, &img).context(filter)?;
        fs::remove_file(&img)?;
        // A pipe by a name that the shell gives it.
        let mut bash = Command::new("bash");
        bash.args([
            "-c",
            r#"exec "$0" mkfs --from-tar <(cat "$1") "$2""#,
            env!("CARGO_BIN_EXE_fjord"),
        ]);
        tools::run(bash.arg(&archive).arg(&img))?.ok().context(filter)?;
        same_for_linux(&tree, &img).context(filter)?;
        fs::remove_file(&img)?;
        // A pipe of known size is not kept.
        let mut command = mkfs();
        command.args(["--size", "32M", "--from-tar", "-"]).arg(&img).env("TMPDIR", "/nonexistent");
        succeeded(&piped(&mut command, &bytes)?).context(filter)?;
        same_for_linux(&tree, &img).context(filter)?;
        fs::remove_file(&img)?;
    }
    Ok(())
}

#[test]
fn what_cannot_be_read_leaves_no_image_and_says_why() -> Result<()> {
    let scratch = Scratch::in_memory("tar-input")?;
    let (tree, archive, img) = (scratch.join("tree"), scratch.join("tar"), scratch.join("image"));
    make_tree(&tree)?;
    tar(&tree, &archive, &["--zstd"])?;
    let bytes = fs::read(&archive)?;
    let from_stdin = || {
        let mut command = mkfs();
        command.args(["--from-tar", "-"]).arg(&img);
        command
    };
    let done = piped(from_stdin().env("TMPDIR", "/nonexistent"), &bytes)?;
    refused(&done, 1, &["standard input: cannot keep the stream in /nonexistent", "--size"])?;
    let done = piped(&mut from_stdin(), &bytes[..bytes.len() / 2])?;
    refused(&done, 1, &["standard input: the zstd stream ends early"])?;
    let done = piped(&mut from_stdin(), &[&bytes[..], b"junk"].concat())?;
    refused(&done, 1, &["other data follow the end of the zstd stream"])?;
    refused(&piped(&mut from_stdin(), b"")?, 1, &["standard input: the stream is empty"])?;
    let done = piped(&mut from_stdin(), b"BZh91AY&SY and so on")?;
    refused(&done, 1, &["compressed with bzip2", "bzip2 -dc FILE | fjord mkfs --from-tar -"])?;
    let twice = mkfs().args(["--from-tar", "-", "--from-tar", "-"]).arg(&img).output()?;
    refused(&twice, 2, &["only once"])?;
    refused(&mkfs().arg("--oci").arg(&img).output()?, 2, &["--from-tar"])?;
    ensure!(!img.exists(), "an image is left behind");
    // Where the disk for temporary files is full.
    let small = scratch.join("small");
    fs::create_dir(&small)?;
    tools::run(
        tools::command("mount")?.args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&small),
    )?
    .ok()?;
    let done = piped(from_stdin().env("TMPDIR", &small), &bytes);
    tools::run(tools::command("umount")?.arg(&small))?.ok()?;
    refused(&done?, 1, &["cannot keep the stream", "No space left", "TMPDIR"])?;
    ensure!(!img.exists(), "an image is left behind");
    Ok(())
}

/// Several files are layers; one is when that is said.
#[test]
fn layers_go_one_above_the_other() -> Result<()> {
    let scratch = Scratch::in_memory("tar-input")?;
    let img = scratch.join("image");
    let layer = |name: &str, filter: &str, files: &[(&str, &str)]| -> Result<()> {
        let tree = scratch.join("layer-tree");
        fs::create_dir(&tree)?;
        for (path, content) in files {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().context("a directory")?)?;
            fs::write(path, content)?;
        }
        tar(&tree, &scratch.join(name), &[filter])?;
        Ok(fs::remove_dir_all(tree)?)
    };
    layer("base", "--gzip", &[("etc/a", "1"), ("etc/b", "1"), ("opt/x/y", "1"), ("same", "1")])?;
    layer("app", "--zstd", &[("etc/.wh.a", ""), ("opt/x/.wh..wh..opq", ""), ("same", "2")])?;
    layer("top", "--xz", &[("opt/x/z", "3"), (".wh.same", "")])?;
    let names = || -> Result<Vec<String>> {
        image::e2fsck_clean(&img)?;
        let mount = KernelMount::new(&img, "ro")?;
        let found = Manifest::from_directory(mount.path())?.without_lost_found();
        mount.unmount()?;
        let names = found.entries.keys().map(|name| String::from_utf8_lossy(name).into_owned());
        Ok(names.filter(|name| !name.is_empty()).collect())
    };
    let path = |name: &str| scratch.join(name);
    let mut command = mkfs();
    command.arg("--from-tar").arg(path("base")).arg("--from-tar").arg(path("app"));
    // The last through a pipe.
    let top = fs::read(path("top"))?;
    succeeded(&piped(command.args(["--from-tar", "-"]).arg(&img), &top)?)?;
    ensure!(names()? == ["etc", "etc/b", "opt", "opt/x", "opt/x/z"], "{:?}", names()?);
    // One alone: its whiteouts are files, or nothing.
    succeeded(&mkfs().arg("--force").arg("--from-tar").arg(path("app")).arg(&img).output()?)?;
    ensure!(names()?.contains(&"etc/.wh.a".to_owned()), "{:?}", names()?);
    let mut command = mkfs();
    succeeded(
        &command.args(["--force", "--oci", "--from-tar"]).arg(path("app")).arg(&img).output()?,
    )?;
    ensure!(names()? == ["etc", "opt", "opt/x", "same"], "{:?}", names()?);
    // As mke2fs takes it, too.
    let mut command = mkfs();
    let d = command.args(["--force", "--oci", "-d"]).arg(path("app"));
    succeeded(&d.arg(&img).output()?)?;
    ensure!(names()? == ["etc", "opt", "opt/x", "same"], "{:?}", names()?);
    let mut command = mkfs();
    let dir = command.args(["--force", "--oci", "-d"]).arg(scratch.path());
    refused(&dir.arg(&img).output()?, 2, &["--oci", "tar file"])?;
    Ok(())
}

/// A name that is kept gets the content of an excluded member, as from a directory.
#[test]
fn hard_links_to_excluded_members_are_files() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::in_memory("tar-excluded")?;
    let (tree, archive, img) = (scratch.join("tree"), scratch.join("tar"), scratch.join("image"));
    let from_dir = scratch.join("from-dir");
    fs::create_dir_all(tree.join("a/cache"))?;
    fs::create_dir(tree.join("z"))?;
    fs::write(tree.join("a/cache/large"), fjord_testkit::rng::pattern_vec(7, 0, 9_000_000))?;
    fs::write(tree.join("a/cache/alone"), vec![1; 20 << 20])?;
    symlink("target", tree.join("a/cache/link"))?;
    let script = r#"
        cd "$1"; chmod 4751 a/cache/large; chown 12:34 a/cache/large; mkfifo -m 600 a/cache/pipe
        ln a/cache/large z/one; ln a/cache/large z/two; ln a/cache/link z/link; ln a/cache/pipe z/pipe
        ln a/cache/large a/cache/three
    "#;
    tools::run(Command::new("sh").args(["-e", "-c", script, "sh"]).arg(&tree))?.ok()?;
    tar(&tree, &archive, &["--sort=name"])?;
    let bytes = fs::read(&archive)?;
    let options = ["--force", "--exclude", "cache/"];
    succeeded(&mkfs().args(options).arg("--from-dir").arg(&tree).arg(&from_dir).output()?)?;
    let seen = |img: &Path| -> Result<Manifest> {
        image::e2fsck_clean(img)?;
        let mount = KernelMount::new(img, "ro")?;
        let found = Manifest::from_directory(mount.path())?.without_lost_found();
        mount.unmount()?;
        Ok(found)
    };
    let expected = seen(&from_dir)?;
    ensure!(expected.entries.contains_key(&b"z/two"[..]), "{:?}", expected.entries.keys());
    let compare = Compare { atime: false, ..Compare::SAME_SCRIPT };
    let from_tar = |more: &[&str]| {
        let mut command = mkfs();
        command.args(options).args(more).args(["--from-tar", "-"]).arg(&img);
        command
    };
    let mut reproduced = Vec::new();
    for more in [&[][..], &["-O", "orphan_file"], &["--reproducible"], &["--oci"], &["--shrink"]] {
        // A file, and a pipe that is stored.
        for is_pipe in [false, true] {
            let mut command = from_tar(more);
            let done = match is_pipe {
                true => piped(&mut command, &bytes)?,
                false => command.stdin(Stdio::from(File::open(&archive)?)).output()?,
            };
            succeeded(&done)?;
            let same = expected.diff(&seen(&img)?, &compare);
            same.ok("from the directory", "from the tar").with_context(|| format!("{more:?}"))?;
            let size = fs::metadata(&img)?.len();
            ensure!(size < 24 << 20, "{size} bytes for 9 MB of contents");
            if more.contains(&"--reproducible") {
                reproduced.push(fs::read(&img)?);
            }
        }
    }
    ensure!(reproduced[0] == reproduced[1], "the image is another one");
    // Passed by already.
    let done = piped(&mut from_tar(&["--size", "40M"]), &bytes)?;
    refused(&done, 1, &["z/", "a hard link to", "a/cache/", "which is excluded", "a file"])
}

/// What ext4 cannot hold is refused with the limit and what to do.
#[test]
fn limits_are_named() -> Result<()> {
    let scratch = Scratch::new("limits")?;
    let made = scratch.join("made.tar");
    let cases = [
        ("name", "tarfile.TarInfo('n' * 300)", "255 bytes at most: rename it"),
        (
            "device",
            "entry('dev', type=tarfile.CHRTYPE, devmajor=5000, devminor=3)",
            "at most 4095, 1048575",
        ),
        (
            "link",
            "entry('l', type=tarfile.SYMTYPE, linkname='x' * 5000)",
            "a block of 4096 bytes; exclude it",
        ),
        (
            "size",
            "entry('big', pax_headers={'GNU.sparse.major': '1', 'GNU.sparse.minor': '0', \
             'GNU.sparse.name': 'big', 'GNU.sparse.realsize': str(20 << 40)}, size=512)",
            "4,294,967,295 blocks at most",
        ),
    ];
    for (what, entry, wanted) in cases {
        let script = format!(
            "import io, sys, tarfile\n\
             def entry(name, **fields):\n\
             \x20   made = tarfile.TarInfo(name)\n\
             \x20   for field, value in fields.items(): setattr(made, field, value)\n\
             \x20   return made\n\
             made = {entry}\n\
             with tarfile.open(sys.argv[1], 'w', format=tarfile.PAX_FORMAT) as out:\n\
             \x20   out.addfile(made, io.BytesIO(b'1\\n0\\n0\\n'.ljust(512, b'\\0')))\n"
        );
        tools::run(tools::command("python3")?.args(["-c", &script]).arg(&made))?.ok()?;
        let said = mkfs()
            .args(["-q", "--force", "--size", "32M", "--from-tar"])
            .arg(&made)
            .arg(scratch.join("img"))
            .output()?;
        let stderr = String::from_utf8_lossy(&said.stderr);
        ensure!(said.status.code() == Some(1) && stderr.contains(wanted), "{what}: {stderr}");
    }
    Ok(())
}
