//! Layers of OCI images: whiteouts, replaced kinds, links across layers.

use fjord_testkit::manifest::Kind;
use fjord_tree::{EntryError, TarError, TreeError};

use crate::maker::{Member, stream};
use crate::support::{LAYERS, Outcome, PLAIN};

fn file(name: &str) -> Member {
    Member::file(name, name.as_bytes())
}

fn layered(layers: &[&[Member]]) -> Result<Outcome, TreeError> {
    let streams: Vec<Vec<u8>> = layers.iter().map(|members| stream(members)).collect();
    let streams: Vec<&[u8]> = streams.iter().map(|bytes| &bytes[..]).collect();
    Outcome::of(&streams, &LAYERS)
}

fn paths(layers: &[&[Member]]) -> Vec<String> {
    layered(layers).expect("layers that fit").paths()
}

#[test]
fn whiteouts_remove_what_lower_layers_have() {
    let base = [
        file("a"),
        file("d/x"),
        file("d/y"),
        Member::directory("e"),
        file("e/deep/er/z"),
        file("k"),
    ];
    let removed =
        [file(".wh.a"), file("d/.wh.x"), file(".wh.e"), file(".wh.missing"), file("n/.wh.x")];
    assert_eq!(paths(&[&base, &removed]), ["d", "d/y", "k"]);
    // What is removed may come again, from above or in the same layer, before the whiteout or after.
    assert_eq!(paths(&[&base, &removed, &[file("a")]]), ["a", "d", "d/y", "k"]);
    let again = [file("e/new"), file(".wh.e"), file(".wh.a"), Member::directory("a"), file("k")];
    let outcome = layered(&[&base, &again]).expect("fits");
    assert_eq!(outcome.paths(), ["a", "d", "d/x", "d/y", "e", "e/new", "k"]);
    assert_eq!(outcome.entry("a").kind, Kind::Directory);
    // A whiteout itself is no file, in the lowest layer either.
    assert_eq!(paths(&[&[file(".wh.x"), file("x")], &[file("y")]]), ["x", "y"]);
}

#[test]
fn opaque_directories_hide_what_is_below() {
    let base = [
        file("d/x"),
        file("d/sub/one"),
        file("d/sub/two"),
        file("d/gone/deep"),
        Member::symlink("d/link", "x"),
        file("other"),
    ];
    for above in [
        [file("d/.wh..wh..opq"), file("d/new"), file("d/sub/three"), file("d/x/.wh.nothing")],
        [file("d/sub/three"), file("d/new"), file("d/x/.wh.nothing"), file("d/.wh..wh..opq")],
    ] {
        let found = paths(&[&base, &above]);
        assert_eq!(found, ["d", "d/new", "d/sub", "d/sub/three", "other"]);
    }
    // The top; its lost+found stays, as e2fsck wants it.
    assert_eq!(paths(&[&base, &[file(".wh..wh..opq"), file("only")]]), ["only"]);
    assert_eq!(paths(&[&base, &[file(".wh.lost+found"), file(".wh.d")]]), ["other"]);
    // Of AUFS.
    let aufs = [Member::directory(".wh..wh.plnk"), file(".wh..wh.plnk/1.2"), file(".wh..wh.aufs")];
    assert_eq!(paths(&[&[file("a")], &aufs]), ["a"]);
}

#[test]
fn replaced_kinds() {
    let base = [
        Member::directory("tree").mode(0o700),
        file("tree/a/b"),
        file("tree/c"),
        file("file"),
        Member::symlink("link", "tree"),
        Member::directory("kept").mode(0o700).record("SCHILY.xattr.user.old", "1"),
        file("kept/inner"),
    ];
    let above = [
        Member::file("tree", b"now a file"),
        Member::directory("file"),
        file("file/inner"),
        Member::directory("link"),
        file("link/inner"),
        Member::directory("kept").mode(0o755),
    ];
    let outcome = layered(&[&base, &above]).expect("fits");
    assert_eq!(
        outcome.paths(),
        ["file", "file/inner", "kept", "kept/inner", "link", "link/inner", "tree"]
    );
    outcome.assert_content("tree", b"now a file");
    assert_eq!(outcome.entry("link").kind, Kind::Directory);
    assert_eq!((outcome.entry("kept").mode, outcome.entry("kept").xattrs.len()), (0o755, 0));
    // A directory that is only passed through keeps what it has.
    let outcome = layered(&[&base, &[file("kept/more")]]).expect("fits");
    assert_eq!((outcome.entry("kept").mode, outcome.entry("kept").xattrs.len()), (0o700, 1));
}

