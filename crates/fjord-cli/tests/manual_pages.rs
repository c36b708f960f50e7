//! The manual pages: each command has one, formatters take them, and their examples work. Needs root.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::Scratch,
    tools::{self, Output},
};

/// Pages whose examples measure for minutes; that they are well-formed is tested beside the commands.
const MEASURES: [&str; 1] = ["fjord-bench.1"];

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

/// A page: its name and its source.
struct Page {
    name: String,
    path: PathBuf,
    source: String,
}

fn pages(dir: &Path) -> Result<Vec<Page>> {
    run(Command::new(program()).arg("man").arg(dir))?;
    let mut pages = Vec::new();
    for section in ["man1", "man8"] {
        for entry in fs::read_dir(dir.join(section))? {
            let path = entry?.path();
            let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
            let source = fs::read_to_string(&path)?;
            pages.push(Page { name, path, source });
        }
    }
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(pages)
}

#[test]
fn each_command_has_a_page() -> Result<()> {
    let scratch = Scratch::new("man")?;
    let pages = pages(scratch.path())?;
    let help = run(Command::new(program()).arg("--help"))?.stdout;
    let (_, commands) = help.split_once("Commands:\n").context("a list of commands")?;
    let commands = commands.lines().take_while(|line| !line.is_empty());
    let commands: BTreeSet<&str> = commands
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "help")
        .collect();
    ensure!(commands.len() > 15 && commands.contains("fsck"), "{commands:?}");
    let named = |name: &str| pages.iter().find(|page| page.name == name);
    let top = named("fjord.1").context("fjord(1)")?;
    for command in &commands {
        let page = named(&format!("fjord-{command}.1")).with_context(|| format!("no {command}"))?;
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "SEE ALSO"] {
            ensure!(
                page.source.contains(&format!(".SH {section}")) // quoted where it has a blank
                || page.source.contains(&format!(".SH \"{section}\"")),
                "{command}: no {section}"
            );
        }
        ensure!(
            top.source.contains(&format!("fjord\\-{command}(1)")),
            "{command} is not in fjord(1)"
        );
    }
    let extra = pages.iter().filter(|page| page.name.starts_with("fjord-")).count();
    ensure!(extra == commands.len(), "a page of no command");
    for name in ["mount.fuse.fjord.8", "fsck.fjord.8", "fsck.fuse.fjord.8", "mkfs.fjord.8"] {
        ensure!(named(name).is_some(), "{name}");
    }
    // The same program makes the same pages.
    let again = Scratch::new("man")?;
    for (one, other) in pages.iter().zip(self::pages(again.path())?) {
        ensure!(one.source == other.source, "{}", one.name);
    }
    Ok(())
}

#[test]
fn formatters_take_them() -> Result<()> {
    let scratch = Scratch::new("man")?;
    for page in pages(scratch.path())? {
        if let Some(other) = page.source.strip_prefix(".so ") {
            ensure!(scratch.join(other.trim_end()).is_file(), "{}: {other}", page.name);
            continue;
        }
        run(tools::command("mandoc")?.args(["-Tlint", "-Wwarning"]).arg(&page.path))?;
        let text = run(tools::command("mandoc")?.arg("-Tutf8").arg(&page.path))?.stdout;
        ensure!(!text.contains("\\f") && !text.contains("\\-"), "{}: {text}", page.name);
    }
    Ok(())
}

/// The lines of the section of examples, as somebody would type them.
fn examples(page: &Page) -> Vec<String> {
    let Some((_, section)) = page.source.split_once(".SH EXAMPLES\n.nf\n") else {
        return Vec::new();
    };
    let lines = section.lines().take_while(|line| *line != ".fi");
    lines
        .map(|line| {
            let line = line.replace("\\&", "").replace("\\*(Aq", "'").replace("\\-", "-");
            line.replace("\\\\", "\\")
        })
        .collect()
}

