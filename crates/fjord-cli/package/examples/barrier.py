#!/usr/bin/env python3
"""Replaces a file, in an order that a power cut keeps: barrier.py FILE CONTENT

Order where fjord gives it, durability elsewhere. Says when the content is durable.
"""

import errno
import fcntl
import os
import struct
import sys

# _IO('J', 4), _IO('J', 5) and _IOWR('J', 6, struct fjord_epoch); on PowerPC, MIPS and SPARC the direction has
# other bits.
FJORD_IOC_FBARRIER = 0x4A04
FJORD_IOC_FDATABARRIER = 0x4A05
FJORD_IOC_EPOCH = 0xC0184A06
EPOCH = struct.Struct("=QQII")
EPOCH_FDATABARRIER = 1
EPOCH_WAIT = 3


def fdatabarrier(fd):
    """Nothing that is changed later survives a power cut without what fd's file has now.

    Returns the epoch (mount, number), or None where the file is durable: not on fjord. Python has no
    sync_file_range: files that are mapped, and mounts with --writeback-cache, need fsync.
    """
    try:
        told = fcntl.ioctl(fd, FJORD_IOC_EPOCH, EPOCH.pack(0, 0, EPOCH_FDATABARRIER, 0))
        return EPOCH.unpack(told)[:2]
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        os.fdatasync(fd)
        return None


def wait_durable(fd, epoch):
    """Waits until the epoch is durable; fd is any file of its mount."""
    fcntl.ioctl(fd, FJORD_IOC_EPOCH, EPOCH.pack(*epoch, EPOCH_WAIT, 0))


def replace(path, content):
    with open(path + ".new", "wb") as file:
        file.write(content)
        file.flush()
        epoch = fdatabarrier(file.fileno())
        os.rename(path + ".new", path)
        if epoch is not None:
            wait_durable(file.fileno(), epoch)
    print("the content is durable")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: barrier.py FILE CONTENT")
    replace(sys.argv[1], os.fsencode(sys.argv[2]))
