//! Images that are damaged here and there: reading goes as far as Linux's goes. Needs root.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_format::{
    geometry::Geometry,
    superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES},
};
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools::{self, Output},
};

fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn fjord(args: &[&str]) -> Result<Output> {
    tools::run(Command::new(program()).args(args))
}

/// An image with a few directories, filled by Linux.
struct Image {
    scratch: Scratch,
    path: PathBuf,
}

impl Image {
    fn new(name: &str, mke2fs: &[&str]) -> Result<Image> {
        let scratch = Scratch::new(name)?;
        let path = scratch.join("image");
        image::make_sparse(&path, 96 << 20)?;
        let mut make = tools::command("mke2fs")?;
        make.args(["-q", "-F", "-t", "ext4", "-b", "1024", "-O", "^flex_bg"]).args(mke2fs);
        run(make.arg(&path))?;
        let linux = KernelMount::new(&path, "rw")?;
        for dir in 0..8 {
            let dir = linux.path().join(format!("dir-{dir}"));
            fs::create_dir(&dir)?;
            fs::write(dir.join("file"), format!("in {}", dir.display()))?;
        }
        let many = linux.path().join("many");
        fs::create_dir(&many)?;
        for number in 0..300 {
            fs::write(many.join(format!("a file with a long name, number {number}")), "x")?;
        }
        linux.unmount()?;
        image::e2fsck_clean(&path)?;
        Ok(Image { scratch, path })
    }

    fn text(&self) -> &str {
        self.path.to_str().unwrap_or_default()
    }

    fn geometry(&self) -> Result<(Geometry, RawSuperblock)> {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        File::open(&self.path)?.read_exact_at(&mut bytes, SUPERBLOCK_OFFSET_BYTES)?;
        let raw = RawSuperblock::decode(&bytes)?;
        Ok((Geometry::from_superblock(&raw)?, raw))
    }

