/* The engine on a device, over the emulated one (tests/support/cuda): golden answers, the same bits
 * in every batch, chunk and page map, rows that reach the host's pool in time, pages that come from
 * it, and a device that is missing, too small, wrong, or lost in the middle. */
#include "engine/accelerator.h"
#include "engine/engine.h"

#include "base/prng.h"
#include "kernels/kernels.h"
#include "support/cuda/control.h"
#include "unit/engine/driver.h"

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

/* The emulation is slow, and slower under sanitizers; whole workers tell all stories
 * (tests/integration/test_golden.py). */
#ifndef DEVICE_TEST_TOKENS
#define DEVICE_TEST_TOKENS 1000u
#endif

#define PAGES       200u
#define PAGE_TOKENS 16u

static struct accelerator *accelerator;
static struct emulation_control *control;

static struct model *device_model_as(const char *path, enum model_weights weights) {
    return driver_model_on(path, kernels_select("c"), accelerator, weights);
}
static struct model *device_model(const char *path) {
    return device_model_as(path, MODEL_WEIGHTS_FILE);
}

static void open_engine(struct driver *driver, const struct model *model, uint32_t page_tokens,
                        uint32_t threads, engine_on_row on_row) {
    driver_open(driver, &(struct driver_config){.model = model,
                                                .page_tokens = page_tokens,
                                                .page_count = PAGES,
                                                .threads = threads,
                                                .tokens_max = 1024,
                                                .on_row = on_row});
}

static int accelerator_setup(void **state) {
    (void)state;
    char text[512];
    struct writer error;
    writer_init(&error, text, sizeof(text));
    if (accelerator_open(BATON_EMULATED_DEVICE, 0, &error, &accelerator) != STATUS_OK) {
        print_error("%.*s\n", (int)error.len, text);
        return 1;
    }
    void *symbol = dlsym(accelerator->library, "emulation_control");
    emulation_control_fn get = NULL;
    memcpy(&get, &symbol, sizeof(get));
    if (get == NULL) {
        return 1;
    }
    control = get();
    return 0;
}
static int accelerator_teardown(void **state) {
    (void)state;
    accelerator_close(accelerator);
    return 0;
}

/* ---- answers ---- */

static void check_golden(const struct model *model, json_t *entries, size_t most,
                         double tolerance) {
    static struct sequence sequence;
    static struct batch batch;
    struct driver driver;
    open_engine(&driver, model, PAGE_TOKENS, 1, NULL);
    size_t index;
    json_t *entry;
    json_array_foreach(entries, index, entry) {
        if (index == most) {
            break;
        }
        json_t *prompt_ids = json_object_get(entry, "prompt_ids");
        json_t *greedy_ids = json_object_get(entry, "greedy_ids");
        json_t *logprobs = json_object_get(entry, "greedy_logprobs");
        uint32_t prompt[256];
        uint32_t count = (uint32_t)json_array_size(prompt_ids);
        for (uint32_t i = 0; i < count; i++) {
            prompt[i] = (uint32_t)json_integer_value(json_array_get(prompt_ids, i));
        }
        uint32_t pages[32];
        for (uint32_t i = 0; i < 32; i++) {
            pages[i] = (i * 7 + (uint32_t)index) % PAGES;
        }
        sequence_init(&sequence, prompt, count, pages, 32);
        for (uint32_t i = 0; i < json_array_size(greedy_ids) && i < DEVICE_TEST_TOKENS; i++) {
            batch_clear(&batch);
            batch_add(&batch, &sequence, sequence.token_count - sequence.computed);
            batch_run(&driver, &batch);
            assert_int_equal(sequence.tokens[count + i],
                             json_integer_value(json_array_get(greedy_ids, i)));
            double wanted = json_number_value(json_array_get(logprobs, i));
            assert_true(fabs((double)sequence.logprob - wanted) <= 2 * tolerance);
        }
    }
    assert_true(index > 0);
    driver_close(&driver);
}

static json_t *golden_file(const char *name) {
    char path[512];
    (void)snprintf(path, sizeof(path), "%s/tests/data/golden/%s", BATON_SOURCE_DIR, name);
    json_t *file = json_load_file(path, 0, NULL);
    assert_non_null(file);
    return file;
}

static void test_a_real_model_writes_the_reference_stories(void **state) {
    (void)state;
    json_t *file = golden_file("stories260k.json");
    struct model *model = device_model("models/stories260k");
    assert_non_null(strstr(model_info(model)->numerics, "f32/cuda90.1.0/"));
    check_golden(model, file, 2, 1e-4);
    model_destroy(model);
    json_decref(file);
}

