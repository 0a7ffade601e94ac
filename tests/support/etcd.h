/* A real etcd for tests: one member or several, on free ports, in a folder of its own.
 *
 * Members can be killed, restarted on the same data, stopped and thawed, or wiped. They die with
 * the test process, whatever happens to it. Functions abort the process with a sentence if the
 * machine does not do its part (no etcd on PATH, not ready in time). Main thread only: a member is
 * killed when the thread that started it ends. */
#ifndef SUPPORT_ETCD_H
#define SUPPORT_ETCD_H

#include <stdbool.h>
#include <stdint.h>

#define TEST_ETCD_MEMBERS_MAX 3

struct test_etcd;

/* Starts `members` (1 or 3) and waits until all are healthy. Elections take half a second, the
 * least lease is 1 s, and clients may ping each second. */
struct test_etcd *test_etcd_start(unsigned members);
/* The same, but nothing runs yet (its ports are chosen): test_etcd_restart starts a member. */
struct test_etcd *test_etcd_prepare(unsigned members);
/* Kills all and removes the folder. NULL is fine. */
void test_etcd_destroy(struct test_etcd *etcd);

/* "http://127.0.0.1:2379[,...]" of all members; of one. Valid until destroy. */
const char *test_etcd_endpoints(const struct test_etcd *etcd);
const char *test_etcd_endpoint(const struct test_etcd *etcd, unsigned member);
uint16_t test_etcd_port(const struct test_etcd *etcd, unsigned member);

/* SIGKILL, and waits for the end. Fine if it is not running. */
void test_etcd_kill(struct test_etcd *etcd, unsigned member);
/* Starts a killed member on the data that it has; waits until it is healthy. */
void test_etcd_restart(struct test_etcd *etcd, unsigned member);
/* All killed members of a cluster at once: without a majority none would get healthy. */
void test_etcd_restart_all(struct test_etcd *etcd);
/* Removes the data of a killed member of one: revisions start again, the cluster id stays. */
void test_etcd_wipe(struct test_etcd *etcd, unsigned member);
/* SIGSTOP and SIGCONT. */
void test_etcd_freeze(struct test_etcd *etcd, unsigned member);
void test_etcd_thaw(struct test_etcd *etcd, unsigned member);

#endif
