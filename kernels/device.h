/* What the kernels need of the language: one spelling for NVRTC and nvcc, and one for g++, which runs the same logic.
 *
 * NVRTC has no <stdint.h>. Nothing here knows a layout. */
#ifndef PDTRANSFER_DEVICE_H
#define PDTRANSFER_DEVICE_H

#if defined(__CUDACC__)
typedef signed int int32_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef signed long int64_t;  /* as <stdint.h> has it here: a redefinition by nvcc's own headers is no conflict */
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#define ON_DEVICE 1
#define CODE __device__ __forceinline__
#define APART __device__ __noinline__ /* whose registers are not the caller's */
#define UNROLLED _Pragma("unroll")
#else
#include <stdint.h>
#define ON_DEVICE 0
#define CODE static inline
#define APART static
#define UNROLLED
#endif

/* What moves in one access of a lane. */
struct Bytes16 {
    uint32_t word[4];
};
struct Bytes32 {
    uint64_t word[4];
};

/* Plain loads: marked as read-only (ld.global.nc) the same rows came 3 % slower in a push and 20 % in a small gather. */
template <class Unit> CODE Unit load(const char *at) {
#if ON_DEVICE
    return *(const Unit *)at;
#else
    return *(const Unit *)(const void *)at;
#endif
}

template <class Unit> CODE void store(char *at, Unit value) {
    *(Unit *)(void *)at = value;
}

#if ON_DEVICE
template <> CODE Bytes16 load<Bytes16>(const char *at) {
    Bytes16 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
                 : "l"(at));
    return value;
}

template <> CODE void store<Bytes16>(char *at, Bytes16 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(value.word[0]), "r"(value.word[1]),
                 "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}

#if __CUDA_ARCH__ >= 1000
template <> CODE Bytes32 load<Bytes32>(const char *at) {
    Bytes32 value;
    asm volatile("ld.global.v4.b64 {%0, %1, %2, %3}, [%4];"
                 : "=l"(value.word[0]), "=l"(value.word[1]), "=l"(value.word[2]), "=l"(value.word[3])
                 : "l"(at));
    return value;
}

template <> CODE void store<Bytes32>(char *at, Bytes32 value) {
    asm volatile("st.global.v4.b64 [%0], {%1, %2, %3, %4};" ::"l"(at), "l"(value.word[0]), "l"(value.word[1]),
                 "l"(value.word[2]), "l"(value.word[3])
                 : "memory");
}
#endif
#endif

/* A launch may be made before the one ahead of it in its stream has ended: it touches nothing until this returns. Cards
 * below sm_90 have no such thing, and it costs nothing where nobody asked for it. */
CODE void follow() {
#if ON_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next launch may be made: for kernels that end soon, since its blocks wait on multiprocessors of their own. */
CODE void lead() {
#if ON_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* A word that somebody else may change, a CPU or another block: read anew each time. */
CODE uint32_t glance(const uint32_t *at) {
    return *(const volatile uint32_t *)at;
}

/* Publishes everything that this thread, and those it has synchronised with, have stored, also to the host. */
CODE void publish(uint32_t *at, uint32_t value) {
#if ON_DEVICE
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
#else
    *(volatile uint32_t *)at = value;
#endif
}

CODE uint32_t add(uint32_t *at, uint32_t value) {
#if ON_DEVICE
    return atomicAdd(at, value);
#else
    uint32_t before = *at;
    *at = before + value;
    return before;
#endif
}

#endif