/* Tolerances as in engine_test.c. */
static void test_random_models_of_every_kind_answer_as_transformers_does(void **state) {
    (void)state;
    static const struct {
        const char *name;
        double tolerance;
    } models[] = {{"untied_f32", 1e-4},
                  {"gqa_bf16", 2e-2},
                  {"theta_f16", 1e-4},
                  {"qwen2_f32", 1e-4},
                  {"qwen3_bf16", 2e-2}};
    json_t *file = golden_file("engine/engine.json");
    for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
        char path[128];
        (void)snprintf(path, sizeof(path), "golden/engine/%s", models[m].name);
        struct model *model = device_model(path);
        check_golden(model, json_object_get(file, models[m].name), 2, models[m].tolerance);
        model_destroy(model);
    }
    json_decref(file);
}

static void test_int8_weights_take_a_part_of_the_devices_memory(void **state) {
    (void)state;
    struct model *rounded = device_model_as("models/stories260k", MODEL_WEIGHTS_INT8);
    struct model *plain = device_model("models/stories260k");
    assert_true(model_info(rounded)->weight_bytes < model_info(plain)->weight_bytes / 2);
    model_destroy(rounded);
    model_destroy(plain);
}

/* ---- the same bits ---- */

#define MEMBERS 5u
#define OUTPUT  4u

struct outcome {
    uint32_t tokens[1024];
    float logprob;
    uint64_t kv;
};

static uint64_t kv_hash(struct driver *driver, const struct sequence *sequence) {
    const struct kv_layout *layout = driver->layout;
    uint64_t hash = 0;
    for (uint32_t c = 0; c < layout->component_count; c++) {
        for (uint32_t t = 0; t < sequence->computed; t++) {
            const unsigned char *row =
                engine_kv_base(driver->engine) +
                layout_row_offset(layout, sequence->pages[t / layout->page_tokens], c,
                                  t % layout->page_tokens);
            for (uint32_t i = 0; i < layout->components[c].row_bytes; i += 4) {
                uint32_t word;
                memcpy(&word, row + i, 4);
                hash = mix64(hash ^ word) + t;
            }
        }
    }
    return hash;
}

static void run_all(const struct model *model, uint32_t rows, uint32_t chunk, uint32_t page_tokens,
                    uint64_t seed, struct outcome *outcomes) {
    static struct sequence sequences[MEMBERS];
    static struct batch batch;
    struct driver driver;
    struct prng prng = {seed};
    open_engine(&driver, model, page_tokens, 2, NULL);
    uint32_t first = prng_below(&prng, 7);
    for (uint32_t s = 0; s < MEMBERS; s++) {
        uint32_t prompt[90];
        struct prng data = {s + 1};
        uint32_t count = s == 0 ? 80 : 1 + prng_below(&data, 40);
        for (uint32_t i = 0; i < count; i++) {
            prompt[i] = prng_below(&data, 256);
        }
        uint32_t page_count = (count + OUTPUT + page_tokens - 1) / page_tokens;
        uint32_t pages[90];
        for (uint32_t i = 0; i < page_count; i++) { /* scattered, downwards */
            pages[i] = PAGES - 1 - first;
            first++;
        }
        sequence_init(&sequences[s], prompt, count, pages, page_count);
    }
    for (bool is_done = false; !is_done;) {
        is_done = true;
        batch_clear(&batch);
        for (uint32_t s = 0; s < MEMBERS; s++) {
            struct sequence *sequence = &sequences[s];
            if (sequence->token_count == sequence->prompt_count + OUTPUT) {
                continue;
            }
            is_done = false;
            if (batch.row_count < rows) {
                uint32_t left = sequence->token_count - sequence->computed;
                uint32_t most = left < chunk ? left : chunk;
                batch_add(&batch, sequence, rows == 1 ? most : 1 + prng_below(&prng, most));
            }
        }
        if (!is_done) {
            batch_run(&driver, &batch);
        }
    }
    for (uint32_t s = 0; s < MEMBERS; s++) {
        memset(&outcomes[s], 0, sizeof(outcomes[s]));
        memcpy(outcomes[s].tokens, sequences[s].tokens, sizeof(outcomes[s].tokens));
        outcomes[s].logprob = sequences[s].logprob;
        outcomes[s].kv = kv_hash(&driver, &sequences[s]);
    }
    driver_close(&driver);
}

