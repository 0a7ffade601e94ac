/* How near the engine comes to this machine's own limits, both measured in the same run:
 *
 *     engine_bench MODEL_DIRECTORY [THREADS [BACKEND [int8]]]
 *
 * BACKEND is a name of kernels_select, or "best"; int8 rounds the weights. Limits: reading a large
 * array (bytes/s), and independent multiply-adds of the widest kind that the processor has
 * (FLOP/s). Engine: decode steps of 1, 4 and 16 rows, and one prefill of 512 tokens. Each is the
 * best of a few repetitions; a few seconds in all. Other processes on the machine spoil the
 * numbers: the share of processor time that went elsewhere is printed. */
#include "base/check.h"
#include "engine/engine.h"
#include "engine/team.h"
#include "kernels/kernels.h"
#include "runtime/clock.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PREFILL     512u
#define ROWS_MAX    16u
#define REPEATS     12
#define READ_CHUNK  ((size_t)1 << 20)
#define READ_WINDOW ((size_t)64 << 20)

static double best_seconds(double best, double seconds) {
    return best == 0 || seconds < best ? seconds : best;
}

/* ---- limits ---- */

struct limits {
    const uint64_t *data;
    double sink[64];
};

/* Four places of the chunk at once, and ahead of the processor's own prefetchers, as the engine
 * does. */
#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t read_chunk(const uint64_t *from) {
    const size_t quarter = READ_CHUNK / 8 / 4;
    __m256i sum[8];
    uint64_t lanes[4];
    memset(sum, 0, sizeof(sum));
    for (size_t i = 0; i < quarter; i += 8) {
#pragma GCC unroll 4
        for (size_t q = 0; q < 4; q++) {
            const uint64_t *at = from + q * quarter + i;
            __builtin_prefetch(at + 512);
            const __m256i *pair = (const __m256i *)(const void *)at;
            sum[q] = _mm256_add_epi64(sum[q], _mm256_load_si256(pair));
            sum[q + 4] = _mm256_add_epi64(sum[q + 4], _mm256_load_si256(pair + 1));
        }
    }
    for (int i = 1; i < 8; i++) {
        sum[0] = _mm256_add_epi64(sum[0], sum[i]);
    }
    _mm256_storeu_si256((__m256i *)(void *)lanes, sum[0]);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}
#else
static uint64_t read_chunk(const uint64_t *from) {
    uint64_t sum[4] = {0};
    for (size_t i = 0; i < READ_CHUNK / 8; i++) {
        sum[i % 4] += from[i];
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}
#endif

static void read_part(void *context, uint32_t part, uint32_t worker) {
    struct limits *limits = context;
    limits->sink[worker] += (double)read_chunk(limits->data + part * (READ_CHUNK / 8));
}

#if defined(__x86_64__)
#define FMA_ROUNDS 1000000u
/* Twelve chains of eight lanes: enough to hide the latency of every AVX2 core. */
__attribute__((target("avx2,fma"))) static void fma_part(void *context, uint32_t part,
                                                         uint32_t worker) {
    (void)part;
    struct limits *limits = context;
    __m256 chains[12];
    __m256 by = _mm256_set1_ps(0.999f);
    for (int i = 0; i < 12; i++) {
        chains[i] = _mm256_set1_ps((float)i);
    }
    for (uint32_t n = 0; n < FMA_ROUNDS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            chains[i] = _mm256_fmadd_ps(chains[i], by, by);
        }
    }
    float lanes[8];
    for (int i = 0; i < 12; i++) {
        _mm256_storeu_ps(lanes, chains[i]);
        limits->sink[worker] += (double)lanes[0];
    }
}
#endif

#if defined(__x86_64__)
/* The same with sixteen lanes. */
__attribute__((target("avx512f"))) static void wide_fma_part(void *context, uint32_t part,
                                                             uint32_t worker) {
    (void)part;
    struct limits *limits = context;
    __m512 chains[12];
    __m512 by = _mm512_set1_ps(0.999f);
    for (int i = 0; i < 12; i++) {
        chains[i] = _mm512_set1_ps((float)i);
    }
    for (uint32_t n = 0; n < FMA_ROUNDS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            chains[i] = _mm512_fmadd_ps(chains[i], by, by);
        }
    }
    float lanes[16];
    for (int i = 0; i < 12; i++) {
        _mm512_storeu_ps(lanes, chains[i]);
        limits->sink[worker] += (double)lanes[0];
    }
}
#endif

