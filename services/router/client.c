/* One Generate or Tokenize call, from accept to its one end.
 *
 * A client has an inbox (flags, tokens, the answer) that the rpc and control threads fill under its
 * lock, and everything else belongs to its text thread, which runs it whenever the inbox changed.
 * So what piles up while the client's connection is slow is merged by itself, and a client costs
 * the same whatever it is sent. Memory: references of the rpc side (until on_closed), of the core
 * (from CLIENT_OPEN until the core has forgotten the request) and of its text thread. */
#include "services/router/router.h"
#include "services/router/token_queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "runtime/buffer.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/random.h"
#include "text/detokenizer.h"
#include "text/stop.h"

#define CLIENT_TEXT_MAX   (64u * 1024u * 1024u)
#define CLIENT_DETAIL_MAX 512u
#define REPLY_LOGPROBS    256u           /* tokens of one reply, where each has logprobs */
#define ROUND_BYTES       (512u * 1024u) /* about so much is put into an empty queue at once */
#define TOKENS_SLACK      64u
#define ENCODE_ABOVE      65536u /* ids above the context that are still counted for the sentence */

enum client_kind { CLIENT_GENERATE, CLIENT_TOKENIZE };

struct client_answer {
    uint32_t index; /* of the choice whose last reply is the call's */
    enum outcome outcome;
    enum status status;
    enum finish finish;
    struct usage usage;
    uint64_t seed;
    uint32_t retry_after_ms;
    bool is_client_gone;
    char detail[ROUTER_DETAIL_MAX];
    struct public_trace trace;
};

/* One of the answers of a call: n of them, made before the core hears of the tokens. */
struct choice {
    /* inbox, under the client's lock */
    struct token_queue inbox;
    bool is_end_there; /* EFFECT_CHOICE was seen */
    enum finish finish;

    /* text thread */
    struct detokenizer detokenizer;
    struct stop *stop;          /* NULL: no stop strings */
    struct token_queue pending; /* not sent yet */
    uint32_t token_total;       /* up to now, sent or not */
    uint32_t stopped_at; /* tokens up to and including the one that completed a stop string */
    struct buffer text;  /* not sent yet */
    struct buffer piece; /* between detokenizer and stop strings */
    bool is_flushed;
    bool is_ending; /* its end is known, its last reply is not sent */
};

struct client {
    struct mail mail; /* in the text thread's box while is_scheduled */
    struct router *router;
    struct client *next_in_bucket; /* under clients.lock */
    struct rpc_call_id call;
    enum client_kind kind;
    struct instant deadline; /* of the call */
    _Atomic uint32_t references;

    pthread_mutex_t lock; /* guards the inbox: all up to the next comment */
    bool is_scheduled;
    bool is_opened;        /* CLIENT_OPEN was posted */
    bool is_closed;        /* by the rpc thread: nobody listens any more */
    bool is_answer_there;  /* EFFECT_ANSWER was seen; `answer` is set */
    bool is_tokenize_wish; /* EFFECT_TOKENIZE was seen and is not taken yet */
    bool wants_writable;
    uint64_t request; /* the core's; 0 = refused without an entry */
    uint32_t limit;   /* tokens of prompt and answer that can fit now; 0 = not known */
    struct client_answer answer;

    /* text thread (before the first run: rpc thread) */
    struct client *prev; /* in the list of watched */
    struct client *next;
    bool is_watched;
    bool is_decoded;
    bool is_tokenizing; /* EVENT_TOKENIZED is owed */
    bool is_over;       /* nothing more will be sent */
    struct instant wait_until;
    uint8_t *raw; /* the request's bytes until it is decoded; malloc'ed */
    size_t raw_len;
    struct wire_arena arena;
    struct public_generate_request wish;
    struct public_tokenize_request tokenize;
    struct model_version *model;
    uint32_t choice_count;
    struct choice *choices; /* [choice_count] */
};

/* ---- table and memory ----------------------------------------------------------------------- */

static uint32_t client_bucket(uint64_t call) {
    return (uint32_t)((call * 0x9e3779b97f4a7c15ull) >> 40) % CLIENT_BUCKETS;
}

void clients_init(struct clients *clients) {
    CHECK(pthread_mutex_init(&clients->lock, NULL) == 0);
}

static void client_free(struct client *client) {
    wire_arena_fini(&client->arena);
    model_unref(client->model);
    pthread_mutex_destroy(&client->lock);
    for (uint32_t i = 0; i < client->choice_count; i++) {
        struct choice *choice = &client->choices[i];
        buffer_fini(&choice->text);
        buffer_fini(&choice->piece);
        token_queue_fini(&choice->inbox);
        token_queue_fini(&choice->pending);
        free(choice->stop);
    }
    free(client->choices);
    free(client->raw);
    free(client);
}

void clients_fini(struct clients *clients) {
    for (uint32_t i = 0; i < CLIENT_BUCKETS; i++) {
        while (clients->buckets[i] != NULL) {
            struct client *client = clients->buckets[i];
            clients->buckets[i] = client->next_in_bucket;
            client_free(client);
        }
    }
    pthread_mutex_destroy(&clients->lock);
}

