//! e2fsck must find nothing, and dumpe2fs must say the same of a fjord image and of one that
//! mke2fs made with the same parameters.

use std::collections::BTreeMap;
use std::path::Path;

use fjord_block::{Device, DeviceExt, MemDevice};
use fjord_mkfs::{IjournalAreas, JournalSize, MkfsError, MkfsOptions, format};
use fjord_testkit::shell::{check, run, utf8};

use crate::support::make;

/// Lines of `dumpe2fs -h` that are random or tell the time, and what was written (fjord writes
/// less).
const OWN_FIELDS: &[&str] = &[
    "Filesystem UUID",
    "Filesystem created",
    "Last write time",
    "Last checked",
    "Last mount time",
    "Directory Hash Seed",
    "Checksum",
    "Checksum seed",
    "Lifetime writes",
    "MMP_block",
    "    mmp_update_date",
    "    mmp_update_time",
    "    mmp_node_name",
    "    mmp_device_name",
];

fn fields(path: &Path) -> BTreeMap<String, String> {
    let text = run("dumpe2fs", &["-h", utf8(path)]);
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .filter(|(name, _)| !OWN_FIELDS.contains(&name.as_str()))
        .collect()
}

struct Case {
    size: &'static str,
    size_bytes: u64,
    args: &'static [&'static str],
    options: MkfsOptions,
}

fn case(size: &'static str, args: &'static [&'static str], options: MkfsOptions) -> Case {
    let unit = match size.chars().last() {
        Some('M') => 1 << 20,
        Some('G') => 1 << 30,
        Some('T') => 1 << 40,
        _ => 1 << 10,
    };
    let number: u64 = size[..size.len() - 1].parse().expect("a number and a unit");
    Case { size, size_bytes: number * unit, args, options }
}

fn features(features: &str) -> MkfsOptions {
    MkfsOptions { features: features.to_owned(), ..MkfsOptions::default() }
}

fn block_size(block_size: u32) -> MkfsOptions {
    MkfsOptions { block_size: Some(block_size), ..MkfsOptions::default() }
}

fn compare(case: Case) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    // mke2fs makes none.
    let ijournal = IjournalAreas::None;
    let options = MkfsOptions { size_bytes: Some(case.size_bytes), ijournal, ..case.options };
    println!("{} {:?}", case.size, case.args);
    let (ours, report) = make(dir.path(), "ours", &options);
    check(&ours);
    let theirs = dir.path().join("theirs");
    let mut args = vec!["-q", "-F", "-t", "ext4"];
    args.extend_from_slice(case.args);
    args.extend_from_slice(&[utf8(&theirs), case.size]);
    run("mke2fs", &args);
    let told = fields(&ours);
    assert_eq!(told, fields(&theirs), "{} {:?}", case.size, case.args);
    assert_eq!(told["Block count"], report.block_count.to_string());
    assert_eq!(told["Free blocks"], report.free_blocks.to_string());
    assert_eq!(told["Inode count"], report.inode_count.to_string());
}

#[test]
fn default_images_of_all_sizes() {
    for size in ["8M", "9999K", "16M", "40M", "100M", "128M", "129M", "264M", "511M"] {
        compare(case(size, &[], MkfsOptions::default()));
    }
    for size in ["512M", "777M", "1G", "2G", "5G", "17G", "64G", "1T"] {
        compare(case(size, &[], MkfsOptions::default()));
    }
}

#[test]
fn block_and_inode_sizes() {
    compare(case("64M", &["-b", "2048"], block_size(2048)));
    compare(case("64M", &["-b", "4096"], block_size(4096)));
    compare(case("700M", &["-b", "1024"], block_size(1024)));
    compare(case("700M", &["-b", "2048"], block_size(2048)));
    compare(case("900M", &["-b", "65536"], block_size(65536)));
    let inode_128 = MkfsOptions { inode_size: Some(128), ..MkfsOptions::default() };
    compare(case("200M", &["-I", "128"], inode_128));
    let inode_512 = MkfsOptions { inode_size: Some(512), ..block_size(4096) };
    compare(case("200M", &["-I", "512", "-b", "4096"], inode_512));
    let ratio = MkfsOptions { inode_ratio: Some(65536), ..MkfsOptions::default() };
    compare(case("300M", &["-i", "65536"], ratio));
    let many = MkfsOptions { inode_ratio: Some(1024), ..MkfsOptions::default() };
    compare(case("300M", &["-i", "1024"], many));
    let count = MkfsOptions { inode_count: Some(5000), ..MkfsOptions::default() };
    compare(case("100M", &["-N", "5000"], count));
}

