//! `fjord man`: write the manual pages.

use std::{fs, path::PathBuf};

use crate::{
    failure::{Context, Result},
    man,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord man /usr/local/share/man")]
pub(crate) struct Args {
    /// Directory of manual pages, such as /usr/local/share/man
    dir: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    for page in man::pages() {
        let section = page.name.rsplit('.').next().unwrap_or("1");
        let dir = args.dir.join(format!("man{section}"));
        fs::create_dir_all(&dir).context(dir.display())?;
        let path = dir.join(&page.name);
        fs::write(&path, &page.content).context(path.display())?;
    }
    Ok(())
}