static void check_invariance(const char *path, enum model_weights weights) {
    static struct outcome alone[MEMBERS];
    static struct outcome found[MEMBERS];
    static const struct {
        uint32_t rows;
        uint32_t chunk;
        uint32_t page_tokens;
    } ways[] = {{1, 17, 16}, {MEMBERS, 64, 16}, {3, 90, 8}, {MEMBERS, 1, 24}};
    struct model *model = device_model_as(path, weights);
    run_all(model, 1, 128, PAGE_TOKENS, 1, alone);
    for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
        run_all(model, ways[w].rows, ways[w].chunk, ways[w].page_tokens, w + 2, found);
        for (uint32_t s = 0; s < MEMBERS; s++) {
            if (memcmp(&alone[s], &found[s], sizeof(found[s])) != 0) {
                fail_msg("%s: sequence %u differs with %u rows, chunks to %u, pages of %u", path, s,
                         ways[w].rows, ways[w].chunk, ways[w].page_tokens);
            }
        }
    }
    model_destroy(model);
}

static void test_bits_do_not_depend_on_batch_chunk_page_or_thread(void **state) {
    (void)state;
    check_invariance("golden/engine/untied_f32", MODEL_WEIGHTS_FILE);
    check_invariance("golden/engine/gqa_bf16", MODEL_WEIGHTS_FILE);
    check_invariance("golden/engine/untied_f32", MODEL_WEIGHTS_INT8);
    check_invariance("golden/engine/gqa_bf16", MODEL_WEIGHTS_INT8);
}

/* The norm is all in which an int8 model on a device differs from the C oracle: it adds in 128
 * lanes and a tree. */
#define NORM_LANES 128u
static void norm_in_lanes(float *out, const float *x, const float *weight, uint32_t width,
                          float epsilon) {
    float squares[NORM_LANES] = {0};
    for (uint32_t i = 0; i < width; i++) {
        squares[i % NORM_LANES] += x[i] * x[i];
    }
    for (uint32_t half = NORM_LANES / 2; half > 0; half /= 2) {
        for (uint32_t i = 0; i < half; i++) {
            squares[i] += squares[i + half];
        }
    }
    float scale = 1.0f / sqrtf(squares[0] / (float)width + epsilon);
    for (uint32_t i = 0; i < width; i++) {
        out[i] = x[i] * scale * weight[i];
    }
}

static void check_int8_bits(const char *path, const char *numerics) {
    static struct outcome found[MEMBERS];
    static struct outcome wanted[MEMBERS];
    struct kernels kernels = *kernels_select("c");
    kernels.rms_norm = norm_in_lanes;
    struct model *there = device_model_as(path, MODEL_WEIGHTS_INT8);
    struct model *here = driver_model_with(path, &kernels, MODEL_WEIGHTS_INT8);
    assert_non_null(strstr(model_info(there)->numerics, numerics));
    assert_int_equal(model_info(there)->fingerprint, model_info(here)->fingerprint);
    run_all(there, MEMBERS, 64, PAGE_TOKENS, 1, found);
    run_all(here, MEMBERS, 64, PAGE_TOKENS, 1, wanted);
    for (uint32_t s = 0; s < MEMBERS; s++) {
        if (memcmp(&found[s], &wanted[s], sizeof(wanted[s])) != 0) {
            fail_msg("%s: sequence %u has not the oracle's bits", path, s);
        }
    }
    model_destroy(there);
    model_destroy(here);
}

static void test_int8_models_have_the_bits_of_the_oracle_with_the_devices_norm(void **state) {
    (void)state;
    check_int8_bits("models/stories260k", "int8-f32/cuda90.1.0/");
    check_int8_bits("golden/engine/untied_f32", "int8-f32/cuda90.1.0/");
    check_int8_bits("golden/engine/gqa_bf16", "int8-bf16/cuda90.1.0/");
    check_int8_bits("golden/engine/theta_f16", "int8-f16/cuda90.1.0/");
    check_int8_bits("golden/engine/qwen2_f32", "int8-f32/cuda90.1.0/");
    check_int8_bits("golden/engine/qwen3_bf16", "int8-bf16/cuda90.1.0/");
    check_int8_bits("golden/engine/seven_f16", "int8-f16/cuda90.1.0/");
    check_int8_bits("golden/engine/wide_f32", "int8-f32/cuda90.1.0/");
}

/* ---- the two pools ---- */

