/* Private to wire: a worker's record inside other messages, and texts that travel as bytes. */
#ifndef WIRE_RECORD_H
#define WIRE_RECORD_H

#include <stdbool.h>
#include <stddef.h>

#include "wire/registry.h"

struct Baton__Registry__V1__WorkerRecord;
struct ProtobufCBinaryData;

/* Fills the generated struct with borrowed pointers into the record. False if it is no valid
 * record. */
bool worker_record_fill(const struct worker_record *from,
                        struct Baton__Registry__V1__WorkerRecord *to);
/* Copies; false if it is no valid record. NULL is none. */
bool worker_record_take(const struct Baton__Registry__V1__WorkerRecord *from,
                        struct worker_record *to);

/* Terminated within its array: what we may send. */
bool wire_text_is_valid(const char *text, size_t cap);
/* Copies len bytes and terminates; false if they do not fit or contain a NUL. */
bool wire_text_take(const uint8_t *from, size_t len, char *to, size_t cap);

#endif
