//! `cargo xtask deb`: the Debian package of the `fjord` command.
//!
//! Builds a package from the metadata in the manifest of fjord-cli (`package.metadata.deb`, as
//! cargo-deb reads it), with the tools of dpkg. Invariants: nothing comes from outside the
//! workspace; the package is reproducible, because all times come from the changelog or
//! SOURCE_DATE_EPOCH.

mod files;
mod metadata;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::tools;

use metadata::Package;

/// Arguments of `cargo xtask deb`.
#[derive(Debug, Args)]
pub(crate) struct DebArgs {
    /// Package this program instead of a release build
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Directory for the package [default: target/debian]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only make manual pages, completions and links in target/package, for cargo-deb
    #[arg(long)]
    files_only: bool,
}

/// Builds the package and prints its path.
pub(crate) fn run(args: &DebArgs) -> Result<()> {
    let package = Package::read(&crate::workspace())?;
    let program = match &args.program {
        Some(program) => std::path::absolute(program)?,
        None => build(&package)?,
    };
    let extra = package.target.join("package");
    if args.files_only {
        files::generate(&program, &extra)?;
        println!("{}", extra.display());
        return Ok(());
    }
    let out = args.out.clone().unwrap_or_else(|| package.target.join("debian"));
    fs::create_dir_all(&out).with_context(|| format!("making {}", out.display()))?;
    let work = tempfile::Builder::new().prefix("deb-").tempdir_in(&out)?;
    let extra = work.path().join("package");
    files::generate(&program, &extra)?;
    let root = work.path().join("root");
    let epoch = package.epoch()?;
    stage(&package, &program, &extra, &root)?;
    let arch = run_tool("dpkg", |dpkg| dpkg.arg("--print-architecture"))?;
    let depends = depends(&package, &program, work.path())?;
    write_control(&package, &root, arch.trim(), &depends)?;
    let deb = out.join(format!("{}_{}_{}.deb", package.name, package.version, arch.trim()));
    run_tool("dpkg-deb", |dpkg| {
        dpkg.env("SOURCE_DATE_EPOCH", &epoch);
        dpkg.args(["--root-owner-group", "-Zxz", "--build"]).args([&root, &deb])
    })?;
    println!("{}", deb.display());
    Ok(())
}

/// Runs a program of the machine that must succeed; what it printed.
fn run_tool(program: &str, arguments: impl FnOnce(&mut Command) -> &mut Command) -> Result<String> {
    let mut command = tools::command(program)?;
    arguments(&mut command);
    Ok(tools::run(&mut command)?.ok()?.stdout)
}

/// A release build of the program.
fn build(package: &Package) -> Result<PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--release", "--locked", "--package", "fjord-cli"]);
    let status = cargo.current_dir(crate::workspace()).status()?;
    ensure!(status.success(), "the release build failed");
    Ok(package.target.join("release/fjord"))
}

/// Puts every asset below `root`, where it will be installed.
fn stage(package: &Package, program: &Path, extra: &Path, root: &Path) -> Result<()> {
    for asset in &package.assets {
        for source in package.sources(asset, program, extra)? {
            let to = root.join(asset.place(&source)?);
            let parent = to.parent().context("a place below the root")?;
            fs::create_dir_all(parent)?;
            let meta = fs::symlink_metadata(&source)?;
            if meta.is_symlink() {
                std::os::unix::fs::symlink(fs::read_link(&source)?, &to)?;
                continue;
            }
            fs::copy(&source, &to).with_context(|| format!("copying {}", source.display()))?;
            fs::set_permissions(&to, fs::Permissions::from_mode(asset.mode))?;
            if source == program {
                strip(&to)?;
            }
            if to.starts_with(root.join("usr/share/man")) {
                compress(&to)?;
            }
        }
    }
    let doc = root.join("usr/share/doc").join(&package.name);
    fs::create_dir_all(&doc)?;
    let changelog = doc.join("changelog");
    fs::copy(&package.changelog, &changelog)?;
    fs::set_permissions(&changelog, fs::Permissions::from_mode(0o644))?;
    compress(&changelog)?;
    for dir in files::directories(root)? {
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Takes the symbols off a program.
fn strip(program: &Path) -> Result<()> {
    let sections = ["--remove-section=.comment", "--remove-section=.note"];
    run_tool("strip", |strip| strip.arg("--strip-unneeded").args(sections).arg(program))?;
    Ok(())
}

/// Compresses a file; its name gets `.gz`.
fn compress(file: &Path) -> Result<()> {
    run_tool("gzip", |gzip| gzip.args(["-9", "-n"]).arg(file))?;
    Ok(())
}

/// The field Depends: `$auto` stands for the libraries of the program.
fn depends(package: &Package, program: &Path, work: &Path) -> Result<String> {
    if !package.depends.contains("$auto") {
        return Ok(package.depends.clone());
    }
    // It wants to be run in the source of a package.
    let source = work.join("source");
    fs::create_dir_all(source.join("debian"))?;
    let control = format!("Source: {0}\n\nPackage: {0}\nArchitecture: any\n", package.name);
    fs::write(source.join("debian/control"), control)?;
    let said = run_tool("dpkg-shlibdeps", |shlibdeps| {
        shlibdeps.current_dir(&source).args(["-O", "-e"]).arg(program)
    })?;
    let libraries = said
        .lines()
        .find_map(|line| line.strip_prefix("shlibs:Depends="))
        .with_context(|| format!("dpkg-shlibdeps names no libraries: {said}"))?;
    Ok(package.depends.replace("$auto", libraries))
}

/// Writes DEBIAN/control and DEBIAN/md5sums.
fn write_control(package: &Package, root: &Path, arch: &str, depends: &str) -> Result<()> {
    let mut bytes = 0;
    let mut sums = String::new();
    for file in files::regular_files(root)? {
        let below = file.strip_prefix(root)?;
        bytes += fs::metadata(&file)?.len();
        sums += &run_tool("md5sum", |md5sum| md5sum.current_dir(root).arg(below))?;
    }
    let mut fields = vec![
        ("Package", package.name.clone()),
        ("Version", package.version.clone()),
        ("Architecture", arch.to_owned()),
        ("Maintainer", package.maintainer.clone()),
        ("Installed-Size", bytes.div_ceil(1024).to_string()),
        ("Depends", depends.to_owned()),
        ("Recommends", package.recommends.clone()),
        ("Section", package.section.clone()),
        ("Priority", package.priority.clone()),
        ("Homepage", package.homepage.clone()),
        ("Description", package.description.clone()),
    ];
    fields.retain(|(_, value)| !value.is_empty());
    let mut control = String::new();
    for (name, value) in fields {
        control += &format!("{name}: {value}\n");
    }
    for line in package.extended_description.lines() {
        // An empty line would end the field.
        let line = if line.is_empty() { "." } else { line };
        control += &format!(" {line}\n");
    }
    let dir = root.join("DEBIAN");
    fs::create_dir_all(&dir)?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
    for (name, content) in [("control", control), ("md5sums", sums)] {
        let path = dir.join(name);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}