/// What the examples speak of, in directories and mounts of their own: `disk.img` with contents, which
/// lies in /srv, things to copy, an empty /mnt, and the program with its links in /usr/sbin.
const WORLD: &str = r#"
set -e
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs none "$1"
for dir in usr/sbin usr/local/share etc; do
    mkdir -p "$1/$dir/up" "$1/$dir/work"
    mount -t overlay -o "lowerdir=/$dir,upperdir=$1/$dir/up,workdir=$1/$dir/work" o "/$dir"
done
# The program may lie below a directory that is hidden below.
touch /usr/sbin/fjord
mount --bind "$2" /usr/sbin/fjord
for name in mount.fuse.fjord fsck.fuse.fjord fsck.fjord mkfs.fjord; do
    ln -s fjord "/usr/sbin/$name"
done
mkdir -p /etc/bash_completion.d
while umount -l /mnt 2>/dev/null; do :; done
mount -t tmpfs none /srv
mkdir /srv/world
cd /srv/world
mkdir -p rootfs/etc rootfs/var/log rootfs/var/lib rootfs/usr/share rootfs/tmp/build rootfs/srv/www \
    rootfs/bin rootfs/run site
for file in rootfs/etc/fstab rootfs/var/log/messages rootfs/var/lib/db rootfs/usr/share/words \
    rootfs/tmp/build/a.o rootfs/srv/page site/index.html hello.txt rootfs/etc/shadow \
    rootfs/etc/old.conf rootfs/bin/su rootfs/bin/busybox rootfs/a rootfs/b rootfs/srv/www/page; do
    echo "content of $file" >$file
done
ln -s /proc/mounts rootfs/etc/mtab
tar -C rootfs -cz -f layer.tar.gz .
tar -C rootfs -cz -f base.tar.gz .
tar -C site -c . | zstd -q -o app.tar.zst
tar -C site -c -f rootfs/backup.tar .
mkdir /srv/images /srv/backup
printf '#!/bin/sh\nexec tar -C /srv/world/site -c .\n' >/usr/sbin/docker
chmod +x /usr/sbin/docker
fjord mkfs --size 96M -J 32M --from-dir rootfs /srv/disk.img >/dev/null
ln -s /srv/disk.img disk.img
mount -t tmpfs none /tmp
# That of the test may lie below /tmp.
export TMPDIR=/tmp
mkdir /tmp/ufs
clean_up() {
    losetup -n -O NAME -j /tmp/ufs/disk | xargs -r losetup -d
    for dir in /mnt /tmp/ufs; do
        if grep -q " $dir fuse" /proc/mounts; then fjord umount --lazy $dir; fi
    done
}
trap clean_up EXIT
"#;

/// What has to be there before an example of this page can be tried.
fn before(page: &str, example: &str) -> &'static str {
    let mounts_itself = example.contains("fjord mount") || example.starts_with("mount -t");
    match page {
        "fjord-sim.1" if example.contains("--cut") => {
            "fjord sim --profile ufs --size 64M --daemon /tmp/ufs; fjord mkfs /tmp/ufs/disk\n"
        }
        "fjord-sim.1" if !example.contains("--profile") => {
            "fjord sim --profile ufs --size 64M --daemon /tmp/ufs\n"
        }
        "mount.fuse.fjord.8" if !mounts_itself => "fjord mount --daemon /srv/disk.img /mnt\n",
        // A disk whose second partition is an image.
        _ if example.contains("sda.img") => {
            "truncate -s 66M sda.img; echo '2: start=2048, size=131072' | \
             sfdisk -q --label gpt sda.img; fjord mkfs -q --from-dir rootfs sda.img@2\n"
        }
        "fjord-umount.1" => "fjord mount --daemon disk.img /mnt\n",
        _ if example.contains("/mnt") && !mounts_itself => "fjord mount --daemon disk.img /mnt\n",
        _ if example.contains("mkfs") => "rm -f disk.img\n",
        _ => "",
    }
}

