//! Thousands of mutations of the blocks of real images, through every parser.
//!
//! The images are made without root: mke2fs with a tree, debugfs for attributes and journal
//! transactions, e2fsck for indexes. What a parser must stand is in `exercise`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fjord_format::acl::{Acl, AclEntry, AclTag};
use fjord_format::ijournal::{AreaTable, Builder, Order};
use fjord_format::{BlockNo, InodeNo, Tid};
use fjord_testkit::image::{Scratch, debugfs_write};
use fjord_testkit::tools::{command, run};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestError, TestRunner};

use crate::exercise::{Env, directory, ijournal, journal, metadata, xattrs};
use crate::fs_image::{FsImage, mke2fs_of};

/// Mutated inputs per parser; each takes microseconds.
const CASES: u32 = 3000;
/// No input of at most a block may take more time of the processor; they take a thousandth of it.
const TIME_MAX: Duration = Duration::from_secs(5);

/// What kinds of bytes the images gave.
#[derive(Default)]
struct Corpus {
    superblock: Vec<(Env, Vec<u8>)>,
    descriptor: Vec<(Env, Vec<u8>)>,
    inode: Vec<(Env, Vec<u8>)>,
    extent: Vec<(Env, Vec<u8>)>,
    block_map: Vec<(Env, Vec<u8>)>,
    dirent: Vec<(Env, Vec<u8>)>,
    htree: Vec<(Env, Vec<u8>)>,
    ibody: Vec<(Env, Vec<u8>)>,
    xattr_block: Vec<(Env, Vec<u8>)>,
    acl: Vec<(Env, Vec<u8>)>,
    inline: Vec<(Env, Vec<u8>)>,
    orphan: Vec<(Env, Vec<u8>)>,
    mmp: Vec<(Env, Vec<u8>)>,
    bitmap: Vec<(Env, Vec<u8>)>,
    journal_superblock: Vec<(Env, Vec<u8>)>,
    log: Vec<(Env, Vec<u8>)>,
}

const IMAGES: [&str; 4] = [
    "-b 1024 -O ea_inode,orphan_file,mmp,large_dir",
    "-b 4096 -O inline_data,^metadata_csum,^64bit -I 256",
    "-b 1024 -O ^extent,^64bit,^metadata_csum,uninit_bg -I 128",
    "-b 2048 -O inline_data,fast_commit,metadata_csum_seed -I 512",
];

fn make_tree(tree: &Path) -> Result<()> {
    let big = tree.join("big");
    fs::create_dir_all(&big)?;
    for number in 0..700 {
        fs::write(big.join(format!("{number}-{}", "n".repeat(number % 60))), b"")?;
    }
    fs::create_dir(tree.join("small"))?;
    fs::write(tree.join("small/x"), b"short")?;
    fs::write(tree.join("small/y"), [7; 110])?;
    fs::write(tree.join("f"), b"")?;
    fs::write(tree.join("g"), b"")?;
    std::os::unix::fs::symlink("target", tree.join("link"))?;
    // Every other block is a hole, so that the extents fill blocks.
    let sparse = File::create(tree.join("sparse"))?;
    for number in 0..700 {
        sparse.write_all_at(b"data", number * 16384)?;
    }
    Ok(())
}

fn acl_value() -> Result<Vec<u8>> {
    let entry = |tag, perm| AclEntry { tag, perm };
    let acl = Acl::new(vec![
        entry(AclTag::UserObj, 7),
        entry(AclTag::User(1000), 5),
        entry(AclTag::GroupObj, 4),
        entry(AclTag::Group(50), 6),
        entry(AclTag::Mask, 7),
        entry(AclTag::Other, 0),
    ]);
    Ok(acl.context("a valid list")?.to_xattr())
}