static struct client *client_create(struct router *router, struct rpc_call_id call,
                                    enum client_kind kind, const struct rpc_incoming *incoming) {
    struct client *client = calloc(1, sizeof *client);
    CHECK(client != NULL);
    client->router = router;
    client->call = call;
    client->kind = kind;
    client->deadline = incoming->deadline;
    atomic_store(&client->references, 1);
    CHECK(pthread_mutex_init(&client->lock, NULL) == 0);
    struct clients *clients = &router->clients;
    struct client **bucket = &clients->buckets[client_bucket(call.v)];
    pthread_mutex_lock(&clients->lock);
    client->next_in_bucket = *bucket;
    *bucket = client;
    clients->count++;
    pthread_mutex_unlock(&clients->lock);
    return client;
}

static void client_ref(struct client *client) {
    atomic_fetch_add(&client->references, 1);
}

static void client_unref(struct client *client) {
    if (atomic_fetch_sub(&client->references, 1) != 1) {
        return;
    }
    struct clients *clients = &client->router->clients;
    pthread_mutex_lock(&clients->lock);
    struct client **at = &clients->buckets[client_bucket(client->call.v)];
    while (*at != client) {
        at = &(*at)->next_in_bucket;
    }
    *at = client->next_in_bucket;
    clients->count--;
    pthread_mutex_unlock(&clients->lock);
    client_free(client);
}

/* Of a call that the core holds: it cannot go away meanwhile. */
static struct client *client_find(struct router *router, uint64_t call) {
    struct clients *clients = &router->clients;
    pthread_mutex_lock(&clients->lock);
    struct client *client = clients->buckets[client_bucket(call)];
    while (client != NULL && client->call.v != call) {
        client = client->next_in_bucket;
    }
    pthread_mutex_unlock(&clients->lock);
    return client;
}

static void client_run(struct mail *mail, void *ctx);

/* True: the caller posts it with client_post once it has left the lock. */
static bool client_schedule_locked(struct client *client) {
    bool is_due = !client->is_scheduled;
    client->is_scheduled = true;
    return is_due;
}

static void client_post(struct client *client) {
    client_ref(client);
    client->mail.run = client_run;
    if (!mailbox_post(&text_thread_of(client->router, client->call)->box, &client->mail)) {
        client_unref(client); /* leaving: the table frees it */
    }
}

/* ---- towards the core ----------------------------------------------------------------------- */

static void core_done(struct shell_mail *mail, bool was_stepped) {
    (void)was_stepped;
    client_unref(mail->after_ctx);
}

/* Both the answer and the call's end were seen. Called once. */
static void client_settle(struct client *client, uint64_t request) {
    if (request == 0) {
        client_unref(client);
        return;
    }
    struct shell_mail *mail = shell_mail_take(client->router->shell, EVENT_ANSWERED);
    mail->event.u.answered.request = request;
    mail->after = core_done;
    mail->after_ctx = client;
    shell_post(client->router->shell, mail);
}

static void client_post_gone(struct client *client, enum cause cause) {
    struct shell_mail *mail = shell_mail_take(client->router->shell, EVENT_CLIENT_GONE);
    mail->event.u.client_gone.call.v = client->call.v;
    mail->event.u.client_gone.cause = cause;
    shell_post(client->router->shell, mail);
}

static enum cause client_gone_cause(const struct client *client) {
    return instant_reached(clock_now(), client->deadline) ? CAUSE_DEADLINE : CAUSE_CLIENT_GONE;
}

/* The request is known: the core hears of it. */
static void client_post_open(struct client *client) {
    client_ref(client); /* the core's */
    struct shell_mail *mail = shell_mail_take(client->router->shell, EVENT_CLIENT_OPEN);
    mail->event.u.client_open.call.v = client->call.v;
    mail->event.u.client_open.model = client->wish.model;
    mail->event.u.client_open.request_label = client->wish.request_label;
    mail->event.u.client_open.session_label = client->wish.session_label;
    mail->event.u.client_open.cache_salt = client->wish.cache_salt;
    if (!instant_is_never(client->deadline)) {
        struct span left = instant_since(client->deadline, clock_now());
        mail->event.u.client_open.deadline.ns = left.ns > 1 ? left.ns : 1;
    }
    shell_post(client->router->shell, mail);
    pthread_mutex_lock(&client->lock);
    client->is_opened = true;
    bool is_closed = client->is_closed;
    pthread_mutex_unlock(&client->lock);
    if (is_closed) {
        client_post_gone(client, client_gone_cause(client));
    }
}

static void client_post_refusal(struct client *client, enum status status, const char *sentence) {
    struct shell_mail *mail = shell_mail_take(client->router->shell, EVENT_TOKENIZED);
    char *detail = shell_mail_payload(mail, CLIENT_DETAIL_MAX);
    text_copy(detail, CLIENT_DETAIL_MAX, sentence);
    mail->event.u.tokenized.request = client->request;
    mail->event.u.tokenized.status = status;
    mail->event.u.tokenized.detail = detail;
    shell_post(client->router->shell, mail);
}

