//! The page cache against a model: counters, masks, eviction.

use std::collections::{BTreeMap, BTreeSet};

use fjord_block::Buf;
use proptest::prelude::*;

use super::{PageLru, PageMap};

const PAGE: u32 = 1024;

fn page(byte: u8) -> Buf {
    Buf::from_slice(&[byte; PAGE as usize])
}

#[test]
fn frozen_pages_keep_their_content() {
    let map = PageMap::new(PageLru::new(1 << 20, PAGE));
    map.insert_dirty(5, page(1), true);
    let taken = map.take_dirty(0..u64::MAX, 10);
    assert_eq!(taken.len(), 1);
    assert!(taken[0].delalloc);
    assert!(map.modify(5, false, |bytes| bytes.fill(2)));
    assert_eq!(taken[0].buf[0], 1, "what was frozen for I/O changed");
    assert_eq!(map.get(5).expect("cached")[0], 2);
    assert!(map.has_dirty(), "the later write is still to be written");
}

#[test]
fn the_first_dirty_page_of_a_range() {
    let map = PageMap::new(PageLru::new(1 << 20, PAGE));
    for lblk in [3, 64, 200] {
        map.insert_dirty(lblk, page(1), false);
    }
    map.insert_clean(5, page(1));
    let _ = map.take_dirty(200..201, 1);
    let first = |range| map.first_dirty(range);
    assert_eq!(first(0..u64::MAX), Some(3));
    assert_eq!((first(3..4), first(0..3), first(4..64)), (Some(3), None, None));
    assert_eq!(
        (first(4..65), first(64..u64::MAX), first(65..u64::MAX)),
        (Some(64), Some(64), None)
    );
}

#[test]
fn a_page_without_a_place_keeps_its_reservation_until_told() {
    let map = PageMap::new(PageLru::new(1 << 20, PAGE));
    map.insert_dirty(7, page(1), true);
    assert!(map.is_delalloc(7));
    let _ = map.take_dirty(0..u64::MAX, 10);
    assert!(map.is_delalloc(7) && map.is_pending(7));
    map.end_delalloc(7, 1);
    assert!(!map.is_delalloc(7) && map.is_pending(7));
    map.end_writeback(7, 1);
    assert!(!map.is_pending(7));
}

#[test]
fn clean_pages_go_when_the_budget_is_exceeded_and_dirty_ones_stay() {
    let lru = PageLru::new(u64::from(PAGE) * 100, PAGE);
    let map = PageMap::new(lru.clone());
    map.insert_dirty(0, page(9), true);
    for lblk in 1..1000 {
        map.insert_clean(lblk, page(1));
        lru.reclaim();
        assert!(lru.cached_bytes() <= u64::from(PAGE) * (100 + 64));
    }
    assert_eq!(map.get(0).expect("dirty pages stay")[0], 9);
}

#[test]
fn dropping_a_map_gives_its_bytes_back() {
    let lru = PageLru::new(1 << 20, PAGE);
    let map = PageMap::new(lru.clone());
    map.insert_dirty(3, page(1), false);
    map.insert_clean(4_000_000_000, page(1));
    drop(map);
    assert_eq!((lru.cached_bytes(), lru.dirty_bytes()), (0, 0));
}

#[derive(Debug, Clone)]
enum Op {
    Dirty(u32, bool),
    Clean(u32),
    Take(u32, u32, usize),
    Undo(u32),
    EndDelalloc(u32, u32),
    EndWriteback(u32, u32),
    Remove(u32, u32),
    Reclaim,
}

fn op() -> impl Strategy<Value = Op> {
    let lblk = 0u32..300;
    prop_oneof![
        (lblk.clone(), any::<bool>()).prop_map(|(l, d)| Op::Dirty(l, d)),
        lblk.clone().prop_map(Op::Clean),
        (lblk.clone(), 1u32..200, 1usize..80).prop_map(|(l, n, m)| Op::Take(l, n, m)),
        lblk.clone().prop_map(Op::Undo),
        (lblk.clone(), 1u32..100).prop_map(|(l, n)| Op::EndDelalloc(l, n)),
        (lblk.clone(), 1u32..100).prop_map(|(l, n)| Op::EndWriteback(l, n)),
        (lblk, 1u32..200).prop_map(|(l, n)| Op::Remove(l, n)),
        Just(Op::Reclaim),
    ]
}

#[derive(Default)]
struct Model {
    /// Pages that must be cached, with the state that keeps them there.
    dirty: BTreeSet<u32>,
    delalloc: BTreeSet<u32>,
    writeback: BTreeSet<u32>,
    clean: BTreeMap<u32, ()>,
}

impl Model {
    fn run(&mut self, map: &PageMap, lru: &PageLru, op: &Op) {
        match *op {
            Op::Dirty(l, delalloc) => {
                map.insert_dirty(l, page(1), delalloc);
                self.dirty.insert(l);
                self.clean.insert(l, ());
                if delalloc {
                    self.delalloc.insert(l);
                }
            }
            Op::Clean(l) => {
                map.insert_clean(l, page(1));
                self.clean.insert(l, ());
            }
            Op::Take(l, n, max) => {
                let range = u64::from(l)..u64::from(l + n);
                let got: Vec<u32> = map.take_dirty(range, max).iter().map(|p| p.lblk).collect();
                let want: Vec<u32> = self.dirty.range(l..l + n).take(max).copied().collect();
                assert_eq!(got, want);
                for l in got {
                    self.dirty.remove(&l);
                    self.writeback.insert(l);
                }
            }
            Op::Undo(l) => {
                map.undo_writeback(l, 1);
                if self.writeback.remove(&l) {
                    self.dirty.insert(l);
                }
            }
            Op::EndDelalloc(l, n) => {
                map.end_delalloc(l, n);
                self.delalloc.retain(|p| !(l..l + n).contains(p));
            }
            Op::EndWriteback(l, n) => {
                map.end_writeback(l, n);
                self.writeback.retain(|p| !(l..l + n).contains(p));
            }
            Op::Remove(l, n) => {
                let gone = l..l + n;
                let reserved = self.delalloc.range(gone.clone()).count() as u64;
                assert_eq!(map.remove(u64::from(l)..u64::from(l + n)), reserved);
                self.dirty.retain(|p| !gone.contains(p));
                self.delalloc.retain(|p| !gone.contains(p));
                self.writeback.retain(|p| !gone.contains(p));
                self.clean.retain(|p, ()| !gone.contains(p));
            }
            Op::Reclaim => {
                lru.reclaim();
                self.clean.retain(|&p, ()| map.contains(p));
            }
        }
    }

    fn check(&self, map: &PageMap, lru: &PageLru) {
        for p in self.dirty.iter().chain(&self.writeback).chain(&self.delalloc) {
            assert!(map.contains(*p), "page {p} was lost");
            assert!(map.is_pending(*p));
        }
        assert_eq!(lru.dirty_bytes(), self.dirty.len() as u64 * u64::from(PAGE));
        assert_eq!(lru.cached_bytes(), self.clean.len() as u64 * u64::from(PAGE));
        let first = self.dirty.iter().chain(&self.writeback).chain(&self.delalloc).min();
        assert_eq!(map.next_pending(0), first.copied());
    }
}

proptest! {
    #[test]
    fn behaves_as_the_model(ops in proptest::collection::vec(op(), 1..200)) {
        let lru = PageLru::new(u64::from(PAGE) * 120, PAGE);
        let map = PageMap::new(lru.clone());
        let mut model = Model::default();
        for op in &ops {
            model.run(&map, &lru, op);
            model.check(&map, &lru);
        }
    }
}