static void run_prompt(struct driver *driver, struct sequence *sequence, uint32_t first_page) {
    static struct batch batch;
    uint32_t prompt[40];
    uint32_t pages[4];
    for (uint32_t i = 0; i < 40; i++) {
        prompt[i] = (i * 31 + 7) % 256;
    }
    for (uint32_t i = 0; i < 4; i++) {
        pages[i] = first_page + i;
    }
    sequence_init(sequence, prompt, 40, pages, 4);
    batch_clear(&batch);
    batch_add(&batch, sequence, 40);
    batch_run(driver, &batch);
}

static void run_on(struct driver *driver, struct sequence *sequence, uint32_t steps) {
    static struct batch batch;
    for (uint32_t i = 0; i < steps; i++) {
        batch_clear(&batch);
        batch_add(&batch, sequence, 1);
        batch_run(driver, &batch);
    }
}

/* What a decode worker does: rows that came from elsewhere into the host's pool. */
static void test_pages_written_by_others_are_read_before_the_next_step(void **state) {
    (void)state;
    static struct sequence here;
    static struct sequence there;
    struct model *model = device_model("models/stories260k");
    struct driver from;
    struct driver to;
    open_engine(&from, model, PAGE_TOKENS, 1, NULL);
    open_engine(&to, model, PAGE_TOKENS, 1, NULL);
    run_prompt(&from, &here, 3);
    uint32_t page_bytes = from.layout->page_bytes;
    for (uint32_t round = 0; round < 2; round++) { /* the same pages again, with other rows */
        there = here;
        for (uint32_t i = 0; i < 4; i++) {
            there.pages[i] = 50 + 2 * i;
            memcpy(engine_kv_base(to.engine) + (size_t)there.pages[i] * page_bytes,
                   engine_kv_base(from.engine) + (size_t)here.pages[i] * page_bytes, page_bytes);
        }
        engine_pages_written(to.engine, there.pages, 4);
        run_on(&to, &there, 6);
        struct sequence rest = here;
        run_on(&from, &rest, 6);
        assert_memory_equal(there.tokens, rest.tokens, sizeof(rest.tokens));
        assert_true(there.logprob == rest.logprob);
        run_on(&from, &here, 3); /* another beginning for the second round */
    }
    driver_close(&from);
    driver_close(&to);
    model_destroy(model);
}

static void test_an_abandoned_step_ends_at_its_layer_and_the_next_is_whole(void **state) {
    (void)state;
    static struct sequence sequence;
    static struct sequence again;
    static struct batch batch;
    struct model *model = device_model("models/stories260k");
    struct driver driver;
    open_engine(&driver, model, PAGE_TOKENS, 1, NULL);
    run_prompt(&driver, &sequence, 3);
    run_on(&driver, &sequence, 3);
    for (uint32_t round = 0; round < 3; round++) {
        sequence_init(&again, sequence.tokens, sequence.prompt_count, sequence.pages, 4);
        batch_clear(&batch);
        batch_add(&batch, &again, again.prompt_count);
        struct step_plan plan = batch_plan(&batch);
        plan.wants_layers = true;
        engine_abandon(driver.engine, driver.number + 1);
        driver_step(&driver, &plan);
        assert_int_equal(driver.status, STATUS_CANCELLED);
        assert_int_equal(driver.layer_count, 1);
        run_prompt(&driver, &again, 3);
        run_on(&driver, &again, 3);
        assert_memory_equal(again.tokens, sequence.tokens, sizeof(again.tokens));
        assert_true(again.logprob == sequence.logprob);
    }
    driver_close(&driver);
    model_destroy(model);
}

/* Nobody said that the page was written: the device still has what it had, which is NaN. So the
 * call above is what does it. */
static void test_pages_are_not_read_from_the_host_unasked(void **state) {
    (void)state;
    static struct sequence sequence;
    static struct batch batch;
    struct model *model = device_model("models/stories260k");
    struct driver driver;
    open_engine(&driver, model, PAGE_TOKENS, 1, NULL);
    run_prompt(&driver, &sequence, 0);
    unsigned char *page = engine_kv_base(driver.engine);
    memset(page, 0xff, driver.layout->page_bytes);
    run_on(&driver, &sequence, 1);
    engine_pages_written(driver.engine, sequence.pages, 1);
    batch_clear(&batch);
    batch_add(&batch, &sequence, 1);
    struct step_plan plan = {.row_count = 1,
                             .token_count = 1,
                             .page_count = batch.page_count,
                             .rows = batch.rows,
                             .tokens = batch.tokens,
                             .pages = batch.pages};
    driver_step(&driver, &plan);
    assert_int_equal(driver.status, STATUS_OK);
    assert_false(driver.results[0].is_valid);
    driver_close(&driver);
    model_destroy(model);
}

