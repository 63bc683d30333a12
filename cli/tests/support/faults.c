/* A library to preload: it counts what a process does to files whose path contains $FAULT_IN, and has
 * the $FAULT_AT-th such operation go wrong. Without $FAULT_ERRNO the process is killed there, in the
 * middle of a write, or ends with exit code $FAULT_EXIT; with it this operation and all later ones fail
 * with that error. While there is a file $FAULT_WHILE what is written has a bit turned, and nobody is
 * told, as on a disk that lies. Every operation adds a letter to $FAULT_LOG. With $FAULT_DELAY a sync
 * takes so many milliseconds more. With $FAULT_KINDS only operations with these letters count, and
 * removals may fail then. With $FAULT_EVERY each so-many-th operation fails, in place of all from one on. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static int count;

static int concerns(const char *path) {
    const char *folder = getenv("FAULT_IN");
    return folder && path && strstr(path, folder) != NULL;
}

static int concerns_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return concerns(path);
}

static void die(void) {
    const char *code = getenv("FAULT_EXIT");
    if (code) syscall(SYS_exit_group, atoi(code));
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

/* 0: go on; 1: this one is the fault. */
static int fault(char letter) {
    const char *kinds = getenv("FAULT_KINDS"), *every = getenv("FAULT_EVERY");
    if (kinds && !strchr(kinds, letter)) return 0;
    const char *at = getenv("FAULT_AT"), *log = getenv("FAULT_LOG");
    int n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (log) {
        int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (fd >= 0) {
            syscall(SYS_write, fd, &letter, 1);
            syscall(SYS_close, fd);
        }
    }
    if (every) return n % atoi(every) == 0;
    if (!at) return 0;
    return getenv("FAULT_ERRNO") ? n >= atoi(at) : n == atoi(at);
}

/* What becomes of a faulty operation that is not a write. */
static int fails(char letter) {
    if (!fault(letter)) return 0;
    const char *error = getenv("FAULT_ERRNO");
    if (!error) die();
    errno = atoi(error);
    return 1;
}

ssize_t write(int fd, const void *bytes, size_t n) {
    if (concerns_fd(fd) && fault('w')) {
        const char *error = getenv("FAULT_ERRNO");
        if (!error) {
            syscall(SYS_write, fd, bytes, n / 2);
            die();
        }
        errno = atoi(error);
        return -1;
    }
    const char *lies = getenv("FAULT_WHILE");
    if (lies && n && concerns_fd(fd) && syscall(SYS_faccessat, AT_FDCWD, lies, F_OK) == 0) {
        char spoilt[4096];
        if (n > sizeof spoilt) n = sizeof spoilt;
        memcpy(spoilt, bytes, n);
        spoilt[n - 1] ^= 4;
        return syscall(SYS_write, fd, spoilt, n);
    }
    return syscall(SYS_write, fd, bytes, n);
}

ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t at) {
    if (concerns_fd(fd) && fails('w')) return -1;
    return syscall(SYS_pwrite64, fd, bytes, n, at);
}

int fsync(int fd) {
    if (concerns_fd(fd)) {
        const char *delay = getenv("FAULT_DELAY");
        if (delay) usleep(1000 * atoi(delay));
        if (fails('s')) return -1;
    }
    return syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to) {
    if ((concerns(from) || concerns(to)) && fails('r')) return -1;
    return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *path, mode_t mode) {
    if (concerns(path) && fails('m')) return -1;
    return syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

static int opened(const char *path, int flags, mode_t mode) {
    if ((flags & O_CREAT) && concerns(path) && fails('o')) return -1;
    return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return opened(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return opened(path, flags, mode);
}

/* What is removed is none of a checkpoint's writing: it dies there, and fails only where that is asked
 * for. */
int unlinkat(int folder, const char *path, int flags) {
    if (getenv("FAULT_KINDS") && concerns_fd(folder) && fails('u')) return -1;
    if (!getenv("FAULT_KINDS") && concerns_fd(folder) && !getenv("FAULT_ERRNO") && fault('u')) die();
    return syscall(SYS_unlinkat, folder, path, flags);
}
