/* Makes reads and writes below one directory slow, for every program alike (LD_PRELOAD).
 *
 * SLOW_DISK_ROOT names the directory, SLOW_DISK_CONTROL a file of three doubles that is mapped and
 * read at every call: latency in seconds, bytes per second (0: no limit), and whether everything
 * hangs (not 0). The limit is one for the whole process, as a device's is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile double latency_s, bytes_per_s, hangs;
};

static struct control *control;
static const char *root;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_at_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SLOW_DISK_CONTROL");
    root = getenv("SLOW_DISK_ROOT");
    int fd = path && root ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *at = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, fd, 0);
        control = at == MAP_FAILED ? NULL : at;
        close(fd);
    }
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void sleep_s(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    if (seconds > 0) nanosleep(&t, NULL);
}

static int is_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, root, strlen(root)) == 0;
}

static void wait_for(int fd, size_t bytes) {
    if (!control || bytes < 4096 || !is_below(fd)) return;
    while (control->hangs != 0) sleep_s(0.002);
    double wait_s = control->latency_s;
    if (control->bytes_per_s > 0) {
        pthread_mutex_lock(&lock);
        double begin_s = now_s();
        if (free_at_s < begin_s) free_at_s = begin_s;
        free_at_s += bytes / control->bytes_per_s;
        wait_s += free_at_s - begin_s;
        pthread_mutex_unlock(&lock);
    }
    sleep_s(wait_s);
    while (control->hangs != 0) sleep_s(0.002);
}

static size_t total(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int at = 0; at < count; at++) bytes += parts[at].iov_len;
    return bytes;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t pread(int fd, void *to, size_t n, off_t at) {
    REAL(pread);
    wait_for(fd, n);
    return real(fd, to, n, at);
}
ssize_t pread64(int fd, void *to, size_t n, off64_t at) {
    REAL(pread64);
    wait_for(fd, n);
    return real(fd, to, n, at);
}
ssize_t read(int fd, void *to, size_t n) {
    REAL(read);
    wait_for(fd, n);
    return real(fd, to, n);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
    REAL(preadv);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at);
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(preadv64);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at);
}
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) {
    REAL(pwrite);
    wait_for(fd, n);
    return real(fd, from, n, at);
}
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
    REAL(pwrite64);
    wait_for(fd, n);
    return real(fd, from, n, at);
}
ssize_t write(int fd, const void *from, size_t n) {
    REAL(write);
    wait_for(fd, n);
    return real(fd, from, n);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    REAL(pwritev);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(pwritev64);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at);
}
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int how) {
    REAL(preadv2);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at, how);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int how) {
    REAL(preadv64v2);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at, how);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int how) {
    REAL(pwritev2);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at, how);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int how) {
    REAL(pwritev64v2);
    wait_for(fd, total(parts, count));
    return real(fd, parts, count, at, how);
}
