// Views of global memory in emulation, and the ledger: sectors are counted by hand. CPU build only.
#include "simt/ledger.hpp"
#include "simt/simt.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using simt::Error;
using simt::Execution;
using simt::Ledger;
using simt::packed_view;
using simt::Schedule;
using simt::TensorView;

// `auto x = view(i, j);` keeps a reference and not the value, so its later use must not compile: only temporaries convert.
template <class T, int R, class... I>
using ElementOf = decltype(std::declval<const TensorView<T, R>&>()(std::declval<I>()...));
using Element = ElementOf<float, 2, int, int>;
template <class E>
constexpr bool kReads = requires(E e) {
    static_cast<float>(std::forward<E>(e));
};
template <class E>
constexpr bool kAdds = requires(E e) {
    std::forward<E>(e) += 1.0f;
};
template <class E>
constexpr bool kGivesAddress = requires(E e) {
    (&std::forward<E>(e)).read(1);
};
static_assert(kReads<Element> && !kReads<Element&> && !kReads<const Element&>);
static_assert(std::is_convertible_v<Element, float> && !std::is_convertible_v<Element&, float>);
static_assert(kAdds<Element> && !kAdds<Element&>);
static_assert(std::is_assignable_v<Element, float> && !std::is_assignable_v<Element&, float>);
static_assert(kGivesAddress<Element> && !kGivesAddress<Element&>);
static_assert(!std::is_copy_constructible_v<Element>);
static_assert(std::is_convertible_v<ElementOf<const float, 1, unsigned>, float>);
static_assert(std::is_same_v<ElementOf<float, 4, int, int>, TensorView<float, 2>>);

template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    ADD_FAILURE() << "no exception";
    return {};
}

void expect_says(const std::string& text, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

/// Memory as a device gives it: aligned to 256 bytes. Element i holds i.
template <class T, std::size_t N = 4096>
struct Memory {
    alignas(256) std::array<T, N> at;
    Memory() {
        for (std::size_t i = 0; i < N; ++i) at[i] = simt::from_float<T>(static_cast<float>(i));
    }
    T* data() { return at.data(); }
};

// ---------------------------------------------------------------- indexing

TEST(View, RankOne) {
    Memory<float> m;
    const auto v = packed_view<float, 1>("v", m.data(), {10});
    EXPECT_EQ(v.extent(0), 10);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(static_cast<float>(v(i)), static_cast<float>(i));
    v(3) = -1.0f;
    EXPECT_EQ(m.at[3], -1.0f);
}

TEST(View, OddStridesUpToRankFour) {
    Memory<float> m;
    const TensorView<const float, 2> two("two", m.data(), {5, 7}, {11});
    const TensorView<const float, 3> three("three", m.data() + 3, {4, 5, 7}, {97, 13});
    const TensorView<const float, 4> four("four", m.data() + 1, {3, 4, 5, 7}, {7, 35, 501});  // strides in no order
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 4; ++j)
            for (int k = 0; k < 5; ++k)
                for (int l = 0; l < 7; ++l) {
                    ASSERT_EQ(static_cast<float>(two(k, l)), static_cast<float>(11 * k + l));
                    ASSERT_EQ(static_cast<float>(three(j, k, l)), static_cast<float>(3 + 97 * j + 13 * k + l));
                    const auto expected = static_cast<float>(1 + 7 * i + 35 * j + 501 * k + l);
                    ASSERT_EQ(static_cast<float>(four(i, j, k, l)), expected);
                    ASSERT_EQ(static_cast<float>(four(i)(j, k, l)), expected);
                    ASSERT_EQ(static_cast<float>(four(i, j)(k, l)), expected);
                    ASSERT_EQ(static_cast<float>(four(i, j, k)(l)), expected);
                    ASSERT_EQ(static_cast<float>(four(i)(j)(k)(l)), expected);
                }
    EXPECT_EQ(four(1, 2).extent(0), 5);
    EXPECT_EQ(four(1, 2).extent(1), 7);
}

