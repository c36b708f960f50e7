//! `cargo xtask packages`: whether the library crates are ready for crates.io.
//!
//! Owns the list of what is published. Invariant: a crate of the workspace is either on the list, with
//! complete metadata, or has `publish = false`. Nothing is uploaded.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

/// The published crates, each after its dependencies.
const LIBRARIES: [&str; 8] = [
    "fjord-format",
    "fjord-block",
    "fjord-journal",
    "fjord-mkfs",
    "fjord-rbd",
    "fjord-fs",
    "fjord-tree",
    "fjord-fuse",
];
/// What crates.io takes: keywords of a crate, bytes of one.
const KEYWORDS_MAX: usize = 5;
const KEYWORD_BYTES_MAX: usize = 20;
/// Files that each package has.
const FILES: [&str; 5] = ["Cargo.toml", "README.md", "LICENSE-APACHE", "LICENSE-MIT", "src/lib.rs"];

/// Arguments of `cargo xtask packages`.
#[derive(Debug, Args)]
pub(crate) struct PackagesArgs {
    /// Do not build the packages from their contents
    #[arg(long)]
    no_verify: bool,
}

/// Checks metadata, contents and documentation, then has cargo do all but the upload.
pub(crate) fn run(args: &PackagesArgs) -> Result<()> {
    let root = crate::workspace();
    println!("== metadata");
    let faults = faults(&metadata(&root)?);
    for fault in &faults {
        println!("   {fault}");
    }
    ensure!(faults.is_empty(), "{} errors in the metadata", faults.len());
    println!("== contents");
    for library in LIBRARIES {
        let output = output(&root, &["package", "--list", "--allow-dirty", "--package", library])?;
        let files: BTreeSet<&str> = output.lines().collect();
        for file in FILES {
            ensure!(files.contains(file), "{library}: the package has no {file}");
        }
        println!("   {library}: {} files", files.len());
    }
    let each: Vec<&str> = LIBRARIES.iter().flat_map(|library| ["--package", *library]).collect();
    println!("== documentation");
    let mut doc = Command::new(env!("CARGO"));
    doc.args(["doc", "--no-deps", "--quiet", "--keep-going"])
        .args(&each)
        .env("RUSTDOCFLAGS", "-D warnings");
    ensure!(doc.current_dir(&root).status()?.success(), "the documentation has errors");
    println!("== cargo publish --dry-run");
    let mut publish = Command::new(env!("CARGO"));
    publish.args(["publish", "--dry-run", "--allow-dirty"]).args(&each);
    if args.no_verify {
        publish.arg("--no-verify");
    }
    ensure!(publish.current_dir(&root).status()?.success(), "cargo publish --dry-run failed");
    println!("{} packages are ready, in this order: {}", LIBRARIES.len(), LIBRARIES.join(", "));
    Ok(())
}

fn output(root: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(env!("CARGO"));
    let output =
        command.args(arguments).current_dir(root).output().context("cannot start cargo")?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("cargo {} failed: {errors}", arguments.join(" "));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// What cargo knows of the workspace.
fn metadata(root: &Path) -> Result<Value> {
    let text = output(root, &["metadata", "--no-deps", "--offline", "--format-version", "1"])?;
    Ok(serde_json::from_str(&text)?)
}

/// Problems that prevent the crates from being published.
fn faults(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let mut faults = Vec::new();
    let named = |name: &str| packages.iter().find(|package| package["name"] == name);
    for library in LIBRARIES {
        match named(library) {
            Some(package) => {
                let found = faults_of(package);
                faults.extend(found.into_iter().map(|fault| format!("{library}: {fault}")));
            }
            None => faults.push(format!("{library}: there is no such crate")),
        }
    }
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let is_private = package["publish"].as_array().is_some_and(Vec::is_empty);
        if !is_private && !LIBRARIES.contains(&name) {
            faults.push(format!("{name}: set publish = false, or add it to the libraries"));
        }
    }
    faults
}

/// Faults of one library.
fn faults_of(package: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for field in ["description", "license", "repository", "readme", "rust_version"] {
        if package[field].as_str().is_none_or(str::is_empty) {
            faults.push(format!("no {field}"));
        }
    }
    if package["publish"].is_array() {
        faults.push("publish = false".to_owned());
    }
    for (list, max) in [("keywords", KEYWORDS_MAX), ("categories", KEYWORDS_MAX)] {
        let entries = package[list].as_array().map_or(&[][..], Vec::as_slice);
        if entries.is_empty() || entries.len() > max {
            faults.push(format!("{} {list}; 1 to {max} are expected", entries.len()));
        }
        let too_long =
            |entry: &&Value| entry.as_str().is_none_or(|keyword| keyword.len() > KEYWORD_BYTES_MAX);
        if list == "keywords"
            && let Some(keyword) = entries.iter().find(too_long)
        {
            faults.push(format!("keyword {keyword} is longer than {KEYWORD_BYTES_MAX} bytes"));
        }
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let name = dependency["name"].as_str().unwrap_or_default();
        // Those of tests alone are left out of the package where they have no version.
        if dependency["path"].is_null() || dependency["kind"] == "dev" {
            continue;
        }
        if dependency["req"] == "*" {
            faults.push(format!("the dependency {name} has no version"));
        }
        if !LIBRARIES.contains(&name) {
            faults.push(format!("the dependency {name} is not published"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::{LIBRARIES, faults, metadata};
    use serde_json::{Value, json};

    /// Takes something from the metadata of the packages.
    type Harm<'a> = &'a dyn Fn(&mut Value);

    #[test]
    fn the_libraries_are_ready() {
        let metadata = metadata(&crate::workspace()).unwrap();
        assert_eq!(faults(&metadata), Vec::<String>::new());
    }

    #[test]
    fn what_is_missing_is_told() {
        let sound = metadata(&crate::workspace()).unwrap();
        let place = |name: &str| {
            let packages = sound["packages"].as_array().unwrap();
            packages.iter().position(|package| package["name"] == name).unwrap()
        };
        let journal = place("fjord-journal");
        let block = sound["packages"][journal]["dependencies"].as_array().unwrap();
        let block = block.iter().position(|dependency| dependency["name"] == "fjord-block");
        let cases: [(Harm<'_>, &str); 7] = [
            (&|p| p[journal]["description"] = Value::Null, "fjord-journal: no description"),
            (&|p| p[journal]["readme"] = Value::Null, "fjord-journal: no readme"),
            (&|p| p[journal]["keywords"] = json!([]), "0 keywords"),
            (&|p| p[journal]["keywords"] = json!(["a-keyword-beyond-twenty"]), "longer than"),
            (&|p| p[journal]["publish"] = json!([]), "publish = false"),
            (&|p| p[journal]["dependencies"][block.unwrap()]["req"] = json!("*"), "no version"),
            (&|p| p[place("fjord-testkit")]["publish"] = Value::Null, "fjord-testkit: set publish"),
        ];
        for (harm, expected) in cases {
            let mut harmed = sound.clone();
            harm(&mut harmed["packages"]);
            let faults = faults(&harmed);
            assert!(faults.len() == 1 && faults[0].contains(expected), "{expected}: {faults:?}");
        }
        assert_eq!(faults(&json!({"packages": []})).len(), LIBRARIES.len());
    }
}
