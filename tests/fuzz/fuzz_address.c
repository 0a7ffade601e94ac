/* A receiver's KV address, which travels from D through the session to P and there goes to UCX,
 * which checks nothing: whatever is accepted must be exactly what a receiver made. The first byte
 * says how much of it is made right before it is looked at. */
#include <xxhash.h>

#include "fuzz/fuzz.h"
#include "kvlink/kvlink.h"
#include "kvlink/link.h"

#define HEAD_BYTES 32u /* magic, version, transports, len, port, reserved, host, sum */
#define SUM_AT     24u

static void put(uint8_t *to, uint64_t value, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i++) {
        to[i] = (uint8_t)(value >> 8 * i);
    }
}

static uint64_t sum_of(const uint8_t *bytes, size_t ucx_len) {
    return XXH3_64bits(bytes, SUM_AT) ^ XXH3_64bits(bytes + HEAD_BYTES, ucx_len);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    uint8_t how = input_u8(&input);
    static struct kvlink link;
    link.transports = 1 + how % 3;
    link.host = 7;
    struct bytes bytes = input_bytes(&input, SIZE_MAX);
    uint8_t *copy = input_copy(bytes);
    if (bytes.len >= HEAD_BYTES) {
        if ((how & 0x10) != 0) {
            put(copy, 0x41564b42u, 4);
            put(copy + 4, LINK_ADDRESS_VERSION, 1);
        }
        if ((how & 0x20) != 0) {
            put(copy + 6, bytes.len - HEAD_BYTES, 2);
        }
        uint16_t announced = (uint16_t)(copy[6] | copy[7] << 8);
        if ((how & 0x40) != 0 && HEAD_BYTES + announced <= bytes.len) {
            put(copy + SUM_AT, sum_of(copy, announced), 8);
        }
    }
    struct bytes ucx = {0};
    bool is_same_host = false;
    uint16_t port = 0;
    enum status status =
        link_address_open(&link, (struct bytes){copy, bytes.len}, &ucx, &is_same_host, &port);
    CHECK(status == STATUS_OK || status == STATUS_INVALID);
    if (status == STATUS_OK) {
        CHECK(ucx.data == copy + HEAD_BYTES && ucx.len > 0 && ucx.len == bytes.len - HEAD_BYTES);
        CHECK_OP(bytes.len, <=, KVLINK_ADDRESS_MAX);
        uint64_t sum = 0;
        memcpy(&sum, copy + SUM_AT, sizeof sum);
        CHECK(sum == sum_of(copy, ucx.len));
        CHECK((copy[5] & link.transports) != 0);
        /* One changed bit anywhere, and it is no address any more. */
        size_t at = how % bytes.len;
        copy[at] ^= (uint8_t)(1u << how % 8);
        CHECK(link_address_open(&link, (struct bytes){copy, bytes.len}, &ucx, &is_same_host,
                                &port) == STATUS_INVALID);
    }
    free(copy);
    return 0;
}
