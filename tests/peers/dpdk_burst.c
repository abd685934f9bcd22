// DPDK's side of `cargo xtask bench --only bursts`: bursts between two ports, each between two readings
// of the time-stamp counter. The other side, with the same frames, the same waits and the same lines on
// standard output, is tests/bursts/src/main.rs, which says what the lines mean.
//
// Buffers are taken from and given back to their pool outside of what is counted; what a burst itself
// does of that (refill, and free what was sent) is counted.
//
// Run as: dpdk_burst EAL-ARGUMENTS -- ROUNDS

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_mbuf.h>

enum {
	NEAR = 0, // ports
	FAR = 1,
	DESCRIPTORS = 512,
	MBUFS = 8191,
	CACHE = 256,
	MOST = 64, // frames of a burst
	EMPTY = 4096,
	WARM_UP = 16,
	WAIT_US = 100,
	LINK_TRIES = 100,
	LINK_WAIT_US = 100000,
	TRIES = 1000,
	BYTES = 60, // of a frame, without its check sequence
};

struct ticks {
	uint64_t *took;
	size_t len, room;
};

typedef uint16_t take(struct rte_mbuf **frames, uint16_t n, uint64_t *ticks);

static const uint16_t bursts[] = {1, 8, 32, 64};
static const uint8_t frame[BYTES] = {2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xB5};
static const uint8_t swapped[BYTES] = {2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xB5};
// What is received is like this.
static const uint8_t *expected = frame;
static struct rte_mempool *pool;

static _Noreturn void fail(const char *what, int code)
{
	fprintf(stderr, "dpdk_burst: %s: %d\n", what, code);
	exit(1);
}

static void need(const char *what, int code)
{
	if (code < 0)
		fail(what, code);
}

