/* A folder of our own for decoders that read files by name: made once, in memory where there is
 * /dev/shm, removed when the process ends. One thread. */
#ifndef TESTS_FUZZ_FOLDER_H
#define TESTS_FUZZ_FOLDER_H

#include "base/bytes.h"

/* Its path. */
const char *folder_path(void);
/* Replaces a file. */
void folder_write(const char *name, struct bytes bytes);
void folder_remove(const char *name);

#endif
