/* config.json of a model directory; behind a NUL byte, generation_config.json. What is accepted
 * must be inside the bounds that the loader's products rely on. */
#include <math.h>

#include "engine/config.h"
#include "fuzz/folder.h"
#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    const uint8_t *end = len > 0 ? memchr(data, '\0', len) : NULL;
    folder_write("config.json", input_bytes(&input, end != NULL ? (size_t)(end - data) : len));
    folder_remove("generation_config.json");
    if (end != NULL) {
        (void)input_u8(&input);
        folder_write("generation_config.json", input_bytes(&input, SIZE_MAX));
    }
    char sentence[1024];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    struct model_config config;
    enum status status = config_read(folder_path(), &error, &config);
    CHECK((status == STATUS_OK) == (error.len == 0));
    if (status == STATUS_OK) {
        CHECK(config.hidden > 0 && config.layers > 0 && config.heads > 0 && config.kv_heads > 0);
        CHECK(config.head_dim > 0 && config.vocab > 0 && config.context_tokens > 0);
        CHECK_OP(config.heads % config.kv_heads, ==, 0);
        CHECK_OP(config.eos_count, <=, MODEL_EOS_MAX);
        CHECK(isfinite(config.norm_epsilon) && isfinite(config.rope_theta));
        /* The largest products of the loader. */
        uint64_t bytes = 0;
        CHECK(!__builtin_mul_overflow((uint64_t)config.vocab, (uint64_t)config.hidden * 8, &bytes));
        CHECK(!__builtin_mul_overflow((uint64_t)config.ffn, (uint64_t)config.hidden * 8, &bytes));
        CHECK_OP((uint64_t)config.heads * config.head_dim, <=, UINT32_MAX);
    }
    return 0;
}
