//! Flags of chattr(1) and project IDs on their way into an image, from a tree on Linux's ext4. Needs root.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    script::fsxattr,
    tools::{self, Output},
};

fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn fjord(args: &[&str]) -> Result<Output> {
    tools::run(Command::new(env!("CARGO_BIN_EXE_fjord")).args(args))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// A tree whose files and directories have flags.
fn source(scratch: &Scratch) -> Result<KernelMount> {
    let path = scratch.join("source");
    image::make_sparse(&path, 32 << 20)?;
    let mut make = tools::command("mke2fs")?;
    run(make.args(["-q", "-F", "-t", "ext4", "-I", "256"]).arg(&path))?;
    let mount = KernelMount::new(&path, "rw")?;
    let at = |name: &str| mount.path().join(name);
    fs::remove_dir(at("lost+found"))?;
    let marks = [
        ("append", "+a"),
        ("immutable", "+i"),
        ("no-dump", "+d"),
        ("no-atime", "+A"),
        ("sync", "+S"),
        ("hints", "+cstu"),
        ("several", "+aAd"),
        ("plain", "-d"),
    ];
    for (name, flags) in marks {
        for (place, is_dir) in [(format!("file-{name}"), false), (format!("dir-{name}"), true)] {
            let file = at(&place);
            if is_dir {
                fs::create_dir(&file)?;
                fs::write(file.join("inside"), "in a directory with flags")?;
            } else {
                fs::write(&file, name)?;
                // A further name, which an immutable file could not be given.
                fs::hard_link(&file, at(&format!("link-{name}")))?;
            }
            run(tools::command("chattr")?.arg(flags).arg(&file))?;
        }
    }
    fs::create_dir(at("dirsync"))?;
    run(tools::command("chattr")?.arg("+DT").arg(at("dirsync")))?;
    Ok(mount)
}

/// A tree with project IDs, on XFS: Linux's ext4 has them only with quotas.
fn with_projects(scratch: &Scratch) -> Result<KernelMount> {
    let path = scratch.join("projects");
    image::make_sparse(&path, 512 << 20)?;
    run(tools::command("mkfs.xfs")?.arg("-q").arg(&path))?;
    let mount = KernelMount::with_type(&path, "xfs", "rw")?;
    let set = |name: &str, project: u32, inherits: bool| -> Result<()> {
        let file = File::open(mount.path().join(name))?;
        let mut attr = fsxattr::get(&file)?;
        attr.project = project;
        attr.xflags = if inherits { FS_XFLAG_PROJINHERIT } else { 0 };
        Ok(fsxattr::set(&file, attr)?)
    };
    fs::write(mount.path().join("project-7"), "7")?;
    set("project-7", 7, false)?;
    fs::create_dir(mount.path().join("inherits"))?;
    set("inherits", 9, true)?;
    fs::write(mount.path().join("inherits/one"), "9")?;
    fs::write(mount.path().join("plain"), "none")?;
    Ok(mount)
}

/// The flag of linux/fs.h.
const FS_XFLAG_PROJINHERIT: u32 = 0x200;
/// Of FS_IOC_GETFLAGS.
const FS_PROJINHERIT_FL: u32 = 0x2000_0000;

/// What Linux shows of an image's tree from `below` on.
fn tree(image: &Path, below: &str) -> Result<Manifest> {
    image::e2fsck_clean(image)?;
    let mount = KernelMount::new(image, "ro")?;
    let found = Manifest::from_directory(&mount.path().join(below))?;
    mount.unmount()?;
    Ok(found)
}

/// Flags and project IDs by path.
fn marks(manifest: &Manifest) -> Vec<(PathBuf, u32, u32)> {
    let entries = manifest.entries.iter();
    let marks = entries.map(|(path, entry)| {
        let path = PathBuf::from(String::from_utf8_lossy(path).into_owned());
        // Whether a file has extents or an index is the file system's affair.
        (path, entry.flags & !0x81000, entry.project)
    });
    marks.filter(|(path, ..)| !path.ends_with("lost+found")).collect()
}

#[test]
fn flags_go_into_images() -> Result<()> {
    let scratch = Scratch::new("flags")?;
    let source = source(&scratch)?;
    let wanted = Manifest::from_directory(source.path())?;
    ensure!(marks(&wanted).iter().filter(|(_, flags, _)| *flags != 0).count() > 20);
    let img = scratch.join("built");
    let size = ["mkfs", "-q", "--size", "32M", "-O", "project", "--from-dir"];
    fjord(&[&size[..], &[text(source.path()), text(&img)]].concat())?.ok()?;
    let found = tree(&img, "")?;
    ensure!(marks(&found) == marks(&wanted), "{:?}\n{:?}", marks(&found), marks(&wanted));

    // Into an image that is there: the same, below a directory.
    let img = scratch.join("edited");
    fjord(&["mkfs", "-q", "--size", "32M", "-O", "project", text(&img)])?.ok()?;
    fjord(&["put", "-r", text(&img), text(source.path()), "/copy"])?.ok()?;
    let found = tree(&img, "copy")?;
    ensure!(marks(&found) == marks(&wanted), "{:?}\n{:?}", marks(&found), marks(&wanted));
    wanted.diff(&found, &Compare::EXTRACTED).ok("the source", "the copy")?;
    // What nobody may change is not replaced.
    let refused = fjord(&[
        "put",
        text(&img),
        text(&source.path().join("file-plain")),
        "/copy/file-immutable",
    ])?;
    ensure!(refused.code != Some(0), "an immutable file was replaced");
    image::e2fsck_clean(&img)?;

    // What cannot be set is listed, by name.
    source.unmount()?;
    let path = scratch.join("source");
    image::debugfs_write(&path, &["set_inode_field /file-plain flags 0x84000".to_owned()])?;
    let source = KernelMount::new(&path, "ro")?;
    let img = scratch.join("listed");
    let said = fjord(&[&size[..], &[text(source.path()), text(&img)]].concat())?;
    let line = "file-plain: the flag journal_data (j) cannot be set";
    ensure!(said.code == Some(6) && said.stderr.contains(line), "{}", said.stderr);
    source.unmount()
}

#[test]
fn project_ids_go_into_images() -> Result<()> {
    let scratch = Scratch::new("projects")?;
    let source = with_projects(&scratch)?;
    let wanted = [
        ("inherits", 9, FS_PROJINHERIT_FL),
        ("inherits/one", 9, 0),
        ("project-7", 7, 0),
        ("plain", 0, 0),
    ];
    let size = ["mkfs", "-q", "--size", "32M"];
    for (name, features) in [("with", "project"), ("without", "^project")] {
        let img = scratch.join(name);
        let from = ["-O", features, "--from-dir", text(source.path()), text(&img)];
        let said = fjord(&[&size[..], &from].concat())?;
        let has_feature = name == "with";
        ensure!(said.code == Some(if has_feature { 0 } else { 6 }), "{}", said.stderr);
        let found = tree(&img, "")?;
        for (path, project, flags) in wanted {
            let entry = &found.entries[path.as_bytes()];
            let kept = if has_feature { project } else { 0 };
            ensure!(
                entry.project == kept && entry.flags & FS_PROJINHERIT_FL == flags,
                "{path}: {entry:?}"
            );
            let line = format!("/{path}: the image keeps no project ID ({project})");
            ensure!(
                said.stderr.contains(&line) == (!has_feature && project != 0),
                "{path}: {}",
                said.stderr
            );
        }
    }
    // Into an image that is there.
    let img = scratch.join("edited");
    fjord(&[&size[..], &["-O", "project", text(&img)]].concat())?.ok()?;
    fjord(&["put", "-r", text(&img), text(source.path()), "/copy"])?.ok()?;
    let found = tree(&img, "copy")?;
    for (path, project, _) in wanted {
        ensure!(found.entries[path.as_bytes()].project == project, "{path}");
    }
    source.unmount()
}