fn make_image(scratch: &Scratch, number: usize, options: &str) -> Result<FsImage> {
    let path = scratch.join(&format!("image{number}"));
    let tree = scratch.join("tree");
    mke2fs_of(&path, 48 << 20, options, &tree)?;
    let acl = scratch.join("acl");
    fs::write(&acl, acl_value()?)?;
    let mut requests = vec![
        format!("ea_set -f \"{}\" f system.posix_acl_access", acl.display()),
        format!("ea_set -f \"{}\" big system.posix_acl_default", acl.display()),
    ];
    for number in 0..6 {
        requests.push(format!("ea_set f user.name{number} {}", "v".repeat(number * 11 + 1)));
        requests.push(format!("ea_set g trusted.k{} short", "k".repeat(number)));
    }
    debugfs_write(&path, &requests)?;
    // Indexes the big directory; 1 means that it changed something.
    run(command("e2fsck")?.args(["-fyD"]).arg(&path))?.expect_code(&[0, 1])?;
    let blocks = "1000-1040";
    let data = scratch.join("log");
    fs::write(&data, [0xc0, 0x3b, 0x39, 0x98].repeat(41 * 1024))?;
    let journal: Vec<String> =
        ["jo", &format!("jw -b {blocks} \"{}\"", data.display()), "jw -r 1-99", "jc"]
            .map(str::to_owned)
            .into();
    debugfs_write(&path, &journal)?;
    FsImage::load(&path)
}

impl Corpus {
    fn build() -> Result<Corpus> {
        let scratch = Scratch::new("mutation")?;
        make_tree(&scratch.join("tree"))?;
        let mut corpus = Corpus::default();
        for (number, options) in IMAGES.iter().enumerate() {
            corpus.take(&make_image(&scratch, number, options)?)?;
        }
        corpus.acl.push((Env::made_up(0), acl_value()?));
        corpus.acl.push((Env::made_up(0), Acl::from_mode(0o640).to_disk()));
        Ok(corpus)
    }

    fn take(&mut self, image: &FsImage) -> Result<()> {
        let env = Env::of(image.geometry.clone());
        let add = |list: &mut Vec<(Env, Vec<u8>)>, bytes: &[u8]| {
            list.push((env.clone(), bytes.to_vec()));
        };
        add(&mut self.superblock, &image.bytes[1024..2048]);
        let desc_block = image.geometry.desc_block_location(0).context("descriptors")?;
        let descriptors = image.block(desc_block.0);
        let desc_bytes = usize::from(image.geometry.desc_size);
        add(&mut self.descriptor, &descriptors[..desc_bytes]);
        add(&mut self.descriptor, &descriptors[desc_bytes..2 * desc_bytes]);
        let bitmap = u32::from_le_bytes(descriptors[..4].try_into()?);
        add(&mut self.bitmap, image.block(u64::from(bitmap)));
        let mmp = image.sb.s_mmp_block.get();
        if mmp != 0 {
            add(&mut self.mmp, &image.block(mmp)[..1024]);
        }
        for (at, number) in image.physical_blocks(8)?.into_iter().take(60).enumerate() {
            let list = if at == 0 { &mut self.journal_superblock } else { &mut self.log };
            // A log block is in use when it begins with the magic number.
            if image.block(number).starts_with(&[0xc0, 0x3b, 0x39, 0x98]) {
                add(list, image.block(number));
            }
        }
        let orphan_file = image.sb.s_orphan_file_inum.get();
        if orphan_file != 0 {
            for number in image.physical_blocks(u64::from(orphan_file))? {
                add(&mut self.orphan, image.block(number));
            }
        }
        for ino in (1..=60).chain(700..image.geometry.inode_count.min(900).into()) {
            self.take_inode(image, &env, ino)?;
        }
        Ok(())
    }

    fn take_inode(&mut self, image: &FsImage, env: &Env, ino: u64) -> Result<()> {
        let add = |list: &mut Vec<(Env, Vec<u8>)>, bytes: &[u8]| {
            list.push((env.clone(), bytes.to_vec()));
        };
        let inode = image.inode(ino)?;
        let mode = u16::from_le_bytes([inode[0], inode[1]]);
        if mode == 0 {
            return Ok(());
        }
        add(&mut self.inode, inode);
        let i_block = image.i_block(ino)?;
        let flags = image.flags(ino)?;
        if inode.len() > 128 {
            let area = image.xattr_area(ino)?;
            if area.starts_with(&[0, 0, 2, 0xea]) {
                add(&mut self.ibody, area);
            }
            if flags & 0x1000_0000 != 0 {
                add(&mut self.inline, &[i_block, area].concat());
            }
        }
        if let Some((_, block)) = image.xattr_block(ino)? {
            add(&mut self.xattr_block, block);
        }
        let is_dir = mode & 0xf000 == 0x4000;
        if flags & 0x8_0000 != 0 {
            add(&mut self.extent, i_block);
            // An index entry's block, when the tree is not in the inode alone.
            if i_block[6] > 0 {
                let leaf = u32::from_le_bytes(i_block[16..20].try_into()?);
                add(&mut self.extent, image.block(u64::from(leaf)));
            }
            let blocks = if is_dir { image.physical_blocks(ino)? } else { Vec::new() };
            for (at, number) in blocks.into_iter().take(40).enumerate() {
                let is_root = at == 0 && flags & 0x1000 != 0;
                add(if is_root { &mut self.htree } else { &mut self.dirent }, image.block(number));
            }
        } else if flags & 0x1000_0000 == 0 && mode & 0xf000 != 0xa000 {
            add(&mut self.block_map, i_block);
            let first = u32::from_le_bytes(i_block[..4].try_into()?);
            let indirect = u32::from_le_bytes(i_block[48..52].try_into()?);
            if indirect != 0 {
                add(&mut self.block_map, image.block(u64::from(indirect)));
            }
            if is_dir {
                let list = if flags & 0x1000 == 0 { &mut self.dirent } else { &mut self.htree };
                add(list, image.block(u64::from(first)));
            }
        }
        Ok(())
    }
}

