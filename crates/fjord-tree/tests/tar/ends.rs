//! What ends a stream: its end of file.

use crate::maker::{Member, stream, without_end};
use crate::support::{Outcome, refused};

fn file(name: &str) -> Member {
    Member::file(name, name.as_bytes())
}

#[test]
fn end_marks_may_be_missing() {
    let bytes = without_end(&[file("a"), file("b")]);
    assert_eq!(Outcome::plain(&bytes).paths(), ["a", "b"]);
    // One zero block is half an end mark.
    let half = [&bytes[..], &[0; 512]].concat();
    assert_eq!(Outcome::plain(&half).paths(), ["a", "b"]);
    // Nothing but an end mark: an empty tree.
    assert!(Outcome::plain(&[0; 10_240]).paths().is_empty());
}

/// Some programs pad to a size that is no number of blocks, or with a single byte.
#[test]
fn zeros_behind_the_end_mark_are_part_of_it() {
    let whole = stream(&[file("a")]);
    for count in [1, 2, 511, 513, 1000, 10_000] {
        let padded = [&whole[..], &vec![0; count]].concat();
        assert_eq!(Outcome::plain(&padded).paths(), ["a"], "{count}");
    }
    // In place of an end mark they are a cut.
    let cut = [&without_end(&[file("a")])[..], &[0; 100]].concat();
    assert!(refused(&cut).contains("ends early"), "{}", refused(&cut));
}

#[test]
fn concatenated_streams_are_read_to_their_end() {
    let padded = [&stream(&[file("a")])[..], &[0; 8192]].concat();
    let both = [&padded[..], &stream(&[file("b")]), &padded, &stream(&[file("c")])].concat();
    assert_eq!(Outcome::plain(&both).paths(), ["a", "b", "c"]);
}

#[test]
fn what_is_cut_off_or_goes_on_is_refused() {
    let bytes = without_end(&[file("a"), Member::file("dir/long", &[7; 3000])]);
    // A header and a block of data each, then six.
    for (len, told) in [
        (0, "empty"),
        (300, "not a tar stream"),
        (512, "in the entry a"),
        (600, "in the entry a"),
        (1024 + 100, "in a header"),
        (1024 + 512, "in the entry dir/long"),
        (bytes.len() - 1, "in the entry dir/long"),
    ] {
        let said = refused(&bytes[..len]);
        assert!(said.contains(told), "{len}: {said}");
    }
    // An extended header without its entry.
    let extended = without_end(&[Member::extended(b'x', &[("path", b"z")])]);
    let said = refused(&[&bytes[..], &extended].concat());
    assert!(said.contains("ends early"), "{said}");
    let said = refused(&[&bytes[..], &extended, &[0; 1024]].concat());
    assert!(said.contains("does not follow"), "{said}");
    // Other bytes behind the end, and in place of a header.
    let said = refused(&[&stream(&[file("a")])[..], &[b'#'; 512]].concat());
    assert!(said.contains("after the end mark") && said.contains("head -c 2048"), "{said}");
    let said = refused(&[&without_end(&[file("a")])[..], &[b'#'; 512]].concat());
    assert!(said.contains("after 1024 bytes") && said.contains("checksum"), "{said}");
}

#[test]
fn other_files_are_called_by_their_name() {
    for (start, told) in [
        (&b"BZh91AY&SY"[..], "bzip2 -dc"),
        (b"\x04\x22\x4d\x18rest", "lz4 -dc"),
        (b"LZIP\x01", "lzip -dc"),
        (b"PK\x03\x04", "gzip, zstd or xz"),
    ] {
        let mut bytes = start.to_vec();
        bytes.resize(2048, 0x55);
        let said = refused(&bytes);
        assert!(said.contains("not a tar stream") && said.contains(told), "{said}");
    }
}
