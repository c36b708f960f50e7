/* Appends records to a log and replaces a file, in an order that a power cut keeps.
 *
 *   cc -o barrier barrier.c && ./barrier /mnt
 */
#define _GNU_SOURCE
#include <fjord.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

/* Order where fjord gives it, durability elsewhere; then the epoch has the number 0. */
static int order(int fd, struct fjord_epoch *epoch)
{
	if (fjord_fdatabarrier_epoch(fd, epoch) == 0)
		return 0;
	epoch->number = 0;
	return errno == ENOTTY ? fdatasync(fd) : -1;
}

int main(int argc, char **argv)
{
	static const char *const records[] = { "begin\n", "work\n", "end\n" };

	if (argc != 2) {
		fprintf(stderr, "usage: barrier DIRECTORY\n");
		return 2;
	}
	if (chdir(argv[1]) != 0)
		return fail(argv[1]);

	struct fjord_epoch epoch = { 0 };

	/* No record without those before it. */
	int log = open("log", O_WRONLY | O_CREAT | O_APPEND, 0644);
	if (log < 0)
		return fail("log");
	for (size_t i = 0; i < sizeof(records) / sizeof(records[0]); i++) {
		size_t len = strlen(records[i]);
		if (write(log, records[i], len) != (ssize_t)len || order(log, &epoch) != 0)
			return fail("log");
	}

	/* The new name never has anything but the whole new content. */
	int new = open("state.new", O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (new < 0 || write(new, "new state\n", 10) != 10 ||
	    order(new, &epoch) != 0 || rename("state.new", "state") != 0)
		return fail("state");

	/* Ordered now, learned later: before somebody is told that the content is safe. */
	if (epoch.number != 0 && fjord_is_durable(new, &epoch) != 1 &&
	    fjord_wait_durable(new, &epoch) != 0)
		return fail("state");
	return 0;
}
