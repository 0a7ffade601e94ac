#include "core/budget.h"

#define BUDGET_FIRST 64u

void budget_init(struct budget *budget, uint32_t tokens_max) {
    *budget = (struct budget){.tokens = tokens_max < BUDGET_FIRST ? tokens_max : BUDGET_FIRST,
                              .tokens_max = tokens_max};
}

void budget_learn(struct budget *budget, uint32_t tokens, struct span elapsed, struct span target) {
    if (tokens == 0 || elapsed.ns <= 0) {
        return;
    }
    int64_t each = elapsed.ns / tokens;
    budget->ns_per_token = budget->ns_per_token == 0 ? each : (7 * budget->ns_per_token + each) / 8;
    if (elapsed.ns > target.ns) {
        /* Too long: cut in proportion, by at most half, since one slow step may be an accident. */
        uint64_t cut = (uint64_t)((double)tokens * (double)target.ns / (double)elapsed.ns);
        uint64_t half = budget->tokens / 2;
        uint64_t next = cut < half ? half : cut;
        if (next < budget->tokens) {
            budget->tokens = next < 1 ? 1 : (uint32_t)next;
        }
    } else if (tokens >= budget->tokens && elapsed.ns < target.ns / 4 * 3) {
        /* Towards 7/8 of the plan, by at most half: what an accident cut is back in two steps, and
         * the work is not done in smaller pieces, each of which reads all weights, than need be. */
        uint64_t most = (uint64_t)budget->tokens + budget->tokens / 2 + 1;
        uint64_t aim = (uint64_t)((double)tokens * (double)target.ns * 7 / 8 / (double)elapsed.ns);
        uint64_t grown = aim < most ? aim : most;
        if (grown > budget->tokens) {
            budget->tokens = grown > budget->tokens_max ? budget->tokens_max : (uint32_t)grown;
        }
    }
}

uint32_t budget_backlog_ms(const struct budget *budget, uint64_t tokens) {
    double ms = (double)tokens * (double)budget->ns_per_token / 1e6;
    return ms > 1e9 ? 1000000000u : (uint32_t)ms;
}
