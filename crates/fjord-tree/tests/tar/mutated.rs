//! Damaged streams, by the thousand: typed errors or a sound image, no panic, bounded memory.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use fjord_block::{Device, FileDevice, FileOptions, MemDevice};
use fjord_mkfs::{MkfsOptions, format};
use fjord_testkit::hostile::memory::{live_bytes, take_largest_bytes};
use fjord_testkit::image::{Scratch, e2fsck_clean};
use fjord_testkit::rng::{Rng, mix, seed_from_env};
use fjord_tree::{Contents, Rules, Source, TreeError, populate};

use crate::compressed::PROGRAMS;
use crate::exercise;
use crate::maker::{BLOCK, Member, Style, number, seal, stream};
use crate::support::{piped, quiet};

/// Damaged streams of each kind.
const ROUNDS: u64 = 1000;
/// One in so many images is made in a file, for e2fsck.
const JUDGED_EACH: u64 = 25;
/// Largest single allocation that any stream may cause: the largest extended header, and room for
/// how vectors grow.
const ALLOCATION_BYTES_MAX: u64 = 64 << 20;
/// Most memory that may stay in use beyond what there was before.
const KEPT_BYTES_MAX: u64 = 8 << 20;

/// One of everything, and the shapes that programs read in different ways: entries without data that state a size,
/// two extended headers in a row, and entries that go through a link of the stream.
fn members() -> Vec<Member> {
    let map: Vec<u8> = [(0, 5), (65_536, 6)].into_iter().flat_map(piece).collect();
    let long = "a/rather/long/name".repeat(10);
    vec![
        Member::extended(b'g', &[("comment", b"x"), ("mtime", b"12345.5")]),
        Member::directory("dir").record("SCHILY.acl.default", "user::rwx,group::r-x,other::--x"),
        Member::file("dir/file", &[b'x'; 3000]).record("SCHILY.xattr.user.x", [1; 700]),
        Member::file("acl", b"x").record(
            "SCHILY.acl.access",
            "user::rw-,user:lisa:r--:7,group::r--,group:5:rw-,mask::rw-,other::---",
        ),
        Member::hard_link("hard", "dir/file"),
        Member::symlink("link", "dir"),
        Member { device: (1, 3), ..Member::new(b'3', "null") },
        Member::new(b'6', "pipe"),
        Member { data: long.clone().into(), ..Member::new(b'L', "long").style(Style::Gnu) },
        Member::file("cut", b"long name").style(Style::Gnu),
        Member { data: b"target".to_vec(), ..Member::new(b'K', "long").style(Style::Gnu) },
        Member::symlink("other", "cut").style(Style::Gnu),
        Member { flag: b'S', ..Member::file("sparse", b"firstsecond") }
            .style(Style::Gnu)
            .patch(386, &map)
            .patch(483, &number(100_000, 12)),
        Member::file("sparse01", b"firstsecond")
            .record("GNU.sparse.major", "0")
            .record("GNU.sparse.size", "100000")
            .record("GNU.sparse.map", "0,5,65536,6"),
        Member::file("sparse10", &{
            let mut data = b"2\n0\n5\n65536\n6\n".to_vec();
            data.resize(BLOCK, 0);
            [&data[..], b"firstsecond"].concat()
        })
        .record("GNU.sparse.major", "1")
        .record("GNU.sparse.minor", "0")
        .record("GNU.sparse.realsize", "100000"),
        Member { prefix: b"pre".to_vec(), ..Member::file("star", b"x").style(Style::Star) },
        Member::file("old/", b"").style(Style::Old),
        Member { stated: Some(300), ..Member::file("sized/", b"") }.style(Style::Old),
        Member { stated: Some(512), ..Member::directory("stated") },
        Member { flag: b'5', ..Member::file("with-data", &[0; 512]) },
        Member { stated: Some(900), ..Member::hard_link("stated-link", "dir/file") },
        Member::extended(b'x', &[("mtime", b"77.5"), ("uid", b"5")]),
        Member::file("twice", b"x").record("gid", "6"),
        Member::file("link/through", b"a link"),
        Member::file("dir/.wh.file", b""),
        Member::file("dir/.wh..wh..opq", b""),
        Member::file("attributes", b"x")
            .record("LIBARCHIVE.xattr.user.y", "AAEC")
            .record("RHT.security.selinux", "label")
            .record("uid", "77")
            .record("path", "renamed"),
    ]
}

