#include "attention/locate.hpp"

#include <algorithm>
#include <numeric>

namespace workbook {
namespace {

struct Interval {
    int first, last;
};

// Runs of `found` without a gap among the indices that were looked at.
std::vector<Interval> intervals(const std::vector<int>& found, const std::vector<int>& looked_at) {
    std::vector<Interval> list;
    std::size_t next = looked_at.size();  // place in looked_at after the last one found
    for (int x : found) {
        const std::size_t place = std::lower_bound(looked_at.begin(), looked_at.end(), x) - looked_at.begin();
        if (!list.empty() && place == next)
            list.back().last = x;
        else
            list.push_back({x, x});
        next = place + 1;
    }
    return list;
}

std::string text(const std::vector<Interval>& list) {
    std::string words;
    for (std::size_t n = 0; n < list.size(); ++n) {
        if (n > 0) words += n + 1 == list.size() ? " and " : ", ";
        words += std::to_string(list[n].first);
        if (list[n].last != list[n].first) words += "-" + std::to_string(list[n].last);
    }
    return words;
}

// "c % 16 in 8-15", when exactly the indices with these remainders were found; the smallest such period.
std::string periodic(const std::vector<int>& found, const std::vector<int>& looked_at, int extent, char letter) {
    for (int period = 2; 2 * period <= extent; ++period) {
        std::vector<char> hit(period, 0), seen(period, 0);
        for (int x : found) hit[x % period] = 1;
        std::size_t covered = 0;
        for (int x : looked_at) {
            seen[x % period] = 1;
            covered += hit[x % period];
        }
        if (covered != found.size() || 3 * static_cast<std::size_t>(period) > 2 * looked_at.size()) continue;
        std::vector<int> remainders, all;
        for (int x = 0; x < period; ++x) {
            if (hit[x]) remainders.push_back(x);
            if (seen[x]) all.push_back(x);
        }
        const std::vector<Interval> parts = intervals(remainders, all);
        if (parts.size() > 4) continue;
        const bool one = remainders.size() == 1;
        return std::string(1, letter) + " % " + std::to_string(period) + (one ? " = " : " in ") + text(parts);
    }
    return {};
}

// "rows 96-99", "every row", or nothing where the tensor has but one.
std::string axis_text(const std::string& noun, char letter, const std::vector<int>& found, const std::vector<int>& looked_at, int extent) {
    if (extent == 1) return {};
    if (found == looked_at) return "every " + noun;
    const std::string plural = noun == "batch" ? "batches" : noun + "s";
    const std::vector<Interval> parts = intervals(found, looked_at);
    if (parts.size() == 1 || (parts.size() == 2 && found.size() < 4)) return (found.size() == 1 ? noun : plural) + " " + text(parts);
    if (const std::string pattern = periodic(found, looked_at, extent, letter); !pattern.empty())
        return plural + " " + letter + " with " + pattern;
    if (parts.size() <= 4) return plural + " " + text(parts);
    return std::to_string(found.size()) + " " + plural + " between " + std::to_string(found.front()) + " and " +
           std::to_string(found.back());
}

std::vector<int> all_of(int extent) {
    std::vector<int> list(extent);
    std::iota(list.begin(), list.end(), 0);
    return list;
}

}  // namespace

int Where::tail() const {
    if (found[2].empty() || found[2].front() == 0 || found[2].back() != extent[2] - 1) return -1;
    long long box = 1;
    for (int axis : {0, 1, 3}) {
        if (static_cast<int>(found[axis].size()) != extent[axis]) return -1;
        box *= extent[axis];
    }
    if (static_cast<int>(found[2].size()) != extent[2] - found[2].front()) return -1;
    return box * static_cast<long long>(found[2].size()) == count ? found[2].front() : -1;
}

std::string describe(const Where& where) {
    if (where.all()) return "everywhere";
    static constexpr const char* nouns[] = {"batch", "head", "row", "column"};
    std::string words;
    const auto add = [&](const std::string& part) {
        if (!part.empty()) words += (words.empty() ? "" : " of ") + part;
    };
    const bool all_columns = static_cast<int>(where.found[3].size()) == where.extent[3];
    for (int axis : {3, 2, 1, 0}) {
        if (axis == 3 && all_columns) continue;
        const std::vector<int> looked_at = axis == 2 ? where.rows : all_of(where.extent[axis]);
        add(axis_text(nouns[axis], "bhic"[axis], where.found[axis], looked_at, where.extent[axis]));
    }
    // Ranges are complete when the elements found are as many as the ranges have, which a sample of rows cannot tell.
    long long box = 1;
    for (const std::vector<int>& axis : where.found) box *= static_cast<long long>(axis.size());
    const bool complete = where.looked_at == 1ll * where.extent[0] * where.extent[1] * where.extent[2] * where.extent[3];
    if (words.empty()) words = "some elements";
    if (!complete)
        words += " (" + std::to_string(where.count) + " of the " + std::to_string(where.looked_at) + " elements checked)";
    else if (box != where.count)
        words += " (there, " + std::to_string(where.count) + " elements of " + std::to_string(box) + ")";
    return words;
}

}  // namespace workbook