static double measure_read(struct team *team) {
    size_t bytes = (size_t)512 << 20;
    uint64_t *data = aligned_alloc((size_t)2 << 20, bytes);
    CHECK(data != NULL);
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* as the weights are */
    memset(data, 1, bytes);
    /* Window by window, so that the best one was hardly interrupted. */
    struct limits limits = {0};
    double best = 0;
    for (size_t i = 0; i < REPEATS * bytes / READ_WINDOW; i++) {
        limits.data = data + i % (bytes / READ_WINDOW) * (READ_WINDOW / 8);
        struct instant start = clock_now();
        team_run(team, READ_WINDOW / READ_CHUNK, read_part, &limits);
        best = best_seconds(best, span_to_seconds(instant_since(clock_now(), start)));
    }
    free(data);
    return (double)READ_WINDOW / best;
}

static double measure_fma(struct team *team) {
#if defined(__x86_64__)
    struct limits limits = {0};
    double best = 0;
    bool is_wide = kernels_select("avx512") != NULL;
    for (int i = 0; i < REPEATS && kernels_select("avx2") != NULL; i++) {
        struct instant start = clock_now();
        team_run(team, team_threads(team), is_wide ? wide_fma_part : fma_part, &limits);
        best = best_seconds(best, span_to_seconds(instant_since(clock_now(), start)));
    }
    return best == 0 ? 0 : 2.0 * (is_wide ? 16 : 8) * 12 * FMA_ROUNDS * team_threads(team) / best;
#else
    (void)team;
    return 0;
#endif
}

/* ---- the engine ---- */

struct bench {
    const struct model_info *info;
    struct engine *engine;
    pthread_mutex_t lock; /* guards the two below */
    pthread_cond_t changed;
    bool is_ended;
    double seconds;
    uint64_t number;
};

static void on_step(void *context, uint64_t step, enum status status,
                    const struct step_result *results, uint32_t count, struct span elapsed) {
    struct bench *bench = context;
    (void)step;
    for (uint32_t i = 0; i < count; i++) {
        CHECK(results[i].is_valid);
    }
    CHECK_OP(status, ==, STATUS_OK);
    CHECK(pthread_mutex_lock(&bench->lock) == 0);
    bench->seconds = span_to_seconds(elapsed);
    bench->is_ended = true;
    CHECK(pthread_cond_signal(&bench->changed) == 0);
    CHECK(pthread_mutex_unlock(&bench->lock) == 0);
}

/* `rows` rows of `count` tokens each, at `position`; returns the best time. */
static double measure_step(struct bench *bench, uint32_t rows, uint32_t position, uint32_t count) {
    static struct plan_row plan_rows[ROWS_MAX];
    static uint32_t tokens[PREFILL * ROWS_MAX];
    static uint32_t pages[64 * ROWS_MAX];
    uint32_t row_pages = (position + count + 15) / 16;
    const struct sampling greedy = {.top_p = 1, .top_k = -1, .repetition_penalty = 1};
    for (uint32_t r = 0; r < rows; r++) {
        plan_rows[r] = (struct plan_row){.entry = r,
                                         .position = position,
                                         .token_count = count,
                                         .token_first = r * count,
                                         .page_first = r * row_pages,
                                         .page_count = row_pages,
                                         .is_sampled = true,
                                         .output_first = position + count,
                                         .sampling = &greedy};
        for (uint32_t i = 0; i < row_pages; i++) {
            pages[r * row_pages + i] = r * 33 + i;
        }
    }
    for (uint32_t i = 0; i < rows * count; i++) {
        tokens[i] = i * 7919 % bench->info->vocab_count;
    }
    double best = 0;
    struct instant enough = instant_add(clock_now(), span_ms(1500));
    for (int i = 0; i < 3 || (i < 100 && !instant_reached(clock_now(), enough)); i++) {
        struct step_plan plan = {.number = ++bench->number,
                                 .row_count = rows,
                                 .token_count = rows * count,
                                 .page_count = rows * row_pages,
                                 .rows = plan_rows,
                                 .tokens = tokens,
                                 .pages = pages};
        bench->is_ended = false;
        engine_submit(bench->engine, &plan);
        CHECK(pthread_mutex_lock(&bench->lock) == 0);
        while (!bench->is_ended) {
            CHECK(pthread_cond_wait(&bench->changed, &bench->lock) == 0);
        }
        best = best_seconds(best, bench->seconds);
        CHECK(pthread_mutex_unlock(&bench->lock) == 0);
    }
    return best;
}

/* Processor seconds that all processes, and this one, have used. */
static double machine_seconds(void) {
    unsigned long long user = 0;
    unsigned long long nice = 0;
    unsigned long long system = 0;
    FILE *file = fopen("/proc/stat", "re");
    if (file != NULL) {
        if (fscanf(file, "cpu %llu %llu %llu", &user, &nice, &system) != 3) {
            user = nice = system = 0;
        }
        (void)fclose(file);
    }
    return (double)(user + nice + system) / 100.0;
}