static struct {
    _Atomic uint32_t rows;
    _Atomic uint32_t wrong; /* rows that were not there yet, as NaN shows */
} told;

static void on_row(void *context, uint32_t page, uint32_t component, uint32_t token_in_page) {
    const struct driver *driver = context;
    const unsigned char *row = engine_kv_base(driver->engine) +
                               layout_row_offset(driver->layout, page, component, token_in_page);
    for (uint32_t i = 0; i < driver->layout->components[component].row_bytes; i += 4) {
        float value;
        memcpy(&value, row + i, 4);
        if (isnan(value)) {
            told.wrong++;
            break;
        }
    }
    told.rows++;
}

static void test_each_row_is_told_when_it_is_in_the_hosts_pool(void **state) {
    (void)state;
    static struct sequence sequence;
    static struct batch batch;
    struct model *model = device_model("models/stories260k");
    struct driver driver;
    open_engine(&driver, model, PAGE_TOKENS, 3, on_row);
    told.rows = 0;
    told.wrong = 0;
    run_prompt(&driver, &sequence, 9);
    uint32_t components = driver.layout->component_count;
    assert_int_equal(told.rows, 40 * components);
    batch_clear(&batch);
    batch_add(&batch, &sequence, 1);
    struct step_plan plan = {.row_count = 1,
                             .token_count = 1,
                             .page_count = batch.page_count,
                             .rows = batch.rows,
                             .tokens = batch.tokens,
                             .pages = batch.pages,
                             .wants_layers = true};
    driver_step(&driver, &plan);
    assert_int_equal(told.rows, 41 * components);
    assert_int_equal(told.wrong, 0);
    assert_int_equal(driver.layer_count, model_info(model)->layer_count);
    for (uint32_t i = 0; i < driver.layer_count; i++) {
        assert_int_equal(driver.layers[i], i);
    }
    driver_close(&driver);
    model_destroy(model);
}

/* ---- what goes wrong ---- */

static void test_a_device_lost_in_a_step_ends_that_step_once_and_without_tokens(void **state) {
    (void)state;
    struct model *model = device_model("models/stories260k");
    for (int after = 1; after < 130; after = after * 3 + 1) { /* some sixty launches a step */
        static struct sequence sequence;
        static struct batch batch;
        struct driver driver;
        open_engine(&driver, model, PAGE_TOKENS, 1, NULL);
        uint32_t prompt[3] = {1, 2, 3};
        uint32_t page = 0;
        sequence_init(&sequence, prompt, 3, &page, 1);
        batch_clear(&batch);
        batch_add(&batch, &sequence, 3);
        struct step_plan plan = {.row_count = 1,
                                 .token_count = 3,
                                 .page_count = 1,
                                 .rows = batch.rows,
                                 .tokens = batch.tokens,
                                 .pages = batch.pages};
        control->fails_after = after;
        driver_step(&driver, &plan);
        bool has_struck = control->fails_after == 0;
        control->fails_after = 0;
        assert_true(has_struck || after > 50);
        assert_int_equal(driver.status, has_struck ? STATUS_IO : STATUS_OK);
        assert_int_equal(driver.results[0].is_valid, !has_struck);
        driver_close(&driver);
        if (has_struck) { /* a lost device is lost to the process: only the test begins anew */
            model_destroy(model);
            assert_non_null(accelerator->table->failure(accelerator->device));
            accelerator_close(accelerator);
            assert_int_equal(accelerator_setup(NULL), 0);
            model = device_model("models/stories260k");
        }
    }
    model_destroy(model);
}

static void expect_refusal(enum status status, enum status wanted, const struct writer *error,
                           const char *words) {
    char text[512];
    (void)snprintf(text, sizeof(text), "%.*s", (int)error->len, error->data);
    assert_int_equal(status, wanted);
    if (strstr(text, words) == NULL) {
        fail_msg("not \"%s\" in: %s", words, text);
    }
}

