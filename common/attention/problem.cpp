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
Strides packed_strides(Layout layout, long long heads, long long rows, long long dim) {
    if (layout == Layout::bhnd) return {heads * rows * dim, rows * dim, dim};
    return {rows * heads * dim, dim, heads * dim};
}

void check_cu_seqlens(const std::string& name, const std::vector<int>& list, const char* total_name, int total) {
    const auto fail = [&](std::size_t at, const std::string& accepted) {
        throw InvalidArgument(name + "[" + std::to_string(at) + "] = " + std::to_string(list[at]) + ": " + accepted);
    };
    if (list.front() != 0) fail(0, "accepted is 0, where the first sequence begins");
    for (std::size_t s = 1; s < list.size(); ++s)
        if (list[s] < list[s - 1])
            fail(s, "accepted is " + std::to_string(list[s - 1]) + ", where sequence " + std::to_string(s - 1) + " begins, or more");
    if (list.back() != total)
        fail(list.size() - 1, "accepted is " + std::string(total_name) + " = " + std::to_string(total) + ", where the last sequence ends");
}

void check_cu_seqlens(const Problem& p) {
    if (!p.packed()) return;
    const auto entries = [](const char* name, const std::vector<int>& list) {
        return std::string(name) + " has " + std::to_string(list.size()) + (list.size() == 1 ? " entry" : " entries");
    };
    if (p.cu_seqlens_q.size() != p.cu_seqlens_k.size() || p.cu_seqlens_q.size() < 2)
        throw InvalidArgument(entries("cu_seqlens_q", p.cu_seqlens_q) + " and " + entries("cu_seqlens_k", p.cu_seqlens_k) +
                              ": accepted is one more than there are sequences, 2 or more, in both");
    if (p.batch != 1)
        throw InvalidArgument("batch = " + std::to_string(p.batch) +
                              ": accepted is 1 with cu_seqlens, which hold the sequences of the batch");
    check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, "seq", p.seq);
    check_cu_seqlens("cu_seqlens_k", p.cu_seqlens_k, "kv_seq", p.kv_seq);
}

/// "cu_seqlens_q=0,5,5,17 cu_seqlens_k=0,3,9,12", or of many sequences their lengths: "812 sequences of 1 to 80 queries and keys".
std::string describe_sequences(const Problem& p) {
    constexpr std::size_t many = 8;
    const std::size_t count = p.cu_seqlens_q.size() - 1;
    const auto list = [](const std::vector<int>& numbers) {
        std::string text;
        for (const int n : numbers) text += (text.empty() ? "" : ",") + std::to_string(n);
        return text;
    };
    if (count <= many) return "cu_seqlens_q=" + list(p.cu_seqlens_q) + " cu_seqlens_k=" + list(p.cu_seqlens_k);
    const auto range = [&](int Problem::*length) {
        int low = p.seq, high = 0;
        for (const Problem& one : p.sequences()) {
            low = std::min(low, one.*length);
            high = std::max(high, one.*length);
        }
        return std::to_string(low) + " to " + std::to_string(high);
    };
    const std::string sequences = std::to_string(count) + " sequences of " + range(&Problem::seq) + " queries and ";
    return sequences + (p.cu_seqlens_q == p.cu_seqlens_k ? "keys" : range(&Problem::kv_seq) + " keys");
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

long long Problem::pairs() const {
    long long sum = 0;
    for (const Problem& one : sequences()) sum += one.rows() * one.kv_seq;
    return sum;
}

std::vector<Problem> Problem::sequences() const {
    if (!packed()) return {*this};
    Problem one = *this;
    one.cu_seqlens_q.clear();
    one.cu_seqlens_k.clear();
    std::vector<Problem> all(cu_seqlens_q.size() - 1, one);
    for (std::size_t s = 0; s < all.size(); ++s) {
        all[s].seq = cu_seqlens_q[s + 1] - cu_seqlens_q[s];
        all[s].kv_seq = cu_seqlens_k[s + 1] - cu_seqlens_k[s];
    }
    return all;
}

namespace {

/// The sequence of query x, or of key x, whose cu_seqlens are `of`.
Sequence sequence_of(const Problem& p, const std::vector<int>& of, int x) {
    if (!p.packed()) return {0, p.seq, 0, p.kv_seq};
    const auto s = std::upper_bound(of.begin(), of.end(), x) - of.begin() - 1;  // none of the empty ones
    const std::vector<int>&q = p.cu_seqlens_q, &k = p.cu_seqlens_k;
    return {q[s], q[s + 1] - q[s], k[s], k[s + 1] - k[s]};
}

}  // namespace

Sequence Problem::sequence_of_query(int i) const { return sequence_of(*this, cu_seqlens_q, i); }

Range Problem::keys_of(int i) const {
    const auto [first_query, queries, first_key, keys] = sequence_of_query(i);
    if (!causal) return {first_key, first_key + keys};
    const long long seen = std::clamp<long long>(static_cast<long long>(i) - first_query + 1 + keys - queries, 0, keys);
    return {first_key, first_key + static_cast<int>(seen)};
}

Range Problem::queries_of(int j) const {
    const auto [first_query, queries, first_key, keys] = sequence_of(*this, cu_seqlens_k, j);
    if (!causal) return {first_query, first_query + queries};
    const long long blind = std::clamp<long long>(static_cast<long long>(j) - first_key - keys + queries, 0, queries);
    return {first_query + static_cast<int>(blind), first_query + queries};
}

int Problem::visible_keys(int i) const {
    const Range keys = keys_of(i);
    return keys.end - keys.begin;
}

Strides Problem::q_strides() const { return packed_strides(layout, heads, seq, head_dim); }
Strides Problem::kv_strides() const { return packed_strides(layout, kv_heads, kv_seq, head_dim); }

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
    check_cu_seqlens(problem);
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
    if (problem.packed()) text << ' ' << describe_sequences(problem);
    return text.str();
}

}  // namespace workbook
