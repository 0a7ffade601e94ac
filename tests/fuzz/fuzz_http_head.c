/* The head of a request at the admin port, as it arrives: in growing pieces. */
#include "fuzz/fuzz.h"
#include "runtime/http_head.h"

static void check_inside(const char *text, size_t len, const char *part) {
    CHECK(part >= text && part <= text + len);
    CHECK(memchr(part, '\0', len + 1 - (size_t)(part - text)) != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    /* What one more byte makes of it: never less plausible and then more, never a shorter head. */
    bool was_plausible = true;
    size_t found = 0;
    for (size_t seen = 1; seen <= len && seen <= 256; seen++) {
        uint8_t *part = input_copy((struct bytes){data, seen});
        bool is_plausible = http_head_is_plausible((const char *)part, seen);
        size_t head_len = http_head_find((const char *)part, seen);
        CHECK(was_plausible || !is_plausible);
        CHECK(head_len <= seen && (found == 0 || head_len == found));
        was_plausible = is_plausible;
        found = head_len;
        free(part);
    }
    size_t head_len = http_head_find((const char *)data, len);
    CHECK_OP(head_len, <=, len);
    if (head_len == 0 || !http_head_is_plausible((const char *)data, len)) {
        return 0;
    }
    char *text = malloc(head_len + 1);
    CHECK(text != NULL);
    memcpy(text, data, head_len);
    struct http_head head;
    const char *why = NULL;
    int status = http_head_parse(text, head_len, &head, &why);
    CHECK((status != 0) == (why != NULL));
    CHECK(status == 0 || (status >= 400 && status < 600));
    if (status == 0) {
        check_inside(text, head_len, head.method);
        check_inside(text, head_len, head.path);
        CHECK(head.path[0] == '/' || head.path[0] == '*' || head.path[0] == '\0');
        CHECK(strlen(head.query) <= head_len);
    }
    free(text);
    return 0;
}
