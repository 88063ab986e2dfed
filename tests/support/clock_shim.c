/* The machine's wall clock, moved by as many microseconds as the file CLOCK_SHIM_FILE says.
 *
 * Loaded with LD_PRELOAD into a server. The file holds one 64-bit integer and may be written at any
 * time: the clock jumps. Clocks that only measure (CLOCK_MONOTONIC, …) are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MICRO 1000000LL

static volatile int64_t *offset_us;

__attribute__((constructor)) static void open_file(void) {
  const char *path = getenv("CLOCK_SHIM_FILE");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0)
    return;
  void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED)
    offset_us = found;
}

static void shift(int64_t *seconds, int64_t *micros) {
  if (!offset_us)
    return;
  int64_t total = *seconds * MICRO + *micros + *offset_us;
  *seconds = total / MICRO;
  *micros = total % MICRO;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real)
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t seconds = now->tv_sec, micros = now->tv_nsec / 1000;
    shift(&seconds, &micros);
    now->tv_nsec = micros * 1000 + now->tv_nsec % 1000;
    now->tv_sec = seconds;
  }
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact))
    return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (result)
    *result = exact.tv_sec;
  return exact.tv_sec;
}
