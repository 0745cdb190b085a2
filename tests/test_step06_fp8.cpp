// Variant 06d beyond what test_step06.cpp asks of all variants: its quantisation bit by bit, blocks of unlike sizes, numbers that are
// not finite.
#include "attention/fp8.hpp"
#include "simt/e4m3.hpp"

#include "06_hopper/stage.hpp"
#include "stage_suite.hpp"

#include <cstring>
#include <limits>

namespace {

using namespace workbook;

const Variant& fp8() { return step06::stage().variants.back(); }

bool can_run() { return Device::current().compute_capability / 10 == 9; }
#define SKIP_WITHOUT_HOPPER() \
    if (!can_run()) GTEST_SKIP() << Device::current().name << " is no Hopper GPU"

/// Calls f(b, h, i, offset in a tensor of these strides of element (b, h, i, 0)).
template <class F>
void for_rows(int batch, int heads, int rows, const Strides& strides, F&& f) {
    for (int b = 0; b < batch; ++b)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < rows; ++i) f(b, h, i, static_cast<std::size_t>(b * strides[0] + h * strides[1] + i * strides[2]));
}

/// The inputs after `change`, rounded to the problem's type, and their references.
template <class Change>
void change_inputs(TestCase& test, Change&& change) {
    change(test.setup.inputs);
    test.inputs_changed();
}

/// What a run leaves in its workspace.
class Quantised {
public:
    explicit Quantised(const Inputs& in) : in_(in), outputs_(in.problem) {
        Forward args = forward_args(in, outputs_, Device::current(), {}, workspace_);
        run_forward(fp8(), args);
        synchronize(nullptr);
    }

    /// Expects the bytes of K8 to be `want`, whose order is that of the problem's layout.
    void expect_rows(const std::vector<std::uint8_t>& want) {
        const Problem& p = in_.problem;
        const auto got = fetch<std::uint8_t>("K8", want.size());
        std::size_t at = 0;
        for_rows(p.batch, p.kv_heads, p.kv_seq, p.kv_strides(), [&](int b, int h, int i, std::size_t offset) {
            for (int c = 0; c < p.head_dim; ++c, ++at)
                ASSERT_EQ(canonical(got[at]), canonical(want[offset + static_cast<std::size_t>(c)]))
                    << "K(" << b << ", " << h << ", " << i << ", " << c << ")";
        });
    }

