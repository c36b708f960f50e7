//! Linux mounts what fjord made, writes to it, and e2fsck finds the outcome clean.

use std::fs;

use fjord_mkfs::MkfsOptions;
use fjord_testkit::image::KernelMount;
use fjord_testkit::shell::check;

use crate::support::make;

fn mount_and_write(options: &MkfsOptions) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (image, _) = make(dir.path(), "image", options);
    println!("{} {:?}", options.features, options.block_size);
    {
        let mounted = KernelMount::new(&image, "rw").expect("Linux mounts it");
        for index in 0..300 {
            let sub = mounted.path().join(format!("dir{}", index % 7));
            fs::create_dir_all(&sub).expect("a directory");
            fs::write(sub.join(format!("file{index}")), vec![index as u8; index * 111])
                .expect("a file");
        }
        assert!(mounted.path().join("lost+found").is_dir());
    }
    check(&image);
    {
        let mounted = KernelMount::new(&image, "rw").expect("Linux mounts it");
        for index in 0..300usize {
            let path = mounted.path().join(format!("dir{}/file{index}", index % 7));
            assert_eq!(fs::read(path).expect("a file"), vec![index as u8; index * 111]);
        }
    }
    check(&image);
}

#[test]
fn linux_mounts_and_writes() {
    let sizes = [(64 << 20, None), (64 << 20, Some(2048)), (2 << 30, None), (200 << 30, None)];
    for (size, block_size) in sizes {
        mount_and_write(&MkfsOptions {
            size_bytes: Some(size),
            block_size,
            ..MkfsOptions::default()
        });
    }
    for features in [
        "^64bit",
        "^flex_bg",
        "meta_bg",
        "^has_journal",
        "^metadata_csum",
        "uninit_bg,^metadata_csum",
        "metadata_csum_seed",
        "orphan_file",
        "fast_commit",
        "inline_data",
        "sparse_super2",
        "^extent,^64bit,^huge_file",
        "none,has_journal,filetype,dir_index,ext_attr,resize_inode,sparse_super,large_file",
    ] {
        mount_and_write(&MkfsOptions {
            size_bytes: Some(300 << 20),
            features: features.to_owned(),
            ..MkfsOptions::default()
        });
    }
    let small_inodes =
        MkfsOptions { size_bytes: Some(64 << 20), inode_size: Some(128), ..MkfsOptions::default() };
    mount_and_write(&small_inodes);
}

/// Some versions of Linux refuse an orphan file of more than 8 MiB.
#[test]
fn orphan_files_are_not_too_long() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = MkfsOptions {
        size_bytes: Some(130 << 30),
        block_size: Some(65_536),
        features: "orphan_file".into(),
        ..MkfsOptions::default()
    };
    let (image, _) = make(dir.path(), "image", &options);
    let told = fjord_testkit::image::debugfs(&image, "stat <12>").expect("debugfs reads it");
    assert!(told.contains("Size: 8388608"), "{told}");
    check(&image);
}
