//! `fjord tree`: list an image as a tree.

use std::path::PathBuf;

use fjord::{FileKind, InodeRef};
use fjord_tree::readable_names;
use serde::Serialize;

use super::ls::{Entry, Unlisted};
use crate::{
    failure::{Context, Failure, Result},
    image, output,
    paths::{self, Last},
};

/// A deeper tree is damage: PATH_MAX is 4096 bytes.
const DEPTH_MAX: usize = 2048;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord tree -L 2 disk.img /usr")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Directory to start at
    #[arg(default_value = "/")]
    path: String,
    /// Maximum depth
    #[arg(short = 'L', long, value_name = "N", default_value_t = DEPTH_MAX)]
    depth: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Node {
    #[serde(flatten)]
    entry: Entry,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    children: Vec<Node>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fs = image::open_to_read(&args.image)?;
    let top = paths::find(&fs, &args.path, Last::Follow)?;
    let depth = args.depth.min(DEPTH_MAX);
    let mut unlisted = Unlisted::of(&args.image);
    let entry = Entry::new(args.path.as_bytes(), &top, &top.attr())?;
    let tree = collect(&args.path, entry, &top, depth, &mut unlisted)?;
    if args.json {
        output::json(&tree)?;
        return unlisted.result();
    }
    let mut text = format!("{}\n", tree.entry.name);
    let mut counts = (0, 0);
    draw(&tree, "", &mut text, &mut counts);
    output::print(format!("{text}\n{} directories, {} files\n", counts.0, counts.1))?;
    unlisted.result()
}

/// The tree below `file`, which has this path, but for what is damaged.
fn collect(
    path: &str,
    entry: Entry,
    file: &InodeRef,
    depth: usize,
    unlisted: &mut Unlisted<'_>,
) -> Result<Node> {
    let mut children = Vec::new();
    if file.attr().kind() == FileKind::Directory && depth > 0 {
        let (names, read) = readable_names(file);
        for name in names {
            let below = format!("{}/{}", path.trim_end_matches('/'), output::name(&name));
            let child = file.lookup(&name).map_err(Failure::from).and_then(|child| {
                let entry = Entry::new(&name, &child, &child.attr())?;
                Ok((child, entry))
            });
            let Some((child, entry)) = unlisted.pass(child.context(&below))? else { continue };
            if child.ino() == file.ino() {
                return Err(Failure::new(format!(
                    "{below}: the directory contains itself; run e2fsck -f on the image"
                )));
            }
            children.push(collect(&below, entry, &child, depth - 1, unlisted)?);
        }
        unlisted.pass(read.context(path))?;
    }
    Ok(Node { entry, children })
}

fn draw(node: &Node, indent: &str, text: &mut String, counts: &mut (usize, usize)) {
    for (i, child) in node.children.iter().enumerate() {
        let last = i + 1 == node.children.len();
        let (branch, below) = if last { ("└── ", "    ") } else { ("├── ", "│   ") };
        let target = child.entry.target.as_ref().map(|t| format!(" -> {t}")).unwrap_or_default();
        *text += &format!("{indent}{branch}{}{target}\n", child.entry.name);
        match child.entry.kind {
            "directory" => counts.0 += 1,
            _ => counts.1 += 1,
        }
        draw(child, &format!("{indent}{below}"), text, counts);
    }
}