#[test]
fn feature_sets() {
    for set in [
        "^64bit",
        "^flex_bg",
        "meta_bg,^resize_inode",
        "meta_bg,^resize_inode,^flex_bg",
        "^has_journal",
        "^extent,^64bit",
        "sparse_super2",
        "metadata_csum_seed",
        "^metadata_csum",
        "uninit_bg,^metadata_csum",
        "uninit_bg,^metadata_csum,^64bit",
        "^filetype,^dir_index",
        "orphan_file",
        "fast_commit",
        "mmp",
        "ea_inode,large_dir,project,stable_inodes",
        "^resize_inode",
        "^resize_inode,^sparse_super",
        "none",
        "none,has_journal,filetype,dir_index,ext_attr,resize_inode,sparse_super,large_file",
        "orphan_file,fast_commit,mmp,metadata_csum_seed",
    ] {
        let leaked: &'static str = set;
        for (size, block_size) in [("200M", None), ("3G", Some(4096))] {
            let options = MkfsOptions { block_size, ..features(set) };
            let args: &'static [&'static str] = Box::leak(vec!["-O", leaked].into_boxed_slice());
            compare(case(size, args, options));
        }
    }
}

#[test]
fn inline_data_is_clean() {
    // mke2fs keeps even the root directory inline; fjord's has a block.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = MkfsOptions { size_bytes: Some(64 << 20), ..features("inline_data") };
    let (path, _) = make(dir.path(), "image", &options);
    check(&path);
    assert!(fields(&path)["Filesystem features"].contains("inline_data"));
}

#[test]
fn other_options() {
    let reserved = MkfsOptions { reserved_percent: 1.0, ..MkfsOptions::default() };
    compare(case("300M", &["-m", "1"], reserved));
    let label = MkfsOptions { label: b"sixteen bytes!!!".to_vec(), ..MkfsOptions::default() };
    compare(case("30M", &["-L", "sixteen bytes!!!"], label));
    let journal = MkfsOptions { journal: JournalSize::Bytes(32 << 20), ..MkfsOptions::default() };
    compare(case("300M", &["-J", "size=32"], journal));
    let journal = MkfsOptions { journal: JournalSize::Bytes(900 << 20), ..block_size(1024) };
    // Many extents; mke2fs fills its leaves otherwise, so only e2fsck is asked.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (path, report) =
        make(dir.path(), "image", &MkfsOptions { size_bytes: Some(2 << 30), ..journal });
    check(&path);
    assert_eq!(report.journal_blocks, 900 << 10);
    let owner = MkfsOptions { root_owner: (1000, 70000), ..MkfsOptions::default() };
    let options = MkfsOptions { size_bytes: Some(20 << 20), ..owner };
    let (path, _) = make(dir.path(), "image", &options);
    check(&path);
    let root = run("debugfs", &["-R", "stat <2>", utf8(&path)]);
    assert!(root.contains("User:  1000   Group: 70000"), "{root}");
}

/// An image that held another file system, on a device that cannot be emptied.
#[derive(Debug)]
struct Used(MemDevice);

impl Device for Used {
    fn capabilities(&self) -> &fjord_block::Capabilities {
        self.0.capabilities()
    }
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
    fn submit(&self, batch: Vec<fjord_block::Request>) -> Vec<fjord_block::Ticket> {
        self.0.submit(batch)
    }
    fn submit_read(
        &self,
        offset: u64,
        bufs: Vec<fjord_block::AlignedBuf>,
        class: fjord_block::Class,
    ) -> fjord_block::ReadTicket {
        self.0.submit_read(offset, bufs, class)
    }
}

#[test]
fn old_contents_do_not_show_through() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for set in ["", "^metadata_csum", "orphan_file,mmp,^flex_bg", "^extent,^resize_inode,^64bit"] {
        let device = Used(MemDevice::new(48 << 20));
        let garbage = vec![0xa5; 1 << 20];
        for piece in 0..48 {
            device.write_all_at(piece << 20, &garbage).expect("memory");
        }
        format(&device, &features(set)).expect("formats");
        let path = dir.path().join("image");
        device.0.snapshot().write_to_file(&path).expect("written");
        check(&path);
    }
}

#[test]
fn the_same_options_make_the_same_bytes() {
    let options = MkfsOptions {
        uuid: Some([7; 16]),
        hash_seed: Some([9; 16]),
        time_seconds: Some(1_700_000_000),
        size_bytes: Some(64 << 20),
        ..MkfsOptions::default()
    };
    let images: Vec<Vec<u8>> = (0..2)
        .map(|_| {
            let device = MemDevice::new(0);
            format(&device, &options).expect("formats");
            let mut bytes = vec![0; 64 << 20];
            device.read_exact_at(0, &mut bytes).expect("memory");
            bytes
        })
        .collect();
    assert!(images[0] == images[1]);
}

