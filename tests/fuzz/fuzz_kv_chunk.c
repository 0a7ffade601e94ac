/* KV chunks as a peer may send them, into the link's handler, without UCX below: the input arms
 * slots, delivers chunks that are right, nearly right or nonsense, and disarms. A second copy of
 * the KV memory knows which bytes may change: those of an armed slot that are not verified yet, and
 * no others; what was verified is exactly what was sent. */
#include "base/pool.h"
#include "core/layout.h"
#include "fuzz/fuzz.h"
#include "kvlink/kvlink.h"
#include "kvlink/link.h"
#include "kvlink/sum.h"

#define COMPONENTS  3u
#define PAGE_TOKENS 4u
#define PAGES       8u
#define SLOTS       2u
#define SLOT_PAGES  (PAGES / SLOTS)
#define SLOT_TOKENS (SLOT_PAGES * PAGE_TOKENS)

static struct {
    struct kvlink link;
    struct kv_layout layout;
    struct slot slots[SLOTS];
    uint32_t slot_pages[SLOTS][SLOT_PAGES];
    struct coverage coverage[SLOTS][COMPONENTS];
    uint32_t dirty[SLOTS];
    uint8_t *copy;    /* what the KV memory must hold */
    uint8_t *is_open; /* per byte: 0xff = may hold anything */
    size_t kv_bytes;
    struct kvlink_arm arms[SLOTS];
    uint32_t arm_pages[SLOTS][SLOT_PAGES];
    bool is_armed[SLOTS];
    bool is_told[SLOTS]; /* covered or bad */
    uint64_t generation;
} bed;

static void on_progress(void *context, uint64_t slot, uint64_t bytes) {
    CHECK(context == &bed && bytes > 0 && bed.arms[pool_index(slot)].slot == slot);
}

static void told(uint64_t slot) {
    uint32_t index = pool_index(slot);
    CHECK(bed.is_armed[index] && bed.arms[index].slot == slot && !bed.is_told[index]);
    bed.is_told[index] = true;
}

/* Every byte of the armed range is verified: none may change any more. */
static void on_covered(void *context, uint64_t slot, uint64_t bytes) {
    CHECK(context == &bed);
    told(slot);
    const struct kvlink_arm *arm = &bed.arms[pool_index(slot)];
    CHECK_OP(bytes, ==,
             layout_range_bytes(&bed.layout, 0, COMPONENTS, arm->token_end - arm->token_first));
    for (uint32_t p = 0; p < SLOT_PAGES; p++) {
        size_t from = (size_t)arm->pages[p] * bed.layout.page_bytes;
        CHECK(memchr(bed.is_open + from, 0xff, bed.layout.page_bytes) == NULL);
    }
}

static void on_bad(void *context, uint64_t slot, enum kvlink_bad reason) {
    CHECK(context == &bed && reason >= KVLINK_BAD_CHECKSUM && reason <= KVLINK_BAD_GAPS);
    told(slot);
}

static void on_disarmed(void *context, uint64_t slot) {
    uint32_t index = pool_index(slot);
    CHECK(context == &bed && bed.is_armed[index] && bed.arms[index].slot == slot);
    bed.is_armed[index] = false;
    for (uint32_t p = 0; p < SLOT_PAGES; p++) { /* from here on nothing is written */
        size_t from = (size_t)bed.arms[index].pages[p] * bed.layout.page_bytes;
        memcpy(bed.copy + from, bed.link.kv + from, bed.layout.page_bytes);
        memset(bed.is_open + from, 0, bed.layout.page_bytes);
    }
}

static void bed_create(void) {
    static const uint32_t row_bytes[COMPONENTS] = {4, 64, 324};
    bed.layout.page_tokens = PAGE_TOKENS;
    bed.layout.component_count = COMPONENTS;
    for (uint32_t i = 0; i < COMPONENTS; i++) {
        bed.layout.components[i] = (struct kv_component){.name = "kv",
                                                         .layer = (uint16_t)i,
                                                         .tokens_per_row = 1,
                                                         .row_bytes = row_bytes[i],
                                                         .dtype = KV_DTYPE_F32,
                                                         .lifetime = KV_LIFETIME_PAGE};
    }
    CHECK_OP(layout_complete(&bed.layout), ==, STATUS_OK);
    bed.kv_bytes = (size_t)PAGES * bed.layout.page_bytes;
    bed.link.kv = aligned_alloc(64, bed.kv_bytes);
    bed.copy = malloc(bed.kv_bytes);
    bed.is_open = malloc(bed.kv_bytes);
    CHECK(bed.link.kv != NULL && bed.copy != NULL && bed.is_open != NULL);
    bed.link.layout = &bed.layout;
    bed.link.slots = bed.slots;
    bed.link.dirty_slots = bed.dirty;
    bed.link.pages_per_slot = SLOT_PAGES;
    for (uint32_t i = 0; i < SLOTS; i++) {
        bed.slots[i].pages = bed.slot_pages[i];
        bed.slots[i].coverage = bed.coverage[i];
    }
    bed.link.config = (struct kvlink_config){.layout = &bed.layout,
                                             .page_count = PAGES,
                                             .slots_max = SLOTS,
                                             .slot_tokens_max = SLOT_TOKENS,
                                             .callbacks = {.on_progress = on_progress,
                                                           .on_covered = on_covered,
                                                           .on_bad = on_bad,
                                                           .on_disarmed = on_disarmed},
                                             .context = &bed};
    mailbox_init(&bed.link.mailbox, NULL, NULL);
}

