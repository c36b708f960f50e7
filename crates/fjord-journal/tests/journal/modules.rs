//! The modules of the crate depend downward only: no cycle among the top-level ones, and none among
//! all files.
//!
//! Read from the source of code that is not a test:
//! - paths: `crate::…`, `super::…`, `self::…`, and those that begin with a module that the file
//!   declares. Paths through the crate's root (`crate::Journal`) and globs are refused, because they
//!   would hide the module;
//! - calls of methods of a type that has `impl` blocks in several files, which need no path: `self.f()`
//!   inside such a block, and calls on a variable or field that bears the type's name, such as
//!   `journal.f()`. They count for the file that has the method.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Each module with those that it depends on.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// The files of a crate without tests and comments, by module: `commit::settle`; `commit` for its
/// `mod.rs`.
type Sources = BTreeMap<String, String>;

/// Each type with its methods, and the module that has each of them.
type Methods = BTreeMap<String, BTreeMap<String, String>>;

/// `source` without comments, and without the items that are only for tests.
fn code_of(source: &str) -> String {
    let lines = source.lines().map(|line| line.split("//").next().unwrap_or_default());
    let source = lines.collect::<Vec<_>>().join("\n");
    let mut pieces = source.split("#[cfg(test)]");
    let mut code = pieces.next().unwrap_or_default().to_owned();
    pieces.for_each(|piece| code.push_str(after_item(piece)));
    code
}

/// The rest of `source` after its first item, which ends with a semicolon or its last brace.
fn after_item(source: &str) -> &str {
    let mut depth = 0;
    for (at, character) in source.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ';' if depth == 0 => {}
            _ => continue,
        }
        if depth == 0 {
            return &source[at + 1..];
        }
    }
    ""
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The name that `text` begins with.
fn name_at(text: &str) -> &str {
    text.split(|c| !is_name(c)).next().unwrap_or_default()
}

/// The name that `text` ends with.
fn name_before(text: &str) -> &str {
    text.rsplit(|c| !is_name(c)).next().unwrap_or_default()
}

/// The paths that `text` begins with: one, or those of a group in braces. A glob ends with `*`.
fn paths_at(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        return members(group).into_iter().flat_map(paths_at).collect();
    }
    let name = if text.starts_with('*') { "*" } else { name_at(text) };
    match text[name.len()..].strip_prefix("::") {
        Some(rest) if !name.is_empty() && !rest.starts_with('<') => {
            let mut paths = paths_at(rest);
            paths.iter_mut().for_each(|path| path.insert(0, name.to_owned()));
            paths
        }
        _ => vec![vec![name.to_owned()]],
    }
}

/// The members of a group, after its opening brace.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut members) = (0, 0, Vec::new());
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                members.push(group[start..at].trim());
                start = at + 1;
                if character == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    members.retain(|member| !member.is_empty());
    members
}

/// The paths of the code of `module`, from the crate's root on.
fn paths(module: &str, code: &str) -> Vec<Vec<String>> {
    let declared = code.lines().filter_map(|line| line.split_once("mod ")?.1.strip_suffix(';'));
    let roots = ["crate", "super", "self"].into_iter().chain(declared);
    let mut found = Vec::new();
    for root in roots {
        for (at, start) in code.match_indices(&format!("{root}::")) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| is_name(c) || c == ':' || c == '$') {
                continue;
            }
            for path in paths_at(&code[at + start.len()..]) {
                found.push(absolute(module, root, path));
            }
        }
    }
    found
}

/// `root::path` in `module`, from the crate's root on.
fn absolute(module: &str, root: &str, path: Vec<String>) -> Vec<String> {
    let mut absolute: Vec<String> = module.split("::").map(str::to_owned).collect();
    if root == "crate" {
        absolute.clear();
    }
    for name in [root.to_owned()].into_iter().chain(path) {
        match name.as_str() {
            "crate" | "self" => {}
            "super" => drop(absolute.pop()),
            _ => absolute.push(name),
        }
    }
    absolute
}

/// The module of a path: its longest beginning that is one.
fn module_of<'a>(sources: &'a Sources, path: &[String]) -> Option<&'a str> {
    let beginnings = (1..=path.len()).rev().map(|len| path[..len].join("::"));
    let mut known = beginnings.filter_map(|name| sources.get_key_value(&name));
    known.next().map(|(name, _)| name.as_str())
}

/// A top-level `impl` block.
struct Block<'a> {
    of: &'a str,
    is_inherent: bool,
    body: &'a str,
}

/// The top-level `impl` blocks of formatted code.
fn blocks(code: &str) -> Vec<Block<'_>> {
    let pieces = code.match_indices("\nimpl").filter_map(|(at, start)| {
        let rest = &code[at + start.len()..];
        let rest = &rest[..rest.find("\n}")?];
        let (head, body) = rest.split_once('{')?;
        let (is_inherent, of) = match head.split_once(" for ") {
            Some((_, of)) => (false, of),
            None if head.starts_with('<') => (true, head.split_once("> ")?.1),
            None => (true, head),
        };
        Some(Block { of: name_at(of.trim_start()), is_inherent, body })
    });
    pieces.collect()
}

