/* Makes a failing schedule short: fewer clients, fewer faults, fewer processes, no jitter, as long
 * as it fails with the same sentence. Delta debugging over the list of what struck. */
#ifndef SIM_SHRINK_H
#define SIM_SHRINK_H

#include "sim/world.h"

struct shrunk {
    struct schedule schedule; /* the shortest found; schedule_fini frees it */
    bool is_same;             /* it fails like the one that was given */
    uint32_t runs;
    uint32_t clients_before, faults_before;
    uint32_t clients, faults;
    double seconds;
};

/* sentence: how the schedule fails. Stops after `seconds`. Prints nothing. */
struct shrunk sim_shrink(const struct schedule *schedule, const char *sentence, double seconds);
/* Runs a schedule with stderr closed, so that a CHECK's own words do not fill the screen. */
const char *sim_run_silently(const struct schedule *schedule, struct schedule *record,
                             char *sentence_out);
double sim_seconds_now(void);

#endif
