/* Language basics for the kernels: one spelling for NVRTC and nvcc, and one for g++, which tests the same code.
 *
 * NVRTC has no <stdint.h>. Nothing here depends on a layout. */
#ifndef PDTRANSFER_DEVICE_H
#define PDTRANSFER_DEVICE_H

#if defined(__CUDACC__)
typedef signed int int32_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef signed long int64_t;  /* as in <stdint.h>, so that nvcc's own headers do not conflict */
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

/* The widest access of a lane. */
struct Bytes16 {
    uint32_t word[4];
};

/* Loads of rows, which are read once and stay out of the L1, where the tables lie. Read-only loads (ld.global.nc) are
 * slower. */
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
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
                 : "l"(at));
    return value;
}

template <> CODE void store<Bytes16>(char *at, Bytes16 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(value.word[0]), "r"(value.word[1]),
                 "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}
#endif

/* Waits for the previous launch of the stream, which may still run. A kernel accesses no memory before this returns.
 * Cards below sm_90 do not support it; without the launch attribute it returns at once. */
CODE void follow() {
#if ON_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the next launch start. For kernels that end soon, since its waiting blocks occupy multiprocessors. */
CODE void lead() {
#if ON_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Has a value computed before `follow`: a launch's first look at its argument takes as long as a look at memory. */
template <class Value> CODE void settle(Value &value) {
#if ON_DEVICE
    asm volatile("" : "+l"(value));
#else
    (void)value;
#endif
}

/* Reads a word that a CPU or another block may change. */
CODE uint32_t glance(const uint32_t *at) {
    return *(const volatile uint32_t *)at;
}

/* Room in shared memory for a word that is read while its reader goes on. */
struct Fetched {
    alignas(16) uint32_t words[4];
};

/* Begins to read the word at `at`, which a CPU may change; 16 bytes are read. */
CODE void begin_fetch(Fetched *room, const uint32_t *at) {
#if ON_DEVICE && __CUDA_ARCH__ >= 800
    uint32_t address = (uint32_t)__cvta_generic_to_shared(room->words);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(at) : "memory");
#else
    room->words[0] = glance(at);
#endif
}

/* The word that this thread began to read last, once it has arrived. */
CODE uint32_t end_fetch(const Fetched *room) {
#if ON_DEVICE && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    return glance(&room->words[0]);
}

/* Publishes all stores of this thread and of threads it has synchronised with, to the host as well. */
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
