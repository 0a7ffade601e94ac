#include "engine/checkpoint.h"

#include "base/check.h"
#include "engine/fail.h"
#include "engine/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#define SHARDS_MAX  1024u
#define TENSORS_MAX (1u << 20)
#define INDEX_MAX   (16u << 20)

struct shard {
    char *name;
    unsigned char *data;
    size_t bytes;
    json_t *header; /* the tensors' names and types live in here */
};

struct entry {
    struct checkpoint_tensor tensor;
    uint64_t begin;
    uint64_t end;
};

struct checkpoint {
    struct shard *shards;
    uint32_t shard_count;
    struct entry *entries;
    uint32_t entry_count;
    uint32_t entry_cap;
    json_t *index; /* NULL for a single file */
};

static uint32_t dtype_bytes(const char *dtype) {
    static const struct {
        const char *name;
        uint32_t bytes;
    } known[] = {{"F64", 8},     {"I64", 8},     {"U64", 8},  {"F32", 4}, {"I32", 4},
                 {"U32", 4},     {"F16", 2},     {"BF16", 2}, {"I16", 2}, {"U16", 2},
                 {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I8", 1},   {"U8", 1},  {"BOOL", 1}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(known[i].name, dtype) == 0) {
            return known[i].bytes;
        }
    }
    return 0;
}

static enum status shard_map(const char *directory, struct shard *shard, struct writer *error) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/%s", directory, shard->name) >= (int)sizeof(path)) {
        return fail(error, STATUS_INVALID, "the path of the model directory is too long");
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return fail(error, errno == ENOENT ? STATUS_NOT_FOUND : STATUS_IO, "%s: %s",
                    fail_text(path).text, strerror(errno));
    }
    struct stat info;
    enum status status = STATUS_OK;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        status = fail(error, STATUS_IO, "%s: not a regular file", fail_text(path).text);
    } else if (info.st_size < 8) {
        status = fail(error, STATUS_CORRUPT,
                      "%s: %" PRId64 " bytes long, but a safetensors file has at least 8",
                      fail_text(shard->name).text, (int64_t)info.st_size);
    } else {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            status = fail(error, STATUS_IO, "%s: cannot be mapped: %s", fail_text(path).text,
                          strerror(errno));
        } else {
            shard->data = data;
            shard->bytes = (size_t)info.st_size;
        }
    }
    (void)close(fd); /* read only: nothing to lose */
    return status;
}

/* One entry of a header, checked against the length of the data part. */
static enum status tensor_read(const struct shard *shard, const char *name, json_t *value,
                               uint64_t data_bytes, struct entry *entry, struct writer *error) {
    const char *file = shard->name;
    struct fail_text shown = fail_text(name);
    json_t *dtype = json_object_get(value, "dtype");
    json_t *shape = json_object_get(value, "shape");
    json_t *offsets = json_object_get(value, "data_offsets");
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) ||
        json_array_size(offsets) != 2 || !json_is_integer(json_array_get(offsets, 0)) ||
        !json_is_integer(json_array_get(offsets, 1))) {
        return fail(error, STATUS_CORRUPT,
                    "%s: tensor \"%s\" needs a dtype, a shape and two data_offsets",
                    fail_text(file).text, shown.text);
    }
    uint32_t size = dtype_bytes(json_string_value(dtype));
    if (size == 0) {
        return fail(error, STATUS_UNSUPPORTED, "%s: tensor \"%s\" has the unknown dtype \"%s\"",
                    fail_text(file).text, shown.text, fail_text(json_string_value(dtype)).text);
    }
    if (json_array_size(shape) > CHECKPOINT_RANK_MAX) {
        return fail(error, STATUS_CORRUPT, "%s: tensor \"%s\" has %zu dimensions, at most %u work",
                    fail_text(file).text, shown.text, json_array_size(shape), CHECKPOINT_RANK_MAX);
    }
    uint64_t bytes = size;
    for (size_t i = 0; i < json_array_size(shape); i++) {
        json_t *extent = json_array_get(shape, i);
        json_int_t number = json_integer_value(extent);
        if (!json_is_integer(extent) || number < 0 ||
            __builtin_mul_overflow(bytes, (uint64_t)number, &bytes)) {
            return fail(error, STATUS_CORRUPT, "%s: tensor \"%s\" has an impossible shape",
                        fail_text(file).text, shown.text);
        }
        entry->tensor.shape[i] = (uint64_t)number;
    }
    json_int_t begin = json_integer_value(json_array_get(offsets, 0));
    json_int_t end = json_integer_value(json_array_get(offsets, 1));
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes) {
        return fail(error, STATUS_CORRUPT,
                    "%s: tensor \"%s\" lies at [%" JSON_INTEGER_FORMAT ", %" JSON_INTEGER_FORMAT
                    "), but the file holds %" PRIu64 " bytes of data",
                    fail_text(file).text, shown.text, begin, end, data_bytes);
    }
    if ((uint64_t)(end - begin) != bytes) {
        return fail(error, STATUS_CORRUPT,
                    "%s: tensor \"%s\" takes %" JSON_INTEGER_FORMAT
                    " bytes, but its shape and dtype need %" PRIu64,
                    fail_text(file).text, shown.text, end - begin, bytes);
    }
    entry->begin = (uint64_t)begin;
    entry->end = (uint64_t)end;
    entry->tensor.name = name;
    entry->tensor.file = file;
    entry->tensor.dtype = json_string_value(dtype);
    entry->tensor.rank = (uint32_t)json_array_size(shape);
    entry->tensor.bytes = bytes;
    return STATUS_OK;
}

