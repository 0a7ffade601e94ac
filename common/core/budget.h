/* Step budget: how many tokens one engine step may compute so that it lasts about the planned time.
 *
 * An abort waits for at most the step that is running, if that computes for others too, so steps
 * are kept short (100 ms) whatever the model and machine. The budget is learnt from measured steps
 * only: cut in proportion when a step was too long, grown when a full step took less than three
 * quarters of the plan. It never changes any token, only how work is cut. */
#ifndef CORE_BUDGET_H
#define CORE_BUDGET_H

#include <stdint.h>

#include "base/time.h"

struct budget {
    uint32_t tokens; /* now, >= 1 */
    uint32_t tokens_max;
    int64_t ns_per_token; /* smoothed over steps; 0 = nothing measured yet */
};

void budget_init(struct budget *budget, uint32_t tokens_max);
/* A step of `tokens` took `elapsed`; `target` is its planned length. */
void budget_learn(struct budget *budget, uint32_t tokens, struct span elapsed, struct span target);
/* Milliseconds of work that `tokens` stand for at the measured speed; 0 before the first step. */
uint32_t budget_backlog_ms(const struct budget *budget, uint64_t tokens);

#endif