    /// Changes bytes at an offset of the image.
    fn change(&self, offset: u64, change: impl FnOnce(&mut [u8; 4])) -> Result<()> {
        let file = File::options().read(true).write(true).open(&self.path)?;
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, offset)?;
        change(&mut bytes);
        Ok(file.write_all_at(&bytes, offset)?)
    }

    /// Changes a byte of a group's descriptor.
    fn damage_descriptor(&self, group: u32, byte: u64) -> Result<()> {
        let (geometry, _) = self.geometry()?;
        let table = geometry.desc_block_location(0).context("a table")?.0;
        let size = u64::from(geometry.desc_size);
        let offset = table * u64::from(geometry.block_size) + u64::from(group) * size + byte;
        self.change(offset, |bytes| bytes[0] ^= 0x55)
    }

    /// The offset of the first block of a file.
    fn block_of(&self, path: &str) -> Result<u64> {
        let said = image::debugfs(&self.path, &format!("blocks {path}"))?;
        let first = said.split_whitespace().next().context("a block")?;
        Ok(first.parse::<u64>()? * u64::from(self.geometry()?.0.block_size))
    }

    /// The offsets of the blocks of a directory.
    fn blocks_of(&self, path: &str) -> Result<Vec<u64>> {
        let block_size = u64::from(self.geometry()?.0.block_size);
        let said = image::debugfs(&self.path, &format!("blocks {path}"))?;
        said.split_whitespace().map(|word| Ok(word.parse::<u64>()? * block_size)).collect()
    }

    /// The records of a block of a directory: offset in the image, and name.
    fn records_of(&self, block: u64) -> Result<Vec<(u64, String)>> {
        let mut bytes = vec![0; self.geometry()?.0.block_size as usize];
        File::open(&self.path)?.read_exact_at(&mut bytes, block)?;
        let (mut records, mut at) = (Vec::new(), 0);
        while at + 8 < bytes.len() {
            let name = &bytes[at + 8..at + 8 + usize::from(bytes[at + 6])];
            // The last may be the checksum's.
            if bytes[at..at + 4] != [0; 4] {
                let name = std::str::from_utf8(name)?.to_owned();
                records.push((block + at as u64, name));
            }
            at += usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]])).max(8);
        }
        Ok(records)
    }

    /// Makes the directory `/deep`, whose index has two levels. Returns its names, sorted.
    fn fill_two_levels(&self) -> Result<Vec<String>> {
        let linux = KernelMount::new(&self.path, "rw")?;
        let deep = linux.path().join("deep");
        fs::create_dir(&deep)?;
        let mut names = Vec::new();
        for number in 0..900 {
            let name = format!("{number:04}-{}", "long".repeat(58));
            fs::hard_link(linux.path().join("dir-0/file"), deep.join(&name))?;
            names.push(name);
        }
        linux.unmount()?;
        image::e2fsck_clean(&self.path)?;
        Ok(names)
    }

    /// The offsets of the nodes of a directory's index below the root: the first leads to the first names.
    fn nodes_of(&self, path: &str) -> Result<Vec<u64>> {
        let (geometry, _) = self.geometry()?;
        let file = File::open(&self.path)?;
        let mut block = vec![0; geometry.block_size as usize];
        let blocks = self.blocks_of(path)?;
        let target = |bytes: &[u8]| {
            let number = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            blocks.get(number as usize).copied().context("a block of the directory")
        };
        file.read_exact_at(&mut block, *blocks.first().context("a root")?)?;
        let levels = block[30];
        ensure!(levels == 1, "{levels} levels below the root");
        // dx_root: limit and count at 32, then pairs of a hash and a block; the first has no hash.
        let count = usize::from(u16::from_le_bytes([block[34], block[35]]));
        (0..count).map(|entry| target(&block[36 + 8 * entry..])).collect()
    }

    /// The whole tree as Linux, `fjord get` and a mount of fjord read it, all read-only: the same.
    fn check_reading(&self) -> Result<()> {
        let before = fs::read(&self.path)?;
        let (out, theirs) = (self.scratch.join("out"), self.scratch.join("theirs"));
        let linux = KernelMount::new(&self.path, "ro,noload")?;
        let wanted = Manifest::from_directory(linux.path())?;
        run(tools::command("cp")?.arg("-a").arg(linux.path()).arg(&theirs))?;
        linux.unmount()?;
        let fuse = FjordMount::with_program(program(), &self.path, &["-o", "ro,noload"])?;
        let found = Manifest::from_directory(fuse.path())?;
        wanted.diff(&found, &Compare::SAME_IMAGE).ok("Linux", "fjord")?;
        fuse.unmount()?;
        let (from, to) = (self.text(), out.to_str().context("a plain path")?);
        fjord(&["get", "-r", from, "/", to])?.ok()?;
        run(tools::command("diff")?.args(["-r", "--no-dereference"]).arg(&out).arg(&theirs))?;
        fs::remove_dir_all(&out)?;
        fs::remove_dir_all(&theirs)?;
        ensure!(fs::read(&self.path)? == before, "reading has written");
        Ok(())
    }
}

#[test]
fn a_descriptor_with_a_wrong_checksum_is_used_for_reading() -> Result<()> {
    for (features, csum_offset) in [("metadata_csum", 0x1e), ("^metadata_csum,uninit_bg", 0x1e)] {
        let image = Image::new("descriptor", &["-O", features])?;
        let groups = image.geometry()?.0.group_count;
        ensure!(groups > 4, "{groups} groups");
        for group in [0, 1, groups - 1] {
            // The checksum itself; a count that it covers.
            for byte in [csum_offset, 0x0c] {
                image.damage_descriptor(group, byte)?;
                image.check_reading().with_context(|| format!("group {group}, byte {byte}"))?;
                let said = fjord(&["ls", image.text()])?.ok()?.stderr;
                ensure!(said.contains(&format!("group {group}")), "{said}");
                ensure!(!said.contains("now read-only"), "{said}");
                // For writing it is refused, as by Linux.
                let said = fjord(&["mkdir", image.text(), "/new"])?;
                ensure!(said.code == Some(4), "{}", said.stderr);
                image.damage_descriptor(group, byte)?;
            }
        }
        image::e2fsck_clean(&image.path)?;
    }
    Ok(())
}