/* ---- towards the client --------------------------------------------------------------------- */

static void client_finish(struct client *client, enum rpc_code code, const char *message,
                          uint32_t retry_after_ms) {
    client->is_over = true;
    char text[16];
    (void)snprintf(text, sizeof text, "%u", (unsigned)retry_after_ms); /* fits */
    struct rpc_pair trailer = {"retry-after-ms", text};
    rpc_call_finish(client->router->rpc, client->call, code, message, &trailer,
                    retry_after_ms != 0 ? 1 : 0);
}

/* True if nothing waits in the call's queue; else the client is run again when that is so. */
static bool client_is_writable(struct client *client) {
    pthread_mutex_lock(&client->lock);
    client->wants_writable = true; /* before the look: on_writable may come in between */
    pthread_mutex_unlock(&client->lock);
    if (rpc_call_queued_bytes(client->router->rpc, client->call) > 0) {
        return false;
    }
    pthread_mutex_lock(&client->lock);
    client->wants_writable = false;
    pthread_mutex_unlock(&client->lock);
    return true;
}

/* More tokens wait than one reply takes: the text waits for the last of them. */
static bool choice_is_long(const struct choice *choice) {
    return choice->pending.logprobs_cap > 0 && choice->pending.count > REPLY_LOGPROBS;
}

/* At most so many bytes will its next reply have. */
static size_t choice_reply_bytes(const struct choice *choice) {
    const struct token_queue *pending = &choice->pending;
    size_t bytes = 1024 + choice->text.len + 5 * (size_t)pending->count;
    if (pending->logprobs_cap > 0) {
        bytes += 16 * (size_t)pending->count + 9 * (size_t)pending->top_count;
    }
    return bytes;
}

/* False: it cannot be sent (the call has been failed). */
static bool client_send(struct text_thread *thread, struct client *client,
                        struct public_generate_reply *reply) {
    reply->request = client->wish.request_label;
    enum status status = public_generate_reply_encode(reply, &thread->out);
    if (status != STATUS_OK) {
        LOG_ERROR("a reply cannot be encoded", LOG_TEXT("request", client->wish.request_label),
                  LOG_STATUS("status", status));
        rpc_call_abort(client->router->rpc, client->call, RPC_CODE_INTERNAL,
                       "the reply cannot be encoded");
        client->is_over = true;
        return false;
    }
    rpc_call_send(client->router->rpc, client->call, thread->out.data, thread->out.len);
    return true;
}

/* Sends what is new of a choice, or as much of it as one reply takes. */
static bool choice_send(struct text_thread *thread, struct client *client, struct choice *choice,
                        struct public_generate_reply *reply) {
    bool is_part = choice_is_long(choice);
    const struct token_queue *pending = &choice->pending;
    reply->index = (uint32_t)(choice - client->choices);
    reply->tokens = pending->tokens;
    reply->token_count = is_part ? REPLY_LOGPROBS : pending->count;
    if (pending->logprobs_cap > 0) {
        reply->logprobs = (struct public_logprobs){pending->logprobs, pending->top_counts,
                                                   pending->top_tokens, pending->top_logprobs};
    }
    reply->text =
        (struct bytes){(const uint8_t *)choice->text.data, is_part ? 0 : choice->text.len};
    if (!client_send(thread, client, reply)) {
        return false;
    }
    token_queue_drop(&choice->pending, reply->token_count);
    if (!is_part) {
        buffer_clear(&choice->text);
    }
    return true;
}

static void watch_add(struct text_thread *thread, struct client *client, struct instant until) {
    client->wait_until = until;
    if (client->is_watched) {
        return;
    }
    client_ref(client);
    client->is_watched = true;
    client->prev = NULL;
    client->next = thread->watched;
    if (client->next != NULL) {
        client->next->prev = client;
    }
    thread->watched = client;
}

static void watch_remove(struct text_thread *thread, struct client *client) {
    if (!client->is_watched) {
        return;
    }
    client->is_watched = false;
    if (client->prev != NULL) {
        client->prev->next = client->next;
    } else {
        thread->watched = client->next;
    }
    if (client->next != NULL) {
        client->next->prev = client->prev;
    }
    client_unref(client);
}

/* ---- text thread: the request --------------------------------------------------------------- */

static void client_decode(struct client *client) {
    char sentence[PUBLIC_ERROR_MAX];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence - 1);
    struct bytes raw = {client->raw, client->raw_len};
    bool is_generate = client->kind == CLIENT_GENERATE;
    enum status status =
        is_generate
            ? public_generate_request_decode(raw, &client->arena, &client->wish, &error)
            : public_tokenize_request_decode(raw, &client->arena, &client->tokenize, &error);
    client->is_decoded = true;
    free(client->raw); /* decoders keep nothing of their input */
    client->raw = NULL;
    sentence[error.len] = '\0';
    if (status != STATUS_OK) {
        client_finish(client, rpc_code_from_status(status), sentence, 0);
    } else if (is_generate) {
        client_post_open(client);
    } else {
        client->is_tokenizing = true;
    }
}