static void arm(struct input *input) {
    uint32_t index = input_below(input, SLOTS);
    struct kvlink_arm wish = {.slot = ++bed.generation << 32 | index,
                              .key = input_u8(input),
                              .token_first = input_below(input, SLOT_TOKENS),
                              .page_count = SLOT_PAGES,
                              .pages = bed.arm_pages[index]};
    wish.token_end = wish.token_first + 1 + input_below(input, SLOT_TOKENS);
    uint8_t turn = input_u8(input); /* pages of a slot lie in any order */
    uint32_t pages[SLOT_PAGES];
    for (uint32_t p = 0; p < SLOT_PAGES; p++) {
        pages[p] = index * SLOT_PAGES + (p * 3 + turn) % SLOT_PAGES;
    }
    if (bed.is_armed[index]) {
        CHECK_OP(kvlink_arm(&bed.link, &wish), !=, STATUS_OK);
        return;
    }
    memcpy(bed.arm_pages[index], pages, sizeof pages);
    enum status status = kvlink_arm(&bed.link, &wish);
    CHECK((status == STATUS_OK) == (wish.token_end <= SLOT_TOKENS));
    if (status != STATUS_OK) {
        return;
    }
    bed.arms[index] = wish;
    bed.is_armed[index] = true;
    bed.is_told[index] = false;
    for (uint32_t c = 0; c < COMPONENTS; c++) {
        for (uint32_t t = wish.token_first; t < wish.token_end; t++) {
            uint64_t at =
                layout_row_offset(&bed.layout, pages[t / PAGE_TOKENS], c, t % PAGE_TOKENS);
            memset(bed.is_open + at, 0xff, bed.layout.components[c].row_bytes);
        }
    }
}

/* The handler took this chunk as whole: its rows that were open are what was sent. */
static void accepted(const struct chunk_header *header, const uint8_t *payload) {
    const struct kvlink_arm *to = &bed.arms[pool_index(header->slot)];
    for (uint32_t c = header->component_first;
         c < (uint32_t)header->component_first + header->component_count; c++) {
        size_t row_bytes = bed.layout.components[c].row_bytes;
        for (uint32_t k = 0; k < header->token_count; k++) {
            uint32_t t = header->token_first + k;
            uint64_t at =
                layout_row_offset(&bed.layout, to->pages[t / PAGE_TOKENS], c, t % PAGE_TOKENS);
            if (bed.is_open[at] != 0) {
                memcpy(bed.copy + at, payload, row_bytes);
                memset(bed.is_open + at, 0, row_bytes);
            }
            payload += row_bytes;
        }
    }
}

static void check_memory(void) {
    uint64_t differs = 0;
    for (size_t i = 0; i < bed.kv_bytes; i += sizeof(uint64_t)) {
        uint64_t kv = 0;
        uint64_t copy = 0;
        uint64_t is_open = 0;
        memcpy(&kv, bed.link.kv + i, sizeof kv);
        memcpy(&copy, bed.copy + i, sizeof copy);
        memcpy(&is_open, bed.is_open + i, sizeof is_open);
        differs |= (kv ^ copy) & ~is_open;
    }
    CHECK_OP(differs, ==, 0);
}

/* As a sender takes it; of a payload that fits no layout, of the rows that are whole. */
static uint64_t sum_of(const struct chunk_header *header, const uint8_t *payload, size_t len,
                       const uint8_t *bytes_of_header) {
    struct chunk_sum sum;
    chunk_sum_begin(&sum);
    for (uint32_t c = header->component_first; c < COMPONENTS; c++) {
        size_t row_bytes = bed.layout.components[c].row_bytes;
        for (uint32_t k = 0; k < header->token_count && len >= row_bytes; k++) {
            uint64_t row = XXH3_64bits(payload, row_bytes);
            chunk_sum_rows(&sum, &row, 1);
            payload += row_bytes;
            len -= row_bytes;
        }
    }
    return chunk_sum_end(&sum, bytes_of_header);
}

