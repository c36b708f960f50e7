//! What the program itself says about itself, as files: manual pages, completions, and the links by
//! which other programs call it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use fjord_testkit::tools;

/// Names of the program in /usr/sbin.
pub(super) const LINKS: [&str; 4] =
    ["mount.fuse.fjord", "fsck.fuse.fjord", "fsck.fjord", "mkfs.fjord"];
/// What a link leads to, from /usr/sbin.
const TARGET: &str = "../bin/fjord";
/// Shells, and the names that they give the script.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "fjord.bash"), ("zsh", "_fjord"), ("fish", "fjord.fish")];

/// Makes the directories `man`, `completions` and `links` in `dir`, in place of what was there.
pub(super) fn generate(program: &Path, dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing {}", dir.display()));
        }
        _ => {}
    }
    for sub in ["completions", "links"] {
        fs::create_dir_all(dir.join(sub))?;
    }
    tools::run(Command::new(program).arg("man").arg(dir.join("man")))?.ok()?;
    for (shell, name) in COMPLETIONS {
        let script = tools::run(Command::new(program).args(["completions", shell]))?.ok()?;
        fs::write(dir.join("completions").join(name), script.stdout)?;
    }
    for name in LINKS {
        std::os::unix::fs::symlink(TARGET, dir.join("links").join(name))?;
    }
    Ok(())
}

/// The regular files below a directory, in the order of their names.
pub(super) fn regular_files(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(below(dir)?.into_iter().filter(|path| !path.is_symlink() && path.is_file()).collect())
}

/// A directory and those below it.
pub(super) fn directories(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut all = below(dir)?;
    all.retain(|path| !path.is_symlink() && path.is_dir());
    all.push(dir.to_owned());
    Ok(all)
}

fn below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir)?.map(|entry| entry.map(|e| e.path())).collect::<io::Result<_>>()?;
    entries.sort();
    for path in entries {
        if path.is_dir() && !path.is_symlink() {
            found.extend(below(&path)?);
        }
        found.push(path);
    }
    Ok(found)
}
