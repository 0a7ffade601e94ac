/* Growable scratch memory: the lists and texts between the steps of one encode call.
 *
 * Text lengths come from requests, so growth is limited and running out is a value, not an abort.
 */
#ifndef TEXT_GROW_H
#define TEXT_GROW_H

#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

#define GROW_BYTES_MAX (512u << 20)

struct grow {
    uint8_t *data; /* aligned for any object; may be NULL while cap is 0 */
    size_t len;
    size_t cap;
};

void grow_fini(struct grow *grow);
/* Makes room for `more` bytes behind len. STATUS_BUSY if there is no memory or it would be over
 * GROW_BYTES_MAX; nothing changes then. Pointers into data are void afterwards. */
MUST_USE enum status grow_reserve(struct grow *grow, size_t more);
/* Appends; text must not lie in the same buffer. */
MUST_USE enum status grow_put(struct grow *grow, const void *data, size_t len);

static inline struct bytes grow_bytes(const struct grow *grow) {
    return (struct bytes){grow->data, grow->len};
}

/* Texts that live as long as the store and never move. */
struct store_block;
struct store {
    struct store_block *blocks;
};

void store_fini(struct store *store);
/* Copies `text` (may be empty). STATUS_BUSY without memory. */
MUST_USE enum status store_copy(struct store *store, struct bytes text, struct bytes *out);

#endif
