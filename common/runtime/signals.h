/* Signals: blocked in every thread, and taken by one that waits for them. No handlers run.
 *
 * signals_block comes first in main, before any library may start a thread. */
#ifndef RUNTIME_SIGNALS_H
#define RUNTIME_SIGNALS_H

#include "base/time.h"

/* Blocks SIGTERM, SIGINT and SIGHUP for this thread and all that it starts; ignores SIGPIPE. */
void signals_block(void);
/* Waits for one of them; its number, or 0 at the deadline. A deadline in the past polls. */
int signals_wait(struct instant deadline);

#endif
