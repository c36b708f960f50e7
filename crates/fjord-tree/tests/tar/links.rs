//! Links of one stream: none is followed or replaced without being asked for.

use fjord_testkit::image::Scratch;
use fjord_testkit::manifest::Kind;

use crate::maker::{Member, stream};
use crate::support::{Outcome, PLAIN, fill, refused};

fn said(members: &[Member]) -> String {
    refused(&stream(members))
}

#[test]
fn members_below_a_link_are_refused() {
    let link = Member::symlink("dir/link", "/real");
    let inner = Member::file("dir/link/inner", b"x");
    for members in [
        // The target is there; it is not; the link is further up.
        vec![Member::directory("real"), link.clone(), inner.clone()],
        vec![link.clone(), inner.clone()],
        vec![link.clone(), Member::file("dir/link/more/inner", b"x")],
        vec![link.clone(), Member::hard_link("dir/link/inner", "dir/link")],
    ] {
        let said = said(&members);
        assert!(said.contains("is below dir/link") && said.contains("/real"), "{said}");
    }
    let said = said(&[link, Member::directory("dir/link/")]);
    assert!(said.contains("a directory here") && said.contains("/real"), "{said}");
}

#[test]
fn members_below_a_file_are_refused() {
    let said = said(&[Member::file("a", b"x"), Member::file("a/b", b"y")]);
    assert!(
        said.contains("a/b: is below a, which an earlier entry made a non-directory"),
        "{said}"
    );
}

#[test]
fn hard_links_that_cannot_be_say_why() {
    let said = said(&[Member::hard_link("b", "dir/missing")]);
    assert!(
        said.contains("b: a hard link to dir/missing")
            && said.contains("not earlier in the stream")
    );
    let said = self::said(&[Member::directory("d"), Member::hard_link("b", "d")]);
    assert!(said.contains("which is a directory"), "{said}");
    let said = self::said(&[Member::hard_link("b", "")]);
    assert!(said.contains("a link to nothing"), "{said}");
    let said = self::said(&[Member::hard_link("b", "../b")]);
    assert!(said.contains("'..'"), "{said}");
    // Below a link, as a member would be.
    let members = [
        Member::file("real/file", b"x"),
        Member::symlink("link", "real"),
        Member::hard_link("b", "link/file"),
    ];
    let said = self::said(&members);
    assert!(said.contains("is below link"), "{said}");
}

#[test]
fn hard_links_join_names() {
    let outcome = Outcome::members(&[
        Member::file("a", b"content"),
        Member::hard_link("b", "./a"),
        Member::hard_link("a", "a"),
        Member::symlink("s", "nowhere"),
        Member::hard_link("t", "s"),
        Member::file("c", b"other"),
        Member::hard_link("c", "a"),
    ]);
    for name in ["a", "b", "c"] {
        assert_eq!(
            (outcome.entry(name).nlink, &outcome.entry(name).first_name[..]),
            (3, &b"a"[..])
        );
    }
    assert_eq!((outcome.entry("t").kind, outcome.entry("s").nlink), (Kind::Symlink, 2));
}

#[test]
fn later_entries_replace_earlier_ones() {
    let outcome = Outcome::members(&[
        Member::file("file", b"old and longer").record("SCHILY.xattr.user.old", "1"),
        Member::directory("empty"),
        Member::symlink("link", "somewhere"),
        Member::file("node", b"x"),
        Member::directory("dir").mode(0o700).record("SCHILY.xattr.user.old", "1"),
        Member::file("dir/kept", b"x"),
        Member::file("file", b"new").mode(0o600),
        Member::file("empty", b"no directory any more"),
        Member::file("link", b"no link any more"),
        Member { device: (1, 3), ..Member::new(b'3', "node") },
        Member::directory("dir").mode(0o750),
        Member::file("plain", b"x"),
        Member::directory("plain"),
    ]);
    outcome.assert_content("file", b"new");
    assert!(outcome.entry("file").xattrs.is_empty());
    outcome.assert_content("empty", b"no directory any more");
    outcome.assert_content("link", b"no link any more");
    assert_eq!(outcome.entry("node").rdev, (1, 3));
    assert_eq!((outcome.entry("dir").mode, outcome.entry("dir").xattrs.len()), (0o750, 0));
    assert_eq!(outcome.entry("plain").kind, Kind::Directory);
    assert!(outcome.paths().contains(&"dir/kept".to_owned()));
    let said = said(&[Member::file("d/x", b"x"), Member::file("d", b"x")]);
    assert!(
        said.contains("d: not a directory here, but a directory with entries earlier"),
        "{said}"
    );
    let said = self::said(&[Member::file("lost+found", b"x")]);
    assert!(said.contains("must be a directory"), "{said}");
}

#[test]
fn names_that_lead_outside_are_refused() {
    for (name, told) in
        [("../out", "'..'"), ("a/../../out", "'..'"), ("..", "'..'"), ("/..", "'..'")]
    {
        let said = said(&[Member::file(name, b"x")]);
        assert!(said.contains(told), "{name}: {said}");
    }
    let said = said(&[Member::file("x", b"").record("path", "a\0b")]);
    assert!(said.contains("zero byte"), "{said}");
    let said = self::said(&[Member::file(".", b"x")]);
    assert!(said.contains("without a name"), "{said}");
    let said = self::said(&[Member::symlink("s", "")]);
    assert!(said.contains("a link to nothing"), "{said}");
    let said = self::said(&[Member::file("x", b"").record("path", "x/".repeat(40_000))]);
    assert!(said.contains("a name of 80000 bytes"), "{said}");
    // Absolute names are below the top, as for tar.
    let outcome = Outcome::members(&[Member::file("//abs//./file", b"x")]);
    assert_eq!(outcome.paths(), ["abs", "abs/file"]);
    // Targets are not touched.
    let outcome = Outcome::members(&[Member::symlink("s", "../../etc/passwd")]);
    assert_eq!(outcome.entry("s").target, b"../../etc/passwd");
}

/// Directories that no entry names have the time of what is in them first.
#[test]
fn missing_directories_are_made_the_same_each_time() {
    let outcome = Outcome::members(&[Member { mtime: 12345, ..Member::file("a/b/c", b"x") }]);
    for path in ["a", "a/b"] {
        let entry = outcome.entry(path);
        assert_eq!((entry.mode, entry.uid, entry.mtime.sec), (0o755, 0, 12345), "{path}");
    }
}

/// As deep as a name can be, without recursion on the stack.
#[test]
fn very_deep_names_need_no_stack() {
    let bytes = stream(&[Member::file("x", b"").record("path", "d/".repeat(10_000) + "x")]);
    let counted = fjord_tree::Contents::of_tar(&mut &bytes[..], &fjord_tree::Rules::default());
    assert_eq!(counted.expect("readable").inodes, 10_001);
    let scratch = Scratch::in_memory("tar").expect("a directory");
    let done = fill(&scratch.join("image"), &[&bytes], &PLAIN).expect("fits");
    assert_eq!(done.entries, 1);
}
