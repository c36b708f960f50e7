//! The `-o` list as a whole: FUSE's part, the engine's part, and errors for the rest.

use std::time::Duration;

use fjord::awake::LowLatency;
use fjord::{
    CommitPipeline, DataMode, FsyncPolicyKind, JournalIo, JournalLists, MountOptions, Scheduler,
};
use fjord_fuse::mount::{FuseOptions, Unclaimed};
use rustix::mount::MountFlags;

use crate::{
    ext4_options::{self, Verdict},
    failure::{Failure, Result},
    size,
};

/// The mount options of FUSE and of the engine.
#[derive(Debug, Default)]
pub(crate) struct Options {
    pub(crate) fuse: FuseOptions,
    pub(crate) engine: MountOptions,
    /// Where the image begins in its file, and its size, as for a loop device.
    pub(crate) offset_bytes: Option<u64>,
    pub(crate) size_bytes: Option<u64>,
}

/// Parses all `-o` lists, later ones last.
pub(crate) fn parse(lists: &[String]) -> Result<Options> {
    let mut options = Options::default();
    for list in lists {
        for unclaimed in options.fuse.parse(list)? {
            // A remount changes no engine options; see `remount`.
            if !options.fuse.remount && !set_place(&mut options, &unclaimed)? {
                set_engine_option(&mut options.engine, &unclaimed)?;
            }
        }
    }
    Ok(options)
}

/// Copies the options that both halves share. Call after command-line flags are applied.
pub(crate) fn settle(options: &mut Options) {
    options.engine.read_only = options.fuse.read_only();
    // As Linux: a read-only mount replays the journal first, unless noload is given.
    options.engine.recover_before_read_only = true;
    options.engine.atime = options.fuse.atime;
    options.engine.diratime = !options.fuse.flags.contains(MountFlags::NODIRATIME);
    options.engine.acl = options.fuse.acl;
    // The session counts all requests; fsyncs are among them.
    options.engine.low_latency = LowLatency::Never;
}

/// The fsync policy of this name.
pub(crate) fn fsync_policy(name: &str) -> Result<FsyncPolicyKind, String> {
    FsyncPolicyKind::from_name(name).ok_or_else(|| {
        let known: Vec<&str> = FsyncPolicyKind::ALL.iter().map(|policy| policy.name()).collect();
        format!("unknown fsync policy {name:?}; known: auto, {}", known.join(", "))
    })
}

/// Memory for caches: a size that the engine can work with.
pub(crate) fn cache_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    if bytes < MountOptions::CACHE_SIZE_MIN_BYTES {
        let least = MountOptions::CACHE_SIZE_MIN_BYTES >> 20;
        return Err(format!("{text:?} is too small for the caches; give at least {least}M"));
    }
    Ok(bytes)
}

/// Takes the options of mount(8) for a part of a file.
fn set_place(options: &mut Options, option: &Unclaimed) -> Result<bool> {
    let place = match option.name.as_str() {
        "offset" => &mut options.offset_bytes,
        "sizelimit" => &mut options.size_bytes,
        _ => return Ok(false),
    };
    let value = option.value.as_deref().unwrap_or_default();
    // mount(8) takes a size limit of 0 for none.
    *place =
        match value {
            "0" => None,
            _ => Some(size::parse(value).map_err(|e| {
                Failure::usage(format!("mount option {}={value}: {e}", option.name))
            })?),
        };
    Ok(true)
}

fn set_engine_option(engine: &mut MountOptions, option: &Unclaimed) -> Result<()> {
    let name = option.name.as_str();
    let known = match &option.value {
        None => set_engine_flag(engine, name),
        Some(value) => set_engine_value(engine, name, value)
            .map_err(|e| Failure::usage(format!("mount option {name}={value}: {e}")))?,
    };
    if known {
        return Ok(());
    }
    let shown = match &option.value {
        Some(value) => format!("{name}={value}"),
        None => name.to_owned(),
    };
    let verdict = ext4_options::verdict(name, option.value.as_deref());
    match verdict.map_err(|e| Failure::usage(format!("mount option {shown}: {e}")))? {
        Some(Verdict::Nothing(why)) => {
            tracing::info!("mount option {shown} changes nothing: {why}");
            return Ok(());
        }
        Some(Verdict::Refused(what)) => {
            return Err(Failure::usage(format!(
                "mount option {shown} promises {what}: not supported; leave it out"
            )));
        }
        None => {}
    }
    Err(Failure::usage(format!(
        "unknown mount option {shown:?}; `fjord mount --help` lists all options"
    )))
}

