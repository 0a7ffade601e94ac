/* Session messages: struct message <-> one Envelope of proto/baton/v1/peer.proto.
 *
 * Encode and decode hold the same facts about a message (message_is_valid in session.c): what one
 * of our cores may say is exactly what a peer may make us believe. Bytes of a newer peer decode as
 * long as they only add fields. Pure apart from the memory; any thread. */
#ifndef WIRE_SESSION_H
#define WIRE_SESSION_H

#include "base/bytes.h"
#include "base/status.h"
#include "core/message.h"
#include "wire/memory.h"

/* Replaces the buffer's contents with the encoded message.
 * Returns STATUS_INVALID if the message breaks a bound of core/message.h, STATUS_RANGE if it would
 * be larger than WIRE_MESSAGE_MAX, STATUS_BUSY without memory; the buffer is then empty. */
MUST_USE enum status wire_session_encode(const struct message *message, struct wire_buffer *out);

/* Decodes one Envelope. Pointers in out lead into the arena and live until wire_arena_reset; the
 * input is not kept. Numbers a zero id, a count past its maximum, a text without its bound, arrays
 * of unequal length, NaN, a value or enum out of range as malformed.
 * Returns STATUS_UNSUPPORTED for a kind this version does not know, STATUS_CORRUPT for malformed
 * bytes and STATUS_RANGE for more than WIRE_MESSAGE_MAX. */
MUST_USE enum status wire_session_decode(struct bytes bytes, struct wire_arena *arena,
                                         struct message *out);

#endif
