//! The pool keeps resident memory near the live bytes, and buffers are what they claim to be.

use fjord_block::{AlignedBuf, Buf, pool_stats};

fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// One test, because RSS and the pool belong to the process.
#[test]
fn buffers_and_pool() {
    alignment_and_contents();
    copy_on_write();
    threads_share_the_pool();
    rss_follows_live_bytes();
}

fn alignment_and_contents() {
    for len in [
        0,
        1,
        511,
        512,
        513,
        1024,
        1500,
        2048,
        4095,
        4096,
        5000,
        65536,
        1 << 20,
        (1 << 20) + 1,
        5 << 20,
    ] {
        let mut dirty = AlignedBuf::uninit(len);
        dirty.fill(0xaa);
        let align = dirty.capacity().min(4096);
        assert!(dirty.capacity() >= len && dirty.as_ptr().addr().is_multiple_of(align), "{len}");
        drop(dirty);
        let clean = AlignedBuf::zeroed(len);
        assert!(clean.len() == len && clean.iter().all(|byte| *byte == 0));
    }
    // Pieces of one page do not overlap.
    for len in [512, 1024, 2048] {
        let bufs: Vec<AlignedBuf> =
            (0..100u8).map(|i| AlignedBuf::from_slice(&vec![i; len])).collect();
        assert!(
            bufs.iter().enumerate().all(|(i, buf)| buf.iter().all(|byte| usize::from(*byte) == i))
        );
    }
    assert_eq!(pool_stats().live_bytes, 0);
}

fn copy_on_write() {
    let mut page = Buf::from_slice(&[1; 4096]);
    page.overwrite(10, &[2; 20]);
    let clone = page.clone();
    page.overwrite(0, &[3; 15]);
    assert!(clone[..10] == [1; 10] && clone[10..30] == [2; 20] && clone[30..] == [1; 4066]);
    assert!(page[..15] == [3; 15] && page[15..30] == [2; 15] && page[30..] == [1; 4066]);
    assert!(!page.is_shared());
    let mut a = Buf::from_slice(&[1; 4096]);
    let address = a.as_ptr();
    a.make_mut()[0] = 2;
    assert_eq!(a.as_ptr(), address, "unshared buffers are written in place");
    let frozen = a.clone();
    assert!(a.is_shared() && frozen.ptr_eq(&a) && a.get_mut().is_none());
    a.make_mut()[0] = 3;
    assert_eq!((frozen[0], a[0], a[1]), (2, 3, 1));
    assert!(!a.is_shared() && !frozen.is_shared());
    assert!(a.clone().try_into_unique().is_err());
    assert_eq!(frozen.try_into_unique().unwrap()[0], 2);
}

fn threads_share_the_pool() {
    let (sender, receiver) = std::sync::mpsc::sync_channel::<Vec<AlignedBuf>>(4);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let sender = sender.clone();
            scope.spawn(move || {
                for round in 0..200usize {
                    let len = 512 << ((round + thread) % 8);
                    sender
                        .send(
                            (0..50).map(|i| AlignedBuf::from_slice(&vec![i as u8; len])).collect(),
                        )
                        .unwrap();
                }
            });
        }
        drop(sender);
        for bufs in receiver {
            assert!(
                bufs.iter().enumerate().all(|(i, buf)| buf.iter().all(|byte| *byte == i as u8))
            );
        }
    });
    assert_eq!(pool_stats().live_bytes, 0);
}

fn rss_follows_live_bytes() {
    let before = rss_bytes();
    for len in [1024usize, 4096, 65536] {
        let count = (256 << 20) / len;
        let mut bufs: Vec<Option<AlignedBuf>> =
            (0..count).map(|_| Some(AlignedBuf::zeroed(len))).collect();
        assert_eq!(pool_stats().live_bytes, 256 << 20);
        let full = rss_bytes() - before;
        assert!(full < (256 << 20) + (40 << 20), "{full} bytes resident for 256 MiB of {len}");
        // Keep one of eight, scattered; classes below a page then keep whole pages.
        let keep = 8 * 4096usize.div_ceil(len);
        bufs.iter_mut()
            .enumerate()
            .filter(|(i, _)| i % keep != 0)
            .for_each(|(_, buf)| drop(buf.take()));
        let rest = rss_bytes() - before;
        assert!(
            rest < (32 << 20) + (40 << 20),
            "{rest} bytes resident for {} live",
            pool_stats().live_bytes
        );
        drop(bufs);
        assert_eq!(pool_stats().live_bytes, 0);
    }
    let after = rss_bytes().saturating_sub(before);
    assert!(after < 40 << 20, "{after} bytes resident with nothing live");
}
