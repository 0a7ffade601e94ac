/* What goes wrong in one run, and how a run is named exactly.
 *
 * Every fault has a kind and is met at opportunities that are counted per kind: the n-th message,
 * the n-th engine step, the n-th client. Whether it strikes at one is drawn from (seed, kind, n)
 * alone, or read from a list. So a run's faults can be recorded, thinned out and replayed: the list
 * is the schedule, and the same draws decide whom and how long. Single-threaded, like all of sim.
 */
#ifndef SIM_SCHEDULE_H
#define SIM_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/prng.h"
#include "base/status.h"

enum fault {
    /* opportunity = client */
    FAULT_CLIENT = 0, /* it arrives at all: not a fault, but shrunk like one */
    FAULT_LEAVE,
    FAULT_ABORT,
    FAULT_DEADLINE,
    FAULT_STOP,
    FAULT_UNREAD, /* stops reading its answer */
    /* opportunity = effect */
    FAULT_TOKENIZE,      /* the prompt cannot be tokenized */
    FAULT_TOKENIZE_LATE, /* the tokenizer takes seconds */
    FAULT_REFUSED,       /* a stream cannot be opened */
    FAULT_SEND_LOST,     /* the stream breaks at this message, which is lost */
    FAULT_SEND_LAST,     /* the stream breaks behind this message */
    FAULT_SEND_LATE,     /* this message and all behind it are late */
    FAULT_SEND_BAD,      /* it arrives as bytes that are no message */
    FAULT_SEND_DEAF,     /* from here on nothing arrives in this direction, and nobody is told */
    FAULT_STEP,          /* an engine step fails */
    FAULT_STEP_SLOW,
    FAULT_ROW,   /* logits of a row were not finite */
    FAULT_LAYER, /* a layer's notice does not come */
    FAULT_ARM,   /* a slot cannot be armed */
    FAULT_DISARM_LATE,
    FAULT_CONNECT,          /* no link to D */
    FAULT_LINK_BUSY,        /* a KV send is refused at once */
    FAULT_LINK_ERROR,       /* a KV send ends with an error, then the link fails */
    FAULT_LINK_ERROR_FIRST, /* the link fails, then the sends end */
    FAULT_LINK_HANGS,       /* a KV send does not end until its endpoint is closed */
    FAULT_CLOSE_LATE,
    FAULT_CHUNK_LOST, /* the sender is told OK although the receiver dropped it */
    FAULT_CHUNK_BAD,
    FAULT_CHUNK_TWICE,
    FAULT_CHUNK_LATE,
    /* opportunity = one turn of any process */
    FAULT_TURN_CRASH,
    FAULT_TURN_PAUSE,
    /* opportunity = a moment drawn from the seed */
    FAULT_BREAK,     /* a stream */
    FAULT_STALL,     /* a stream, both directions, for seconds */
    FAULT_DEAF,      /* one direction of a stream, for good */
    FAULT_PARTITION, /* two processes: all their streams and KV, one or both directions */
    FAULT_CRASH,
    FAULT_PAUSE,
    FAULT_DRAIN,
    FAULT_ETCD_WIPE,   /* everything is deleted, and listed again after a while */
    FAULT_ETCD_OUTAGE, /* nothing is heard for long, then the whole list (compaction) */
    FAULT_ETCD_LEASE,  /* one worker's lease is lost though it lives */
    FAULT_FLOOD,       /* hundreds of requests at once that all leave at once */
    FAULT_COUNT
};
#define FAULT_TIMED_FIRST FAULT_BREAK

const char *fault_name(enum fault fault);

struct occurrence {
    uint32_t fault;
    uint32_t index;
};

/* Zeroed: the world and the faults that the seed draws. */
struct schedule {
    uint64_t seed;
    uint32_t world; /* 0: knobs drawn from the seed; else one of the small fixed worlds */
    bool is_listed; /* faults strike where the list says, and nowhere else */
    bool is_calm;   /* no jitter in any delay */
    bool is_strict; /* one fault at most: whatever it is, requests must still succeed */
    uint32_t routers, prefills, decodes; /* at most so many; 0 = as drawn */
    uint32_t prompt_max, new_max;        /* the same */
    struct occurrence *list;             /* sorted by (fault, index); owned by whoever fills it */
    uint32_t count;
    uint32_t capacity;
};

void schedule_add(struct schedule *schedule, enum fault fault, uint32_t index);
void schedule_sort(struct schedule *schedule);
bool schedule_has(const struct schedule *schedule, enum fault fault, uint32_t index);
/* A copy with a list of its own; schedule_fini frees it. */
struct schedule schedule_copy(const struct schedule *schedule);
void schedule_fini(struct schedule *schedule);
/* The text that schedule_read takes: "seed=7,calm,client=3+9,break=0". */
void schedule_write(const struct schedule *schedule, struct writer *writer);
/* STATUS_INVALID and a sentence (static) in *error_out if the text is no schedule. */
MUST_USE enum status schedule_read(const char *text, struct schedule *schedule_out,
                                   const char **error_out);

/* Everything that is drawn for one opportunity: the same numbers whatever else happens. */
static inline struct prng fault_draw(uint64_t seed, enum fault fault, uint32_t index) {
    return (struct prng){mix64(seed ^ mix64((uint64_t)fault << 32 | index))};
}

#endif
