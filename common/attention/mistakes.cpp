#include "attention/mistakes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <set>

namespace workbook {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
using Parameters = std::vector<Parameter>;

Parameters once(const Problem&) { return {{}}; }
Parameters when_causal(const Problem& p) { return p.causal ? Parameters{{}} : Parameters{}; }

// ---- softmax ---------------------------------------------------------------------------------------------------------------

// Weights exp(s - m) / l of the keys first to last - 1, and 0 of the others.
Statistics softmax(std::span<double> s, int first, int last) {
    double m = -infinity, l = 0;
    for (int j = first; j < last; ++j) m = std::max(m, s[j]);
    for (int j = 0; j < static_cast<int>(s.size()); ++j) l += s[j] = j >= first && j < last ? std::exp(s[j] - m) : 0.0;
    if (l != 0)
        for (int j = first; j < last; ++j) s[j] /= l;
    return {m, l};
}

int visible(const Tensors& t, RowPlace at) { return t.problem.visible_keys(at.i); }

Statistics right(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) {
    const Range keys = t.problem.keys_of(at.i);
    return softmax(s, keys.begin, keys.end);
}

// Tiles of `a` keys; b = 1 when they are visited from the last to the first.
Parameters streams(const Problem& p) {
    Parameters list;
    if (p.kv_seq > 1) list.push_back({1, 0, 0, "key by key"});
    for (int width : kTileSizes) {
        if (width >= p.kv_seq) break;
        list.push_back({width, 0, 0, "in tiles of " + std::to_string(width) + " keys"});
        list.push_back({width, 1, 0, "in tiles of " + std::to_string(width) + " keys from the last to the first"});
    }
    return list;
}

// Without those whose first tile alone is all but the rest: that is "last-keys-ignored".
Parameters streams_of_many_tiles(const Problem& p) {
    Parameters list = streams(p);
    std::erase_if(list, [&](const Parameter& q) { return q.b == 1 && 2 * q.a >= p.kv_seq; });
    return list;
}

// The weights of a row that streams over tiles and forgets to rescale l, o or both when the maximum grows: what was added
// under an old maximum keeps it.
template <bool l_rescaled, bool o_rescaled>
Statistics stream(const Tensors& t, RowPlace at, const Parameter& tiles, std::span<double> s) {
    const int n = visible(t, at), width = static_cast<int>(tiles.a), count = (n + width - 1) / width;
    std::fill(s.begin() + n, s.end(), 0.0);
    double final_m = -infinity;
    for (int j = 0; j < n; ++j) final_m = std::max(final_m, s[j]);
    double m = -infinity, l = 0;
    for (int step = 0; step < count; ++step) {
        const int tile = tiles.b ? count - 1 - step : step;
        const int begin = tile * width, end = std::min(n, begin + width);
        for (int j = begin; j < end; ++j) m = std::max(m, s[j]);
        for (int j = begin; j < end; ++j) {
            const double stale = std::exp(s[j] - m), scaled = std::exp(s[j] - final_m);
            l += l_rescaled ? scaled : stale;
            s[j] = o_rescaled ? scaled : stale;
        }
    }
    for (int j = 0; j < n; ++j) s[j] /= l;
    return {final_m, l};
}

// Only the last tile of the row is left in o, or in l, because it is assigned and not added to.
template <bool o_lost, bool l_lost>
Statistics only_last_tile(const Tensors& t, RowPlace at, const Parameter& tiles, std::span<double> s) {
    const int n = visible(t, at), width = static_cast<int>(tiles.a);
    const Statistics all = softmax(s, 0, n);
    if (n == 0) return all;
    const int begin = tiles.b ? 0 : (n - 1) / width * width, end = tiles.b ? std::min(n, width) : n;
    const double last = std::accumulate(s.begin() + begin, s.begin() + end, 0.0);
    for (int j = 0; j < n; ++j) {
        if (o_lost && (j < begin || j >= end)) s[j] = 0;
        if (l_lost) s[j] /= last;
    }
    return {all.m, l_lost ? all.l * last : all.l};
}

template <int divisions>
Statistics divided(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) {
    const Statistics stat = softmax(s, 0, visible(t, at));
    if (stat.l > 0)
        for (double& p : s) p *= std::pow(stat.l, 1 - divisions);
    return stat;
}

// Lane j % a has key j. Where lanes do not combine what each of them has, every key is weighed by its lane's own sum, or against its
// lane's own maximum; LSE is that of lane 0.
Parameters lanes(const Problem& p) {
    Parameters list;
    for (int count : {32, 16})
        if (p.kv_seq > 1) list.push_back({count, 0, 0, std::to_string(count)});
    return list;
}
Statistics sum_of_a_lane(const Tensors& t, RowPlace at, const Parameter& lanes, std::span<double> s) {
    const int n = visible(t, at), count = static_cast<int>(lanes.a);
    const Statistics all = softmax(s, 0, n);
    std::vector<double> l(count, 0.0);
    for (int j = 0; j < n; ++j) l[j % count] += s[j];
    for (int j = 0; j < n; ++j) s[j] /= l[j % count];
    return {all.m, all.l * l[0]};
}
Statistics maximum_of_a_lane(const Tensors& t, RowPlace at, const Parameter& lanes, std::span<double> s) {
    const int n = visible(t, at), count = static_cast<int>(lanes.a);
    std::vector<double> m(count, -infinity);
    for (int j = 0; j < n; ++j) m[j % count] = std::max(m[j % count], s[j]);
    double l = 0;
    for (int j = 0; j < static_cast<int>(s.size()); ++j) l += s[j] = j < n ? std::exp(s[j] - m[j % count]) : 0.0;
    if (l != 0)
        for (double& p : s) p /= l;
    return {m[0], l};
}

Statistics bare_exponentials(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) {
    const Statistics stat = softmax(s, 0, visible(t, at));
    for (double& p : s) p *= stat.l > 0 ? stat.l * std::exp(stat.m) : 1;
    return stat;
}

Statistics no_softmax(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) {
    const std::vector<double> scores(s.begin(), s.end());
    const int n = visible(t, at);
    const Statistics stat = softmax(s, 0, n);
    std::copy_n(scores.begin(), n, s.begin());
    return stat;
}

// ---- mask ------------------------------------------------------------------------------------------------------------------

Parameters masks_not_asked(const Problem& p) {
    return p.causal ? Parameters{} : Parameters{{0, 0, 0, "bottom right"}, {1, 0, 0, "top left"}};
}
int diagonal(const Tensors& t, RowPlace at, bool top_left) {  // keys up to and with the diagonal, unclamped
    return at.i + 1 + (top_left ? 0 : t.problem.kv_seq - t.problem.seq);
}
Statistics first_keys(std::span<double> s, int count) { return softmax(s, 0, std::clamp(count, 0, static_cast<int>(s.size()))); }

Statistics not_masked(const Tensors&, RowPlace, const Parameter&, std::span<double> s) { return first_keys(s, s.size()); }
Statistics masked(const Tensors& t, RowPlace at, const Parameter& corner, std::span<double> s) {
    return first_keys(s, diagonal(t, at, corner.a));
}
Statistics top_left(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) { return first_keys(s, diagonal(t, at, true)); }
Statistics without_diagonal(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) {
    return first_keys(s, diagonal(t, at, false) - 1);
}
Statistics beyond_diagonal(const Tensors& t, RowPlace at, const Parameter&, std::span<double> s) {
    return first_keys(s, diagonal(t, at, false) + 1);
}
Statistics inverted(const Tensors& t, RowPlace at, const Parameter& diagonal_too, std::span<double> s) {
    const int n = static_cast<int>(s.size());
    return softmax(s, std::clamp(diagonal(t, at, false) - static_cast<int>(diagonal_too.a), 0, n), n);
}
Parameters inversions(const Problem& p) {
    return p.causal ? Parameters{{0, 0, 0, "the diagonal and what is before it"}, {1, 0, 0, "what is before the diagonal"}} : Parameters{};
}

// A causal loop over tiles of b keys that stops too early for query tiles of a rows: at the last whole tile, or, when x is 1, at
// the tile that holds the diagonal of the tile's first row.
Parameters causal_loops(const Problem& p) {
    Parameters list;
    if (!p.causal) return list;
    for (int rows : {1, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256}) {
        for (int keys : kTileSizes) {
            const std::string tiles =
                "tiles of " + std::to_string(rows) + (rows == 1 ? " row and " : " rows and ") + std::to_string(keys) + " keys";
            list.push_back({rows, keys, 0, tiles + ": the number of key tiles is rounded down"});
            if (rows > 1)
                list.push_back({rows, keys, 1, tiles + ": the loop ends at the diagonal of the tile's first row, not of its last"});
        }
    }
    return list;
}
// The mask of tiles of a rows and b keys, applied to the places in the tile.
Parameters tiles_of_a_mask(const Problem& p) {
    Parameters list;
    if (!p.causal) return list;
    const int offset = p.kv_seq - p.seq;
    for (int rows : {16, 32, 64, 128})
        for (int keys : {16, 32, 64, 96, 128}) {
            if (rows >= p.seq && keys >= p.kv_seq) continue;            // the right mask
            if (keys - 1 <= offset || rows - 1 + offset < 0) continue;  // hides nothing, or all
            list.push_back({rows, keys, 0, "tiles of " + std::to_string(rows) + " rows and " + std::to_string(keys) + " keys"});
        }
    return list;
}
Statistics masked_within_tiles(const Tensors& t, RowPlace at, const Parameter& p, std::span<double> s) {
    const int rows = static_cast<int>(p.a), keys = static_cast<int>(p.b), offset = t.problem.kv_seq - t.problem.seq;
    for (int j = 0; j < static_cast<int>(s.size()); ++j)
        if (j % keys > at.i % rows + offset) s[j] = -infinity;
    const bool sees = std::any_of(s.begin(), s.end(), [](double x) { return x > -infinity; });
    return softmax(s, 0, sees ? static_cast<int>(s.size()) : 0);
}

// The same loop, rounded up as it should be, where the problem is not causal.
Parameters causal_loops_not_asked(const Problem& p) {
    Parameters list;
    if (p.causal) return list;
    for (int rows : {16, 32, 64, 128})
        for (int keys : {16, 32, 64, 96, 128})
            if (rows < p.seq && keys < p.kv_seq)
                list.push_back({rows, keys, 0, "tiles of " + std::to_string(rows) + " rows and " + std::to_string(keys) + " keys"});
    return list;
}
Statistics causal_loop(const Tensors& t, RowPlace at, const Parameter& p, std::span<double> s) {
    const int rows = static_cast<int>(p.a), keys = static_cast<int>(p.b), first_row = at.i / rows * rows;
    const int seen = std::max(0, std::min(first_row + rows, t.problem.seq) + t.problem.kv_seq - t.problem.seq);
    return first_keys(s, (seen + keys - 1) / keys * keys);
}
Statistics causal_loop_ends_early(const Tensors& t, RowPlace at, const Parameter& p, std::span<double> s) {
    const int rows = static_cast<int>(p.a), keys = static_cast<int>(p.b), first_row = at.i / rows * rows;
    const int last_row = std::min(first_row + rows, t.problem.seq) - 1, offset = t.problem.kv_seq - t.problem.seq;
    const int end =
        p.x != 0 ? (std::max(0, first_row + 1 + offset) + keys - 1) / keys * keys : std::max(0, last_row + 1 + offset) / keys * keys;
    return first_keys(s, std::min(visible(t, at), end));
}

// ---- packed batches --------------------------------------------------------------------------------------------------------

Statistics all_sequences(const Tensors&, RowPlace, const Parameter&, std::span<double> s) { return first_keys(s, s.size()); }

Parameters whole_tiles_of_keys(const Problem& p) {
    Parameters list;
    if (p.causal) return list;  // the mask hides them
    for (const int width : kTileSizes) list.push_back({width, 0, 0, std::to_string(width)});
    return list;
}
Statistics whole_tiles(const Tensors& t, RowPlace at, const Parameter& width, std::span<double> s) {
    const Sequence own = t.problem.sequence_of_query(at.i);
    const int tile = static_cast<int>(width.a), end = own.first_key + (own.keys + tile - 1) / tile * tile;
    return softmax(s, own.first_key, std::min(end, static_cast<int>(s.size())));
}

// The diagonal of the batch (a = 1), of rows and keys counted from the batch's first (b = 1) or the sequence's; or the top left corner's.
Parameters other_diagonals(const Problem& p) {
    if (!p.causal) return {};
    return {{1, 1, 0, "Nkv - Nq of the whole batch, and rows and keys counted from the batch's first"},
            {1, 0, 0, "Nkv - Nq of the whole batch"},
            {0, 0, 0, "0, the top left corner,"}};
}
Statistics other_diagonal(const Tensors& t, RowPlace at, const Parameter& p, std::span<double> s) {
    const Sequence own = t.problem.sequence_of_query(at.i);
    const int offset = p.a ? t.problem.kv_seq - t.problem.seq : 0;
    const int end = at.i + 1 + offset + (p.b ? 0 : own.first_key - own.first_query);
    return softmax(s, own.first_key, std::clamp(end, own.first_key, own.first_key + own.keys));
}

// ---- ends of the keys ------------------------------------------------------------------------------------------------------

// "16 or 32", the tile sizes for which f(size) has one value, beside that value.
template <class F>
Parameters by_tile(const Problem& p, F f) {
    Parameters list;
    for (int width : kTileSizes) {
        const long long value = f(width);
        if (value <= 0 || value == p.kv_seq) continue;
        const auto same = std::find_if(list.begin(), list.end(), [&](const Parameter& q) { return q.a == value; });
        const std::string text = std::to_string(width);
        if (same == list.end())
            list.push_back({value, 0, 0, text});
        else
            same->text += ", " + text;
    }
    return list;
}
Parameters tails(const Problem& p) {
    if (p.causal) return {};  // the causal mask hides them
    Parameters list = by_tile(p, [&](int width) { return (p.kv_seq + width - 1) / width * width - p.kv_seq; });
    for (Parameter& q : list) q.text = std::to_string(q.a) + " keys past the end (key tiles of " + q.text + ")";
    return list;
}
Parameters whole_tiles(const Problem& p) {
    Parameters list = by_tile(p, [&](int width) { return p.kv_seq / width * width; });
    for (Parameter& q : list) q.text = "the last " + std::to_string(p.kv_seq - q.a) + " keys (key tiles of " + q.text + ")";
    for (int n : {1, 2}) {
        const bool known = std::any_of(list.begin(), list.end(), [&](const Parameter& q) { return q.a == p.kv_seq - n; });
        if (!known && p.kv_seq > n) list.push_back({p.kv_seq - n, 0, 0, n == 1 ? "the last key" : "the last 2 keys"});
    }
    return list;
}
Parameters first_tiles(const Problem& p) {
    Parameters list;
    if (p.kv_seq > 1) list.push_back({1, 0, 0, "the first key"});
    for (int width : kTileSizes)
        if (width < p.kv_seq) list.push_back({width, 0, 0, "the first " + std::to_string(width) + " keys"});
    return list;
}
Statistics more_keys(std::span<double> s, double count, double score, int value) {  // value: the key whose v they have; -1: zeros
    double m = score, l = 0;
    for (double x : s) m = std::max(m, x);
    for (double& x : s) l += x = std::exp(x - m);
    const double extra = count * std::exp(score - m);
    l += extra;
    if (value >= 0) s[value] += extra;
    for (double& x : s) x /= l;
    return {m, l};
}
Statistics zero_keys(const Tensors&, RowPlace, const Parameter& tail, std::span<double> s) { return more_keys(s, tail.a, 0, -1); }
Statistics last_key_again(const Tensors&, RowPlace, const Parameter& tail, std::span<double> s) {
    return more_keys(s, tail.a, s.back(), static_cast<int>(s.size()) - 1);
}
Statistics keys_up_to(const Tensors& t, RowPlace at, const Parameter& count, std::span<double> s) {
    return first_keys(s, std::min<int>(visible(t, at), count.a));
}
Statistics keys_from(const Tensors& t, RowPlace at, const Parameter& count, std::span<double> s) {
    const int n = visible(t, at);
    return softmax(s, std::min<int>(n, count.a), n);
}

// ---- what is read ----------------------------------------------------------------------------------------------------------

enum Struck { both = 0, k_only = 1, v_only = 2 };
const Parameters struck{{both, 0, 0, "K and V"}, {k_only, 0, 0, "K alone"}, {v_only, 0, 0, "V alone"}};
Parameters when_grouped(const Problem& p) { return p.kv_heads > 1 ? struck : Parameters{}; }
Parameters when_query_heads_share(const Problem& p) { return p.kv_heads > 1 && p.kv_heads < p.heads ? struck : Parameters{}; }
Parameters when_batched(const Problem& p) { return p.batch > 1 ? struck : Parameters{}; }

void from_kv_head(const Tensors& t, RowPlace at, const Parameter& p, Row& row, int kv_head) {
    const Strides s = t.problem.kv_strides();
    if (p.a != v_only) row.k = t.k + at.b * s[0] + kv_head * s[1];
    if (p.a != k_only) row.v = t.v + at.b * s[0] + kv_head * s[1];
}
void head_modulo(const Tensors& t, RowPlace at, const Parameter& p, Row& row) { from_kv_head(t, at, p, row, at.h % t.problem.kv_heads); }
void head_zero(const Tensors& t, RowPlace at, const Parameter& p, Row& row) { from_kv_head(t, at, p, row, 0); }
void head_clamped(const Tensors& t, RowPlace at, const Parameter& p, Row& row) {
    from_kv_head(t, at, p, row, std::min(at.h, t.problem.kv_heads - 1));
}
void batch_zero(const Tensors& t, RowPlace at, const Parameter& p, Row& row) {
    at.b = 0;
    from_kv_head(t, at, p, row, at.h / (t.problem.heads / t.problem.kv_heads));
}

void k_and_v_swapped(const Tensors&, RowPlace, const Parameter&, Row& row) { std::swap(row.k, row.v); }
void k_for_v(const Tensors&, RowPlace, const Parameter&, Row& row) { row.v = row.k; }
void v_for_k(const Tensors&, RowPlace, const Parameter&, Row& row) { row.k = row.v; }

// The other layout, where it differs.
Problem other_layout(Problem p) {
    p.layout = p.layout == Layout::bhnd ? Layout::bnhd : Layout::bhnd;
    return p;
}
Parameters if_layouts_differ(const Problem& p, bool of_q) {
    const int heads = of_q ? p.heads : std::max(p.heads, p.kv_heads), rows = of_q ? p.seq : std::max(p.seq, p.kv_seq);
    const std::string mine = p.layout == Layout::bhnd ? "(B, H, N, d)" : "(B, N, H, d)";
    const std::string other = p.layout == Layout::bhnd ? "(B, N, H, d)" : "(B, H, N, d)";
    return heads > 1 && rows > 1 ? Parameters{{0, 0, 0, other + ", but the problem's order is " + mine}} : Parameters{};
}
Parameters if_o_layouts_differ(const Problem& p) { return if_layouts_differ(p, true); }
Parameters if_any_layouts_differ(const Problem& p) { return if_layouts_differ(p, false); }
void all_in_other_layout(const Tensors& t, RowPlace at, const Parameter&, Row& row) {
    const int all = row.visible;
    row = row_at(other_layout(t.problem), t.q, t.k, t.v, at);
    row.visible = all;
}
void kv_in_other_layout(const Tensors& t, RowPlace at, const Parameter& p, Row& row) {
    const float* q = row.q;
    all_in_other_layout(t, at, p, row);
    row.q = q;
}

// ---- scale -----------------------------------------------------------------------------------------------------------------

// One wrong scale, where it is not the right one.
Parameters scale_of(const Problem& p, double scale) {
    const double right = p.scale();
    return std::isfinite(scale) && std::abs(scale - right) > 1e-6 * std::abs(right) ? Parameters{{0, 0, scale, ""}} : Parameters{};
}
Parameters scale_one(const Problem& p) { return scale_of(p, 1); }
Parameters scale_squared(const Problem& p) { return scale_of(p, static_cast<double>(p.scale()) * p.scale()); }
Parameters scale_one_over_d(const Problem& p) { return scale_of(p, 1.0 / p.head_dim); }
Parameters scale_root_d(const Problem& p) { return scale_of(p, std::sqrt(static_cast<double>(p.head_dim))); }
Parameters scale_root_nkv(const Problem& p) { return scale_of(p, 1 / std::sqrt(static_cast<double>(p.kv_seq))); }
Parameters scale_default(const Problem& p) { return scale_of(p, 1 / std::sqrt(static_cast<double>(p.head_dim))); }
Parameters scale_zero(const Problem& p) { return scale_of(p, 0); }
Parameters scale_ln2(const Problem& p) { return scale_of(p, p.scale() * std::numbers::ln2); }
Parameters scale_log2e(const Problem& p) { return scale_of(p, p.scale() * std::numbers::log2e); }
Parameters scale_negative(const Problem& p) { return scale_of(p, -static_cast<double>(p.scale())); }
void scaled(const Tensors&, RowPlace, const Parameter& p, Row& row) { row.scale = p.x; }

Parameters columns_kept(const Problem& p) {
    std::set<int> kept;
    for (int step : {8, 16, 32, 64, 128}) {
        kept.insert(p.head_dim / step * step);  // a tail of columns that is left out
        kept.insert(p.head_dim - step);         // the last step of a loop
        kept.insert(step);                      // its first step alone
    }
    kept.insert(p.head_dim / 2);
    kept.insert(p.head_dim - 1);
    Parameters list;
    for (int n : kept)
        if (n > 0 && n < p.head_dim) list.push_back({n, 0, 0, std::to_string(n)});
    return list;
}
void fewer_columns(const Tensors&, RowPlace, const Parameter& p, Row& row) { row.depth = static_cast<int>(p.a); }

const Mistake table[] = {
    {"", "", once, nullptr, right, false},

    {"nothing-rescaled",
     "O is what an attention gives that goes through the keys {} and does not rescale the past when the running maximum grows: "
     "multiply both o and l by exp(m_old - m_new).",
     streams, nullptr, stream<false, false>, false},
    {"o-not-rescaled",
     "O is what an attention gives that goes through the keys {} and rescales l but not o when the running maximum grows: multiply "
     "o too by exp(m_old - m_new).",
     streams, nullptr, stream<true, false>, false},
    {"l-not-rescaled",
     "O is what an attention gives that goes through the keys {} and rescales o but not l when the running maximum grows: multiply "
     "l too by exp(m_old - m_new).",
     streams, nullptr, stream<false, true>, false},
    {"o-overwritten",
     "O holds only what the last of the tiles added ({}): add P V of each tile to o instead of assigning it, and clear o "
     "only once, before the loop.",
     streams_of_many_tiles, nullptr, only_last_tile<true, false>, false},
    {"l-overwritten", "O is divided by the sum of the last tile alone ({}): add the sum of each tile to l instead of assigning it.",
     streams_of_many_tiles, nullptr, only_last_tile<false, true>, false},
    {"o-and-l-overwritten",
     "O is the attention to the last of the tiles alone ({}): add to o and l on each tile instead of assigning, and clear "
     "them only once, before the loop.",
     streams_of_many_tiles, nullptr, only_last_tile<true, true>, false},
    {"sum-of-a-lane",
     "Each key is divided by the sum over the keys of its own lane, where {} lanes share a row: add up l over the lanes before it is used.",
     lanes, nullptr, sum_of_a_lane, false},
    {"maximum-of-a-lane",
     "Each key is compared with the maximum over the keys of its own lane, where {} lanes share a row: take the maximum over the lanes "
     "before it is subtracted.",
     lanes, nullptr, maximum_of_a_lane, false},
    {"not-divided", "O is l times what it should be: divide each row by its sum l at the end.", once, nullptr, divided<0>, false},
    {"divided-twice", "O is what it should be divided by l once more: divide each row by its sum l only once.", once, nullptr, divided<2>,
     false},
    {"bare-exponentials",
     "O is sum_j exp(s_j) v_j: neither is the row's maximum subtracted nor the row divided by its sum. O = sum_j exp(s_j - m) v_j / l.",
     once, nullptr, bare_exponentials, false},
    {"no-softmax", "O is S V: the softmax between the two products is missing.", once, nullptr, no_softmax, false},

    {"causal-ignored", "O is what an attention without the causal mask gives: hide key j from query i when j > i + Nkv - Nq.", when_causal,
     nullptr, not_masked, false},
    {"causal-not-asked", "O is what a causal attention gives, aligned to the {}, and the problem is not causal: mask only when it is.",
     masks_not_asked, nullptr, masked, false},
    {"causal-top-left",
     "The causal mask is aligned to the top left (j <= i): align it to the bottom right, j <= i + Nkv - Nq, so that the last query sees "
     "all keys.",
     when_causal, nullptr, top_left, false},
    {"sequences-together",
     "O is what an attention gives in which each query sees the keys of all sequences of the packed batch: a query sees those from "
     "cu_seqlens_k[s] to cu_seqlens_k[s + 1] - 1, s being its own sequence.",
     once, nullptr, all_sequences, false, true},
    {"next-sequence-seen",
     "Keys past the end of a sequence are attended to, up to the end of its last tile ({} keys a tile): in a packed batch they are the "
     "next sequence's. Mask the keys from cu_seqlens_k[s + 1] on.",
     whole_tiles_of_keys, nullptr, whole_tiles, false, true},
    {"causal-of-the-batch",
     "The causal mask is aligned with the offset {}: align it to the bottom right of each sequence, with its own lengths and its own first "
     "query and key.",
     other_diagonals, nullptr, other_diagonal, false, true},
    {"causal-diagonal-hidden",
     "The causal mask hides the diagonal too (it keeps j < i + Nkv - Nq): a query sees its own key, j <= i + Nkv - Nq.", when_causal,
     nullptr, without_diagonal, false},
    {"causal-one-too-many", "The causal mask lets one key too many through (it keeps j <= i + 1 + Nkv - Nq): keep j <= i + Nkv - Nq.",
     when_causal, nullptr, beyond_diagonal, false},
    {"causal-inverted", "The causal mask is the wrong way round, it hides {}: hide key j from query i when j > i + Nkv - Nq.", inversions,
     nullptr, inverted, false},
    {"causal-tile-indices",
     "The causal mask compares places within the tile ({}): compare i = i0 + row and j = j0 + column of the whole sequence.",
     tiles_of_a_mask, nullptr, masked_within_tiles, false},
    {"causal-loop-short",
     "The loop over key tiles ends before the diagonal ({}): it must reach the tile that holds the last key which the last row of the "
     "query tile sees, ceil((last row + 1 + Nkv - Nq) / Bc) tiles.",
     causal_loops, nullptr, causal_loop_ends_early, false},
    {"causal-loop-not-asked",
     "The loop over key tiles ends behind the diagonal ({}), and the problem is not causal: let it end there only when it is.",
     causal_loops_not_asked, nullptr, causal_loop, false},

    {"tail-not-masked",
     "O is what an attention gives that counts {} with score 0 and value 0: set s to -infinity where j >= Nkv, before the maximum "
     "and the sum are taken.",
     tails, nullptr, zero_keys, false},
    {"last-key-repeated",
     "O is what an attention gives that reads the last key again for {}: clamping the address is right, counting it is not. Set s to "
     "-infinity where j >= Nkv.",
     tails, nullptr, last_key_again, false},
    {"last-keys-ignored", "O is what an attention gives that leaves out {}: the number of key tiles is ceil(Nkv / Bc), rounded up.",
     whole_tiles, nullptr, keys_up_to, false},
    {"first-keys-ignored", "O is what an attention gives that leaves out {}: the loop over the keys must begin at 0.", first_tiles, nullptr,
     keys_from, false},

    {"kv-head-modulo",
     "For {}, query head h reads key/value head h % Hkv: it is h / (Hq / Hkv), so that neighbouring query heads share one.",
     when_query_heads_share, head_modulo, right, false},
    {"kv-head-zero", "For {}, every query head reads key/value head 0: query head h reads head h / (Hq / Hkv).", when_grouped, head_zero,
     right, false},
    {"kv-head-not-divided", "For {}, query head h reads key/value head h (the last where there is none): it is h / (Hq / Hkv).",
     when_query_heads_share, head_clamped, right, false},
    {"kv-batch-zero", "For {}, every batch reads batch 0: add b times the batch stride to the address.", when_batched, batch_zero, right,
     false},

    {"scale-missing", "The scores are not scaled: S = scale * Q K^T with scale = 1/sqrt(d) unless the problem gives another.", scale_one,
     scaled, right, false},
    {"scale-twice", "The scores are scaled twice: multiply q k by scale once (or Q once when it is loaded, and not again).", scale_squared,
     scaled, right, false},
    {"scale-one-over-d", "The scores are scaled by 1/d: the default scale is 1/sqrt(d).", scale_one_over_d, scaled, right, false},
    {"scale-times-sqrt-d", "The scores are multiplied by sqrt(d): the default scale is 1/sqrt(d).", scale_root_d, scaled, right, false},
    {"scale-sqrt-nkv", "The scores are scaled by 1/sqrt(Nkv): the default scale is 1/sqrt(d), d being the length of a row of Q and K.",
     scale_root_nkv, scaled, right, false},
    {"scale-given-ignored", "The scores are scaled by 1/sqrt(d), but the problem gives a scale of its own: use the one that is passed.",
     scale_default, scaled, right, false},
    {"scale-sign", "The scores have the wrong sign: S = scale * Q K^T.", scale_negative, scaled, right, false},
    {"scores-lost",
     "All keys that a query sees weigh the same, as if all its scores were equal: O is the mean of V. Q K^T does not reach the softmax.",
     scale_zero, scaled, right, false},
    {"log2e-missing",
     "The exponentials are base 2 of unconverted scores: exp(x) = exp2(x * log2(e)), so multiply the scale by log2(e) = 1.442695.",
     scale_ln2, scaled, right, false},
    {"log2e-with-exp", "The scores were multiplied by log2(e), but the exponential is base e: use exp2 with log2(e), or exp without.",
     scale_log2e, scaled, right, false},

    {"k-v-swapped", "K and V are swapped: O = softmax(scale * Q V^T) K is what came out. Check the order of the arguments.", once,
     k_and_v_swapped, right, false},
    {"k-for-v",
     "P is multiplied by K and not by V: check which tile the second product reads, and that V's load is not overwritten by K's.", once,
     k_for_v, right, false},
    {"v-for-k", "The scores are Q V^T and not Q K^T: check which tile the first product reads.", once, v_for_k, right, false},
    {"columns-ignored", "The scores q k add up only the first {} of the d columns: the loop over d ends too early.", columns_kept,
     fewer_columns, right, false},

    {"o-layout", "O is right but lies elsewhere in memory: it is written in the order {}. Use the strides of O.", if_o_layouts_differ,
     nullptr, right, true},
    {"kv-layout", "K and V are read in the order {}. Use their strides.", if_any_layouts_differ, kv_in_other_layout, right, false},
    {"qkv-layout", "Q, K and V are read in the order {}. Use their strides.", if_any_layouts_differ, all_in_other_layout, right, false},
    {"all-layout", "Q, K and V are read, and O is written, in the order {}. Use their strides.", if_any_layouts_differ, all_in_other_layout,
     right, true},
};

const LseMistake lse_table[] = {
    {"", "", [](const Problem&, const Statistics& s) { return s.m + std::log(s.l); }, false},
    {"lse-without-m", "LSE is log l: add the row's maximum, LSE = m + log l.",
     [](const Problem&, const Statistics& s) { return std::log(s.l); }, false},
    {"lse-m-only", "LSE is the row's maximum m: add the logarithm of the sum, LSE = m + log l.",
     [](const Problem&, const Statistics& s) { return s.m; }, false},
    {"lse-l-only", "LSE is the row's sum l: LSE = m + log l.", [](const Problem&, const Statistics& s) { return s.l; }, false},
    {"lse-log-missing", "LSE is m + l: the logarithm of l is missing, LSE = m + log l.",
     [](const Problem&, const Statistics& s) { return s.m + s.l; }, false},
    {"lse-log2", "LSE is in base 2: convert it to natural units, multiply by ln 2 = 0.6931472.",
     [](const Problem&, const Statistics& s) { return (s.m + std::log(s.l)) * std::numbers::log2e; }, false},
    {"lse-m-log2", "LSE is m * log2(e) + log l: m is kept in base 2, so convert it, LSE = m * ln 2 + log l.",
     [](const Problem&, const Statistics& s) { return s.m * std::numbers::log2e + std::log(s.l); }, false},
    {"lse-l-log2", "LSE is m + log2 l: use the natural logarithm, LSE = m + log l.",
     [](const Problem&, const Statistics& s) { return s.m + std::log2(s.l); }, false},
    {"lse-m-unscaled", "LSE is m + log l with the maximum of the unscaled scores: use the maximum of scale * q k.",
     [](const Problem& p, const Statistics& s) { return s.m / p.scale() + std::log(s.l); }, false},
    {"lse-minus-log", "LSE is m - log l: the logarithm is added, LSE = m + log l.",
     [](const Problem&, const Statistics& s) { return s.m - std::log(s.l); }, false},
    {"lse-sign", "LSE has the wrong sign: LSE = m + log l.", [](const Problem&, const Statistics& s) { return -(s.m + std::log(s.l)); },
     false},
    {"lse-exponential", "LSE is the sum of exponentials itself, exp(m) * l: store its logarithm, m + log l.",
     [](const Problem&, const Statistics& s) { return std::exp(s.m + std::log(s.l)); }, false},
    {"lse-layout", "LSE is right but lies elsewhere in memory: it is written in the order (B, Nq, Hq), and (B, Hq, Nq) is asked.",
     [](const Problem&, const Statistics& s) { return s.m + std::log(s.l); }, true},
};

}  // namespace

std::span<const Mistake> mistakes() { return table; }
std::vector<Parameter> parameters_of(const Mistake& mistake, const Problem& problem) {
    const bool is_right = mistake.name[0] == '\0';
    return is_right || mistake.packed == problem.packed() ? mistake.parameters(problem) : std::vector<Parameter>{};
}
std::span<const LseMistake> lse_mistakes() { return lse_table; }

}  // namespace workbook