#[test]
fn bad_parameters_are_refused_before_anything_is_written() {
    let refused = |options: MkfsOptions| {
        let device = MemDevice::new(1 << 20);
        device.write_all_at(5000, b"precious").expect("memory");
        let error = format(&device, &options).expect_err("must be refused");
        assert!(
            matches!(error, MkfsError::Usage(_) | MkfsError::TooSmall(_) | MkfsError::Format(_)),
            "{error}"
        );
        let mut bytes = [0; 8];
        device.read_exact_at(5000, &mut bytes).expect("memory");
        assert_eq!(&bytes, b"precious");
        error.to_string()
    };
    let size = |size_bytes: u64| MkfsOptions { size_bytes: Some(size_bytes), ..Default::default() };
    refused(size(0));
    refused(size(4000));
    refused(size(60 << 10));
    refused(MkfsOptions { block_size: Some(3000), ..size(64 << 20) });
    refused(MkfsOptions { block_size: Some(512), ..size(64 << 20) });
    refused(MkfsOptions { inode_size: Some(200), ..size(64 << 20) });
    refused(MkfsOptions { inode_size: Some(8192), ..size(64 << 20) });
    refused(MkfsOptions { reserved_percent: 60.0, ..size(64 << 20) });
    refused(MkfsOptions { reserved_percent: f64::NAN, ..size(64 << 20) });
    refused(MkfsOptions { label: vec![b'x'; 17], ..size(64 << 20) });
    refused(MkfsOptions { journal: JournalSize::Bytes(1 << 19), ..size(64 << 20) });
    refused(MkfsOptions { journal: JournalSize::Bytes(60 << 20), ..size(64 << 20) });
    refused(MkfsOptions { inode_count: Some(u32::MAX), ..size(64 << 20) });
    refused(MkfsOptions { block_size: Some(1024), ..size(1 << 44) });
    refused(MkfsOptions { features: "^64bit".into(), ..size(1 << 45) });
    assert!(
        refused(MkfsOptions { features: "bigalloc".into(), ..size(64 << 20) }).contains("bigalloc")
    );
}

/// No disk here holds such a file, so the figures of mke2fs stand here as numbers.
#[test]
fn sixteen_tebibytes_take_little() {
    let device = MemDevice::new(0);
    let ijournal = IjournalAreas::None;
    let options = MkfsOptions { size_bytes: Some(1 << 44), ijournal, ..MkfsOptions::default() };
    let report = format(&device, &options).expect("formats");
    assert_eq!(report.block_count, 1 << 32);
    assert_eq!(report.inode_count, 268_435_456);
    assert_eq!(report.free_blocks, 4_277_614_561);
    assert_eq!(report.reserved_blocks, 214_748_364);
    assert_eq!(report.journal_blocks, 262_144);
    // 25 copies of 8 MiB of descriptors, and the bitmaps of 8192 flex groups.
    assert!(report.bytes_written < 250 << 20, "{} bytes", report.bytes_written);
}

/// The blocks reserved for descriptors must be where others expect them.
#[test]
fn images_can_grow() {
    for options in [MkfsOptions::default(), block_size(4096), features("^64bit,^flex_bg")] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options = MkfsOptions { size_bytes: Some(96 << 20), ..options };
        let (path, _) = make(dir.path(), "image", &options);
        run("resize2fs", &[utf8(&path), "3G"]);
        check(&path);
        assert!(fields(&path)["Filesystem features"].contains("resize_inode"));
    }
}

#[test]
fn smallest_images_are_clean() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for kib in (150..3000).step_by(173) {
        let options = MkfsOptions { size_bytes: Some(kib << 10), ..MkfsOptions::default() };
        let (path, report) = make(dir.path(), "image", &options);
        assert_eq!(report.journal_blocks != 0, report.block_count >= 2048);
        check(&path);
    }
}

/// Linux and e2fsck find nothing behind the log, and all of it is in use.
#[test]
fn areas_behind_the_log() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (name, size_bytes, ijournal) in [
        ("auto", 64 << 20, IjournalAreas::Auto),
        ("auto-4k", 1 << 30, IjournalAreas::Auto),
        ("one", 64 << 20, IjournalAreas::Areas { count: 1, area_bytes: 64 << 10 }),
        ("many", 256 << 20, IjournalAreas::Areas { count: 64, area_bytes: 1 << 20 }),
    ] {
        for features in ["", "^extent,^64bit", "^metadata_csum"] {
            let features = features.to_owned();
            let options = MkfsOptions {
                size_bytes: Some(size_bytes),
                ijournal,
                features,
                ..MkfsOptions::default()
            };
            let (path, report) = make(dir.path(), name, &options);
            check(&path);
            assert!(report.area_count > 0 && report.area_blocks >= 16, "{name}: {report:?}");
            let found = fjord::inspect::log(&path).expect("the image is readable");
            let table = found.expect("a journal").area_table().expect("a table").expect("areas");
            assert_eq!(
                (table.area_count, table.area_blocks),
                (report.area_count, report.area_blocks)
            );
            let told = fields(&path);
            assert_eq!(told["Total journal blocks"], report.journal_blocks.to_string());
        }
    }
    for ijournal in [
        IjournalAreas::Areas { count: 0, area_bytes: 1 << 20 },
        IjournalAreas::Areas { count: 1, area_bytes: 1000 },
        IjournalAreas::Areas { count: 8, area_bytes: 1 << 30 },
    ] {
        let options =
            MkfsOptions { size_bytes: Some(64 << 20), ijournal, ..MkfsOptions::default() };
        let refused = format(&MemDevice::new(64 << 20), &options);
        assert!(
            matches!(refused, Err(MkfsError::Usage(_) | MkfsError::TooSmall(_))),
            "{ijournal:?}"
        );
    }
}