static int entry_by_place(const void *left, const void *right) {
    const struct entry *a = left;
    const struct entry *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return a->end < b->end ? -1 : a->end > b->end;
}
static int entry_by_name(const void *left, const void *right) {
    const struct entry *a = left;
    const struct entry *b = right;
    return strcmp(a->tensor.name, b->tensor.name);
}

/* No two tensors share a byte, and every byte belongs to one: the format's own rule. */
static enum status places_check(struct entry *entries, uint32_t count, uint64_t data_bytes,
                                const char *file, struct writer *error) {
    qsort(entries, count, sizeof(*entries), entry_by_place);
    uint64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (entries[i].begin < at) {
            return fail(error, STATUS_CORRUPT, "%s: tensor \"%s\" overlaps the one before it",
                        fail_text(file).text, fail_text(entries[i].tensor.name).text);
        }
        if (entries[i].begin > at) {
            return fail(error, STATUS_CORRUPT,
                        "%s: bytes [%" PRIu64 ", %" PRIu64 ") of the data belong to no tensor",
                        fail_text(file).text, at, entries[i].begin);
        }
        at = entries[i].end;
    }
    if (at != data_bytes) {
        return fail(error, STATUS_CORRUPT,
                    "%s: bytes [%" PRIu64 ", %" PRIu64 ") of the data belong to no tensor",
                    fail_text(file).text, at, data_bytes);
    }
    return STATUS_OK;
}

static enum status shard_read(struct checkpoint *checkpoint, struct shard *shard,
                              struct writer *error) {
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) {
        length = length << 8 | shard->data[i];
    }
    uint64_t rest = shard->bytes - 8;
    if (length > rest) {
        return fail(error, STATUS_CORRUPT,
                    "%s: the header claims %" PRIu64 " bytes, but only %" PRIu64
                    " follow (is the file cut off?)",
                    fail_text(shard->name).text, length, rest);
    }
    if (length > CHECKPOINT_HEADER_MAX) {
        return fail(error, STATUS_CORRUPT,
                    "%s: the header claims %" PRIu64 " bytes, at most %u work",
                    fail_text(shard->name).text, length, CHECKPOINT_HEADER_MAX);
    }
    json_error_t where;
    shard->header =
        json_loadb((const char *)shard->data + 8, (size_t)length, JSON_REJECT_DUPLICATES, &where);
    if (!json_is_object(shard->header)) {
        return fail(error, STATUS_CORRUPT, "%s: the header is not a JSON object: %s",
                    fail_text(shard->name).text,
                    shard->header == NULL ? fail_text(where.text).text : "something else");
    }
    uint32_t first = checkpoint->entry_count;
    const char *name;
    json_t *value;
    json_object_foreach(shard->header, name, value) {
        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        if (checkpoint->entry_count == checkpoint->entry_cap) {
            if (checkpoint->entry_cap >= TENSORS_MAX) {
                return fail(error, STATUS_CORRUPT, "%s: more than %u tensors",
                            fail_text(shard->name).text, TENSORS_MAX);
            }
            checkpoint->entry_cap *= 2;
            checkpoint->entries =
                realloc(checkpoint->entries, checkpoint->entry_cap * sizeof(*checkpoint->entries));
            CHECK(checkpoint->entries != NULL);
        }
        struct entry *entry = &checkpoint->entries[checkpoint->entry_count];
        memset(entry, 0, sizeof(*entry));
        enum status status = tensor_read(shard, name, value, rest - length, entry, error);
        if (status != STATUS_OK) {
            return status;
        }
        entry->tensor.data = shard->data + 8 + length + entry->begin;
        checkpoint->entry_count++;
    }
    return places_check(checkpoint->entries + first, checkpoint->entry_count - first, rest - length,
                        shard->name, error);
}