/* Ids of a text into the thread's scratch. */
static enum status client_encode(struct text_thread *thread, const struct client *client,
                                 struct bytes text, bool add_special, uint32_t limit,
                                 struct token_buffer *out, struct writer *error) {
    size_t cap = 3 * text.len + TOKENS_SLACK; /* a space may become three byte tokens */
    if (limit > 0 && cap > (size_t)limit + ENCODE_ABOVE) {
        cap = (size_t)limit + ENCODE_ABOVE;
    }
    *out = (struct token_buffer){.ids = text_scratch(thread, cap), .cap = cap};
    enum status status = tokenizer_encode(client->model->tokenizer, text, add_special, out, error);
    if (status != STATUS_RANGE && status != STATUS_TIMEOUT) {
        return status;
    }
    if (limit > 0 && status == STATUS_RANGE) {
        writer_printf(error, ": input and answer together may have %u, shorten the prompt",
                      (unsigned)limit);
    }
    return STATUS_INVALID;
}

static void client_post_tokens(struct client *client, const struct sampling *sampling,
                               const uint32_t *tokens, uint32_t count) {
    struct shell_mail *mail = shell_mail_take(client->router->shell, EVENT_TOKENIZED);
    size_t len = (size_t)count * sizeof *tokens;
    uint8_t *payload = shell_mail_payload(mail, sizeof *sampling + len);
    memcpy(payload, sampling, sizeof *sampling);
    if (len > 0) {
        memcpy(payload + sizeof *sampling, tokens, len);
    }
    mail->event.u.tokenized.request = client->request;
    mail->event.u.tokenized.status = STATUS_OK;
    mail->event.u.tokenized.detail = "";
    mail->event.u.tokenized.tokens = (const uint32_t *)(const void *)(payload + sizeof *sampling);
    mail->event.u.tokenized.token_count = count;
    mail->event.u.tokenized.max_tokens = client->wish.max_tokens;
    mail->event.u.tokenized.choices = client->wish.choices;
    mail->event.u.tokenized.sampling = (const struct sampling *)(const void *)payload;
    mail->event.u.tokenized.eos = client->model->eos;
    mail->event.u.tokenized.eos_count = client->model->eos_count;
    shell_post(client->router->shell, mail);
}

/* What each answer needs on its way to text. The core refuses more than there may be. */
static enum status client_make_choices(struct client *client, struct writer *error) {
    const struct public_sampling *sampling = &client->wish.sampling;
    uint32_t wanted = client->wish.choices;
    wanted = wanted == 0 ? 1 : wanted < ROUTER_CHOICES_MAX ? wanted : ROUTER_CHOICES_MAX;
    client->choices = calloc(wanted, sizeof *client->choices);
    CHECK(client->choices != NULL);
    client->choice_count = wanted;
    for (uint32_t i = 0; i < wanted; i++) {
        struct choice *choice = &client->choices[i];
        buffer_init(&choice->text, CLIENT_TEXT_MAX);
        buffer_init(&choice->piece, CLIENT_TEXT_MAX);
        detokenizer_init(&choice->detokenizer, client->model->tokenizer,
                         (struct detokenizer_options){.continues_text = true});
        if (sampling->stop_count > 0) {
            choice->stop = malloc(sizeof *choice->stop);
            CHECK(choice->stop != NULL);
            enum status status =
                stop_init(choice->stop, sampling->stops, sampling->stop_count, error);
            if (status != STATUS_OK) {
                return STATUS_INVALID;
            }
        }
    }
    return STATUS_OK;
}

/* The model is there: ids and sampling, or a sentence. */
static enum status client_prepare(struct text_thread *thread, struct client *client,
                                  struct writer *error) {
    const struct public_generate_request *wish = &client->wish;
    struct sampling sampling = {0};
    enum status status = public_sampling_resolve(&wish->sampling, &client->model->defaults,
                                                 random_u64(), wish->max_tokens, &sampling, error);
    if (status != STATUS_OK) {
        return status;
    }
    status = client_make_choices(client, error);
    if (status != STATUS_OK) {
        return status;
    }
    const uint32_t *tokens = wish->tokens;
    uint32_t count = wish->token_count;
    if (!wish->is_tokens) {
        struct token_buffer ids;
        status = client_encode(thread, client, wish->prompt, true, client->limit, &ids, error);
        if (status != STATUS_OK) {
            return status;
        }
        tokens = ids.ids;
        count = (uint32_t)ids.count;
    }
    client_post_tokens(client, &sampling, tokens, count);
    return STATUS_OK;
}

