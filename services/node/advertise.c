/* Which host others are told to connect to. */
#include "services/node/internal.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string.h>

#include "base/bytes.h"

bool advertise_own(char *out, size_t cap) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) {
        return false;
    }
    bool is_found = false;
    for (const struct ifaddrs *each = all; each != NULL && !is_found; each = each->ifa_next) {
        if (each->ifa_addr == NULL || each->ifa_addr->sa_family != AF_INET ||
            (each->ifa_flags & IFF_UP) == 0 || (each->ifa_flags & IFF_LOOPBACK) != 0) {
            continue;
        }
        struct sockaddr_in address;
        memcpy(&address, each->ifa_addr, sizeof address);
        is_found = inet_ntop(AF_INET, &address.sin_addr, out, (socklen_t)cap) != NULL;
    }
    freeifaddrs(all);
    return is_found;
}

static bool is_any(const char *host) {
    return host[0] == '\0' || strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0;
}

void advertise_choose(const char *wanted, const char *listen_host, char *out, size_t cap) {
    if (wanted != NULL && wanted[0] != '\0') {
        text_copy(out, cap, wanted);
    } else if (!is_any(listen_host)) {
        text_copy(out, cap, strcmp(listen_host, "localhost") == 0 ? "127.0.0.1" : listen_host);
    } else if (!advertise_own(out, cap)) {
        text_copy(out, cap, "127.0.0.1");
    }
}