/// A table that cannot lie there: what is in other groups can be read.
#[test]
fn an_impossible_inode_table_is_not_used() -> Result<()> {
    let image = Image::new("table", &[])?;
    image.damage_descriptor(0, 0x0a)?;
    let said = fjord(&["ls", image.text()])?;
    ensure!(said.code == Some(4) && said.stderr.contains("group 0"), "{}", said.stderr);
    Ok(())
}

/// The root of an index: a wrong hash, length, depth or limit. Without checksums, which Linux holds against
/// the whole directory.
#[test]
fn a_directory_with_a_damaged_index_is_read_without_it() -> Result<()> {
    let image = Image::new("index", &["-O", "^metadata_csum"])?;
    image.check_reading().context("before")?;
    let root = image.block_of("/many")?;
    // dx_root: info at 24 (reserved, hash_version, info_length, indirect_levels, flags), then limit and count.
    for (offset, byte) in [(28, 0), (28, 1), (28, 2), (32, 0)] {
        image.change(root + offset, |bytes| bytes[byte] ^= 0x5a)?;
        image.check_reading().with_context(|| format!("{offset} + {byte}"))?;
        let listed = fjord(&["ls", image.text(), "/many"])?.ok()?.stdout;
        ensure!(listed.lines().count() == 300, "{listed}");
        image.change(root + offset, |bytes| bytes[byte] ^= 0x5a)?;
    }
    image::e2fsck_clean(&image.path).map(drop)
}

/// A node of the index below the root: a wrong limit, count, order or target. Linux reads on where limit or count
/// on the way to the first name are wrong; fjord wherever the damage is.
#[test]
fn a_directory_with_a_damaged_node_is_read_without_its_index() -> Result<()> {
    for features in ["^metadata_csum", "metadata_csum"] {
        let image = Image::new("node", &["-O", features])?;
        let names = image.fill_two_levels()?;
        let nodes = image.nodes_of("/deep")?;
        ensure!(nodes.len() >= 2, "{} nodes", nodes.len());
        let listed = |is_damaged: bool| -> Result<Vec<String>> {
            let said = fjord(&["ls", image.text(), "/deep"])?.ok()?;
            let is_told =
                said.stderr.contains("its index is damaged, and all its blocks are searched");
            ensure!(is_told == is_damaged, "{}", said.stderr);
            Ok(said.stdout.lines().map(str::to_owned).collect())
        };
        ensure!(listed(false)?.len() == names.len());
        for (at, node) in nodes.iter().enumerate() {
            // dx_node: the length of the entry that hides it at 4, limit and count at 8, the first target at 12
            // (beyond the directory, or another of its blocks), the second hash at 16.
            for (offset, byte) in [(4, 1), (8, 0), (10, 1), (12, 2), (12, 0), (16, 3)] {
                let flip = if (offset, byte) == (12, 0) { 1 } else { 0xff };
                let mut before = [0; 4];
                image.change(node + offset, |bytes| {
                    before = *bytes;
                    bytes[byte] ^= flip;
                    if offset == 16 {
                        // Behind that of the third: a wrong one that is in order does not show in the node.
                        *bytes = [0xfe, 0xff, 0xff, 0xff];
                    }
                })?;
                let what = format!("{features}: node {at}, {offset} + {byte}");
                let mut found = listed(true).context(what.clone())?;
                found.sort();
                ensure!(found == names, "{what}: {} of {}", found.len(), names.len());
                for name in names.iter().step_by(181) {
                    fjord(&["cat", image.text(), &format!("/deep/{name}")])?
                        .ok()
                        .context(what.clone())?;
                }
                if at == 0 && (8..12).contains(&offset) && features == "^metadata_csum" {
                    image.check_reading().context(what)?;
                }
                image.change(node + offset, |bytes| *bytes = before)?;
            }
        }
        image::e2fsck_clean(&image.path)?;
    }
    Ok(())
}

/// The names in a directory of a mount, sorted, and whether the listing ended with an error.
fn listing(dir: &Path) -> Result<(Vec<String>, bool)> {
    let (mut names, mut failed) = (Vec::new(), false);
    for entry in fs::read_dir(dir)? {
        match entry {
            Ok(entry) => names.push(entry.file_name().to_string_lossy().into_owned()),
            Err(error) => {
                ensure!(error.raw_os_error() == Some(libc::EUCLEAN), "{error}");
                failed = true;
                break;
            }
        }
    }
    names.sort();
    Ok((names, failed))
}

/// Every way of listing shows the names of `/many` but for the lost ones, and tells the damage last.
fn check_listings(image: &Image, wanted: &[String], lost: &str) -> Result<()> {
    let said = fjord(&["ls", image.text(), "/many"])?;
    let names: Vec<_> = said.stdout.lines().collect();
    ensure!(names == wanted, "{} of {}", names.len(), wanted.len());
    ensure!(
        said.code == Some(4) && said.stderr.contains("/many: damaged directory"),
        "{}",
        said.stderr
    );
    let said = fjord(&["tree", image.text()])?;
    let shown = said.stdout.lines().filter(|line| line.contains("a file with")).count();
    ensure!(said.code == Some(4) && shown == wanted.len(), "{shown}: {}", said.stderr);
    ensure!(said.stdout.contains("dir-7"), "{}", said.stdout);
    let out = image.scratch.join("out");
    let said = fjord(&["get", "-r", image.text(), "/", out.to_str().context("a plain path")?])?;
    ensure!(said.code == Some(4), "{}", said.stderr);
    ensure!(listing(&out.join("many"))? == (wanted.to_vec(), false), "get");
    ensure!(out.join("dir-7/file").exists(), "what lies beside it");
    fs::remove_dir_all(&out)?;
    for (name, code) in [(wanted[0].as_str(), 0), (lost, 4)] {
        let said = fjord(&["cat", image.text(), &format!("/many/{name}")])?;
        ensure!(said.code == Some(code), "{name}: {}", said.stderr);
    }
    let fuse = FjordMount::with_program(program(), &image.path, &["-o", "ro,noload"])?;
    for round in 0..2 {
        ensure!(listing(&fuse.path().join("many"))? == (wanted.to_vec(), true), "round {round}");
    }
    fuse.unmount()
}

/// A block of names: a record that cannot be. Linux passes over the rest of the block, and over a block with a
/// wrong checksum in a directory without an index.
#[test]
fn a_directory_with_a_damaged_leaf_is_read_but_for_it() -> Result<()> {
    for (features, has_index, has_csum) in [
        ("^metadata_csum", true, false),
        ("^metadata_csum,^dir_index", false, false),
        ("metadata_csum", true, true),
        ("metadata_csum,^dir_index", false, true),
    ] {
        let image = Image::new("leaf", &["-O", features])?;
        let all: Vec<String> = fjord(&["ls", image.text(), "/many"])?
            .ok()?
            .stdout
            .lines()
            .map(str::to_owned)
            .collect();
        let leaves = image.blocks_of("/many")?.split_off(usize::from(has_index));
        ensure!(leaves.len() > 8, "{} leaves", leaves.len());
        for leaf in [0, 1, leaves.len() / 2, leaves.len() - 1] {
            let records = image.records_of(leaves[leaf])?;
            let bad = 3.min(records.len() - 1);
            let lost = &records[if has_csum { 0 } else { bad }..];
            if lost.iter().any(|(_, name)| name == ".") {
                continue;
            }
            let mut wanted = all.clone();
            wanted.retain(|name| lost.iter().all(|(_, lost)| lost != name));
            image.change(records[bad].0 + 4, |bytes| bytes[0] ^= 2)?;
            let what = format!("{features}: leaf {leaf}");
            check_listings(&image, &wanted, &lost[0].1).context(what.clone())?;
            if !(has_csum && has_index) {
                let linux = KernelMount::new(&image.path, "ro,noload")?;
                ensure!(listing(&linux.path().join("many"))?.0 == wanted, "{what}: Linux");
                linux.unmount()?;
            }
            image.change(records[bad].0 + 4, |bytes| bytes[0] ^= 2)?;
        }
        image::e2fsck_clean(&image.path)?;
    }
    Ok(())
}

/// What `fjord ls` lists of `/many`, and a mount; the exit code tells of damage where names are told apart by it.
fn names_of_many(image: &Image, code: i32) -> Result<Vec<String>> {
    let said = fjord(&["ls", image.text(), "/many"])?;
    ensure!(said.code == Some(code), "{:?}: {}", said.code, said.stderr);
    ensure!(said.stderr.contains("damaged directory"), "{}", said.stderr);
    let names: Vec<String> = said.stdout.lines().map(str::to_owned).collect();
    let fuse = FjordMount::with_program(program(), &image.path, &["-o", "ro,noload"])?;
    let listed = listing(&fuse.path().join("many"))?;
    ensure!(listed == (names.clone(), code != 0), "{} of {}", listed.0.len(), names.len());
    for name in &names {
        fs::symlink_metadata(fuse.path().join("many").join(name)).context(name.clone())?;
    }
    fuse.unmount()?;
    Ok(names)
}

/// A name of which the hash is not one of its block is listed, and found too while nothing can be written. The order
/// of the listing, by hash, leads past no other name.
#[test]
fn a_name_in_a_block_of_other_hashes_is_listed() -> Result<()> {
    let image = Image::new("misplaced", &["-O", "^metadata_csum"])?;
    let mut told_count = 0;
    let all: Vec<String> =
        fjord(&["ls", image.text(), "/many"])?.ok()?.stdout.lines().map(str::to_owned).collect();
    for leaf in image.blocks_of("/many")?.into_iter().skip(1).step_by(3) {
        let records = image.records_of(leaf)?;
        let (at, old) = records.last().context("a name")?;
        image.change(at + 8, |bytes| bytes[..2].copy_from_slice(b"ZZ"))?;
        let mut wanted = all.clone();
        wanted.retain(|name| name != old);
        // Linux passes over it where its hash lies before those of the block.
        let linux = KernelMount::new(&image.path, "ro,noload")?;
        let (mut theirs, _) = listing(&linux.path().join("many"))?;
        linux.unmount()?;
        theirs.retain(|name| !name.starts_with("ZZ"));
        ensure!(theirs == wanted, "Linux: {} names", theirs.len());
        wanted.insert(0, format!("ZZ{}", &old[2..]));
        // By chance it is one of the block's.
        if fjord(&["ls", image.text(), "/many"])?.code == Some(4) {
            ensure!(names_of_many(&image, 4)? == wanted, "{old}");
            told_count += 1;
        }
        image.change(at + 8, |bytes| bytes[..2].copy_from_slice(&old.as_bytes()[..2]))?;
    }
    ensure!(told_count > 2, "{told_count}");
    image::e2fsck_clean(&image.path).map(drop)
}

/// The block with the root of the index: not one record of it is sound, or `.`, `..` or a length is wrong.
#[test]
fn a_directory_with_a_damaged_first_block_is_listed() -> Result<()> {
    let image = Image::new("first", &["-O", "^metadata_csum"])?;
    let first = image.block_of("/many")?;
    let linux = KernelMount::new(&image.path, "ro,noload")?;
    let (wanted, _) = listing(&linux.path().join("many"))?;
    linux.unmount()?;
    for (offset, bytes) in [(0, [0xff; 4]), (4, [0; 4]), (8, [b'x'; 4]), (12, [0; 4]), (16, [3; 4])]
    {
        let mut old = [0; 4];
        image.change(first + offset, |at| old = std::mem::replace(at, bytes))?;
        let code = fjord(&["ls", image.text(), "/many"])?.code.context("an exit code")?;
        let names = names_of_many(&image, code).with_context(|| format!("byte {offset}"))?;
        ensure!(names == wanted, "byte {offset}: {} names", names.len());
        image.change(first + offset, |at| *at = old)?;
    }
    image::e2fsck_clean(&image.path).map(drop)
}

/// A name that cannot be: those behind it in its block are listed and found.
#[test]
fn a_name_that_cannot_be_hides_no_other() -> Result<()> {
    for features in ["^metadata_csum", "^metadata_csum,^dir_index"] {
        let image = Image::new("name", &["-O", features])?;
        let leaf = *image.blocks_of("/many")?.get(2).context("a block")?;
        let (at, lost) = image.records_of(leaf)?.swap_remove(1);
        image.change(at + 8 + 4, |bytes| bytes[0] = 0)?;
        let names = names_of_many(&image, 4)?;
        ensure!(names.len() == 299 && !names.contains(&lost), "{features}: {}", names.len());
    }
    Ok(())
}