fn set_engine_flag(engine: &mut MountOptions, name: &str) -> bool {
    match name {
        "noload" | "norecovery" => engine.no_load_journal = true,
        "discard" => engine.discard = true,
        "nodiscard" => engine.discard = false,
        "barrier" => engine.barrier = true,
        "nobarrier" => engine.barrier = false,
        "steal" => engine.steal = true,
        "order_only" => engine.order_only = true,
        "noorder_only" => engine.order_only = false,
        "delalloc" => engine.delalloc = true,
        "nodelalloc" => engine.delalloc = false,
        "minixdf" => engine.minix_df = true,
        "bsddf" => engine.minix_df = false,
        "grpid" | "bsdgroups" => engine.grpid = true,
        "nogrpid" | "sysvgroups" => engine.grpid = false,
        _ => return false,
    }
    true
}

fn set_engine_value(engine: &mut MountOptions, name: &str, value: &str) -> Result<bool, String> {
    let number = || value.parse::<u32>().map_err(|_| String::from("expected a number"));
    let seconds = || match number()? {
        // As ext4: zero asks for the default.
        0 => Ok::<_, String>(Duration::from_secs(5)),
        n => Ok(Duration::from_secs(u64::from(n))),
    };
    match name {
        "data" => {
            engine.data = match value {
                "ordered" => DataMode::Ordered,
                "writeback" => DataMode::Writeback,
                "journal" => DataMode::Journal,
                _ => return Err("expected ordered, writeback or journal".into()),
            }
        }
        "barrier" => engine.barrier = number()? != 0,
        "commit" => engine.commit_interval = seconds()?,
        "writeback" => engine.writeback_interval = seconds()?,
        "cache_size" => engine.cache_size_bytes = cache_size(value)?,
        "fsync" => engine.fsync = fsync_policy(value)?,
        "inline_data_max" => engine.inline_data_max_bytes = size::parse(value)?,
        "scheduler" => {
            engine.scheduler = Scheduler::by_name(value).ok_or("expected epoch, direct or auto")?;
        }
        "pipeline" => {
            engine.pipeline =
                CommitPipeline::by_name(value).ok_or("expected serial, dual or auto")?;
        }
        "journal_lists" => {
            engine.journal_lists =
                JournalLists::by_name(value).ok_or("expected locked or lockfree")?;
        }
        "journal_io" => {
            engine.journal_io =
                JournalIo::by_name(value).ok_or("expected dedicated or cooperative")?;
        }
        "resuid" => engine.resuid = Some(number()?),
        "resgid" => engine.resgid = Some(number()?),
        "errors" if value == "remount-ro" => {}
        "errors" => {
            return Err("only errors=remount-ro is supported: fjord always turns read-only \
                                on errors"
                .into());
        }
        _ => return Ok(false),
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(list: &str) -> Result<Options> {
        let mut options = parse(&[list.to_owned()])?;
        settle(&mut options);
        Ok(options)
    }

    #[test]
    fn both_halves_get_their_options() {
        let o = parsed(
            "ro,noatime,noacl,data=writeback,commit=30,cache_size=64M,inline_data_max=8K,nobarrier",
        )
        .unwrap();
        assert!(
            o.engine.read_only
                && o.engine.recover_before_read_only
                && !o.engine.acl
                && !o.engine.barrier
        );
        assert_eq!(o.engine.atime, fjord::AtimeMode::Never);
        assert_eq!(o.engine.data, DataMode::Writeback);
        assert_eq!(o.engine.commit_interval, Duration::from_secs(30));
        assert_eq!(o.engine.cache_size_bytes, 64 << 20);
        assert_eq!(o.engine.inline_data_max_bytes, 8 << 10);
    }

    /// As fstab files of ext4 have them.
    #[test]
    fn options_of_ext4_that_change_nothing_are_taken() {
        let list = "minixdf,auto_da_alloc,noauto_da_alloc,journal_checksum,init_itable=10,noinit_itable,\
                    i_version,stripe=256,delalloc,journal_ioprio=3,min_batch_time=0,max_batch_time=15000,\
                    data_err=abort,block_validity,inode_readahead_blks=32,dioread_nolock,nobh,orlov,nomand,nostrictatime,symfollow,\
                    check=none";
        assert!(parsed(list).unwrap().engine.minix_df);
        assert!(!parsed(&format!("{list},bsddf")).unwrap().engine.minix_df);
    }

    #[test]
    fn unknown_options_and_bad_values_are_named() {
        for (list, word) in [
            ("rw,frobnicate", "frobnicate"),
            ("frob=1", "frob=1"),
            ("data=fast", "data=fast"),
            ("fsync=magic", "magic"),
            ("errors=panic", "remount-ro"),
            ("usrquota", "quotas"),
            ("nouid32", "16 bits"),
            ("journal_path=/dev/sdb", "another device"),
            ("cache_size=1", "at least 8M"),
            ("blksize=7", "blksize=7"),
            ("stripe=abc", "stripe=abc: expected a number"),
            ("init_itable=", "init_itable=: expected a number"),
            ("abort", "-o ro"),
            ("context=system_u:object_r:tmp_t:s0", "SELinux"),
        ] {
            let e = parsed(list).unwrap_err();
            assert!(e.message.contains(word), "{e}");
            assert_eq!(e.code, crate::failure::EXIT_USAGE);
        }
    }
}
