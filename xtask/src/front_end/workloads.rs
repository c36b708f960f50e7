//! The workloads: scripts, run in the mounted directory.
//!
//! Invariant: what is left behind for the next one is named; the last one that uses it removes it.

use std::path::Path;

use anyhow::Result;

/// A workload.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) before: &'static str,
    pub(super) timed: &'static str,
    pub(super) after: &'static str,
    count: Count,
}

/// What a figure is for each of.
#[derive(Debug)]
enum Count {
    Files,
    TwiceFiles,
    HalfFiles,
    TreeFiles,
    Fixed(u32),
}

/// How much of each.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) files: u32,
    pub(super) tree_files: u32,
}

impl Sizes {
    pub(super) fn new(files: u32, tree: &Path) -> Result<Sizes> {
        Ok(Sizes { files, tree_files: file_count(tree)? })
    }

    pub(super) fn count(&self, workload: &Workload) -> u32 {
        match workload.count {
            Count::Files => self.files,
            Count::TwiceFiles => self.files * 2,
            Count::HalfFiles => self.files / 2,
            Count::TreeFiles => self.tree_files,
            Count::Fixed(count) => count,
        }
    }
}

/// Regular files below a directory.
fn file_count(dir: &Path) -> Result<u32> {
    let mut count = 0;
    for entry in std::fs::read_dir(dir)? {
        let (entry, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
        count += if kind.is_dir() { file_count(&entry)? } else { u32::from(kind.is_file()) };
    }
    Ok(count)
}

/// Blocks of `small-writes`: 80 MB.
const SMALL_WRITES: u32 = 20_480;
/// Files of `create-unlink`.
const UNLINKED: u32 = 20_000;
/// Values of `fillseq`.
const VALUES: u32 = 500_000;

/// fsyncs of `append-8`, by eight processes.
const APPENDS: u32 = 16_000;
/// Files of `create-8`, by eight processes.
const CREATES: u32 = 8_000;
/// Rounds of `varmail-8`, by eight processes.
const MAILS: u32 = 4_000;

pub(super) const WORKLOADS: [Workload; 17] = [
    Workload {
        name: "touch",
        before: "mkdir many",
        timed: "cd many; seq -f file-%07.0f 1 $FILES | xargs touch",
        after: "",
        count: Count::Files,
    },
    Workload { name: "list", before: "", timed: "ls -l many", after: "", count: Count::Files },
    Workload {
        name: "list-again",
        before: "",
        timed: "ls -l many",
        after: "",
        count: Count::Files,
    },
    Workload { name: "remove", before: "", timed: "rm -rf many", after: "", count: Count::Files },
    Workload {
        name: "list-cold",
        before: "mkdir cold; cd cold; seq -f file-%07.0f 1 $FILES | xargs touch; sync; echo 3 > /proc/sys/vm/drop_caches",
        timed: "ls -l cold",
        after: "rm -rf cold",
        count: Count::Files,
    },
    Workload {
        name: "creates",
        before: "mkdir one",
        timed: r#"cd one; perl -e 'for (1..2 * $ENV{FILES}) { open(my $f, ">", "file-$_") or die }'"#,
        after: "",
        count: Count::TwiceFiles,
    },
    Workload {
        name: "renames",
        before: "",
        timed: r#"cd one; perl -e 'for (1..$ENV{FILES} / 2) { rename("file-$_", "new-$_") or die }'"#,
        after: "rm -rf one",
        count: Count::HalfFiles,
    },
    Workload {
        name: "create-unlink",
        before: "mkdir brief",
        timed: r#"cd brief; perl -e 'for (1..20000) { open(my $f, ">", "f$_") or die; close($f); unlink("f$_") or die }'"#,
        after: "rmdir brief",
        count: Count::Fixed(UNLINKED),
    },
    Workload {
        name: "untar",
        before: "mkdir tree",
        timed: "tar -C tree -xf $TAR",
        after: "",
        count: Count::TreeFiles,
    },
    Workload {
        name: "read-tree",
        // The second time sees the access times that the first one has set.
        before: "for n in 1 2; do find tree -type f -print0 | xargs -0 cat; done",
        timed: "find tree -type f -print0 | xargs -0 cat",
        after: "",
        count: Count::TreeFiles,
    },
    Workload {
        name: "git-status",
        before: "cd tree; if ! test -d .git; then git init -q .; git add .; git status; fi; git status",
        timed: "cd tree; git status",
        after: "",
        count: Count::TreeFiles,
    },
    Workload {
        name: "remove-tree",
        before: "",
        timed: "rm -rf tree",
        after: "",
        count: Count::TreeFiles,
    },
    Workload {
        name: "small-writes",
        before: "",
        timed: "dd if=/dev/zero of=blocks bs=4k count=20480 status=none",
        after: "rm blocks",
        count: Count::Fixed(SMALL_WRITES),
    },
    Workload {
        name: "fillseq",
        before: "",
        timed: "db_bench --benchmarks=fillseq --num=500000 --db=$PWD/db --compression_type=none 2> /dev/null",
        after: "rm -rf db",
        count: Count::Fixed(VALUES),
    },
    Workload {
        name: "append-8",
        before: "mkdir eight",
        timed: r#"cd eight; perl -MIO::Handle -e 'for my $p (1..8) { next if fork; open(my $f, ">", "f$p") or die;
            for (1..2000) { syswrite($f, "x" x 4096) == 4096 && $f->sync or die } exit } 1 while wait > 0'"#,
        after: "rm -rf eight",
        count: Count::Fixed(APPENDS),
    },
    Workload {
        name: "create-8",
        before: "mkdir -p eight/{1..8}",
        timed: r#"cd eight; perl -MIO::Handle -e 'for my $p (1..8) { next if fork; for (1..1000) { open(my $f, ">", "$p/f$_") or die;
            syswrite($f, "x" x 4096) == 4096 && $f->sync or die } exit } 1 while wait > 0'"#,
        after: "rm -rf eight",
        count: Count::Fixed(CREATES),
    },
    // As filebench's: remove; create, append, fsync; read, append, fsync; read.
    Workload {
        name: "varmail-8",
        before: "mkdir -p eight/{1..8}",
        timed: r#"cd eight; perl -MIO::Handle -e 'for my $p (1..8) { next if fork; for (1..500) { my $n = $_ % 50; unlink("$p/f$n");
            for my $how (">", "+<") { open(my $f, $how, "$p/f$n") or die; 1 while sysread($f, my $b, 65536);
            syswrite($f, "x" x 16384) == 16384 && $f->sync or die }
            open(my $f, "<", "$p/f$n") or die; 1 while sysread($f, my $b, 65536) } exit } 1 while wait > 0'"#,
        after: "rm -rf eight",
        count: Count::Fixed(MAILS),
    },
];