/// Methods of the types that have `impl` blocks in several modules.
fn methods_of(sources: &Sources) -> Methods {
    let mut homes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut methods = Methods::new();
    for (module, code) in sources {
        for block in blocks(code).into_iter().filter(|block| block.is_inherent) {
            homes.entry(block.of).or_default().insert(module);
            let methods = methods.entry(block.of.to_owned()).or_default();
            for (at, start) in block.body.match_indices("fn ") {
                let name = name_at(&block.body[at + start.len()..]);
                methods.insert(name.to_owned(), module.clone());
            }
        }
    }
    methods.retain(|of, _| homes[of.as_str()].len() > 1);
    methods
}

/// Modules that have the methods that the code calls.
fn calls(methods: &Methods, code: &str) -> BTreeSet<String> {
    // A chain of calls may be broken before a dot.
    let joined =
        |code: &str| code.split_whitespace().collect::<Vec<_>>().join(" ").replace(" .", ".");
    let mut found = BTreeSet::new();
    for block in blocks(code) {
        let Some(own) = methods.get(block.of) else { continue };
        let names = called_on("self.", &joined(block.body));
        found.extend(names.iter().filter_map(|name| own.get(name)).cloned());
        let names = called_on("Self::", &joined(block.body));
        found.extend(names.iter().filter_map(|name| own.get(name)).cloned());
    }
    let code = joined(code);
    for (of, own) in methods {
        let variable = of.to_lowercase();
        for receiver in [format!("{variable}."), format!("{variable}()."), format!("{of}::")] {
            let names = called_on(&receiver, &code);
            found.extend(names.iter().filter_map(|name| own.get(name)).cloned());
        }
    }
    found
}

/// Names of the functions that the code calls, or names, right behind `receiver`.
fn called_on(receiver: &str, code: &str) -> BTreeSet<String> {
    let is_field = |before: &str| before.ends_with('.') && receiver.starts_with("self");
    let places = code.match_indices(receiver).filter_map(|(at, start)| {
        let before = &code[..at];
        let is_whole = name_before(before).is_empty() && !is_field(before);
        is_whole.then(|| name_at(&code[at + start.len()..]).to_owned())
    });
    places.collect()
}

/// What each module depends on.
fn graph_of(sources: &Sources) -> Result<Graph> {
    let methods = methods_of(sources);
    let mut graph = Graph::new();
    for (module, code) in sources {
        let inline = code.lines().find(|line| line.contains("mod ") && line.ends_with('{'));
        ensure!(inline.is_none(), "{module} has a module inside, which is not read: {inline:?}");
        let mut found = calls(&methods, code);
        for path in paths(module, code) {
            ensure!(path.last().is_none_or(|end| end != "*"), "{module} imports all of {path:?}");
            match module_of(sources, &path) {
                Some(other) => found.insert(other.to_owned()),
                None => bail!("{module} names crate::{}, which is no module", path.join("::")),
            };
        }
        found.remove(module);
        graph.insert(module.clone(), found);
    }
    Ok(graph)
}

/// The same for the top-level modules.
fn top_level(graph: &Graph) -> Graph {
    let top = |module: &String| module.split("::").next().unwrap_or_default().to_owned();
    let mut merged = Graph::new();
    for (module, found) in graph {
        let found = found.iter().map(top).filter(|other| *other != top(module));
        merged.entry(top(module)).or_default().extend(found);
    }
    merged
}

/// Pairs of modules that depend on each other, directly or not, as components.
fn cycles(graph: &Graph) -> Vec<BTreeSet<String>> {
    let reached: Graph = graph
        .keys()
        .map(|from| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(at) = next.pop() {
                let fresh = graph[at].iter().filter(|&to| reached.insert(to.clone()));
                next.extend(fresh);
            }
            (from.clone(), reached)
        })
        .collect();
    let component = |from: &String| -> BTreeSet<String> {
        reached[from].iter().filter(|&to| reached[to].contains(from)).cloned().collect()
    };
    let components: BTreeSet<_> = graph.keys().map(component).collect();
    components.into_iter().filter(|component| !component.is_empty()).collect()
}

/// Errs with the cycles of a graph.
fn check(graph: &Graph) -> Result<()> {
    let described = cycles(graph).into_iter().map(|component| {
        let edges = component.iter().map(|module| {
            let inner: Vec<_> = graph[module].intersection(&component).cloned().collect();
            format!("  {module} needs {}", inner.join(", "))
        });
        edges.collect::<Vec<_>>().join("\n")
    });
    let described = described.collect::<Vec<_>>().join("\n\n");
    ensure!(described.is_empty(), "cycles of modules:\n{described}");
    Ok(())
}

/// Rust files below `dir` that are not for tests only.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
    Ok(found)
}

