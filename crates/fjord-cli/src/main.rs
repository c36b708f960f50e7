//! The `fjord` command: make, mount, inspect, edit and repair ext4 images.
//!
//! Owns the path from arguments to an exit code. Each command has a file in [`commands`]; shared
//! code is in this directory. Invariant: the process starts no thread before a command runs,
//! because `mount --daemon` forks.

mod accounts;
mod cli;
mod commands;
mod daemon;
mod ext4_options;
mod failure;
mod helper;
mod image;
mod in_use;
mod log_line;
mod man;
mod mode_change;
mod mount_options;
mod output;
mod paths;
mod pending;
mod pending_file;
mod remount;
mod signals;
mod size;
mod syslog;
mod targets;
mod tree_rules;
mod users;

use std::{path::Path, process::ExitCode};

use clap::Parser;
use tracing_subscriber::{
    filter::LevelFilter, layer::Layer, layer::SubscriberExt, util::SubscriberInitExt,
};

#[cfg(feature = "lock-stats")]
#[global_allocator]
static ALLOCATOR: fjord_block::lock::CountingAllocator = fjord_block::lock::CountingAllocator;

fn main() -> ExitCode {
    signals::keep_child_status();
    let args = helper::translate(std::env::args_os().collect());
    let usage_code = helper::usage_code(&args);
    let mut cli = match cli::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version go to standard output and are not failures.
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { usage_code } else { 0 });
        }
    };
    let settled = cli.settle();
    let image = cli.command.image();
    start_log(cli.verbose, image.as_deref());
    if let Err(message) = settled {
        output::complain(message);
        return ExitCode::from(usage_code);
    }
    match commands::run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let failure = failure.of_image(image.as_deref());
            output::complain(&failure);
            ExitCode::from(failure.code)
        }
    }
}

/// `image` is named in each line.
fn start_log(verbose: u8, image: Option<&Path>) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("FJORD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let to_stderr = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .event_format(log_line::LogLine::of(image))
        // Printing it to a closed standard error would panic.
        .log_internal_errors(false)
        .with_filter(filter);
    let to_syslog = syslog::Syslog.with_filter(LevelFilter::WARN);
    tracing_subscriber::registry().with(to_stderr).with(to_syslog).init();
}