static void client_reply_tokenized(struct text_thread *thread, struct client *client,
                                   uint32_t context) {
    char sentence[PUBLIC_ERROR_MAX];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence - 1);
    struct token_buffer ids;
    enum status status = client_encode(thread, client, client->tokenize.text,
                                       client->tokenize.add_special, 0, &ids, &error);
    if (status == STATUS_OK) {
        struct public_tokenize_reply reply = {
            .token_count = (uint32_t)ids.count, .tokens = ids.ids, .context_tokens = context};
        status = public_tokenize_reply_encode(&reply, &thread->out);
        if (status != STATUS_OK) {
            writer_printf(&error, "the answer of %zu tokens does not fit into a message",
                          ids.count);
        }
    }
    sentence[error.len] = '\0';
    if (status == STATUS_OK) {
        rpc_call_send(client->router->rpc, client->call, thread->out.data, thread->out.len);
        sentence[0] = '\0';
    }
    client_finish(client, rpc_code_from_status(status), sentence, 0);
}

/* Everything of the request that is not needed for the answer. */
static void client_forget_wish(struct client *client) {
    client->wish.prompt = (struct bytes){0};
    client->wish.tokens = NULL;
    client->wish.sampling.stops = NULL;
    wire_arena_fini(&client->arena);
}

static void client_refuse(struct client *client, enum status status, const char *sentence) {
    if (client->kind == CLIENT_GENERATE) {
        client_post_refusal(client, status, sentence);
    } else if (!client->is_over) {
        client_finish(client, rpc_code_from_status(status), sentence,
                      status == STATUS_UNAVAILABLE ? 1000 : 0);
    }
}

/* Ends the tokenizing, or lets it wait for the tokenizer. */
static void client_tokenize(struct text_thread *thread, struct client *client, bool is_wanted) {
    char sentence[PUBLIC_ERROR_MAX];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence - 1);
    enum status status = STATUS_OK;
    uint32_t context = 0;
    bool is_generate = client->kind == CLIENT_GENERATE;
    const char *name = is_generate ? client->wish.model : client->tokenize.model;
    enum models_answer answer = MODELS_WAIT;
    if (is_wanted) {
        answer = models_get(client->router, name, &client->model, &context, &error);
    }
    struct instant now = clock_now();
    if (!is_wanted) {
        status = STATUS_CANCELLED;
        writer_text(&error, "nobody waits for it any more");
    } else if (answer == MODELS_READY && is_generate) {
        status = client_prepare(thread, client, &error);
    } else if (answer == MODELS_READY) {
        client_reply_tokenized(thread, client, context);
    } else if (answer == MODELS_UNKNOWN && !is_generate) {
        status = STATUS_NOT_FOUND;
    } else if (!client->is_watched || !instant_reached(now, client->wait_until)) {
        if (!client->is_watched) {
            watch_add(thread, client, instant_add(now, span_ms(TOKENIZER_WAIT_MS)));
        }
        return;
    } else {
        status = STATUS_UNAVAILABLE;
    }
    sentence[error.len] = '\0';
    watch_remove(thread, client);
    client->is_tokenizing = false;
    if (status != STATUS_OK) {
        client_refuse(client, status, sentence);
    }
    client_forget_wish(client);
}

/* ---- text thread: the answer ---------------------------------------------------------------- */

/* Moves what the detokenizer gave out past the stop strings. True if one was found. */
static bool choice_take_piece(struct choice *choice) {
    if (choice->stop == NULL) {
        buffer_put(&choice->text, choice->piece.data, choice->piece.len);
        buffer_clear(&choice->piece);
        return false;
    }
    struct writer writer = buffer_reserve(&choice->text, choice->piece.len + STOP_BYTES_MAX);
    struct bytes piece = {(const uint8_t *)choice->piece.data, choice->piece.len};
    bool is_found = stop_push(choice->stop, piece, &writer);
    buffer_commit(&choice->text, &writer);
    buffer_clear(&choice->piece);
    return is_found;
}

static void choice_take_tokens(struct client *client, struct choice *choice,
                               const struct token_queue *queue) {
    uint32_t top = 0;
    for (uint32_t i = 0; i < queue->count && choice->stopped_at == 0; i++) {
        struct token_item item = token_queue_at(queue, i, &top);
        token_queue_put(&choice->pending, &item);
        choice->token_total++;
        struct writer writer =
            buffer_reserve(&choice->piece, detokenizer_bytes_max(client->model->tokenizer, 1));
        detokenizer_push(&choice->detokenizer, &item.token, 1, &writer);
        buffer_commit(&choice->piece, &writer);
        if (choice_take_piece(choice)) {
            choice->stopped_at = choice->token_total;
            struct shell_mail *mail = shell_mail_take(client->router->shell, EVENT_STOP_FOUND);
            mail->event.u.stop_found.request = client->request;
            mail->event.u.stop_found.index = (uint32_t)(choice - client->choices);
            mail->event.u.stop_found.completion_tokens = choice->stopped_at;
            shell_post(client->router->shell, mail);
        }
    }
}

