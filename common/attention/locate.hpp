/// @file
/// Says in words where in a (B, H, N, d) tensor some elements lie.
#pragma once

#include "attention/problem.hpp"

#include <array>
#include <string>
#include <vector>

namespace workbook {

/// Elements found among those that were looked at, per axis in the order b, h, i, c.
struct Where {
    std::array<std::vector<int>, 4> found;  ///< indices on each axis at which something was found, ascending
    std::array<int, 4> extent{};            ///< of each axis; 1 for one that the tensor lacks
    std::vector<int> rows;                  ///< the rows i that were looked at, ascending; on the other axes all are
    long long count = 0;                    ///< elements found
    long long looked_at = 0;

    bool all() const { return count == looked_at; }
    /// Rows from found[2].front() to the end of every head and nothing else: the first of them; -1 when it is not so.
    int tail() const;
};

/// Collects the elements for which test(flat row, row i, column) holds.
/// @param rows flat rows (b * Hq + h) * Nq + i to look at, ascending; empty: all
/// @param columns d for O, 1 for LSE
template <class Test>
Where look_for(const Problem& problem, const std::vector<long long>& rows, int columns, Test test) {
    Where where;
    where.extent = {problem.batch, problem.heads, problem.seq, columns};
    std::array<std::vector<char>, 4> hit;
    for (int axis = 0; axis < 4; ++axis) hit[axis].assign(where.extent[axis], 0);
    std::vector<char> seen(problem.seq, rows.empty());
    const long long count = rows.empty() ? problem.rows() : static_cast<long long>(rows.size());
    for (long long r = 0; r < count; ++r) {
        const long long row = rows.empty() ? r : rows[r];
        const int i = static_cast<int>(row % problem.seq);
        seen[i] = 1;
        for (int c = 0; c < columns; ++c) {
            if (!test(r, row, c)) continue;
            ++where.count;
            hit[0][row / problem.seq / problem.heads] = hit[1][row / problem.seq % problem.heads] = hit[2][i] = hit[3][c] = 1;
        }
    }
    where.looked_at = count * columns;
    for (int axis = 0; axis < 4; ++axis)
        for (int x = 0; x < where.extent[axis]; ++x)
            if (hit[axis][x]) where.found[axis].push_back(x);
    for (int i = 0; i < problem.seq; ++i)
        if (seen[i]) where.rows.push_back(i);
    return where;
}

/// "everywhere", "rows 96-99 of every head", "columns c with c % 16 in 8-15 of every row of head 2". When the elements do not fill
/// the ranges that are named, " (there, 128 elements of 512)" follows, and for a sample of rows how many of the checked ones.
std::string describe(const Where& where);

}  // namespace workbook
