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
 * fjord_fbarrier_epoch(fd, epoch), fjord_fdatabarrier_epoch(fd, epoch)
 *
 * The same, and *epoch names what the call has put in order: everything written to fd's file before, and
 * all earlier epochs of the mount.
 *
 * fjord_is_durable(fd, epoch), fjord_wait_durable(fd, epoch)
 *
 * Whether that is durable by now, without a wait, 1 or 0; and a wait until it is. fd is any file or directory
 * of the mount, and epoch may come from another process. An epoch means nothing after its mount has ended.
 *
 * All return 0 (fjord_is_durable 0 or 1), or -1 with errno:
 *   ENOTTY   the file is not on a fjord mount: call fsync(2) instead
 *   EINVAL   the epoch is of another mount, or none
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
#include <linux/types.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FJORD_IOC_FBARRIER _IO('J', 4)
#define FJORD_IOC_FDATABARRIER _IO('J', 5)

struct fjord_epoch {
	__u64 mount;
	__u64 number;
	/* One of the calls below. */
	__u32 call;
	/* Answer of FJORD_EPOCH_LOOK: 1 or 0. */
	__u32 is_durable;
};

#define FJORD_EPOCH_FBARRIER 0
#define FJORD_EPOCH_FDATABARRIER 1
#define FJORD_EPOCH_LOOK 2
#define FJORD_EPOCH_WAIT 3

#define FJORD_IOC_EPOCH _IOWR('J', 6, struct fjord_epoch)

static inline int fjord_write_out(int fd)
{
	return sync_file_range(fd, 0, 0,
			       SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
				       SYNC_FILE_RANGE_WAIT_AFTER);
}

static inline int fjord_fbarrier(int fd)
{
	return fjord_write_out(fd) != 0 ? -1 : ioctl(fd, FJORD_IOC_FBARRIER);
}

static inline int fjord_fdatabarrier(int fd)
{
	return fjord_write_out(fd) != 0 ? -1 : ioctl(fd, FJORD_IOC_FDATABARRIER);
}

static inline int fjord_epoch_call(int fd, struct fjord_epoch *epoch, __u32 call)
{
	epoch->call = call;
	return ioctl(fd, FJORD_IOC_EPOCH, epoch);
}

static inline int fjord_fbarrier_epoch(int fd, struct fjord_epoch *epoch)
{
	return fjord_write_out(fd) != 0 ? -1 : fjord_epoch_call(fd, epoch, FJORD_EPOCH_FBARRIER);
}

static inline int fjord_fdatabarrier_epoch(int fd, struct fjord_epoch *epoch)
{
	return fjord_write_out(fd) != 0 ? -1 :
					  fjord_epoch_call(fd, epoch, FJORD_EPOCH_FDATABARRIER);
}

static inline int fjord_is_durable(int fd, const struct fjord_epoch *epoch)
{
	struct fjord_epoch asked = *epoch;

	return fjord_epoch_call(fd, &asked, FJORD_EPOCH_LOOK) != 0 ? -1 : (int)asked.is_durable;
}

static inline int fjord_wait_durable(int fd, const struct fjord_epoch *epoch)
{
	struct fjord_epoch asked = *epoch;

	return fjord_epoch_call(fd, &asked, FJORD_EPOCH_WAIT);
}

#ifdef __cplusplus
}
#endif

#endif
