//! Access lists as text: kept, and never wider than what they said.

use fjord_format::acl::{Acl, AclTag};
use fjord_testkit::tools;

use crate::maker::{Member, stream};
use crate::support::{LAYERS, Outcome, refused};

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";

/// The list of a path as Linux shows it.
fn list(outcome: &Outcome, path: &str, name: &[u8]) -> Option<Vec<(AclTag, u16)>> {
    let value = outcome.entry(path).xattrs.get(name)?;
    let acl = Acl::from_xattr(value).expect("valid").expect("not empty");
    Some(acl.entries().iter().map(|entry| (entry.tag, entry.perm)).collect())
}

#[test]
fn lists_as_text_are_kept() {
    let access = "user::rw-,user:lisa:rw-:1234,group::r--,group:crew:r--:77,mask::rw-,other::---";
    let default = "user::rwx\nuser:5:r-x\ngroup::r-x\nmask::r-x\nother::--x\n";
    let outcome = Outcome::members(&[
        Member::file("file", b"x").mode(0o660).record("SCHILY.acl.access", access),
        Member::directory("dir")
            .mode(0o751)
            .record("SCHILY.acl.access", "user::rwx,group::r-x,other::--x")
            .record("SCHILY.acl.default", default),
        Member::file("dir/below", b"x"),
    ]);
    assert!(outcome.done.skipped.is_empty() && outcome.done.unkept.is_empty());
    let expected = [
        (AclTag::UserObj, 6),
        (AclTag::User(1234), 6),
        (AclTag::GroupObj, 4),
        (AclTag::Group(77), 4),
        (AclTag::Mask, 6),
        (AclTag::Other, 0),
    ];
    assert_eq!(list(&outcome, "file", ACCESS).as_deref(), Some(&expected[..]));
    assert_eq!(outcome.entry("file").mode, 0o660);
    // A list that says no more than the mode is the mode.
    assert_eq!(list(&outcome, "dir", ACCESS), None);
    assert_eq!(outcome.entry("dir").mode, 0o751);
    let expected = [
        (AclTag::UserObj, 7),
        (AclTag::User(5), 5),
        (AclTag::GroupObj, 5),
        (AclTag::Mask, 5),
        (AclTag::Other, 1),
    ];
    assert_eq!(list(&outcome, "dir", DEFAULT).as_deref(), Some(&expected[..]));
    assert!(outcome.entry("dir/below").xattrs.is_empty(), "nothing is inherited");
}

/// The mask stays in the mode's group bits: without the list, `group::r--` would become `rwx`.
#[test]
fn permissions_do_not_widen() {
    let text = "user::rwx,user:nobody-knows:rwx,group::r--,mask::rwx,other::---";
    let outcome =
        Outcome::members(&[Member::file("f", b"x").mode(0o770).record("SCHILY.acl.access", text)]);
    let unkept = &outcome.done.unkept;
    assert!(unkept.len() == 1 && unkept[0].contains("user:nobody-knows"), "{unkept:?}");
    let expected =
        [(AclTag::UserObj, 7), (AclTag::GroupObj, 4), (AclTag::Mask, 7), (AclTag::Other, 0)];
    assert_eq!(list(&outcome, "f", ACCESS).as_deref(), Some(&expected[..]));
    // A list that cannot be read is not dropped, for the mode alone may say more.
    for bad in ["user::rwx", "user::rwx,group::r--,other::qqq", "nonsense"] {
        let said = refused(&stream(&[Member::file("f", b"x").record("SCHILY.acl.access", bad)]));
        assert!(said.contains("f: the access list SCHILY.acl.access is malformed"), "{said}");
    }
    // NFSv4 lists are none that ext4 knows.
    let outcome =
        Outcome::members(&[Member::file("f", b"x").record("SCHILY.acl.ace", "owner@:rwx::allow")]);
    let unkept = &outcome.done.unkept;
    assert!(unkept.iter().any(|line| line.starts_with("f: SCHILY.acl.ace: ")), "{unkept:?}");
}

#[test]
fn names_get_the_numbers_of_the_stream() {
    let text = "user::rw-,user:lisa:rw-,group::r--,group:crew:r--,mask::rw-,other::---";
    let owner = Member {
        ids: (4321, 99),
        names: (b"lisa".to_vec(), b"crew".to_vec()),
        ..Member::file("hers", b"x")
    };
    let outcome = Outcome::members(&[
        owner,
        Member::file("f", b"x").mode(0o660).record("SCHILY.acl.access", text),
    ]);
    assert!(outcome.done.unkept.is_empty(), "{:?}", outcome.done.unkept);
    let found = list(&outcome, "f", ACCESS).expect("a list");
    assert!(found.contains(&(AclTag::User(4321), 6)) && found.contains(&(AclTag::Group(99), 4)));
    // The host's, when it is asked.
    let text = "user::rw-,user:daemon:rw-,group::r--,mask::rw-,other::---";
    let bytes = stream(&[Member::file("f", b"x").mode(0o660).record("SCHILY.acl.access", text)]);
    let ask = fjord_tree::TarOptions { ask_host: true, ..LAYERS };
    let outcome = Outcome::of(&[&bytes], &ask).expect("fits");
    let id = tools::run(tools::command("id").expect("there").args(["-u", "daemon"]))
        .and_then(tools::Output::ok)
        .expect("every Debian has daemon");
    let id: u32 = id.stdout.trim().parse().expect("a number");
    let found = list(&outcome, "f", ACCESS).expect("a list");
    assert!(found.contains(&(AclTag::User(id), 6)), "{found:?}");
}

#[test]
fn a_list_that_came_as_an_attribute_counts_alone() {
    let value = [
        &2u32.to_le_bytes()[..],
        &[1, 0, 6, 0, 0xff, 0xff, 0xff, 0xff],
        &[2, 0, 4, 0, 7, 0, 0, 0],
        &[4, 0, 4, 0, 0xff, 0xff, 0xff, 0xff],
        &[0x10, 0, 4, 0, 0xff, 0xff, 0xff, 0xff],
        &[0x20, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
    ]
    .concat();
    let outcome = Outcome::members(&[Member::file("f", b"x")
        .mode(0o640)
        .record("SCHILY.acl.access", "user::rw-\nuser:who:r--\ngroup::r--\nmask::r--\nother::---\n")
        .record("SCHILY.xattr.system.posix_acl_access", &value)]);
    assert!(outcome.done.skipped.is_empty() && outcome.done.unkept.is_empty());
    let found = list(&outcome, "f", ACCESS).expect("a list");
    assert!(found.contains(&(AclTag::User(7), 4)), "{found:?}");
    // A default list of a file means nothing.
    let outcome = Outcome::members(&[
        Member::file("f", b"x").record("SCHILY.acl.default", "user::rwx,group::r-x,other::r-x")
    ]);
    assert!(outcome.done.unkept[0].contains("posix_acl_default"), "{:?}", outcome.done.unkept);
}
