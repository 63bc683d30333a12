/* A bad network between hosts that are network namespaces, where the kernel has no netem: a TUN device
 * for each of them, whose packets this process hands on, but for those that it loses, in the order of
 * when they are due.
 *
 *   netem HOSTS FAULT=NUMBER..
 *
 * makes the devices t0, t1 .., for somebody else to give to the hosts, of which host I has the address
 * A.B.C.(I+1). It ends when its parent has, or by SIGTERM, and says what it did. Faults are
 *
 *   loss       lost, packets of a hundred
 *   twice      handed on twice, of a hundred
 *   late       held back by reorder_ms, of a hundred, so that others overtake them
 *   reorder_ms that time, in milliseconds; 3 where nothing is said
 *   delay_ms   the time by which all are late
 *   spoil      with one bit turned, of a hundred: TCP's checksum finds that, and they are sent again
 *   after      so many packets of which nothing becomes, so that hosts meet before
 *   seed       of the numbers that decide; packets come as the kernel has them, so that a run of a
 *              seed is not another one's to the packet
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 16, LONGEST = 65536 };

struct packet {
    struct packet *next;
    double due;
    int to;
    long len;
    unsigned char bytes[];
};

static double loss, twice, late, delay_ms, spoil, after;
static double reorder_ms = 3;
static uint64_t state = 1;
static struct packet *waiting;
static int devices[HOSTS];
static volatile sig_atomic_t over;

static void end(int signal) {
    (void)signal;
    over = 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* SplitMix64. */
static uint64_t drawn(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Whether it happens to a packet, as it does to so many of a hundred. */
static int happens(double of_hundred) { return (double)(drawn() >> 11) * 0x1p-53 * 100 < of_hundred; }

static void option(const char *word) {
    static const struct {
        const char *name;
        double *value;
    } all[] = {{"loss", &loss},         {"twice", &twice},       {"late", &late},
               {"delay_ms", &delay_ms}, {"reorder_ms", &reorder_ms}, {"spoil", &spoil},
               {"after", &after}};
    const char *value = strchr(word, '=');
    size_t n = value ? (size_t)(value - word) : 0;
    if (value && strncmp(word, "seed", n) == 0 && n == 4) {
        state = strtoull(value + 1, NULL, 10);
        return;
    }
    for (size_t i = 0; value && i < sizeof all / sizeof *all; i++)
        if (strlen(all[i].name) == n && strncmp(word, all[i].name, n) == 0) {
            *all[i].value = atof(value + 1);
            return;
        }
    fprintf(stderr, "netem: no fault is called %s\n", word);
    exit(2);
}

/* Keeps a packet until it is due, after those that are due before it or at the same time. */
static void keep(const unsigned char *bytes, long len, int to, double due) {
    struct packet *p = malloc(sizeof *p + (size_t)len), **at = &waiting;
    if (!p) exit(2);
    while (*at && (*at)->due <= due) at = &(*at)->next;
    *p = (struct packet){.next = *at, .due = due, .to = to, .len = len};
    memcpy(p->bytes, bytes, (size_t)len);
    *at = p;
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 0;
    if (n < 2 || n > HOSTS) return 2;
    for (int i = 2; i < argc; i++) option(argv[i]);
    struct pollfd polled[HOSTS];
    for (int i = 0; i < n; i++) {
        struct ifreq device = {.ifr_flags = IFF_TUN | IFF_NO_PI};
        snprintf(device.ifr_name, IFNAMSIZ, "t%d", i);
        devices[i] = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
        if (devices[i] < 0 || ioctl(devices[i], TUNSETIFF, &device) < 0) {
            perror("netem: /dev/net/tun");
            return 2;
        }
        polled[i] = (struct pollfd){.fd = devices[i], .events = POLLIN};
    }
    struct sigaction act = {.sa_handler = end};
    sigaction(SIGTERM, &act, NULL);
    long all = 0, n_lost = 0, n_twice = 0, n_late = 0, n_spoilt = 0, n_overtaken = 0;
    pid_t parent = getppid();
    static unsigned char bytes[LONGEST];
    while (!over && getppid() == parent) {
        double until = waiting ? (waiting->due - now()) * 1e9 : 2e8;
        long ns = until < 0 ? 0 : until > 2e8 ? 200000000 : (long)until;
        struct timespec patience = {.tv_nsec = ns};
        if (ppoll(polled, (nfds_t)n, &patience, NULL) < 0) continue;
        for (int i = 0; i < n; i++) {
            if (!(polled[i].revents & POLLIN)) continue;
            long len = read(devices[i], bytes, sizeof bytes);
            /* Of IPv4, from one host to another. */
            if (len < 20 || bytes[0] >> 4 != 4) continue;
            int to = bytes[19] - 1;
            if (to < 0 || to >= n || to == i) continue;
            if (all++ < after) {
                keep(bytes, len, to, now());
                continue;
            }
            if (happens(loss)) {
                n_lost++;
                continue;
            }
            int is_late = happens(late);
            double due = now() + (delay_ms + (is_late ? reorder_ms : 0)) / 1e3;
            n_late += is_late || delay_ms > 0;
            /* Behind the head of IPv4: what is turned there goes to nobody. */
            if (happens(spoil) && len > 40) {
                n_spoilt++;
                bytes[20 + drawn() % (uint64_t)(len - 20)] ^= (unsigned char)(1 << drawn() % 8);
            }
            for (struct packet *p = waiting; p; p = p->next)
                if (p->to == to && p->due > due) n_overtaken++;
            keep(bytes, len, to, due);
            if (happens(twice)) {
                n_twice++;
                keep(bytes, len, to, due);
            }
        }
        while (waiting && waiting->due <= now()) {
            struct packet *p = waiting;
            waiting = p->next;
            /* A host that is gone takes none. */
            if (write(devices[p->to], p->bytes, (size_t)p->len) < 0) { /* As if it were lost. */ }
            free(p);
        }
    }
    fprintf(stderr, "netem: %ld packets, %ld lost, %ld twice, %ld late, %ld overtaken, %ld spoilt\n",
            all, n_lost, n_twice, n_late, n_overtaken, n_spoilt);
    return 0;
}
