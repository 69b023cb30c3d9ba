// The visibility macro of Ladon's public symbols.
#pragma once

#if defined(_WIN32) && defined(LADON_SHARED)
#if defined(LADON_BUILDING)
#define LADON_API __declspec(dllexport)
#else
#define LADON_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define LADON_API __attribute__((visibility("default")))
#else
#define LADON_API
#endif
