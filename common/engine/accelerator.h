/* An accelerator: a device table's shared object, loaded at run time, and one device opened.
 *
 * Nothing of it is needed to run on the CPU: where the object, its libraries, the driver or the
 * device is missing, accelerator_open says so in one sentence and nothing is left behind. Opened
 * and closed by one thread; used by one thread at a time, the step thread once an engine runs. */
#ifndef ENGINE_ACCELERATOR_H
#define ENGINE_ACCELERATOR_H

#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"
#include "kernels/device.h"

struct accelerator {
    const struct device_table *table;
    struct device *device;
    struct device_info info;
    void *library;
    unsigned char *staging; /* pinned, ACCELERATOR_STAGING bytes: for loads */
};

#define ACCELERATOR_LIBRARY "libbaton_cuda.so"
#define ACCELERATOR_STAGING (8u << 20)
/* The mark that loads use; the forward pass has the others. */
#define ACCELERATOR_MARK 0u

/* library: a path, or NULL for ACCELERATOR_LIBRARY beside the program, in ../lib/baton, or where
 * the system's loader looks. STATUS_NOT_FOUND: no object, no driver or no device;
 * STATUS_UNSUPPORTED: the object is of another version. */
MUST_USE enum status accelerator_open(const char *library, uint32_t index, struct writer *error,
                                      struct accelerator **accelerator_out);
/* Accepts NULL. Nothing of it may be in use. The object stays loaded. */
void accelerator_close(struct accelerator *accelerator);

/* Waits until a mark has passed. STATUS_TIMEOUT after `limit`; STATUS_IO if the device failed (its
 * failure() has the sentence). */
MUST_USE enum status accelerator_wait(struct accelerator *accelerator, uint32_t mark,
                                      struct span limit);

/* Copies host memory of any kind to the device and waits for it. For start-up. */
MUST_USE enum status accelerator_load(struct accelerator *accelerator, void *to, const void *from,
                                      uint64_t bytes);

#endif
