//! The scripts, and how their outcomes are noted.

use std::io::{self, ErrorKind};

use crate::side::Side;

/// The outcomes of a script: what each call gave, errors by number and kind.
#[derive(Default)]
struct Outcomes(Vec<String>);

impl Outcomes {
    fn note<T: std::fmt::Debug>(&mut self, call: &str, outcome: io::Result<T>) {
        let outcome = match outcome {
            Ok(value) => format!("{value:?}"),
            Err(error) => match error.raw_os_error() {
                // The number tells more than its kind; some errors of std have none.
                Some(number) if error.kind() != ErrorKind::InvalidInput => {
                    format!("{} ({number})", error.kind())
                }
                _ => error.kind().to_string(),
            },
        };
        self.0.push(format!("{call}: {outcome}"));
    }
}

/// Calls a method of the side for each set of arguments and notes the outcomes.
macro_rules! calls {
    ($to:expr, $side:expr, $($method:ident($($argument:expr),*);)*) => {
        $($to.note(stringify!($method($($argument),*)), $side.$method($($argument),*));)*
    };
}

pub(crate) fn names_and_content(side: &dyn Side) -> Vec<String> {
    let mut to = Outcomes::default();
    calls!(to, side,
        write("/hello", b"world"); read("/hello"); read_to_string("/hello");
        write("/hello", b"x"); read("/hello");
        write("/binary", b"\xff\xfe"); read_to_string("/binary"); read("/binary");
        read("/missing"); read_to_string("/missing"); read("/hello/below"); write("/no/file", b"");
        write("/hello/", b""); write("/new/", b""); read("/hello/"); stat("/hello/", true);
        create_dir("/d"); create_dir("/d"); create_dir("/d/"); create_dir("/slash/");
        create_dir("/hello"); create_dir("/no/dir"); create_dir("/hello/dir");
        write("/d", b""); read("/d"); list("/hello"); list("/missing"); list("/d");
        create_dir_all("/a/b/c"); create_dir_all("/a/b/c"); create_dir_all("/a/b/c/../e/f/");
        create_dir_all("/hello"); create_dir_all("/hello/below"); list("/a/b");
        symlink("a/b", "/short"); create_dir_all("/short/made"); stat("/a/b/made", true);
        symlink("missing", "/dangling"); create_dir_all("/dangling");
        create_dir_all("/dangling/below"); exists("/dangling"); exists("/hello");
        exists("/missing"); exists("/hello/below"); exists("/short/c");
        write("/dangling", b"made by way of the link"); read("/missing");
        read_link("/dangling"); read_link("/hello"); read_link("/no");
        symlink("loop", "/loop"); read("/loop"); stat("/loop", false); stat("/loop", true);
        exists("/loop"); symlink("x", "/hello"); symlink("x", "/new/"); symlink("", "/empty");
        stat("/short/c/../../../hello", true); stat("/hello/..", true); stat("/d/.", true);
        hard_link("/hello", "/second"); stat("/second", true); hard_link("/hello", "/second");
        hard_link("/d", "/e"); hard_link("/missing", "/e"); hard_link("/hello", "/third/");
        hard_link("/short", "/short2"); stat("/short2", false);
        stat(&format!("/{}", "n".repeat(256)), true); write("/nul\0", b"");
        open("/f", "r", b""); open("/f", "w", b""); open("/f", "rwc", b"abc");
        open("/f", "rwc", b"X"); open("/f", "rac", b"end"); open("/f", "rw", b"12");
        open("/f", "rwt", b"new"); open("/f", "rwn", b""); open("/g", "rwn", b"new");
        open("/f", "r", b"no"); open("/f", "", b""); open("/f", "rt", b""); open("/f", "rc", b"");
        open("/f", "at", b""); open("/f", "c", b""); open("/d", "rw", b""); open("/d", "r", b"");
        open("/short", "rwn", b""); open("/h", "ran", b"appended"); stat("/h", true);
        open("/new/", "rwc", b""); open("/hello/", "rw", b""); open("/hello/", "rwn", b"");
    );
    to.0
}

