#include "tools/batonctl/screen.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

#include "base/check.h"

#define GAP       2u
#define WIDTH_MIN 40u
#define COLUMNS   16u

static const char *const style_codes[] = {"",           "\033[32m", "\033[33m",
                                          "\033[1;31m", "\033[2m",  "\033[1m"};

void screen_init(struct screen *screen, FILE *out) {
    *screen = (struct screen){.out = out};
    bool is_terminal = isatty(fileno(out)) == 1;
    const char *columns = getenv("COLUMNS");
    unsigned long width = columns != NULL ? strtoul(columns, NULL, 10) : 0;
    struct winsize size;
    if (width == 0 && is_terminal && ioctl(fileno(out), TIOCGWINSZ, &size) == 0) {
        width = size.ws_col;
    }
    if (width > 0) {
        screen->width = width < WIDTH_MIN ? WIDTH_MIN : width > 1000 ? 1000 : (uint32_t)width;
    }
    const char *term = getenv("TERM");
    screen->has_color =
        is_terminal && getenv("NO_COLOR") == NULL && term != NULL && strcmp(term, "dumb") != 0;
}

static void screen_put(const struct screen *screen, enum style style, const char *text,
                       size_t len) {
    bool is_styled = screen->has_color && style != STYLE_PLAIN;
    (void)fprintf(screen->out, "%s%.*s%s", is_styled ? style_codes[style] : "", (int)len, text,
                  is_styled ? "\033[0m" : "");
}

/* ---- visible text --------------------------------------------------------------------------- */

/* One character of UTF-8 at `text`; 0 bytes if there is none. */
static uint32_t utf8_take(const unsigned char *text, uint32_t *point_out) {
    uint32_t lead = text[0];
    uint32_t len = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 0;
    if (len == 0 || lead > 0xf4) {
        return 0;
    }
    uint32_t point = len == 1 ? lead : lead & (0x7fu >> len);
    for (uint32_t i = 1; i < len; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
        point = point << 6 | (text[i] & 0x3fu);
    }
    *point_out = point;
    return len;
}

static bool point_is_harmless(uint32_t point) {
    bool is_control = point < 0x20 || (point >= 0x7f && point < 0xa0);
    bool is_direction = (point >= 0x200e && point <= 0x200f) ||
                        (point >= 0x2028 && point <= 0x202e) ||
                        (point >= 0x2066 && point <= 0x2069) || point == 0xfeff;
    return !is_control && !is_direction;
}

char *text_visible(const char *text) {
    size_t len = strlen(text);
    char *copy = malloc(len * 4 + 1); /* a byte becomes at most \xNN */
    CHECK(copy != NULL);
    size_t at = 0;
    const unsigned char *from = (const unsigned char *)text;
    while (*from != '\0') {
        uint32_t point = 0;
        uint32_t count = utf8_take(from, &point);
        if (count > 0 && point_is_harmless(point)) {
            memcpy(copy + at, from, count);
            at += count;
            from += count;
            continue;
        }
        for (uint32_t i = 0; i < (count > 0 ? count : 1); i++) {
            at += (size_t)snprintf(copy + at, 5, "\\x%02x", *from++);
        }
    }
    copy[at] = '\0';
    return copy;
}

static uint32_t point_columns(uint32_t point) {
    int columns = wcwidth((wchar_t)point);
    return columns < 0 ? 1 : (uint32_t)columns;
}

/* Bytes of the longest beginning that takes at most `columns`. */
static size_t text_fitting(const char *text, uint32_t columns) {
    const unsigned char *from = (const unsigned char *)text;
    size_t at = 0;
    uint32_t used = 0;
    while (from[at] != '\0') {
        uint32_t point = 0;
        uint32_t count = utf8_take(from + at, &point);
        uint32_t more = count > 0 ? point_columns(point) : 1;
        if (used + more > columns) {
            break;
        }
        used += more;
        at += count > 0 ? count : 1;
    }
    return at;
}