// Stride 0 repeats a row; a negative stride runs backwards; one beyond 2^31 bytes must not overflow.
TEST(View, ZeroNegativeAndLargeStrides) {
    Memory<float> m;
    const TensorView<const float, 2> repeated("r", m.data(), {3, 4}, {0});
    const TensorView<const float, 2> backwards("b", m.data() + 100, {3, 4}, {-10});
    EXPECT_EQ(static_cast<float>(repeated(2, 3)), 3.0f);
    EXPECT_EQ(static_cast<float>(backwards(2, 1)), 81.0f);
    const std::uintptr_t two_rows_before = reinterpret_cast<std::uintptr_t>(m.data()) - 2 * 3000000000ull * sizeof(float);
    const TensorView<const float, 2> wide("w", reinterpret_cast<const float*>(two_rows_before), {3, 4}, {3000000000LL});
    EXPECT_EQ(static_cast<float>(wide(2, 3)), 3.0f);
}

TEST(View, PackedStrides) {
    Memory<float> m;
    const auto v = packed_view<const float, 4>("v", m.data(), {2, 3, 4, 5});
    EXPECT_EQ(static_cast<float>(v(1, 2, 3, 4)), 119.0f);
    EXPECT_EQ(static_cast<float>(v(1, 0, 2, 1)), 71.0f);
}

TEST(View, ElementOutOfBounds) {
    Memory<float> m;
    const auto v = packed_view<const float, 4>("K", m.data(), {1, 2, 16, 8});
    const auto text = [&](int a, int b, int c, int d) { return message_of([&] { (void)static_cast<float>(v(a, b, c, d)); }); };
    EXPECT_EQ(text(0, 1, 16, 5), "out of bounds: K(0, 1, 16, 5) of extent (1, 2, 16, 8)");
    expect_says(text(1, 0, 0, 0), {"K(1, 0, 0, 0)"});
    expect_says(text(0, 2, 0, 0), {"K(0, 2, 0, 0)"});
    expect_says(text(0, 0, 0, 8), {"K(0, 0, 0, 8)"});
    expect_says(text(0, 0, -1, 0), {"K(0, 0, -1, 0)"});
    expect_says(text(0, 0, 0, -1), {"K(0, 0, 0, -1)"});
    expect_says(message_of([&] { (void)static_cast<float>(v(0u, 0u, 2u - 3u, 0u)); }), {"K(0, 0, -1, 0)"});
    EXPECT_NO_THROW((void)static_cast<float>(v(0, 1, 15, 7)));
    const auto row = v(0, 1, 3);
    expect_says(message_of([&] { (void)static_cast<float>(row(8)); }), {"out of bounds: K(8) of extent (8)"});
}

TEST(View, SliceOutOfBounds) {
    Memory<float> m;
    const auto v = packed_view<const float, 4>("Q", m.data(), {2, 3, 4, 5});
    expect_says(message_of([&] { (void)v(2); }), {"out of bounds: Q(2) of extent (2, 3, 4, 5)"});
    expect_says(message_of([&] { (void)v(0, 3); }), {"Q(0, 3) of extent (2, 3, 4, 5)"});
    expect_says(message_of([&] { (void)v(-1, 0); }), {"Q(-1, 0)"});
    expect_says(message_of([&] { (void)v(1, 2, 4); }), {"Q(1, 2, 4)"});
    EXPECT_NO_THROW((void)v(1, 2, 3));
}

