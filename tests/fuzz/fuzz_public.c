/* The public API: the first byte chooses a message, the rest is what a client or a router sent.
 *
 * Requests that decode must encode again to what decodes to the same, and whatever sampling a
 * client asks for resolves to numbers that a session message may carry, or to one sentence. */
#include <math.h>

#include "fuzz/fuzz.h"
#include "wire/public.h"
#include "wire/session.h"

static struct wire_arena arena, second;
static struct wire_buffer buffer, third;

static void check_sentence(enum status status, const struct writer *error) {
    CHECK((status == STATUS_OK) == (error->len == 0));
    CHECK(!error->is_full);
    CHECK(utf8_is_valid((const uint8_t *)error->data, error->len));
    for (size_t i = 0; i < error->len; i++) {
        CHECK((unsigned char)error->data[i] >= ' ');
    }
}

static void check_resolved(const struct public_generate_request *request, uint8_t flags,
                           struct writer *error) {
    const struct generation_defaults defaults = {.has_temperature = (flags & 1) != 0,
                                                 .has_top_k = (flags & 2) != 0,
                                                 .has_top_p = (flags & 4) != 0,
                                                 .temperature = 0.5f,
                                                 .top_k = 10,
                                                 .top_p = 0.5f,
                                                 .vocab = (flags & 8) != 0 ? 100 : 0};
    struct message admit = {.kind = MESSAGE_ADMIT};
    static const uint32_t token = 1;
    error->len = 0;
    enum status status = public_sampling_resolve(
        &request->sampling, &defaults, 1, request->max_tokens, &admit.u.admit.sampling, error);
    check_sentence(status, error);
    if (status == STATUS_OK) {
        admit.u.admit.attempt.v = 1;
        admit.u.admit.tokens = &token;
        admit.u.admit.token_count = admit.u.admit.output_first = admit.u.admit.max_new = 1;
        CHECK_OP(wire_session_encode(&admit, &buffer), ==, STATUS_OK);
    }
}

/* Encoding again gives the same bytes: nothing is lost on the way through the struct. */
static void check_again(const struct public_generate_request *request, struct writer *error) {
    struct public_generate_request again;
    CHECK_OP(public_generate_request_encode(request, &buffer), ==, STATUS_OK);
    CHECK_OP(public_generate_request_decode(wire_buffer_bytes(&buffer), &second, &again, error), ==,
             STATUS_OK);
    CHECK_OP(public_generate_request_encode(&again, &third), ==, STATUS_OK);
    CHECK_OP(buffer.len, ==, third.len);
    CHECK(buffer.len == 0 || memcmp(buffer.data, third.data, buffer.len) == 0);
    CHECK_OP(request->token_count, ==, again.token_count);
    CHECK_OP(request->prompt.len, ==, again.prompt.len);
    CHECK(request->prompt.len == 0 ||
          memcmp(request->prompt.data, again.prompt.data, request->prompt.len) == 0);
    CHECK(strcmp(request->model, again.model) == 0);
    CHECK_OP(request->sampling.stop_count, ==, again.sampling.stop_count);
    CHECK_OP(request->sampling.bias_count, ==, again.sampling.bias_count);
    CHECK_OP(request->max_tokens, ==, again.max_tokens);
    CHECK_OP(request->choices, ==, again.choices);
}

static void generate(struct bytes bytes, uint8_t flags, struct writer *error) {
    struct public_generate_request request;
    enum status status = public_generate_request_decode(bytes, &arena, &request, error);
    check_sentence(status, error);
    if (status == STATUS_OK) {
        CHECK(utf8_is_valid(request.prompt.data, request.prompt.len));
        CHECK(request.is_tokens ? request.prompt.len == 0 : request.token_count == 0);
        check_again(&request, error);
        check_resolved(&request, flags, error);
    }
}

static void small_request(struct bytes bytes, uint8_t which, struct writer *error) {
    struct public_abort_request abort_request;
    struct public_tokenize_request tokenize;
    enum status status = STATUS_OK;
    if (which == 1) {
        status = public_abort_request_decode(bytes, &arena, &abort_request, error);
        CHECK(status != STATUS_OK || abort_request.label[0] != '\0');
        CHECK(status != STATUS_OK || public_abort_request_encode(&abort_request, &buffer) == 0);
    } else if (which == 2) {
        status = public_tokenize_request_decode(bytes, &arena, &tokenize, error);
        CHECK(status != STATUS_OK || public_tokenize_request_encode(&tokenize, &buffer) == 0);
    } else {
        status = public_list_models_request_decode(bytes, &arena, error);
    }
    check_sentence(status, error);
}

static void reply(struct bytes bytes, uint8_t which) {
    struct public_generate_reply generated;
    struct public_tokenize_reply tokens;
    const struct public_model *models = NULL;
    uint32_t count = 0;
    if (which == 4) {
        if (public_generate_reply_decode(bytes, &arena, &generated) == STATUS_OK) {
            CHECK_OP(public_generate_reply_encode(&generated, &buffer), ==, STATUS_OK);
        }
    } else if (which == 5) {
        if (public_abort_reply_decode(bytes, &arena, &count) == STATUS_OK) {
            CHECK_OP(public_abort_reply_encode(count, &buffer), ==, STATUS_OK);
        }
    } else if (which == 6) {
        if (public_tokenize_reply_decode(bytes, &arena, &tokens) == STATUS_OK) {
            CHECK_OP(public_tokenize_reply_encode(&tokens, &buffer), ==, STATUS_OK);
        }
    } else if (public_list_models_reply_decode(bytes, &arena, &models, &count) == STATUS_OK) {
        CHECK_OP(public_list_models_reply_encode(models, count, &buffer), ==, STATUS_OK);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    uint8_t which = input_u8(&input);
    uint8_t *copy = input_copy(input_bytes(&input, SIZE_MAX));
    struct bytes bytes = {copy, len > 0 ? len - 1 : 0};
    char sentence[PUBLIC_ERROR_MAX];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    if (which % 16 >= 8 || which % 8 == 0) {
        generate(bytes, which >> 4, &error);
    } else if (which % 8 < 4) {
        small_request(bytes, which % 8, &error);
    } else {
        reply(bytes, which % 8);
    }
    free(copy);
    wire_arena_reset(&arena);
    wire_arena_reset(&second);
    return 0;
}
