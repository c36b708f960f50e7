//! `fjord completions`: scripts for shells.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{cli::Cli, failure::Result, output};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord completions bash > /etc/bash_completion.d/fjord")]
pub(crate) struct Args {
    /// Shell
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "fjord", &mut script);
    output::print(String::from_utf8_lossy(&script).into_owned())
}
