//! Directory hashes against debugfs.

use anyhow::{Context, Result, ensure};
use fjord_format::hash::{DirHash, HashKind, HashSeed, HashVersion, dirhash};
use fjord_testkit::image::Scratch;
use fjord_testkit::rng::Rng;
use fjord_testkit::tools::{command, run};

const SEED_TEXT: &str = "a1b2c3d4-e5f6-0718-293a-4b5c6d7e8f90";
const SEED_BYTES: [u8; 16] = [
    0xa1, 0xb2, 0xc3, 0xd4, 0xe5, 0xf6, 0x07, 0x18, 0x29, 0x3a, 0x4b, 0x5c, 0x6d, 0x7e, 0x8f, 0x90,
];

/// Names of every length, half of them with bytes from 0x80 on, without what the request
/// language of debugfs would take for its own.
fn names() -> Vec<Vec<u8>> {
    let mut rng = Rng::new(7);
    let plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.";
    let mut names = Vec::new();
    for len in 1..=255usize {
        names.push((0..len).map(|_| *rng.pick(plain)).collect());
        let mut byte = || if rng.percent(50) { rng.range(0x80, 0x100) as u8 } else { b'x' };
        names.push((0..len).map(|_| byte()).collect());
    }
    names
}

#[test]
fn hashes_are_those_of_debugfs() -> Result<()> {
    let scratch = Scratch::new("hash")?;
    let script = scratch.join("requests");
    let kinds = [HashKind::Legacy, HashKind::HalfMd4, HashKind::Tea];
    let mut requests = Vec::new();
    let mut expected = Vec::new();
    for (number, kind) in kinds.into_iter().enumerate() {
        for unsigned in [false, true] {
            for seed in [None, Some(HashSeed::from_bytes(&SEED_BYTES))] {
                for name in names() {
                    // debugfs numbers the unsigned versions behind the signed ones.
                    let version = number + if unsigned { 3 } else { 0 };
                    requests.extend_from_slice(format!("dx_hash -h {version} ").as_bytes());
                    if seed.is_some() {
                        requests.extend_from_slice(format!("-s {SEED_TEXT} ").as_bytes());
                    }
                    requests.extend_from_slice(&name);
                    requests.push(b'\n');
                    let version = HashVersion { kind, unsigned };
                    expected.push((name.clone(), version, seed.unwrap_or_default()));
                }
            }
        }
    }
    std::fs::write(&script, requests)?;
    let out = run(command("debugfs")?.arg("-f").arg(&script))?.ok()?;
    let answers: Vec<&str> =
        out.stdout.lines().filter(|line| line.starts_with("Hash of ")).collect();
    ensure!(answers.len() == expected.len(), "{} answers", answers.len());
    for (line, (name, version, seed)) in answers.iter().zip(&expected) {
        let (_, rest) = line.rsplit_once(" is 0x").context("no hash")?;
        let (hash, minor) = rest.split_once(" (minor 0x").context("no minor hash")?;
        let theirs = DirHash {
            hash: u32::from_str_radix(hash, 16)?,
            minor_hash: u32::from_str_radix(minor.trim_end_matches(')'), 16)?,
        };
        ensure!(dirhash(name, *version, *seed) == theirs, "{version:?} {seed:?} {line}");
    }
    Ok(())
}
