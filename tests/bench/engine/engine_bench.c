/* How near the engine comes to this machine's own limits, both measured in the same run:
 *
 *     engine_bench MODEL_DIRECTORY [THREADS [BACKEND [file|int8 [MEASUREMENT...]]]]
 *
 * BACKEND is a name of kernels_select, or "best"; int8 rounds the weights. Limits: reading a large
 * array (bytes/s), independent multiply-adds of the widest kind that the processor has, and those
 * of its matrix or byte instructions (operations/s). Without MEASUREMENT: decode steps of 1, 4 and
 * 16 rows and one prefill of 512 tokens, each the best of a few repetitions. The named ones are
 * means, as the peers' own benchmarks print them, one line "name number" each: "limits", "prefill"
 * (512 tokens at once), "decodeN" (N rows: a prompt of 16 tokens each, then 16 steps; N = 1: 32
 * steps from nothing), "deepN" (one row, 16 steps behind N tokens). Other processes on the machine
 * spoil the numbers: the share of processor time that went elsewhere is printed. */
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
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PREFILL      512u
#define ROWS_MAX     32u
#define BATCH_ROWS   16u /* tokens of a prompt, and steps after it, of a measured batch */
#define ALONE_STEPS  32u
#define REPEATS      12
#define MEAN_REPEATS 2
#define MEAN_SECONDS 0.25 /* a tiny model is done before a neighbour has let go of the core */
#define PAGES_ROW    33u
#define READ_CHUNK   ((size_t)1 << 20)
#define READ_WINDOW  ((size_t)64 << 20)

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

#if defined(__x86_64__)
/* Sixteen lanes of four byte products each. */
__attribute__((target("avx512f,avx512vnni"))) static void bytes_part(void *context, uint32_t part,
                                                                     uint32_t worker) {
    (void)part;
    struct limits *limits = context;
    __m512i chains[12];
    __m512i by = _mm512_set1_epi8(3);
    for (int i = 0; i < 12; i++) {
        chains[i] = _mm512_set1_epi32(i);
    }
    for (uint32_t n = 0; n < FMA_ROUNDS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            chains[i] = _mm512_dpbusd_epi32(chains[i], by, by);
        }
    }
    for (int i = 0; i < 12; i++) {
        limits->sink[worker] += _mm512_reduce_add_epi32(chains[i]);
    }
}

/* Sixteen lanes of two half products each. */
__attribute__((target("avx512f,avx512bf16"))) static void halves_part(void *context, uint32_t part,
                                                                      uint32_t worker) {
    (void)part;
    struct limits *limits = context;
    __m512 chains[12];
    __m512bh by = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int i = 0; i < 12; i++) {
        chains[i] = _mm512_set1_ps((float)i);
    }
    for (uint32_t n = 0; n < FMA_ROUNDS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            chains[i] = _mm512_dpbf16_ps(chains[i], by, by);
        }
    }
    float lanes[16];
    for (int i = 0; i < 12; i++) {
        _mm512_storeu_ps(lanes, chains[i]);
        limits->sink[worker] += (double)lanes[0];
    }
}

/* Four tiles, as independent as the processor's own guide asks for: 16 x 16 sums of 64 bytes (or
 * 32 halves) each. */
