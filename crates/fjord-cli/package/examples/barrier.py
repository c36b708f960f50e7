#!/usr/bin/env python3
"""Replaces a file, in an order that a power cut keeps: barrier.py FILE CONTENT

Order where fjord gives it, durability elsewhere.
"""

import errno
import fcntl
import os
import sys

# _IO('J', 4) and _IO('J', 5); on PowerPC, MIPS and SPARC with 0x20000000.
FJORD_IOC_FBARRIER = 0x4A04
FJORD_IOC_FDATABARRIER = 0x4A05


def fdatabarrier(fd):
    """Nothing that is changed later survives a power cut without what fd's file has now.

    Python has no sync_file_range: files that are mapped, and mounts with --writeback-cache, need fsync.
    """
    try:
        fcntl.ioctl(fd, FJORD_IOC_FDATABARRIER)
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        os.fdatasync(fd)


def replace(path, content):
    with open(path + ".new", "wb") as file:
        file.write(content)
        file.flush()
        fdatabarrier(file.fileno())
    os.rename(path + ".new", path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: barrier.py FILE CONTENT")
    replace(sys.argv[1], os.fsencode(sys.argv[2]))