static void deliver(struct input *input) {
    uint8_t how = input_u8(input);
    uint32_t index = input_below(input, SLOTS);
    const struct kvlink_arm *to = &bed.arms[index];
    uint32_t length = to->token_end > to->token_first ? to->token_end - to->token_first : 1;
    struct chunk_header header = {.slot = to->slot,
                                  .key = to->key,
                                  .token_first = to->token_first + input_below(input, length),
                                  .component_first = (uint16_t)input_below(input, COMPONENTS)};
    header.token_count = 1 + input_below(input, length);
    header.component_count = (uint16_t)(1 + input_below(input, COMPONENTS));
    if (how < 200 && header.token_first + header.token_count > to->token_end) {
        header.token_count = to->token_end - header.token_first;
    }
    if (how < 208 && header.component_first + header.component_count > COMPONENTS) {
        header.component_count = (uint16_t)(COMPONENTS - header.component_first);
    }
    if (how >= 216 && how < 232) { /* anything */
        header.slot = how < 220 ? input_u64(input) : header.slot;
        header.key += how < 224 ? 1 : 0;
        header.token_first = how < 228 ? (uint32_t)input_u64(input) : header.token_first;
        header.token_count = (uint32_t)input_u64(input);
        header.component_count = input_u16(input);
    }
    uint64_t bytes = 0;
    for (uint32_t c = header.component_first;
         c < (uint32_t)header.component_first + header.component_count; c++) {
        bytes += (c < COMPONENTS ? bed.layout.components[c].row_bytes : 4) *
                 (uint64_t)header.token_count;
    }
    size_t len = bytes < 8192 && how != 255 ? bytes : input_u16(input) % 4096;
    header.bytes = how == 254 ? (uint32_t)input_u64(input) : (uint32_t)len;
    uint8_t *payload = malloc(len > 0 ? len : 1);
    CHECK(payload != NULL);
    uint8_t seed = input_u8(input);
    for (size_t i = 0; i < len; i++) {
        payload[i] = (uint8_t)(seed + i * 7);
    }
    uint8_t bytes_of_header[CHUNK_HEADER_BYTES];
    chunk_encode(&header, bytes_of_header);
    header.sum = sum_of(&header, payload, len, bytes_of_header);
    header.sum += how >= 240 && how < 250 ? 1 : 0;
    chunk_encode(&header, bytes_of_header);
    if (how >= 250 && how < 254) { /* a flipped bit anywhere in the header */
        bytes_of_header[input_below(input, CHUNK_HEADER_BYTES)] ^=
            (uint8_t)(1u << input_below(input, 8));
    }
    ucp_am_recv_param_t param = {.recv_attr = how == 239 ? UCP_AM_RECV_ATTR_FLAG_RNDV : 0};
    uint64_t before = atomic_load(&bed.link.counts.chunks_accepted);
    size_t header_len = how == 238 ? input_below(input, CHUNK_HEADER_BYTES) : CHUNK_HEADER_BYTES;
    uint8_t *exact = input_copy((struct bytes){bytes_of_header, header_len});
    (void)link_on_chunk(&bed.link, exact, header_len, payload, len, &param);
    if (atomic_load(&bed.link.counts.chunks_accepted) != before) {
        CHECK(bed.is_armed[pool_index(header.slot)]);
        CHECK(how < 240 || how >= 254); /* what is in between is never whole */
        accepted(&header, payload);
    }
    free(exact);
    free(payload);
    check_memory();
}

static void run_mail(void) {
    struct mail *mail = mailbox_take_all(&bed.link.mailbox);
    while (mail != NULL) {
        struct mail *next = mail->next;
        mail->run(mail, &bed.link);
        mail = next;
    }
}

static void disarm(uint32_t index) {
    enum status status = kvlink_disarm(&bed.link, bed.arms[index].slot);
    CHECK((status == STATUS_OK) == bed.is_armed[index]);
    link_tell_slots(&bed.link); /* late news of it is not told */
    run_mail();
    CHECK(!bed.is_armed[index]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    if (bed.copy == NULL) {
        bed_create();
    }
    struct input input = input_of(data, len);
    memset(bed.link.kv, 0x5a, bed.kv_bytes);
    memset(bed.copy, 0x5a, bed.kv_bytes);
    memset(bed.is_open, 0, bed.kv_bytes);
    memset(bed.arms, 0, sizeof bed.arms);
    bed.generation = 0;
    bed.link.cpu = (enum copysum_cpu)(input_u8(&input) % (copysum_best() + 1));
    while (input.len > 0) {
        uint8_t what = input_u8(&input);
        if (what < 32) {
            arm(&input);
        } else if (what < 224) {
            deliver(&input);
        } else if (what < 248) {
            link_tell_slots(&bed.link);
        } else {
            uint32_t index = what % SLOTS;
            if (bed.is_armed[index]) {
                disarm(index);
            }
        }
    }
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (bed.is_armed[i]) {
            disarm(i);
        }
    }
    CHECK(link_slots_are_free(&bed.link) && atomic_load(&bed.link.counts.slots_armed) == 0);
    link_tell_slots(&bed.link);
    check_memory();
    return 0;
}