/// In the inode there is nothing but the names: those up to the damage are listed, by Linux too.
#[test]
fn a_damaged_inline_directory_is_read_up_to_the_damage() -> Result<()> {
    let image = Image::new("inline", &["-O", "^metadata_csum,inline_data", "-I", "256"])?;
    let linux = KernelMount::new(&image.path, "rw")?;
    for name in ["small/a", "small/b", "small/c", "small"].map(|name| linux.path().join(name)) {
        fs::create_dir_all(name)?;
    }
    linux.unmount()?;
    let said = image::debugfs(&image.path, "imap /small")?;
    let numbers =
        said.split("located at block ").nth(1).context("a block")?.trim().split(", offset 0x");
    let [block, offset] = numbers.collect::<Vec<_>>()[..] else { anyhow::bail!("{said}") };
    let inode = block.parse::<u64>()? * 1024 + u64::from_str_radix(offset, 16)?;
    // i_block at 40: the parent, and the entries, each of 12 bytes; rec_len at 4.
    image.change(inode + 40 + 4 + 12 + 4, |bytes| bytes[0] ^= 2)?;
    let said = fjord(&["ls", image.text(), "/small"])?;
    ensure!(said.code == Some(4) && said.stdout == "a\n", "{}{}", said.stdout, said.stderr);
    let linux = KernelMount::new(&image.path, "ro,noload")?;
    ensure!(listing(&linux.path().join("small"))?.0 == ["a"], "Linux");
    linux.unmount()?;
    let fuse = FjordMount::with_program(program(), &image.path, &["-o", "ro,noload"])?;
    ensure!(listing(&fuse.path().join("small"))? == (vec!["a".to_owned()], true), "fjord");
    fuse.unmount()
}

/// Unmounts; the daemon says that the image is damaged.
fn ended_by_damage(fuse: FjordMount) -> Result<()> {
    let said = fuse.unmount().map_err(|error| format!("{error:#}"));
    ensure!(said.as_ref().is_err_and(|said| said.contains("exit status: 4")), "{said:?}");
    Ok(())
}

/// The same in a mount that can write: the damage turns it read-only in the middle of a listing.
#[test]
fn damage_does_not_end_a_listing_that_turns_the_mount_read_only() -> Result<()> {
    let image = Image::new("turned", &["-O", "^metadata_csum"])?;
    run(tools::command("tune2fs")?.args(["-e", "remount-ro"]).arg(&image.path))?;
    let leaves = image.blocks_of("/many")?;
    let records = image.records_of(leaves[1])?;
    image.change(records[1].0 + 4, |bytes| bytes[0] ^= 2)?;
    let fuse = FjordMount::with_program(program(), &image.path, &[])?;
    for _ in 0..3 {
        let (names, failed) = listing(&fuse.path().join("many"))?;
        ensure!(failed && names.len() == 300 - records[1..].len(), "{} names", names.len());
    }
    let said = fs::write(fuse.path().join("new"), "x").map_err(|error| error.raw_os_error());
    ensure!(said == Err(Some(libc::EROFS)), "{said:?}");
    ended_by_damage(fuse)
}

/// A damaged node of an index ends the listing that meets it, with an error and not early; once nothing can be
/// written, the next one reads without the index.
#[test]
fn a_damaged_node_ends_the_listing_that_turns_the_mount_read_only() -> Result<()> {
    let image = Image::new("node-turned", &["-O", "^metadata_csum"])?;
    run(tools::command("tune2fs")?.args(["-e", "remount-ro"]).arg(&image.path))?;
    let wanted = image.fill_two_levels()?;
    let node = *image.nodes_of("/deep")?.last().context("a node")?;
    image.change(node + 8, |bytes| bytes[0] ^= 0xff)?;
    let fuse = FjordMount::with_program(program(), &image.path, &[])?;
    let deep = fuse.path().join("deep");
    let (names, failed) = listing(&deep)?;
    ensure!(failed && names.len() < wanted.len(), "{} names, failed: {failed}", names.len());
    ensure!(names.iter().all(|name| wanted.binary_search(name).is_ok()), "{names:?}");
    ensure!(listing(&deep)? == (wanted, false), "without the index");
    ended_by_damage(fuse)
}

