//! The output of a program, of which the first and the last part are kept.
//!
//! Invariant: whatever a program prints, no more than a bounded part of it is in memory.

use std::{
    collections::VecDeque,
    io::{self, BufRead, Read},
};

use super::totals::Counts;

/// What is kept from the beginning, and from the end, in bytes.
const PART_BYTES: usize = 4 << 20;
/// A longer line is read in parts.
const LINE_BYTES: u64 = 64 << 10;

/// Output without its empty lines.
#[derive(Debug, Default)]
pub(super) struct Kept {
    first: Vec<u8>,
    last: VecDeque<u8>,
    left_out_bytes: u64,
}

impl Kept {
    /// Reads all of `output`; adds the counts in its lines to `counts`.
    pub(super) fn read(&mut self, mut output: impl BufRead, counts: &mut Counts) -> io::Result<()> {
        let (mut part, mut begins_line) = (Vec::new(), true);
        while (&mut output).take(LINE_BYTES).read_until(b'\n', &mut part)? > 0 {
            let text = String::from_utf8_lossy(&part);
            if begins_line {
                counts.add(text.trim_end());
            }
            if !begins_line || !text.trim().is_empty() {
                self.add(&part);
            }
            begins_line = part.ends_with(b"\n");
            part.clear();
        }
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) {
        let (first, rest) = bytes.split_at(bytes.len().min(PART_BYTES - self.first.len()));
        self.first.extend(first);
        self.last.extend(rest);
        let left_out = self.last.len().saturating_sub(PART_BYTES);
        self.last.drain(..left_out);
        self.left_out_bytes += left_out as u64;
    }

    /// The output, with a line for what was left out.
    pub(super) fn text(&self) -> String {
        let mut text = String::from_utf8_lossy(&self.first).into_owned();
        if self.left_out_bytes > 0 {
            text += &format!("\n[{} bytes of output are left out here]\n", self.left_out_bytes);
        }
        let last: Vec<u8> = self.last.iter().copied().collect();
        text + &String::from_utf8_lossy(&last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(output: impl Read) -> (String, Counts) {
        let (mut kept, mut counts) = (Kept::default(), Counts::default());
        kept.read(io::BufReader::new(output), &mut counts).unwrap();
        assert!(kept.first.len() <= PART_BYTES && kept.last.len() <= PART_BYTES);
        (kept.text(), counts)
    }

    #[test]
    fn short_output_is_kept_whole_but_for_empty_lines() {
        let (text, counts) = kept(&b"a\n\n  \nb\xff\ntest result: ok. 3 passed; 1 failed"[..]);
        assert_eq!(text, "a\nb\u{fffd}\ntest result: ok. 3 passed; 1 failed");
        assert_eq!(counts, Counts { passed: 3, failed: 1, ignored: 0 });
    }

    #[test]
    fn the_middle_of_long_output_is_left_out_and_counted() {
        let middle = io::repeat(b'x').take(64 << 20);
        let end = b"\ntest result: ok. 3 passed; 1 failed\n";
        let (text, counts) = kept((&b"begin\n"[..]).chain(middle).chain(&end[..]));
        let left_out = (64 << 20) + 6 + end.len() - 2 * PART_BYTES;
        assert!(
            text.starts_with("begin\nx")
                && text.ends_with("x\ntest result: ok. 3 passed; 1 failed\n")
        );
        assert!(text.contains(&format!("x\n[{left_out} bytes of output are left out here]\nx")));
        assert_eq!(counts, Counts { passed: 3, failed: 1, ignored: 0 });
    }

    #[test]
    fn a_closing_line_is_one_from_its_beginning() {
        let long = io::repeat(b'x').take(LINE_BYTES);
        let (_, counts) = kept(long.chain(&b"test result: ok. 3 passed\n"[..]));
        assert_eq!(counts, Counts::default());
    }
}
