//! All operations from several threads at once, each thread with a model of its own names.
//!
//! Each thread works in a directory of its own and, under names of its own, in a directory shared
//! by all, so that its outcomes are certain while blocks, groups, directory blocks and
//! transactions are contended for.
//!
//! Invariant: a thread's steps depend on the seed and its number only.

use anyhow::{Context, Result, ensure};

use crate::{
    manifest::{Compare, Holes, Manifest},
    model::Model,
    rng::{Rng, mix},
    script::{Errno, Executor, Op, Path},
};

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Seed of all choices.
    pub seed: u64,
    /// Number of threads.
    pub threads: u32,
    /// Steps of each thread.
    pub steps: u32,
}

/// What the threads expect to find: compare with [`Expected::verify`].
#[derive(Debug)]
pub struct Expected {
    models: Vec<Model>,
    seed: u64,
}

/// Model comparison: what the model keeps.
const MODEL: Compare = Compare {
    atime: false,
    mtime: false,
    ctime: false,
    directory_size: false,
    blocks: false,
    holes: Holes::Ignored,
    flags_mask: 0,
    xattrs: true,
    links: true,
    special_files: true,
};

/// Runs the stress below an empty directory; `executor` makes one executor for each thread.
pub fn run(
    options: Options,
    executor: impl Fn() -> Box<dyn Executor + Send> + Sync,
) -> Result<Expected> {
    executor()
        .apply(&Op::Mkdir { path: "shared".into(), mode: 0o755 })
        .map_err(|error| anyhow::anyhow!("mkdir shared: {error:?}"))?;
    let results: Vec<Result<Model>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads)
            .map(|number| {
                let executor = &executor;
                scope.spawn(move || Worker::new(options, number, executor()).run())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a worker panicked")).collect()
    });
    let models = results.into_iter().collect::<Result<_>>()?;
    Ok(Expected { models, seed: options.seed })
}

impl Expected {
    /// Compares a manifest of the whole directory with all models.
    pub fn verify(&self, found: &Manifest) -> Result<()> {
        let mut expected = Manifest::default();
        for model in &self.models {
            expected.entries.extend(model.manifest().entries);
        }
        let mut found = found.clone();
        for tree in [&mut expected, &mut found] {
            // Their link counts and modes belong to all threads together.
            tree.entries.remove(&b""[..]);
            tree.entries.remove(&b"lost+found"[..]);
            tree.entries.remove(&b"shared"[..]);
        }
        expected
            .diff(&found, &MODEL)
            .ok("model", "file system")
            .with_context(|| format!("stress: seed {}", self.seed))
    }
}

struct Worker {
    number: u32,
    options: Options,
    rng: Rng,
    model: Model,
    real: Box<dyn Executor + Send>,
}

impl Worker {
    fn new(options: Options, number: u32, real: Box<dyn Executor + Send>) -> Self {
        let rng = Rng::new(mix(options.seed) ^ u64::from(number));
        Worker { number, options, rng, model: Model::default(), real }
    }

    fn run(mut self) -> Result<Model> {
        let shared = Op::Mkdir { path: "shared".into(), mode: 0o755 };
        self.model.apply(&shared).expect("the model is empty");
        for dir in ["", "/a", "/b", "/a/c"] {
            let path = format!("t{}{dir}", self.number).as_str().into();
            self.both(0, &Op::Mkdir { path, mode: 0o755 })?;
        }
        for step in 0..self.options.steps {
            if self.rng.percent(15) {
                self.read(step)?;
            } else {
                let op = self.choose();
                self.both(step, &op)?;
            }
        }
        Ok(self.model)
    }

    fn what(&self, step: u32) -> String {
        format!("stress: seed {} thread {} step {step}", self.options.seed, self.number)
    }

    fn both(&mut self, step: u32, op: &Op) -> Result<()> {
        let found = self.real.apply(op);
        if matches!(op, Op::Fallocate { .. }) && found == Err(Errno(libc::EOPNOTSUPP)) {
            // Files with block maps can only be punched.
            return Ok(());
        }
        let expected = self.model.apply(op);
        ensure!(
            expected.is_ok() == found.is_ok(),
            "{}: {op:?} gave {found:?}, the model {expected:?}",
            self.what(step)
        );
        Ok(())
    }

    fn read(&mut self, step: u32) -> Result<()> {
        let path = self.name();
        let expected = self.model.read_file(&path);
        let found = self.real.read_file(&path);
        match (&expected, &found) {
            (Ok(expected), Ok(found)) => {
                let first = expected.iter().zip(found).position(|(a, b)| a != b);
                ensure!(
                    expected == found,
                    "{}: {path:?}: {} bytes, expected {}; first difference at {first:?}",
                    self.what(step),
                    found.len(),
                    expected.len()
                );
            }
            (Err(_), Err(_)) => {}
            _ => anyhow::bail!("{}: reading {path:?}: {:?}", self.what(step), found.is_ok()),
        }
        Ok(())
    }

    /// A name in one of the thread's directories, or its own in the shared one.
    fn name(&mut self) -> Path {
        let (thread, name) = (self.number, self.rng.below(24));
        match self.rng.below(6) {
            0 => format!("t{thread}/{name}"),
            1 => format!("t{thread}/a/{name}"),
            2 => format!("t{thread}/b/{name}"),
            3 => format!("t{thread}/a/c/{name}"),
            _ => format!("shared/t{thread}-{name}"),
        }
        .as_str()
        .into()
    }

    fn choose(&mut self) -> Op {
        let (path, other, seed) = (self.name(), self.name(), self.rng.next_u64());
        let (offset, len) = (self.rng.magnitude(300_000), self.rng.magnitude(100_000));
        match self.rng.below(32) {
            0..=6 => Op::Create { path, mode: 0o600 | (seed as u32 & 0o77) },
            7..=10 => Op::Write { path, offset, len, seed },
            11 | 12 => Op::Append { path, len, seed },
            13 => Op::Truncate { path, size: offset },
            14 | 15 => {
                let mode = *self.rng.pick(&[0u32, 1, 3, 16, 17]);
                Op::Fallocate { path, mode, offset, len: len.max(1) }
            }
            16 => Op::Link { from: path, to: other },
            17..=19 => Op::Unlink { path },
            20..=22 => Op::Rename { from: path, to: other, flags: *self.rng.pick(&[0, 0, 1, 2]) },
            23 => Op::Symlink { path, target: format!("to-{seed}").as_str().into() },
            24 => Op::Mkdir { path, mode: 0o755 },
            25 => Op::Rmdir { path },
            26 => {
                let value = vec![seed as u8; self.rng.magnitude(400) as usize].into();
                let name = format!("trusted.{}", seed % 3).as_str().into();
                Op::SetXattr { path, name, value, flags: 0 }
            }
            27 => Op::RemoveXattr { path, name: format!("trusted.{}", seed % 3).as_str().into() },
            28 => Op::Fsync { path },
            29 => {
                let dir = format!("t{}/a", self.number).as_str().into();
                let link = self.rng.percent(60).then_some(path);
                Op::Tmpfile { dir, link, len, seed }
            }
            30 => Op::WriteUnlinked { path, len, seed },
            _ => Op::Fsync { path: format!("t{}/b", self.number).as_str().into() },
        }
    }
}
