//! How many requests of each kind the kernel has sent.

use std::array;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::Opcode;

/// Opcodes below this number are counted.
const OPCODE_COUNT: usize = 64;

/// Counts by opcode.
pub(super) struct RequestCounts([AtomicU64; OPCODE_COUNT]);

impl Default for RequestCounts {
    fn default() -> RequestCounts {
        RequestCounts(array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl RequestCounts {
    /// Counts a request.
    pub(super) fn count(&self, opcode: u32) {
        if let Some(count) = self.0.get(opcode as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The kinds that there were, by the kernel's name in lower case.
    pub(super) fn report(&self) -> BTreeMap<String, u64> {
        let counts = (0..).zip(&self.0).filter_map(|(raw, count)| {
            let name = format!("{:?}", Opcode::from_raw(raw)?).to_lowercase();
            Some((name, count.load(Ordering::Relaxed))).filter(|(_, count)| *count > 0)
        });
        counts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_kinds_are_counted() {
        let requests = RequestCounts::default();
        for opcode in [Opcode::BatchForget as u32, 16, 16, 63, 1000] {
            requests.count(opcode);
        }
        let wanted = [("batchforget".to_owned(), 1), ("write".to_owned(), 2)];
        assert_eq!(requests.report(), BTreeMap::from(wanted));
    }
}