/* What the detokenizer and the stop strings hold back. Once. */
static void choice_flush(const struct client *client, struct choice *choice) {
    if (choice->is_flushed || choice->token_total == 0) {
        return;
    }
    choice->is_flushed = true;
    if (choice->stopped_at != 0) {
        return;
    }
    struct writer writer =
        buffer_reserve(&choice->piece, detokenizer_bytes_max(client->model->tokenizer, 0));
    detokenizer_flush(&choice->detokenizer, &writer);
    buffer_commit(&choice->piece, &writer);
    if (choice_take_piece(choice)) {
        choice->stopped_at = choice->token_total;
    } else if (choice->stop != NULL) {
        writer = buffer_reserve(&choice->text, STOP_BYTES_MAX);
        stop_flush(choice->stop, &writer);
        buffer_commit(&choice->text, &writer);
    }
}

/* How a choice ended, as the client is told: the core may have ended it before it heard of the stop
 * string. */
static enum finish choice_finish(const struct choice *choice, enum finish finish) {
    bool is_ok = finish == FINISH_STOP || finish == FINISH_LENGTH;
    return is_ok && choice->stopped_at != 0 ? FINISH_STOP : finish;
}

static uint32_t client_token_total(const struct client *client) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < client->choice_count; i++) {
        total += client->choices[i].token_total;
    }
    return total;
}

/* The last reply of the call and its status. */
static void client_end(struct text_thread *thread, struct client *client) {
    const struct client_answer *answer = &client->answer; /* set once, before this run */
    if (answer->is_client_gone) {
        rpc_call_cancel(client->router->rpc, client->call);
        client->is_over = true;
        return;
    }
    bool is_ok = answer->status == STATUS_OK;
    uint32_t total = client_token_total(client);
    if (is_ok || total > 0) {
        struct public_generate_reply reply = {.finish = answer->finish,
                                              .has_usage = true,
                                              .usage = answer->usage,
                                              .seed = answer->seed,
                                              .has_trace = true,
                                              .trace = answer->trace};
        /* Tokens behind a stop string are nobody's, also if the core had counted them. */
        reply.usage.completion_tokens = total;
        bool is_sent = false;
        if (client->choice_count > 0) {
            struct choice *choice = &client->choices[answer->index];
            choice_flush(client, choice);
            reply.finish = choice_finish(choice, answer->finish);
            is_sent = choice_send(thread, client, choice, &reply);
        } else { /* aborted before there was a token */
            is_sent = client_send(thread, client, &reply);
        }
        if (!is_sent) {
            return;
        }
    }
    client_finish(client, rpc_code_from_status(answer->status), is_ok ? "" : answer->detail,
                  answer->retry_after_ms);
}

/* Whether this choice has something for its client now; the call's last reply is no one's here. */
static bool choice_is_due(const struct client *client, const struct choice *choice,
                          bool is_answered) {
    bool is_last = is_answered && choice == &client->choices[client->answer.index];
    if (is_last) {
        return choice_is_long(choice);
    }
    return choice->pending.count > 0 || choice->text.len > 0 || choice->is_ending;
}

/* One reply of a choice. A failed call whose client has nothing says so by its status alone. */
static bool choice_stream(struct text_thread *thread, struct client *client,
                          struct choice *choice) {
    struct public_generate_reply reply = {0};
    if (choice->is_ending && !choice_is_long(choice)) {
        choice->is_ending = false;
        choice_flush(client, choice);
        reply.finish = choice_finish(choice, choice->finish);
        if (reply.finish == FINISH_ERROR && client_token_total(client) == 0) {
            return true;
        }
    }
    return choice_send(thread, client, choice, &reply);
}

/* Sends what is due into an empty queue, about ROUND_BYTES at once: so what piles up while the
 * client does not read is merged. */
static void client_stream(struct text_thread *thread, struct client *client, bool is_answered) {
    bool is_due = is_answered;
    for (uint32_t i = 0; i < client->choice_count; i++) {
        is_due = is_due || choice_is_due(client, &client->choices[i], is_answered);
    }
    while (is_due && !client->is_over && client_is_writable(client)) {
        if (is_answered && client->answer.is_client_gone) {
            client_end(thread, client);
            return;
        }
        size_t sent = 0;
        is_due = false;
        for (uint32_t i = 0; i < client->choice_count; i++) {
            struct choice *choice = &client->choices[i];
            if (!choice_is_due(client, choice, is_answered)) {
                continue;
            }
            size_t bytes = choice_reply_bytes(choice);
            if (sent > 0 && sent + bytes > ROUND_BYTES) {
                is_due = true;
                continue;
            }
            sent += bytes;
            if (!choice_stream(thread, client, choice)) {
                return;
            }
            is_due = is_due || choice_is_due(client, choice, is_answered);
        }
        if (is_answered && !is_due && sent == 0) {
            client_end(thread, client);
            return;
        }
        is_due = is_due || is_answered;
    }
}

/* Takes what came for one choice. */
static struct token_queue choice_open_locked(struct choice *choice) {
    struct token_queue inbox = choice->inbox;
    choice->inbox = (struct token_queue){0};
    choice->is_ending = choice->is_ending || choice->is_end_there;
    choice->is_end_there = false;
    return inbox;
}

