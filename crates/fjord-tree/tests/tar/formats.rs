//! Headers and records of several programs, and those that no program writes.

use fjord_testkit::manifest::{Kind, Stamp};
use fjord_tree::{Contents, Rules};

use crate::maker::{BLOCK, Member, Style, number, stream};
use crate::support::{Outcome, refused};

#[test]
fn names_longer_than_a_header() {
    let long = "long/".repeat(60) + "name";
    let target = "to/".repeat(200);
    let gnu = |flag, text: &str| Member {
        data: [text.as_bytes(), b"\0"].concat(),
        ..Member::new(flag, "././@LongLink").style(Style::Gnu)
    };
    let outcome = Outcome::members(&[
        gnu(b'L', &long),
        Member::file("cut", b"1").style(Style::Gnu),
        gnu(b'K', &target),
        gnu(b'L', "link"),
        Member::symlink("cut", "cut").style(Style::Gnu),
        Member { prefix: b"pre/fix".to_vec(), ..Member::file("ustar", b"2") },
        // GNU keeps times where ustar has the prefix.
        Member { prefix: b"14340763760\0".to_vec(), ..Member::file("gnu", b"3") }.style(Style::Gnu),
        Member { prefix: b"star/fix".to_vec(), ..Member::file("name", b"4") }.style(Style::Star),
        Member::file("old/dir/", b"").style(Style::Old),
        Member::file("ignored", b"5").record("path", "pax/path"),
        // Records count before long names.
        gnu(b'L', "not/this"),
        Member::file("nor this", b"6").record("path", "but/this"),
    ]);
    outcome.assert_content(&long, b"1");
    assert_eq!(outcome.entry("link").target, target.as_bytes());
    for (path, data) in
        [("pre/fix/ustar", b"2"), ("gnu", b"3"), ("star/fix/name", b"4"), ("pax/path", b"5")]
    {
        outcome.assert_content(path, data);
    }
    outcome.assert_content("but/this", b"6");
    assert_eq!(outcome.entry("old/dir").kind, Kind::Directory);
}

#[test]
fn numbers_that_do_not_fit_octal() {
    let outcome = Outcome::members(&[
        Member { ids: (3_000_000, 4_000_000_000), mtime: -86_400, ..Member::file("binary", b"x") },
        Member::file("records", b"x")
            .record("uid", "3000001")
            .record("gid", "4000000001")
            .record("mtime", "-1.25")
            .record("atime", "4294967296.000000001"),
        Member { device: (4095, 1_048_575), ..Member::new(b'4', "device") },
        Member::new(b'3', "by-records")
            .record("SCHILY.devmajor", "259")
            .record("SCHILY.devminor", "70000"),
        Member { mtime: 1 << 33, ..Member::file("late", b"") },
    ]);
    let binary = outcome.entry("binary");
    assert_eq!((binary.uid, binary.gid, binary.mtime.sec), (3_000_000, 4_000_000_000, -86_400));
    let records = outcome.entry("records");
    assert_eq!((records.uid, records.gid), (3_000_001, 4_000_000_001));
    assert_eq!(records.mtime, Stamp { sec: -2, nsec: 750_000_000 });
    assert_eq!(records.atime, Stamp { sec: 1 << 32, nsec: 1 });
    assert_eq!(outcome.entry("device").rdev, (4095, 1_048_575));
    assert_eq!(outcome.entry("by-records").rdev, (259, 70_000));
    assert_eq!(outcome.entry("late").mtime.sec, 1 << 33);
}

#[test]
fn sizes_above_8_gib() {
    // Sparse, so that the stream is short: a piece at the end.
    let size: u64 = 9 << 30;
    let map = format!("0,3,{},3", size - 3);
    let outcome = Outcome::members(&[Member::file("large", b"onetwo")
        .record("GNU.sparse.major", "0")
        .record("GNU.sparse.minor", "1")
        .record("GNU.sparse.size", size.to_string())
        .record("GNU.sparse.map", map)]);
    assert_eq!((outcome.entry("large").size, outcome.done.bytes), (size, 6));
    // The size of data, in both ways; they are not there.
    for member in [
        Member { stated: Some(9 << 30), ..Member::file("f", b"") },
        Member::file("f", b"").record("size", "9663676416"),
    ] {
        let said = refused(&stream(&[member]));
        assert!(said.contains("ends early") && said.contains("entry f"), "{said}");
    }
}

