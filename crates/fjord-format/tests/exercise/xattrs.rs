//! Attributes and access control lists.

use fjord_format::acl::Acl;
use fjord_format::types::{BlockNo, InodeNo};
use fjord_format::xattr::{
    self, NameIndex, ValueRef, XattrSet, XattrValue, XattrView, full_name, parse_block,
    parse_ibody, split_name,
};

use super::{Env, pick};

type Content = Vec<(NameIndex, Vec<u8>, XattrValue)>;

fn content(set: &XattrSet) -> Content {
    let each = set.iter().map(|x| (x.index(), x.name().to_vec(), x.value().clone()));
    let mut content: Content = each.collect();
    // The order of duplicates, which only hostile areas have, is not kept in blocks.
    content.sort_by_key(|(index, name, value)| (*index, name.clone(), format!("{value:?}")));
    content
}

fn walk(view: &XattrView<'_>, area_bytes: usize) {
    for entry in view.iter() {
        if let ValueRef::Bytes(bytes) = entry.value {
            assert!(bytes.len() <= area_bytes);
        }
        assert!(view.find(entry.index, entry.name).is_some());
        if let Some(full) = full_name(entry.index, entry.name)
            && let Some(split) = split_name(&full)
        {
            assert_eq!(split, (entry.index, entry.name));
        }
    }
    assert!(view.free_bytes() <= area_bytes);
}

/// Changes a set by what the bytes say.
fn change(set: &mut XattrSet, bytes: &[u8]) {
    let len = pick(bytes, 1) as usize % 80;
    let names: Vec<_> = set.iter().map(|x| (x.index(), x.name().to_vec())).collect();
    if let Some((index, name)) = names.get(pick(bytes, 2) as usize % (names.len() + 1)) {
        if pick(bytes, 3) & 1 == 1 {
            assert!(set.remove(*index, name).is_some());
        } else {
            let old = set.set(*index, name, &vec![7; len]).expect("a name that was stored");
            assert!(old.is_some());
        }
    }
    set.set(NameIndex::USER, b"fuzz", &vec![8; len]).expect("a good name");
    set.set_ea_inode(NameIndex::TRUSTED, b"big", InodeNo(12), 70_000, 5).expect("a good name");
}

/// The attribute area of an inode: any bytes.
pub fn ibody(env: &Env, area: &[u8]) {
    let Ok(Some(view)) = parse_ibody(area, &env.xattr) else { return };
    walk(&view, area.len());
    let Ok(mut set) = XattrSet::from_view(&view) else { return };
    let mut again = vec![0; area.len()];
    // Values that were not packed can only take less room when they are.
    set.encode_ibody(&mut again).expect("it was in an area of this size");
    let decoded = decode_ibody(env, &again);
    assert_eq!(content(&decoded), content(&set));
    change(&mut set, area);
    let fits = set.ibody_bytes() <= area.len();
    assert_eq!(set.encode_ibody(&mut again).is_ok(), fits);
    if fits && env.xattr.ea_inode {
        assert_eq!(content(&decode_ibody(env, &again)), content(&set));
    }
}

fn decode_ibody(env: &Env, area: &[u8]) -> XattrSet {
    let view = parse_ibody(area, &env.xattr).expect("just encoded");
    view.map_or(XattrSet::new(), |view| XattrSet::from_view(&view).expect("just encoded"))
}

/// An attribute block: any bytes.
pub fn block(env: &Env, bytes: &[u8]) {
    let _ = xattr::verify_block_checksum(bytes, 1, BlockNo(2));
    let Ok((header, view)) = parse_block(bytes, &env.xattr) else { return };
    walk(&view, bytes.len());
    let Ok(mut set) = XattrSet::from_view(&view) else { return };
    let mut again = vec![0; bytes.len()];
    if set.encode_block(&mut again, header.h_refcount).is_err() {
        assert!(bytes.len() > 1 << 16);
        return;
    }
    let decode = |bytes: &[u8]| {
        let (header, view) = parse_block(bytes, &env.xattr).expect("just encoded");
        (header.h_refcount, XattrSet::from_view(&view).expect("just encoded"))
    };
    let (h_refcount, decoded) = decode(&again);
    assert_eq!((h_refcount, content(&decoded)), (header.h_refcount, content(&set)));
    change(&mut set, bytes);
    let fits = set.block_bytes() <= bytes.len();
    assert_eq!(set.encode_block(&mut again, 1).is_ok(), fits);
    if fits && env.xattr.ea_inode {
        assert_eq!(content(&decode(&again).1), content(&set));
    }
    xattr::set_block_checksum(&mut again, 1, BlockNo(2)).expect("a whole block");
    xattr::verify_block_checksum(&again, 1, BlockNo(2)).expect("just set");
}

/// The value of an ACL attribute, on disk or from a program.
pub fn acl(bytes: &[u8]) {
    if let Ok(Some(acl)) = Acl::from_disk(bytes) {
        assert_eq!(acl.to_disk(), bytes);
        both_ways(acl, pick(bytes, 1) as u16);
    }
    if let Ok(Some(acl)) = Acl::from_xattr(bytes) {
        both_ways(acl, pick(bytes, 2) as u16);
    }
}

fn both_ways(mut acl: Acl, mode: u16) {
    assert_eq!(Acl::from_disk(&acl.to_disk()), Ok(Some(acl.clone())));
    assert_eq!(Acl::from_xattr(&acl.to_xattr()), Ok(Some(acl.clone())));
    let inherited = acl.inherit(mode);
    assert_eq!(inherited.mode & !mode, 0);
    acl.chmod(mode);
    assert_eq!(acl.apply_to_mode(mode), mode);
}
