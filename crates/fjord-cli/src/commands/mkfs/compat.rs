//! Options of mke2fs that apply here.
//!
//! Invariant: an option without effect is refused by name, or ignored with a warning if the image
//! is valid without it.

use crate::{output, size, users};

/// Features common to ext2, ext3 and ext4, as in mke2fs.conf.
const BASE_FEATURES: &str = "none,sparse_super,large_file,filetype,resize_inode,dir_index,ext_attr";

/// The file system types of mke2fs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FsType {
    Ext2,
    Ext3,
    #[default]
    Ext4,
}

impl FsType {
    pub(super) fn parse(text: &str) -> Result<FsType, String> {
        match text {
            "ext2" => Ok(FsType::Ext2),
            "ext3" => Ok(FsType::Ext3),
            "ext4" => Ok(FsType::Ext4),
            _ => Err(format!("{text:?} is not supported; fjord makes ext4, ext3 and ext2")),
        }
    }

    /// The features of the type, and `more`.
    pub(super) fn features(self, more: &str) -> String {
        match self {
            FsType::Ext2 => format!("{BASE_FEATURES},{more}"),
            FsType::Ext3 => format!("{BASE_FEATURES},has_journal,{more}"),
            FsType::Ext4 => more.to_owned(),
        }
    }
}

/// Options given with `-E`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Extended {
    pub(super) hash_seed: Option<[u8; 16]>,
    pub(super) root_owner: Option<(u32, u32)>,
    pub(super) no_copy_xattrs: bool,
    /// Hints about the storage, without effect here.
    without_effect: Vec<String>,
}

impl Extended {
    pub(super) fn parse(text: &str) -> Result<Extended, String> {
        let mut extended = Extended::default();
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            extended.set(name, value)?;
        }
        Ok(extended)
    }

    fn set(&mut self, name: &str, value: Option<&str>) -> Result<(), String> {
        match (name, value) {
            ("hash_seed", Some(value)) => self.hash_seed = Some(parse_uuid(value)?),
            ("hash_seed", None) => return Err("hash_seed needs a UUID".to_owned()),
            ("root_owner", Some(value)) => self.root_owner = Some(users::owner(value)?),
            ("root_owner", None) => self.root_owner = Some(users::caller()),
            ("no_copy_xattrs", _) => self.no_copy_xattrs = true,
            // Always the case here.
            ("lazy_itable_init" | "lazy_journal_init" | "assume_storage_prezeroed", _) => {}
            ("discard" | "nodiscard", _) => {}
            ("stride" | "stripe_width" | "stripe-width" | "resize" | "packed_meta_blocks", _) => {
                self.without_effect.push(name.to_owned());
            }
            _ => {
                return Err(format!(
                    "{name:?} is not supported; supported extended options: hash_seed, root_owner, \
                     no_copy_xattrs"
                ));
            }
        }
        Ok(())
    }

    /// Warns of ignored options.
    pub(super) fn warn(&self) {
        for name in &self.without_effect {
            output::complain(format_args!("-E {name} has no effect"));
        }
    }
}

/// 32 hexadecimal digits, with or without hyphens.
pub(super) fn parse_uuid(text: &str) -> Result<[u8; 16], String> {
    let hex: String = text.chars().filter(|c| *c != '-').collect();
    if hex.len() != 32 || !hex.is_ascii() {
        return Err("a UUID has 32 hexadecimal digits".into());
    }
    u128::from_str_radix(&hex, 16).map(u128::to_be_bytes).map_err(|e| e.to_string())
}

/// The size after the image, in the syntax of mke2fs: a number without a unit counts blocks (1 KiB
/// if no block size is given); `s` means sectors of 512 bytes.
pub(super) fn parse_blocks(text: &str, block_size: Option<u32>) -> Result<u64, String> {
    let too_large = || format!("{text:?} is larger than any image");
    if let Ok(count) = text.parse::<u64>() {
        return count.checked_mul(block_size.unwrap_or(1024).into()).ok_or_else(too_large);
    }
    if let Some(Ok(count)) = text.strip_suffix('s').map(str::parse::<u64>) {
        return count.checked_mul(512).ok_or_else(too_large);
    }
    size::parse(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_mke2fs() {
        for (text, block_size, bytes) in [
            ("64M", None, 64 << 20),
            ("65536", None, 64 << 20),
            ("65536", Some(4096), 256 << 20),
            ("2048s", Some(4096), 1 << 20),
            ("1g", None, 1 << 30),
        ] {
            assert_eq!(parse_blocks(text, block_size), Ok(bytes), "{text}");
        }
        for wrong in ["", "s", "x", "64X", "-1", "99999999999999999"] {
            assert!(parse_blocks(wrong, Some(65536)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn extended_options_mean_something_or_are_refused() {
        let parse = |text: &str| Extended::parse(text);
        let found =
            parse("hash_seed=00112233-4455-6677-8899-aabbccddeeff,root_owner=1:2,nodiscard");
        let found = found.expect("well-formed");
        assert_eq!(found.root_owner, Some((1, 2)));
        assert_eq!(found.hash_seed.map(|seed| seed[..2].to_vec()), Some(vec![0, 0x11]));
        let hints = parse("stride=4,stripe_width=16,no_copy_xattrs").expect("hints");
        assert_eq!(hints.without_effect, ["stride", "stripe_width"]);
        assert!(hints.no_copy_xattrs);
        for (wrong, word) in
            [("frobnicate", "frobnicate"), ("offset=512", "offset"), ("hash_seed=1", "UUID")]
        {
            assert!(parse(wrong).expect_err(wrong).contains(word), "{wrong}");
        }
    }
}
