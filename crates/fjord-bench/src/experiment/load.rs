//! Load of a measurement: a background stream, and the probe whose fsyncs are timed.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::target::BenchFs;
use crate::workload::new_histogram;

/// How often a stream looks at the clock.
const TICK: Duration = Duration::from_millis(1);

/// A file written in sequence, in the background.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) path: &'static str,
    pub(super) unit_bytes: usize,
    pub(super) bytes_per_s: u64,
    /// Where it starts over, so that the image does not run full.
    pub(super) file_bytes: u64,
    /// Starts over with a new file, not on the blocks of the old one.
    pub(super) anew: bool,
}

/// What a stream came to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Streamed {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

impl Stream {
    /// Writes until `stop` is set. Behind its rate it goes as fast as it may, as fio does.
    fn run(&self, fs: &dyn BenchFs, stop: &AtomicBool) -> io::Result<Streamed> {
        let mut file = fs.create(self.path)?;
        // Not all alike, so that nothing below compresses it.
        let mut unit: Vec<u8> = (0..self.unit_bytes).map(|i| (i * 31 % 251) as u8).collect();
        let mut bytes = 0;
        let began = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let due = (began.elapsed().as_secs_f64() * self.bytes_per_s as f64) as u64;
            if bytes >= due {
                std::thread::sleep(TICK);
                continue;
            }
            unit[..8].copy_from_slice(&bytes.to_le_bytes());
            let offset = bytes % self.file_bytes;
            if self.anew && offset == 0 && bytes > 0 {
                file = fs.create(self.path)?;
            }
            file.write_at(offset, &unit)?;
            bytes += self.unit_bytes as u64;
        }
        Ok(Streamed { bytes, seconds: began.elapsed().as_secs_f64() })
    }
}

/// A small file written and fsynced again and again.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    pub(super) path: &'static str,
    pub(super) unit_bytes: usize,
    /// Between write and fsync.
    pub(super) pause: Duration,
    /// From write to write; zero: one after the other.
    pub(super) period: Duration,
    /// The write counts too, not the fsync alone.
    pub(super) counts_write: bool,
}

/// What a probe saw.
pub(super) struct Probed {
    /// In nanoseconds.
    pub(super) latency: Histogram<u64>,
    /// Seconds since the start, milliseconds.
    pub(super) series: Vec<(f64, f64)>,
}

impl Probe {
    /// Appends and fsyncs for `turn`; the last one may take as long as it does.
    pub(super) fn run(&self, fs: &dyn BenchFs, turn: Duration) -> io::Result<Probed> {
        let mut file = fs.create(self.path)?;
        let unit = vec![0x5a; self.unit_bytes];
        file.write_at(0, &unit)?;
        file.sync(false)?;
        let mut probed = Probed { latency: new_histogram(), series: Vec::new() };
        let mut offset = self.unit_bytes as u64;
        let began = Instant::now();
        let mut due = Duration::ZERO;
        while began.elapsed() < turn {
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            let before_write = began.elapsed();
            file.write_at(offset, &unit)?;
            let written = began.elapsed();
            std::thread::sleep(self.pause);
            let before_sync = began.elapsed();
            file.sync(false)?;
            let mut took = began.elapsed() - before_sync;
            if self.counts_write {
                took += written - before_write;
            }
            probed.latency.saturating_record(took.as_nanos() as u64);
            probed.series.push((before_write.as_secs_f64(), took.as_secs_f64() * 1e3));
            offset += self.unit_bytes as u64;
            // A call that took longer than a period does not make the next ones hurry.
            due = (due + self.period).max(began.elapsed().saturating_sub(self.period));
        }
        Ok(probed)
    }
}

/// Runs the probe during the stream, which begins `warm` earlier and ends when the turn is over,
/// though the probe's last call may not have returned.
pub(super) fn beside(
    fs: &dyn BenchFs,
    probe: &Probe,
    stream: &Stream,
    warm: Duration,
    turn: Duration,
) -> io::Result<(Probed, Streamed)> {
    let stop = AtomicBool::new(false);
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let result = stream.run(fs, &stop);
            failed.store(result.is_err(), Ordering::Relaxed);
            result
        });
        let timer = scope.spawn(|| sleep_unless(warm + turn, &[&stop, &failed], &stop));
        sleep_unless(warm, &[&failed], &AtomicBool::new(false));
        let probed = probe.run(fs, turn);
        stop.store(true, Ordering::Relaxed);
        let streamed = writer.join().unwrap_or_else(|_| Err(io::Error::other("panic")));
        // It only sleeps.
        let _ = timer.join();
        Ok((probed?, streamed?))
    })
}

/// Sleeps until the time is over or one of `early` is set, then sets `done`.
fn sleep_unless(time: Duration, early: &[&AtomicBool], done: &AtomicBool) {
    let began = Instant::now();
    while began.elapsed() < time && !early.iter().any(|flag| flag.load(Ordering::Relaxed)) {
        std::thread::sleep(TICK);
    }
    done.store(true, Ordering::Relaxed);
}

/// Writers that fsync large files now and then, as other users of a machine do.
#[derive(Clone, Debug)]
pub(super) struct Neighbours {
    pub(super) count: usize,
    pub(super) file_bytes: u64,
    /// Every so manieth file is fsynced.
    pub(super) fsync_every: u64,
}

/// Files that a neighbour keeps, so that the image does not run full.
const NEIGHBOUR_FILE_COUNT: u64 = 8;
const NEIGHBOUR_CHUNK_BYTES: usize = 128 << 10;

impl Neighbours {
    /// Runs `probe` beside the writers, which begin `warm` earlier. Gives the bytes written too.
    pub(super) fn beside(
        &self,
        fs: &dyn BenchFs,
        probe: &Probe,
        warm: Duration,
        turn: Duration,
    ) -> io::Result<(Probed, Streamed)> {
        let stop = AtomicBool::new(false);
        let bytes = AtomicU64::new(0);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..self.count)
                .map(|index| {
                    let (stop, bytes) = (&stop, &bytes);
                    scope.spawn(move || {
                        let result = self.write_files(fs, index, stop, bytes);
                        // A writer that failed ends all.
                        if result.is_err() {
                            stop.store(true, Ordering::Relaxed);
                        }
                        result
                    })
                })
                .collect();
            sleep_unless(warm, &[&stop], &AtomicBool::new(false));
            let probed = probe.run(fs, turn);
            stop.store(true, Ordering::Relaxed);
            let seconds = began.elapsed().as_secs_f64();
            for writer in writers {
                writer.join().unwrap_or_else(|_| Err(io::Error::other("panic")))?;
            }
            Ok((probed?, Streamed { bytes: bytes.load(Ordering::Relaxed), seconds }))
        })
    }

    fn write_files(
        &self,
        fs: &dyn BenchFs,
        index: usize,
        stop: &AtomicBool,
        bytes: &AtomicU64,
    ) -> io::Result<()> {
        let chunk: Vec<u8> = (0..NEIGHBOUR_CHUNK_BYTES).map(|i| (i * 37 % 251) as u8).collect();
        for number in 0.. {
            let mut file =
                fs.create(&format!("neighbour-{index}-{}", number % NEIGHBOUR_FILE_COUNT))?;
            for offset in (0..self.file_bytes).step_by(chunk.len()) {
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                file.write_at(offset, &chunk)?;
                bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            }
            if (number + 1) % self.fsync_every == 0 {
                file.sync(false)?;
            }
        }
        Ok(())
    }
}