TEST(View, RowsOfASlice) {
    std::vector<float> data(2 * 5 * 3);
    std::iota(data.begin(), data.end(), 0.0f);
    const auto view = packed_view<float, 3>("x", data.data(), {2, 5, 3});
    const auto rows = view.slice<1>(2, 2);
    EXPECT_EQ(rows.extent(0), 2);
    EXPECT_EQ(rows.extent(1), 2);
    EXPECT_EQ(static_cast<float>(rows(1, 0, 1)), static_cast<float>(view(1, 2, 1)));
    EXPECT_EQ(static_cast<float>(view.slice<2>(1, 2)(1, 4, 1)), static_cast<float>(view(1, 4, 2)));
    EXPECT_EQ(static_cast<float>(view(1).slice<0>(3, 1)(0, 2)), static_cast<float>(view(1, 3, 2)));
    EXPECT_EQ(view.slice<1>(5, 0).extent(1), 0);  // an empty sequence at the end
    EXPECT_EQ(message_of([&] { (void)static_cast<float>(rows(0, 2, 0)); }), "out of bounds: x(0, 2, 0) of extent (2, 2, 3)");
    EXPECT_EQ(message_of([&] { (void)view.slice<1>(4, 2); }), "out of bounds: slice 4 to 6 of x, whose extent 1 is 5");
    EXPECT_EQ(message_of([&] { (void)view.slice<0>(-1, 1); }), "out of bounds: slice -1 to 0 of x, whose extent 0 is 2");
}

TEST(View, EmptyAndNegativeExtents) {
    Memory<float> m;
    const auto empty = packed_view<const float, 2>("E", m.data(), {0, 4});
    expect_says(message_of([&] { (void)static_cast<float>(empty(0, 0)); }), {"E(0, 0) of extent (0, 4)"});
    expect_says(message_of([&] { packed_view<const float, 2>("S", m.data(), {3, -4}); }), {"view of S", "extent 1 = -4", "from 0 on"});
}

__global__ void read_one(TensorView<const float, 2> a, int i, int j) {
    if (threadIdx.x == 17) (void)static_cast<float>(a(i, j));
}

TEST(View, MessagesNameTheThread) {
    Memory<float> m;
    const auto v = packed_view<const float, 2>("V", m.data(), {4, 5});
    EXPECT_EQ(message_of([&] { simt::launch(read_one, {.block = {32}}, v, 4, 5); }),
              "out of bounds: V(4, 5) of extent (4, 5) by thread 17 of block (0,0,0)");
}

TEST(View, ElementOperators) {
    Memory<float> m;
    Memory<float> n;
    const auto a = packed_view<float, 2>("a", m.data(), {4, 4});
    const auto b = packed_view<const float, 1>("b", n.data(), {16});
    a(1, 1) += 10.0f;
    EXPECT_EQ(m.at[5], 15.0f);
    a(1, 1) *= 2.0f;
    EXPECT_EQ(m.at[5], 30.0f);
    a(0, 0) = a(1, 1);  // same type
    EXPECT_EQ(m.at[0], 30.0f);
    a(0, 1) = b(7);  // another type of view
    EXPECT_EQ(m.at[1], 7.0f);
    a(0, 2) = a(1, 1) * b(2) - a(0, 1) + 1.0f;
    EXPECT_EQ(m.at[2], 54.0f);
    const float chosen = m.at[0] > 0 ? a(1, 1) : 0.0f;
    EXPECT_EQ(chosen, 30.0f);
}

TEST(View, HalfPrecisionElements) {
    Memory<__nv_bfloat16> m;
    Memory<__half> h;
    const auto a = packed_view<__nv_bfloat16, 1>("a", m.data(), {16});
    const auto b = packed_view<const __half, 1>("b", h.data(), {16});
    a(2) = simt::from_float<__nv_bfloat16>(simt::to_float(b(9)) * 0.5f);
    EXPECT_EQ(simt::to_float(m.at[2]), 4.5f);
    EXPECT_EQ(simt::to_float(a(3)), 3.0f);
}

// ---------------------------------------------------------------- addresses

__global__ void copy_vectors(TensorView<const float, 2> a, TensorView<float, 2> b, int count) {
    const int first = static_cast<int>(threadIdx.x) * count;
    const float* from = (&a(1, first)).read(count);
    float* to = (&b(0, first)).write(count);
    for (int k = 0; k < count; ++k) to[k] = from[k];
}

TEST(Address, VectorAccess) {
    Memory<float> m, n;
    const auto a = packed_view<const float, 2>("a", m.data(), {2, 128});
    const auto b = packed_view<float, 2>("b", n.data(), {2, 128});
    simt::launch(copy_vectors, {.block = {32}}, a, b, 4);
    for (std::size_t i = 0; i < 128; ++i) EXPECT_EQ(n.at[i], static_cast<float>(128 + i));
}