    /// Expects V8 to be `want` transposed, its keys permuted within each 16, and zeros after the last key.
    void expect_transposed(const std::vector<std::uint8_t>& want) {
        const Problem& p = in_.problem;
        const int padded = (p.kv_seq + 63) / 64 * 64, d = p.head_dim;
        const auto got = fetch<std::uint8_t>("V8", static_cast<std::size_t>(p.batch * p.kv_heads * d) * static_cast<std::size_t>(padded));
        constexpr int kKeyAt[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
        const Strides strides = p.kv_strides();
        std::size_t at = 0;
        for_rows(p.batch, p.kv_heads, d, {1, 1, 1}, [&](int b, int h, int c, std::size_t) {
            for (int place = 0; place < padded; ++place, ++at) {
                const int key = place / 16 * 16 + kKeyAt[place % 16];
                const std::uint8_t value =
                    key < p.kv_seq ? want[static_cast<std::size_t>(b * strides[0] + h * strides[1] + key * strides[2] + c)] : 0;
                ASSERT_EQ(canonical(got[at]), canonical(value)) << "V(" << b << ", " << h << ", " << key << ", " << c << ")";
            }
        });
    }

    void expect_scales(const std::vector<float>& k, const std::vector<float>& v) {
        const auto of_kv = fetch<float>("KV_scale", 4 * k.size());
        for (std::size_t n = 0; n < k.size(); ++n) {
            ASSERT_EQ(of_kv[4 * n], k[n]) << "K's scale of block " << n;
            ASSERT_EQ(of_kv[4 * n + 1], v[n]) << "V's scale of block " << n;
            ASSERT_NEAR(of_kv[4 * n + 2], std::log2(v[n]), 1e-5) << "log2 of V's scale of block " << n;
            ASSERT_FLOAT_EQ(of_kv[4 * n + 3], 1 / v[n]) << "the inverse of V's scale of block " << n;
        }
    }

private:
    /// -0 and 0 are one number, and so are all NaNs.
    static int canonical(std::uint8_t bits) { return (bits & 0x7f) == 0 || (bits & 0x7f) == 0x7f ? bits & 0x7f : bits; }

    template <class T>
    std::vector<T> fetch(const std::string& name, std::size_t count) {
        std::vector<T> values(count);
        const T* const data = workspace_.get<T>(name, count);  // what the run left: it asked for as much
#if SIMT_EMULATED
        std::memcpy(values.data(), data, count * sizeof(T));
#else
        EXPECT_EQ(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
#endif
        return values;
    }

    const Inputs& in_;
    ForwardOutputs outputs_;
    Workspace workspace_;
};

void expect_quantised(const Inputs& in) {
    SCOPED_TRACE(describe(in.problem));
    const Problem& p = in.problem;
    Quantised got(in);
    const auto of_keys = [&](const std::vector<float>& x) {
        return quantise_e4m3(x, p.batch, p.kv_heads, p.kv_seq, p.head_dim, p.kv_strides(), Shares::block);
    };
    const E4m3Tensor k = of_keys(in.k_host), v = of_keys(in.v_host);
    got.expect_rows(k.elements);
    got.expect_transposed(v.elements);
    got.expect_scales(k.scales, v.scales);
}

TEST(Step06Fp8, QuantisesBitByBit) {
    SKIP_WITHOUT_HOPPER();
    for (const DType dtype : {DType::f16, DType::bf16})
        for (const int d : {64, 128, 256})
            for (const auto& [seq, kv_seq] : {std::pair{1, 1}, {64, 128}, {130, 63}}) {
                Problem p{.batch = 2, .heads = 2, .kv_heads = 1, .seq = seq, .kv_seq = kv_seq, .head_dim = d, .dtype = dtype};
                expect_quantised(TestCase(p, 3, Distribution::outliers).setup.inputs);
                p.layout = Layout::bnhd;
                p.softmax_scale = -3.0f;
                expect_quantised(TestCase(p).setup.inputs);
            }
}

TEST(Step06Fp8, QuantisesZerosExtremesAndWhatIsNotFinite) {
    SKIP_WITHOUT_HOPPER();
    for (const DType dtype : {DType::f16, DType::bf16}) {
        TestCase test(
            {.batch = 1, .heads = 2, .kv_heads = 1, .seq = 200, .kv_seq = 330, .head_dim = 64, .dtype = dtype, .softmax_scale = 0.0f});
        change_inputs(test, [&](Inputs& in) {
            const auto block = [&](std::vector<float>& x, int n) {
                return std::span(x).subspan(static_cast<std::size_t>(n) * 64 * 64, 64 * 64);
            };
            for (std::vector<float>* x : {&in.k_host, &in.v_host}) {
                for (float& e : block(*x, 0)) e = 0.0f;
                for (float& e : block(*x, 1)) e *= dtype == DType::f16 ? 1e-6f : 1e-35f;  // below the smallest scale in bf16
                for (float& e : block(*x, 2)) e *= dtype == DType::f16 ? 1e4f : 1e36f;
                block(*x, 3)[5] = INFINITY, block(*x, 3)[77] = -INFINITY, block(*x, 3)[78] = NAN;
                for (float& e : block(*x, 4)) e = NAN;
            }
        });
        expect_quantised(test.setup.inputs);
    }
}

double number(std::uint8_t bits) {
    __nv_fp8_e4m3 x;
    x.__x = bits;
    return simt::to_float(x);
}

// Q8 is in registers only. With one key, which is 1 in one column and 0 in all others, LSE is the score: an element of Q8 times its scale.
TEST(Step06Fp8, QuantisesQueriesBitByBit) {
    SKIP_WITHOUT_HOPPER();
    constexpr double kLn2 = 0.6931471805599453;
    for (const DType dtype : {DType::f16, DType::bf16})
        for (const int d : {64, 128, 256}) {
            TestCase test({.batch = 1,
                           .heads = 2,
                           .kv_heads = 1,
                           .seq = 70,
                           .kv_seq = 1,
                           .head_dim = d,
                           .dtype = dtype,
                           .softmax_scale = dtype == DType::f16 ? 0.3f : -3.0f,
                           .layout = d == 64 ? Layout::bhnd : Layout::bnhd},
                          3, Distribution::outliers);
            for (const int column : {0, 3, 32, d - 14, d - 1, 13, 31}) {
                change_inputs(test, [&](Inputs& in) {
                    std::fill(in.k_host.begin(), in.k_host.end(), 0.0f);
                    in.k_host[static_cast<std::size_t>(column)] = 1.0f;
                    in.q_host[static_cast<std::size_t>(column)] = column == 13 ? INFINITY : column == 31 ? NAN : 7.0f;
                });
                const Inputs& in = test.setup.inputs;
                const Problem& p = in.problem;
                const E4m3Tensor q =
                    quantise_e4m3(in.q_host, 1, 2, p.seq, d, p.q_strides(), Shares::block, p.scale() * 1.4426950408889634f);
                const std::vector<float> lse = run_variant(step06::stage(), fp8(), test.setup).result.lse;
                for_rows(1, 2, p.seq, p.q_strides(), [&](int, int h, int i, std::size_t offset) {
                    const int blocks = (p.seq + 63) / 64;
                    const double scale_of_block = q.scales[static_cast<std::size_t>(h * blocks + i / 64)];
                    const double want = kLn2 * scale_of_block * number(q.elements[offset + static_cast<std::size_t>(column)]);
                    const double got = lse[static_cast<std::size_t>(h * p.seq + i)];
                    if (std::isnan(want))
                        ASSERT_TRUE(std::isnan(got)) << "Q(0, " << h << ", " << i << ", " << column << ")";
                    else
                        ASSERT_NEAR(got, want, 1e-5 * std::abs(want) + 1e-6) << "Q(0, " << h << ", " << i << ", " << column << ")";
                });
            }
        }
}

TEST(Step06Fp8, BlocksOfUnlikeSizes) {
    SKIP_WITHOUT_HOPPER();
    for (const DType dtype : {DType::f16, DType::bf16})
        for (const int d : {64, 128})
            for (const int bits : {3, 12}) {
                TestCase test({.batch = 1, .heads = 2, .kv_heads = 2, .seq = 140, .kv_seq = 300, .head_dim = d, .dtype = dtype});
                change_inputs(test, [&](Inputs& in) {
                    const auto size = [&](std::size_t e,
                                          int length) {  // of the 64 rows: 2^-bits to 1, a factor of 2^(bits / 2) from one to the next
                        const int row = static_cast<int>(e / static_cast<std::size_t>(d)) % length;
                        return std::exp2(-0.5f * static_cast<float>(bits * (row / 64 * 2 % 3)));
                    };
                    for (std::size_t e = 0; e < in.q_host.size(); ++e) in.q_host[e] *= size(e, 140);
                    for (std::size_t e = 0; e < in.k_host.size(); ++e) in.k_host[e] *= size(e, 300), in.v_host[e] *= size(e, 300);
                });
                expect_right(step06::stage(), fp8(), test);
            }
}

TEST(Step06Fp8, BlocksOfZeros) {
    SKIP_WITHOUT_HOPPER();
    for (const int zero : {0, 1, 2}) {  // Q, K, V: its first 64 rows, or all
        for (const bool all : {false, true}) {
            TestCase test({.batch = 1, .heads = 1, .kv_heads = 1, .seq = 100, .kv_seq = 200, .head_dim = 64, .dtype = DType::bf16});
            change_inputs(test, [&](Inputs& in) {
                std::vector<float>& x = zero == 0 ? in.q_host : zero == 1 ? in.k_host : in.v_host;
                std::fill_n(x.begin(), all ? x.size() : 64 * 64, 0.0f);
            });
            const auto run = expect_right(step06::stage(), fp8(), test);
            if (zero != 2 || !all) continue;
            for (const float x : run.result.o) ASSERT_EQ(x, 0.0f);
        }
    }
}

// A score that is 2^1000 times the largest before: neither 0 * infinity nor infinity - infinity comes of it.
TEST(Step06Fp8, MaximaThatJump) {
    SKIP_WITHOUT_HOPPER();
    for (const float jump : {1.0f, -1.0f}) {
        TestCase test({.batch = 1, .heads = 1, .kv_heads = 1, .seq = 70, .kv_seq = 200, .head_dim = 64, .dtype = DType::bf16});
        change_inputs(test, [&](Inputs& in) {
            for (float& x : in.q_host) x = 1.0f + 0.1f * x;
            for (std::size_t e = 0; e < in.k_host.size(); ++e)
                in.k_host[e] = 0.1f * in.k_host[e] + (e / 64 / 64 == 1 ? jump * 90.0f : 0.0f);
        });
        expect_right(step06::stage(), fp8(), test);
    }
}

// A thread block has several tiles one after the other, of several heads, some of which see nothing.
TEST(Step06Fp8, TilesOneAfterTheOther) {
    SKIP_WITHOUT_HOPPER();
    for (const int d : {64, 128, 256})
        for (const bool causal : {false, true})
            for (const int sms : {1, 3}) {
                Device device = Device::current();
                device.sms = sms;
                const TestCase test({.batch = 1,
                                     .heads = 9,
                                     .kv_heads = 3,
                                     .seq = 200,
                                     .kv_seq = 100,
                                     .head_dim = d,
                                     .dtype = DType::f16,
                                     .causal = causal},
                                    1, Distribution::normal, device);
                expect_right(step06::stage(), fp8(), test);
            }
}

// As with the other variants: NaN where the float64 reference has it, a number elsewhere. Infinity is NaN in e4m3.
TEST(Step06Fp8, WhatIsNotFinite) {
    SKIP_WITHOUT_HOPPER();
    const Problem p{.batch = 1, .heads = 1, .kv_heads = 1, .seq = 200, .kv_seq = 200, .head_dim = 64, .dtype = DType::bf16, .causal = true};
    const auto nan_at = [&](int which, float value, int row) {
        TestCase test(p);
        change_inputs(test, [&](Inputs& in) {
            (which == 0 ? in.q_host : which == 1 ? in.k_host : in.v_host)[static_cast<std::size_t>(row) * 64 + 7] = value;
        });
        return run_variant(step06::stage(), fp8(), test.setup).result;
    };
    for (const float value : {NAN, INFINITY}) {
        const Result q = nan_at(0, value, 70), k = nan_at(1, value, 70), v = nan_at(2, value, 70);
        for (int i = 0; i < p.seq; ++i) {
            EXPECT_EQ(std::isnan(q.lse[static_cast<std::size_t>(i)]), i == 70) << "row " << i;
            EXPECT_EQ(std::isnan(k.lse[static_cast<std::size_t>(i)]), i >= 70) << "row " << i;
            EXPECT_TRUE(std::isfinite(v.lse[static_cast<std::size_t>(i)])) << "row " << i;
            for (int c = 0; c < 64; ++c) {
                const auto e = static_cast<std::size_t>(i * 64 + c);
                EXPECT_EQ(std::isnan(q.o[e]), i == 70) << "row " << i;
                EXPECT_EQ(std::isnan(k.o[e]), i >= 70) << "row " << i;
                // Rows of the tile that do not see the key multiply it by zero, here as in the other variants.
                if (i >= 70 || c != 7) {
                    EXPECT_EQ(std::isnan(v.o[e]), c == 7) << "row " << i << ", column " << c;
                }
            }
        }
    }
}

}  // namespace
