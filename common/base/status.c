#include "base/status.h"

const char *status_name(enum status status) {
    switch (status) {
    case STATUS_OK: return "ok";
    case STATUS_INVALID: return "invalid";
    case STATUS_RANGE: return "range";
    case STATUS_NOT_FOUND: return "not_found";
    case STATUS_EXISTS: return "exists";
    case STATUS_BUSY: return "busy";
    case STATUS_UNAVAILABLE: return "unavailable";
    case STATUS_TIMEOUT: return "timeout";
    case STATUS_CANCELLED: return "cancelled";
    case STATUS_CORRUPT: return "corrupt";
    case STATUS_UNSUPPORTED: return "unsupported";
    case STATUS_IO: return "io";
    case STATUS_INTERNAL: return "internal";
    }
    return "unknown";
}