/// The data of a sparse file in each format: `first` at 0 and `second` at 1 MiB of 2 MiB.
#[test]
fn maps_of_sparse_files() {
    const SIZE: u64 = 2 << 20;
    let pieces: [(u64, u64); 3] = [(0, 5), (1 << 20, 6), (SIZE, 0)];
    let data = b"firstsecond";
    let field = |value: u64| number(value as i64, 12);
    let map: Vec<u8> =
        pieces.iter().flat_map(|(at, len)| [field(*at), field(*len)].concat()).collect();
    let gnu = Member::file("gnu", data).style(Style::Gnu).patch(386, &map);
    let gnu = Member { flag: b'S', ..gnu }.patch(483, &field(SIZE));
    // star: another place, and the prefix has none.
    let star = Member::file("star", data).style(Style::Star).patch(356, &map);
    let star = Member { flag: b'S', ..star }.patch(452, &field(SIZE));
    let text: Vec<String> = pieces.iter().map(|(at, len)| format!("{at},{len}")).collect();
    let old = |name, minor: &str| {
        Member::file(name, data)
            .record("GNU.sparse.major", "0")
            .record("GNU.sparse.minor", minor)
            .record("GNU.sparse.size", SIZE.to_string())
    };
    let v00 = pieces.iter().fold(old("v0.0", "0"), |member, (at, len)| {
        member
            .record("GNU.sparse.offset", at.to_string())
            .record("GNU.sparse.numbytes", len.to_string())
    });
    let v01 = old("v0.1", "1").record("GNU.sparse.map", text.join(","));
    let mut head = format!("{}\n", pieces.len()).into_bytes();
    pieces.iter().for_each(|(at, len)| head.extend(format!("{at}\n{len}\n").bytes()));
    head.resize(BLOCK, 0);
    let v10 = Member::file("GNUSparseFile.0/v1.0", &[&head[..], data].concat())
        .record("GNU.sparse.major", "1")
        .record("GNU.sparse.minor", "0")
        .record("GNU.sparse.name", "v1.0")
        .record("GNU.sparse.realsize", SIZE.to_string())
        .record("path", "GNUSparseFile.0/v1.0");
    let outcome = Outcome::members(&[gnu, star, v00, v01, v10]);
    let mut expected = vec![0; SIZE as usize];
    expected[..5].copy_from_slice(b"first");
    expected[1 << 20..(1 << 20) + 6].copy_from_slice(b"second");
    assert_eq!(outcome.paths(), ["gnu", "star", "v0.0", "v0.1", "v1.0"]);
    for path in ["gnu", "star", "v0.0", "v0.1", "v1.0"] {
        outcome.assert_content(path, &expected);
        assert!(outcome.entry(path).blocks_512b < 64, "{path}: holes are filled");
    }
}

/// Maps that go on in blocks of their own.
#[test]
fn many_pieces() {
    const COUNT: u64 = 200;
    let field = |value: u64| number(value as i64, 12);
    let pairs = (0..COUNT).map(|index| [field(index * 8192), field(4)].concat());
    let map: Vec<u8> = pairs.collect::<Vec<_>>().concat();
    for (style, place, more, size) in [(Style::Gnu, 386, 482, 483), (Style::Star, 356, 355, 452)] {
        let member = Member::file("f", b"").style(style).patch(place, &map[..96]).patch(more, &[1]);
        let member = Member { flag: b'S', stated: Some(COUNT * 4), ..member };
        let mut bytes = member.patch(size, &field(COUNT * 8192)).bytes();
        let blocks: Vec<&[u8]> = map[96..].chunks(21 * 24).collect();
        for (index, chunk) in blocks.iter().enumerate() {
            let mut block = chunk.to_vec();
            block.resize(BLOCK, 0);
            block[504] = u8::from(index + 1 < blocks.len());
            bytes.extend(block);
        }
        let data: Vec<u8> = (0..COUNT).flat_map(|index| (index as u32).to_le_bytes()).collect();
        bytes.extend(&data);
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        let outcome = Outcome::plain(&bytes);
        let mut expected = vec![0; COUNT as usize * 8192];
        for (index, piece) in data.chunks(4).enumerate() {
            expected[index * 8192..index * 8192 + 4].copy_from_slice(piece);
        }
        outcome.assert_content("f", &expected);
    }
}

