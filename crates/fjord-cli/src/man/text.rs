//! Help texts as parts of manual pages.
//!
//! Owns the form that the help texts of commands have, and its way to roff:
//!
//! - paragraphs, parted by empty lines; they go where they stand;
//! - `Heading:` with indented lines below becomes a section. Lines with two blanks between a term and
//!   its meaning become a list, deeper lines go on with the meaning; all others stay as they are;
//! - `Example:` and `Examples:` become the section of examples, line by line;
//! - words between backquotes are bold.

use clap_mangen::roff::{Inline, Roff, bold, roman};

/// Indentation of the lines below a heading.
const INDENT: &str = "  ";

/// One part of a help text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block<'a> {
    /// Lines to be filled.
    Paragraph(Vec<&'a str>),
    /// What stands below a heading, which is given without its colon.
    Section(&'a str, Vec<&'a str>),
}

/// The parts of a help text, in its order.
pub(super) fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut out: Vec<Block<'_>> = Vec::new();
    for part in text.split("\n\n") {
        let mut lines = part.lines().filter(|line| !line.is_empty()).peekable();
        let Some(&first) = lines.peek() else { continue };
        let (_, rest) = (lines.next(), lines.collect::<Vec<_>>());
        let indented = !rest.is_empty() && rest.iter().all(|line| line.starts_with(INDENT));
        match first.strip_suffix(':') {
            Some(heading) if indented => out.push(Block::Section(heading, rest)),
            _ => out.push(Block::Paragraph(part.lines().collect())),
        }
    }
    out
}

/// Appends what a part becomes.
pub(super) fn render(roff: &mut Roff, block: &Block<'_>) {
    match block {
        Block::Paragraph(lines) => {
            roff.control("PP", []);
            roff.text(inlines(&lines.join("\n")));
        }
        Block::Section(heading, lines) if is_examples(heading) => {
            roff.control("SH", ["EXAMPLES"]);
            as_it_is(roff, lines);
        }
        Block::Section(heading, lines) if heading.starts_with("Example") => {
            roff.control("PP", []);
            roff.text([roman(format!("{heading}:"))]);
            as_it_is(roff, lines);
        }
        Block::Section(heading, lines) => {
            let title = match heading.split([',', ' ']).next() {
                Some("Exit") => "EXIT STATUS".to_owned(),
                _ => heading.to_uppercase(),
            };
            roff.control("SH", [title.as_str()]);
            if let Some(more) = heading.strip_prefix("Exit codes, ") {
                roff.text([roman(format!("The exit status is {more}:"))]);
            }
            list(roff, lines);
        }
    }
}

/// Whether lines below this heading are commands to be tried.
fn is_examples(heading: &str) -> bool {
    matches!(heading, "Example" | "Examples")
}

/// Lines that are not to be filled.
fn as_it_is(roff: &mut Roff, lines: &[&str]) {
    roff.control("PP", []);
    roff.control("nf", []);
    for line in lines {
        let line = line.strip_prefix(INDENT).unwrap_or(line);
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
}

/// A list of terms with their meanings; lines without such stay as they are.
fn list(roff: &mut Roff, lines: &[&str]) {
    let deeper = |line: &str| line.starts_with("   ");
    let mut rest = lines.iter().copied().peekable();
    while let Some(line) = rest.next() {
        let line = line.trim_start();
        let (term, mut meaning) = match line.split_once("  ") {
            Some((term, meaning)) => (term, vec![meaning.trim_start()]),
            None => (line, Vec::new()),
        };
        while let Some(more) = rest.next_if(|line| deeper(line)) {
            meaning.push(more.trim_start());
        }
        if meaning.is_empty() {
            roff.control("PP", []);
            roff.text(inlines(term));
        } else {
            roff.control("TP", []);
            roff.text([bold(term)]);
            roff.text(inlines(&meaning.join("\n")));
        }
    }
}

/// A text with what is between backquotes in bold.
fn inlines(text: &str) -> Vec<Inline> {
    let parts = text.split('`').enumerate().filter(|(_, part)| !part.is_empty());
    parts.map(|(i, part)| if i % 2 == 1 { bold(part) } else { roman(part) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
Says what it does; `fjord stats` shows it,
on two lines.

Exit codes, a sum of:
  0   done
  16  wrong, on
      two lines

Workloads:
  one two
  three

Examples:
  fjord ls x.img | jq '.[].name'
  .dot";

    #[test]
    fn help_texts_have_paragraphs_and_sections() {
        let found = blocks(TEXT);
        assert_eq!(found.len(), 4);
        assert!(matches!(&found[0], Block::Paragraph(lines) if lines.len() == 2));
        assert!(
            matches!(&found[1], Block::Section("Exit codes, a sum of", lines) if lines.len() == 3)
        );
        assert!(matches!(&found[3], Block::Section("Examples", lines) if lines.len() == 2));
    }

    #[test]
    fn they_become_roff() {
        let mut roff = Roff::new();
        for block in blocks(TEXT) {
            render(&mut roff, &block);
        }
        let wanted = "\
.PP
Says what it does; \\fBfjord stats\\fR shows it,
on two lines.
.SH \"EXIT STATUS\"
The exit status is a sum of:
.TP
\\fB0\\fR
done
.TP
\\fB16\\fR
wrong, on
two lines
.SH WORKLOADS
.PP
one two
.PP
three
.SH EXAMPLES
.PP
.nf
fjord ls x.img | jq '.[].name'
\\&.dot
.fi
";
        assert_eq!(roff.to_roff(), wanted);
    }
}