#[test]
fn hard_links_across_layers() {
    let base = [file("a"), Member::directory("d")];
    let outcome = layered(&[
        &base,
        &[Member::hard_link("d/b", "a"), Member::hard_link("c", "d/b")],
        &[file(".wh.a"), Member::file("c", b"another")],
    ])
    .expect("fits");
    assert_eq!(outcome.paths(), ["c", "d", "d/b"]);
    outcome.assert_content("d/b", b"a");
    assert_eq!(outcome.entry("d/b").nlink, 1);
    // A link in place of a directory that has the target.
    let above = [Member::hard_link("d", "d/x")];
    let error = layered(&[&[file("d/x")], &above]).err().expect("cannot be");
    assert!(error.to_string().contains("not earlier in the stream"), "{error}");
    // One that names a whiteout is listed.
    let above = [file(".wh.a"), Member::hard_link("b", ".wh.a"), file("c")];
    let outcome = layered(&[&base, &above]).expect("fits");
    assert_eq!(outcome.paths(), ["c", "d"]);
    assert!(outcome.done.unkept[0].contains("b: a hard link to the whiteout .wh.a"));
    // What a whiteout has removed is no target.
    let above = [file(".wh.a"), Member::hard_link("b", "a")];
    let error = layered(&[&base, &above]).err().expect("the target is gone");
    let missing = matches!(
        error,
        TreeError::Tar { source: TarError::Entry { reason: EntryError::MissingTarget(_), .. }, .. }
    );
    assert!(missing, "{error}");
}

#[test]
fn links_on_the_way_are_followed_inside() {
    let base = [
        Member::directory("usr/lib"),
        Member::symlink("lib", "usr/lib"),
        Member::symlink("abs", "/usr/lib"),
        Member::symlink("out", "../../../usr"),
        Member::symlink("new", "made/for/it"),
    ];
    let above = [
        file("lib/a"),
        file("abs/b"),
        file("out/lib/c"),
        file("new/d"),
        Member::hard_link("e", "lib/a"),
        Member::symlink("lib/f", "g"),
    ];
    let outcome = layered(&[&base, &above]).expect("fits");
    let expected = [
        "abs",
        "e",
        "lib",
        "made",
        "made/for",
        "made/for/it",
        "made/for/it/d",
        "new",
        "out",
        "usr",
        "usr/lib",
        "usr/lib/a",
        "usr/lib/b",
        "usr/lib/c",
        "usr/lib/f",
    ];
    assert_eq!(outcome.paths(), expected);
    assert_eq!(outcome.entry("lib").kind, Kind::Symlink);
    // Whiteouts go the same way.
    let outcome = layered(&[&base, &above, &[file("lib/.wh.a"), file("abs/.wh..wh..opq")]]);
    assert!(!outcome.expect("fits").paths().iter().any(|path| path.starts_with("usr/lib/")));
    let circle = [Member::symlink("x", "y"), Member::symlink("y", "x")];
    let error = layered(&[&circle, &[file("x/z")]]).err().expect("a circle");
    assert!(error.to_string().contains("too many symbolic links"), "{error}");
    let error = layered(&[&[file("a")], &[file("a/b")]]).err().expect("below a file");
    assert!(error.to_string().contains("is below a"), "{error}");
}

#[test]
fn whiteouts_of_one_plain_stream_are_files() {
    let bytes = stream(&[file("a"), file(".wh.a")]);
    assert_eq!(Outcome::of(&[&bytes], &PLAIN).expect("fits").paths(), [".wh.a", "a"]);
    for name in [".wh.", "d/.wh..", ".wh..."] {
        let error = layered(&[&[file(name)]]).err().expect("no name");
        assert!(error.to_string().contains("a whiteout without a name"), "{name}: {error}");
    }
}

/// Directories by the hundred, so that a listing takes several goes.
#[test]
fn large_trees_are_removed() {
    let mut base: Vec<Member> = (0..1500).map(|index| file(&format!("d/{index:04}"))).collect();
    base.extend((0..300).map(|index| file(&format!("d/sub/{index:03}/inner"))));
    assert_eq!(paths(&[&base, &[file(".wh.d")]]), [""; 0]);
    let some: Vec<Member> = [file("d/.wh..wh..opq"), file("d/0700"), file("d/sub/150/new")].into();
    assert_eq!(paths(&[&base, &some]), ["d", "d/0700", "d/sub", "d/sub/150", "d/sub/150/new"]);
}