__global__ void vector_at(TensorView<float, 2> a, int r, int c, int count, bool write) {
    if (write)
        (&a(r, c)).write(count);
    else
        (&a(r, c)).read(count);
}

TEST(Address, PastTheEndOfTheRow) {
    Memory<float> m;
    const auto a = packed_view<float, 2>("O", m.data(), {3, 8});
    const auto text = [&](int r, int c, int count, bool write) {
        return message_of([&] { simt::launch(vector_at, {}, a, r, c, count, write); });
    };
    for (bool write : {false, true}) {
        EXPECT_NO_THROW(simt::launch(vector_at, {}, a, 1, 4, 4, write));
        expect_says(text(1, 5, 4, write), {"out of bounds", "4 elements", "O", "3 are left", "thread 0 of block (0,0,0)"});
        expect_says(text(0, 0, 9, write), {"9 elements", "8 are left"});
        expect_says(text(0, 0, 0, write), {"0 elements"});
        expect_says(text(0, 0, -2, write), {"-2 elements"});
        expect_says(text(3, 0, 4, write), {"out of bounds: O(3, 0)"});
        expect_says(text(0, 8, 1, write), {"out of bounds: O(0, 8)"});
    }
}

__global__ void add_to_view(TensorView<float, 1> f, TensorView<int, 1> n) {
    atomicAdd(&f(1), 0.5f);
    atomicAdd(&n(0), 1);
}

TEST(Address, AtomicAdd) {
    Memory<float> m;
    int n[1] = {0};
    Ledger ledger;
    Execution exec;
    exec.ledger = &ledger;
    simt::launch(add_to_view, {.grid = {16}, .block = {64}, .exec = &exec}, packed_view<float, 1>("f", m.data(), {4}),
                 packed_view<int, 1>("n", n, {1}));
    EXPECT_EQ(m.at[1], 1.0f + 512.0f);
    EXPECT_EQ(n[0], 1024);
    // One read and one write of a broadcast address by each of 32 warps.
    EXPECT_EQ(ledger.row("f").read.requested, 4096u);
    EXPECT_EQ(ledger.row("f").written.requested, 4096u);
    EXPECT_EQ(ledger.row("f").read.sectors, 32u);
    EXPECT_EQ(ledger.row("f").written.sectors, 32u);
}

// ---------------------------------------------------------------- the ledger

struct Expected {
    std::uint64_t requested, sectors;
};

void expect_count(const simt::Count& count, Expected expected, const std::string& what) {
    EXPECT_EQ(count.requested, expected.requested) << what;
    EXPECT_EQ(count.sectors, expected.sectors) << what;
    EXPECT_EQ(count.sector_bytes(), 32 * expected.sectors) << what;
}

/// Runs a kernel under each schedule with a fresh ledger and hands that to `check`.
template <class... Params, class Check, class... Args>
void each_schedule(void (*kernel)(Params...), dim3 grid, dim3 block, Check&& check, Args... args) {
    for (Schedule schedule : {Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first}) {
        SCOPED_TRACE(simt::name(schedule));
        Ledger ledger;
        Execution exec;
        exec.schedule = schedule;
        exec.ledger = &ledger;
        simt::launch(kernel, {.grid = grid, .block = block, .exec = &exec}, args...);
        check(ledger);
    }
}

template <class T>
__device__ void use(T) {}

template <class T>
__global__ void strided(TensorView<const T, 1> a, int base, int stride) {
    use<T>(a(base + stride * static_cast<int>(threadIdx.x)));
}

template <class T>
void expect_strided(int base, int stride, Expected expected) {
    Memory<T> m;
    each_schedule(
        strided<T>, 1, 32,
        [&](const Ledger& ledger) {
            expect_count(ledger.row("a").read, expected, "base " + std::to_string(base) + " stride " + std::to_string(stride));
            expect_count(ledger.row("a").written, {0, 0}, "nothing is written");
        },
        packed_view<const T, 1>("a", m.data(), {4096}), base, stride);
}