/// The corpus, made once; so that a machine without the tools fails fast, so is the error.
fn corpus() -> Result<&'static Corpus> {
    static CORPUS: OnceLock<Result<Corpus, String>> = OnceLock::new();
    let made = CORPUS.get_or_init(|| Corpus::build().map_err(|error| format!("{error:#}")));
    made.as_ref().map_err(|error| anyhow::anyhow!("no images to mutate: {error}"))
}

/// One change of a few bytes.
#[derive(Clone, Copy, Debug)]
enum Mutation {
    Flip { place: u16, bit: u8 },
    Byte { place: u16, value: u8 },
    Half { place: u16, value: u16 },
    Word { place: u16, value: u32 },
    Copy { from: u16, to: u16, len: u8 },
}

fn mutation() -> impl Strategy<Value = Mutation> {
    // Headers are at the start of most structures.
    let place = || prop_oneof![0u16..64, any::<u16>()];
    let half = prop_oneof![
        Just(0u16),
        Just(1),
        Just(7),
        Just(11),
        Just(12),
        Just(0x7fff),
        Just(0xffff),
        any::<u16>()
    ];
    let word = prop_oneof![
        Just(0u32),
        Just(1),
        Just(2),
        Just(0x7fff_ffff),
        Just(0x8000_0000),
        Just(u32::MAX),
        Just(u32::MAX - 7),
        0u32..70_000,
        any::<u32>(),
    ];
    prop_oneof![
        (place(), 0u8..8).prop_map(|(place, bit)| Mutation::Flip { place, bit }),
        (place(), any::<u8>()).prop_map(|(place, value)| Mutation::Byte { place, value }),
        (place(), half).prop_map(|(place, value)| Mutation::Half { place, value }),
        (place(), word).prop_map(|(place, value)| Mutation::Word { place, value }),
        (place(), place(), any::<u8>()).prop_map(|(from, to, len)| Mutation::Copy {
            from,
            to,
            len
        }),
    ]
}

impl Mutation {
    fn apply(self, bytes: &mut [u8]) {
        let len = bytes.len();
        let put = |bytes: &mut [u8], place: u16, align: usize, value: &[u8]| {
            let at = usize::from(place) % len / align * align;
            for (to, from) in bytes[at..].iter_mut().zip(value) {
                *to = *from;
            }
        };
        match self {
            Mutation::Flip { place, bit } => bytes[usize::from(place) % len] ^= 1 << bit,
            Mutation::Byte { place, value } => put(bytes, place, 1, &[value]),
            Mutation::Half { place, value } => put(bytes, place, 2, &value.to_le_bytes()),
            Mutation::Word { place, value } => put(bytes, place, 4, &value.to_le_bytes()),
            Mutation::Copy { from, to, len: count } => {
                let from = usize::from(from) % len;
                let source = bytes[from..len.min(from + usize::from(count))].to_vec();
                put(bytes, to, 4, &source);
            }
        }
    }
}