fn piece((offset, len): (i64, i64)) -> Vec<u8> {
    [number(offset, 12), number(len, 12)].concat()
}

/// Fields of headers: offset and length.
const FIELDS: &[(usize, usize)] = &[
    (0, 100),
    (100, 8),
    (108, 8),
    (116, 8),
    (124, 12),
    (136, 12),
    (156, 1),
    (157, 100),
    (257, 8),
    (265, 32),
    (329, 8),
    (337, 8),
    (345, 155),
    (386, 12),
    (398, 12),
    (482, 1),
    (483, 12),
    (508, 4),
];

/// Damages a stream: bytes anywhere, or fields of headers with a checksum that fits; blocks that
/// are gone, doubled or moved; an end too early.
fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..1 + rng.below(4) {
        let blocks = (bytes.len() / BLOCK) as u64;
        if blocks < 2 {
            return;
        }
        let at = rng.below(blocks) as usize * BLOCK;
        match rng.below(10) {
            0 => bytes[at + rng.below(BLOCK as u64) as usize] ^= 1 << rng.below(8),
            1 => bytes.truncate(rng.below(bytes.len() as u64) as usize),
            2 => drop(bytes.drain(at..at + BLOCK)),
            3 => {
                let block = bytes[at..at + BLOCK].to_vec();
                let to = rng.below(blocks) as usize * BLOCK;
                drop(bytes.splice(to..to, block));
            }
            4 => text(bytes, rng),
            _ => field(&mut bytes[at..at + BLOCK], rng),
        }
    }
}

/// Another number or byte in a header, which gets a checksum that fits.
pub(crate) fn field(header: &mut [u8], rng: &mut Rng) {
    let (at, len) = *rng.pick(FIELDS);
    let field = &mut header[at..at + len];
    match rng.below(6) {
        0 => field.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8),
        1 => field.fill(*rng.pick(&[0, b' ', b'7', b'/', b'.', 0x80, 0xff])),
        2 if len >= 8 => field.copy_from_slice(&{
            let mut value = number(rng.magnitude(1 << 62) as i64, 12);
            value.resize(len.max(12), 0);
            value[..len].to_vec()
        }),
        3 if len == 1 => field[0] = *rng.pick(b"01234567xgLKSVDMNXA"),
        4 if len == 100 => {
            let name = *rng.pick(&[&b"dir/file"[..], b"link/x", b"../x", b".wh.dir", b"dir", b"/"]);
            field.fill(0);
            field[..name.len()].copy_from_slice(name);
        }
        _ => field[rng.below(len as u64) as usize] = rng.next_u64() as u8,
    }
    seal(header);
}

/// A digit or letter of a record, wherever one is.
fn text(bytes: &mut [u8], rng: &mut Rng) {
    let start = rng.below(bytes.len() as u64) as usize;
    let found = bytes[start..].iter().position(|byte| byte.is_ascii_digit() || *byte == b'=');
    if let Some(at) = found {
        bytes[start + at] = *rng.pick(b"0123456789=-.,\n\0 \xffz");
    }
}

