/* How well a model predicts a text, as this engine computes it:
 *
 *     engine_perplexity MODEL_DIRECTORY IDS_FILE [int8]
 *
 * IDS_FILE: token ids of a text, separated by white space; tools/golden/perplexity.py writes one
 * and says what transformers finds for it. Prints e^(mean negative log-probability of each token
 * after those before it). One token a step, so also the decode path is what is measured. */
#include "base/check.h"
#include "engine/forward.h"
#include "engine/model.h"
#include "engine/team.h"
#include "kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS_MAX  8192u
#define PAGE_TOKENS 16u

/* Natural logarithm of the softmax of one logit. */
static double log_probability(const float *logits, uint32_t count, uint32_t chosen) {
    double largest = (double)logits[0];
    for (uint32_t i = 1; i < count; i++) {
        largest = fmax(largest, (double)logits[i]);
    }
    double total = 0;
    for (uint32_t i = 0; i < count; i++) {
        total += exp((double)logits[i] - largest);
    }
    return (double)logits[chosen] - largest - log(total);
}

static uint32_t ids_read(const char *path, uint32_t vocab, uint32_t *to) {
    FILE *file = fopen(path, "re");
    uint32_t count = 0;
    unsigned id = 0;
    while (file != NULL && count < TOKENS_MAX && fscanf(file, "%u", &id) == 1 && id < vocab) {
        to[count++] = id;
    }
    if (file == NULL || !feof(file) || count < 2) {
        (void)fprintf(stderr,
                      "engine_perplexity: %s must hold 2 to %u token ids below %u; number %u is "
                      "not one\n",
                      path, TOKENS_MAX, vocab, count + 1);
        exit(1);
    }
    (void)fclose(file);
    return count;
}

int main(int argc, char **argv) {
    bool is_int8 = argc == 4 && strcmp(argv[3], "int8") == 0;
    if (argc < 3 || argc > 4 || (argc == 4 && !is_int8)) {
        (void)fprintf(stderr, "usage: engine_perplexity MODEL_DIRECTORY IDS_FILE [int8]\n");
        return 2;
    }
    char text[512];
    struct writer error;
    struct model *model = NULL;
    writer_init(&error, text, sizeof(text));
    if (model_create(argv[1], kernels_select(NULL),
                     is_int8 ? MODEL_WEIGHTS_INT8 : MODEL_WEIGHTS_FILE, &error,
                     &model) != STATUS_OK) {
        (void)fprintf(stderr, "engine_perplexity: %.*s\n", (int)error.len, text);
        return 1;
    }
    static uint32_t ids[TOKENS_MAX];
    static uint32_t pages[TOKENS_MAX / PAGE_TOKENS];
    uint32_t count = ids_read(argv[2], model_info(model)->vocab_count, ids);
    for (uint32_t i = 0; i < TOKENS_MAX / PAGE_TOKENS; i++) {
        pages[i] = i;
    }
    static struct kv_layout layout;
    struct team *team = NULL;
    CHECK(model_layout(model, PAGE_TOKENS, &layout) == STATUS_OK);
    CHECK(team_create(1, &team) == STATUS_OK);
    size_t bytes = (size_t)layout.page_bytes * (count / PAGE_TOKENS + 1);
    unsigned char *kv = aligned_alloc(64, (bytes + 63) / 64 * 64);
    CHECK(kv != NULL);
    struct forward *forward = forward_create(&(struct forward_config){
        .model = model, .layout = &layout, .kv = kv, .team = team, .rows_max = 1, .tokens_max = 1});
    double total = 0;
    for (uint32_t i = 0; i + 1 < count; i++) {
        struct plan_row row = {.position = i,
                               .token_count = 1,
                               .token_first = i,
                               .page_count = i / PAGE_TOKENS + 1,
                               .is_sampled = true};
        struct forward_input input = {.rows = &row, .row_count = 1, .tokens = ids, .pages = pages};
        forward_run(forward, &input, NULL, NULL);
        total -=
            log_probability(forward_logits(forward, 0), model_info(model)->vocab_count, ids[i + 1]);
    }
    printf("%s %s: %u tokens, perplexity %.4f\n", model_info(model)->name,
           model_info(model)->numerics, count, exp(total / (count - 1)));
    forward_destroy(forward);
    team_destroy(team);
    model_destroy(model);
    free(kv);
    return 0;
}
