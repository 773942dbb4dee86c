// Preloaded, gives the host both.test two addresses: 127.0.0.2, then 127.0.0.1.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>

int getaddrinfo(const char* host, const char* port, const struct addrinfo* hints, struct addrinfo** found) {
  int (*resolve)(const char*, const char*, const struct addrinfo*, struct addrinfo**) = dlsym(RTLD_NEXT, "getaddrinfo");
  if (!host || strcmp(host, "both.test")) return resolve(host, port, hints, found);
  int wrong = resolve("127.0.0.2", port, hints, found);
  return wrong ? wrong : resolve("127.0.0.1", port, hints, &(*found)->ai_next);
}