TEST(LedgerSectors, OneRequestOfAWarp) {
    expect_strided<float>(0, 0, {128, 1});   // broadcast
    expect_strided<float>(0, 1, {128, 4});   // 128 bytes
    expect_strided<float>(8, 1, {128, 4});   // begins at another sector
    expect_strided<float>(1, 1, {128, 5});   // begins inside a sector
    expect_strided<float>(0, 2, {128, 8});   // every other element
    expect_strided<float>(0, 8, {128, 32});  // a sector for each lane
    expect_strided<float>(0, 32, {128, 32});
    expect_strided<float>(0, 33, {128, 32});
    expect_strided<float>(4095, -1, {128, 4});  // backwards
    expect_strided<__nv_bfloat16>(0, 1, {64, 2});
    expect_strided<__nv_bfloat16>(1, 1, {64, 3});
    expect_strided<__half>(0, 2, {64, 4});
    expect_strided<__half>(0, 64, {64, 32});
}

template <class T>
__global__ void vectors(TensorView<const T, 1> a, TensorView<T, 1> b, int base, int count) {
    const int first = base + count * static_cast<int>(threadIdx.x);
    (&a(first)).read(count);
    (&b(first)).write(count);
}

template <class T>
void expect_vectors(int base, int count, Expected expected) {
    Memory<T> m, n;
    each_schedule(
        vectors<T>, 1, 32,
        [&](const Ledger& ledger) {
            expect_count(ledger.row("a").read, expected, "read");
            expect_count(ledger.row("b").written, expected, "written");
            expect_count(ledger.row("a").written, {0, 0}, "a written");
            expect_count(ledger.row("b").read, {0, 0}, "b read");
        },
        packed_view<const T, 1>("a", m.data(), {4096}), packed_view<T, 1>("b", n.data(), {4096}), base, count);
}

TEST(LedgerSectors, VectorAccesses) {
    expect_vectors<float>(0, 4, {512, 16});
    expect_vectors<float>(0, 2, {256, 8});
    expect_vectors<float>(4, 4, {512, 17});  // 16 bytes from byte 16 on
    expect_vectors<__nv_bfloat16>(0, 8, {512, 16});
    expect_vectors<__half>(0, 2, {128, 4});
}

__global__ void walk(TensorView<const float, 2> a, bool along_columns) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int k = 0; k < 32; ++k) use<float>(along_columns ? a(lane, k) : a(k, lane));
}

TEST(LedgerSectors, ColumnWalk) {
    Memory<float> m;
    const auto a = packed_view<const float, 2>("a", m.data(), {32, 32});
    each_schedule(
        walk, 1, 32,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {4096, 32 * 4}, "rows");
        },
        a, false);
    each_schedule(
        walk, 1, 32,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {4096, 32 * 32}, "columns");
        },
        a, true);
}

__global__ void copy_add(TensorView<const float, 1> a, TensorView<float, 1> b, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) b(i) += a(i);
}

TEST(LedgerSectors, TwoTensorsReadsAndWritesApart) {
    Memory<float> m, n;
    each_schedule(
        copy_add, 3, 128,
        [](const Ledger& ledger) {
            expect_count(ledger.row("a").read, {384 * 4, 48}, "a read");
            expect_count(ledger.row("a").written, {0, 0}, "a written");
            expect_count(ledger.row("b").read, {384 * 4, 48}, "b read");
            expect_count(ledger.row("b").written, {384 * 4, 48}, "b written");
            expect_count(ledger.read(), {2 * 384 * 4, 96}, "all read");
            expect_count(ledger.written(), {384 * 4, 48}, "all written");
            EXPECT_EQ(ledger.rows().size(), 2u);
        },
        packed_view<const float, 1>("a", m.data(), {384}), packed_view<float, 1>("b", n.data(), {384}), 384);
}