fn sources_of_the_crate() -> Result<Sources> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Sources::new();
    for path in files(&src)? {
        let below = path.strip_prefix(&src)?.with_extension("");
        let names = below.iter().map(|name| name.to_string_lossy().into_owned());
        let module = names.filter(|name| name != "mod").collect::<Vec<_>>().join("::");
        if module != "lib" {
            sources.insert(module, code_of(&fs::read_to_string(&path)?));
        }
    }
    Ok(sources)
}

#[test]
fn modules_depend_downward_only() -> Result<()> {
    let graph = graph_of(&sources_of_the_crate()?)?;
    let sees = |from: &str, to: &str| graph.get(from).is_some_and(|found| found.contains(to));
    ensure!(graph.len() > 30 && sees("journal", "log"), "misread: {graph:?}");
    ensure!(sees("commit::settle", "commit::script"), "misread: {graph:?}");
    // By method calls only.
    ensure!(sees("close", "commit::calls") && sees("close", "checkpoint"), "misread: {graph:?}");
    check(&top_level(&graph))?;
    check(&graph)
}

/// Sources of a crate of three modules.
fn sources(files: &[(&str, &str)]) -> Sources {
    let file = |&(module, code): &(&str, &str)| (module.to_owned(), code_of(code));
    files.iter().map(file).collect()
}

fn needs(files: &[(&str, &str)], module: &str) -> Vec<String> {
    let graph = graph_of(&sources(files)).expect("it can be read");
    graph[module].iter().cloned().collect()
}

#[test]
fn paths_are_read_from_code_that_is_not_a_test() {
    let mut files = vec![
        (
            "m",
            "//! [`crate::doc`]\nmod n;\nuse crate::{a, b::{self, c}};\nuse super::{d};\npub use \
             n::X;\n#[cfg(test)]\nmod tests {\n use crate::e;\n fn f() { }\n}\n#[cfg(test)]\nmod \
             more;\nfn g() { crate::h::i(); }\n",
        ),
        ("m::n", "use super::super::k::{F, G};\nfn f() { super::o::p(super::Q); }"),
        ("m::o", "use crate::m::n::{self, Z};\n"),
    ];
    files.extend(["a", "b", "d", "e", "h", "k"].map(|name| (name, "")));
    assert_eq!(needs(&files, "m"), ["a", "b", "d", "h", "m::n"]);
    assert_eq!(needs(&files, "m::n"), ["k", "m", "m::o"]);
    assert_eq!(needs(&files, "m::o"), ["m::n"]);
}

#[test]
fn what_would_hide_a_module_is_refused() {
    for code in ["use crate::Journal;", "use super::*;", "use crate::b::*;", "mod m {\n}\n"] {
        assert!(graph_of(&sources(&[("a", code), ("b", "")])).is_err(), "{code}");
    }
    assert!(graph_of(&sources(&[("a", "use crate::b::Journal;"), ("b", "")])).is_ok());
}

#[test]
fn a_call_needs_the_module_that_has_the_method() {
    let files = [
        (
            "a",
            "use std::X;\n\nimpl A {\n    fn f(&self) {}\n}\n\nimpl Z {\n    fn y(&self) {}\n}\n",
        ),
        ("b", "\nimpl A {\n    fn g(&self) {\n        self\n            .f();\n    }\n}\n"),
        ("c", "\nimpl<'a> C<'a> {\n    fn f(&self) {\n        self.a.g();\n    }\n}\n"),
        ("d", "\nimpl Drop for A {\n    fn drop(&mut self) {\n        self.g();\n    }\n}\n"),
        ("e", "fn h(a: &A) {\n    A::f(a);\n}\n"),
        (
            "f",
            "fn h(z: Z) {\n    z.y();\n}\n\nimpl C {\n    fn f() {\n        self.a.h();\n    }\n}\n",
        ),
    ];
    assert!(needs(&files, "a").is_empty());
    assert_eq!(needs(&files, "b"), ["a"]);
    assert_eq!(needs(&files, "c"), ["b"]);
    assert_eq!(needs(&files, "d"), ["b"]);
    assert_eq!(needs(&files, "e"), ["a"]);
    assert!(needs(&files, "f").is_empty(), "{files:?}");
}

#[test]
fn a_cycle_of_three_modules_is_found() {
    let graph = |edges: &[(&str, &str)]| {
        let mut graph = Graph::new();
        for &(from, to) in edges {
            graph.entry(from.to_owned()).or_default().insert(to.to_owned());
            graph.entry(to.to_owned()).or_default();
        }
        graph
    };
    assert!(check(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])).is_ok());
    let looped = graph(&[("a", "b"), ("b", "c::x"), ("c::y", "a"), ("d", "a")]);
    assert!(check(&looped).is_ok());
    let looped = top_level(&looped);
    assert!(check(&looped).is_err());
    assert_eq!(cycles(&looped), [BTreeSet::from(["a", "b", "c"].map(str::to_owned))]);
}