/// Puts a stream into an image, with the memory it takes watched; `judge`: e2fsck sees the image.
fn put_in(bytes: &[u8], layers: bool, judge: bool, what: &str) -> Result<(), TreeError> {
    let dir = Scratch::in_memory("image").expect("a directory");
    let image = dir.join("image");
    let device: Arc<dyn Device> = if judge {
        File::create(&image).expect("made");
        Arc::new(FileDevice::open(&image, &FileOptions::default()).expect("opens"))
    } else {
        Arc::new(MemDevice::new(0))
    };
    take_largest_bytes();
    let done = exercise::put_in(device, bytes, layers, what);
    let largest = take_largest_bytes();
    assert!(largest <= ALLOCATION_BYTES_MAX, "{what}: an allocation of {largest} bytes");
    if judge {
        e2fsck_clean(&image).unwrap_or_else(|error| panic!("{what}: {error:#}"));
    }
    done
}

/// Writes the stream, each of its entries alone, and each with the one before, where the fuzz target
/// `tar_stream` finds them, when `FJORD_FUZZ_CORPUS` names a directory. Returns how many.
fn export(members: &[Member]) -> usize {
    let Some(corpus) = std::env::var_os("FJORD_FUZZ_CORPUS") else { return 0 };
    let dir = Path::new(&corpus).join("tar_stream");
    std::fs::create_dir_all(&dir).expect("made");
    let each = members.chunks(1).chain(members.windows(2)).chain([members]);
    each.enumerate()
        .map(|(number, members)| {
            // The first byte: layers or not.
            let seed = [&[number as u8 & 1][..], &stream(members)].concat();
            std::fs::write(dir.join(format!("stream-{number}")), seed).expect("written");
        })
        .count()
}

#[test]
fn mutated_streams_end_in_errors_or_images() {
    let _quiet = quiet();
    let seed = seed_from_env("mutated_streams", 1);
    let whole = stream(&members());
    println!("{} seeds of the fuzz target written", export(&members()));
    for layers in [false, true] {
        // `link` and below it whiteouts: sound either way.
        put_in(&whole, layers, true, "the stream itself").expect("sound");
    }
    let before = live_bytes();
    let (mut fine, mut refused) = (0, 0);
    for round in 0..ROUNDS {
        let what = format!("seed {seed} round {round}");
        let mut rng = Rng::new(mix(seed ^ mix(round)));
        let mut bytes = whole.clone();
        mutate(&mut bytes, &mut rng);
        let layers = rng.percent(50);
        match put_in(&bytes, layers, round % JUDGED_EACH == 0, &what) {
            Ok(()) => fine += 1,
            Err(_) => refused += 1,
        }
    }
    println!("{fine} put in, {refused} refused");
    assert!(fine > 50 && refused > 300, "mutations hit too little or too much");
    let kept = live_bytes().saturating_sub(before);
    assert!(kept < KEPT_BYTES_MAX, "{kept} bytes are kept");
}

#[test]
fn mutated_compressed_streams_end_in_errors_or_the_same_bytes() {
    let _quiet = quiet();
    let seed = seed_from_env("mutated_compressed_streams", 2);
    let mut members = members();
    members.push(Member::file("text", "to and fro ".repeat(20_000).as_bytes()));
    members.push(Member::file("noise", &fjord_testkit::rng::pattern_vec(3, 0, 50_000)));
    let whole = stream(&members);
    let expected = Contents::of_tar(&mut &whole[..], &Rules::default()).expect("readable");
    for (program, args, _) in PROGRAMS {
        let packed = piped(program, args, &whole);
        let before = live_bytes();
        let mut refused = 0;
        for round in 0..ROUNDS {
            let what = format!("{program}, seed {seed} round {round}");
            let mut rng = Rng::new(mix(seed ^ mix(round)));
            let mut bytes = packed.clone();
            damage(&mut bytes, &mut rng);
            take_largest_bytes();
            let measured = Contents::of_tar(&mut &bytes[..], &Rules::default());
            let largest = take_largest_bytes();
            // The largest window, and what a ring buffer has beside it.
            assert!(largest <= 160 << 20, "{what}: an allocation of {largest} bytes");
            match measured {
                // Names in headers of gzip, frames and padding that are gone or doubled.
                Ok(measured) => assert_eq!(measured, expected, "{what}"),
                Err(TreeError::Tar { .. }) => refused += 1,
                Err(other) => panic!("{what}: {other:?}"),
            }
        }
        println!("{program}: {refused} of {ROUNDS} refused");
        assert!(refused > ROUNDS / 2, "{program}: {refused}");
        let kept = live_bytes().saturating_sub(before);
        assert!(kept < KEPT_BYTES_MAX, "{program}: {kept} bytes are kept");
    }
}

