//! Excluded entries, by patterns in the syntax of .gitignore files.
//!
//! Invariant: entries below an excluded directory are excluded.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ignore::gitignore::{Gitignore, GitignoreBuilder};

/// Patterns of entries to leave out; the default leaves out none.
#[derive(Clone, Debug, Default)]
pub struct Exclude {
    patterns: Option<Gitignore>,
}

impl Exclude {
    /// Patterns as in a .gitignore file at the top of the tree: `*.o` anywhere, `/build` at the
    /// top, `cache/` directories only, `a/**/b` across directories, `!kept` re-includes entries.
    /// Empty lines and lines that begin with `#` are ignored.
    ///
    /// # Errors
    /// The invalid pattern, and why.
    pub fn new<'l>(lines: impl IntoIterator<Item = &'l str>) -> Result<Exclude, String> {
        let mut builder = GitignoreBuilder::new("");
        let mut is_empty = true;
        for line in lines {
            is_empty = false;
            builder.add_line(None, line).map_err(|error| error.to_string())?;
        }
        if is_empty {
            return Ok(Exclude::default());
        }
        let patterns = builder.build().map_err(|error| error.to_string())?;
        Ok(Exclude { patterns: Some(patterns) })
    }

    /// Whether an entry is excluded. `path` begins at the top of the tree, without a slash; its
    /// parent directories have already been checked.
    pub(crate) fn has(&self, path: &[u8], is_dir: bool) -> bool {
        let path = Path::new(OsStr::from_bytes(path));
        let Some(patterns) = &self.patterns else { return false };
        patterns.matched(path, is_dir).is_ignore()
    }

    /// As [`Exclude::has`], for a path whose directories nobody has asked for.
    pub(crate) fn has_any_part(&self, path: &[u8], is_dir: bool) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        self.patterns.is_some()
            && (ends.into_iter().any(|end| self.has(&path[..end], true)) || self.has(path, is_dir))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_those_of_gitignore() {
        let lines = ["# a comment", "", "*.o", "/build", "cache/", "a/**/b", "!keep.o", "\\#x"];
        let exclude = Exclude::new(lines).expect("well-formed");
        for (path, is_dir, expected) in [
            ("x.o", false, true),
            ("deep/er/x.o", false, true),
            ("deep/keep.o", false, false),
            ("build", true, true),
            ("src/build", true, false),
            ("src/cache", true, true),
            ("src/cache", false, false),
            ("a/b", false, true),
            ("a/x/y/b", false, true),
            ("x/a/b", false, false),
            ("#x", false, true),
            ("plain", false, false),
        ] {
            assert_eq!(exclude.has(path.as_bytes(), is_dir), expected, "{path}");
        }
        assert!(exclude.has(b"\xff.o", false));
        assert!(exclude.has_any_part(b"src/cache/x/y", false));
        assert!(!exclude.has_any_part(b"src/cached/x/y", false));
        assert!(!Exclude::default().has(b"x.o", false));
        assert!(Exclude::new(["a[z-a]"]).is_err());
    }
}
