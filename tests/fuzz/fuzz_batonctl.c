/* batonctl's commands over programs that answer anything: the first byte chooses the command and
 * how many programs there are, then each request takes a byte and a body that ends at a NUL. The
 * false fetch_all hands bodies through the real reading of HTTP replies.
 *
 * Checked: a command ends with one of its exit codes, what it prints holds no byte that a terminal
 * obeys, and with --json it is one JSON document. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "fuzz/fuzz.h"

/* Its socket loop is not met; its reading of replies is. */
#define fetch_all fetch_all_by_sockets
#include "tools/batonctl/fetch.c"
#undef fetch_all

#include "tools/batonctl/batonctl.h"

void fetch_all(struct fetch *fetches, uint32_t count, struct span within);

static struct input input;

static void answer(struct fetch *fetch) {
    uint8_t how = input_u8(&input);
    const uint8_t *end = input.len > 0 ? memchr(input.data, '\0', input.len) : NULL;
    struct bytes body = input_bytes(&input, end != NULL ? (size_t)(end - input.data) : SIZE_MAX);
    (void)input_u8(&input); /* the NUL */
    struct flight flight = {.fetch = fetch, .fd = -1};
    char head[64] = "";
    if (how < 240) {
        (void)snprintf(head, sizeof head, "HTTP/1.1 %d X\r\n%s%s\r\n",
                       fetch->is_post ? 202
                       : how < 200    ? 200
                                      : 503,
                       how % 2 == 0 ? "" : "Content-Length: ", how % 2 == 0 ? "" : "7\r\n");
    } else if (how < 248) {
        flight_fail(&flight, how % 2 == 0 ? ECONNREFUSED : ECONNRESET);
        return;
    }
    flight.cap = strlen(head) + body.len + 1;
    flight.data = malloc(flight.cap);
    CHECK(flight.data != NULL);
    memcpy(flight.data, head, strlen(head));
    if (body.len > 0) {
        memcpy(flight.data + strlen(head), body.data, body.len);
    }
    flight.len = flight.cap - 1;
    flight_take(&flight);
    free(flight.data);
}

void fetch_all(struct fetch *fetches, uint32_t count, struct span within) {
    (void)within;
    for (uint32_t i = 0; i < count; i++) {
        answer(&fetches[i]);
        CHECK((fetches[i].end == FETCH_ANSWERED) == (fetches[i].body != NULL));
        CHECK((fetches[i].end == FETCH_ANSWERED) == (fetches[i].why[0] == '\0'));
        CHECK(fetches[i].body == NULL || fetches[i].body[fetches[i].len] == '\0');
    }
}

static int run(struct options *options, uint8_t which) {
    static const char *const operands[] = {"router", "agent-0", "decode-1", "0000000000000001"};
    if (which == 1 || which == 2) {
        options->operands.count = 1;
        options->operands.values[0] = operands[input_u8(&input) % 4];
    }
    switch (which) {
    case 0: return command_entries(options);
    case 1: return command_why(options);
    case 2: return command_drain(options);
    case 3: return command_top(options);
    default: return command_status(options);
    }
}

static void check_output(const char *text, size_t len, bool is_json, int code) {
    CHECK(utf8_is_valid((const uint8_t *)text, len));
    for (size_t i = 0; i < len; i++) {
        unsigned char byte = (unsigned char)text[i];
        CHECK(byte >= ' ' || byte == '\n');
        CHECK(is_json || byte != 0x7f);
        CHECK(is_json || byte != 0xc2 || (unsigned char)text[i + 1] >= 0xa0); /* C1 controls */
    }
    if (is_json && len > 0) {
        json_t *json = json_loadb(text, len, 0, NULL);
        CHECK(json_is_object(json));
        json_decref(json);
    }
    CHECK(!is_json || len > 0 || code == EXIT_FAILED || code == EXIT_USAGE);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static FILE *nowhere;
    if (nowhere == NULL) {
        nowhere = fopen("/dev/null", "w");
        CHECK(nowhere != NULL);
    }
    input = input_of(data, len);
    uint8_t which = input_u8(&input);
    uint8_t how = input_u8(&input);
    static const char *const at[] = {"a:1", "a:1,b:2", "a:1,b:2,c:3", "a:1,b:2,c:3,d:4"};
    struct options options = {.cluster = "baton",
                              .at = at[how % 4],
                              .timeout = span_ms(1),
                              .is_json = (how & 4) != 0,
                              .grace_s = -1,
                              .is_once = true};
    if ((how & 8) != 0) {
        options.older_than = span_ms(1000);
        options.state = "receiving";
    }
    char *text = NULL;
    size_t text_len = 0;
    FILE *out = stdout;
    FILE *err = stderr;
    stdout = open_memstream(&text, &text_len);
    CHECK(stdout != NULL);
    stderr = nowhere;
    int code = run(&options, which % 6);
    CHECK(fclose(stdout) == 0);
    stdout = out;
    stderr = err;
    CHECK(code >= EXIT_DONE && code <= EXIT_TROUBLE);
    check_output(text, text_len, options.is_json, code);
    free(text);
    return 0;
}
