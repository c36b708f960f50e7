//! The modelled device below a target: its trace and contents, the same way for a device in this
//! process and for one that another process serves as a file.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use fjord_block::sim::SimDevice;
use fjord_block::{AlignedBuf, Class, Device};

use crate::error::{BenchError, Result};

/// A modelled device in use.
#[derive(Clone)]
pub(crate) enum Model {
    /// In this process.
    Native(Arc<SimDevice>),
    /// Served by the fjord program in this directory.
    Served(PathBuf),
}

/// Events of a model, in nanoseconds of its clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    /// When each command was transferred.
    pub(crate) transfers_ns: HashMap<u64, u64>,
    /// Units that were programmed: when, by which command, at which byte offset.
    pub(crate) persists: Vec<(u64, u64, u64)>,
    /// Changes of the queue depth: when, and how many commands from then on.
    pub(crate) depths: Vec<(u64, u32)>,
}

impl Model {
    /// Starts to record.
    pub(crate) fn start_trace(&self) -> Result<()> {
        match self {
            Model::Native(device) => device.start_trace(),
            Model::Served(dir) => {
                let control = dir.join("control");
                let failed = BenchError::io(format!("write {}", control.display()));
                fs::write(&control, "trace").map_err(failed)?;
                // Discards the events of an earlier recording.
                self.take_trace()?;
            }
        }
        Ok(())
    }

    /// The events since [`Model::start_trace`]; a served model goes on recording.
    pub(crate) fn take_trace(&self) -> Result<Trace> {
        match self {
            Model::Native(device) => {
                let trace = device.take_trace();
                Ok(Trace {
                    transfers_ns: trace.transfers.iter().map(|t| (t.id.0, t.at_ns)).collect(),
                    persists: trace.persists.iter().map(|p| (p.at_ns, p.id.0, p.offset)).collect(),
                    depths: trace.queue_depths,
                })
            }
            Model::Served(dir) => {
                let path = dir.join("trace");
                let failed = BenchError::io(format!("read {}", path.display()));
                Ok(Trace::from_text(&fs::read_to_string(&path).map_err(failed)?))
            }
        }
    }

    /// Reads a block of 4096 bytes.
    pub(crate) fn read_block(&self, offset: u64) -> Result<Vec<u8>> {
        match self {
            Model::Native(device) => {
                let bufs = vec![AlignedBuf::uninit(4096)];
                let read = device.submit_read(offset, bufs, Class::Sync).wait();
                let bufs = read.map_err(|error| BenchError::Io {
                    what: "read the modelled device".into(),
                    source: error.into(),
                })?;
                Ok(bufs.iter().flat_map(|buf| buf.iter().copied()).collect())
            }
            Model::Served(dir) => {
                let path = dir.join("disk");
                let failed = || BenchError::io(format!("read {}", path.display()));
                let mut block = vec![0; 4096];
                let file = fs::File::open(&path).map_err(failed())?;
                file.read_exact_at(&mut block, offset).map_err(failed())?;
                Ok(block)
            }
        }
    }
}

impl Trace {
    /// Reads the lines of the file `trace` of a served model.
    fn from_text(text: &str) -> Trace {
        let mut trace = Trace::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let kind = words.next().unwrap_or_default();
            let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
            match (kind, &*numbers) {
                ("transfer", &[at_ns, command, ..]) => {
                    trace.transfers_ns.insert(command, at_ns);
                }
                ("persist", &[at_ns, command, _, offset]) => {
                    trace.persists.push((at_ns, command, offset));
                }
                ("queue", &[at_ns, depth]) => {
                    trace.depths.push((at_ns, u32::try_from(depth).unwrap_or(u32::MAX)));
                }
                _ => {}
            }
        }
        trace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_trace_are_read() {
        let text = "transfer 5 1 0\nqueue 6 3\npersist 9 1 0 8192\nnoise\n";
        let trace = Trace::from_text(text);
        assert_eq!(trace.transfers_ns[&1], 5);
        assert_eq!(trace.persists, [(9, 1, 8192)]);
        assert_eq!(trace.depths, [(6, 3)]);
    }
}
