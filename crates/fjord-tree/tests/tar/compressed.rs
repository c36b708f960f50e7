//! Compressed streams, made by the usual programs.

use fjord_tree::{CompressError, Compression, TarError, TreeError};

use crate::maker::{Member, stream};
use crate::support::{Outcome, PLAIN, piped, quiet};

/// Compressing programs, and what they write.
pub(crate) const PROGRAMS: [(&str, &[&str], Compression); 3] = [
    ("gzip", &["-c"], Compression::Gzip),
    ("zstd", &["-c", "-q", "--check"], Compression::Zstd),
    ("xz", &["-c", "-T1"], Compression::Xz),
];

fn archive() -> Vec<u8> {
    let noise = fjord_testkit::rng::pattern_vec(7, 0, 300_000);
    let text = "all work and no play ".repeat(40_000);
    stream(&[Member::file("noise", &noise), Member::file("text", text.as_bytes())])
}

fn assert_whole(bytes: &[u8]) {
    let outcome = Outcome::plain(bytes);
    assert_eq!(outcome.paths(), ["noise", "text"]);
    outcome.assert_content("noise", &fjord_testkit::rng::pattern_vec(7, 0, 300_000));
    outcome.assert_content("text", "all work and no play ".repeat(40_000).as_bytes());
}

fn refused(bytes: &[u8]) -> CompressError {
    match Outcome::of(&[bytes], &PLAIN).err() {
        Some(TreeError::Tar { source: TarError::Compressed(error), .. }) => error,
        other => panic!("not refused for its compression: {other:?}"),
    }
}

#[test]
fn each_format_is_recognised() {
    let archive = archive();
    for (program, args, _) in PROGRAMS {
        assert_whole(&piped(program, args, &archive));
    }
    assert_whole(&piped("xz", &["-c", "--check=sha256", "--block-size=100000"], &archive));
    assert_whole(&piped("xz", &["-c", "--check=none", "--x86", "--lzma2"], &archive));
    assert_whole(&piped("zstd", &["-c", "-q", "--ultra", "-22"], &archive));
    assert_whole(&piped("zstd", &["-c", "-q", "--no-check", "--long=27"], &archive));
}

/// Members, frames and streams that follow each other are one stream, wherever they are cut.
#[test]
fn several_parts_are_read_to_the_end() {
    let archive = archive();
    let (first, rest) = archive.split_at(123_456);
    let (second, third) = rest.split_at(7);
    for (program, args, format) in PROGRAMS {
        let parts: Vec<Vec<u8>> =
            [first, b"", second, third].iter().map(|part| piped(program, args, part)).collect();
        assert_whole(&parts.concat());
        // What may stand between or behind them.
        let filling: &[u8] = match format {
            Compression::Gzip => b"",
            Compression::Zstd => b"\x50\x2a\x4d\x18\x03\0\0\0abc",
            Compression::Xz => &[0; 8],
        };
        assert_whole(&parts.join(filling));
        let behind: &[u8] = if format == Compression::Gzip { &[0; 1000] } else { filling };
        assert_whole(&[&parts.concat()[..], behind].concat());
    }
    // pzstd begins with a frame to be skipped.
    let packed = piped("zstd", &["-c", "-q"], &archive);
    assert_whole(&[b"\x5a\x2a\x4d\x18\x04\0\0\0size", &packed[..]].concat());
}

#[test]
fn what_is_cut_off_or_followed_by_other_bytes_is_refused() {
    let archive = archive();
    for (program, args, format) in PROGRAMS {
        let packed = piped(program, args, &archive);
        for len in [7, 40, packed.len() / 2, packed.len() - 1] {
            let error = refused(&packed[..len]);
            assert!(matches!(error, CompressError::Cut(of) if of == format), "{len}: {error}");
        }
        for behind in [&b"x"[..], b"\0\0\0x", &[0xff; 5000]] {
            let error = refused(&[&packed[..], behind].concat());
            assert!(matches!(error, CompressError::Trailing(of) if of == format), "{error}");
        }
        // Damage that only the checksum shows, or the decoder.
        let mut damaged = packed.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 0x10;
        let error = refused(&damaged);
        assert!(
            matches!(error, CompressError::Damaged { format: of, .. } if of == format),
            "{error}"
        );
        assert!(error.to_string().contains(program), "{error}");
    }
}

#[test]
fn large_windows_are_refused_with_advice() {
    let packed = piped("zstd", &["-c", "-q", "--ultra", "--long=31"], &archive());
    let error = refused(&packed);
    assert!(matches!(error, CompressError::Window(Compression::Zstd)), "{error}");
    assert!(error.to_string().contains("zstd -dc --long=31"), "{error}");
    let packed = piped("xz", &["-c", "--lzma2=dict=192MiB"], &archive());
    let error = refused(&packed);
    assert!(matches!(error, CompressError::Window(Compression::Xz)), "{error}");
    assert!(error.to_string().contains("xz -dc)"), "{error}");
}

/// A stream of zeros that is a thousand times as long as what it is packed into.
#[test]
fn bombs_take_no_memory() {
    use fjord_testkit::hostile::memory::live_bytes;
    let _quiet = quiet();
    let archive = stream(&[Member { stated: Some(32 << 20), ..Member::file("f", b"") }]);
    let long = [&archive[..512], &vec![0; 32 << 20]].concat();
    for (program, args, _) in PROGRAMS {
        let packed = piped(program, args, &long);
        let before = live_bytes();
        let mut most = 0;
        let mut watched = Watched { packed: &packed, most: &mut most };
        let rules = fjord_tree::Rules::default();
        let counted = fjord_tree::Contents::of_tar(&mut watched, &rules).expect("readable");
        assert_eq!(counted.bytes, 32 << 20);
        assert!(most.saturating_sub(before) < 16 << 20, "{program}: {most} bytes, {before} before");
    }
}

/// Notes how much memory is in use while it is read.
struct Watched<'w> {
    packed: &'w [u8],
    most: &'w mut u64,
}

impl std::io::Read for Watched<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        *self.most = (*self.most).max(fjord_testkit::hostile::memory::live_bytes());
        let count = buf.len().min(512);
        std::io::Read::read(&mut self.packed, &mut buf[..count])
    }
}
