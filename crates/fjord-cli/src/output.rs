//! Text and JSON output.

use std::io::{self, Write};

use fjord::{Attr, FileKind, Timespec};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::failure::{Failure, Result};

/// Prints a value as one JSON document.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::from)?;
    print(text + "\n")
}

/// Writes to standard output; a closed pipe (`| head`) is not a failure.
pub(crate) fn print(text: String) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

/// Prints a message on standard error. A closed pipe is ignored, so that cleanup still runs.
pub(crate) fn complain(message: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "fjord: {}", without_errno(&message.to_string()));
}

/// A message without the numbers that [`io::Error`] shows after its text: `(os error 2)`.
fn without_errno(message: &str) -> String {
    const MARK: &str = " (os error ";
    let mut parts = message.split(MARK);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => out += rest,
            _ => out.extend([MARK, part]),
        }
    }
    out
}

/// A count with its noun: `1 block`, `2 blocks`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Most entries that a list in text output shows.
const LISTED_MAX: usize = 20;

/// Lists on standard error what a copy left out without a loss of content. `hint` follows the number
/// of those that are too many.
pub(crate) fn left_out(list: &[String], hint: &str) {
    for what in list.iter().take(LISTED_MAX) {
        complain(format_args!("left out: {what}"));
    }
    if let Some(more) = list.len().checked_sub(LISTED_MAX).filter(|more| *more > 0) {
        complain(format_args!("left out: {more} more{hint}"));
    }
}

/// Lists on standard error what a copy could not keep. If there is anything, fails with its own
/// exit code.
pub(crate) fn unkept(list: &[String]) -> Result<()> {
    if list.is_empty() {
        return Ok(());
    }
    for what in list.iter().take(LISTED_MAX) {
        complain(format_args!("not kept: {what}"));
    }
    let more = match list.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        more => format!(" ({more} more of them are not listed)"),
    };
    Err(Failure::incomplete(format!("done, but {} things could not be kept{more}", list.len())))
}

/// As [`unkept`], of a copy. If entries have failed, lists them too and fails.
pub(crate) fn copied(failed: &[String], list: &[String]) -> Result<()> {
    let incomplete = unkept(list);
    if failed.is_empty() {
        return incomplete;
    }
    incomplete.unwrap_or_else(complain);
    failed.iter().take(LISTED_MAX).for_each(complain);
    let more = match failed.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        more => format!(" ({more} more of them are not listed)"),
    };
    let what = match failed.len() {
        1 => "1 entry was".to_owned(),
        count => format!("{count} entries were"),
    };
    Err(Failure::new(format!("{what} not copied{more}; the others were")))
}

/// A name as text; bytes that are not UTF-8 are escaped.
pub(crate) fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains(char::is_control) => text.to_owned(),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// `drwxr-xr-x`.
pub(crate) fn mode(attr: &Attr) -> String {
    let mode = attr.mode;
    let kind = match attr.kind() {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
    };
    let mut text = String::from(kind);
    for (shift, special, set, unset) in
        [(6, 0o4000, 's', 'S'), (3, 0o2000, 's', 'S'), (0, 0o1000, 't', 'T')]
    {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, true) => set,
            (false, true) => unset,
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// The file type as a word.
pub(crate) fn kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::CharDevice => "character device",
        FileKind::BlockDevice => "block device",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
    }
}

/// `2026-03-01 12:30:05` in UTC.
pub(crate) fn time(t: Timespec) -> String {
    seconds(t.sec)
}

/// As [`time`], from seconds since 1970.
pub(crate) fn seconds(sec: i64) -> String {
    let days = sec.div_euclid(86_400);
    let rest = sec.rem_euclid(86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// The date of a day counted from 1970-01-01; years are counted from March so that leap days come
/// last.
fn civil_date(days: i64) -> (i64, i64, i64) {
    let from_era = days + 719_468;
    let era = from_era.div_euclid(146_097);
    let day_of_era = from_era.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// A UUID in its usual form.
pub(crate) fn uuid(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A progress bar over bytes; shown on a terminal only.
pub(crate) fn byte_progress(total: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    );
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// As [`byte_progress`], for an unknown total.
pub(crate) fn byte_counter(what: &str) -> ProgressBar {
    let bar = ProgressBar::no_length().with_message(what.to_owned());
    match ProgressStyle::with_template("{msg} {bytes} {bytes_per_sec}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (sec, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (-1, "1969-12-31 23:59:59"),
            (4_107_542_399, "2100-02-28 23:59:59"),
        ] {
            assert_eq!(seconds(sec), text);
        }
    }

    #[test]
    fn numbers_of_errors_are_not_shown() {
        let error = io::Error::from_raw_os_error(2);
        let shown = without_errno(&format!("/a: {error}; make it (see b)"));
        assert_eq!(shown, "/a: No such file or directory; make it (see b)");
        assert_eq!(without_errno("x (os error"), "x (os error");
        assert_eq!(without_errno("x (os error a) (os error 3)"), "x (os error a)");
    }

    #[test]
    fn names_are_shown_without_control_characters() {
        assert_eq!(name("grün".as_bytes()), "grün");
        assert_eq!(name(b"a\nb"), "a\\nb");
        assert_eq!(name(b"\xff"), "\\xff");
    }
}