static void client_turn(struct text_thread *thread, struct client *client) {
    struct token_queue inboxes[ROUTER_CHOICES_MAX];
    pthread_mutex_lock(&client->lock);
    client->is_scheduled = false;
    bool is_closed = client->is_closed;
    bool is_answered = client->is_answer_there;
    client->is_tokenizing = client->is_tokenizing || client->is_tokenize_wish;
    client->is_tokenize_wish = false;
    uint32_t count = client->choice_count;
    for (uint32_t i = 0; i < count; i++) {
        inboxes[i] = choice_open_locked(&client->choices[i]);
    }
    pthread_mutex_unlock(&client->lock);
    client->is_over = client->is_over || is_closed;
    if (!client->is_decoded && !client->is_over) {
        client_decode(client);
    }
    if (client->is_tokenizing) {
        client_tokenize(thread, client, !client->is_over && !is_answered);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (!client->is_over) {
            choice_take_tokens(client, &client->choices[i], &inboxes[i]);
        }
        token_queue_fini(&inboxes[i]);
    }
    if (client->kind == CLIENT_GENERATE) {
        client_stream(thread, client, is_answered);
        if (is_closed) {
            watch_remove(thread, client);
        } else if (is_answered && !client->is_watched) {
            struct span within = client->router->settings->client_stall;
            watch_add(thread, client, instant_add(clock_now(), within));
        }
    }
}

static void client_run(struct mail *mail, void *ctx) {
    struct client *client = (struct client *)(void *)mail; /* its first member */
    client_turn(ctx, client);
    client_unref(client);
}

void client_watch(struct text_thread *thread, struct instant now) {
    struct client *next = NULL;
    for (struct client *client = thread->watched; client != NULL; client = next) {
        next = client->next;
        if (client->is_tokenizing) {
            client_tokenize(thread, client, !client->is_over);
        } else if (instant_reached(now, client->wait_until)) {
            /* It has its answer and does not take it. */
            client->is_over = true;
            rpc_call_abort(client->router->rpc, client->call, RPC_CODE_RESOURCE_EXHAUSTED,
                           "the client did not read its answer in time (--client-stall): read "
                           "faster");
            watch_remove(thread, client);
        }
    }
}

/* ---- control thread: effects ---------------------------------------------------------------- */

/* Tokens of prompt and answer that the largest decode worker of this model can hold. */
static uint32_t model_limit(const struct router_core *core, const char *model) {
    uint32_t context = 0;
    uint32_t kv_tokens = 0;
    uint32_t cursor = 0;
    const struct worker *worker = NULL;
    while ((worker = router_worker(core, &cursor)) != NULL) {
        if (worker->info.role == ROLE_DECODE &&
            strncmp(worker->info.model, model, LABEL_MAX) == 0) {
            context = worker->info.context > context ? worker->info.context : context;
            kv_tokens = worker->info.kv_tokens > kv_tokens ? worker->info.kv_tokens : kv_tokens;
        }
    }
    return context < kv_tokens ? context : kv_tokens;
}

static void inbox_put_locked(struct client *client, const struct effect *effect) {
    CHECK_OP(effect->u.deliver.index, <, client->choice_count);
    struct choice *choice = &client->choices[effect->u.deliver.index];
    for (uint32_t i = 0; i < effect->u.deliver.token_count; i++) {
        struct token_item item = {.token = effect->u.deliver.tokens[i],
                                  .has_logprobs = effect->u.deliver.has_logprobs,
                                  .logprob = effect->u.deliver.logprob,
                                  .top_count = effect->u.deliver.top_count,
                                  .top_tokens = effect->u.deliver.top_tokens,
                                  .top_logprobs = effect->u.deliver.top_logprobs};
        token_queue_put(&choice->inbox, &item);
    }
}

static void choice_end_locked(struct client *client, const struct effect *effect) {
    CHECK_OP(effect->u.choice.index, <, client->choice_count);
    struct choice *choice = &client->choices[effect->u.choice.index];
    choice->is_end_there = true;
    choice->finish = effect->u.choice.finish;
}

static float span_to_float_ms(struct span span) {
    return (float)((double)span.ns / 1e6);
}

