// DPDK's side of `cargo xtask bench --faults`: receives, stops and closes a port whose device may not
// stop, and counts what the device writes into memory that DPDK gave back. The other side, with the
// same lines on standard output, the same poison and the same waits, is tests/src/bench/faults.rs.
//
// Run as: dpdk_faults EAL-ARGUMENTS -- GO-FILE

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_malloc.h>
#include <rte_mbuf.h>
#include <rte_memzone.h>
#include <rte_version.h>

enum {
	DESCRIPTORS = 512,
	MBUFS = 1280, // as many frames as the other side has
	BURST = 32,
	FRAMES = 64, // received before anything is stopped
	POISON = 0xA5,
	PATIENCE_MS = 30000,
	WATCHED_MS = 300, // how long freed memory is watched
	BLOCK = 4096,
	BLOCKS = 16384, // at most so many are taken from the heap to find one that reuses the ring
};

static struct rte_mempool *pool;
static struct rte_mbuf *home[MBUFS];
static void *blocks[BLOCKS];

static _Noreturn void fail(const char *what, int code)
{
	fprintf(stderr, "dpdk_faults: %s: %d\n", what, code);
	exit(1);
}

static void need(const char *what, int code)
{
	if (code < 0)
		fail(what, code);
}

// Lines are read while we run, so each goes out at once.
static void say(const char *word, const char *name, uint64_t a, uint64_t b, uint64_t c)
{
	printf("%s %s %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", word, name, a, b, c);
	fflush(stdout);
}

static void start(uint16_t port)
{
	struct rte_eth_conf conf = {0};

	pool = rte_pktmbuf_pool_create("frames", MBUFS, 0, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
	if (pool == NULL)
		fail("pool", rte_errno);
	need("configure", rte_eth_dev_configure(port, 1, 1, &conf));
	need("rx queue", rte_eth_rx_queue_setup(port, 0, DESCRIPTORS, SOCKET_ID_ANY, NULL, pool));
	need("tx queue", rte_eth_tx_queue_setup(port, 0, DESCRIPTORS, SOCKET_ID_ANY, NULL));
	need("start", rte_eth_dev_start(port));
}

// Receives a burst, gives it back at once, and waits a moment.
static unsigned int receive(uint16_t port)
{
	struct rte_mbuf *burst[BURST];
	uint16_t n = rte_eth_rx_burst(port, 0, burst, BURST);

	rte_pktmbuf_free_bulk(burst, n);
	usleep(1000);
	return n;
}

// Takes every mbuf that is home, and poisons its buffer: it is ours, by DPDK's word.
static unsigned int take_and_poison(void)
{
	unsigned int n = 0;

	while (n < MBUFS && rte_mempool_get(pool, (void **)&home[n]) == 0) {
		memset(home[n]->buf_addr, POISON, home[n]->buf_len);
		n++;
	}
	return n;
}

static uint64_t changed(const void *memory, size_t bytes)
{
	const uint8_t *at = memory;
	uint64_t n = 0;

	for (size_t i = 0; i < bytes; i++)
		n += at[i] != POISON;
	return n;
}

// Says how many of our buffers were written, and gives them back.
static void count_and_return(const char *name, unsigned int n)
{
	uint64_t buffers = 0, bytes = 0;

	for (unsigned int i = 0; i < n; i++) {
		uint64_t here = changed(home[i]->buf_addr, home[i]->buf_len);
		buffers += here != 0;
		bytes += here;
	}
	rte_mempool_put_bulk(pool, (void **)home, n);
	say("written", name, buffers, bytes, n);
}

// Takes blocks from the heap until they cover the memory at `ring`, which was given back to it.
static unsigned int reuse(const uint8_t *ring, size_t len, size_t *reused)
{
	size_t covered = 0;
	unsigned int n = 0;

	while (covered < len && n < BLOCKS && (blocks[n] = rte_malloc(NULL, BLOCK, 0)) != NULL) {
		const uint8_t *from = RTE_MAX((const uint8_t *)blocks[n], ring);
		const uint8_t *to = RTE_MIN((const uint8_t *)blocks[n] + BLOCK, ring + len);
		covered += to > from ? (size_t)(to - from) : 0;
		memset(blocks[n++], POISON, BLOCK);
	}
	*reused = covered;
	return n;
}

int main(int argc, char **argv)
{
	int used = rte_eal_init(argc, argv);
	uint16_t port = 0;

	need("EAL", used);
	if (argc - used != 2 || !rte_eth_dev_is_valid_port(port))
		fail("a port and a file were expected", argc - used);
	start(port);
	unsigned int received = 0;
	for (int ms = 0; received < FRAMES; ms++) {
		received += receive(port);
		if (ms == PATIENCE_MS)
			fail("frames received in time", received);
	}

	// It will be gone: where it was is remembered.
	const struct rte_memzone *zone = rte_memzone_lookup("eth_p0_q0_rx_ring");
	if (zone == NULL)
		fail("the receive ring's memory", -1);
	const uint8_t *ring = zone->addr;
	size_t len = DESCRIPTORS * 16;

	say("ready", rte_version(), 0, 0, 0);
	while (access(argv[used + 1], F_OK) != 0)
		receive(port);

	say("call", "stop", 0, 0, 0);
	int code = rte_eth_dev_stop(port);
	say("return", "stop", -code, 0, 0);
	unsigned int n = take_and_poison();
	usleep(WATCHED_MS * 1000);
	count_and_return("stop", n);

	say("call", "close", 0, 0, 0);
	code = rte_eth_dev_close(port);
	say("return", "close", -code, 0, 0);
	n = take_and_poison();
	size_t reused;
	unsigned int taken = reuse(ring, len, &reused);
	usleep(WATCHED_MS * 1000);
	uint64_t heap = 0;
	for (unsigned int i = 0; i < taken; i++)
		heap += changed(blocks[i], BLOCK);
	count_and_return("close", n);
	say("written", "heap", heap > 0, heap, reused);
	say("done", "dpdk", 0, 0, 0);
	return 0;
}
