//! The e2fsprogs commands, and images made by them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fjord_format::geometry::Geometry;
use fjord_format::superblock::RawSuperblock;
use fjord_format::types::{BlockNo, GroupNo};

/// An image made by mke2fs, read into memory as a whole.
pub(crate) struct Image {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) sb: RawSuperblock,
    pub(crate) geometry: Geometry,
}

/// Runs a command and gives its standard output; a missing command or failure ends the test.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .env("TZ", "UTC")
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("cannot run {program} ({e}); install e2fsprogs 1.47 or later"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?} failed: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs debugfs over a list of commands.
pub(crate) fn debugfs(image: &Path, commands: &[String], writable: bool) -> String {
    let script = image.with_extension("debugfs");
    fs::write(&script, commands.join("\n")).expect("the script can be written");
    let (script, image) = (script.to_str().expect("utf-8"), image.to_str().expect("utf-8"));
    if writable {
        run("debugfs", &["-w", "-f", script, image])
    } else {
        run("debugfs", &["-f", script, image])
    }
}

impl Image {
    /// Makes an image with `mke2fs ARGS IMAGE SIZE`, filled from a small tree.
    pub(crate) fn make(args: &[&str], size: &str) -> Image {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let tree = dir.path().join("tree");
        make_tree(&tree);
        let path = dir.path().join("image");
        let (tree, file) = (tree.to_str().expect("utf-8"), path.to_str().expect("utf-8"));
        let mut all = vec!["-q", "-F", "-d", tree];
        all.extend_from_slice(args);
        all.extend_from_slice(&[file, size]);
        run("mke2fs", &all);
        let commands = [
            "mknod null c 1 3",
            "mknod big b 259 70000",
            "mknod pipe p",
            "sif sub mtime 0x80000001",
            "sif sub mtime_extra 5",
            "sif pipe uid 70000",
            "sif pipe gid 0x12345678",
            "sif pipe atime_extra 4003",
        ];
        debugfs(&path, &commands.map(str::to_owned), true);
        Image::load(dir, path)
    }

    fn load(dir: tempfile::TempDir, path: PathBuf) -> Image {
        let bytes = fs::read(&path).expect("the image is there");
        let sb = RawSuperblock::decode(&bytes[1024..]).expect("mke2fs made a superblock");
        let geometry = Geometry::from_superblock(&sb).expect("mke2fs made a sound layout");
        Image { dir, path, bytes, sb, geometry }
    }

    pub(crate) fn block(&self, block: BlockNo) -> &[u8] {
        let size = self.geometry.block_size as usize;
        let start = usize::try_from(block.0).expect("a small image") * size;
        &self.bytes[start..start + size]
    }

    pub(crate) fn desc_bytes(&self, group: GroupNo) -> &[u8] {
        let (index, offset) = self.geometry.desc_location(group).expect("the group exists");
        let block = self.geometry.desc_block_location(index).expect("the block exists");
        let size = usize::from(self.geometry.desc_size);
        &self.block(block)[offset as usize..offset as usize + size]
    }

    pub(crate) fn groups(&self) -> impl Iterator<Item = GroupNo> + use<> {
        (0..self.geometry.group_count).map(GroupNo)
    }
}

/// A few files of every kind that mke2fs copies, one of them full of holes.
fn make_tree(tree: &Path) {
    use std::os::unix::fs::FileExt;
    fs::create_dir_all(tree.join("sub/deeper")).expect("directories");
    fs::write(tree.join("data"), vec![0x5a; 300_000]).expect("a file");
    std::os::unix::fs::symlink("short", tree.join("fast")).expect("a link");
    std::os::unix::fs::symlink("long/".repeat(60), tree.join("slow")).expect("a link");
    let sparse = fs::File::create(tree.join("sparse")).expect("a file");
    for place in 0..12u64 {
        sparse.write_all_at(b"island", place * 150_000).expect("written");
    }
    for index in 0..30 {
        fs::write(tree.join(format!("sub/file{index}")), b"x".repeat(index * 97)).expect("a file");
    }
}
