/// @file
/// The wgmma.mma_async instructions for a GPU, made by macros: their text must be a literal that names each register. Used by
/// ptx/wgmma.hpp alone.
#pragma once

#include "ptx/sm90.hpp"

#include <cuda_fp8.h>

#include <type_traits>

namespace ptx::detail {

template <int N>
struct Wgmma {
    static_assert(N < 0, "wgmma with this N is not in the table of ptx/wgmma.hpp: add a line");
};

// Accumulators as operands, and the text that stands for them, eight more in each line.
#define PTX_SUMS(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
// clang-format off
#define PTX_SUMS_8 PTX_SUMS(0)
#define PTX_SUMS_16 PTX_SUMS_8, PTX_SUMS(8)
#define PTX_SUMS_24 PTX_SUMS_16, PTX_SUMS(16)
#define PTX_SUMS_32 PTX_SUMS_24, PTX_SUMS(24)
#define PTX_SUMS_40 PTX_SUMS_32, PTX_SUMS(32)
#define PTX_SUMS_48 PTX_SUMS_40, PTX_SUMS(40)
#define PTX_SUMS_56 PTX_SUMS_48, PTX_SUMS(48)
#define PTX_SUMS_64 PTX_SUMS_56, PTX_SUMS(56)
#define PTX_SUMS_72 PTX_SUMS_64, PTX_SUMS(64)
#define PTX_SUMS_80 PTX_SUMS_72, PTX_SUMS(72)
#define PTX_SUMS_88 PTX_SUMS_80, PTX_SUMS(80)
#define PTX_SUMS_96 PTX_SUMS_88, PTX_SUMS(88)
#define PTX_SUMS_104 PTX_SUMS_96, PTX_SUMS(96)
#define PTX_SUMS_112 PTX_SUMS_104, PTX_SUMS(104)
#define PTX_SUMS_120 PTX_SUMS_112, PTX_SUMS(112)
#define PTX_SUMS_128 PTX_SUMS_120, PTX_SUMS(120)
#define PTX_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PTX_NAMES_16 PTX_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PTX_NAMES_24 PTX_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PTX_NAMES_32 PTX_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_NAMES_40 PTX_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PTX_NAMES_48 PTX_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PTX_NAMES_56 PTX_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define PTX_NAMES_64 PTX_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define PTX_NAMES_72 PTX_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define PTX_NAMES_80 PTX_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define PTX_NAMES_88 PTX_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PTX_NAMES_96 PTX_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define PTX_NAMES_104 PTX_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define PTX_NAMES_112 PTX_NAMES_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define PTX_NAMES_120 PTX_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define PTX_NAMES_128 PTX_NAMES_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
// clang-format on

// One instruction. TYPES: "k16.f32.f16.f16"; FLAGS: the text after the predicate that says whether to accumulate.
#define PTX_WGMMA_SHARED(N, R, TYPES, FLAGS, r0, r1, r2, ...)                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES " {" PTX_NAMES_##R \
                 "}, %" #r0 ", %" #r1 ", p, 1, 1" FLAGS ";\n}"                                                                  \
                 : PTX_SUMS_##R                                                                                                 \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))__VA_ARGS__)
#define PTX_WGMMA_REGISTERS(N, R, TYPES, FLAGS, r0, r1, r2, r3, r4, r5, ...)                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES " {" PTX_NAMES_##R \
                 "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 ", p, 1, 1" FLAGS ";\n}"                                     \
                 : PTX_SUMS_##R                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))__VA_ARGS__)

// All instructions of one N; r0 .. r6 are the numbers of the operands after its R accumulators.
#define PTX_WGMMA(N, R, r0, r1, r2, r3, r4, r5, r6)                                                                       \
    template <>                                                                                                           \
    struct Wgmma<N> {                                                                                                     \
        template <class T, int kA, int kB>                                                                                \
        static SIMT_DEVICE void shared(float (&d)[R], std::uint64_t a, std::uint64_t b, bool accumulate) {                \
            if constexpr (std::is_same_v<T, __half>)                                                                      \
                PTX_WGMMA_SHARED(N, R, "k16.f32.f16.f16", ", %" #r3 ", %" #r4, r0, r1, r2, , "n"(kA), "n"(kB));           \
            else if constexpr (std::is_same_v<T, __nv_bfloat16>)                                                          \
                PTX_WGMMA_SHARED(N, R, "k16.f32.bf16.bf16", ", %" #r3 ", %" #r4, r0, r1, r2, , "n"(kA), "n"(kB));         \
            else                                                                                                          \
                PTX_WGMMA_SHARED(N, R, "k32.f32.e4m3.e4m3", "", r0, r1, r2);                                              \
        }                                                                                                                 \
        template <class T, int kB>                                                                                        \
        static SIMT_DEVICE void registers(float (&d)[R], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) { \
            if constexpr (std::is_same_v<T, __half>)                                                                      \
                PTX_WGMMA_REGISTERS(N, R, "k16.f32.f16.f16", ", %" #r6, r0, r1, r2, r3, r4, r5, , "n"(kB));               \
            else if constexpr (std::is_same_v<T, __nv_bfloat16>)                                                          \
                PTX_WGMMA_REGISTERS(N, R, "k16.f32.bf16.bf16", ", %" #r6, r0, r1, r2, r3, r4, r5, , "n"(kB));             \
            else                                                                                                          \
                PTX_WGMMA_REGISTERS(N, R, "k32.f32.e4m3.e4m3", "", r0, r1, r2, r3, r4, r5);                               \
        }                                                                                                                 \
    };
// clang-format off
PTX_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
PTX_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
PTX_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
PTX_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
PTX_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
PTX_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
PTX_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
PTX_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
PTX_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
PTX_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

#undef PTX_WGMMA
#undef PTX_WGMMA_SHARED
#undef PTX_WGMMA_REGISTERS
#undef PTX_SUMS

}  // namespace ptx::detail
