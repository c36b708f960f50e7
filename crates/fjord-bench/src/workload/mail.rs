//! Filebench's varmail: a mail server's files, each change of them made durable.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Sample, Sequence, run_timed};
use crate::target::BenchFs;

/// Threads of Filebench's own varmail.
pub(crate) const VARMAIL_THREAD_COUNT: usize = 16;
/// Mails of each thread; Filebench has 1,000 for all.
const MAIL_COUNT: u64 = 62;
/// The mean size of a mail and of what is added to it, in bytes.
pub(crate) const MAIL_BYTES: u64 = 16 << 10;

/// A turn in a directory of its own.
pub(super) fn turn(
    fs: &dyn BenchFs,
    thread_count: usize,
    turn: Duration,
    round: u32,
) -> io::Result<Sample> {
    let root = format!("mail-{round}");
    fs.make_dir(&root)?;
    let sample = varmail(fs, &root, thread_count, turn, false)?;
    fs.remove_tree(&root)?;
    fs.sync()?;
    Ok(sample)
}

/// Varmail in a directory: delete one; create one, append, fsync; read one, append, fsync; read one. With `quick`
/// there are few mails.
pub(crate) fn varmail(
    fs: &dyn BenchFs,
    dir: &str,
    thread_count: usize,
    turn: Duration,
    quick: bool,
) -> io::Result<Sample> {
    let clock = AtomicU64::new(1);
    let data = vec![0x5a; 2 * MAIL_BYTES as usize];
    let start = |thread: usize| -> io::Result<(usize, Vec<u64>, Sequence)> {
        let count = if quick { 4 } else { MAIL_COUNT };
        for index in 0..count {
            fs.create(&mail(dir, thread, index))?.write_at(0, &data[..MAIL_BYTES as usize])?;
        }
        sync_after_last(fs, thread, thread_count)?;
        let seed = clock.fetch_add(1, Ordering::Relaxed);
        Ok((thread, vec![MAIL_BYTES; count as usize], Sequence::new(seed)))
    };
    run_timed(thread_count, turn, start, |(thread, sizes, sequence), _| {
        let mut pick = |sizes: &Vec<u64>| (sequence.next() % sizes.len() as u64) as usize;
        let (gone, old, read) = (pick(sizes), pick(sizes), pick(sizes));
        let added = 1 + sequence.next() % (2 * MAIL_BYTES - 1);
        fs.remove_file(&mail(dir, *thread, gone as u64))?;
        let mut file = fs.create(&mail(dir, *thread, gone as u64))?;
        file.write_at(0, &data[..added as usize])?;
        file.sync(false)?;
        sizes[gone] = added;
        let mut file = fs.open(&mail(dir, *thread, old as u64))?;
        file.read_at(0, &mut vec![0; sizes[old] as usize])?;
        // A mailbox does not grow forever.
        if sizes[old] < 16 * MAIL_BYTES {
            file.write_at(sizes[old], &data[..added as usize])?;
            sizes[old] += added;
        }
        file.sync(false)?;
        fs.open(&mail(dir, *thread, read as u64))?.read_at(0, &mut vec![0; sizes[read] as usize])
    })
}

/// Makes the files that threads begin with durable, once the last thread has its own.
pub(crate) fn sync_after_last(
    fs: &dyn BenchFs,
    thread: usize,
    thread_count: usize,
) -> io::Result<()> {
    if thread + 1 == thread_count { fs.sync() } else { Ok(()) }
}

fn mail(dir: &str, thread: usize, index: u64) -> String {
    format!("{dir}/{thread}-{index}")
}
