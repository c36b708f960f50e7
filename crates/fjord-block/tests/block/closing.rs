//! What is left of a device that is dropped.

use std::path::Path;
use std::time::Duration;

use fjord_block::{Buf, Class, Device, DeviceExt, FileDevice, Order, Request, Ticket};

use crate::backends::{make_image, options};

/// How many descriptors of this process are of the file.
fn open_count(path: &Path) -> usize {
    let names = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = names.filter_map(|name| std::fs::read_link(name.unwrap().path()).ok());
    links.filter(|link| link == path).count()
}

fn write(offset: u64, len: usize, class: Class) -> Request {
    let bufs = vec![Buf::from_slice(&vec![7; len])];
    Request::Write { offset, bufs, order: Order::Orderless, fua: false, class }
}

/// Requests that their submitter does himself are on the list of the helpers until the next tick, and
/// the device may be dropped at any moment of it.
#[test]
fn a_dropped_device_holds_its_file_no_more() {
    const SIZE: u64 = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    for backend in ["uring-direct", "plain-direct"] {
        let path = dir.join(backend);
        make_image(&path, SIZE);
        for round in 0..150 {
            let device = FileDevice::open(&path, &options(backend)).unwrap();
            let under_way = device.submit(vec![write(0, SIZE as usize / 2, Class::Background)]);
            std::thread::sleep(Duration::from_micros(round * 97 % 6000));
            device.submit_one(write(SIZE / 2, 4096, Class::Sync)).wait().unwrap();
            Ticket::wait_all(&under_way).unwrap();
            drop(device);
            assert_eq!(open_count(&path), 0, "{backend}, round {round}");
        }
    }
}
