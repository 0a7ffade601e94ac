/* Normalizers: the changes a tokenizer.json makes to a text before it is cut into pieces. */
#ifndef TEXT_NORMALIZE_H
#define TEXT_NORMALIZE_H

#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "text/grow.h"

enum normal_kind {
    NORMAL_PREPEND, /* `to` in front of a text that is not empty */
    NORMAL_REPLACE, /* each `from` becomes `to` */
    NORMAL_NFC,     /* canonical composition */
};
struct normal {
    enum normal_kind kind;
    struct bytes from; /* not empty for NORMAL_REPLACE */
    struct bytes to;
};

/* Appends `text` with every `from` (not empty) replaced by `to`. */
MUST_USE enum status text_replace(struct grow *out, struct bytes text, struct bytes from,
                                  struct bytes to);
/* Appends the NFC form of well-formed UTF-8; scratch is the caller's, its content is void. Time is
 * linear in the text whatever its combining marks are. */
MUST_USE enum status text_nfc(struct grow *out, struct bytes text, struct grow *scratch);

/* Runs the steps in order. *result_out lies in `text`, `a` or `b`, which are overwritten. */
MUST_USE enum status text_normalize(const struct normal *steps, uint32_t count, struct bytes text,
                                    struct grow *a, struct grow *b, struct grow *scratch,
                                    struct bytes *result_out);

#endif
