//! Links of one stream: followed inside the image; the last entry of a name counts.

use fjord_testkit::image::Scratch;
use fjord_testkit::manifest::{Kind, Manifest};
use fjord_testkit::tools;

use crate::maker::{Member, stream};
use crate::support::{Outcome, PLAIN, fill, refused};

fn said(members: &[Member]) -> String {
    refused(&stream(members))
}

/// What GNU tar extracts, by name.
fn gnu_tar(bytes: &[u8]) -> Vec<String> {
    let scratch = Scratch::in_memory("tar").expect("a directory");
    let (archive, out) = (scratch.join("a.tar"), scratch.join("out"));
    std::fs::write(&archive, bytes).expect("written");
    std::fs::create_dir(&out).expect("made");
    let mut tar = tools::command("tar").expect("installed");
    tools::run(tar.args(["--no-same-owner", "-xf"]).arg(&archive).arg("-C").arg(&out))
        .and_then(tools::Output::ok)
        .expect("GNU tar takes it");
    let found = Manifest::from_directory(&out).expect("readable");
    let paths = found.entries.keys().filter(|path| !path.is_empty());
    paths.map(|path| String::from_utf8_lossy(path).into_owned()).collect()
}

/// Every distribution with one `/usr`: entries by way of the link, before and after its target.
#[test]
fn members_below_a_link_go_where_it_leads() {
    let bytes = stream(&[
        Member::directory("usr/lib/"),
        Member::symlink("lib", "usr/lib"),
        Member::symlink("usr/lib64", "lib"),
        Member::file("lib/modules/x.ko", b"module"),
        Member::file("usr/lib64/y", b"y"),
        Member::hard_link("lib/z", "usr/lib64/modules/x.ko"),
        Member::directory("lib/modules/more/"),
    ]);
    let outcome = Outcome::plain(&bytes);
    assert_eq!(outcome.paths(), gnu_tar(&bytes));
    outcome.assert_content("usr/lib/modules/x.ko", b"module");
    assert_eq!(outcome.entry("usr/lib/z").nlink, 2);
    assert_eq!(outcome.entry("lib").kind, Kind::Symlink);
    assert!(outcome.done.unkept.is_empty(), "{:?}", outcome.done.unkept);
}

/// Absolute targets and `..` end at the image's top, whatever the host has there.
#[test]
fn links_that_lead_outside_stay_inside() {
    let outcome = Outcome::members(&[
        Member::symlink("up", "../../../../../etc"),
        Member::file("up/passwd", b"x"),
        Member::symlink("abs", "/var/./log//"),
        Member::file("abs/messages", b"y"),
        Member::symlink("dir/here", "."),
        Member::file("dir/here/here/inner", b"z"),
        Member::symlink("top", "/"),
        Member::file("top/top/file", b"t"),
    ]);
    for (path, content) in
        [("etc/passwd", b"x"), ("var/log/messages", b"y"), ("dir/inner", b"z"), ("file", b"t")]
    {
        outcome.assert_content(path, content);
    }
}

#[test]
fn links_that_lead_nowhere_are_refused() {
    let circle = [Member::symlink("a", "b"), Member::symlink("b", "a"), Member::file("a/x", b"x")];
    assert!(said(&circle).contains("too many symbolic links"));
    let own = [Member::symlink("a", "a"), Member::file("a/x", b"x")];
    assert!(said(&own).contains("too many symbolic links"));
    let doubled = [Member::symlink("a", "a/a"), Member::file("a/x", b"x")];
    assert!(said(&doubled).contains("too many symbolic links"));
    let file = [Member::file("f", b"f"), Member::symlink("l", "f"), Member::file("l/x", b"x")];
    assert!(said(&file).contains("non-directory"), "{}", said(&file));
}

/// A link, a directory in its place, and a link again: the last one counts, and what goes is listed.
#[test]
fn links_and_directories_replace_each_other() {
    let outcome = Outcome::members(&[
        Member::directory("real"),
        Member::symlink("name", "real"),
        Member::file("name/first", b"1"),
        Member::directory("name/"),
        Member::file("name/second", b"2"),
        Member::symlink("name", "real"),
        Member::file("name/third", b"3"),
    ]);
    assert_eq!(outcome.paths(), ["name", "real", "real/first", "real/third"]);
    let [first, second] = &outcome.done.unkept[..] else { panic!("{:?}", outcome.done.unkept) };
    assert!(first.contains("name/: a symbolic link to real earlier"), "{first}");
    assert!(second.contains("name: a directory with entries earlier"), "{second}");
    // Its target goes with the directory.
    let inside = [Member::file("d/x", b"x"), Member::hard_link("d", "d/x")];
    assert!(said(&inside).contains("not earlier in the stream"), "{}", said(&inside));
}

/// ext4 allows a file 65,000 names.
#[test]
fn a_file_with_more_names_than_ext4_allows_is_copied() {
    let file = Member::file("d/first", b"content").mode(0o600).record("SCHILY.xattr.user.x", "1");
    let names = (0..65_010).map(|number| Member::hard_link(&format!("d/n{number}"), "d/first"));
    let outcome = Outcome::many([file].into_iter().chain(names));
    let last = outcome.entry("d/n65009");
    assert_eq!((outcome.entry("d/first").nlink, last.nlink), (65_000, 11));
    assert_eq!((last.mode, last.xattrs.len()), (0o600, 1));
    outcome.assert_content("d/n65009", b"content");
    let [told] = &outcome.done.unkept[..] else { panic!("{:?}", outcome.done.unkept) };
    assert!(told.contains("d/n64999") && told.contains("65000 names"), "{told}");
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
    let said = said(&[Member::file("lost+found", b"x")]);
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
