/* One small JSON object from a model directory. */
#ifndef ENGINE_JSON_FILE_H
#define ENGINE_JSON_FILE_H

#include <stddef.h>

#include "base/bytes.h"
#include "base/status.h"

struct json_t;

/* Reads and parses directory/name, an object of at most bytes_max bytes; duplicate keys are
 * refused. *object_out: the caller's reference. STATUS_NOT_FOUND, without a
 * sentence, if there is no such file: only the caller knows whether that matters. */
MUST_USE enum status json_file_read(const char *directory, const char *name, size_t bytes_max,
                                    struct json_t **object_out, struct writer *error);

#endif