#[test]
fn global_records_hold_until_replaced() {
    let outcome = Outcome::members(&[
        Member::extended(b'g', &[("comment", b"a commit"), ("mtime", b"100"), ("uid", b"7")]),
        Member::file("a", b"x"),
        Member::file("b", b"x").record("mtime", "200"),
        Member::extended(b'g', &[("uid", b"8")]),
        Member::file("c", b"x"),
        // An empty value takes it back.
        Member { mtime: 300, ids: (9, 9), ..Member::file("d", b"x") }
            .record("mtime", "")
            .record("uid", ""),
    ]);
    let found = |path: &str| (outcome.entry(path).mtime.sec, outcome.entry(path).uid);
    assert_eq!(
        [found("a"), found("b"), found("c"), found("d")],
        [(100, 7), (200, 7), (100, 8), (300, 9)]
    );
    assert!(outcome.done.skipped.is_empty(), "{:?}", outcome.done.skipped);
}

#[test]
fn attributes_of_several_programs() {
    let binary: Vec<u8> = (0..=255).chain(*b"\n5 a=b\n").collect();
    let outcome = Outcome::members(&[
        Member::file("f", b"x")
            .record("SCHILY.xattr.user.binary", &binary)
            .record("SCHILY.xattr.user.empty", "")
            .record("LIBARCHIVE.xattr.user.a%20b%3Dc", "AAEC/w")
            .record("LIBARCHIVE.xattr.user.binary", "bm90IHRoaXM=")
            .record("RHT.security.selinux", "system_u:object_r:etc_t:s0")
            .record("LIBARCHIVE.creationtime", "1.5")
            .record("SCHILY.dev", "2049")
            .record("SCHILY.ino", "77")
            .record("SCHILY.nlink", "1")
            .record("ctime", "3.5"),
        Member::file("g", b"x")
            .record("SCHILY.fflags", "nodump")
            .record("VENDOR.thing", "1")
            .record("SCHILY.xattr.com.apple.quarantine", "q")
            .record("hdrcharset", "ISO-IR 8859 1 1998"),
        Member::file("bin\u{e4}r", b"x").record("hdrcharset", "BINARY").record("path", b"\xff\xfe"),
        Member::symlink("s", "g").record("SCHILY.xattr.user.x", "1"),
    ]);
    let f = &outcome.entry("f").xattrs;
    assert_eq!(f.get(&b"user.binary"[..]), Some(&binary));
    assert_eq!(f.get(&b"user.empty"[..]), Some(&vec![]));
    assert_eq!(f.get(&b"user.a b=c"[..]), Some(&vec![0, 1, 2, 255]));
    assert_eq!(f.get(&b"security.selinux"[..]), Some(&b"system_u:object_r:etc_t:s0\0".to_vec()));
    assert!(outcome.seen.entries.contains_key(&b"\xff\xfe"[..]));
    let skipped = &outcome.done.skipped;
    let told = ["g: VENDOR.thing", "g: hdrcharset ISO-IR 8859 1 1998"];
    assert!(
        skipped.len() == 2 && skipped.iter().zip(told).all(|(line, told)| line.starts_with(told)),
        "{skipped:?}"
    );
    let unkept = &outcome.done.unkept;
    assert!(unkept.len() == 3 && unkept[0].contains("g: SCHILY.fflags"), "{unkept:?}");
    assert!(unkept[1].contains("com.apple"), "{unkept:?}");
    assert!(unkept[2].contains("s: attribute user.x"), "{unkept:?}");
}

#[test]
fn types_that_are_no_files() {
    let outcome = Outcome::members(&[
        Member::new(b'V', "label"),
        Member { data: b"Yfile\0\0".to_vec(), ..Member::new(b'D', "listed").style(Style::Gnu) },
        Member { flag: b'7', ..Member::file("contiguous", b"x") },
        Member::new(b'6', "pipe"),
        // POSIX: unknown types are regular files.
        Member { data: vec![1; 700], ..Member::new(b'Z', "vendor") },
        Member { data: vec![2; 600], ..Member::new(b'M', "rest") },
        Member::file("last", b"x"),
    ]);
    assert_eq!(outcome.paths(), ["contiguous", "last", "listed", "pipe", "vendor"]);
    outcome.assert_content("vendor", &[1; 700]);
    assert_eq!(outcome.entry("listed").kind, Kind::Directory);
    assert_eq!(outcome.done.skipped, ["label: entry of type 'V'"]);
    let unkept = &outcome.done.unkept;
    assert!(unkept.len() == 1 && unkept[0].starts_with("rest: entry of type 'M'"), "{unkept:?}");
}