static void test_a_machine_without_what_it_takes_is_refused_in_one_sentence(void **state) {
    (void)state;
    struct accelerator *none = NULL;
    char text[512];
    struct writer error;
    writer_init(&error, text, sizeof(text));
    control->has_driver = 0;
    expect_refusal(accelerator_open(BATON_EMULATED_DEVICE, 0, &error, &none), STATUS_NOT_FOUND,
                   &error, "has no NVIDIA driver");
    control->has_driver = 1;
    control->devices = 0;
    writer_init(&error, text, sizeof(text));
    expect_refusal(accelerator_open(BATON_EMULATED_DEVICE, 0, &error, &none), STATUS_NOT_FOUND,
                   &error, "no CUDA-capable device");
    control->devices = 1;
    writer_init(&error, text, sizeof(text));
    expect_refusal(accelerator_open(BATON_EMULATED_DEVICE, 3, &error, &none), STATUS_NOT_FOUND,
                   &error, "device 3 was asked for, there are 1");
    writer_init(&error, text, sizeof(text));
    expect_refusal(accelerator_open("/nowhere/libbaton_cuda.so", 0, &error, &none),
                   STATUS_NOT_FOUND, &error, "cannot be loaded: /nowhere/libbaton_cuda.so");
    writer_init(&error, text, sizeof(text));
    expect_refusal(accelerator_open("libm.so.6", 0, &error, &none), STATUS_UNSUPPORTED, &error,
                   "has no baton_device_table");
    assert_null(none);
}

static enum status try_engine(const struct model *model, struct writer *error) {
    struct kv_layout *layout = calloc(1, sizeof(*layout));
    assert_non_null(layout);
    assert_int_equal(model_layout(model, PAGE_TOKENS, layout), STATUS_OK);
    struct driver unused;
    struct engine *engine = NULL;
    struct engine_config config = {.model = model,
                                   .layout = layout,
                                   .page_count = 1000,
                                   .threads = 1,
                                   .rows_max = 8,
                                   .tokens_max = 64,
                                   .on_step = (engine_on_step)abort,
                                   .context = &unused};
    enum status status = engine_create(&config, error, &engine);
    free(layout);
    return status;
}

static void test_a_device_too_small_or_of_two_minds_is_refused(void **state) {
    (void)state;
    char text[512];
    struct writer error;
    char directory[512];
    struct model *model = NULL;
    (void)snprintf(directory, sizeof(directory), "%s/tests/data/models/stories260k",
                   BATON_SOURCE_DIR);
    control->memory_bytes = 500000;
    writer_init(&error, text, sizeof(text));
    expect_refusal(model_create_on(directory, kernels_select("c"), accelerator, MODEL_WEIGHTS_FILE,
                                   &error, &model),
                   STATUS_BUSY, &error, "no room for the weights");
    control->memory_bytes = 8u << 20; /* the pool is 10 MB */
    model = device_model("models/stories260k");
    writer_init(&error, text, sizeof(text));
    expect_refusal(try_engine(model, &error), STATUS_BUSY, &error, "no room for the KV pool");
    control->memory_bytes = 0;
    model_destroy(model);
    /* Shapes that no test before has tried. */
    control->is_skewed = 1;
    accelerator_close(accelerator);
    assert_int_equal(accelerator_setup(NULL), 0);
    model = device_model("models/stories260k");
    writer_init(&error, text, sizeof(text));
    expect_refusal(try_engine(model, &error), STATUS_BUSY, &error, "in different orders");
    control->is_skewed = 0;
    model_destroy(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_real_model_writes_the_reference_stories),
        cmocka_unit_test(test_random_models_of_every_kind_answer_as_transformers_does),
        cmocka_unit_test(test_int8_weights_take_a_part_of_the_devices_memory),
        cmocka_unit_test(test_bits_do_not_depend_on_batch_chunk_page_or_thread),
        cmocka_unit_test(test_int8_models_have_the_bits_of_the_oracle_with_the_devices_norm),
        cmocka_unit_test(test_pages_written_by_others_are_read_before_the_next_step),
        cmocka_unit_test(test_an_abandoned_step_ends_at_its_layer_and_the_next_is_whole),
        cmocka_unit_test(test_pages_are_not_read_from_the_host_unasked),
        cmocka_unit_test(test_each_row_is_told_when_it_is_in_the_hosts_pool),
        cmocka_unit_test(test_a_device_lost_in_a_step_ends_that_step_once_and_without_tokens),
        cmocka_unit_test(test_a_machine_without_what_it_takes_is_refused_in_one_sentence),
        cmocka_unit_test(test_a_device_too_small_or_of_two_minds_is_refused),
    };
    return cmocka_run_group_tests(tests, accelerator_setup, accelerator_teardown);
}