pub(crate) fn moves_and_removals(side: &dyn Side) -> Vec<String> {
    let mut to = Outcomes::default();
    calls!(to, side,
        write("/one", b"1"); write("/two", b"2"); create_dir_all("/d/e"); write("/d/e/f", b"");
        create_dir("/empty"); symlink("d", "/link"); symlink("one", "/to-one");
        rename("/one", "/two"); read("/two"); read("/one"); rename("/one", "/x");
        rename("/two", "/d"); rename("/d", "/two"); rename("/d", "/empty"); list("/empty/e");
        rename("/empty", "/d"); rename("/d", "/d/e/below"); rename("/d", "/two/x");
        rename("/two/", "/three"); rename("/two", "/three/"); rename("/d/", "/dir/");
        rename("/dir", "/d"); rename("/link", "/moved"); stat("/moved", false);
        rename("/to-one", "/link");
        remove_file("/d"); remove_file("/two/"); remove_file("/d/"); remove_file("/missing");
        remove_file("/missing/"); remove_file("/two/x"); remove_file("/moved/");
        remove_dir("/d"); remove_dir("/two"); remove_dir("/missing"); remove_dir("/moved");
        remove_dir("/d/e/"); remove_dir_all("/two"); remove_dir_all("/missing");
        remove_dir_all("/moved"); stat("/d", true); exists("/moved"); create_dir_all("/d/deep/er");
        write("/two", b"outside"); symlink("../two", "/d/out"); write("/d/deep/er/file", b"");
        remove_dir_all("/d"); read("/two"); exists("/d"); remove_file("/link");
        create_dir("/last"); remove_dir("/last/"); exists("/last"); remove_file("/two");
    );
    to.0
}

pub(crate) fn attributes(side: &dyn Side) -> Vec<String> {
    let mut to = Outcomes::default();
    let (now, both) = ((None, None), (Some(86_400), Some(1_000)));
    calls!(to, side,
        write("/f", b"content"); create_dir("/d"); symlink("f", "/link");
        stat("/f", true); stat("/d", true); stat("/link", false); stat("/link", true);
        chmod("/f", 0o4751); stat("/f", true); chmod("/link", 0o600); stat("/f", true);
        chmod("/d", 0o2750); stat("/d", true); chmod("/missing", 0o600); set_readonly("/f");
        stat("/f", true);
        chmod("/f", 0o6755); chown("/f", (Some(1000), None), true); stat("/f", true);
        chown("/link", (None, Some(7)), true); stat("/f", true); stat("/link", false);
        chown("/link", (Some(8), Some(9)), false); stat("/f", true); stat("/link", false);
        chmod("/f", 0o6745); chown("/f", (None, None), true); stat("/f", true);
        chown("/d", (Some(1), Some(2)), true); stat("/d", true);
        chown("/missing", (None, None), true);
        set_times("/f", both); stat("/f", true); set_times("/f", (None, Some(2_000)));
        stat("/f", true); set_times("/f", now); stat("/f", true); set_times("/f", (Some(5), None));
        stat("/f", true); set_times("/missing", both); set_times("/d", both); stat("/d", true);
        write("/f", b"again"); set_times("/link", both); stat("/f", true);
        list_xattr("/f"); get_xattr("/f", "user.a"); set_xattr("/f", "user.a", b"1");
        get_xattr("/f", "user.a"); get_xattr("/link", "user.a"); list_xattr("/link");
        set_xattr("/f", "user.a", b"another"); set_xattr("/link", "trusted.b", b"");
        get_xattr("/f", "user.a"); remove_xattr("/f", "user.a"); get_xattr("/f", "user.a");
        remove_xattr("/f", "user.a"); list_xattr("/f"); get_xattr("/missing", "user.a");
        set_xattr("/f", "nonsense", b""); set_xattr("/f", "other.space", b"");
        get_xattr("/f", "other.space"); list_xattr("/missing"); list_xattr("/d");
    );
    to.0
}

pub(crate) fn copies(side: &dyn Side) -> Vec<String> {
    let mut to = Outcomes::default();
    let large = vec![7; 3 << 20];
    calls!(to, side,
        write("/f", b"content"); chmod("/f", 0o751); copy("/f", "/g"); stat("/g", true);
        read("/g"); write("/h", b"something longer than that"); chown("/h", (Some(5), Some(6)), true);
        chmod("/h", 0o600); copy("/f", "/h"); stat("/h", true); read("/h");
        symlink("f", "/link"); copy("/link", "/i"); stat("/i", false); copy("/h", "/link");
        stat("/link", false); read("/f"); symlink("made", "/dangling"); copy("/g", "/dangling"); read("/made");
        create_dir("/d"); copy("/f", "/d"); copy("/d", "/e"); copy("/missing", "/e");
        copy("/f", "/no/e"); copy("/f", "/f/e"); exists("/e"); write("/void", b"");
        copy("/void", "/g"); read("/g"); copy("/f", "/new/");
    );
    // Too long for a line of the outcomes.
    to.note("large", side.write("/large", &large));
    to.note("large", side.copy("/large", "/large2"));
    to.note("large", side.read("/large2").map(|content| content == large));
    to.0
}