/// What no attribute of ext4 can be is listed by name; the others are kept.
#[test]
fn attributes_that_ext4_cannot_have() {
    let long = format!("SCHILY.xattr.user.{}", "n".repeat(255));
    let outcome = Outcome::members(&[
        Member::file("f", b"x")
            .record(&long, "1")
            .record("SCHILY.xattr.user.", "1")
            .record("SCHILY.xattr.user.huge", vec![b'x'; 70_000])
            .record("SCHILY.xattr.user.large", vec![b'x'; 5000])
            .record("SCHILY.xattr.user.kept", "1"),
        Member::directory("d").record("SCHILY.xattr.user.large", vec![b'x'; 5000]),
    ]);
    let f = &outcome.entry("f").xattrs;
    assert!(f.len() == 1 && f.contains_key(&b"user.kept"[..]), "{f:?}");
    outcome.assert_content("f", b"x");
    let unkept = &outcome.done.unkept;
    let told = [
        ("f: attribute user.nnn", "260 bytes"),
        ("f: attribute user.: ", "no such name"),
        ("f: attribute user.huge: 70000 bytes", "65536"),
        ("f: attribute user.large: 5000 bytes", "-O ea_inode"),
        ("d: attribute user.large: 5000 bytes", "-O ea_inode"),
    ];
    assert_eq!(unkept.len(), told.len(), "{unkept:?}");
    for (line, (start, word)) in unkept.iter().zip(told) {
        assert!(line.starts_with(start) && line.contains(word), "{line}");
        assert!(!line.contains("-b 4096"), "{line}");
    }
}

/// Hard links may state a size: with data in pax, without in others.
#[test]
fn sizes_of_hard_links() {
    let with_data = Member { data: b"content".to_vec(), ..Member::hard_link("b", "a") };
    let without = Member { stated: Some(7), ..Member::hard_link("b", "a") };
    for link in [
        with_data.clone().record("mtime", "1"),
        with_data,
        without.clone(),
        without.style(Style::Gnu),
    ] {
        let outcome =
            Outcome::members(&[Member::file("a", b"content"), link, Member::file("c", b"behind")]);
        assert_eq!(outcome.paths(), ["a", "b", "c"]);
        assert_eq!(outcome.entry("b").nlink, 2);
        outcome.assert_content("c", b"behind");
    }
}

#[test]
fn hostile_headers_are_refused() {
    let file = || Member::file("f", b"data");
    let sparse = || file().record("GNU.sparse.major", "0").record("GNU.sparse.size", "100");
    let max = u64::MAX.to_string();
    let cases: &[(Member, &str)] = &[
        (file().patch(124, &[0xff; 12]), "size is out of range"),
        (file().patch(124, &[0xbf; 12]), "size is out of range"),
        (file().patch(124, b"12z"), "size is not a number"),
        (file().patch(108, &number(1 << 32, 8)), "user ID is out of range"),
        (file().record("uid", "4294967296"), "record uid"),
        (file().record("uid", "-1"), "record uid"),
        (file().record("size", "1e3"), "record size"),
        (file().record("size", max.clone()), "ends early"),
        (file().record("mtime", "soon"), "record mtime"),
        (Member::new(b'3', "d").record("SCHILY.devmajor", "4096"), "device number 4096"),
        (Member { stated: Some(17 << 20), ..Member::new(b'x', "x") }, "17825792 bytes"),
        (Member { stated: Some(u64::MAX >> 2), ..Member::new(b'L', "x") }, "at most 16777216"),
        (Member { stated: Some(70_000), ..Member::new(b'g', "x") }, "at most 65536"),
        (
            Member { data: b"99999999999999999999 a=b\n".to_vec(), ..Member::new(b'x', "x") },
            "malformed",
        ),
        (Member { data: b"3 a=b\n".to_vec(), ..Member::new(b'x', "x") }, "malformed"),
        (sparse().record("GNU.sparse.map", "0,101"), "outside"),
        (sparse().record("GNU.sparse.map", "0,2,1,2"), "overlap"),
        (sparse().record("GNU.sparse.map", format!("{max},{max}")), "outside"),
        (sparse().record("GNU.sparse.map", "0,50"), "more data"),
        (sparse().record("GNU.sparse.map", "0"), "malformed"),
        (sparse().record("GNU.sparse.major", "2"), "version"),
        (file().record("GNU.sparse.major", "1"), "sparse file ends early"),
        (file().record("LIBARCHIVE.xattr.user.x", "???"), "LIBARCHIVE.xattr.user.x"),
        (file().record("SCHILY.xattr.user.a\0b", "x"), "SCHILY.xattr"),
    ];
    for (member, told) in cases {
        let said = refused(&stream(&[member.clone(), file()]));
        assert!(said.contains(told), "{told}: {said}");
    }
    let many = (0..5000)
        .fold(file(), |member, index| member.record(&format!("SCHILY.xattr.user.{index}"), ""));
    let said = refused(&stream(&[many]));
    assert!(said.contains("more than 4096"), "{said}");
    // An extended header that names itself again and again.
    let extended = Member { data: vec![b'x'; 9 << 20], ..Member::new(b'x', "x") };
    let said = refused(&stream(&[extended.clone(), extended]));
    assert!(said.contains("extended"), "{said}");
}

