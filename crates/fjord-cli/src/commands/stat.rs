//! `fjord stat`: the attributes and extents of a file.

use std::path::PathBuf;

use fjord::FileKind;
use serde::Serialize;

use crate::{
    failure::{Context, Result},
    image, output,
    paths::{self, Last},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord stat --extents disk.img /var/lib/db")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// File in the image
    path: String,
    /// List the extents of the content
    #[arg(short, long)]
    extents: bool,
    /// Follow a symbolic link
    #[arg(short = 'L', long)]
    dereference: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Stat {
    path: String,
    inode: u32,
    generation: u32,
    #[serde(rename = "type")]
    kind: &'static str,
    mode: String,
    mode_octal: String,
    links: u32,
    uid: u32,
    gid: u32,
    project: u32,
    size: u64,
    blocks_512: u64,
    rdev: u32,
    flags: String,
    accessed: String,
    modified: String,
    changed: String,
    born: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    xattrs: Vec<(String, String)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    extents: Vec<Extent>,
}

#[derive(Debug, Serialize)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    state: &'static str,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fs = image::open_to_read(&args.image)?;
    let last = if args.dereference { Last::Follow } else { Last::Keep };
    let file = paths::find(&fs, &args.path, last)?;
    let a = file.attr();
    let mut xattrs = Vec::new();
    for name in file.list_xattr().context(&args.path)? {
        let value = file.get_xattr(&name).context(output::name(&name))?;
        xattrs.push((output::name(&name), output::name(&value)));
    }
    let extents = match args.extents && matches!(a.kind(), FileKind::Regular | FileKind::Directory)
    {
        true => file.fiemap(0, u64::MAX).context(&args.path)?,
        false => Vec::new(),
    };
    let stat = Stat {
        path: args.path.clone(),
        inode: a.ino.0,
        generation: a.generation,
        kind: output::kind(a.kind()),
        mode: output::mode(&a),
        mode_octal: format!("{:04o}", a.mode & 0o7777),
        links: a.nlink,
        uid: a.uid,
        gid: a.gid,
        project: a.projid,
        size: a.size,
        blocks_512: a.blocks,
        rdev: a.rdev,
        flags: format!("{:#x}", a.flags),
        accessed: stamp(a.atime),
        modified: stamp(a.mtime),
        changed: stamp(a.ctime),
        born: stamp(a.crtime),
        target: match a.kind() {
            FileKind::Symlink => Some(output::name(&file.read_link()?)),
            _ => None,
        },
        xattrs,
        extents: extents
            .iter()
            .map(|e| Extent {
                logical: e.logical,
                physical: e.physical,
                length: e.length,
                state: match (e.inline, e.unwritten) {
                    (true, _) => "inline",
                    (_, true) => "unwritten",
                    _ => "written",
                },
            })
            .collect(),
    };
    if args.json { output::json(&stat) } else { output::print(text(&stat)) }
}

fn stamp(t: fjord::Timespec) -> String {
    format!("{}.{:09} UTC", output::time(t), t.nsec)
}

fn text(s: &Stat) -> String {
    let target = s.target.as_ref().map(|t| format!(" -> {t}")).unwrap_or_default();
    let mut text = format!(
        "  File: {}{target}\n  Size: {:<14} Blocks: {:<10} {}\n Inode: {:<14} Links: {:<11} \
         Generation: {}\nAccess: ({}/{})  Uid: {}  Gid: {}  Project: {}  Flags: {}\n",
        s.path,
        s.size,
        s.blocks_512,
        s.kind,
        s.inode,
        s.links,
        s.generation,
        s.mode_octal,
        s.mode,
        s.uid,
        s.gid,
        s.project,
        s.flags,
    );
    for (label, time) in [
        ("Access", &s.accessed),
        ("Modify", &s.modified),
        ("Change", &s.changed),
        (" Birth", &s.born),
    ] {
        text += &format!("{label}: {time}\n");
    }
    for (name, value) in &s.xattrs {
        text += &format!(" Xattr: {name} = {value:?}\n");
    }
    for e in &s.extents {
        text +=
            &format!("Extent: {} + {} bytes at {}, {}\n", e.logical, e.length, e.physical, e.state);
    }
    text
}
