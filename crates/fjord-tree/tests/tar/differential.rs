//! Mutated headers, by the thousand, beside GNU tar and bsdtar: what both of them list is in the image, or it is
//! named among what was left out, or the stream is refused. No entry is lost without a word.

use std::collections::BTreeSet;
use std::sync::Arc;

use fjord::{Fs, MountOptions};
use fjord_block::{Device, MemDevice};
use fjord_mkfs::{MkfsOptions, format};
use fjord_testkit::image::Scratch;
use fjord_testkit::rng::{Rng, mix, seed_from_env};
use fjord_testkit::size::pick;
use fjord_testkit::tools;
use fjord_tree::{Populated, Rules, Source, TarInput, TreeError, populate};

use crate::maker::{BLOCK, Member, Style, seal, stream};
use crate::mutated::field;
use crate::support::{PLAIN, quiet};

/// What the names of all entries begin with.
const NAME: &str = "entry-";

/// Entries of each kind, and the shapes that programs read in different ways.
fn members() -> Vec<Member> {
    let name = |number: u32| format!("{NAME}{number:02}");
    vec![
        Member::file(&name(0), &[b'x'; 700]),
        // A directory that states a size, as in old archives.
        Member { stated: Some(300), ..Member::file(&format!("{}/", name(1)), b"") }
            .style(Style::Old),
        Member { stated: Some(512), ..Member::directory(&name(2)) },
        Member::directory(&name(3)),
        Member::file(&name(4), b"after directories"),
        // Two extended headers before one entry.
        Member::extended(b'x', &[("mtime", b"77.5"), ("uid", b"5")]),
        Member::file(&name(5), b"x").record("gid", "6"),
        // A link with a size, and what goes through it.
        Member { stated: Some(400), ..Member::symlink(&name(6), &name(2)) },
        Member::file(&format!("{}/{}", name(6), name(7)), b"through a link"),
        Member { stated: Some(900), ..Member::hard_link(&name(8), &name(0)) },
        Member { device: (1, 3), stated: Some(100), ..Member::new(b'3', &name(9)) },
        Member { data: name(10).repeat(12).into(), ..Member::new(b'L', "long").style(Style::Gnu) },
        Member::file("cut", b"long name").style(Style::Gnu),
        Member::file(&name(11), &[b'y'; 1200]).record("SCHILY.xattr.user.x", [1; 30]),
        Member::file(&name(12), b"the last one"),
    ]
}

/// The blocks that are headers.
fn headers(bytes: &[u8]) -> Vec<usize> {
    let blocks = (0..bytes.len() / BLOCK).map(|block| block * BLOCK);
    let sealed = |at: &usize| {
        let header = &bytes[*at..*at + BLOCK];
        let mut again = header.to_vec();
        seal(&mut again);
        header.iter().any(|byte| *byte != 0) && again[148..156] == header[148..156]
    };
    blocks.filter(sealed).collect()
}

/// The last parts of names that begin as those of the entries do.
fn names(listed: &str) -> BTreeSet<String> {
    let lines = listed.lines().map(|line| line.trim_end_matches('/'));
    let last = lines.map(|line| line.rsplit('/').next().unwrap_or_default().to_owned());
    last.filter(|name| name.starts_with(NAME)).collect()
}

/// What a program lists of a stream, whatever it ends with.
fn listed_by(program: &str, args: &[&str], path: &std::path::Path) -> BTreeSet<String> {
    let mut command = tools::command(program).expect("a program");
    let said = tools::run(command.args(args).arg("-tf").arg(path)).expect("it runs");
    names(&said.stdout)
}

/// The names in an image after a stream, and what was told of it.
fn put_in(path: &std::path::Path) -> Result<(BTreeSet<String>, Populated), TreeError> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(0));
    let options = MkfsOptions { size_bytes: Some(8 << 20), ..MkfsOptions::default() };
    format(&*device, &options).expect("formats");
    let inputs = [TarInput::open(path).expect("opens")];
    let source = Source::Tars(&inputs, &PLAIN);
    let done = populate(device.clone(), source, &Rules::default(), &mut |_| {})?;
    let fs = Fs::open_device(device, &MountOptions { read_only: true, ..Default::default() });
    let fs = fs.expect("a sound image");
    let walk = fs.walk("/").expect("a tree");
    let paths = walk.map(|entry| entry.expect("readable").path().display().to_string());
    let seen = paths.collect::<Vec<_>>().join("\n");
    Ok((names(&seen), done))
}

#[test]
fn no_entry_is_lost_without_a_word() {
    let _quiet = quiet();
    let seed = seed_from_env("no_entry_is_lost_without_a_word", 1);
    let scratch = Scratch::in_memory("differential").expect("a directory");
    let path = scratch.join("stream.tar");
    let whole = stream(&members());
    let places = headers(&whole);
    assert_eq!(places.len(), 17, "headers of entries and of their extensions");
    let (mut refused, mut told, mut compared) = (0, 0, 0);
    for round in 0..pick(100, 600, 20_000) {
        let mut bytes = whole.clone();
        let mut rng = Rng::new(mix(seed ^ mix(round)));
        // The stream itself comes first.
        if round > 0 {
            let at = *rng.pick(&places);
            field(&mut bytes[at..at + BLOCK], &mut rng);
        }
        std::fs::write(&path, &bytes).expect("written");
        let what = || {
            let kept = std::env::temp_dir().join("fjord-lost-entry.tar");
            let _ = std::fs::write(&kept, &bytes);
            format!("seed {seed}, round {round}, kept as {}", kept.display())
        };
        let (seen, done) = match put_in(&path) {
            Ok(put) => put,
            Err(error) => {
                assert!(round > 0, "the stream itself: {error}");
                refused += 1;
                continue;
            }
        };
        let gnu = listed_by("tar", &["--quoting-style=literal"], &path);
        let bsd = listed_by("bsdtar", &[], &path);
        let lists = [&done.skipped, &done.unkept, &done.failed];
        for name in gnu.intersection(&bsd) {
            compared += 1;
            if !seen.contains(name) {
                let is_told = lists.iter().any(|list| list.iter().any(|line| line.contains(name)));
                assert!(is_told, "{}: {name} is lost; {lists:?}", what());
                told += 1;
            }
        }
    }
    println!(
        "{compared} names compared, {told} of them listed as left out, {refused} streams refused"
    );
    assert!(compared > 500 && refused > 10, "{compared} {refused}");
}