/// Directories and others that state a size: some programs write as many bytes, others none. No entry is lost
/// either way.
#[test]
fn sizes_of_what_has_no_data() {
    let plain =
        |flag: u8, path: &str, style| Member { flag, ..Member::new(flag, path).style(style) };
    for style in [Style::Old, Style::Ustar, Style::Gnu, Style::Star] {
        for (flag, path) in
            [(0, "dir/"), (b'0', "dir/"), (b'5', "dir"), (b'2', "dir"), (b'6', "dir")]
        {
            for size in [1u64, 100, 511, 512, 513, 5000] {
                for data in [None, Some(b'#'), Some(0)] {
                    let what = format!("{style:?} {flag} {size} {data:?}");
                    let first = Member {
                        stated: Some(size),
                        data: data.map(|byte| vec![byte; size as usize]).unwrap_or_default(),
                        link: if flag == b'2' { b"target".to_vec() } else { Vec::new() },
                        ..plain(flag, path, style)
                    };
                    let members = [first, Member::file("next", b"next"), Member::file("last", b"")];
                    let mut stream = &stream(&members)[..];
                    let counted = Contents::of_tar(&mut stream, &Rules::default());
                    let found = counted.map(|found| found.entries);
                    assert_eq!(found.expect(&what), 3, "{what}");
                }
            }
        }
    }
    let data = |flag: u8, path: &str| Member { data: vec![b'#'; 700], ..Member::new(flag, path) };
    let outcome = Outcome::members(&[data(b'0', "a/"), data(b'5', "b"), Member::file("c", b"c")]);
    assert_eq!(outcome.paths(), ["a", "b", "c"]);
    assert_eq!(outcome.done.unkept.len(), 2, "{:?}", outcome.done.unkept);
    assert!(outcome.done.unkept[0].contains("700 bytes of data"), "{:?}", outcome.done.unkept);
}

/// Of several extended headers before an entry the last one counts, as for GNU tar.
#[test]
fn the_last_extended_header_counts() {
    let outcome = Outcome::members(&[
        Member::extended(b'x', &[("path", b"first"), ("SCHILY.xattr.user.x", b"1")]),
        Member::extended(b'x', &[("path", b"second")]),
        Member::file("plain", b"x"),
    ]);
    assert_eq!(outcome.paths(), ["second"]);
    assert!(outcome.entry("second").xattrs.is_empty());
}

/// Times and owners beyond what an inode holds become others, and only that is said.
#[test]
fn what_was_clamped_is_called_so() {
    let outcome = Outcome::members(&[
        Member::file("late", b"").record("mtime", "253402300799.5"),
        Member::file("early", b"").record("mtime", "-5000000000.25"),
        Member::file("owner", b"").record("uid", "4294967295").record("gid", "4294967295"),
    ]);
    assert!(outcome.done.skipped.is_empty(), "{:?}", outcome.done.skipped);
    let [user, group, times] = &outcome.done.unkept[..] else {
        panic!("{:?}", outcome.done.unkept)
    };
    assert!(times.contains("times of 2 entries"), "{times}");
    assert!(user.contains("owner: user 4294967295") && group.contains("group"), "{user}, {group}");
    assert_eq!((outcome.entry("owner").uid, outcome.entry("owner").gid), (65_534, 65_534));
}