TEST(LedgerSectors, TailLanesOff) {
    Memory<float> m, n;
    // 276 elements: eight whole warps, then one with 20 lanes: 3 sectors; the rest does nothing.
    each_schedule(
        copy_add, 3, 128,
        [](const Ledger& ledger) {
            expect_count(ledger.row("a").read, {276 * 4, 8 * 4 + 3}, "a read");
            expect_count(ledger.row("b").written, {276 * 4, 8 * 4 + 3}, "b written");
        },
        packed_view<const float, 1>("a", m.data(), {276}), packed_view<float, 1>("b", n.data(), {276}), 276);
}

__global__ void masked(TensorView<const float, 1> a, unsigned mask, int rounds) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int k = 0; k < rounds; ++k)
        if (mask >> lane & 1u) use<float>(a(32 * k + lane));
}

TEST(LedgerSectors, LaneDependentIf) {
    Memory<float> m;
    const auto a = packed_view<const float, 1>("a", m.data(), {4096});
    const auto expect = [&](unsigned mask, Expected e) {
        each_schedule(
            masked, 1, 32, [&](const Ledger& l) { expect_count(l.row("a").read, e, std::to_string(mask)); }, a, mask, 10);
    };
    expect(0xaaaaaaaau, {10 * 64, 10 * 4});
    expect(0x000000ffu, {10 * 32, 10 * 1});
    expect(0x80000001u, {10 * 8, 10 * 2});
    expect(0x00000100u, {10 * 4, 10 * 1});
}

// The branches of a divergent `if` read apart from each other: lane t has element t or 63 - t.
__global__ void two_branches(TensorView<const float, 1> a) {
    const int lane = static_cast<int>(threadIdx.x);
    float x = 0;
    if (lane % 2)
        x = a(63 - lane) * 2.0f;
    else
        x = a(lane) + 1.0f;
    use(x);
}

TEST(LedgerSectors, TwoBranches) {
    Memory<float> m;
    each_schedule(
        two_branches, 1, 32,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {128, 8}, "a");
        },
        packed_view<const float, 1>("a", m.data(), {64}));
}

__global__ void trip_counts(TensorView<const float, 1> a) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int k = 0; k <= lane; ++k) use<float>(a(32 * k + lane));
}

TEST(LedgerSectors, TripCountsThatDifferByLane) {
    Memory<float> m;
    // Request k is made by lanes k to 31: 4 - k / 8 sectors.
    each_schedule(
        trip_counts, 1, 32,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {4 * 528, 8 * (4 + 3 + 2 + 1)}, "a");
        },
        packed_view<const float, 1>("a", m.data(), {4096}));
}

// Rows of 36 elements: lanes 0 to 3 pass the inner place twice a row, the others once. They meet again at the end of each row.
__global__ void ragged_rows(TensorView<const float, 2> a, bool whole_block) {
    for (int r = 0; r < a.extent(0); ++r) {
        for (int c = static_cast<int>(threadIdx.x); c < a.extent(1); c += 32) use<float>(a(r, c));
        if (whole_block)
            __syncthreads();
        else
            __syncwarp();
    }
}

TEST(LedgerSectors, LanesAreAlignedAgainWhereTheyMeet) {
    Memory<float> m;
    const TensorView<const float, 2> a("a", m.data(), {10, 36}, {64});
    for (bool whole_block : {true, false})
        each_schedule(
            ragged_rows, 1, 32,
            [](const Ledger& l) {
                expect_count(l.row("a").read, {10 * 36 * 4, 10 * 5}, "a");
            },
            a, whole_block);
}

// Each turn of the loop one other lane writes: 32 requests of one sector, not one request of four.
__global__ void one_lane_each(TensorView<const float, 1> a, TensorView<float, 1> o) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int t = 0; t < 32; ++t) {
        const float sum = simt::warp_sum(a(lane));
        if (lane == t) o(t) = sum;
    }
}

TEST(LedgerSectors, OneLaneAfterTheOther) {
    Memory<float> m, n;
    each_schedule(
        one_lane_each, 1, 32,
        [](const Ledger& l) {
            expect_count(l.row("o").written, {128, 32}, "o");
            expect_count(l.row("a").read, {32 * 128, 32 * 4}, "a");
        },
        packed_view<const float, 1>("a", m.data(), {32}), packed_view<float, 1>("o", n.data(), {32}));
}

