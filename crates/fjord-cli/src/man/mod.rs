//! Manual pages: one in section 1 for each command, made from its arguments and its help text, and
//! pages for the helpers in section 8.
//!
//! Owns the list of pages and their common parts. Invariant: the output is reproducible.

mod mount_helper;
mod text;

use clap::{Command, CommandFactory};
use clap_mangen::{
    Man,
    roff::{Inline, Roff, bold, italic, roman},
};

use crate::cli::Cli;

/// Date of the last change in substance; shown at the foot of each page.
const DATE: &str = "2026-11-23";
const MANUAL: &str = "fjord manual";

/// Links to the program that run a command, by name; each has the command's page in section 8.
const HELPERS: [(&str, &str); 2] = [("fsck.fjord", "fsck"), ("mkfs.fjord", "mkfs")];
/// Further names of a helper: a page and the page that it refers to.
const ALIASES: [(&str, &str); 1] = [("fsck.fuse.fjord.8", "man8/fsck.fjord.8")];

/// A page: the name of its file, which ends with the section, and its content.
pub(crate) struct Page {
    pub(crate) name: String,
    pub(crate) content: String,
}

/// All pages.
pub(crate) fn pages() -> Vec<Page> {
    let mut cli = Cli::command();
    cli.build();
    let own_page = |command: &Command| {
        page(command, command.get_display_name().unwrap_or(command.get_name()), "1")
    };
    let mut pages = vec![own_page(&cli)];
    let commands = cli.get_subcommands().filter(|command| command.get_name() != "help");
    pages.extend(commands.map(own_page));
    pages.extend(HELPERS.iter().filter_map(|(helper, command)| {
        let command = cli.find_subcommand(command)?.clone().bin_name(*helper);
        Some(page(&command, helper, "8"))
    }));
    pages
        .push(Page { name: "mount.fuse.fjord.8".into(), content: tidy(&mount_helper::page(&cli)) });
    pages.extend(
        ALIASES.map(|(name, page)| Page { name: name.into(), content: format!(".so {page}\n") }),
    );
    pages
}

/// The page of a command that has been built, under a name and in a section.
fn page(command: &Command, name: &str, section: &str) -> Page {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut roff = head(name, section, &names(name), &about);
    synopsis(&mut roff, command);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(format!("{about}."))]);
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let blocks = text::blocks(&help);
    let is_paragraph = |block: &text::Block<'_>| matches!(block, text::Block::Paragraph(_));
    let first_section = blocks.iter().position(|b| !is_paragraph(b)).unwrap_or(blocks.len());
    let (description, sections) = blocks.split_at(first_section);
    for block in description {
        text::render(&mut roff, block);
    }
    let mut content = roff.render();
    content += &options(command);
    let mut roff = Roff::new();
    for block in sections {
        text::render(&mut roff, block);
    }
    let has_exit_codes = help.contains("Exit codes");
    if !has_exit_codes {
        roff.control("SH", ["EXIT STATUS"]);
        roff.text([roman("See "), bold("fjord"), roman("(1).")]);
    }
    see_also(&mut roff, command);
    content += &roff.to_roff();
    Page { name: format!("{name}.{section}"), content: tidy(&content) }
}

/// The page without redundant requests: a paragraph at the start of a section, line breaks next to
/// an empty line.
fn tidy(page: &str) -> String {
    let mut out = String::with_capacity(page.len());
    let mut before = "";
    for line in page.lines() {
        let idle = match line {
            ".PP" => before.starts_with(".SH"),
            ".br" => before.is_empty() || before == ".br",
            "" => true,
            _ => false,
        };
        if !idle {
            out += line;
            out.push('\n');
        }
        before = line;
    }
    out
}

