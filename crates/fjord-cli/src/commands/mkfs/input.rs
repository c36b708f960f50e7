//! Sources of the contents of a new image.

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    sync::Arc,
};

use fjord_block::Device;
use fjord_tree::{Contents, Populated, Rules, Source, TarInput, TarOptions};
use indicatif::ProgressBar;

use super::ContentsArgs;
use crate::{
    failure::{Failure, Result},
    output,
};

/// Source of the contents of a new image.
pub(super) enum Input {
    Directory(PathBuf),
    Tars(Vec<TarInput>, TarOptions),
}

impl Input {
    /// The source that the arguments name, opened as far as possible before the image is made.
    pub(super) fn of(args: &ContentsArgs, ask_host: bool) -> Result<Option<Input>> {
        let mut tars = args.from_tar.clone();
        let mut dir = args.from_dir.clone();
        match &args.source {
            Some(source) if source.is_dir() => dir = Some(source.clone()),
            Some(source) => tars.push(source.clone()),
            None => {}
        }
        if args.oci && tars.is_empty() {
            return Err(Failure::usage("--oci goes with a tar file: --from-tar FILE or -d FILE"));
        }
        if let Some(dir) = dir {
            return Ok(Some(Input::Directory(dir)));
        }
        if tars.is_empty() {
            return Ok(None);
        }
        let is_stdin = |path: &&PathBuf| path.as_os_str() == "-";
        if tars.iter().filter(is_stdin).count() > 1 {
            return Err(Failure::usage("standard input (-) can be given only once"));
        }
        let open = |path: &PathBuf| match is_stdin(&path) {
            false => Ok(TarInput::open(path)?),
            true if io::stdin().is_terminal() => {
                Err(Failure::usage("standard input is a terminal; pipe a tar stream into it"))
            }
            true => Ok(TarInput::stdin()?),
        };
        let inputs = tars.iter().map(open).collect::<Result<Vec<_>>>()?;
        let layers = args.oci || inputs.len() > 1;
        Ok(Some(Input::Tars(inputs, TarOptions { layers, ask_host })))
    }

    /// Number and size of the entries; `None` if not worth the cost: a pipe is stored in a
    /// temporary file only if parameters of the image depend on it.
    pub(super) fn measure(
        &mut self,
        needs_no_look: bool,
        rules: &Rules,
    ) -> Result<Option<Contents>> {
        match self {
            Input::Directory(dir) => Ok(Some(Contents::of_directory(dir, rules)?)),
            Input::Tars(inputs, _) if needs_no_look && !inputs.iter().all(TarInput::can_seek) => {
                Ok(None)
            }
            Input::Tars(inputs, _) => Ok(Some(Contents::of_tars(inputs, rules)?)),
        }
    }

    /// Copies the contents into the new image on the device.
    pub(super) fn put_in(
        &self,
        device: &Arc<dyn Device>,
        contents: Option<&Contents>,
        rules: &Rules,
        quiet: bool,
    ) -> fjord_tree::Result<Populated> {
        let bar = match contents {
            _ if quiet => ProgressBar::hidden(),
            Some(contents) => output::byte_progress(contents.bytes, "copying"),
            None => output::byte_counter("copying"),
        };
        let mut show = |so_far: &Populated| bar.set_position(so_far.bytes);
        let source = match self {
            Input::Directory(dir) => Source::Directory(dir),
            Input::Tars(inputs, options) => Source::Tars(inputs, options),
        };
        let populated = fjord_tree::populate(device.clone(), source, rules, &mut show);
        bar.finish_and_clear();
        populated
    }
}
