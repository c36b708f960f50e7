//! `fjord mkfs` over what is there, and from contents: the old image stays until the new one is
//! complete, nothing else is written over, sizes and blocks fit.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools::{self, Output},
};

const FAILURE: i32 = 1;
const USAGE: i32 = 2;
const INCOMPLETE: i32 = 6;
const UUID: &str = "11111111-2222-3333-4444-555555555555";
/// What nobody can be taken for on every machine.
const NOBODY: u32 = 65534;

fn fjord(args: &[&str]) -> Result<Output> {
    tools::run(Command::new(env!("CARGO_BIN_EXE_fjord")).args(args))
}

fn mkfs(args: &[&str], img: &Path) -> Result<Output> {
    fjord(&[&["mkfs"], args, &[text(img)]].concat())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

fn shell(script: &str, args: &[&Path]) -> Result<String> {
    let mut command = Command::new("sh");
    command.args(["-e", "-c", script, "sh"]).args(args);
    Ok(tools::run(&mut command)?.ok()?.stdout)
}

/// What Linux sees in the image must be the tree.
fn same_for_linux(tree: &Path, img: &Path) -> Result<()> {
    // Reading the source moves its access times; the root of an image has one directory more.
    let compare = Compare { atime: false, links: false, ..Compare::SAME_SCRIPT };
    image::same_on_linux(tree, img, &compare)
}

fn make_tree(at: &Path, count: u32, bytes: usize) -> Result<()> {
    fs::create_dir_all(at)?;
    for index in 0..count {
        fs::write(at.join(index.to_string()), vec![index as u8; bytes])?;
    }
    Ok(())
}

fn field(img: &Path, name: &str) -> Result<String> {
    let dump = tools::run(tools::command("dumpe2fs")?.arg("-h").arg(img))?.ok()?.stdout;
    let line = dump.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.with_context(|| format!("dumpe2fs says no {name}"))?.trim().to_owned())
}

#[test]
fn a_rebuilt_image_has_the_size_that_its_contents_need() -> Result<()> {
    let scratch = Scratch::new("rebuilt")?;
    let (tree, img) = (scratch.join("tree"), scratch.join("image"));
    make_tree(&tree, 10, 1 << 20)?;
    mkfs(&["--from-dir", text(&tree)], &img)?.ok()?;
    let small = fs::metadata(&img)?;
    fs::set_permissions(&img, Permissions::from_mode(0o640))?;
    std::os::unix::fs::chown(&img, Some(5), Some(6))?;
    // By a link, which stays one.
    let link = scratch.join("link");
    symlink("image", &link)?;
    make_tree(&tree, 60, 1 << 20)?;
    mkfs(&["--force", "--from-dir", text(&tree)], &link)?.ok()?;
    same_for_linux(&tree, &img)?;
    let large = fs::metadata(&img)?;
    ensure!(large.len() > small.len() + (40 << 20), "{} bytes", large.len());
    ensure!((large.uid(), large.gid(), large.mode() & 0o7777) == (5, 6, 0o640), "{large:?}");
    ensure!(fs::symlink_metadata(&link)?.is_symlink());
    for index in 10..60 {
        fs::remove_file(tree.join(index.to_string()))?;
    }
    mkfs(&["--force", "--from-dir", text(&tree)], &img)?.ok()?;
    ensure!(fs::metadata(&img)?.len() == small.len(), "{} bytes", fs::metadata(&img)?.len());
    mkfs(&["--force", "--size", "50M", "--from-dir", text(&tree)], &img)?.ok()?;
    ensure!(fs::metadata(&img)?.len() == 50 << 20);
    // Without contents, and of a blank file that was made for it, the size stays.
    mkfs(&["--force"], &img)?.ok()?;
    ensure!(fs::metadata(&img)?.len() == 50 << 20);
    let blank = scratch.join("blank");
    File::create(&blank)?.set_len(40 << 20)?;
    let before = fs::metadata(&blank)?.ino();
    mkfs(&["--from-dir", text(&tree)], &blank)?.ok()?;
    let after = fs::metadata(&blank)?;
    ensure!((after.len(), after.ino()) == (40 << 20, before), "{after:?}");
    ensure!(fs::read_dir(scratch.path())?.count() == 4, "something is left behind");
    Ok(())
}