/// The count of users of an internal journal means nothing.
#[test]
fn a_journal_with_any_count_of_users_is_used() -> Result<()> {
    for users in [0, 2, 77] {
        let image = Image::new("users", &["-O", "^metadata_csum"])?;
        let journal = image.block_of("<8>")?;
        image.change(journal + 0x40, |bytes| *bytes = u32::to_be_bytes(users))?;
        let linux = KernelMount::new(&image.path, "rw")?;
        fs::write(linux.path().join("new"), "by Linux")?;
        linux.unmount()?;
        fjord(&["mkdir", image.text(), "/made"])?.ok()?;
        let fuse = FjordMount::with_program(program(), &image.path, &[])?;
        fs::write(fuse.path().join("more"), "by fjord")?;
        fuse.unmount()?;
        // e2fsck alone takes more than one user for an external journal.
        image.change(journal + 0x40, |bytes| {
            *bytes = u32::to_be_bytes(1);
        })?;
        image::e2fsck_clean(&image.path)?;
    }
    Ok(())
}

/// One line, the name first, what to do last.
#[test]
fn messages_name_the_image() -> Result<()> {
    let image = Image::new("messages", &[])?;
    image::debugfs_write(&image.path, &["set_inode_field /dir-3 flags 0x280000".to_owned()])?;
    let out = image.scratch.join("out");
    let out = out.to_str().context("a plain path")?;
    let commands = [
        &["ls", image.text(), "/dir-3"][..],
        &["stat", image.text(), "/dir-3"],
        &["cat", image.text(), "/dir-3/file"],
        &["get", "-r", image.text(), "/dir-3", out],
        &["mkdir", image.text(), "/dir-3/new"],
        &["rm", "-r", image.text(), "/dir-3"],
        &["cp", image.text(), "/dir-3/file", "/copy"],
        &["mv", image.text(), "/dir-3/file", "/moved"],
        &["put", image.text(), "/etc/passwd", "/dir-3/passwd"],
    ];
    for command in commands {
        let said = fjord(command)?;
        let lines: Vec<&str> = said.stderr.trim().lines().collect();
        ensure!(said.code == Some(4), "{command:?}: {:?}: {}", said.code, said.stderr);
        let last = lines.last().context("a message")?;
        ensure!(last.starts_with(&format!("fjord: {}: ", image.text())), "{command:?}: {last}");
        let all = said.stderr.as_str();
        ensure!(all.contains("/dir-3") && all.contains("e2fsck -f"), "{command:?}: {all}");
    }
    Ok(())
}

/// A root directory that is none: nothing is mounted, and the message names the image.
#[test]
fn a_damaged_root_directory_is_refused() -> Result<()> {
    for field in ["links_count 0", "mode 0100644", "mode 0120777", "mode 0"] {
        let image = Image::new("root", &[])?;
        let dir = image.scratch.join("mnt");
        fs::create_dir(&dir)?;
        image::debugfs_write(&image.path, &[format!("set_inode_field <2> {field}")])?;
        let mnt = dir.to_str().context("a plain name")?;
        let commands = [
            &["ls", image.text()][..],
            &["mkdir", image.text(), "/new"],
            &["mount", image.text(), mnt],
        ];
        for command in commands {
            let said = fjord(command)?;
            let told = said.stderr.trim().lines().last().unwrap_or_default();
            ensure!(said.code == Some(4), "{field}, {command:?}: {told}");
            ensure!(told.starts_with(&format!("fjord: {}: ", image.text())), "{field}: {told}");
            ensure!(told.contains("inode 2") && told.contains("e2fsck -f"), "{field}: {told}");
        }
        ensure!(fjord_fuse::mount::mount_at(&dir)?.is_none(), "{field}: it is mounted");
    }
    Ok(())
}
