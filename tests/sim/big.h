/* The big world: 100, 1,000 and 10,000 requests live at once on one worker of each kind. */
#ifndef SIM_BIG_H
#define SIM_BIG_H

#include <stdbool.h>

/* Prints what each costs in the cores' own time and memory, and how long any stream waited. False
 * if a check failed, a stream was starved or not all requests were live at once. */
bool sim_big(void);

#endif