#[test]
fn a_failed_rebuild_leaves_the_old_image() -> Result<()> {
    let scratch = Scratch::new("failed")?;
    let (tree, img, other) = (scratch.join("tree"), scratch.join("image"), scratch.join("other"));
    make_tree(&tree, 10, 1 << 20)?;
    mkfs(&["--from-dir", text(&tree)], &img)?.ok()?;
    let before = (fs::read(&img)?, fs::metadata(&img)?.ino());
    make_tree(&tree, 60, 1 << 20)?;
    let (none, tar) = (scratch.join("none"), scratch.join("tar"));
    shell(r#"tar -C "$1" -cf "$2" . && truncate -s -3M "$2""#, &[&tree, &tar])?;
    for args in [
        &["--force", "--size", "20M", "--from-dir", text(&tree)][..],
        &["--force", "--from-dir", text(&none)],
        &["--force", "--size", "200M", "--from-tar", text(&tar)],
        &["--force", "-b", "3000", "--from-dir", text(&tree)],
        &["--force", "--size", "1K"],
        &["--from-dir", text(&tree)],
    ] {
        ensure!(mkfs(args, &img)?.code != Some(0), "{args:?}");
        ensure!((fs::read(&img)?, fs::metadata(&img)?.ino()) == before, "{args:?}: it has changed");
        ensure!(mkfs(args, &other)?.code != Some(0) || args.len() == 2, "{args:?}");
        let _ = fs::remove_file(&other);
        ensure!(fs::read_dir(scratch.path())?.count() == 3, "{args:?}: something is left behind");
    }
    // Nor does one that is killed; and nobody mounts the old image meanwhile.
    let fifo = scratch.join("fifo");
    shell(r#"mkfifo "$1""#, &[&fifo])?;
    let mut build = Command::new(env!("CARGO_BIN_EXE_fjord"));
    build.args(["mkfs", "-f", "-s", "200M", "--from-tar", "-"]).arg(&img);
    let mut build = build.stdin(File::options().read(true).write(true).open(&fifo)?).spawn()?;
    image::wait_for_lock(build.id(), &img)?;
    let said = fjord(&["put", text(&img), "/etc/hostname", "/x"])?.expect_code(&[3])?;
    ensure!(said.stderr.contains("in use"), "{said:?}");
    build.kill()?;
    build.wait()?;
    fs::remove_file(&fifo)?;
    ensure!((fs::read(&img)?, fs::metadata(&img)?.ino()) == before, "killed: it has changed");
    ensure!(fs::read_dir(scratch.path())?.count() == 3, "killed: something is left behind");
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// Where the directory lets nobody make files the image is built in place.
#[test]
fn an_image_in_a_closed_directory_is_built_in_place() -> Result<()> {
    tools::require_root()?;
    // Where others may not be let in, the checkout may be.
    let scratch = Scratch::in_memory("closed")?;
    let (tree, img, program) = (scratch.join("tree"), scratch.join("image"), scratch.join("fjord"));
    make_tree(&tree, 4, 1 << 20)?;
    fs::copy(env!("CARGO_BIN_EXE_fjord"), &program)?;
    mkfs(&["--size", "20M"], &img)?.ok()?;
    tools::run(tools::command("chmod")?.args(["-R", "a+rX"]).arg(scratch.path()))?.ok()?;
    std::os::unix::fs::chown(&img, Some(NOBODY), Some(NOBODY))?;
    let id = NOBODY.to_string();
    let mut command = tools::command("setpriv")?;
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(&program);
    command.args(["mkfs", "--force", "--from-dir"]).arg(&tree).arg(&img);
    let said = tools::run(&mut command)?.ok()?;
    ensure!(said.stderr.contains("built in place"), "{said:?}");
    same_for_linux(&tree, &img)
}

/// Makes what is not to be written over, at $1.
const PRECIOUS: &[(&str, &str, &str)] = &[
    ("swap space", "mkswap", r#"truncate -s 20M "$1"; mkswap -q "$1" 2>&1"#),
    ("an XFS file system", "mkfs.xfs", r#"truncate -s 400M "$1"; mkfs.xfs -q "$1""#),
    (
        "a partition table (GPT)",
        "sfdisk",
        r#"truncate -s 20M "$1"; echo ,, | sfdisk -q -X gpt "$1""#,
    ),
    (
        "a partition table or boot sector (MBR)",
        "sfdisk",
        r#"truncate -s 20M "$1"; echo ,, | sfdisk -q -X dos "$1""#,
    ),
    ("an ext2, ext3 or ext4 file system", "mke2fs", r#"mke2fs -q -t ext2 "$1" 20M"#),
    ("a tar archive", "tar", r#"tar -cf "$1" /etc/hostname 2>&1"#),
    ("a gzip file", "gzip", r#"gzip -c /etc/hostname > "$1""#),
    ("an xz file", "xz", r#"xz -c /etc/hostname > "$1""#),
    ("an ELF program or library", "cp", r#"cp /bin/true "$1""#),
    ("an SQLite database", "sqlite3", r#"sqlite3 "$1" 'create table t(x)'"#),
    ("text", "sh", r#"echo precious words > "$1""#),
    ("data", "sh", r#"truncate -s 20M "$1"; printf '\001\002\377' >> "$1""#),
];

#[test]
fn what_a_file_holds_is_not_written_over() -> Result<()> {
    let scratch = Scratch::new("precious")?;
    let tree = scratch.join("tree");
    make_tree(&tree, 1, 1000)?;
    for (what, tool, script) in PRECIOUS {
        tools::require(&[tool])?;
        let file = scratch.join("file");
        shell(script, &[&file])?;
        let before = fs::read(&file)?;
        for args in [&[][..], &["-s", "20M"], &["--from-dir", text(&tree)]] {
            let said = mkfs(args, &file)?.expect_code(&[FAILURE])?;
            ensure!(said.stderr.contains(&format!("contains {what}")), "{what}: {said:?}");
            ensure!(said.stderr.contains("--force"), "{said:?}");
            ensure!(fs::read(&file)? == before, "{what}: written over");
        }
        mkfs(&["--force", "-s", "20M"], &file)?.ok()?;
        image::e2fsck_clean(&file)?;
        fs::remove_file(&file)?;
    }
    Ok(())
}

#[test]
fn what_a_device_holds_is_not_written_over() -> Result<()> {
    tools::require_root()?;
    tools::require(&["zstd", "sqlite3", "mke2fs"])?;
    let scratch = Scratch::new("devices")?;
    let file = scratch.join("file");
    for (what, script) in [
        ("swap space", PRECIOUS[0].2),
        (
            "an encrypted volume (LUKS)",
            r#"truncate -s 20M "$1"; printf 'LUKS\272\276' | dd of="$1" conv=notrunc 2>&1"#,
        ),
        (
            "a tar archive",
            r#"truncate -s 20M "$1"; tar -C /etc -c hostname | dd of="$1" conv=notrunc 2>&1"#,
        ),
        (
            "a zstd file",
            r#"truncate -s 20M "$1"; zstd -qc /etc/hostname | dd of="$1" conv=notrunc 2>&1"#,
        ),
        ("an SQLite database", r#"sqlite3 "$1" 'create table t(x)'; truncate -s 20M "$1""#),
        ("text", r#"truncate -s 20M "$1"; echo words | dd of="$1" conv=notrunc 2>&1"#),
        ("text", r#"yes words | head -c 20971520 > "$1""#),
        // mke2fs does not know them either.
        ("", r#"head -c 20971520 /dev/zero | tr '\0' '\377' > "$1""#),
        (
            "",
            r#"printf '\205\001\376\007\240' > "$1"; head -c 20000000 /dev/urandom >> "$1"; truncate -s 20M "$1""#,
        ),
        ("", r#"truncate -s 20M "$1"; echo words | dd of="$1" bs=1k seek=9000 conv=notrunc 2>&1"#),
    ] {
        shell(script, &[&file])?;
        let attach = ["--find", "--show"];
        let node = tools::run(tools::command("losetup")?.args(attach).arg(&file))?.ok()?.stdout;
        let node = Path::new(node.trim());
        if what.is_empty() {
            // Of what mke2fs makes no question.
            let mut mke2fs = tools::command("mke2fs")?;
            tools::run(mke2fs.args(["-n", "-q"]).arg(node))?.ok()?;
        }
        let first = mkfs(&[], node);
        let forced = mkfs(&["--force"], node);
        tools::run(tools::command("losetup")?.arg("--detach").arg(node))?.ok()?;
        match what {
            "" => first?.ok().map(drop)?,
            what => {
                let said = first?.expect_code(&[FAILURE])?;
                ensure!(said.stderr.contains(&format!("contains {what}")), "{said:?}");
            }
        }
        forced?.ok()?;
        image::e2fsck_clean(&file)?;
        fs::remove_file(&file)?;
    }
    Ok(())
}

#[test]
fn contents_get_blocks_of_4_kib() -> Result<()> {
    let scratch = Scratch::new("blocks")?;
    let (tree, img, tar) = (scratch.join("tree"), scratch.join("image"), scratch.join("tar"));
    make_tree(&tree, 3, 5000)?;
    let target = "far/".repeat(375);
    symlink(&target, tree.join("long"))?;
    shell(r#"tar -C "$1" --format=pax -cf "$2" ."#, &[&tree, &tar])?;
    for source in [["--from-dir", text(&tree)], ["--from-tar", text(&tar)]] {
        for size in [&[][..], &["-s", "16M"], &["-s", "600M"]] {
            mkfs(&[&["-f"], &source[..], size].concat(), &img)?.ok()?;
            ensure!(field(&img, "Block size:")? == "4096", "{source:?} {size:?}");
            same_for_linux(&tree, &img)?;
        }
        let said = mkfs(&[&["-f", "-b", "1024"], &source[..]].concat(), &img)?;
        let said = said.expect_code(&[FAILURE])?;
        ensure!(
            said.stderr.contains("of 1024 bytes") && said.stderr.contains("-b 4096"),
            "{said:?}"
        );
    }
    // An empty image has what mke2fs gives it.
    mkfs(&["-f", "-s", "16M"], &img)?.ok()?;
    ensure!(field(&img, "Block size:")? == "1024");
    let said =
        fjord(&["put", text(&img), text(&tree.join("long")), "/"])?.expect_code(&[FAILURE])?;
    ensure!(
        said.stderr.contains("of 1024 bytes") && said.stderr.contains("larger blocks"),
        "{said:?}"
    );
    Ok(())
}

#[test]
fn a_full_image_says_of_what() -> Result<()> {
    let scratch = Scratch::new("what")?;
    let (tree, img) = (scratch.join("tree"), scratch.join("image"));
    make_tree(&tree, 3, 4 << 20)?;
    let refused = |args: &[&str]| -> Result<String> {
        let said = mkfs(&[args, &["--from-dir", text(&tree)]].concat(), &img)?;
        Ok(said.expect_code(&[FAILURE])?.stderr)
    };
    let said = refused(&["-s", "10M"])?;
    ensure!(said.contains("no space left") && said.contains("larger image"), "{said}");
    ensure!(!said.contains("inode") && !said.contains("attribute"), "{said}");
    make_tree(&tree, 300, 10)?;
    let said = refused(&["-s", "64M", "-N", "100"])?;
    ensure!(said.contains("inodes of the image are in use") && said.contains("-N"), "{said}");
    ensure!(!said.contains("space") && !said.contains("attribute"), "{said}");
    let script =
        r#"cd "$1"; for n in 1 2; do setfattr -n user.a$n -v "$(printf %01300d 0)" 1; done"#;
    tools::require(&["setfattr"])?;
    shell(script, &[&tree])?;
    // A block of 1 KiB holds none of them, one of 4 KiB no large one: they are not kept.
    let not_kept = |args: &[&str]| -> Result<String> {
        let said = mkfs(&[args, &["-f", "-q", "--from-dir", text(&tree)]].concat(), &img)?;
        let said = said.expect_code(&[INCOMPLETE])?.stderr;
        ensure!(!said.contains("space left") && said.contains("-O ea_inode"), "{said}");
        image::e2fsck_clean(&img)?;
        Ok(said)
    };
    let said = not_kept(&["-b", "1024"])?;
    ensure!(said.contains("/1: attribute user.a1") && said.contains("user.a2"), "{said}");
    ensure!(said.contains("1300 bytes") && said.contains("-b 4096"), "{said}");
    let script = r#"setfattr -n user.large -v "$(printf %05000d 0)" "$1""#;
    let on_tmpfs = Scratch::in_memory("attributes")?;
    fs::write(on_tmpfs.join("file"), b"content")?;
    if shell(script, &[&on_tmpfs.join("file")]).is_err() {
        // Linux before 6.6 has no user attributes on tmpfs.
        return Ok(());
    }
    let from = ["-f", "-q", "--from-dir", text(on_tmpfs.path())];
    let said = mkfs(&from, &img)?.expect_code(&[INCOMPLETE])?.stderr;
    ensure!(said.contains("/file: attribute user.large: 5000 bytes"), "{said}");
    ensure!(said.contains("-O ea_inode") && !said.contains("-b 4096"), "{said}");
    let file = on_tmpfs.join("file");
    let said = fjord(&["put", text(&img), text(&file), "/again"])?.expect_code(&[INCOMPLETE])?;
    ensure!(said.stderr.contains("attribute user.large: 5000 bytes"), "{said:?}");
    ensure!(fjord(&["cat", text(&img), "/again"])?.ok()?.stdout == "content");
    mkfs(&[&from[..], &["-O", "ea_inode"]].concat(), &img)?.ok()?;
    same_for_linux(on_tmpfs.path(), &img)
}

#[test]
fn wrong_arguments_are_refused() -> Result<()> {
    let scratch = Scratch::new("usage")?;
    let img = scratch.join("image");
    for args in [&[][..], &["-s", "x"], &["-b", "1000", "-s", "16M"]] {
        mkfs(args, &img)?.expect_code(&[USAGE])?;
        ensure!(!img.exists(), "{args:?}: an image is left behind");
    }
    let (missing, link) = (scratch.join("no/such/image"), scratch.join("link"));
    let said = mkfs(&["-s", "16M"], &missing)?.expect_code(&[FAILURE])?;
    ensure!(said.stderr.contains("No such file"), "{said:?}");
    symlink("image", &link)?;
    mkfs(&["-s", "16M"], &link)?.ok()?;
    image::e2fsck_clean(&img)?;
    let holes = File::create(scratch.join("holes"))?;
    holes.write_all_at(&[0; 4096], 8 << 20)?;
    mkfs(&[], &scratch.join("holes"))?.ok()?;
    Ok(())
}

fn features(img: &Path) -> Result<Vec<String>> {
    let mut words: Vec<String> =
        field(img, "Filesystem features:")?.split_whitespace().map(str::to_owned).collect();
    words.sort();
    Ok(words)
}

#[test]
fn options_of_mke2fs_mean_the_same() -> Result<()> {
    let scratch = Scratch::new("habits")?;
    let (tree, img, theirs, tar) =
        (scratch.join("tree"), scratch.join("image"), scratch.join("theirs"), scratch.join("tar"));
    make_tree(&tree, 3, 5000)?;
    tools::require(&["setfattr"])?;
    shell(r#"setfattr -n user.x -v y "$1/0"; tar -C "$1" --xattrs -cf "$2" ."#, &[&tree, &tar])?;
    for args in [
        &["-q", "-t", "ext2"][..],
        &["-q", "-t", "ext3", "-b", "1024"],
        &["-q", "-t", "ext4", "-E", "root_owner=5:6,nodiscard,lazy_itable_init=1"],
        &["-q", "-t", "ext3", "-O", "extent,^dir_index", "-b", "4096"],
    ] {
        for size in ["20480", "20M", "40960s"] {
            let _ = (fs::remove_file(&img), fs::remove_file(&theirs));
            let said = fjord(&[&["mkfs"], args, &[text(&img), size]].concat())?;
            ensure!(said.ok()?.stdout.is_empty(), "-q is not quiet");
            tools::run(tools::command("mke2fs")?.arg("-F").args(args).args([text(&theirs), size]))?
                .ok()?;
            image::e2fsck_clean(&img)?;
            for name in ["Block count:", "Block size:", "Inode count:", "Inode size:"] {
                ensure!(field(&img, name)? == field(&theirs, name)?, "{args:?} {size}: {name}");
            }
            ensure!(features(&img)? == features(&theirs)?, "{args:?}: {:?}", features(&img)?);
        }
    }
    let root = image::debugfs(&img, "stat /")?;
    ensure!(root.contains("User:     0"), "{root}");
    for (source, attribute) in [(&tree, true), (&tar, true), (&tree, false)] {
        let seed = "-E hash_seed=00112233-4455-6677-8899-aabbccddeeff,root_owner=7:8,stride=4";
        let more = if attribute { "" } else { ",no_copy_xattrs" };
        let extended = format!("{seed}{more}");
        let mut args = vec!["-F", "-d", text(source)];
        args.extend(extended.split(' '));
        let said = mkfs(&args, &img)?.ok()?;
        ensure!(said.stderr.contains("stride has no effect"), "{said:?}");
        let hash_seed = field(&img, "Directory Hash Seed:")?;
        ensure!(hash_seed == "00112233-4455-6677-8899-aabbccddeeff", "{hash_seed}");
        let root = image::debugfs(&img, "stat /")?;
        ensure!(root.contains("User:     7") && root.contains("Group:     8"), "{root}");
        let listed = image::debugfs(&img, "ea_list /0")?;
        ensure!(listed.contains("user.x") == attribute, "{source:?}: {listed}");
    }
    let other = scratch.join("other");
    for (args, word) in [
        (&["-t", "xfs", "-s", "16M"][..], "ext4"),
        (&["-E", "frobnicate=1", "-s", "16M"], "frobnicate"),
        (&["-E", "offset=512", "-s", "16M"], "offset"),
        (&["--extra-space", "1M"], "contents"),
        (&["-d", text(&tree), "--from-dir", text(&tree)], "--from-dir"),
    ] {
        let said = mkfs(args, &other)?.expect_code(&[USAGE])?;
        ensure!(said.stderr.contains(word) && !other.exists(), "{args:?}: {said:?}");
    }
    for size in ["x", "16Q", "99999999999999999999"] {
        fjord(&["mkfs", text(&other), size])?.expect_code(&[USAGE])?;
    }
    fjord(&["mkfs", "-s", "16M", text(&other), "16M"])?.expect_code(&[USAGE])?;
    Ok(())
}

#[test]
fn extra_space_is_left_free() -> Result<()> {
    let scratch = Scratch::new("extra")?;
    let (tree, img) = (scratch.join("tree"), scratch.join("image"));
    make_tree(&tree, 50, 100_000)?;
    let mut before = 0;
    for extra_mib in [0, 1, 30] {
        let extra = format!("{extra_mib}M");
        mkfs(&["-f", "-m", "0", "--extra-space", &extra, "--from-dir", text(&tree)], &img)?.ok()?;
        same_for_linux(&tree, &img)?;
        let free: u64 = field(&img, "Free blocks:")?.parse()?;
        let free_bytes = free * 4096;
        ensure!(free_bytes >= extra_mib << 20, "{extra}: {free_bytes} bytes are free");
        ensure!(free_bytes < (extra_mib + 4) << 20, "{extra}: {free_bytes} bytes are free");
        let size = fs::metadata(&img)?.len();
        ensure!(size >= before, "{size} after {before}");
        before = size;
    }
    // The space can be used: there are inodes for it, also beside many small files.
    let many = scratch.join("many");
    make_tree(&many, 3000, 10)?;
    for shrink in [&[][..], &["--shrink"]] {
        let options = ["-f", "--extra-space", "64M", "--from-dir", text(&many)];
        mkfs(&[&options[..], shrink].concat(), &img)?.ok()?;
        let free: u64 = field(&img, "Free inodes:")?.parse()?;
        ensure!(free >= 4096, "{shrink:?}: {free} free inodes");
        let said = mkfs(&[&options[..], shrink, &["-N", "3100"]].concat(), &img)?.ok()?;
        let free: u64 = field(&img, "Free inodes:")?.parse()?;
        ensure!(free < 200, "{said:?}");
    }
    Ok(())
}

/// A tree of all sorts, with more than one way to come out differently.
fn make_varied_tree(at: &Path) -> Result<()> {
    tools::require(&["setfacl", "setfattr"])?;
    make_tree(&at.join("many"), 400, 3000)?;
    let script = r#"
        cd "$1"; mkdir -p a/b/c d e/f
        for dir in a a/b d e e/f; do setfattr -n user.long -v "$(printf %0700d 7)" $dir; done
        setfacl -m u:1:rwx,d:u:2:r a/b; ln many/1 a/one; ln many/1 d/one; ln -s "$(printf %0200d 1)" l
        mknod a/disk b 8 1; mkfifo d/pipe; truncate -s 3M holes; echo end >> holes
        head -c 3000000 /dev/zero | tr '\0' x > large
        find . -exec touch -h -d '2021-01-02 03:04:05.678 UTC' {} +
        touch -d '2024-05-06 07:08:09 UTC' many/5
    "#;
    shell(script, &[at]).map(drop)
}

/// The same tree in another directory, whose entries were made in another order.
const ELSEWHERE: &str = r#"
    tree="$1/elsewhere"; cp -a "$1/tree" "$tree"
    mv "$tree/many" "$tree/x"; mkdir "$tree/many"
    (cd "$tree/x" && ls -r | xargs -I {} mv {} ../many/); touch -r "$1/tree/many" "$tree/many"
    rmdir "$tree/x"; touch -r "$1/tree" "$tree"
"#;

#[test]
fn the_same_contents_make_the_same_image() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::new("repeat")?;
    let (tree, tar) = (scratch.join("tree"), scratch.join("tar"));
    make_varied_tree(&tree)?;
    shell(ELSEWHERE, &[scratch.path()])?;
    shell(r#"tar -C "$1" -S --xattrs --acls -cf "$2" ."#, &[&tree, &tar])?;
    let other = scratch.join("elsewhere");
    let sets = [
        &[][..],
        &["-O", "^has_journal", "-b", "1024"],
        &["-O", "mmp,orphan_file,metadata_csum_seed"],
        &["-O", "inline_data,ea_inode"],
        &["-t", "ext3"],
    ];
    for options in sets {
        for source in
            [["--from-dir", text(&tree), text(&other)], ["--from-tar", text(&tar), text(&tar)]]
        {
            let build = |name: &str, from: &str, surroundings: &str| -> Result<Vec<u8>> {
                let img = scratch.join(name);
                let mut command = Command::new("sh");
                let script = format!(r#"{surroundings}; exec "$0" "$@""#);
                command.args(["-c", &script, env!("CARGO_BIN_EXE_fjord")]);
                command.args(["mkfs", "-qf", "--reproducible", source[0], from]).args(options);
                tools::run(command.arg(&img))?.ok()?;
                image::e2fsck_clean(&img)?;
                Ok(fs::read(&img)?)
            };
            let one = build("one", source[1], "umask 022; export TZ=UTC LC_ALL=C")?;
            let two =
                build("two", source[2], "umask 077; export TZ=Asia/Tokyo LC_ALL=de_DE.UTF-8")?;
            ensure!(one == two, "{options:?} {source:?}: the images differ");
        }
        same_for_linux(&tree, &scratch.join("one")).with_context(|| format!("{options:?}"))?;
    }
    Ok(())
}

/// Runs a script in mounts of its own, where this machine has another user of the name `daemon`.
const OTHER_USERS: &str = r#"
    sed 's/^daemon:x:[0-9]*:/daemon:x:4321:/' /etc/passwd >"$0"
    mount --bind "$0" /etc/passwd
    exec "$@"
"#;

/// A tar stream names users of access lists; who they are on this machine is no part of it.
#[test]
fn a_repeatable_image_asks_no_users_of_this_machine() -> Result<()> {
    tools::require_root()?;
    tools::require(&["setfacl", "unshare"])?;
    let scratch = Scratch::new("users")?;
    let (tree, tar) = (scratch.join("tree"), scratch.join("tar"));
    shell(r#"mkdir "$1"; echo x >"$1/f"; setfacl -m u:daemon:rw "$1/f""#, &[&tree])?;
    shell(r#"tar -C "$1" --format=pax --acls -cf "$2" ."#, &[&tree, &tar])?;
    let build = |elsewhere: bool, how: &[&str]| -> Result<(Output, Vec<u8>)> {
        let img = scratch.join("image");
        let mut command = match elsewhere {
            false => Command::new(env!("CARGO_BIN_EXE_fjord")),
            true => {
                let mut command = tools::command("unshare")?;
                command.args(["--mount", "sh", "-e", "-c", OTHER_USERS]);
                command.arg(scratch.join("passwd")).arg(env!("CARGO_BIN_EXE_fjord"));
                command
            }
        };
        command.args(["mkfs", "-f", "-s", "16M", "-U", UUID, "--hash-seed", UUID]).args(how);
        let done = tools::run(command.args(["--from-tar", text(&tar)]).arg(&img))?;
        image::e2fsck_clean(&img)?;
        Ok((done, fs::read(&img)?))
    };
    let ((here, one), (there, two)) =
        (build(false, &["--reproducible"])?, build(true, &["--reproducible"])?);
    ensure!(one == two, "the machine's users are in the image");
    for done in [here, there] {
        let said = done.expect_code(&[INCOMPLETE])?;
        ensure!(said.stderr.contains("user:daemon"), "{said:?}");
    }
    // Otherwise the machine says who daemon is: the two do differ.
    let list = |elsewhere: bool| -> Result<Vec<u8>> {
        build(elsewhere, &[])?.0.ok()?;
        let mount = KernelMount::new(&scratch.join("image"), "ro")?;
        let getfacl = tools::run(tools::command("getfacl")?.arg("-cn").arg(mount.path().join("f")));
        mount.unmount()?;
        Ok(getfacl?.ok()?.stdout.into_bytes())
    };
    ensure!(list(false)? != list(true)?);
    Ok(())
}

#[test]
fn times_end_with_the_epoch_of_the_source() -> Result<()> {
    let scratch = Scratch::new("epoch")?;
    let (tree, img) = (scratch.join("tree"), scratch.join("image"));
    make_varied_tree(&tree)?;
    let epoch = 1_650_000_000i64;
    let build = |epoch: &str, args: &[&str]| -> Result<Output> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fjord"));
        command.env("SOURCE_DATE_EPOCH", epoch).args(["mkfs", "-qf"]).args(args);
        tools::run(command.arg(&img))
    };
    let from = ["--from-dir", text(&tree)];
    build(&epoch.to_string(), &from)?.ok()?;
    image::e2fsck_clean(&img)?;
    let (uuid, seed) = (field(&img, "Filesystem UUID:")?, field(&img, "Directory Hash Seed:")?);
    let mount = KernelMount::new(&img, "ro")?;
    let found = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    for (path, entry) in &found.entries {
        let path = String::from_utf8_lossy(path);
        for time in [entry.atime, entry.mtime, entry.ctime, entry.btime.unwrap_or_default()] {
            ensure!(time.sec <= epoch, "{path}: {time:?}");
        }
        let expected = match &*path {
            "many/5" | "lost+found" => (epoch, 0),
            _ => (1_609_556_645, 678_000_000),
        };
        ensure!((entry.mtime.sec, entry.mtime.nsec) == expected, "{path}: {:?}", entry.mtime);
    }
    // What is given counts.
    let (given, hash) =
        ("11111111-2222-3333-4444-555555555555", "99999999-8888-7777-6666-555555555555");
    build("1", &[&from[..], &["-U", given, "--hash-seed", hash]].concat())?.ok()?;
    ensure!(field(&img, "Filesystem UUID:")? == given);
    ensure!(field(&img, "Directory Hash Seed:")? == hash);
    // One byte makes another image.
    let file = File::options().write(true).open(tree.join("large"))?;
    let times = fs::metadata(tree.join("large"))?.modified()?;
    file.write_all_at(b"y", 1_000_000)?;
    file.set_modified(times)?;
    build(&epoch.to_string(), &from)?.ok()?;
    ensure!(field(&img, "Filesystem UUID:")? != uuid);
    ensure!(field(&img, "Directory Hash Seed:")? != seed);
    // Without contents, too.
    build("12345", &["-s", "64M"])?.ok()?;
    let first = fs::read(&img)?;
    build("12345", &["-s", "64M"])?.ok()?;
    ensure!(first == fs::read(&img)?, "empty images differ");
    build("yesterday", &["-s", "64M"])?.expect_code(&[USAGE])?;
    ensure!(first == fs::read(&img)?);
    Ok(())
}

#[test]
fn a_shrunken_image_is_the_smallest() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::new("shrink")?;
    let (img, other) = (scratch.join("image"), scratch.join("other"));
    let varied = scratch.join("varied");
    make_varied_tree(&varied)?;
    let (tiny, large, tar) = (scratch.join("tiny"), scratch.join("large"), scratch.join("tar"));
    make_tree(&tiny, 1, 100)?;
    make_tree(&large, 3, 7 << 20)?;
    shell(r#"tar -C "$1" -S --xattrs --acls -cf "$2" ."#, &[&varied, &tar])?;
    for (source, tree, options, journal) in [
        (["--from-dir", text(&tiny)], &tiny, &[][..], "none"),
        (["--from-dir", text(&varied)], &varied, &[], "none"),
        (["--from-dir", text(&varied)], &varied, &["-b", "1024", "-O", "^extent,^64bit"], "1M"),
        (["--from-dir", text(&large)], &large, &["-O", "^metadata_csum"], "4M"),
        (["--from-tar", text(&tar)], &varied, &["-J", "none"], "none"),
        (["--from-tar", text(&tar)], &varied, &["--extra-space", "2M"], "none"),
    ] {
        // Hashes decide how full directory blocks are: with another seed an image may be smaller.
        let all = [&["-f", "--shrink", "--hash-seed", UUID], &source[..], options].concat();
        mkfs(&all, &img)?.ok()?;
        same_for_linux(tree, &img).with_context(|| format!("{source:?} {options:?}"))?;
        let size = fs::metadata(&img)?.len();
        let (blocks, block_size): (u64, u64) =
            (field(&img, "Block count:")?.parse()?, field(&img, "Block size:")?.parse()?);
        ensure!(blocks * block_size == size, "{size} bytes for {blocks} blocks");
        let free: u64 = field(&img, "Free blocks:")?.parse()?;
        let extra = if options.contains(&"--extra-space") { 2 << 20 } else { 0 };
        ensure!(free * block_size >= extra, "{free} blocks are free");
        // No image has less than 128 KiB.
        ensure!(free * block_size < extra + (64 << 10) || size == 128 << 10, "{free} are free");
        ensure!(features(&img)?.contains(&"has_journal".to_owned()) == (journal != "none"));
        if extra > 0 {
            continue;
        }
        // Nothing smaller holds them.
        let (less, inodes) = ((size - 4096).to_string(), field(&img, "Inode count:")?);
        let smaller = ["-s", &less, "-N", &inodes, "-m", "0", "--ijournal", "none"];
        let smaller = [&smaller[..], &["--hash-seed", UUID]].concat();
        let mut all = [&smaller[..], &source, options].concat();
        if !options.contains(&"-J") {
            all.extend(["-J", journal]);
        }
        let said = mkfs(&all, &other)?;
        ensure!(matches!(said.code, Some(FAILURE | USAGE)), "{size} is not the smallest: {said:?}");
    }
    // The same each time, if that is asked for.
    let build = |img: &Path| {
        let all = ["-f", "--shrink", "--reproducible", "--from-dir", text(&varied)];
        mkfs(&all, img)?.ok().and_then(|_| Ok(fs::read(img)?))
    };
    ensure!(build(&img)? == build(&other)?, "shrunken images differ");
    mkfs(&["-f", "--shrink", "-s", "16M", "--from-dir", text(&tiny)], &img)?
        .expect_code(&[USAGE])?;
    mkfs(&["-f", "--shrink"], &img)?.expect_code(&[USAGE])?;
    Ok(())
}

/// Inodes of 128 bytes keep neither years after 2038 nor fractions of a second: that is said.
#[test]
fn times_that_small_inodes_cannot_keep_are_told() -> Result<()> {
    let scratch = Scratch::new("times")?;
    let (tree, img, tar) = (scratch.join("tree"), scratch.join("image"), scratch.join("tar"));
    make_tree(&tree, 3, 100)?;
    let touch = |time: &str| shell(r#"cd "$1"; touch -d "$2" 0 1 2 ."#, &[&tree, Path::new(time)]);
    let from_dir = ["--from-dir", text(&tree)];
    let from_tar = ["--from-tar", text(&tar)];
    touch("2001-02-03 04:05:06.75")?;
    shell(r#"tar -C "$1" --format=pax -cf "$2" ."#, &[&tree, &tar])?;
    for source in [from_dir, from_tar] {
        let said = mkfs(&[&["-f", "-q", "-I", "128"], &source[..]].concat(), &img)?.ok()?.stderr;
        ensure!(said.matches("fractions of a second").count() == 1, "{source:?}: {said}");
        ensure!(said.contains("left out") && said.contains("-I 256"), "{said}");
        let said = mkfs(&[&["-f", "-q"], &source[..]].concat(), &img)?.ok()?.stderr;
        ensure!(said.is_empty(), "{said}");
    }
    touch("2400-01-01")?;
    shell(r#"tar -C "$1" --format=pax -cf "$2" ."#, &[&tree, &tar])?;
    for source in [from_dir, from_tar] {
        let made = mkfs(&[&["-f", "-q", "--json", "-I", "128"], &source[..]].concat(), &img)?;
        let made = made.expect_code(&[INCOMPLETE])?;
        let told = "times of 4 entries: inodes of 128 bytes";
        ensure!(made.stderr.matches("not kept: times").count() == 1, "{made:?}");
        ensure!(made.stderr.contains(told) && made.stderr.contains("2038-01-19"), "{made:?}");
        ensure!(made.stdout.contains(told) && made.stdout.contains("not_kept"), "{made:?}");
        mkfs(&[&["-f", "-q"], &source[..]].concat(), &img)?.ok()?;
        same_for_linux(&tree, &img)?;
    }
    mkfs(&["-f", "-q", "-I", "128", "-s", "16M"], &img)?.ok()?;
    let said = fjord(&["put", text(&img), text(&tree.join("0")), "/"])?;
    let said = said.expect_code(&[INCOMPLETE])?.stderr;
    ensure!(said.contains("times of 1 entries"), "{said}");
    Ok(())
}

/// A list that is left out leaves no permissions behind: as by `setfacl -b` on Linux.
#[test]
fn a_list_that_is_left_out_widens_nothing() -> Result<()> {
    tools::require_root()?;
    tools::require(&["setfacl"])?;
    let scratch = Scratch::new("left-out")?;
    let (tree, bare, img) = (scratch.join("tree"), scratch.join("bare"), scratch.join("image"));
    let tar = scratch.join("tar");
    fs::create_dir_all(tree.join("dir"))?;
    fs::write(tree.join("file"), b"secret")?;
    fs::write(tree.join("plain"), b"plain")?;
    let script = r#"
        cd "$1"; chmod 640 file; chmod 2750 dir; chmod 664 plain
        setfacl -m u:1234:rwx,g::r,m::rwx file; setfacl -m u:1234:rwx,d:u:1234:rwx dir
        touch -d '2001-02-03' file dir plain .
        cp -a "$1" "$2"; setfacl -R -b "$2"
        tar -C "$1" --format=pax --acls -cf "$3" .
    "#;
    shell(script, &[&tree, &bare, &tar])?;
    for source in [["--from-dir", text(&tree)], ["--from-tar", text(&tar)]] {
        let options = ["-f", "--reproducible", "-E", "no_copy_xattrs"];
        mkfs(&[&options[..], &source].concat(), &img)?.ok()?;
        same_for_linux(&bare, &img).with_context(|| format!("{source:?}"))?;
        let mount = KernelMount::new(&img, "ro")?;
        let mode = fs::metadata(mount.path().join("file"))?.mode() & 0o7777;
        mount.unmount()?;
        ensure!(mode == 0o640, "{mode:o}");
    }
    Ok(())
}

/// Where the disk for the image is full, mkfs says so in one line.
#[test]
fn a_full_disk_is_told_in_one_line() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::new("full-disk")?;
    let (tree, small) = (scratch.join("tree"), scratch.join("small"));
    make_tree(&tree, 6, 2 << 20)?;
    fs::create_dir(&small)?;
    let mut mount = tools::command("mount")?;
    tools::run(mount.args(["-t", "tmpfs", "-o", "size=6m", "none"]).arg(&small))?.ok()?;
    let img = small.join("image");
    let from_dir = ["--from-dir", text(&tree)];
    let said = [&from_dir[..], &["-q", "--from-dir", text(&tree)]].map(|args| mkfs(args, &img));
    let left = img.exists();
    tools::run(tools::command("umount")?.arg(&small))?.ok()?;
    for said in said {
        let said = said?.expect_code(&[FAILURE])?.stderr;
        ensure!(said.lines().count() == 1 && said.contains("full"), "{said}");
        ensure!(!said.contains("fsync") && !said.contains("superblock"), "{said}");
    }
    ensure!(!left, "an image is left behind");
    Ok(())
}