/// The title and the section NAME.
fn head(title: &str, section: &str, names: &str, about: &str) -> Roff {
    let mut roff = Roff::new();
    let source = concat!("fjord ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", [title.to_uppercase().as_str(), section, DATE, source, MANUAL]);
    roff.control("SH", ["NAME"]);
    let about = about.strip_prefix("A ").unwrap_or(about);
    roff.text([roman(format!("{names} - {}", uncapitalized(about)))]);
    roff
}

/// The names of a page, including its aliases.
fn names(name: &str) -> String {
    let file = format!("man8/{name}.8");
    let aliases = ALIASES.iter().filter(|(_, page)| *page == file);
    let aliases = aliases.filter_map(|(alias, _)| alias.strip_suffix(".8"));
    std::iter::once(name).chain(aliases).collect::<Vec<_>>().join(", ")
}

/// By convention the NAME line begins with a small letter.
fn uncapitalized(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// The section SYNOPSIS, from the usage that the help shows.
fn synopsis(roff: &mut Roff, command: &Command) {
    roff.control("SH", ["SYNOPSIS"]);
    let usage = command.clone().render_usage().to_string();
    let name = command.get_bin_name().unwrap_or(command.get_name());
    for (i, line) in usage.trim_start_matches("Usage:").lines().enumerate() {
        if i > 0 {
            roff.control("br", []);
        }
        let line = line.trim();
        match line.strip_prefix(name) {
            Some(rest) => roff.text([vec![bold(name)], placeholders(rest)].concat()),
            None => roff.text(placeholders(line)),
        };
    }
}

/// A usage with `<NAME>` as an italic name.
fn placeholders(usage: &str) -> Vec<Inline> {
    let mut out = Vec::new();
    let mut rest = usage;
    while let Some((before, (name, after))) =
        rest.split_once('<').and_then(|(before, rest)| Some((before, rest.split_once('>')?)))
    {
        out.extend([roman(before), italic(name)]);
        rest = after;
    }
    out.push(roman(rest));
    out.retain(|inline| *inline != roman(""));
    out
}

/// The sections of options and of subcommands.
fn options(command: &Command) -> String {
    let man = Man::new(command.clone()).section("1");
    let mut out = Vec::new();
    let subcommands = command.get_subcommands().any(|sub| sub.get_name() != "help");
    // Writing to memory does not fail.
    let _ = man.render_options_section(&mut out);
    if subcommands {
        let visible = command.clone().mut_subcommands(|sub| {
            let hide = sub.get_name() == "help";
            sub.hide(hide)
        });
        let _ = Man::new(visible).section("1").render_subcommands_section(&mut out);
    }
    let text = String::from_utf8_lossy(&out).into_owned();
    // The header, once per page.
    text.lines()
        .filter(|line| !line.starts_with(".ie ") && !line.starts_with(".el "))
        .map(|line| format!("{line}\n"))
        .collect()
}

fn see_also(roff: &mut Roff, command: &Command) {
    let others: &[&str] = match command.get_name() {
        "fjord" => &["mount.fuse.fjord(8)", "fsck.fjord(8)", "ext4(5)", "e2fsck(8)"],
        "mount" => &["fjord(1)", "fjord-umount(1)", "mount.fuse.fjord(8)", "mount(8)", "fstab(5)"],
        "umount" => &["fjord(1)", "fjord-mount(1)", "umount(8)"],
        "fsck" => &["fjord(1)", "fjord-recover(1)", "e2fsck(8)", "fsck(8)", "fstab(5)"],
        "mkfs" => &["fjord(1)", "fjord-tune(1)", "mke2fs(8)", "ext4(5)"],
        _ => &["fjord(1)"],
    };
    roff.control("SH", ["SEE ALSO"]);
    let mut line = Vec::new();
    for (i, other) in others.iter().enumerate() {
        let (name, section) = other.split_once('(').unwrap_or((other, ""));
        line.extend([
            roman(if i > 0 { ", " } else { "" }),
            bold(name),
            roman(format!("({section}")),
        ]);
    }
    line.retain(|inline| *inline != roman(""));
    roff.text(line);
}
