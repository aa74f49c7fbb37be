/* A library for LD_PRELOAD. It counts the operations of a process on the files in $FAIL_FOLDER, notes each in the file
   $FAIL_LOG, and lets number $FAIL_AT fail with the error $FAIL_ERRNO. If that is 0, it kills the process there.
   Without $FAIL_FOLDER, it does nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int fails(const char *call, const char *path) {
  static atomic_int count;
  const char *folder = getenv("FAIL_FOLDER");
  if (!folder || strncmp(path, folder, strlen(folder)) != 0) return 0;
  char line[PATH_MAX + 32];
  int length = snprintf(line, sizeof line, "%s %s\n", call, path + strlen(folder));
  int log = syscall(SYS_openat, AT_FDCWD, getenv("FAIL_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
  syscall(SYS_write, log, line, length);
  syscall(SYS_close, log);
  if (atomic_fetch_add(&count, 1) + 1 != atoi(getenv("FAIL_AT"))) return 0;
  errno = atoi(getenv("FAIL_ERRNO"));
  if (errno == 0) raise(SIGKILL);
  return 1;
}

static int fails_on(const char *call, int descriptor) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fails(call, path);
}

#define OPEN(name)                                                  \
  int name(const char *path, int flags, ...) {                      \
    va_list more;                                                   \
    va_start(more, flags);                                          \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                   \
    return fails("open", path) ? -1 : REAL(name)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *data, size_t size) {
  return fails_on("write", file) ? -1 : REAL(write)(file, data, size);
}
int ftruncate64(int file, off64_t size) { return fails_on("truncate", file) ? -1 : REAL(ftruncate64)(file, size); }
int fsync(int file) { return fails_on("fsync", file) ? -1 : REAL(fsync)(file); }
int rename(const char *from, const char *to) { return fails("rename", to) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return fails("link", to) ? -1 : REAL(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
  return fails("link", to) ? -1 : REAL(linkat)(a, from, b, to, flags);
}
int unlink(const char *path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }
