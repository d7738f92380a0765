// What a test says: CHECK(fact). The first fact that does not hold ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(fact)                                                            \
  do {                                                                         \
    if (!(fact)) {                                                             \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #fact); \
      std::exit(1);                                                            \
    }                                                                          \
  } while (false)