#define TILE_ROUNDS 100000u
__attribute__((target("amx-tile,amx-int8,amx-bf16"))) static void
tiles_run(struct limits *limits, uint32_t worker, bool is_bytes) {
    struct {
        uint8_t palette;
        uint8_t start_row;
        uint8_t reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    _Alignas(64) unsigned char data[1024] = {0};
    _Alignas(64) float sums[256];
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
    _tile_loadd(4, data, 64);
    _tile_loadd(5, data, 64);
    _tile_loadd(6, data, 64);
    _tile_loadd(7, data, 64);
    for (uint32_t n = 0; n < TILE_ROUNDS; n++) {
        if (is_bytes) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    limits->sink[worker] += (double)sums[0];
    _tile_release();
}
__attribute__((target("amx-tile,amx-int8,amx-bf16"))) static void
byte_tiles_part(void *context, uint32_t part, uint32_t worker) {
    (void)part;
    tiles_run(context, worker, true);
}
__attribute__((target("amx-tile,amx-int8,amx-bf16"))) static void
half_tiles_part(void *context, uint32_t part, uint32_t worker) {
    (void)part;
    tiles_run(context, worker, false);
}

/* Whether the processor has matrix tiles and the system lets this process use them. */
static bool tiles_are_there(void) {
    unsigned int a = 0;
    unsigned int b = 0;
    unsigned int c = 0;
    unsigned int d = 0;
    const unsigned int all = 1u << 22 | 1u << 24 | 1u << 25; /* bf16, tile, int8 */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & all) == all &&
           syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
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

/* The most operations per second that the part reaches; it does `operations` of them. */
static double measure_part(struct team *team, team_fn part, double operations) {
    struct limits limits = {0};
    double best = 0;
    for (int i = 0; i < REPEATS; i++) {
        struct instant start = clock_now();
        team_run(team, team_threads(team), part, &limits);
        best = best_seconds(best, span_to_seconds(instant_since(clock_now(), start)));
    }
    return operations * team_threads(team) / best;
}

/* Operations per second: multiply-adds of F32, and products with weights of the two short types by
 * the best instruction that there is for them. 0 where nothing is known. */
struct peaks {
    double f32;
    double bf16;
    double int8;
};

static struct peaks measure_peaks(struct team *team) {
    struct peaks peaks = {0};
#if defined(__x86_64__)
    const double rounds = 2.0 * 12 * FMA_ROUNDS;
    if (kernels_select("avx2") == NULL) {
        return peaks;
    }
    bool is_wide = kernels_select("avx512") != NULL;
    peaks.f32 = measure_part(team, is_wide ? wide_fma_part : fma_part, rounds * (is_wide ? 16 : 8));
    peaks.bf16 = peaks.f32;
    peaks.int8 = peaks.f32;
    if (is_wide && __builtin_cpu_supports("avx512vnni")) {
        peaks.int8 = measure_part(team, bytes_part, rounds * 64);
    }
    if (kernels_select("avx512bf16") != NULL) {
        peaks.bf16 = measure_part(team, halves_part, rounds * 32);
    }
    if (tiles_are_there()) {
        peaks.int8 = measure_part(team, byte_tiles_part, 2.0 * 4 * 16384 * TILE_ROUNDS);
        peaks.bf16 = measure_part(team, half_tiles_part, 2.0 * 4 * 8192 * TILE_ROUNDS);
    }
#else
    (void)team;
#endif
    return peaks;
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

/* One step of `rows` rows of `count` tokens each, at `position`; returns its seconds. */
static double step_run(struct bench *bench, uint32_t rows, uint32_t position, uint32_t count) {
    static struct plan_row plan_rows[ROWS_MAX];
    static uint32_t tokens[PREFILL];
    static uint32_t pages[PAGES_ROW * ROWS_MAX];
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
            pages[r * row_pages + i] = r * PAGES_ROW + i;
        }
    }
    for (uint32_t i = 0; i < rows * count; i++) {
        tokens[i] = i * 7919 % bench->info->vocab_count;
    }
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
    double seconds = bench->seconds;
    CHECK(pthread_mutex_unlock(&bench->lock) == 0);
    return seconds;
}

static double measure_best(struct bench *bench, uint32_t rows, uint32_t position, uint32_t count) {
    double best = 0;
    struct instant enough = instant_add(clock_now(), span_ms(1500));
    for (int i = 0; i < 3 || (i < 100 && !instant_reached(clock_now(), enough)); i++) {
        best = best_seconds(best, step_run(bench, rows, position, count));
    }
    return best;
}

/* Tokens per second of the prefill, after one that warms up. */
static double mean_prefill(struct bench *bench) {
    double seconds = 0;
    int repeats = 0;
    (void)step_run(bench, 1, 0, PREFILL);
    for (; repeats < MEAN_REPEATS || seconds < MEAN_SECONDS; repeats++) {
        seconds += step_run(bench, 1, 0, PREFILL);
    }
    return repeats * (double)PREFILL / seconds;
}

/* Tokens per second of decoding, by the clock from the first step's submission to the last's end.
 */
static double mean_decode(struct bench *bench, uint32_t rows) {
    uint32_t first = rows == 1 ? 0 : BATCH_ROWS;
    uint32_t steps = rows == 1 ? ALONE_STEPS : BATCH_ROWS;
    (void)step_run(bench, rows, 0, rows == 1 ? 1 : BATCH_ROWS);
    double seconds = 0;
    int repeats = 0;
    for (; repeats < MEAN_REPEATS || seconds < MEAN_SECONDS; repeats++) {
        struct instant start = clock_now();
        for (uint32_t i = 0; i < steps; i++) {
            (void)step_run(bench, rows, first + i, 1);
        }
        seconds += span_to_seconds(instant_since(clock_now(), start));
    }
    return (double)repeats * rows * steps / seconds;
}

/* The same for one row whose context is long: zeros, which are read like any others. */
static double mean_deep(struct bench *bench, uint32_t depth) {
    double seconds = 0;
    int repeats = 0;
    (void)step_run(bench, 1, depth, 1);
    for (; repeats < MEAN_REPEATS || seconds < MEAN_SECONDS; repeats++) {
        for (uint32_t i = 0; i < BATCH_ROWS; i++) {
            seconds += step_run(bench, 1, depth + i, 1);
        }
    }
    return (double)repeats * BATCH_ROWS / seconds;
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

/* What one step costs: bytes of weights that it reads (all, less the embedding where the head has
 * its own), and operations for a row of it and for the prefill. */
struct costs {
    double bytes;
    double row;
    double prefill;
};

static struct costs costs_make(const struct model_info *info) {
    double vocab = (double)info->vocab_count * info->hidden;
    double used = (double)info->parameter_count - (info->is_tied ? 0 : vocab);
    double attention =
        4.0 * info->layer_count * info->heads * info->head_dim * PREFILL * (PREFILL + 1) / 2;
    return (struct costs){.bytes =
                              (double)info->weight_bytes * used / (double)info->parameter_count,
                          .row = 2.0 * used,
                          .prefill = 2.0 * (used - vocab) * PREFILL + 2.0 * vocab + attention};
}

/* Behind how many tokens the pool and the model's context leave room for some steps. */
static uint32_t depth_most(const struct model_info *info) {
    uint32_t most = ROWS_MAX * PAGES_ROW * 16;
    most = most < info->context_tokens ? most : info->context_tokens;
    return most > BATCH_ROWS ? most - BATCH_ROWS : 0;
}

static void run_named(struct bench *bench, struct team *team, char **names, int count) {
    for (int i = 0; i < count; i++) {
        unsigned int rows = 0;
        if (strcmp(names[i], "limits") == 0) {
            struct costs costs = costs_make(bench->info);
            struct peaks peaks = measure_peaks(team);
            printf("read %.0f\nf32 %.0f\nbf16 %.0f\nint8 %.0f\nbytes %.0f\nrow %.0f\nprefill-cost "
                   "%.0f\n",
                   measure_read(team), peaks.f32, peaks.bf16, peaks.int8, costs.bytes, costs.row,
                   costs.prefill);
        } else if (strcmp(names[i], "prefill") == 0) {
            printf("prefill %.2f\n", mean_prefill(bench));
        } else if (sscanf(names[i], "decode%u", &rows) == 1 && rows >= 1 && rows <= ROWS_MAX) {
            printf("decode%u %.2f\n", rows, mean_decode(bench, rows));
        } else if (sscanf(names[i], "deep%u", &rows) == 1 && rows <= depth_most(bench->info)) {
            printf("deep%u %.2f\n", rows, mean_deep(bench, rows));
        } else {
            (void)fprintf(
                stderr,
                "engine_bench: MEASUREMENT %s is none of limits, prefill, decodeN (N from "
                "1 to %u), deepN (N up to %u for this model)\n",
                names[i], ROWS_MAX, depth_most(bench->info));
            exit(2);
        }
    }
}

static void run_all(struct bench *bench, struct team *team, const struct kernels *kernels) {
    double read = measure_read(team);
    struct peaks peaks = measure_peaks(team);
    struct costs costs = costs_make(bench->info);
    printf("%s, %.1f M parameters, %s by %s, %u threads\n", bench->info->name,
           (double)bench->info->parameter_count / 1e6, bench->info->numerics, kernels->name,
           team_threads(team));
    printf("limits: read %.1f GB/s, multiply-add %.1f GFLOP/s (F32), bf16 %.0f, int8 %.0f\n",
           read / 1e9, peaks.f32 / 1e9, peaks.bf16 / 1e9, peaks.int8 / 1e9);
    double prefill = measure_best(bench, 1, 0, PREFILL);
    double flops = costs.prefill / prefill;
    printf("prefill %u: %.1f tokens/s, %.1f GFLOP/s, %.0f %% of the F32 multiply-add limit\n",
           PREFILL, PREFILL / prefill, flops / 1e9, peaks.f32 > 0 ? 100 * flops / peaks.f32 : 0.0);
    static const uint32_t rows[] = {1, 4, 16};
    for (size_t i = 0; i < 3; i++) {
        double seconds = measure_best(bench, rows[i], 0, 1);
        printf("decode %2u: %.1f tokens/s, %.1f GB/s of weights, %.0f %% of the read limit\n",
               rows[i], rows[i] / seconds, costs.bytes / seconds / 1e9,
               100 * costs.bytes / seconds / read);
    }
}

static void run(struct bench *bench, const char *directory, uint32_t threads,
                const struct kernels *kernels, enum model_weights weights, char **names,
                int name_count) {
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
                                   .page_count = ROWS_MAX * PAGES_ROW,
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
    if (name_count > 0) {
        run_named(bench, team, names, name_count);
    } else {
        run_all(bench, team, kernels);
    }
    double wall = span_to_seconds(instant_since(clock_now(), start));
    double elsewhere = machine_seconds() - machine - ((double)clock() / CLOCKS_PER_SEC - own);
    printf(name_count > 0 ? "elsewhere %.2f\n" : "other processes used %.2f processors meanwhile\n",
           elsewhere / wall);
    team_destroy(team);
    engine_destroy(bench->engine);
    model_destroy(model);
    free(layout);
}

int main(int argc, char **argv) {
    bool is_int8 = argc >= 5 && strcmp(argv[4], "int8") == 0;
    if (argc < 2 || (argc >= 5 && !is_int8 && strcmp(argv[4], "file") != 0) || argv[1][0] == '-') {
        (void)fprintf(stderr, "usage: engine_bench MODEL_DIRECTORY [THREADS [BACKEND [file|int8 "
                              "[MEASUREMENT...]]]]\n");
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
        is_int8 ? MODEL_WEIGHTS_INT8 : MODEL_WEIGHTS_FILE, argv + 5, argc > 5 ? argc - 5 : 0);
    return 0;
}
