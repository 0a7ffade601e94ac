/* Which tokenizers there are.
 *
 * A version is one (model name, digest of tokenizer.json). It is fetched from any listed worker
 * that has it, tried again from another one for as long as there is one, and kept once it is there:
 * discovery may lose every worker without costing a tokenizer. Where workers of one name differ,
 * all are kept and a name means the version that most decode workers have. */
#include "services/router/router.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#define RETRY_MS 500

void models_init(struct router *router) {
    struct models *models = &router->models;
    CHECK(pthread_mutex_init(&models->lock, NULL) == 0);
    models->source_max = router->settings->workers_max;
    models->sources = calloc(models->source_max, sizeof *models->sources);
    CHECK(models->sources != NULL);
}

void model_unref(struct model_version *version) {
    if (version == NULL || atomic_fetch_sub(&version->references, 1) != 1) {
        return;
    }
    tokenizer_destroy(version->tokenizer);
    free(version);
}

void models_fini(struct router *router) {
    struct models *models = &router->models;
    for (uint32_t i = 0; i < models->version_count; i++) {
        model_unref(models->versions[i]);
    }
    free(models->sources);
    pthread_mutex_destroy(&models->lock);
}

static struct model_source *source_find_locked(struct models *models, uint64_t incarnation) {
    for (uint32_t i = 0; i < models->source_max; i++) {
        if (models->sources[i].incarnation.v == incarnation) {
            return &models->sources[i];
        }
    }
    return NULL;
}

static struct model_version *version_find_locked(struct models *models, const char *name,
                                                 uint64_t digest) {
    for (uint32_t i = 0; i < models->version_count; i++) {
        struct model_version *version = models->versions[i];
        if (version->digest == digest && strcmp(version->name, name) == 0) {
            return version;
        }
    }
    return NULL;
}

static bool source_has(const struct model_source *source, const struct model_version *version) {
    return source->incarnation.v != 0 && source->digest == version->digest &&
           strcmp(source->model, version->name) == 0;
}

/* Decode workers count most; a version nobody has any more counts nothing. */
static uint32_t version_weight_locked(const struct models *models,
                                      const struct model_version *version) {
    uint32_t weight = 0;
    for (uint32_t i = 0; i < models->source_max; i++) {
        if (source_has(&models->sources[i], version)) {
            weight += models->sources[i].role == ROLE_DECODE ? 4096 : 1;
        }
    }
    return weight;
}

/* Makes room by dropping a version that nobody has. */
static bool version_room_locked(struct models *models) {
    if (models->version_count < MODEL_VERSIONS_MAX) {
        return true;
    }
    for (uint32_t i = 0; i < models->version_count; i++) {
        struct model_version *version = models->versions[i];
        if (version->state != MODEL_FETCHING && version_weight_locked(models, version) == 0) {
            models->versions[i] = models->versions[--models->version_count];
            model_unref(version);
            return true;
        }
    }
    return false;
}

static void warn_difference_locked(const struct models *models, const struct worker_info *info) {
    for (uint32_t i = 0; i < models->source_max; i++) {
        const struct model_source *source = &models->sources[i];
        if (source->incarnation.v == 0 || source->incarnation.v == info->incarnation.v ||
            strcmp(source->model, info->model) != 0) {
            continue;
        }
        bool is_digest = source->digest != info->tokenizer;
        bool is_vocab = source->vocab != info->vocab;
        bool is_layout = !layout_digest_equal(source->layout, info->layout);
        if (is_digest || is_vocab || is_layout) {
            LOG_WARN("two workers serve one model name with different files: requests may run on "
                     "either; give the models different names (--served-model-name), or all "
                     "workers the same files",
                     LOG_TEXT("model", info->model), LOG_TEXT("worker_a", source->id),
                     LOG_TEXT("worker_b", info->id),
                     LOG_TEXT("differs", is_digest  ? "tokenizer.json"
                                         : is_vocab ? "vocabulary size"
                                                    : "KV layout"));
            return;
        }
    }
}

