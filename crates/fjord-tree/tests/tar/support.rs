//! Images from streams, and Linux's view of them.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use fjord_block::{FileDevice, FileOptions};
use fjord_mkfs::{MkfsOptions, format};
use fjord_testkit::image::{KernelMount, Scratch, e2fsck_clean};
use fjord_testkit::manifest::{Entry, Manifest};
use fjord_testkit::tools;
use fjord_tree::{Populated, Rules, Source, TarInput, TarOptions, TreeError, populate};

use crate::maker::{Member, stream};

/// Layers, and names only as the stream has them.
pub(crate) const LAYERS: TarOptions = TarOptions { layers: true, ask_host: false };
/// One plain stream, names only as it has them.
pub(crate) const PLAIN: TarOptions = TarOptions { layers: false, ask_host: false };

/// Held by what fills images, and alone by what looks at the memory in use.
static MEMORY: RwLock<()> = RwLock::new(());

/// Waits until no other test fills an image, and keeps it so.
pub(crate) fn quiet() -> RwLockWriteGuard<'static, ()> {
    MEMORY.write().unwrap_or_else(PoisonError::into_inner)
}

/// Puts streams into a new image, which must be clean whether that worked or not.
pub(crate) fn fill(
    image: &Path,
    streams: &[&[u8]],
    options: &TarOptions,
) -> Result<Populated, TreeError> {
    let _memory = filling();
    fill_held(image, streams, options)
}

/// Has those wait that look at the memory in use.
fn filling() -> RwLockReadGuard<'static, ()> {
    MEMORY.read().unwrap_or_else(PoisonError::into_inner)
}

fn fill_held(
    image: &Path,
    streams: &[&[u8]],
    options: &TarOptions,
) -> Result<Populated, TreeError> {
    let dir = image.parent().expect("an image in a directory");
    let inputs: Vec<TarInput> = streams
        .iter()
        .enumerate()
        .map(|(index, bytes)| {
            let path = dir.join(format!("stream-{index}.tar"));
            std::fs::write(&path, bytes).expect("written");
            TarInput::open(&path).expect("opens")
        })
        .collect();
    let source = Source::Tars(&inputs, options);
    let filled = fill_from(image, source);
    e2fsck_clean(image).expect("clean");
    filled
}

pub(crate) fn fill_from(image: &Path, source: Source<'_>) -> Result<Populated, TreeError> {
    File::create(image).expect("the image file can be made");
    let device = FileDevice::open(image, &FileOptions::default()).expect("the image opens");
    let options = MkfsOptions {
        size_bytes: Some(64 << 20),
        block_size: Some(4096),
        inode_ratio: Some(4096),
        ..MkfsOptions::default()
    };
    format(&device, &options).expect("formats");
    populate(Arc::new(device), source, &Rules::default(), &mut |_| {})
}

/// What Linux sees in an image.
pub(crate) fn view(image: &Path) -> Manifest {
    let mount = KernelMount::new(image, "ro").expect("Linux mounts it");
    let found = Manifest::from_directory(mount.path()).expect("readable").without_lost_found();
    mount.unmount().expect("unmounts");
    found
}

/// What became of streams: what was done, and what Linux sees.
pub(crate) struct Outcome {
    pub(crate) done: Populated,
    pub(crate) seen: Manifest,
}

impl Outcome {
    pub(crate) fn of(streams: &[&[u8]], options: &TarOptions) -> Result<Outcome, TreeError> {
        let scratch = Scratch::in_memory("tar").expect("a directory");
        let image = scratch.join("image");
        let done = fill(&image, streams, options)?;
        Ok(Outcome { done, seen: view(&image) })
    }

    /// Of one plain stream.
    pub(crate) fn plain(bytes: &[u8]) -> Outcome {
        Outcome::of(&[bytes], &PLAIN).expect("a stream that can be put in")
    }

    /// Of one plain stream of so many entries that they take much memory.
    pub(crate) fn many(members: impl Iterator<Item = Member>) -> Outcome {
        let _memory = filling();
        let scratch = Scratch::in_memory("tar").expect("a directory");
        let image = scratch.join("image");
        let bytes = stream(&members.collect::<Vec<_>>());
        let done = fill_held(&image, &[&bytes], &PLAIN).expect("a stream that can be put in");
        Outcome { done, seen: view(&image) }
    }

    /// Of one plain stream of these entries.
    pub(crate) fn members(members: &[Member]) -> Outcome {
        Outcome::plain(&stream(members))
    }

    /// All paths but the top.
    pub(crate) fn paths(&self) -> Vec<String> {
        let paths = self.seen.entries.keys().filter(|path| !path.is_empty());
        paths.map(|path| String::from_utf8_lossy(path).into_owned()).collect()
    }

    pub(crate) fn entry(&self, path: &str) -> &Entry {
        let found = self.seen.entries.get(path.as_bytes());
        found.unwrap_or_else(|| panic!("no {path} among {:?}", self.paths()))
    }

    /// Fails unless the file has this content.
    pub(crate) fn assert_content(&self, path: &str, data: &[u8]) {
        let entry = self.entry(path);
        assert_eq!(entry.size, data.len() as u64, "{path}");
        let pieces = data.chunks(fjord_testkit::manifest::PIECE_BYTES).enumerate();
        for (index, piece) in pieces {
            let hash = fjord_testkit::manifest::hash_piece(piece);
            assert_eq!(entry.pieces.get(&(index as u64)).copied(), hash, "{path}");
        }
    }
}

/// The message of a stream that must be refused.
pub(crate) fn refused(bytes: &[u8]) -> String {
    match Outcome::of(&[bytes], &PLAIN) {
        Ok(outcome) => panic!("not refused: {:?}", outcome.paths()),
        Err(error) => error.to_string(),
    }
}

/// What a program makes of its standard input.
pub(crate) fn piped(program: &str, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command: Command = tools::command(program).expect("installed");
    let command = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let done = child.wait_with_output().expect("ends");
    writer.join().expect("no panic").expect("all is read");
    assert!(done.status.success(), "{program} {args:?}");
    done.stdout
}