__device__ float element(const TensorView<const float, 1>& v, int i) { return v(i); }

__global__ void one_line_two_tensors(TensorView<const float, 1> a, TensorView<const float, 1> b) {
    const int lane = static_cast<int>(threadIdx.x);
    for (const auto* v : {&a, &b}) use<float>(element(*v, lane));
    use<float>(element(lane % 2 ? a : b, 64 + lane));
}

TEST(LedgerSectors, OneSourceLineForTwoTensors) {
    Memory<float> m, n;
    each_schedule(
        one_line_two_tensors, 1, 32,
        [](const Ledger& ledger) {
            for (const char* name : {"a", "b"}) expect_count(ledger.row(name).read, {128 + 64, 4 + 4}, name);
        },
        packed_view<const float, 1>("a", m.data(), {128}), packed_view<const float, 1>("b", n.data(), {128}));
}

__global__ void every_warp_reads_all(TensorView<const float, 1> a) {
    for (int k = 0; k < a.extent(0); ++k) use<float>(a(k));
}

// Warps and blocks make requests of their own, also for the same addresses.
TEST(LedgerSectors, WarpsAndBlocks) {
    Memory<float> m;
    const auto a = packed_view<const float, 1>("a", m.data(), {10});
    each_schedule(
        every_warp_reads_all, {5, 2}, 128,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {1280 * 40, 40 * 10}, "whole");
        },
        a);
    each_schedule(
        every_warp_reads_all, 3, 33,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {99 * 40, 6 * 10}, "partial");
        },
        a);
    each_schedule(
        every_warp_reads_all, 1, {4, 4, 4},
        [](const Ledger& l) {
            expect_count(l.row("a").read, {64 * 40, 2 * 10}, "3-D");
        },
        a);
}

__global__ void long_loop(TensorView<const float, 1> a, TensorView<float, 1> b, int upper, int lower) {
    const int lane = static_cast<int>(threadIdx.x % 32), n = lane < 16 ? lower : upper;
    for (int k = 0; k < n; ++k) {
        use<float>(a(32 * (k % 64) + lane));
        b(32 * (k % 32) + 2 * lane) = 0.0f;
    }
}

TEST(LedgerSectors, LongLoopsStayExact) {
    Memory<float> m, n;
    const auto a = packed_view<const float, 1>("a", m.data(), {4096});
    const auto b = packed_view<float, 1>("b", n.data(), {4096});
    each_schedule(
        long_loop, 1, 64,
        [](const Ledger& ledger) {
            expect_count(ledger.row("a").read, {2 * 32 * 4 * 10007, 2 * 4 * 10007}, "a");
            expect_count(ledger.row("b").written, {2 * 32 * 4 * 10007, 2 * 8 * 10007}, "b");
        },
        a, b, 10007, 10007);
    each_schedule(
        long_loop, 1, 32,
        [](const Ledger& ledger) {
            expect_count(ledger.row("a").read, {16 * 4 * (10007 + 3001), 4 * 3001 + 2 * (10007 - 3001)}, "a");
            expect_count(ledger.row("b").written, {16 * 4 * (10007 + 3001), 8 * 3001 + 4 * (10007 - 3001)}, "b");
        },
        a, b, 10007, 3001);
}

// Lanes are run apart by shuffles and barriers between the accesses of a loop.
__global__ void collectives_between(TensorView<const float, 1> a) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float x = 0;
    for (int k = 0; k < 100; ++k) {
        x += a(lane + k % 4 * 32);
        if (k % 3 == 0) x = simt::warp_sum(x);
        if (k % 7 == 0) __syncthreads();
        if (lane < 16) x += __shfl_xor_sync(0xffffu, x, 1);
        x += a(128 + lane);
    }
    use(x);
}