static void version_want_locked(struct models *models, const struct worker_info *info) {
    if (version_find_locked(models, info->model, info->tokenizer) != NULL) {
        return;
    }
    if (!version_room_locked(models)) {
        LOG_WARN("a worker's model is not served: this router knows too many already",
                 LOG_TEXT("worker_id", info->id), LOG_TEXT("model", info->model),
                 LOG_U64("models_max", MODEL_VERSIONS_MAX));
        return;
    }
    struct model_version *version = calloc(1, sizeof *version);
    CHECK(version != NULL);
    atomic_store(&version->references, 1);
    text_copy(version->name, LABEL_MAX, info->model);
    version->digest = info->tokenizer;
    version->vocab = info->vocab;
    version->state = MODEL_WANTED;
    text_copy(version->why, sizeof version->why, "it is being fetched");
    models->versions[models->version_count++] = version;
}

void models_seen(struct router *router, const struct worker_info *info) {
    struct models *models = &router->models;
    pthread_mutex_lock(&models->lock);
    struct model_source *source = source_find_locked(models, info->incarnation.v);
    bool is_new = source == NULL;
    if (is_new) {
        source = source_find_locked(models, 0);
    }
    if (source != NULL) {
        if (is_new) {
            warn_difference_locked(models, info);
        }
        source->incarnation = info->incarnation;
        source->role = info->role;
        source->digest = info->tokenizer;
        source->layout = info->layout;
        source->vocab = info->vocab;
        source->context = info->context;
        text_copy(source->model, LABEL_MAX, info->model);
        text_copy(source->id, LABEL_MAX, info->id);
        text_copy(source->address, ADDRESS_MAX, info->address);
        version_want_locked(models, info);
    } else {
        LOG_WARN("a worker is not used: this router knows as many as it may (--max-workers)",
                 LOG_TEXT("worker_id", info->id));
    }
    pthread_mutex_unlock(&models->lock);
}

void models_lost(struct router *router, struct incarnation incarnation) {
    struct models *models = &router->models;
    pthread_mutex_lock(&models->lock);
    struct model_source *source = source_find_locked(models, incarnation.v);
    if (source != NULL && incarnation.v != 0) {
        memset(source, 0, sizeof *source);
    }
    pthread_mutex_unlock(&models->lock);
}

/* The worker after the one that was asked last. */
static const struct model_source *source_next_locked(const struct models *models,
                                                     const struct model_version *version) {
    const struct model_source *first = NULL;
    bool is_past = false;
    for (uint32_t i = 0; i < models->source_max; i++) {
        const struct model_source *source = &models->sources[i];
        if (!source_has(source, version)) {
            continue;
        }
        if (is_past) {
            return source;
        }
        first = first == NULL ? source : first;
        is_past = source->incarnation.v == version->tried;
    }
    return first;
}

void models_poke(struct router *router, struct instant now) {
    struct models *models = &router->models;
    for (uint32_t i = 0; i < MODEL_VERSIONS_MAX; i++) {
        char address[ADDRESS_MAX];
        struct model_version *due = NULL;
        pthread_mutex_lock(&models->lock);
        struct model_version *version = i < models->version_count ? models->versions[i] : NULL;
        if (version != NULL && version->state == MODEL_WANTED &&
            instant_reached(now, version->retry_at)) {
            const struct model_source *source = source_next_locked(models, version);
            if (source != NULL) {
                due = version;
                version->state = MODEL_FETCHING;
                version->tried = source->incarnation.v;
                text_copy(address, sizeof address, source->address);
                atomic_fetch_add(&version->references, 1); /* the fetch's */
            }
        }
        pthread_mutex_unlock(&models->lock);
        if (due != NULL) {
            fetch_start(router, due, address);
        }
    }
}

