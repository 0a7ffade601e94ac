/* Fail-the-n-th-effect: in small fixed worlds, every effect that can fail fails once, alone.
 *
 * A run without faults counts the opportunities of each kind; then each is struck in a run of its
 * own. One fault must not make a request fail, unless it is the request's own. */
#ifndef SIM_NTH_H
#define SIM_NTH_H

#include "sim/world.h"

/* seed: 0, or other clients and delays. False if a check failed (printed with the command that
 * replays it). */
bool sim_nth(uint64_t seed, bool is_verbose);
/* Two faults at a time, drawn, for so long. */
bool sim_pairs(uint64_t first, double seconds);
/* Says how a schedule failed, shrinks it and prints the command that replays it. */
void sim_report(const struct schedule *schedule, const char *sentence, double shrink_seconds);

#endif