uint32_t text_columns(const char *text) {
    const unsigned char *from = (const unsigned char *)text;
    uint32_t used = 0;
    while (*from != '\0') {
        uint32_t point = 0;
        uint32_t count = utf8_take(from, &point);
        used += count > 0 ? point_columns(point) : 1;
        from += count > 0 ? count : 1;
    }
    return used;
}

static char *text_format(const char *format, va_list arguments) {
    char *raw = NULL;
    CHECK(vasprintf(&raw, format, arguments) >= 0);
    char *visible = text_visible(raw);
    free(raw);
    return visible;
}

/* ---- paragraphs ----------------------------------------------------------------------------- */

static void wrap(const struct screen *screen, enum style style, uint32_t indent, const char *text) {
    uint32_t room = screen->width == 0 ? UINT32_MAX : screen->width;
    bool is_first = true;
    while (true) {
        uint32_t used = is_first ? 0 : indent;
        size_t take = text_fitting(text, room - used);
        if (text[take] != '\0') {
            size_t cut = take;
            while (cut > 0 && text[cut] != ' ') {
                cut--;
            }
            take = cut > 0 ? cut : take > 0 ? take : 1;
        }
        (void)fprintf(screen->out, "%*s", (int)used, "");
        screen_put(screen, style, text, take);
        (void)fputc('\n', screen->out);
        text += take;
        while (*text == ' ') {
            text++;
        }
        if (*text == '\0') {
            return;
        }
        is_first = false;
    }
}

void screen_print(const struct screen *screen, enum style style, uint32_t indent,
                  const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *text = text_format(format, arguments);
    va_end(arguments);
    wrap(screen, style, indent, text);
    free(text);
}

void screen_line(const struct screen *screen) {
    (void)fputc('\n', screen->out);
}

/* ---- tables --------------------------------------------------------------------------------- */

struct cell {
    char *text;
    enum style style;
};

struct table {
    const struct column *columns;
    uint32_t column_count;
    struct cell *cells; /* row by row */
    size_t count;
    size_t cap;
};

struct fit {
    uint32_t width[COLUMNS];
    bool is_shown[COLUMNS];
    bool is_below; /* the last column */
};

struct table *table_create(const struct column *columns, uint32_t count) {
    CHECK_OP(count, <=, COLUMNS);
    struct table *table = calloc(1, sizeof *table);
    CHECK(table != NULL);
    table->columns = columns;
    table->column_count = count;
    return table;
}

void table_destroy(struct table *table) {
    if (table == NULL) {
        return;
    }
    for (size_t i = 0; i < table->count; i++) {
        free(table->cells[i].text);
    }
    free(table->cells);
    free(table);
}

void table_cell(struct table *table, enum style style, const char *format, ...) {
    if (table->count == table->cap) {
        table->cap = table->cap == 0 ? 64 : table->cap * 2;
        table->cells = realloc(table->cells, table->cap * sizeof *table->cells);
        CHECK(table->cells != NULL);
    }
    va_list arguments;
    va_start(arguments, format);
    table->cells[table->count++] = (struct cell){text_format(format, arguments), style};
    va_end(arguments);
}

static uint32_t fit_total(const struct table *table, const struct fit *fit) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < table->column_count; i++) {
        if (fit->is_shown[i]) {
            total += fit->width[i] + (total > 0 ? GAP : 0);
        }
    }
    return total;
}

static bool fit_drop(const struct table *table, struct fit *fit) {
    uint32_t worst = COLUMNS;
    for (uint32_t i = 0; i < table->column_count; i++) {
        if (fit->is_shown[i] && table->columns[i].rank > 0 &&
            (worst == COLUMNS || table->columns[i].rank > table->columns[worst].rank)) {
            worst = i;
        }
    }
    if (worst == COLUMNS) {
        return false;
    }
    fit->is_shown[worst] = false;
    return true;
}

