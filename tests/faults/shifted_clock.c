/* Preloaded into a process, moves its wall clock by SHIFTED_CLOCK_S seconds. Its monotonic clock stays as it is.

   cc -shared -fPIC -O2 -o shifted_clock.so shifted_clock.c -ldl
   LD_PRELOAD=./shifted_clock.so SHIFTED_CLOCK_S=7200 python -c 'import time; print(time.time())'

   What is waited for until a point in that time is handed to the kernel in the real one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    static long seconds = -1;
    if (seconds < 0) {
        const char *text = getenv("SHIFTED_CLOCK_S");
        seconds = text ? atol(text) : 0;
    }
    return seconds;
}

static long real(clockid_t id, struct timespec *at) { return syscall(SYS_clock_gettime, id, at); }

int clock_gettime(clockid_t id, struct timespec *at) {
    long failed = real(id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += shift();
    return (int)failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *at, int base) {
    if (base != TIME_UTC) return 0;
    clock_gettime(CLOCK_REALTIME, at);
    return base;
}

/* A deadline on the monotonic clock lies far below the wall clock, and stays as it is. */
static struct timespec unshifted(const struct timespec *deadline) {
    struct timespec now, found = *deadline;
    real(CLOCK_REALTIME, &now);
    if (found.tv_sec - now.tv_sec > shift() / 2) found.tv_sec -= shift();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec at = unshifted(deadline);
    if (!next) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return next(cond, mutex, &at);
}

int cnd_timedwait(cnd_t *restrict cond, mtx_t *restrict mutex, const struct timespec *restrict deadline) {
    static int (*next)(cnd_t *, mtx_t *, const struct timespec *);
    struct timespec at = unshifted(deadline);
    if (!next) next = dlsym(RTLD_NEXT, "cnd_timedwait");
    return next(cond, mutex, &at);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict deadline) {
    static int (*next)(sem_t *, const struct timespec *);
    struct timespec at = unshifted(deadline);
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    return next(sem, &at);
}
