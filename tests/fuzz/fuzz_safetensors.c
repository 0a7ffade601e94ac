/* A model directory's weights. The first byte 0: the rest is model.safetensors, its header's length
 * taken from the input; 1: the length is made right, so that the JSON behind it is met; 2: an index
 * file, with one shard behind a NUL byte. Every byte of every accepted tensor must be readable. */
#include "engine/checkpoint.h"
#include "fuzz/folder.h"
#include "fuzz/fuzz.h"

/* A header, its right length before it, and as many data bytes as the input says. */
static void write_shard(const char *name, struct bytes header, size_t data_bytes) {
    uint8_t *file = calloc(1, 8 + header.len + data_bytes + 1);
    CHECK(file != NULL);
    for (unsigned i = 0; i < 8; i++) {
        file[i] = (uint8_t)((uint64_t)header.len >> 8 * i);
    }
    if (header.len > 0) {
        memcpy(file + 8, header.data, header.len);
    }
    folder_write(name, (struct bytes){file, 8 + header.len + data_bytes});
    free(file);
}

static void write_model(struct input *input) {
    uint8_t which = input_u8(input);
    folder_remove("model.safetensors");
    folder_remove("model.safetensors.index.json");
    if (which % 4 == 0) {
        folder_write("model.safetensors", input_bytes(input, SIZE_MAX));
    } else if (which % 4 < 3) {
        size_t data_bytes = input_u8(input);
        write_shard("model.safetensors", input_bytes(input, SIZE_MAX), data_bytes);
    } else {
        size_t data_bytes = input_u8(input);
        const uint8_t *end = input->len > 0 ? memchr(input->data, '\0', input->len) : NULL;
        size_t len = end != NULL ? (size_t)(end - input->data) : input->len;
        folder_write("model.safetensors.index.json", input_bytes(input, len));
        (void)input_u8(input);
        write_shard("a.safetensors", input_bytes(input, SIZE_MAX), data_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    write_model(&input);
    char sentence[1024];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    struct checkpoint *checkpoint = NULL;
    enum status status = checkpoint_open(folder_path(), &error, &checkpoint);
    CHECK((status == STATUS_OK) == (checkpoint != NULL));
    CHECK((status == STATUS_OK) == (error.len == 0));
    if (checkpoint == NULL) {
        return 0;
    }
    unsigned sum = 0;
    for (uint32_t i = 0; i < checkpoint_count(checkpoint); i++) {
        const struct checkpoint_tensor *tensor = checkpoint_at(checkpoint, i);
        CHECK(checkpoint_find(checkpoint, tensor->name) == tensor);
        CHECK(tensor->rank <= CHECKPOINT_RANK_MAX);
        for (uint64_t k = 0; k < tensor->bytes; k++) {
            sum += tensor->data[k];
        }
    }
    checkpoint_close(checkpoint);
    return sum == UINT32_MAX ? 0 : 0; /* the sum is only there so that the bytes are read */
}
