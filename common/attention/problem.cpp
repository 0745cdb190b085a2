#include "attention/problem.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace workbook {
namespace {

// The traffic of any stage is below 128 bytes per (row, key, column), so up to this many of them all byte counts fit 63 bits.
constexpr long long max_products = 1ll << 56;

void check_positive(const char* parameter, int value) {
    if (value < 1) throw InvalidArgument(std::string(parameter) + " = " + std::to_string(value) + ": accepted is 1 or more");
}

// "1, 2, 3 or 6"
std::string divisors(int n) {
    std::string list = "1";
    for (int d = 2; d < n; ++d)
        if (n % d == 0) list += ", " + std::to_string(d);
    return n == 1 ? list : list + " or " + std::to_string(n);
}

// Strides of a packed (B, H, N, d) tensor.
Strides packed(Layout layout, long long heads, long long rows, long long dim) {
    if (layout == Layout::bhnd) return {heads * rows * dim, rows * dim, dim};
    return {rows * heads * dim, dim, heads * dim};
}

}  // namespace

const char* name(DType type) {
    switch (type) {
        case DType::f16: return "f16";
        case DType::bf16: return "bf16";
        case DType::f32: break;
    }
    return "f32";
}

DType parse_dtype(std::string_view word) {
    for (DType type : {DType::f32, DType::f16, DType::bf16})
        if (word == name(type)) return type;
    throw InvalidArgument("dtype = \"" + std::string(word) + "\": accepted are f32, f16 and bf16");
}

std::size_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

const char* name(Layout layout) { return layout == Layout::bhnd ? "bhnd" : "bnhd"; }

Layout parse_layout(std::string_view word) {
    for (Layout layout : {Layout::bhnd, Layout::bnhd})
        if (word == name(layout)) return layout;
    throw InvalidArgument("layout = \"" + std::string(word) + "\": accepted are bhnd, memory order (B, H, N, d), and bnhd, (B, N, H, d)");
}

float Problem::scale() const { return softmax_scale ? *softmax_scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim))); }

long long Problem::q_elements() const { return rows() * head_dim; }
long long Problem::kv_elements() const { return static_cast<long long>(batch) * kv_heads * kv_seq * head_dim; }
long long Problem::rows() const { return static_cast<long long>(batch) * heads * seq; }

int Problem::visible_keys(int i) const {
    if (!causal) return kv_seq;
    return static_cast<int>(std::clamp<long long>(static_cast<long long>(i) + 1 + kv_seq - seq, 0, kv_seq));
}

Strides Problem::q_strides() const { return packed(layout, heads, seq, head_dim); }
Strides Problem::kv_strides() const { return packed(layout, kv_heads, kv_seq, head_dim); }

void check(const Problem& problem) {
    check_positive("batch", problem.batch);
    check_positive("heads", problem.heads);
    check_positive("kv_heads", problem.kv_heads);
    check_positive("seq", problem.seq);
    check_positive("kv_seq", problem.kv_seq);
    if (problem.head_dim < 1 || problem.head_dim > 256)
        throw InvalidArgument("head_dim = " + std::to_string(problem.head_dim) + ": accepted are 1 to 256");
    if (problem.heads % problem.kv_heads != 0)
        throw InvalidArgument("heads = " + std::to_string(problem.heads) + " is not a multiple of kv_heads = " +
                              std::to_string(problem.kv_heads) + ": each key/value head serves heads / kv_heads query heads (" +
                              divisors(problem.heads) + (problem.heads == 1 ? " is" : " are") + " accepted for kv_heads)");
    if (!std::isfinite(problem.scale())) {
        std::ostringstream message;
        message << "scale = " << problem.scale() << ": accepted is any finite number";
        throw InvalidArgument(message.str());
    }
    if (problem.page_size < 16 || problem.page_size > 256 || (problem.page_size & (problem.page_size - 1)) != 0)
        throw InvalidArgument("page_size = " + std::to_string(problem.page_size) + ": accepted are 16, 32, 64, 128 and 256");
    long long products = 1;
    for (long long factor : {problem.batch, problem.heads, problem.seq, problem.kv_seq, problem.head_dim}) {
        if (products > max_products / factor) {
            std::ostringstream message;
            message << "batch * heads * seq * kv_seq * head_dim = " << problem.batch << " * " << problem.heads << " * " << problem.seq
                    << " * " << problem.kv_seq << " * " << problem.head_dim << ": accepted is a product of at most 2^56";
            throw InvalidArgument(message.str());
        }
        products *= factor;
    }
}

std::string describe(const Problem& problem) {
    std::ostringstream text;
    text << "B=" << problem.batch << " Hq=" << problem.heads << " Hkv=" << problem.kv_heads << " Nq=" << problem.seq
         << " Nkv=" << problem.kv_seq << " d=" << problem.head_dim << ' ' << name(problem.dtype);
    if (problem.causal) text << " causal";
    if (problem.softmax_scale) text << " scale=" << *problem.softmax_scale;
    if (problem.layout != Layout::bhnd) text << ' ' << name(problem.layout);
    if (problem.page_size != Problem{}.page_size) text << " page_size=" << problem.page_size;
    return text.str();
}

}  // namespace workbook
