/* A worker tells routers what its prefix index holds.
 *
 * Each live router session has a reader: a cursor in the changes that pages remembers. A session
 * that begins, or fell behind what is remembered, first gets the whole index, page by page; what
 * changes meanwhile is told before each piece, so that what was told is exact for all pages walked
 * so far. All of it is bounded: so many blocks per session and interval, whatever happens. A lost
 * or doubled message may cost a hit and nothing else. Control thread only. */
#ifndef CORE_PUBLISH_H
#define CORE_PUBLISH_H

#include "core/node.h"
#include "core/pages.h"

#define PUBLISH_INTERVAL_MS TICK_MS
#define PUBLISH_CREDIT      1024u /* blocks told to one session in an interval */
#define PUBLISH_SCAN        8192u /* pages a walk looks at in an interval */
#define PUBLISH_MESSAGES    4u    /* of one session in one step */
#define PUBLISH_OUT         4096u /* blocks told to all sessions in one step */

struct publish_reader {
    struct stream_id stream; /* of the session it is for */
    uint64_t cursor;         /* changes told */
    uint32_t walk;           /* next page; the number of pages: nothing to walk */
    uint32_t credit;
    uint32_t scan;
    bool is_reset_due;
    bool is_told; /* anything, on this session */
};

struct publisher {
    struct publish_reader *readers; /* [sessions_max] */
    uint64_t *stored;               /* [PUBLISH_OUT] what this step's messages point to */
    uint64_t *removed;
    uint32_t stored_used;
    uint32_t removed_used;
    uint32_t next; /* session that is served first */
    uint64_t told; /* changes that every reader has been told; nothing to do while it is the last */
    struct instant credited;
    uint64_t blocks_sent;
    uint64_t changes_dropped; /* that a reader did not get one by one: it was too slow */
    uint64_t walks;           /* whole indexes told */
};

void publisher_init(struct publisher *publisher, uint32_t sessions_max, struct arena *arena);
/* Last in a step; is_tick: a step for time. */
void publisher_step(struct publisher *publisher, struct node *node, const struct pages *pages,
                    bool is_tick, struct effects *out);

#endif