void models_fetched(struct router *router, struct model_version *version) {
    struct models *models = &router->models;
    pthread_mutex_lock(&models->lock);
    version->state = MODEL_READY;
    version->why[0] = '\0';
    pthread_mutex_unlock(&models->lock);
    atomic_fetch_add(&models->fetched, 1);
    LOG_INFO("tokenizer loaded", LOG_TEXT("model", version->name),
             LOG_HEX("digest", version->digest),
             LOG_U64("ids", tokenizer_vocab_size(version->tokenizer)));
    model_unref(version);
}

void models_failed(struct router *router, struct model_version *version, const char *sentence) {
    struct models *models = &router->models;
    pthread_mutex_lock(&models->lock);
    version->state = MODEL_WANTED;
    version->retry_at = instant_add(clock_now(), span_ms(RETRY_MS));
    text_copy(version->why, sizeof version->why, sentence);
    pthread_mutex_unlock(&models->lock);
    atomic_fetch_add(&models->fetch_failures, 1);
    LOG_WARN("tokenizer not loaded, trying again", LOG_TEXT("model", version->name),
             LOG_HEX("digest", version->digest), LOG_TEXT("why", sentence));
    model_unref(version);
}

static void names_locked(const struct models *models, struct writer *why) {
    bool is_any = false;
    for (uint32_t i = 0; i < models->source_max; i++) {
        bool is_first = models->sources[i].incarnation.v != 0;
        for (uint32_t j = 0; j < i && is_first; j++) {
            is_first = models->sources[j].incarnation.v == 0 ||
                       strcmp(models->sources[j].model, models->sources[i].model) != 0;
        }
        if (is_first) {
            writer_printf(why, "%s%s", is_any ? ", " : "", models->sources[i].model);
            is_any = true;
        }
    }
}

enum models_answer models_get(struct router *router, const char *name, struct model_version **out,
                              uint32_t *context_out, struct writer *why) {
    struct models *models = &router->models;
    struct model_version *best = NULL;
    const struct model_version *waiting = NULL;
    uint32_t best_weight = 0;
    uint32_t sources = 0;
    pthread_mutex_lock(&models->lock);
    for (uint32_t i = 0; i < models->version_count; i++) {
        struct model_version *version = models->versions[i];
        if (strcmp(version->name, name) != 0) {
            continue;
        }
        uint32_t weight = version_weight_locked(models, version);
        if (version->state != MODEL_READY) {
            waiting = version;
        } else if (best == NULL || weight > best_weight) {
            best = version;
            best_weight = weight;
        }
    }
    *context_out = 0;
    for (uint32_t i = 0; i < models->source_max; i++) {
        const struct model_source *source = &models->sources[i];
        sources += source->incarnation.v != 0 ? 1 : 0;
        if (source->incarnation.v != 0 && source->context > *context_out &&
            strcmp(source->model, name) == 0) {
            *context_out = source->context;
        }
    }
    enum models_answer answer = MODELS_READY;
    if (best != NULL) {
        atomic_fetch_add(&best->references, 1);
        *out = best;
    } else if (waiting != NULL) {
        answer = MODELS_WAIT;
        writer_printf(why, "the tokenizer of model \"%s\" is not here yet: %s; try again later",
                      name, waiting->why);
    } else if (sources > 0) {
        answer = MODELS_UNKNOWN;
        writer_printf(why, "unknown model \"%s\"; served here: ", name);
        names_locked(models, why);
    } else {
        answer = MODELS_NONE;
        writer_text(why, "no worker is known yet: start one, or try again later");
    }
    pthread_mutex_unlock(&models->lock);
    return answer;
}

uint32_t models_ready_count(struct router *router) {
    struct models *models = &router->models;
    uint32_t count = 0;
    pthread_mutex_lock(&models->lock);
    for (uint32_t i = 0; i < models->version_count; i++) {
        count += models->versions[i]->state == MODEL_READY ? 1 : 0;
    }
    pthread_mutex_unlock(&models->lock);
    return count;
}
