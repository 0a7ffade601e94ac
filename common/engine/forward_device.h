/* The forward pass of one step on a device: forward.h's contract, for a model whose matrices are
 * in device memory.
 *
 * The device has a pool of its own, page by page the host's. Rows that a step writes are copied
 * back into the host's pool, layer by layer, on a queue beside the computing one; a layer is
 * reported, and its rows summed, once they are there. So the host's pool is complete for whoever
 * reads it, as it is without a device. Pages that somebody else wrote there are named by the input
 * and read before the step. The step thread enqueues a layer ahead and then waits for copies, so
 * that the device never waits for it. */
#ifndef ENGINE_FORWARD_DEVICE_H
#define ENGINE_FORWARD_DEVICE_H

#include "base/bytes.h"
#include "base/status.h"
#include "engine/forward.h"

struct forward_device;

/* STATUS_BUSY: no room; STATUS_UNSUPPORTED: a shape that the device does not compute; STATUS_IO,
 * STATUS_TIMEOUT: it failed. error: one sentence. */
MUST_USE enum status forward_device_create(const struct forward_config *config,
                                           struct writer *error, struct forward_device **out);
/* Accepts NULL. */
void forward_device_destroy(struct forward_device *forward);
bool forward_device_run(struct forward_device *forward, const struct forward_input *input,
                        forward_on_layer on_layer, void *context);
float *forward_device_logits(struct forward_device *forward, uint32_t n);
const char *forward_device_failure(const struct forward_device *forward);

#endif