/// The example as a script: one that serves is unmounted, one that goes on for ever is ended.
fn script(page: &str, example: &str) -> String {
    let serves = example.starts_with("fjord mount") && !example.contains("--daemon");
    let tried = if serves {
        format!(
            "{example} & until grep -q ' /mnt fuse' /proc/mounts; do kill -0 $!; sleep 0.02; \
             done\nfjord umount /mnt\nwait $!\n"
        )
    } else if example.contains("--watch") {
        let ended = "[ $? = 124 ]";
        format!("set +e\ntimeout 2 {example}\n{ended}\n")
    } else {
        format!("{example}\n")
    };
    format!("{WORLD}{}{tried}", before(page, example))
}

/// Runs an example; what went wrong, if anything did.
fn try_example(page: &str, example: &str, world: &Path) -> Result<Option<String>> {
    let mut shell = tools::command("timeout")?;
    shell.args(["600", "unshare", "--mount", "--propagation", "private", "--pid", "--fork"]);
    shell.args(["--kill-child", "--mount-proc", "sh", "-c", &script(page, example), "sh"]);
    let done = tools::run(shell.arg(world).arg(program()))?;
    let failed = || format!("{page}: {example}: {:?}\n{}{}", done.code, done.stdout, done.stderr);
    Ok((done.code != Some(0)).then(failed))
}

/// The guide to images, in which a column of remarks stands behind some examples.
#[test]
fn every_example_of_the_guide_works() -> Result<()> {
    tools::require(&["timeout", "unshare", "fakeroot", "zstd", "sfdisk"])?;
    let scratch = Scratch::new("guide")?;
    let guide = include_str!("../../../docs/images.md");
    let lines = guide.lines().filter_map(|line| line.strip_prefix("    "));
    let examples: Vec<&str> =
        lines.map(|line| line.split("   ").next().unwrap_or_default()).collect();
    ensure!(examples.len() > 20, "{examples:?}");
    let tried = examples.iter().map(|example| try_example("images.md", example, scratch.path()));
    let failed: Vec<String> = tried.filter_map(Result::transpose).collect::<Result<_>>()?;
    ensure!(failed.is_empty(), "examples that fail:\n{}", failed.join("\n"));
    Ok(())
}

#[test]
fn every_example_works() -> Result<()> {
    tools::require(&["timeout", "unshare", "jq", "e2fsck", "losetup", "zstd"])?;
    let scratch = Scratch::new("man")?;
    let world = scratch.join("world");
    fs::create_dir(&world)?;
    let mut tried = 0;
    let (mut failed, mut without) = (Vec::new(), Vec::new());
    for page in pages(&scratch.join("pages"))? {
        let examples = examples(&page);
        if examples.is_empty() && !page.source.starts_with(".so ") {
            without.push(page.name.clone());
        }
        for example in examples.iter().filter(|_| !MEASURES.contains(&page.name.as_str())) {
            failed.extend(try_example(&page.name, example, &world)?);
            tried += 1;
        }
    }
    ensure!(failed.is_empty(), "examples that fail:\n{}", failed.join("\n"));
    ensure!(tried > 30, "{tried} examples");
    ensure!(without == ["fjord.1"], "pages without examples: {without:?}");
    Ok(())
}

/// Where a package puts them, man(1) and its like find them by their names.
#[test]
fn aliases_lead_to_their_pages() -> Result<()> {
    let scratch = Scratch::new("man")?;
    let dir = scratch.join("man");
    pages(&dir)?;
    symlink(&dir, scratch.join("link"))?;
    for (alias, words) in [
        ("fsck.fjord", "recover its journal, then run e2fsck"),
        ("fsck.fjord", "FSCK.FJORD(8)"),
        ("fsck.fuse.fjord", "recover its journal, then run e2fsck"),
        ("mkfs.fjord", "make a new image"),
        ("mkfs.fjord", "MKFS.FJORD(8)"),
        ("mount.fuse.fjord", "fuse.fjord"),
    ] {
        let mut man = tools::command("man")?;
        man.env("MANPATH", scratch.join("link")).env("MANPAGER", "cat").env("MANWIDTH", "200");
        let text = run(man.arg(alias))?.stdout;
        ensure!(text.contains(words), "{alias}: {text}");
    }
    Ok(())
}
