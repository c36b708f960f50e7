//! Options of Linux's ext4 that change nothing here: an fstab file that has them mounts all the same.
//!
//! Invariant: none is taken that promises what fjord does not keep; those are refused, with the reason. The
//! exception is `journal_checksum`, which many fstab files have: `-v` says where it is not kept.
//! Source of the list: `Documentation/admin-guide/ext4.rst` and ext4(5).

/// What becomes of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Taken; `-v` says why it changes nothing.
    Nothing(&'static str),
    /// It would promise this, which fjord does not keep.
    Refused(&'static str),
}

use Verdict::{Nothing, Refused};

const ALLOCATOR: &str = "fjord's allocator decides for itself";
const ALWAYS: &str = "fjord always does";
const NO_QUOTA: &str = "fjord keeps no quotas";
const NO_SUCH_PATH: &str = "fjord has no such choice";
const AT_CLOSE: &str = "fjord writes replaced content at close in any case";
const NO_CHECK: &str = "e2fsck checks an image";
const NO_MANDATORY_LOCKS: &str = "Linux has no mandatory locks any more";
const SHARED_COMMITS: &str = "commits that wait for another one share it";
const WHEN_USED: &str = "fjord initializes inode tables when they are used";

const DAX: Verdict = Refused("the mapping of the device into programs");
const EXTERNAL_JOURNAL: Verdict = Refused("a journal on another device");
const QUOTAS: Verdict = Refused("quotas");
const SECURITY_LABELS: Verdict = Refused("labels of SELinux for files that have none");

/// Options without a value.
const FLAGS: &[(&str, Verdict)] = &[
    ("auto_da_alloc", Nothing(ALWAYS)),
    ("noauto_da_alloc", Nothing(AT_CLOSE)),
    ("abort", Refused("a file system that has failed; -o ro mounts it read-only")),
    ("bh", Nothing(NO_SUCH_PATH)),
    ("nobh", Nothing(NO_SUCH_PATH)),
    ("block_validity", Nothing(ALWAYS)),
    ("noblock_validity", Nothing("fjord checks block numbers in any case")),
    ("debug", Nothing("fjord mount -v tells what it does")),
    ("nodebug", Nothing(NO_SUCH_PATH)),
    ("dioread_lock", Nothing(NO_SUCH_PATH)),
    ("dioread_nolock", Nothing(NO_SUCH_PATH)),
    ("nodioread_nolock", Nothing(NO_SUCH_PATH)),
    ("fc_debug_force", Nothing("--fsync fast-commit is the policy of fast commits")),
    ("i_version", Nothing(ALWAYS)),
    ("init_itable", Nothing(WHEN_USED)),
    ("noinit_itable", Nothing(WHEN_USED)),
    ("inlinecrypt", Nothing("fjord mounts no encrypted images")),
    (
        "journal_checksum",
        Nothing("an image with metadata_csum has it in any case, another one never"),
    ),
    ("nojournal_checksum", Nothing("an image with metadata_csum has checksums in any case")),
    ("mand", Nothing(NO_MANDATORY_LOCKS)),
    ("nomand", Nothing(NO_MANDATORY_LOCKS)),
    ("mblk_io_submit", Nothing(NO_SUCH_PATH)),
    ("nomblk_io_submit", Nothing(NO_SUCH_PATH)),
    ("nocheck", Nothing(NO_CHECK)),
    ("no_mbcache", Nothing(NO_SUCH_PATH)),
    ("nombcache", Nothing(NO_SUCH_PATH)),
    ("no_prefetch_block_bitmaps", Nothing(ALLOCATOR)),
    ("prefetch_block_bitmaps", Nothing(ALLOCATOR)),
    ("noquota", Nothing(NO_QUOTA)),
    ("noreservation", Nothing(ALLOCATOR)),
    ("reservation", Nothing(ALLOCATOR)),
    ("nouser_xattr", Nothing("Linux does not know it any more")),
    ("nowarn_on_error", Nothing(NO_SUCH_PATH)),
    ("warn_on_error", Nothing(NO_SUCH_PATH)),
    ("oldalloc", Nothing(ALLOCATOR)),
    ("orlov", Nothing(ALLOCATOR)),
    ("dax", DAX),
    ("grpquota", QUOTAS),
    ("journal_async_commit", Refused("commits of that form; it is no faster than what fjord does")),
    ("nouid32", Refused("owners of 16 bits on disk")),
    ("prjquota", QUOTAS),
    ("quota", QUOTAS),
    ("usrquota", QUOTAS),
];

/// Which numbers an option takes, in words and as a test.
type Range = (&'static str, fn(u32) -> bool);

const ANY: Range = ("a number", |_| true);
const FLAG: Range = ("0 or 1", |number| number <= 1);
const PRIORITY: Range = ("a number from 0 to 7", |number| number <= 7);
const READAHEAD: Range = ("0 or a power of 2, up to 1073741824", |number| {
    number == 0 || number.is_power_of_two() && number <= 1 << 30
});

/// Options whose value is a number.
const NUMBERS: &[(&str, Range, Verdict)] = &[
    ("auto_da_alloc", ANY, Nothing(AT_CLOSE)),
    ("fc_debug_max_replay", ANY, Nothing("it limits the replay in tests of Linux")),
    ("init_itable", ANY, Nothing(WHEN_USED)),
    ("inode_readahead_blks", READAHEAD, Nothing(ALLOCATOR)),
    ("journal_ioprio", PRIORITY, Nothing("the device orders requests by their class")),
    ("max_batch_time", ANY, Nothing(SHARED_COMMITS)),
    ("min_batch_time", ANY, Nothing(SHARED_COMMITS)),
    ("mb_optimize_scan", FLAG, Nothing(ALLOCATOR)),
    ("stripe", ANY, Nothing(ALLOCATOR)),
];

/// Options with a value, whatever it is.
const VALUES: &[(&str, Verdict)] = &[
    ("check", Nothing(NO_CHECK)),
    ("context", SECURITY_LABELS),
    ("defcontext", SECURITY_LABELS),
    ("fscontext", SECURITY_LABELS),
    ("rootcontext", SECURITY_LABELS),
    ("grpjquota", QUOTAS),
    ("journal_dev", EXTERNAL_JOURNAL),
    ("journal_path", EXTERNAL_JOURNAL),
    ("jqfmt", QUOTAS),
    ("max_dir_size_kb", Refused("a limit of the size of directories")),
    ("sb", Refused("another superblock than the first; e2fsck -b repairs the image with it")),
    ("usrjquota", QUOTAS),
];

/// Options of which only some values change nothing.
const CHOICES: &[(&str, &str, Verdict)] = &[
    ("data_err", "abort", Nothing(ALWAYS)),
    ("data_err", "ignore", Nothing("fjord turns read-only when a write fails in any case")),
    ("dax", "never", Nothing(ALWAYS)),
    ("dax", "inode", Nothing("no file of an image has the flag in effect")),
    ("dax", "always", DAX),
    ("grpjquota", "", Nothing(NO_QUOTA)),
    ("max_dir_size_kb", "0", Nothing("there is no limit")),
    ("usrjquota", "", Nothing(NO_QUOTA)),
];

/// What Linux's option means here; `None` for one that is not in the list.
///
/// # Errors
/// What is expected in place of the value, or of none.
pub(crate) fn verdict(name: &str, value: Option<&str>) -> Result<Option<Verdict>, String> {
    let named = |list: &[(&str, Verdict)]| {
        list.iter().find(|(option, _)| *option == name).map(|(_, verdict)| *verdict)
    };
    let flag = named(FLAGS).filter(|_| value.is_none());
    if flag.is_some() {
        return Ok(flag);
    }
    if let Some((_, (expected, takes), verdict)) = NUMBERS.iter().find(|known| known.0 == name) {
        let number = value.and_then(|value| value.parse().ok());
        return match number.is_some_and(takes) {
            true => Ok(Some(*verdict)),
            false => Err(format!("expected {expected}")),
        };
    }
    let choices = || CHOICES.iter().filter(|(option, ..)| *option == name);
    let choice = choices().find(|(_, of, _)| Some(*of) == value).map(|(.., verdict)| *verdict);
    let found = choice.or_else(|| named(VALUES).filter(|_| value.is_some()));
    match found {
        None if choices().next().is_some() => {
            let known: Vec<&str> = choices().map(|(_, of, _)| *of).collect();
            Err(format!("expected one of: {}", known.join(", ")))
        }
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_where_they_make_the_difference() {
        assert_eq!(verdict("dax", Some("never")), Ok(Some(Nothing(ALWAYS))));
        assert!(matches!(verdict("dax", Some("always")), Ok(Some(Refused(_)))));
        assert!(matches!(verdict("dax", None), Ok(Some(Refused(_)))));
        assert_eq!(
            verdict("dax", Some("maybe")),
            Err("expected one of: never, inode, always".into())
        );
        assert_eq!(verdict("max_dir_size_kb", Some("0")), Ok(Some(Nothing("there is no limit"))));
        assert!(matches!(verdict("max_dir_size_kb", Some("8")), Ok(Some(Refused(_)))));
        assert_eq!(verdict("usrjquota", Some("")), Ok(Some(Nothing(NO_QUOTA))));
        assert_eq!(verdict("frob", Some("1")), Ok(None));
        for (name, value, is_taken) in [
            ("journal_ioprio", "7", true),
            ("journal_ioprio", "8", false),
            ("inode_readahead_blks", "32", true),
            ("inode_readahead_blks", "33", false),
            ("inode_readahead_blks", "2147483648", false),
            ("mb_optimize_scan", "2", false),
        ] {
            assert_eq!(verdict(name, Some(value)).is_ok(), is_taken, "{name}={value}");
        }
        assert!(matches!(verdict("stripe", Some("16")), Ok(Some(Nothing(_)))));
        assert_eq!(verdict("stripe", Some("abc")), Err("expected a number".into()));
        assert_eq!(verdict("stripe", None), Err("expected a number".into()));
    }
}
