//! The commands that work on an image while it is not mounted, without root.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use anyhow::{Result, ensure};
use fjord::{Cred, Fs, FsyncPolicyKind, MountOptions};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    tools::{self, Output},
};

/// Runs a command that must succeed.
fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

/// Runs fjord with the image as its first argument after the command's own.
fn fjord(command: &[&str], img: &Path, rest: &[&str]) -> Result<String> {
    let program = env!("CARGO_BIN_EXE_fjord");
    Ok(run(Command::new(program).args(command).arg(img).args(rest))?.stdout)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

#[test]
fn a_tree_goes_in_and_comes_out_equal() -> Result<()> {
    let scratch = Scratch::new("unmounted")?;
    let img = scratch.join("image");
    fjord(&["mkfs", "--size", "32M", "-L", "label"], &img, &[])?;
    let tree = scratch.join("tree");
    fs::create_dir_all(tree.join("sub/deep"))?;
    fs::write(tree.join("sub/big"), vec![7; 3_000_001])?;
    fs::write(tree.join("sub/deep/run"), b"#!/bin/sh\n")?;
    fs::set_permissions(tree.join("sub/deep/run"), fs::Permissions::from_mode(0o4750))?;
    symlink("sub/deep", tree.join("link"))?;

    fjord(&["mkdir", "-p"], &img, &["/srv/www"])?;
    fjord(&["put", "-r"], &img, &[text(&tree), "/srv/www/"])?;
    image::e2fsck_clean(&img)?;
    ensure!(fjord(&["cat"], &img, &["/srv/www/tree/link/run"])? == "#!/bin/sh\n");
    let out = scratch.join("out");
    fjord(&["get", "-r"], &img, &["/srv/www/tree", text(&out)])?;
    run(tools::command("diff")?.args(["-r", "--no-dereference"]).arg(&tree).arg(&out))?;
    let (a, b) =
        (fs::metadata(tree.join("sub/deep/run"))?, fs::metadata(out.join("sub/deep/run"))?);
    ensure!(a.mode() == b.mode() && a.mtime_nsec() == b.mtime_nsec());

    let listed = fjord(&["tree"], &img, &["/srv"])?;
    ensure!(listed.contains("└── run") && listed.contains("link -> sub/deep"), "{listed}");
    let refused = fjord(&["rm"], &img, &["/srv/www"]).unwrap_err().to_string();
    ensure!(refused.contains("-r"), "{refused}");
    fjord(&["rm", "-r"], &img, &["/srv"])?;
    ensure!(fjord(&["ls"], &img, &[])? == "lost+found\n");
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn special_files_are_copied_out_with_the_rest() -> Result<()> {
    let scratch = Scratch::new("special")?;
    let (img, tree, out) = (scratch.join("image"), scratch.join("tree"), scratch.join("out"));
    fs::create_dir(&tree)?;
    fs::write(tree.join("z"), b"behind them")?;
    run(Command::new("mkfifo").arg(tree.join("fifo")))?;
    run(Command::new("mknod").arg(tree.join("device")).args(["b", "259", "70000"]))?;
    fjord(&["mkfs", "--from-dir", text(&tree)], &img, &[])?;
    fjord(&["get", "-r"], &img, &["/", text(&out)])?;
    for name in ["fifo", "device"] {
        let (a, b) = (fs::metadata(tree.join(name))?, fs::metadata(out.join(name))?);
        ensure!((a.mode(), a.rdev()) == (b.mode(), b.rdev()), "{name}");
    }
    ensure!(fs::read(out.join("z"))? == b"behind them");
    Ok(())
}

#[test]
fn json_is_json_and_agrees_with_dumpe2fs() -> Result<()> {
    let scratch = Scratch::new("json")?;
    let img = scratch.join("image");
    fjord(&["mkfs", "--json", "--size", "16M"], &img, &[])?;
    let info: serde_json::Value = serde_json::from_str(&fjord(&["info", "--json"], &img, &[])?)?;
    let dump = run(tools::command("dumpe2fs")?.arg("-h").arg(&img))?.stdout;
    for (label, key) in [
        ("Filesystem UUID:", "uuid"),
        ("Inode count:", "inode_count"),
        ("Block count:", "block_count"),
        ("Free blocks:", "free_blocks"),
        ("Block size:", "block_size"),
    ] {
        let theirs = dump.lines().find_map(|l| l.strip_prefix(label)).map(str::trim);
        let ours = info[key].as_str().map_or_else(|| info[key].to_string(), str::to_owned);
        ensure!(theirs == Some(ours.as_str()), "{label} {theirs:?}, fjord says {ours}");
    }
    for command in
        [&["ls", "--json"][..], &["tree", "--json"], &["journal", "--json"], &["recover", "--json"]]
    {
        let _: serde_json::Value = serde_json::from_str(&fjord(command, &img, &[])?)?;
    }
    let stat = fjord(&["stat", "--json"], &img, &["/lost+found"])?;
    let stat: serde_json::Value = serde_json::from_str(&stat)?;
    ensure!(stat["inode"] == 11 && stat["type"] == "directory", "{stat}");
    Ok(())
}

/// An image as a power cut leaves it after two fsyncs under a policy.
fn cut_off(img: &Path, mkfs: &[&str], policy: FsyncPolicyKind) -> Result<()> {
    fjord(&[&["mkfs", "--size", "64M"], mkfs].concat(), img, &[])?;
    let options =
        MountOptions { background_threads: false, fsync: policy, ..MountOptions::default() };
    let open = Fs::open(img, &options)?;
    for name in ["one", "two"] {
        let file = open.root()?.create(name.as_bytes(), 0o644, &Cred::root())?;
        file.write(0, b"what was synced")?;
        file.fsync(false)?;
    }
    let cut = img.with_extension("cut");
    fs::copy(img, &cut)?;
    open.unmount()?;
    fs::rename(cut, img)?;
    Ok(())
}

#[test]
fn what_is_to_be_recovered_is_told() -> Result<()> {
    let scratch = Scratch::new("needs-recovery")?;
    let policies = [
        (&["--ijournal", "2x1M"][..], FsyncPolicyKind::Ijournal, "i_transactions"),
        (&["-O", "fast_commit", "--ijournal", "none"], FsyncPolicyKind::FastCommit, "fast_commits"),
        (&["--ijournal", "none"], FsyncPolicyKind::Compound, "transactions"),
    ];
    let json = |command: &str, img: &Path| -> Result<serde_json::Value> {
        Ok(serde_json::from_str(&fjord(&[command, "--json"], img, &[])?)?)
    };
    for (mkfs, policy, kind) in policies {
        let name = policy.name();
        let (img, copy) = (scratch.join(name), scratch.join("copy"));
        cut_off(&img, mkfs, policy)?;
        fs::copy(&img, &copy)?;
        let count = &json("recover", &copy)?[kind];
        ensure!(count.as_u64().is_some_and(|count| count >= 2), "{name}: {count}");
        let kind = kind.replace("fast_", "fast ").replace('_', "-");
        let answer = format!("yes ({count} {kind}); run `fjord recover`");
        for command in ["info", "journal"] {
            let said = fjord(&[command], &img, &[])?;
            let line = said.lines().find_map(|line| line.strip_prefix("Needs recovery:"));
            ensure!(line.map(str::trim) == Some(&*answer), "{command}: {said}");
        }
        ensure!(!fjord(&["journal"], &img, &[])?.contains(", clean"), "{name}");
        ensure!(json("info", &img)?["needs_recovery"] == true, "{name}");
        ensure!(json("journal", &img)?["dirty"] == true, "{name}");
        let recovered = fjord(&["recover"], &img, &[])?;
        ensure!(!recovered.contains("discarded"), "{recovered}");
        for command in ["info", "journal"] {
            let said = fjord(&[command], &img, &[])?;
            let line = said.lines().find_map(|line| line.strip_prefix("Needs recovery:"));
            ensure!(line.map(str::trim) == Some("no"), "{command}: {said}");
        }
        ensure!(json("info", &img)?["needs_recovery"] == false, "{name}");
        ensure!(json("journal", &img)?["dirty"] == false, "{name}");
        ensure!(fjord(&["cat"], &img, &["/two"])? == "what was synced", "{name}");
    }
    Ok(())
}

/// A message about a path says where it was looked for, and what to do.
#[test]
fn missing_directories_of_the_image_are_named() -> Result<()> {
    let scratch = Scratch::new("missing")?;
    let (img, file) = (scratch.join("image"), scratch.join("file"));
    fs::write(&file, "content")?;
    fjord(&["mkfs", "--size", "16M"], &img, &[])?;
    let program = env!("CARGO_BIN_EXE_fjord");
    let fails = |args: &[&str], rest: &[&str], words: &[&str]| -> Result<()> {
        let done = tools::run(Command::new(program).args(args).arg(&img).args(rest))?;
        let done = done.expect_code(&[1])?;
        let has_all = words.iter().all(|word| done.stderr.contains(word));
        ensure!(has_all && !done.stderr.contains("os error"), "{args:?}: {done:?}");
        Ok(())
    };
    let made = ["no such directory in the image", "`fjord mkdir -p`"];
    fails(&["put"], &[text(&file), "/srv/"], &made)?;
    fails(&["put"], &[text(&file), "/srv/www/page"], &made)?;
    fails(&["mkdir"], &["/srv/www"], &made)?;
    fails(&["cp"], &["/lost+found/..", "/srv/www/x", "-r"], &made)?;
    fails(&["cat"], &["/srv"], &["/srv: no such file or directory in the image"])?;
    fails(&["put"], &["/nonexistent/x", "/x"], &["/nonexistent/x: No such file"])?;
    fails(&["rm", "-r"], &["/"], &["the root directory cannot be removed"])?;
    fjord(&["mkdir", "-p"], &img, &["/srv"])?;
    fjord(&["put"], &img, &[text(&file), "/srv/"])?;
    ensure!(fjord(&["cat"], &img, &["/srv/file"])? == "content");
    Ok(())
}

#[test]
fn completions_and_help() -> Result<()> {
    let program = env!("CARGO_BIN_EXE_fjord");
    for shell in ["bash", "zsh", "fish"] {
        let script = run(Command::new(program).args(["completions", shell]))?.stdout;
        ensure!(script.contains("umount"), "{shell}");
    }
    let help = run(Command::new(program).args(["mount", "--help"]))?.stdout;
    ensure!(help.contains("Examples:") && help.contains("fstab"), "{help}");
    Ok(())
}

/// What `dumpe2fs -h` says is free.
fn free_blocks(img: &Path) -> Result<String> {
    let dump = run(tools::command("dumpe2fs")?.arg("-h").arg(img))?.stdout;
    let line = dump.lines().find(|line| line.starts_with("Free blocks:"));
    Ok(line.unwrap_or_default().to_owned())
}

#[test]
fn areas_come_and_go_and_nobody_else_minds() -> Result<()> {
    let scratch = Scratch::new("tune")?;
    let img = scratch.join("image");
    for features in ["", "^extent,^64bit", "^metadata_csum,orphan_file"] {
        run(tools::command("mke2fs")?
            .args(["-q", "-F", "-t", "ext4", "-O", features])
            .arg(&img)
            .arg("64M"))?;
        fjord(&["mkdir"], &img, &["/dir"])?;
        let before = free_blocks(&img)?;
        let info = || -> Result<serde_json::Value> {
            Ok(serde_json::from_str(&fjord(&["info", "--json"], &img, &[])?)?)
        };
        ensure!(info()?["journal"]["ijournal_areas"] == 0);
        for (areas, count) in [("3x1M", 3), ("8x64K", 8), ("1x9M", 1)] {
            let told = fjord(&["tune", "--json", "--ijournal", areas], &img, &[])?;
            let told: serde_json::Value = serde_json::from_str(&told)?;
            ensure!(told["ijournal_areas"] == count, "{told}");
            image::e2fsck_clean(&img)?;
            ensure!(info()?["journal"]["ijournal_areas"] == count);
            ensure!(free_blocks(&img)? != before);
            let mount = KernelMount::new(&img, "")?;
            fs::write(mount.path().join("dir/file"), b"from Linux")?;
            mount.unmount()?;
            ensure!(fjord(&["cat"], &img, &["/dir/file"])? == "from Linux");
            ensure!(info()?["journal"]["ijournal_areas"] == count, "Linux left them alone");
            fjord(&["rm"], &img, &["/dir/file"])?;
        }
        fjord(&["tune", "--ijournal", "0"], &img, &[])?;
        image::e2fsck_clean(&img)?;
        ensure!(info()?["journal"]["ijournal_areas"] == 0);
        ensure!(free_blocks(&img)? == before);
        for wrong in ["1x8K", "300x1M", "2x40M", "many"] {
            ensure!(fjord(&["tune", "--ijournal", wrong], &img, &[]).is_err(), "{wrong}");
        }
        image::e2fsck_clean(&img)?;
        ensure!(free_blocks(&img)? == before);
    }
    Ok(())
}
