/* The *.safetensors files of a model directory as one checked table of tensors.
 *
 * Maps the files read-only and checks every header number against the file before anything is
 * read: lengths, shapes, types, ranges, overlap, holes, duplicates. Files must not be truncated
 * while they are open (they are open only while the model loads). One thread. */
#ifndef ENGINE_CHECKPOINT_H
#define ENGINE_CHECKPOINT_H

#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

#define CHECKPOINT_RANK_MAX   8u
#define CHECKPOINT_HEADER_MAX (16u << 20) /* bytes of one header; real ones stay below one MiB */

struct checkpoint;

struct checkpoint_tensor {
    const char *name;
    const char *file;  /* which shard, for messages */
    const char *dtype; /* as spelled in the file: "F32" */
    uint32_t rank;
    uint64_t shape[CHECKPOINT_RANK_MAX];
    const unsigned char *data; /* unaligned; lives until checkpoint_close */
    uint64_t bytes;
};

MUST_USE enum status checkpoint_open(const char *directory, struct writer *error,
                                     struct checkpoint **checkpoint_out);
/* Accepts NULL. */
void checkpoint_close(struct checkpoint *checkpoint);
uint32_t checkpoint_count(const struct checkpoint *checkpoint);
/* In order of name. */
const struct checkpoint_tensor *checkpoint_at(const struct checkpoint *checkpoint, uint32_t index);
/* NULL if there is none of that name. */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint,
                                                const char *name);
/* The index of a tensor that checkpoint_find returned. */
uint32_t checkpoint_index(const struct checkpoint *checkpoint,
                          const struct checkpoint_tensor *tensor);

#endif