TEST(LedgerSectors, CollectivesBetweenAccesses) {
    Memory<float> m;
    each_schedule(
        collectives_between, 2, 96,
        [](const Ledger& l) {
            expect_count(l.row("a").read, {2 * 96 * 200 * 4, 2 * 3 * 200 * 4}, "a");
        },
        packed_view<const float, 1>("a", m.data(), {4096}));
}

TEST(LedgerObject, ServesSeveralLaunches) {
    Memory<float> m, n;
    Ledger ledger;
    Execution exec;
    exec.ledger = &ledger;
    const auto a = packed_view<const float, 1>("serves_a", m.data(), {128});
    const auto b = packed_view<float, 1>("serves_b", n.data(), {128});
    for (std::uint64_t launches = 1; launches <= 3; ++launches) {
        simt::launch(copy_add, {.grid = {2}, .block = {64}, .exec = &exec}, a, b, 128);
        expect_count(ledger.row("serves_a").read, {launches * 512, launches * 16}, "a");
    }
    const std::vector<simt::LedgerRow> rows = ledger.rows();
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].tensor, "serves_a");  // the first to be created
    EXPECT_EQ(rows[1].tensor, "serves_b");
    expect_count(ledger.row("unknown").read, {0, 0}, "unknown");
    ledger.clear();
    EXPECT_TRUE(ledger.rows().empty());
    expect_count(ledger.read(), {0, 0}, "cleared");
}

TEST(LedgerObject, TwoLedgersAreApart) {
    Memory<float> m, n;
    const auto a = packed_view<const float, 1>("a", m.data(), {128});
    const auto b = packed_view<float, 1>("b", n.data(), {128});
    Ledger first, second;
    Execution exec;
    exec.ledger = &first;
    simt::launch(copy_add, {.block = {32}, .exec = &exec}, a, b, 32);
    exec.ledger = &second;
    simt::launch(copy_add, {.block = {64}, .exec = &exec}, a, b, 64);
    exec.ledger = nullptr;  // not counted anywhere
    simt::launch(copy_add, {.block = {128}, .exec = &exec}, a, b, 128);
    simt::launch(copy_add, {.block = {128}}, a, b, 128);
    expect_count(first.row("a").read, {128, 4}, "first");
    expect_count(second.row("a").read, {256, 8}, "second");
    EXPECT_EQ(n.at[31], 31.0f * 5);  // all four launches ran
}

TEST(LedgerObject, HostAccessesAreNotCounted) {
    Memory<float> m;
    const auto a = packed_view<float, 1>("a", m.data(), {8});
    a(1) = 5.0f;
    EXPECT_EQ(static_cast<float>(a(1)), 5.0f);
    expect_says(message_of([&] {
                    (&a(0)).read(1), simt::launch(read_one, {}, packed_view<const float, 2>("v", m.data(), {1, 1}), 0, 0);
                }),
                {"outside of a kernel"});
}

__global__ void fail_late(TensorView<const float, 1> a) {
    for (int k = 0; k < 50; ++k) use<float>(a(static_cast<int>(threadIdx.x) + k));
    if (threadIdx.x == 20) throw std::runtime_error("late");
    __syncthreads();
}

// Requests that a failed launch left half made must not mix with those of the next one.
TEST(LedgerObject, ExactAfterAFailedLaunch) {
    Memory<float> m, n;
    for (int i = 0; i < 3; ++i) {
        Ledger failed, ledger;
        Execution exec;
        exec.ledger = &failed;
        EXPECT_THROW(
            simt::launch(fail_late, {.grid = {4}, .block = {64}, .exec = &exec}, packed_view<const float, 1>("a", m.data(), {4096})),
            std::runtime_error);
        exec.ledger = &ledger;
        simt::launch(copy_add, {.grid = {4}, .block = {64}, .exec = &exec}, packed_view<const float, 1>("a", m.data(), {256}),
                     packed_view<float, 1>("b", n.data(), {256}), 256);
        expect_count(ledger.row("a").read, {1024, 32}, "a");
        expect_count(ledger.row("b").written, {1024, 32}, "b");
    }
}

}  // namespace