static void run(struct bench *bench, const char *directory, uint32_t threads,
                const struct kernels *kernels, enum model_weights weights) {
    char text[512];
    struct writer error;
    struct model *model = NULL;
    writer_init(&error, text, sizeof(text));
    if (model_create(directory, kernels, weights, &error, &model) != STATUS_OK) {
        (void)fprintf(stderr, "engine_bench: %.*s\n", (int)error.len, text);
        exit(1);
    }
    bench->info = model_info(model);
    struct kv_layout *layout = malloc(sizeof(*layout));
    CHECK(layout != NULL && model_layout(model, 16, layout) == STATUS_OK);
    struct engine_config config = {.model = model,
                                   .layout = layout,
                                   .page_count = ROWS_MAX * 33 + 1,
                                   .threads = threads,
                                   .rows_max = ROWS_MAX,
                                   .tokens_max = PREFILL,
                                   .on_step = on_step,
                                   .context = bench};
    if (engine_create(&config, &error, &bench->engine) != STATUS_OK) {
        (void)fprintf(stderr, "engine_bench: %.*s\n", (int)error.len, text);
        exit(1);
    }
    struct team *team = NULL;
    CHECK(team_create(threads, &team) == STATUS_OK);
    struct instant start = clock_now();
    double machine = machine_seconds();
    double own = (double)clock() / CLOCKS_PER_SEC;
    double read = measure_read(team);
    double fma = measure_fma(team);
    printf("%s, %.1f M parameters, %s by %s, %u threads\n", bench->info->name,
           (double)bench->info->parameter_count / 1e6, bench->info->numerics, kernels->name,
           threads);
    printf("limits: read %.1f GB/s, multiply-add %.1f GFLOP/s\n", read / 1e9, fma / 1e9);
    /* What a step of one row reads: all weights, less the embedding where the head has its own. */
    double vocab = (double)bench->info->vocab_count * bench->info->hidden;
    double used = (double)bench->info->parameter_count - (bench->info->is_tied ? 0 : vocab);
    double bytes = (double)bench->info->weight_bytes * used / (double)bench->info->parameter_count;
    double prefill = measure_step(bench, 1, 0, PREFILL);
    double layers = 2.0 * (used - vocab) * PREFILL + 2.0 * vocab;
    double attention = 4.0 * bench->info->layer_count * bench->info->heads * bench->info->head_dim *
                       PREFILL * (PREFILL + 1) / 2;
    double flops = (layers + attention) / prefill;
    printf("prefill %u: %.1f tokens/s, %.1f GFLOP/s, %.0f %% of the multiply-add limit\n", PREFILL,
           PREFILL / prefill, flops / 1e9, fma > 0 ? 100 * flops / fma : 0.0);
    static const uint32_t rows[] = {1, 4, 16};
    for (size_t i = 0; i < 3; i++) {
        double seconds = measure_step(bench, rows[i], 0, 1);
        printf("decode %2u: %.1f tokens/s, %.1f GB/s of weights, %.0f %% of the read limit\n",
               rows[i], rows[i] / seconds, bytes / seconds / 1e9, 100 * bytes / seconds / read);
    }
    double wall = span_to_seconds(instant_since(clock_now(), start));
    double elsewhere = machine_seconds() - machine - ((double)clock() / CLOCKS_PER_SEC - own);
    printf("other processes used %.2f processors meanwhile\n", elsewhere / wall);
    team_destroy(team);
    engine_destroy(bench->engine);
    model_destroy(model);
    free(layout);
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 5 || (argc == 5 && strcmp(argv[4], "int8") != 0) || argv[1][0] == '-') {
        (void)fprintf(stderr, "usage: engine_bench MODEL_DIRECTORY [THREADS [BACKEND [int8]]]\n");
        return 2;
    }
    unsigned long threads = argc >= 3 ? strtoul(argv[2], NULL, 10) : 1;
    if (threads < 1 || threads > ENGINE_THREADS_MAX) {
        (void)fprintf(stderr, "engine_bench: THREADS must be from 1 to %u\n", ENGINE_THREADS_MAX);
        return 2;
    }
    const struct kernels *kernels =
        kernels_select(argc >= 4 && strcmp(argv[3], "best") != 0 ? argv[3] : NULL);
    if (kernels == NULL) {
        (void)fprintf(stderr, "engine_bench: BACKEND %s is unknown, or not for this processor\n",
                      argv[3]);
        return 2;
    }
    struct bench bench = {0};
    CHECK(pthread_mutex_init(&bench.lock, NULL) == 0);
    CHECK(pthread_cond_init(&bench.changed, NULL) == 0);
    run(&bench, argv[1], (uint32_t)threads, kernels,
        argc == 5 ? MODEL_WEIGHTS_INT8 : MODEL_WEIGHTS_FILE);
    return 0;
}
