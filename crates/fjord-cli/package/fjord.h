/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Ordering calls for files and directories of a fjord mount.
 *
 *   fjord_fbarrier(fd), fjord_fdatabarrier(fd)
 *
 * Whatever is changed after the call, in any file of the mount, survives a power cut only together with
 * everything written to fd's file before the call. Neither call makes anything durable; fsync(2) does.
 * fjord_fdatabarrier leaves out times that are not needed to read the data back, as fdatasync(2) does.
 * Both work on a descriptor of any access mode.
 *
 * They return 0, or -1 with errno:
 *   ENOTTY   the file is not on a fjord mount: call fsync(2) instead
 *   others   as fsync(2), such as EIO and ENOSPC
 *
 * The kernel may hold data that fjord has not seen: that of shared mappings, and with --writeback-cache
 * all. The functions have the kernel write it to fjord first, without waiting for the device. A program
 * that makes the ioctl itself must do so too. Two limits:
 *
 *   - Linux before 6.16 does not wait for that. Such data may be ordered by a later call only: use fsync(2)
 *     for them there. Data of write(2) without --writeback-cache are not concerned.
 *   - With --writeback-cache the kernel keeps the times that writes change, and no call orders them.
 *
 * macOS: F_BARRIERFSYNC promises the same of one file. Linux has no such call.
 */
#ifndef FJORD_H
#define FJORD_H

#ifndef _GNU_SOURCE
#error "fjord.h needs _GNU_SOURCE, defined before the first #include, for sync_file_range(2)"
#endif

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FJORD_IOC_FBARRIER _IO('J', 4)
#define FJORD_IOC_FDATABARRIER _IO('J', 5)

static inline int fjord_order(int fd, unsigned long request)
{
	if (sync_file_range(fd, 0, 0,
			    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
				    SYNC_FILE_RANGE_WAIT_AFTER) != 0)
		return -1;
	return ioctl(fd, request);
}

static inline int fjord_fbarrier(int fd)
{
	return fjord_order(fd, FJORD_IOC_FBARRIER);
}

static inline int fjord_fdatabarrier(int fd)
{
	return fjord_order(fd, FJORD_IOC_FDATABARRIER);
}

#ifdef __cplusplus
}
#endif

#endif
