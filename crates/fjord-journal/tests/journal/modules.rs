//! The modules of the crate depend downward only: no cycle of imports among the top-level ones.
//!
//! Read from the source: `crate::…` and `super::…` paths of code that is not a test. Paths through the
//! crate's root (`crate::Journal`) are refused, because they would hide the module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Each top-level module with those that it imports from.
type Graph = BTreeMap<String, BTreeSet<String>>;

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

/// The first segments of the paths that `path` starts: one, or those of a group in braces.
fn first_segments(path: &str) -> Vec<String> {
    let name = |text: &str| -> String {
        text.trim().chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect()
    };
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                names.push(name(&group[start..at]));
                start = at + 1;
                if character == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// First segments, below the crate's root, of the paths in the code of a file `depth` modules deep.
fn imports(code: &str, depth: usize) -> BTreeSet<String> {
    let parents = "super::".repeat(depth);
    let mut found = BTreeSet::new();
    for root in ["crate::", &parents] {
        for (at, _) in code.match_indices(root) {
            let before = code[..at].chars().next_back();
            let rest = &code[at + root.len()..];
            let is_start = before.is_none_or(|c| !c.is_alphanumeric() && !"_:$".contains(c));
            if is_start && !rest.starts_with("super::") {
                found.extend(first_segments(rest));
            }
        }
    }
    found
}

/// Pairs of modules that import from each other, directly or not, as components.
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

/// Rust files below `dir` that are not for tests only.
fn sources(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
    Ok(found)
}

fn graph_of_the_crate() -> Result<Graph> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut graph = Graph::new();
    for path in sources(&src)? {
        let below: Vec<_> =
            path.strip_prefix(&src)?.with_extension("").iter().map(Into::into).collect();
        let below: Vec<PathBuf> = below;
        let module = below[0].display().to_string();
        if module == "lib" {
            continue;
        }
        let depth = below.iter().filter(|name| !name.ends_with("mod")).count();
        let mut found = imports(&code_of(&fs::read_to_string(&path)?), depth);
        // A path to the module itself, from one of its own files.
        found.remove(&module);
        graph.entry(module).or_default().extend(found);
    }
    for (module, found) in &graph {
        for import in found {
            ensure!(graph.contains_key(import), "{module} imports crate::{import}, not a module");
        }
    }
    Ok(graph)
}

#[test]
fn modules_depend_downward_only() -> Result<()> {
    let graph = graph_of_the_crate()?;
    ensure!(graph.len() > 10 && graph["journal"].contains("log"), "misread: {graph:?}");
    let cycles = cycles(&graph);
    let described = cycles.iter().map(|component| {
        let edges = component.iter().map(|module| {
            let inner: Vec<_> = graph[module].intersection(component).cloned().collect();
            format!("  {module} imports {}", inner.join(", "))
        });
        edges.collect::<Vec<_>>().join("\n")
    });
    let described = described.collect::<Vec<_>>().join("\n\n");
    ensure!(cycles.is_empty(), "cycles of modules:\n{described}");
    Ok(())
}

#[test]
fn imports_are_read_from_code_that_is_not_a_test() {
    let code = code_of(
        "//! [`crate::doc`]\nuse crate::{a, b::{self, c}};\nuse super::{d};\n#[cfg(test)]\nmod tests \
         {\n use crate::e;\n fn f() { }\n}\n#[cfg(test)]\nmod more;\nfn g() { crate::h::i(); }\n",
    );
    let names = |depth| imports(&code, depth).into_iter().collect::<Vec<_>>();
    assert_eq!(names(1), ["a", "b", "d", "h"]);
    assert_eq!(names(2), ["a", "b", "h"]);
    assert_eq!(imports("use super::super::k;", 2), BTreeSet::from(["k".to_owned()]));
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
    assert!(cycles(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    let found = cycles(&graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")]));
    assert_eq!(found, [BTreeSet::from(["a", "b", "c"].map(str::to_owned))]);
}
