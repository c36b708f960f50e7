//! The `fjord` command: make, mount, inspect, edit and repair ext4 images.
//!
//! Owns the way from arguments to an exit code. One file per command lies in [`commands`]; what
//! they share lies beside this file. Invariant: the process starts no thread before a command runs,
//! because `mount --daemon` forks.

mod cli;
mod commands;
mod daemon;
mod failure;
mod helper;
mod image;
mod in_use;
mod mount_options;
mod output;
mod paths;
mod signals;
mod size;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = helper::translate(std::env::args_os().collect());
    let cli = match cli::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version go to standard output and are no failure.
            let _ = e.print();
            let usage = e.use_stderr();
            return ExitCode::from(if usage { failure::EXIT_USAGE } else { 0 });
        }
    };
    start_log(cli.verbose);
    match commands::run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("fjord: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn start_log(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("FJORD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .without_time()
        .init();
}