static void answer_put_locked(struct client *client, const struct effect *effect) {
    struct client_answer *answer = &client->answer;
    if (client->request == 0) { /* else it is the same, and the text thread may be reading it */
        client->request = effect->u.answer.request;
    }
    client->is_answer_there = true;
    answer->index = effect->u.answer.index;
    answer->outcome = effect->u.answer.outcome;
    answer->status = effect->u.answer.status;
    answer->finish = effect->u.answer.finish;
    answer->usage = effect->u.answer.usage;
    answer->seed = effect->u.answer.seed;
    answer->retry_after_ms = effect->u.answer.retry_after_ms;
    answer->is_client_gone = effect->u.answer.is_client_gone;
    text_copy(answer->detail, sizeof answer->detail, effect->u.answer.detail);
    struct public_trace *trace = &answer->trace;
    text_copy(trace->prefill_worker, LABEL_MAX, effect->u.answer.prefill_label);
    text_copy(trace->decode_worker, LABEL_MAX, effect->u.answer.decode_label);
    trace->kv_bytes = effect->u.answer.kv_bytes;
    trace->attempts = effect->u.answer.attempts;
    trace->queue_ms = span_to_float_ms(effect->u.answer.queued);
    trace->ttft_ms = span_to_float_ms(effect->u.answer.ttft);
    trace->total_ms = span_to_float_ms(effect->u.answer.total);
    trace->has_kv_exposed = effect->u.answer.kv_exposed_us > 0;
    trace->kv_exposed_ms = (float)effect->u.answer.kv_exposed_us / 1e3f;
}

static uint64_t effect_call(const struct effect *effect) {
    if (effect->kind == EFFECT_TOKENIZE) {
        return effect->u.tokenize.call.v;
    }
    if (effect->kind == EFFECT_DELIVER) {
        return effect->u.deliver.call.v;
    }
    return effect->kind == EFFECT_CHOICE ? effect->u.choice.call.v : effect->u.answer.call.v;
}

void client_effect(struct router *router, const struct effect *effect) {
    struct client *client = client_find(router, effect_call(effect));
    CHECK(client != NULL); /* the core's reference */
    uint32_t limit =
        effect->kind == EFFECT_TOKENIZE ? model_limit(router->core, client->wish.model) : 0;
    bool is_settled = false;
    pthread_mutex_lock(&client->lock);
    if (effect->kind == EFFECT_TOKENIZE) {
        client->is_tokenize_wish = true;
        client->request = effect->u.tokenize.request;
        client->limit = limit;
    } else if (effect->kind == EFFECT_DELIVER) {
        inbox_put_locked(client, effect);
    } else if (effect->kind == EFFECT_CHOICE) {
        choice_end_locked(client, effect);
    } else {
        answer_put_locked(client, effect);
        is_settled = client->is_closed;
    }
    bool is_due = client_schedule_locked(client);
    uint64_t request = client->request;
    pthread_mutex_unlock(&client->lock);
    if (is_due) {
        client_post(client);
    }
    if (is_settled) {
        client_settle(client, request);
    }
}

/* ---- rpc thread ----------------------------------------------------------------------------- */

static void client_open(struct router *router, struct rpc_call_id call, enum client_kind kind,
                        const struct rpc_incoming *incoming) {
    struct client *client = client_create(router, call, kind, incoming);
    rpc_call_set_ctx(router->rpc, call, client);
    client->raw_len = incoming->payload.len;
    client->raw = malloc(client->raw_len > 0 ? client->raw_len : 1);
    CHECK(client->raw != NULL);
    if (client->raw_len > 0) {
        memcpy(client->raw, incoming->payload.data, client->raw_len);
    }
    if (kind == CLIENT_GENERATE && client->raw_len <= CLIENT_INLINE_MAX) {
        client_decode(client);
        return;
    }
    client->is_scheduled = true;
    client_post(client);
}

static void generate_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    client_open(ctx, call, CLIENT_GENERATE, incoming);
}

static void tokenize_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    client_open(ctx, call, CLIENT_TOKENIZE, incoming);
}

static void on_writable(void *ctx, struct rpc_call_id call) {
    struct client *client = ctx;
    (void)call;
    pthread_mutex_lock(&client->lock);
    bool is_due = client->wants_writable && client_schedule_locked(client);
    client->wants_writable = false;
    pthread_mutex_unlock(&client->lock);
    if (is_due) {
        client_post(client);
    }
}

static void on_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    struct client *client = ctx;
    (void)call;
    enum cause cause =
        outcome->end == RPC_END_DEADLINE ? CAUSE_DEADLINE : client_gone_cause(client);
    pthread_mutex_lock(&client->lock);
    bool is_gone = client->is_opened && !client->is_answer_there;
    pthread_mutex_unlock(&client->lock);
    if (is_gone) { /* first, so that the core hears the true cause before anything ends of it */
        client_post_gone(client, cause);
    }
    pthread_mutex_lock(&client->lock);
    client->is_closed = true;
    bool is_settled = client->is_answer_there;
    bool is_gone_late = client->is_opened && !is_gone && !is_settled;
    bool is_due = client_schedule_locked(client);
    uint64_t request = client->request;
    pthread_mutex_unlock(&client->lock);
    if (is_gone_late) {
        client_post_gone(client, cause);
    }
    if (is_due) {
        client_post(client);
    }
    if (is_settled) {
        client_settle(client, request);
    }
    client_unref(client);
}

const struct rpc_handlers generate_handlers = {
    .on_open = generate_open, .on_writable = on_writable, .on_closed = on_closed};
const struct rpc_handlers tokenize_handlers = {
    .on_open = tokenize_open, .on_writable = on_writable, .on_closed = on_closed};