/// Writes the seeds where a fuzz target of this name finds them, when `FJORD_FUZZ_CORPUS` names a
/// directory.
fn export(name: &str, seeds: &[(Env, Vec<u8>)]) -> Result<()> {
    let Some(corpus) = std::env::var_os("FJORD_FUZZ_CORPUS") else { return Ok(()) };
    let dir = Path::new(&corpus).join(name);
    fs::create_dir_all(&dir)?;
    for (number, (env, seed)) in seeds.iter().enumerate() {
        let choice = if FIXED.contains(&name) { Vec::new() } else { vec![env.choice()] };
        fs::write(dir.join(format!("image-{number}")), [choice, seed.clone()].concat())?;
    }
    Ok(())
}

/// Targets whose input does not begin with the choice of a file system.
const FIXED: [&str; 6] =
    ["superblock", "bitmap", "acl", "jbd2_superblock", "jbd2_log_block", "i_transaction"];

/// What this thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs a parser on the seeds as they are, then on mutations of them.
fn mutate(name: &str, seeds: &[(Env, Vec<u8>)], exercise: fn(&Env, &[u8])) -> Result<()> {
    ensure!(!seeds.is_empty(), "no seeds: the images lack what this test mutates");
    for (env, seed) in seeds {
        exercise(env, seed);
    }
    export(name, seeds)?;
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let input =
        (any::<prop::sample::Index>(), prop::collection::vec(mutation(), 1..8), any::<u8>());
    let outcome = TestRunner::new(config).run(&input, |(seed, mutations, cut)| {
        let (env, seed) = seed.get(seeds);
        let mut bytes = seed.clone();
        mutations.iter().for_each(|mutation| mutation.apply(&mut bytes));
        if cut < 8 {
            bytes.truncate(bytes.len() * usize::from(cut) / 8);
        }
        let start = processor_time();
        exercise(env, &bytes);
        let took = processor_time() - start;
        prop_assert!(took < TIME_MAX, "took {took:?}");
        Ok(())
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Fail(reason, input)) => anyhow::bail!("{reason}: {input:?}"),
        Err(TestError::Abort(reason)) => anyhow::bail!("aborted: {reason}"),
    }
}

macro_rules! mutation_tests {
    ($($name:ident: $seeds:ident => $exercise:expr;)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            mutate(stringify!($name), &corpus()?.$seeds, $exercise)
        }
    )*};
}

// Named as the fuzz targets.
mutation_tests! {
    superblock: superblock => |_, bytes| metadata::superblock(bytes);
    group_descriptor: descriptor => metadata::group_descriptor;
    inode: inode => metadata::inode;
    extent_node: extent => metadata::extent_node;
    block_map: block_map => metadata::block_map;
    bitmap: bitmap => |_, bytes| metadata::bits(bytes);
    mmp: mmp => metadata::mmp;
    dirent_block: dirent => directory::dirent_block;
    htree_block: htree => directory::htree_block;
    orphan_block: orphan => directory::orphan_block;
    inline_data: inline => directory::inline;
    xattr_ibody: ibody => xattrs::ibody;
    xattr_block: xattr_block => xattrs::block;
    acl: acl => |_, bytes| xattrs::acl(bytes);
    jbd2_superblock: journal_superblock => |_, bytes| journal::superblock(bytes);
    jbd2_log_block: log => |_, bytes| journal::log_block(bytes);
}

/// Only fjord writes these, so the seeds are built.
#[test]
fn i_transaction() -> Result<()> {
    let mut builder = Builder::new(&ijournal::FORMAT, Tid(7), 1, InodeNo(12));
    builder.inode(InodeNo(12), &[3; 256])?;
    builder.entry(InodeNo::ROOT, InodeNo(12), 1, b"name")?;
    builder.superseded(BlockNo(70), 2)?;
    let block = [4; 1024];
    builder.extent_block(BlockNo(80), &block)?;
    builder.data(BlockNo(90), &block)?;
    builder.data(BlockNo(91), &[0; 1024])?;
    let order = Order { barrier: 2, newest: Tid(8), behind_newest: 1, behind_older: 2 };
    let seed = [builder.finish(&order)?, block.to_vec(), block.to_vec()].concat();
    ijournal::i_transaction(&seed);
    let table = AreaTable { uuid: ijournal::FORMAT.uuid, area_count: 2, area_blocks: 64 };
    let mut block = vec![0; 1024];
    table.encode(&mut block)?;
    let seeds = [(Env::made_up(0), seed), (Env::made_up(0), block)];
    mutate("i_transaction", &seeds, |_, bytes| ijournal::i_transaction(bytes))
}