/* A shard's name is a plain file name: an index file must not lead out of its directory. */
static bool shard_name_is_plain(const char *name) {
    size_t length = strlen(name);
    return length > 12 && length <= 255 && name[0] != '.' && strchr(name, '/') == NULL &&
           strcmp(name + length - 12, ".safetensors") == 0;
}

static enum status shard_add(struct checkpoint *checkpoint, const char *name,
                             struct writer *error) {
    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        if (strcmp(checkpoint->shards[i].name, name) == 0) {
            return STATUS_OK;
        }
    }
    if (checkpoint->shard_count == SHARDS_MAX) {
        return fail(error, STATUS_CORRUPT, "model.safetensors.index.json: more than %u files",
                    SHARDS_MAX);
    }
    if (checkpoint->shards == NULL) {
        checkpoint->shards = calloc(SHARDS_MAX, sizeof(*checkpoint->shards));
        CHECK(checkpoint->shards != NULL);
    }
    char *copy = strdup(name);
    CHECK(copy != NULL);
    checkpoint->shards[checkpoint->shard_count++].name = copy;
    return STATUS_OK;
}

static enum status shards_find(const char *directory, struct checkpoint *checkpoint,
                               struct writer *error) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/model.safetensors", directory) >= (int)sizeof(path)) {
        return fail(error, STATUS_INVALID, "the path of the model directory is too long");
    }
    if (access(path, F_OK) == 0) {
        return shard_add(checkpoint, "model.safetensors", error);
    }
    enum status status = json_file_read(directory, "model.safetensors.index.json", INDEX_MAX,
                                        &checkpoint->index, error);
    if (status == STATUS_NOT_FOUND) {
        return fail(error, STATUS_NOT_FOUND,
                    "%s: neither model.safetensors nor model.safetensors.index.json is there",
                    fail_text(directory).text);
    }
    if (status != STATUS_OK) {
        return status;
    }
    json_t *map = json_object_get(checkpoint->index, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0) {
        return fail(error, STATUS_CORRUPT, "model.safetensors.index.json: no weight_map");
    }
    const char *tensor;
    json_t *file;
    json_object_foreach(map, tensor, file) {
        if (!json_is_string(file) || !shard_name_is_plain(json_string_value(file))) {
            return fail(error, STATUS_CORRUPT,
                        "model.safetensors.index.json: tensor \"%s\" is not mapped to a plain "
                        "*.safetensors file name",
                        fail_text(tensor).text);
        }
        status = shard_add(checkpoint, json_string_value(file), error);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

/* Every name once; with an index, every tensor where the index says. */
static enum status names_check(struct checkpoint *checkpoint, struct writer *error) {
    qsort(checkpoint->entries, checkpoint->entry_count, sizeof(*checkpoint->entries),
          entry_by_name);
    json_t *map = json_object_get(checkpoint->index, "weight_map");
    for (uint32_t i = 0; i < checkpoint->entry_count; i++) {
        const struct checkpoint_tensor *tensor = &checkpoint->entries[i].tensor;
        if (i > 0 && strcmp(checkpoint->entries[i - 1].tensor.name, tensor->name) == 0) {
            return fail(error, STATUS_CORRUPT, "tensor \"%s\" is in both %s and %s",
                        fail_text(tensor->name).text,
                        fail_text(checkpoint->entries[i - 1].tensor.file).text,
                        fail_text(tensor->file).text);
        }
        json_t *file = json_object_get(map, tensor->name);
        if (map != NULL && (file == NULL || strcmp(json_string_value(file), tensor->file) != 0)) {
            return fail(error, STATUS_CORRUPT,
                        "%s: tensor \"%s\" is here, but model.safetensors.index.json says %s",
                        fail_text(tensor->file).text, fail_text(tensor->name).text,
                        file == NULL ? "nothing of it" : fail_text(json_string_value(file)).text);
        }
    }
    const char *name;
    json_t *file;
    json_object_foreach(map, name, file) {
        if (checkpoint_find(checkpoint, name) == NULL) {
            return fail(error, STATUS_CORRUPT,
                        "%s: tensor \"%s\" is missing, model.safetensors.index.json promises it",
                        fail_text(json_string_value(file)).text, fail_text(name).text);
        }
    }
    return STATUS_OK;
}

enum status checkpoint_open(const char *directory, struct writer *error,
                            struct checkpoint **checkpoint_out) {
    struct checkpoint *checkpoint = calloc(1, sizeof(*checkpoint));
    CHECK(checkpoint != NULL);
    checkpoint->entry_cap = 256; /* there from the start, also for a file without tensors */
    checkpoint->entries = calloc(checkpoint->entry_cap, sizeof(*checkpoint->entries));
    CHECK(checkpoint->entries != NULL);
    enum status status = shards_find(directory, checkpoint, error);
    for (uint32_t i = 0; status == STATUS_OK && i < checkpoint->shard_count; i++) {
        status = shard_map(directory, &checkpoint->shards[i], error);
        if (status == STATUS_OK) {
            status = shard_read(checkpoint, &checkpoint->shards[i], error);
        }
    }
    if (status == STATUS_OK) {
        status = names_check(checkpoint, error);
    }
    if (status != STATUS_OK) {
        checkpoint_close(checkpoint);
        return status;
    }
    *checkpoint_out = checkpoint;
    return STATUS_OK;
}

void checkpoint_close(struct checkpoint *checkpoint) {
    if (checkpoint == NULL) {
        return;
    }
    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        struct shard *shard = &checkpoint->shards[i];
        json_decref(shard->header);
        if (shard->data != NULL) {
            CHECK_OP(munmap(shard->data, shard->bytes), ==, 0);
        }
        free(shard->name);
    }
    json_decref(checkpoint->index);
    free(checkpoint->entries);
    free(checkpoint->shards);
    free(checkpoint);
}

uint32_t checkpoint_count(const struct checkpoint *checkpoint) {
    return checkpoint->entry_count;
}
const struct checkpoint_tensor *checkpoint_at(const struct checkpoint *checkpoint, uint32_t index) {
    CHECK_OP(index, <, checkpoint->entry_count);
    return &checkpoint->entries[index].tensor;
}

uint32_t checkpoint_index(const struct checkpoint *checkpoint,
                          const struct checkpoint_tensor *tensor) {
    const char *entry = (const char *)tensor - offsetof(struct entry, tensor);
    size_t index = (size_t)(entry - (const char *)checkpoint->entries) / sizeof(struct entry);
    CHECK_OP(index, <, checkpoint->entry_count);
    return (uint32_t)index;
}

static int entry_against_name(const void *name, const void *entry) {
    return strcmp(name, ((const struct entry *)entry)->tensor.name);
}
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint,
                                                const char *name) {
    if (checkpoint->entry_count == 0) {
        return NULL;
    }
    const struct entry *entry = bsearch(name, checkpoint->entries, checkpoint->entry_count,
                                        sizeof(*checkpoint->entries), entry_against_name);
    return entry == NULL ? NULL : &entry->tensor;
}