// Nothing that touches memory is moved across this, and its three instructions stay together: what of a
// reading lies between two is the same everywhere.
static inline __attribute__((always_inline)) uint64_t now(void)
{
	uint64_t ticks;

	__asm__ volatile("rdtsc; shl $32, %%rdx; or %%rdx, %%rax" : "=a"(ticks) : : "rdx", "cc", "memory");
	return ticks;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void add(struct ticks *ticks, uint64_t took)
{
	if (ticks->len == ticks->room) {
		ticks->room = ticks->room * 2 + 1024;
		ticks->took = realloc(ticks->took, ticks->room * sizeof(*ticks->took));
		if (ticks->took == NULL)
			fail("memory", -1);
	}
	ticks->took[ticks->len++] = took;
}

// Prints how often each took so many, and forgets them.
static void print(struct ticks *ticks, const char *path, uint16_t burst)
{
	qsort(ticks->took, ticks->len, sizeof(*ticks->took), compare);
	printf("ticks %s %u", path, burst);
	for (size_t i = 0, from = 0; i < ticks->len; i++) {
		if (i + 1 == ticks->len || ticks->took[i + 1] != ticks->took[from]) {
			printf(" %" PRIu64 ":%zu", ticks->took[from], i + 1 - from);
			from = i + 1;
		}
	}
	printf("\n");
	fflush(stdout);
	ticks->len = 0;
}

static void print_clock(void)
{
	uint64_t between[1001], turns = 1000000;

	for (int i = 0; i < 1001; i++) {
		uint64_t start = now();
		between[i] = now() - start;
	}
	qsort(between, 1001, sizeof(between[0]), compare);
	uint64_t start = now();
	__asm__ volatile("1: dec %0; jnz 1b" : "+r"(turns) : : "cc");
	uint64_t loop = now() - start;
	printf("clock %" PRIu64 " %" PRIu64 "\n", between[500], loop);
}

static void start(uint16_t port)
{
	struct rte_eth_conf conf = {0};
	struct rte_eth_link link = {0};

	need("configure", rte_eth_dev_configure(port, 1, 1, &conf));
	need("rx queue", rte_eth_rx_queue_setup(port, 0, DESCRIPTORS, SOCKET_ID_ANY, NULL, pool));
	need("tx queue", rte_eth_tx_queue_setup(port, 0, DESCRIPTORS, SOCKET_ID_ANY, NULL));
	need("start", rte_eth_dev_start(port));
	need("promiscuous", rte_eth_promiscuous_enable(port));
	for (int i = 0; i < LINK_TRIES && !link.link_status; i++) {
		need("link", rte_eth_link_get_nowait(port, &link));
		usleep(LINK_WAIT_US);
	}
	if (!link.link_status)
		fail("the link does not come up", port);
}

static uint16_t receive_at(uint16_t port, struct rte_mbuf **frames, uint16_t n, uint64_t *ticks)
{
	uint64_t start = now();
	uint16_t received = rte_eth_rx_burst(port, 0, frames, n);

	*ticks = now() - start;
	for (uint16_t i = 0; i < received; i++) {
		if (frames[i]->pkt_len != BYTES ||
		    memcmp(rte_pktmbuf_mtod(frames[i], void *), expected, BYTES) != 0)
			fail("another frame came than was sent", i);
	}
	rte_pktmbuf_free_bulk(frames, received);
	return received;
}

static uint16_t receive_near(struct rte_mbuf **frames, uint16_t n, uint64_t *ticks)
{
	return receive_at(NEAR, frames, n, ticks);
}

static uint16_t receive(struct rte_mbuf **frames, uint16_t n, uint64_t *ticks)
{
	return receive_at(FAR, frames, n, ticks);
}

static uint16_t forward(struct rte_mbuf **frames, uint16_t n, uint64_t *ticks)
{
	uint64_t start = now();
	uint16_t received = rte_eth_rx_burst(FAR, 0, frames, n);
	uint16_t sent = rte_eth_tx_burst(FAR, 0, frames, received);

	*ticks = now() - start;
	if (sent < received)
		fail("frames forwarded", sent);
	return sent;
}

// As testpmd's macswap does it where it uses no vectors, with its prefetch.
static inline void swap_addresses(struct rte_mbuf **frames, uint16_t n)
{
	for (uint16_t i = 0; i < n; i++) {
		struct rte_ether_hdr *head = rte_pktmbuf_mtod(frames[i], struct rte_ether_hdr *);
		struct rte_ether_addr address;

		if (i + 1 < n)
			rte_prefetch0(rte_pktmbuf_mtod(frames[i + 1], void *));
		rte_ether_addr_copy(&head->dst_addr, &address);
		rte_ether_addr_copy(&head->src_addr, &head->dst_addr);
		rte_ether_addr_copy(&address, &head->src_addr);
	}
}

static uint16_t forward_swapped(struct rte_mbuf **frames, uint16_t n, uint64_t *ticks)
{
	uint64_t start = now();
	uint16_t received = rte_eth_rx_burst(FAR, 0, frames, n);

	swap_addresses(frames, received);
	uint16_t sent = rte_eth_tx_burst(FAR, 0, frames, received);

	*ticks = now() - start;
	if (sent < received)
		fail("frames forwarded", sent);
	return sent;
}

// Sends a burst; its ticks.
static uint64_t send_burst(uint16_t burst)
{
	struct rte_mbuf *frames[MOST];

	need("buffers", rte_pktmbuf_alloc_bulk(pool, frames, burst));
	for (uint16_t i = 0; i < burst; i++) {
		frames[i]->data_len = frames[i]->pkt_len = BYTES;
		memcpy(rte_pktmbuf_mtod(frames[i], void *), frame, BYTES);
	}
	uint64_t start = now();
	uint16_t sent = rte_eth_tx_burst(NEAR, 0, frames, burst);
	uint64_t took = now() - start;

	if (sent < burst)
		fail("frames sent", sent);
	return took;
}

// Takes a burst by `by`, in pieces if it comes in pieces; adds the ticks if it was whole.
static void take_burst(uint16_t burst, take *by, struct ticks *ticks)
{
	struct rte_mbuf *frames[MOST];
	uint16_t taken = 0;

	for (int i = 0; i < TRIES; i++) {
		uint64_t took;

		usleep(WAIT_US);
		uint16_t found = by(frames, burst - taken, &took);
		if (found == burst && ticks != NULL)
			add(ticks, took);
		taken += found;
		if (taken == burst)
			return;
	}
	fail("frames came", taken);
}

static void forward_bursts(const char *path, uint16_t burst, int rounds, take *by)
{
	struct ticks ticks = {0};

	expected = by == forward_swapped ? swapped : frame;
	for (int i = 0; i < rounds; i++) {
		send_burst(burst);
		take_burst(burst, by, &ticks);
		take_burst(burst, receive_near, NULL);
	}
	if (path != NULL)
		print(&ticks, path, burst);
	free(ticks.took);
}

static void send_and_receive(uint16_t burst, int rounds)
{
	struct ticks sent = {0}, received = {0};

	expected = frame;
	for (int i = 0; i < rounds; i++) {
		add(&sent, send_burst(burst));
		take_burst(burst, receive, &received);
	}
	print(&sent, "tx", burst);
	print(&received, "rx", burst);
	free(sent.took);
	free(received.took);
}

static void poll_empty(void)
{
	struct rte_mbuf *frames[32];
	struct ticks ticks = {0};

	for (int i = 0; i < EMPTY; i++) {
		uint64_t took;

		if (receive(frames, 32, &took) == 0)
			add(&ticks, took);
	}
	print(&ticks, "empty", 1);
	free(ticks.took);
}

int main(int argc, char **argv)
{
	int used = rte_eal_init(argc, argv);

	need("EAL", used);
	if (argc - used != 2 || rte_eth_dev_count_avail() != 2)
		fail("two ports and a number of rounds were expected", argc - used);
	int rounds = atoi(argv[used + 1]);
	pool = rte_pktmbuf_pool_create("frames", MBUFS, CACHE, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
	if (pool == NULL)
		fail("pool", rte_errno);
	start(NEAR);
	start(FAR);
	print_clock();
	poll_empty();
	forward_bursts(NULL, MOST, WARM_UP, forward);
	for (size_t i = 0; i < RTE_DIM(bursts); i++) {
		send_and_receive(bursts[i], rounds);
		forward_bursts("io", bursts[i], rounds, forward);
		forward_bursts("macswap", bursts[i], rounds, forward_swapped);
	}
	for (uint16_t port = NEAR; port <= FAR; port++) {
		need("stop", rte_eth_dev_stop(port));
		need("close", rte_eth_dev_close(port));
	}
	return 0;
}