/// Damages packed bytes: those of headers more often.
fn damage(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..1 + rng.below(3) {
        let len = bytes.len() as u64;
        if len == 0 {
            return;
        }
        let place = if rng.percent(40) { rng.below(len.min(40)) } else { rng.below(len) } as usize;
        match rng.below(8) {
            0 => bytes.truncate(place),
            1 => bytes[place] = *rng.pick(&[0, 1, 0x7f, 0x80, 0xff]),
            2 => drop(bytes.remove(place)),
            3 => bytes.insert(place, rng.next_u64() as u8),
            4 => {
                let end = (place + 1 + rng.below(64) as usize).min(bytes.len());
                let piece = bytes[place..end].to_vec();
                bytes.splice(place..place, piece);
            }
            _ => bytes[place] ^= 1 << rng.below(8),
        }
    }
}

/// A stream that goes on for ever must not fill the memory: directories, attributes, names.
#[test]
fn endless_streams_take_bounded_memory() {
    let _quiet = quiet();
    let kinds: [(&str, Make); 3] = [
        ("directories", |index| {
            Member::directory(&format!("{index}/{index}/{index}/{index}/{index}"))
        }),
        ("owners", |index| Member {
            names: (format!("user{index}").into(), format!("group{index}").into()),
            ..Member::file("f", b"")
        }),
        ("records", |index| Member::file("f", b"").record(&format!("VENDOR.{index}"), [b'x'; 400])),
    ];
    for (name, make) in kinds {
        let mut endless = Endless { make, index: 0, bytes: Vec::new(), left: 32 << 20 };
        let before = live_bytes();
        take_largest_bytes();
        Contents::of_tar(&mut endless, &Rules::default()).expect("readable");
        let kept = live_bytes().saturating_sub(before);
        assert!(kept < KEPT_BYTES_MAX, "{name}: {kept} bytes");
        let largest = take_largest_bytes();
        assert!(largest < 8 << 20, "{name}: an allocation of {largest} bytes");
    }
}

/// Attributes of directories are set last, and kept until then: not without end.
#[test]
fn attributes_of_directories_are_limited() {
    let _quiet = quiet();
    let make = |index| {
        Member::directory(&format!("{index}")).record("SCHILY.xattr.user.x", [b'x'; 60_000])
    };
    let mut endless = Endless { make, index: 0, bytes: Vec::new(), left: 256 << 20 };
    let device = Arc::new(MemDevice::new(0));
    let size_bytes = Some(32 << 20);
    format(&*device, &MkfsOptions { size_bytes, ..MkfsOptions::default() }).expect("formats");
    let source = Source::Tar(&mut endless);
    let error = populate(device, source, &Rules::default(), &mut |_| {}).expect_err("too many");
    assert!(matches!(error, TreeError::DirectoryAttributes { .. }), "{error}");
}

/// Makes an entry by its number.
type Make = fn(u64) -> Member;

/// Makes entries as they are read.
struct Endless {
    make: Make,
    index: u64,
    bytes: Vec<u8>,
    left: usize,
}

impl Read for Endless {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        if self.bytes.is_empty() && self.left > 0 {
            self.bytes = (self.make)(self.index).bytes();
            self.index += 1;
            self.left = self.left.saturating_sub(self.bytes.len());
        }
        let count = buf.len().min(self.bytes.len());
        buf[..count].copy_from_slice(&self.bytes[..count]);
        self.bytes.drain(..count);
        Ok(count)
    }
}
