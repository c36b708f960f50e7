//! Options of commands that bring trees into images: owners of entries, excluded entries.

use std::{fs, path::PathBuf};

use fjord_tree::{Exclude, Owners, Rules};

use crate::{
    failure::{Context, Failure, Result},
    users,
};

#[derive(Debug, Default, clap::Args)]
pub(crate) struct TreeArgs {
    /// Exclude entries that match a pattern, in the syntax of a .gitignore file at the top of the
    /// tree (repeatable)
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Exclude entries that match a pattern in this file, one per line
    #[arg(long, value_name = "FILE")]
    exclude_from: Vec<PathBuf>,
    /// Change owners: u:FROM=TO for users, g:FROM=TO for groups, or a file with one such rule per
    /// line (repeatable). FROM is a number, a name, a range FIRST-LAST or * for all others; the
    /// first matching rule applies
    #[arg(long, value_name = "RULE|FILE")]
    owner_map: Vec<String>,
    /// Give all entries to one user and group
    #[arg(long, value_name = "USER:GROUP", value_parser = users::owner)]
    #[arg(conflicts_with = "owner_map")]
    squash_owner: Option<(u32, u32)>,
}

impl TreeArgs {
    /// The rules that the options ask for.
    pub(crate) fn rules(&self) -> Result<Rules> {
        Ok(Rules { exclude: self.exclude()?, owners: self.owners()?, ..Rules::default() })
    }

    fn exclude(&self) -> Result<Exclude> {
        let read = |path: &PathBuf| fs::read_to_string(path).context(path.display());
        let files = self.exclude_from.iter().map(read).collect::<Result<Vec<_>>>()?;
        let lines = self.exclude.iter().map(String::as_str);
        Exclude::new(lines.chain(files.iter().flat_map(|text| text.lines())))
            .map_err(|error| Failure::usage(format!("--exclude: {error}")))
    }

    fn owners(&self) -> Result<Owners> {
        if let Some((uid, gid)) = self.squash_owner {
            return Ok(Owners::squashed(uid, gid));
        }
        let mut owners = Owners::default();
        for text in &self.owner_map {
            let is_rule = text.contains('=') && text.contains(':') && fs::metadata(text).is_err();
            let rules = match is_rule {
                true => text.replace(',', "\n"),
                false => fs::read_to_string(text).context(text)?,
            };
            let added = owners.add(&rules, &users::id_of_name);
            added.map_err(|error| Failure::usage(format!("--owner-map: {error}")))?;
        }
        Ok(owners)
    }
}