/* Takes one column away from the widest that may be cut. */
static bool fit_cut(const struct table *table, struct fit *fit) {
    uint32_t widest = COLUMNS;
    for (uint32_t i = 0; i < table->column_count; i++) {
        uint32_t least = table->columns[i].least;
        if (fit->is_shown[i] && least > 0 && fit->width[i] > least &&
            (widest == COLUMNS || fit->width[i] > fit->width[widest])) {
            widest = i;
        }
    }
    if (widest == COLUMNS) {
        return false;
    }
    fit->width[widest]--;
    return true;
}

static void fit_make(const struct table *table, uint32_t room, struct fit *fit) {
    *fit = (struct fit){.is_below = false};
    for (uint32_t i = 0; i < table->column_count; i++) {
        fit->is_shown[i] = true;
        fit->width[i] = text_columns(table->columns[i].title);
    }
    for (size_t i = 0; i < table->count; i++) {
        uint32_t columns = text_columns(table->cells[i].text);
        uint32_t *width = &fit->width[i % table->column_count];
        *width = columns > *width ? columns : *width;
    }
    uint32_t last = table->column_count - 1;
    const struct fit whole = *fit;
    bool fits = room == 0 || fit_total(table, fit) <= room;
    while (!fits && fit_drop(table, fit)) {
        fits = fit_total(table, fit) <= room;
    }
    if (!fits && table->columns[last].below != NULL) {
        *fit = whole;
        fit->is_below = true;
        fit->is_shown[last] = false;
        fits = fit_total(table, fit) <= room;
    }
    while (!fits && (fit_drop(table, fit) || fit_cut(table, fit))) {
        fits = fit_total(table, fit) <= room; /* if never, lines are longer than the screen */
    }
}

static void print_cell(const struct screen *screen, const struct column *column, uint32_t width,
                       enum style style, const char *text, bool is_last) {
    uint32_t columns = text_columns(text);
    if (columns > width) {
        size_t take = text_fitting(text, width - 2);
        screen_put(screen, style, text, take);
        screen_put(screen, style, "..", 2);
        columns = width;
    } else if (column->is_right) {
        (void)fprintf(screen->out, "%*s", (int)(width - columns), "");
        screen_put(screen, style, text, strlen(text));
        columns = width;
    } else {
        screen_put(screen, style, text, strlen(text));
    }
    if (!is_last) {
        (void)fprintf(screen->out, "%*s", (int)(width - columns + GAP), "");
    }
}

void table_print(const struct table *table, const struct screen *screen, uint32_t indent) {
    CHECK(table->count % table->column_count == 0);
    struct fit fit;
    fit_make(table, screen->width > 0 ? screen->width - indent : 0, &fit);
    uint32_t last = 0;
    for (uint32_t i = 0; i < table->column_count; i++) {
        last = fit.is_shown[i] ? i : last;
    }
    (void)fprintf(screen->out, "%*s", (int)indent, "");
    for (uint32_t i = 0; i <= last; i++) {
        if (fit.is_shown[i]) {
            print_cell(screen, &table->columns[i], fit.width[i], STYLE_BOLD,
                       table->columns[i].title, i == last);
        }
    }
    (void)fputc('\n', screen->out);
    for (size_t row = 0; row < table->count; row += table->column_count) {
        (void)fprintf(screen->out, "%*s", (int)indent, "");
        for (uint32_t i = 0; i <= last; i++) {
            if (fit.is_shown[i]) {
                const struct cell *cell = &table->cells[row + i];
                print_cell(screen, &table->columns[i], fit.width[i], cell->style, cell->text,
                           i == last);
            }
        }
        (void)fputc('\n', screen->out);
        const struct cell *below = &table->cells[row + table->column_count - 1];
        if (fit.is_below && below->text[0] != '\0') {
            char *text = NULL;
            CHECK(asprintf(&text, "%*s%s%s", (int)indent + 2, "",
                           table->columns[table->column_count - 1].below, below->text) >= 0);
            wrap(screen, below->style, indent + 4, text);
            free(text);
        }
    }
}
