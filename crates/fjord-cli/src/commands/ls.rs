//! `fjord ls`: list a directory.

use std::path::{Path, PathBuf};

use fjord::{Attr, FileKind, InodeRef};
use fjord_tree::readable_names;
use serde::Serialize;

use crate::{
    failure::{Context, EXIT_DAMAGED, Failure, Result},
    image, output,
    paths::{self, Last},
};

#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  fjord ls disk.img\n  fjord ls -lh disk.img /etc\n  \
fjord ls --json disk.img / | jq '.[].name'"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Directory or file
    #[arg(default_value = "/")]
    path: String,
    /// Also show mode, owner, size and time
    #[arg(short, long)]
    long: bool,
    /// With -l: sizes with units
    #[arg(short = 'h', long)]
    human_readable: bool,
    /// Also show . and .. (names that begin with a dot are always shown)
    #[arg(short, long)]
    all: bool,
    /// As ls(1) has it: a name on each line, as always
    #[arg(short = '1', hide = true)]
    one: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// A directory entry with the attributes of its file.
#[derive(Debug, Serialize)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) inode: u32,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    mode: String,
    links: u32,
    uid: u32,
    gid: u32,
    pub(super) size: u64,
    modified: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) target: Option<String>,
}

impl Entry {
    pub(super) fn new(name: &[u8], file: &InodeRef, attr: &Attr) -> Result<Entry> {
        let target = match attr.kind() {
            FileKind::Symlink => Some(output::name(&file.read_link()?)),
            _ => None,
        };
        Ok(Entry {
            name: output::name(name),
            inode: attr.ino.0,
            kind: output::kind(attr.kind()),
            mode: output::mode(attr),
            links: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            size: attr.size,
            modified: output::time(attr.mtime),
            target,
        })
    }
}

/// The names in a directory, in order, without `.` and `..`.
pub(crate) fn names(dir: &InodeRef) -> Result<Vec<Vec<u8>>> {
    let (names, read) = readable_names(dir);
    read?;
    Ok(names)
}

/// What cannot be listed, because it is damaged. As with ls(1) on Linux's mount the rest is.
pub(super) struct Unlisted<'a> {
    image: &'a Path,
    count: usize,
}

impl<'a> Unlisted<'a> {
    pub(super) fn of(image: &'a Path) -> Unlisted<'a> {
        Unlisted { image, count: 0 }
    }

    /// What was read. If it is damaged, that is said and counted; other failures stay failures.
    pub(super) fn pass<T>(&mut self, read: Result<T>) -> Result<Option<T>> {
        match read {
            Ok(value) => Ok(Some(value)),
            Err(failure) if failure.code == EXIT_DAMAGED => {
                output::complain(failure.of_image(Some(self.image)));
                self.count += 1;
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    /// # Errors
    /// Of damage, if there was any.
    pub(super) fn result(&self) -> Result<()> {
        match self.count {
            0 => Ok(()),
            1 => {
                Err(Failure::new("one damaged entry or part of a directory is not listed")
                    .of_damage())
            }
            count => {
                let what =
                    format!("{count} damaged entries or parts of directories are not listed");
                Err(Failure::new(what).of_damage())
            }
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fs = image::open_to_read(&args.image)?;
    let file = paths::find(&fs, &args.path, Last::Follow)?;
    let attr = file.attr();
    let mut entries = Vec::new();
    let mut unlisted = Unlisted::of(&args.image);
    if attr.kind() == FileKind::Directory {
        if args.all {
            entries.push(Entry::new(b".", &file, &attr)?);
            let parent = file.lookup(b"..").context(&args.path)?;
            entries.push(Entry::new(b"..", &parent, &parent.attr())?);
        }
        let (names, read) = readable_names(&file);
        for name in names {
            let below = format!("{}/{}", args.path.trim_end_matches('/'), output::name(&name));
            let child = file.lookup(&name).context(below);
            let entry = child.and_then(|child| Entry::new(&name, &child, &child.attr()));
            entries.extend(unlisted.pass(entry)?);
        }
        unlisted.pass(read.context(&args.path))?;
    } else {
        entries.push(Entry::new(args.path.as_bytes(), &file, &attr)?);
    }
    if args.json {
        output::json(&entries)?;
    } else {
        let size = |bytes: u64| match args.human_readable {
            true => crate::size::show(bytes),
            false => bytes.to_string(),
        };
        let lines = entries.iter().map(|e| match args.long {
            true => long(e, &size(e.size)),
            false => format!("{}\n", e.name),
        });
        output::print(lines.collect())?;
    }
    unlisted.result()
}

/// The line of `ls -l`; `size` as it is to be shown.
fn long(e: &Entry, size: &str) -> String {
    let target = e.target.as_ref().map(|t| format!(" -> {t}")).unwrap_or_default();
    format!(
        "{} {:>3} {:>5} {:>5} {size:>12} {} {}{target}\n",
        e.mode, e.links, e.uid, e.gid, e.modified, e.name
    )
}
