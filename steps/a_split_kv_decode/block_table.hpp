/// @file
/// The block table of a paged KV cache: which page holds which keys of a sequence (Kwon et al. 2023, PagedAttention).
#pragma once

#include "attention/problem.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace stepa {

/// Keys j * page_size to (j + 1) * page_size - 1 of sequence b are in page pages_of[b * length + j].
struct BlockTable {
    int page_size;  ///< keys of a page
    int pages;      ///< of the whole cache
    int length;     ///< entries of a sequence: ceil(Nkv / page_size)
    std::vector<int> pages_of;
};

/// A table for a cache with just as many pages as the problem needs, in random order, as after many sequences have come and gone.
inline BlockTable shuffled_block_table(const workbook::Problem& problem, unsigned seed = 0) {
    BlockTable table;
    table.page_size = problem.page_size;
    table.length = (problem.kv_seq + table.page_size - 1) / table.page_size;
    table.pages = problem.batch * table.length;
    table.pages_of.resize(static_cast<std::size_t>(table.pages));
    std::iota(table.pages_of.begin(), table.pages_of.end(), 0);
    std::shuffle(table.pages_of.begin(), table.pages_of.end(), std::mt19937(seed));
    return table;
}

/// To be called before a launch: a kernel follows the table without asking.
/// @throws workbook::InvalidArgument that names the entry, when the table is not one for the problem or names a page that there is not
inline void check(const BlockTable& table, const workbook::Problem& problem) {
    using workbook::InvalidArgument;
    const auto text = [](auto number) { return std::to_string(number); };
    if (table.page_size != problem.page_size)
        throw InvalidArgument("block_table: page_size = " + text(table.page_size) + ": accepted is that of the problem, " +
                              text(problem.page_size));
    const int needed = (problem.kv_seq + table.page_size - 1) / table.page_size;
    if (table.length < needed)
        throw InvalidArgument("block_table has " + text(table.length) + " pages a sequence: kv_seq = " + text(problem.kv_seq) + " takes " +
                              text(needed) + " of " + text(table.page_size) + " keys");
    const std::size_t entries = static_cast<std::size_t>(problem.batch) * static_cast<std::size_t>(table.length);
    if (table.pages_of.size() != entries)
        throw InvalidArgument("block_table has " + text(table.pages_of.size()) +
                              " entries: accepted are batch * length = " + text(entries));
    for (std::size_t e = 0; e < entries; ++e) {
        const int page = table.pages_of[e];
        const int j = static_cast<int>(e % static_cast<std::size_t>(table.length));
        if (j < needed && (page < 0 || page >= table.pages))
            throw InvalidArgument("block_table(" + text(e / static_cast<std::size_t>(table.length)) + ", " + text(j) + ") = " + text(page) +
                                  ": accepted are the pages 0 to " + text(table.pages - 1));
    }
}

}  // namespace stepa
