#include "attention/diagnose.hpp"

#include "attention/locate.hpp"
#include "attention/mistakes.hpp"

#include <algorithm>
#include <cstdio>
#include <cmath>
#include <cstdint>
#include <limits>

namespace workbook {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr int kScreenRows = 12;           // wrong rows, and right rows, on which every mistake is tried first
constexpr double kConfirmProducts = 3e7;  // q k products to spend on a mistake that passes
constexpr int kAlternatives = 3;          // that are named together

/// One mistake with one value of its parameter.
struct Candidate {
    const Mistake* mistake;
    Parameter parameter;
};

/// How a candidate fits.
struct Fit {
    std::size_t candidate;
    int lse = -1;  ///< index into lse_mistakes(); -1: O fits and LSE does not
    Verdict verdict;
};

std::string filled(std::string sentence, const std::string& text) {
    for (std::size_t at; (at = sentence.find("{}")) != std::string::npos;) sentence.replace(at, 2, text);
    return sentence;
}

class Diagnosis {
public:
    Diagnosis(const Problem& problem, const float* q, const float* k, const float* v, const ReferenceRows& want, const ReferenceRows& plain,
              const Result& got)
        : problem_(problem), tensors_{problem_, q, k, v}, want_(want), plain_(plain), got_(got), other_(problem) {
        other_.layout = problem.layout == Layout::bhnd ? Layout::bnhd : Layout::bhnd;
        logits_ = 0;
        for (double s : want.lse_scale) logits_ = std::max(logits_, s);
    }

    std::vector<Finding> run() {
        if (judge(problem_, want_, plain_, got_).ok) return {};
        report_unwritten();
        keep([&](long long r) { return !row_has(r, [&](long long e) { return unwritten_o(e); }) && !unwritten_lse(want_.rows[r]); });
        if (done()) return std::move(findings_);

        if (explain_by_exponent_range()) return std::move(findings_);
        const auto sees_nothing = [&](long long r) { return want_.lse[r] == -infinity; };
        const auto not_finite = [&](long long r) {
            return std::isnan(got_.lse[want_.rows[r]]) || got_.lse[want_.rows[r]] == infinity ||
                   row_has(r, [&](long long e) { return !std::isfinite(got_.o[e]); });
        };
        // A row that sees nothing and is NaN is a mistake of its own, whatever else is wrong.
        const auto empty_and_nan = [&](long long r) { return sees_nothing(r) && not_finite(r); };
        if (any(empty_and_nan)) {
            add("empty-row-nan",
                "Rows that see no key are not finite (" + describe(flagged(empty_and_nan)) +
                    "): their maximum is -infinity and their sum 0, so exp(-inf - -inf) and 0 / 0 are NaN. Subtract 0 in the "
                    "place of a maximum of -infinity, and write O = 0 and LSE = -infinity where l is 0.");
            keep([&](long long r) { return !empty_and_nan(r); });
            if (done()) return std::move(findings_);
        }
        if (explain_by_known_mistake()) return std::move(findings_);

        // What no known mistake explains: first say where it is not finite, then try again on the other rows.
        const std::size_t before = findings_.size();
        report_not_finite();
        keep([&](long long r) { return !not_finite(r); });
        if (done()) return std::move(findings_);
        const auto empty_and_wrong = [&](long long r) {
            return sees_nothing(r) && (got_.lse[want_.rows[r]] != -infinity || row_has(r, [&](long long e) { return got_.o[e] != 0; }));
        };
        if (any(empty_and_wrong)) {
            add("empty-row-finite",
                "Rows that see no key are not O = 0 and LSE = -infinity (" + describe(flagged(empty_and_wrong)) +
                    "): a large negative number in the place of -infinity makes all hidden keys weigh the same. Mask with "
                    "-infinity, and treat a row whose maximum is -infinity on its own.");
            keep([&](long long r) { return !empty_and_wrong(r); });
            if (done()) return std::move(findings_);
        }
        if (findings_.size() > before && explain_by_known_mistake()) return std::move(findings_);
        locate();
        return std::move(findings_);
    }

private:
    void add(std::string name, std::string sentence) { findings_.push_back({std::move(name), std::move(sentence)}); }

    long long address(const Problem& layout, long long row) const {
        const RowPlace at = place_of(problem_, row);
        const Strides s = layout.q_strides();
        return at.b * s[0] + at.h * s[1] + at.i * s[2];
    }
    bool unwritten_o(long long e) const { return !got_.o_poisoned.empty() && got_.o_poisoned[e]; }
    bool unwritten_lse(long long row) const { return !got_.lse_poisoned.empty() && got_.lse_poisoned[row]; }

    // True when test(e) holds for an element of O in row r of want_.
    template <class Test>
    bool row_has(long long r, Test test) const {
        const long long first = address(problem_, want_.rows[r]);
        for (long long e = first; e < first + problem_.head_dim; ++e)
            if (test(e)) return true;
        return false;
    }
    template <class Test>
    bool any(Test test) const {
        for (long long r = 0; r < size(); ++r)
            if (test(r)) return true;
        return false;
    }
    template <class Test>
    Where flagged(Test test) const {
        return look_for(problem_, want_.rows, 1, [&](long long r, long long, int) { return test(r); });
    }
    long long size() const { return static_cast<long long>(want_.rows.size()); }

    // Goes on with the rows r for which test(r) holds.
    template <class Test>
    void keep(Test test) {
        std::vector<long long> kept;
        for (long long r = 0; r < size(); ++r)
            if (test(r)) kept.push_back(r);
        if (static_cast<long long>(kept.size()) == size()) return;
        want_ = rows_of(want_, kept);
        plain_ = rows_of(plain_, kept);
    }
    ReferenceRows rows_of(const ReferenceRows& from, const std::vector<long long>& kept) const {
        const int d = problem_.head_dim;
        ReferenceRows to;
        for (long long r : kept) {
            to.rows.push_back(from.rows[r]);
            to.lse.push_back(from.lse[r]);
            to.o.insert(to.o.end(), from.o.begin() + r * d, from.o.begin() + (r + 1) * d);
            if (!from.lse_scale.empty()) to.lse_scale.push_back(from.lse_scale[r]);
            if (!from.o_scale.empty())
                to.o_scale.insert(to.o_scale.end(), from.o_scale.begin() + r * d, from.o_scale.begin() + (r + 1) * d);
        }
        return to;
    }
    bool done() const { return want_.rows.empty() || judge(problem_, want_, plain_, got_).ok; }

    void report_unwritten() {
        const std::vector<long long> all;
        if (!got_.o_poisoned.empty()) {
            const Where o = look_for(problem_, all, problem_.head_dim,
                                     [&](long long, long long row, int c) { return unwritten_o(address(problem_, row) + c); });
            if (o.count > 0) add("unwritten", unwritten_text("O", o));
        }
        if (!got_.lse_poisoned.empty()) {
            const Where lse = look_for(problem_, all, 1, [&](long long, long long row, int) { return unwritten_lse(row); });
            if (lse.count > 0) add("unwritten", unwritten_text("LSE", lse));
        }
    }
    std::string unwritten_text(const std::string& output, const Where& where) const {
        if (where.all()) return output + " was never written: the store is missing, or goes elsewhere, or no thread reaches it.";
        std::string text = output + " was never written: " + describe(where) + ".";
        if (const int first = where.tail(); first > 0) {
            std::string sizes;
            for (int size : kTileSizes)
                if (first == problem_.seq / size * size) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
            if (!sizes.empty())
                text +=
                    " These are the last rows, those of the query tile that is not full, as when the number of query tiles is Nq / Br "
                    "rounded "
                    "down (Br = " +
                    sizes + "): round up.";
        } else if (where.found[3].size() < static_cast<std::size_t>(where.extent[3])) {
            text += " Check that the threads of a tile together cover all d columns of a row.";
        } else if (where.found[1].size() < static_cast<std::size_t>(where.extent[1]) ||
                   where.found[0].size() < static_cast<std::size_t>(where.extent[0])) {
            text += " Check the grid: it must have a block for every query head of every batch.";
        } else {
            text += " Check which rows each block and each warp own.";
        }
        return text;
    }

    // float32 holds exp(x) for x from -103 (as a subnormal number; -87 without them) to 88. A maximum that starts at 0, or is not
    // subtracted, fails in the rows beyond and nowhere else.
    bool explain_by_exponent_range() {
        const std::vector<char> wrong = wrong_rows();
        const auto gone = [&](long long r) {
            const float lse = got_.lse[want_.rows[r]];
            bool zero = true, finite = true;
            row_has(r, [&](long long e) {
                zero &= got_.o[e] == 0;
                finite &= std::isfinite(got_.o[e]);
                return false;
            });
            return zero || !finite || !std::isfinite(lse);
        };
        const auto explains = [&](auto may, auto must) {
            long long count = 0;
            for (long long r = 0; r < size(); ++r) {
                if (want_.lse[r] == -infinity) continue;
                if (wrong[r] && !may(want_.lse[r])) return false;
                if (must(want_.lse[r])) {
                    if (!gone(r)) return false;
                    ++count;
                }
            }
            return count > 0;
        };
        const double keys = std::log(static_cast<double>(problem_.kv_seq));  // LSE is the maximum plus 0 to this
        if (explains([&](double x) { return x < -80 + keys; }, [&](double x) { return x < -106; })) {
            add("maximum-starts-at-0", "Exactly the rows whose scores are all far below zero are wrong (" +
                                           describe(flagged([&](long long r) { return wrong[r]; })) +
                                           "): there exp(s - m) underflows for every key, so the running maximum starts at 0 or at a small "
                                           "positive number such as "
                                           "numeric_limits::min(). Start it at -infinity.");
            return true;
        }
        if (explains([&](double x) { return x > 85; }, [&](double x) { return x > 90 + keys; })) {
            add("maximum-not-subtracted", "Exactly the rows whose scores reach beyond 88 are wrong (" +
                                              describe(flagged([&](long long r) { return wrong[r]; })) +
                                              "): there exp(s) overflows float32, so the maximum is not subtracted. Compute exp(s - m).");
            return true;
        }
        return false;
    }

    std::vector<char> wrong_rows() const {
        const Verdict verdict = judge(problem_, want_, plain_, got_);
        std::vector<char> wrong(size());
        for (long long r = 0; r < size(); ++r) wrong[r] = badness(r, verdict) > 1;
        return wrong;
    }
    // Error of row r by what is allowed; infinite where it is not finite.
    double badness(long long r, const Verdict& verdict) const {
        const int d = problem_.head_dim;
        const auto off = [](double want, double got) {
            return want == got ? 0.0 : std::isfinite(want) && std::isfinite(got) ? std::abs(want - got) : infinity;
        };
        const long long first = address(problem_, want_.rows[r]);
        double most = off(want_.lse[r], got_.lse[want_.rows[r]]) / verdict.lse_allowed;
        for (int c = 0; c < d; ++c) {
            const double error = off(want_.o[r * d + c], got_.o[first + c]);
            if (error > 0) most = std::max(most, error / verdict.o_allowed);
        }
        return most;
    }

    // ---- known mistakes

    struct Scratch {
        std::vector<double> s, exact, plain;  // (Nkv), (d), (d)
        double lse = 0;                       // of `exact`, when LSE is made of m and l as it should be
    };
    /// A row of an attention with a mistake, in float64 and in the problem's type.
    struct Outcome {
        Statistics exact, plain;  // O is in the scratch
        bool empty;
    };

    // Dot products of the right q and k, which most candidates share: (Nkv) in float64 and in float32.
    struct Cached {
        std::vector<double> exact, plain;
    };

    template <class T>
    Statistics compute(const Candidate& candidate, RowPlace at, const std::vector<double>* cached, std::vector<double>& s, double* o,
                       Row& row) const {
        row = row_of_all_keys(problem_, tensors_.q, tensors_.k, tensors_.v, at);
        const Row right = row;
        if (candidate.mistake->reads) candidate.mistake->reads(tensors_, at, candidate.parameter, row);
        s.resize(problem_.kv_seq);
        if (cached && row.q == right.q && row.k == right.k && row.kv_stride == right.kv_stride && row.depth == right.depth)
            s = *cached;
        else
            dot_products<T>(row, s.data());
        for (double& x : s) x = score<T>(row, x);
        const Statistics stat = candidate.mistake->weights(tensors_, at, candidate.parameter, s);
        for (double& x : s) x = rounded<T>(static_cast<Accumulator<T>>(x));
        while (row.visible > 0 && s[row.visible - 1] == 0) --row.visible;  // the keys that a mask hides
        weighted_sum<T>(row, s.data(), o);
        return stat;
    }

    // Statistics of the float64 row are in result.exact; its O and that of the row in the problem's type are in the scratch.
    Outcome outcome(const Candidate& candidate, RowPlace at, const Cached* cached, Scratch& scratch) const {
        scratch.exact.resize(problem_.head_dim);
        scratch.plain.resize(problem_.head_dim);
        Row row;
        Outcome result;
        with_type(problem_.dtype, [&]<class T>() {
            result.plain = compute<T>(candidate, at, cached ? &cached->plain : nullptr, scratch.s, scratch.plain.data(), row);
        });
        result.exact = compute<double>(candidate, at, cached ? &cached->exact : nullptr, scratch.s, scratch.exact.data(), row);
        result.empty = result.exact.m == -infinity;
        scratch.lse = result.exact.m + std::log(result.exact.l);
        return result;
    }

    std::vector<Candidate> candidates() const {
        std::vector<Candidate> list;
        for (const Mistake& mistake : mistakes())
            for (Parameter& p : parameters_of(mistake, problem_)) list.push_back({&mistake, std::move(p)});
        return list;
    }

    // The place in got_.lse of a row, as an LSE mistake has it.
    long long lse_place(const LseMistake& mistake, long long row) const {
        if (!mistake.in_other_layout) return row;
        const RowPlace at = place_of(problem_, row);
        return (static_cast<long long>(at.b) * problem_.seq + at.i) * problem_.heads + at.h;
    }
    bool lse_layouts_differ() const { return problem_.heads > 1 && problem_.seq > 1; }

    bool explain_by_known_mistake() {
        const Verdict reference = judge(problem_, want_, plain_, got_);
        const bool o_wrong = !o_ok(reference);
        const std::vector<long long> screen = screening_rows(reference);
        const std::vector<Candidate> list = candidates();
        const std::vector<std::uint32_t> possible = screened(list, screen, reference);

        std::vector<std::size_t> survivors;
        for (std::size_t n = 0; n < list.size(); ++n) {
            // Where O is right, a candidate must explain LSE.
            if (possible[n] & passed && (o_wrong || (possible[n] & ~passed) != 0)) survivors.push_back(n);
        }
        std::vector<Fit> fits;
        const std::vector<long long> rows = confirming_rows(screen);
        for (std::size_t n : survivors) confirm(list, n, possible[n] & ~passed, rows, fits);
        select(list, fits);
        if (fits.empty()) return false;
        name_fits(list, fits);
        return true;
    }

    static bool o_ok(const Verdict& v) { return v.o.clean() && v.o.max_abs <= v.o_allowed && v.o.rel_rms <= v.o_rms_allowed; }
    static bool lse_ok(const Verdict& v) { return v.lse.clean() && v.lse.max_abs <= v.lse_allowed; }

    // Rows of want_ to try every candidate on: wrong ones first, the worst at the head, then right ones.
    std::vector<long long> screening_rows(const Verdict& reference) const {
        std::vector<std::pair<double, long long>> wrong;
        std::vector<long long> right, rows;
        for (long long r = 0; r < size(); ++r) {
            const double bad = badness(r, reference);
            if (bad > 1)
                wrong.push_back({bad, r});
            else
                right.push_back(r);
        }
        const auto worse = [](const auto& a, const auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
        if (!wrong.empty()) rows.push_back(std::min_element(wrong.begin(), wrong.end(), worse)->second);
        for (int n = 1; n < kScreenRows && !wrong.empty(); ++n) rows.push_back(wrong[wrong.size() * (n - 1) / (kScreenRows - 1)].second);
        for (int n = 0; n < kScreenRows && !right.empty(); ++n) rows.push_back(right[right.size() * n / kScreenRows]);
        std::vector<long long> distinct;
        for (long long r : rows)
            if (std::find(distinct.begin(), distinct.end(), r) == distinct.end()) distinct.push_back(r);
        return distinct;
    }

    static constexpr std::uint32_t passed = 1u << 31;

    // For each candidate a bit `passed` when O may be its work on all screening rows, and one bit for each way in which LSE may be.
    // Generous: it only saves confirm() the work.
    std::vector<std::uint32_t> screened(const std::vector<Candidate>& list, const std::vector<long long>& screen,
                                        const Verdict& reference) const {
        std::vector<Cached> cache(screen.size());
        on_all_cores(
            static_cast<long long>(screen.size()), [] { return 0; },
            [&](long long n, int) {
                Row row = row_of_all_keys(problem_, tensors_.q, tensors_.k, tensors_.v, place_of(problem_, want_.rows[screen[n]]));
                cache[n].exact.resize(row.visible);
                cache[n].plain.resize(row.visible);
                dot_products<double>(row, cache[n].exact.data());
                with_type(problem_.dtype, [&]<class T>() { dot_products<T>(row, cache[n].plain.data()); });
            });
        double size_of_o = 0;
        for (double x : want_.o) size_of_o = std::max(size_of_o, std::abs(x));
        for (double x : want_.o_scale) size_of_o = std::max(size_of_o, x);
        const double relative = size_of_o > 0 ? reference.o_allowed / size_of_o : 0;

        std::vector<std::uint32_t> possible(list.size(), 0);
        on_all_cores(
            static_cast<long long>(list.size()), [] { return Scratch{}; },
            [&](long long n, Scratch& scratch) {
                std::uint32_t bits = passed | ((1u << lse_mistakes().size()) - 1);
                for (std::size_t r = 0; r < screen.size() && bits != 0; ++r) {
                    bits &= screen_row(list[n], screen[r], cache[r], relative, scratch);
                    if (r == 0 && changes_nothing(list[n], screen[r], scratch)) bits = 0;
                }
                possible[n] = bits;
            });
        return possible;
    }

    // True when the candidate's row is the right one, so that it cannot be what is wrong there. Follows screen_row() on the row.
    bool changes_nothing(const Candidate& candidate, long long r, const Scratch& scratch) const {
        if (candidate.mistake->name[0] == 0 || candidate.mistake->o_in_other_layout) return false;
        const auto same = [](double a, double b) { return a == b || std::abs(a - b) <= 1e-10 * (1 + std::abs(b)); };
        if (!same(scratch.lse, want_.lse[r])) return false;
        for (int c = 0; c < problem_.head_dim; ++c)
            if (!same(scratch.exact[c], want_.o[r * problem_.head_dim + c])) return false;
        return true;
    }

    std::uint32_t screen_row(const Candidate& candidate, long long r, const Cached& cached, double relative, Scratch& scratch) const {
        const long long row = want_.rows[r];
        const Outcome outcome = this->outcome(candidate, place_of(problem_, row), &cached, scratch);
        const long long first = address(candidate.mistake->o_in_other_layout ? other_ : problem_, row);
        double most = 0, noise = 0;
        for (int c = 0; c < problem_.head_dim; ++c) {
            most = std::max(most, std::abs(scratch.exact[c]));
            if (std::isfinite(scratch.plain[c])) noise = std::max(noise, std::abs(scratch.plain[c] - scratch.exact[c]));
        }
        const double allowed = 8 * relative * most + 8 * noise;
        for (int c = 0; c < problem_.head_dim; ++c) {
            const double got = got_.o[first + c];
            if (unwritten_o(first + c)) return 0;
            if (outcome.empty && std::isnan(got)) continue;
            if (!(got == scratch.exact[c] || std::abs(got - scratch.exact[c]) <= allowed)) return 0;
        }
        std::uint32_t bits = passed;
        for (std::size_t t = 0; t < lse_mistakes().size(); ++t) {
            const LseMistake& mistake = lse_mistakes()[t];
            if (mistake.in_other_layout && !lse_layouts_differ()) continue;
            const double got = got_.lse[lse_place(mistake, row)];
            const double exact = mistake.lse(problem_, outcome.exact), plain = mistake.lse(problem_, outcome.plain);
            double tolerance = 1e-5 * (1 + std::abs(exact) + logits_);
            if (std::isfinite(plain)) tolerance += 8 * std::abs(plain - exact);
            if (got == exact || (outcome.empty && std::isnan(got)) || std::abs(got - exact) <= tolerance + 0.02 * std::abs(exact))
                bits |= 1u << t;
        }
        return bits;
    }

    // As many rows as kConfirmProducts pays for, spread over want_, with those of the screen.
    std::vector<long long> confirming_rows(const std::vector<long long>& screen) const {
        const double cost = static_cast<double>(problem_.kv_seq) * problem_.head_dim;
        const long long count = std::clamp<long long>(static_cast<long long>(kConfirmProducts / cost), 48, std::max(48ll, size()));
        std::vector<long long> rows = screen;
        if (count >= size()) rows.clear();
        for (long long n = 0; n < std::min(count, size()); ++n) rows.push_back(count >= size() ? n : n * size() / count);
        std::sort(rows.begin(), rows.end());
        rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
        return rows;
    }

    // Judges the run with the candidate's attention in the place of the right one, once for each LSE that is possible.
    void confirm(const std::vector<Candidate>& list, std::size_t n, std::uint32_t possible, const std::vector<long long>& rows,
                 std::vector<Fit>& fits) const {
        const Candidate& candidate = list[n];
        const int d = problem_.head_dim;
        const long long count = static_cast<long long>(rows.size());
        const Problem& layout = candidate.mistake->o_in_other_layout ? other_ : problem_;
        ReferenceRows exact, plain;
        exact.o.resize(count * d);
        exact.lse.resize(count);
        exact.o_scale.resize(count * d);
        exact.lse_scale.resize(count);
        exact.rows.resize(count);
        plain.o.resize(count * d);
        plain.lse.resize(count);
        std::vector<Outcome> outcomes(count);
        on_all_cores(
            count, [] { return Scratch{}; },
            [&](long long r, Scratch& scratch) {
                exact.rows[r] = want_.rows[rows[r]];
                const RowPlace at = place_of(problem_, exact.rows[r]);
                outcomes[r] = outcome(candidate, at, nullptr, scratch);
                std::copy(scratch.exact.begin(), scratch.exact.end(), exact.o.begin() + r * d);
                std::copy(scratch.plain.begin(), scratch.plain.end(), plain.o.begin() + r * d);
                Row row = row_of_all_keys(problem_, tensors_.q, tensors_.k, tensors_.v, at);
                if (candidate.mistake->reads) candidate.mistake->reads(tensors_, at, candidate.parameter, row);
                noise_scales(row, scratch.s, &exact.o_scale[r * d], exact.lse_scale[r]);
                const long long first = address(layout, exact.rows[r]);
                for (int c = 0; c < d; ++c)  // how NaN is avoided in a row that sees nothing is another matter
                    if (outcomes[r].empty && std::isnan(got_.o[first + c])) exact.o[r * d + c] = nan;
            });
        plain.rows = exact.rows;

        const ReferenceRows here = rows_of(want_, rows), plain_here = rows_of(plain_, rows);
        const Verdict reference = judge(problem_, here, plain_here, got_);
        const auto closer = [&](const Errors& now, const Errors& then) {
            return !then.clean() || now.max_abs <= then.max_abs / 2 || now.rel_rms <= then.rel_rms / 2;
        };
        bool found = false;
        for (std::size_t t = 0; t < lse_mistakes().size(); ++t) {
            if (!(possible >> t & 1)) continue;
            const LseMistake& mistake = lse_mistakes()[t];
            for (long long r = 0; r < count; ++r) {
                const bool excused = outcomes[r].empty && std::isnan(got_.lse[lse_place(mistake, exact.rows[r])]);
                exact.lse[r] = excused ? nan : mistake.lse(problem_, outcomes[r].exact);
                plain.lse[r] = mistake.lse(problem_, outcomes[r].plain);
            }
            const Verdict verdict = judge(layout, exact, plain, mistake.in_other_layout ? lse_moved() : got_);
            if (!o_ok(verdict) || !lse_ok(verdict)) continue;
            if (!(closer(verdict.o, reference.o) && !o_ok(reference)) && !(closer(verdict.lse, reference.lse) && !lse_ok(reference)))
                continue;
            fits.push_back({n, static_cast<int>(t), verdict});
            found = true;
        }
        if (found || o_ok(reference)) return;
        for (long long r = 0; r < count; ++r) exact.lse[r] = plain.lse[r] = 0;
        const Verdict verdict = judge(layout, exact, plain, got_);
        if (o_ok(verdict) && closer(verdict.o, reference.o)) fits.push_back({n, -1, verdict});
    }

    // ReferenceRows::o_scale and lse_scale of a row with given weights.
    static void noise_scales(const Row& row, const std::vector<double>& weights, double* o_scale, double& lse_scale) {
        double squares[256] = {}, sum = 0, scores = 0;
        for (int j = 0; j < row.visible; ++j) {
            if (weights[j] == 0) continue;
            const float *k = row.k + j * row.kv_stride, *v = row.v + j * row.kv_stride;
            const double terms = sum_of(row.d, [&](int c) { return static_cast<double>(row.q[c]) * row.q[c] * k[c] * k[c]; });
            for (int c = 0; c < row.d; ++c) squares[c] += weights[j] * weights[j] * v[c] * v[c];
            sum += std::abs(weights[j]);
            scores += std::abs(weights[j]) * std::sqrt(terms);
        }
        for (int c = 0; c < row.d; ++c) o_scale[c] = std::sqrt(squares[c]);
        lse_scale = sum > 0 ? std::abs(row.scale) * scores / sum : 0;
    }

    const Result& lse_moved() const {
        if (moved_.lse.empty()) {
            moved_ = got_;
            const Problem& p = problem_;
            const LseMistake other{"", "", nullptr, true};
            for (long long row = 0; row < p.rows(); ++row) {
                moved_.lse[row] = got_.lse[lse_place(other, row)];
                if (!got_.lse_poisoned.empty()) moved_.lse_poisoned[row] = got_.lse_poisoned[lse_place(other, row)];
            }
        }
        return moved_;
    }

    // Drops what explains less, what needs two mistakes where one is enough, and what fits markedly worse than the best.
    static void select(const std::vector<Candidate>& list, std::vector<Fit>& fits) {
        if (fits.empty()) return;
        const auto rank = [&](const Fit& fit) {
            if (fit.lse < 0) return 3;
            return (list[fit.candidate].mistake->name[0] != 0) + (fit.lse != 0);
        };
        const auto keep_best = [&](auto value, double factor, double floor) {
            double best = infinity;
            for (const Fit& fit : fits) best = std::min(best, static_cast<double>(value(fit)));
            std::erase_if(fits, [&](const Fit& fit) { return value(fit) > factor * best + floor; });
        };
        keep_best(rank, 1, 0);
        keep_best([](const Fit& fit) { return fit.verdict.o.rel_rms; }, 1.25, 2e-7);
        if (fits.front().lse >= 0) keep_best([](const Fit& fit) { return fit.verdict.lse.max_abs / fit.verdict.lse_allowed; }, 2, 0.05);
        keep_best([](const Fit& fit) { return fit.verdict.o.max_abs / fit.verdict.o_allowed; }, 1.5, 0.05);
    }

    void name_fits(const std::vector<Candidate>& list, const std::vector<Fit>& fits) {
        // Fits of one mistake with different parameters are one: their texts are listed.
        struct Named {
            const Mistake* mistake;
            int lse;
            std::vector<std::string> parameters;
        };
        std::vector<Named> all;
        for (const Fit& fit : fits) {
            const Candidate& candidate = list[fit.candidate];
            auto same =
                std::find_if(all.begin(), all.end(), [&](const Named& n) { return n.mistake == candidate.mistake && n.lse == fit.lse; });
            if (same == all.end()) same = all.insert(all.end(), {candidate.mistake, fit.lse, {}});
            same->parameters.push_back(candidate.parameter.text);
        }
        Finding finding;
        for (std::size_t n = 0; n < all.size() && n < kAlternatives; ++n) {
            const LseMistake* lse = all[n].lse > 0 ? &lse_mistakes()[all[n].lse] : nullptr;
            std::string name = all[n].mistake->name, texts;
            for (std::size_t t = 0; t < all[n].parameters.size() && t < kAlternatives; ++t)
                texts += (t > 0 ? " or " : "") + all[n].parameters[t];
            std::string sentence = filled(all[n].mistake->sentence, texts);
            if (lse) {
                name += std::string(name.empty() ? "" : " and ") + lse->name;
                sentence += std::string(sentence.empty() ? "" : " Besides, ") + lse->sentence;
            }
            finding.name += (n > 0 ? " or " : "") + name;
            finding.sentence += (n > 0 ? " Or, which gives the same here: " : "") + sentence;
        }
        findings_.push_back(finding);
        if (all.front().lse < 0 && !lse_ok(judge(problem_, want_, plain_, got_))) {
            const Verdict verdict = judge(problem_, want_, plain_, got_);
            add("lse-unexplained", "LSE is wrong too, and not as this mistake makes it: " + describe(wrong_lse(verdict)) + ".");
        }
    }

    // ---- where

    // NaN and infinities in the rows that see a key, sampled or not.
    void report_not_finite() {
        const std::vector<long long> all;
        const Where o = look_for(problem_, all, problem_.head_dim, [&](long long, long long row, int c) {
            const long long e = address(problem_, row) + c;
            return std::isnan(got_.o[e]) && !unwritten_o(e) && problem_.visible_keys(static_cast<int>(row % problem_.seq)) > 0;
        });
        const Where lse = look_for(problem_, all, 1, [&](long long, long long row, int) {
            return std::isnan(got_.lse[row]) && !unwritten_lse(row) && problem_.visible_keys(static_cast<int>(row % problem_.seq)) > 0;
        });
        if (o.count > 0) add("nan", "O is NaN: " + describe(o) + ". " + nan_cause(o, lse));
        if (lse.count > 0)
            add("nan", "LSE is NaN: " + describe(lse) + "." +
                           (o.count > 0 ? "" : " m or l was never set for these rows, or the logarithm is of a negative number."));
        const Where inf = look_for(problem_, all, problem_.head_dim,
                                   [&](long long, long long row, int c) { return std::isinf(got_.o[address(problem_, row) + c]); });
        if (inf.count > 0)
            add("infinite",
                "O is infinite: " + describe(inf) +
                    ". Either l is 0 there, or exp(s - m) overflows because m is not the maximum, or a number left the range of " +
                    name(problem_.dtype) + ".");
        const Where lse_inf = look_for(problem_, all, 1, [&](long long, long long row, int) {
            return std::isinf(got_.lse[row]) && problem_.visible_keys(static_cast<int>(row % problem_.seq)) > 0;
        });
        if (lse_inf.count > 0)
            add("infinite",
                "LSE is infinite: " + describe(lse_inf) + ". Either l is 0 there, or it overflowed because m is not the maximum.");
    }
    std::string nan_cause(const Where& o, const Where& lse) const {
        const bool whole_rows = static_cast<int>(o.found[3].size()) == problem_.head_dim;
        long long overflowed = 0;
        for (double x : plain_.lse) overflowed += std::isnan(x) || std::isinf(x);
        if (problem_.dtype == DType::f16 && overflowed > 0) return "Scores there are beyond 65504, the largest float16: keep S in float32.";
        std::string text;
        if (!whole_rows)
            text =
                "Only some columns: a part of V or of the accumulators is read before it is loaded or set. Look for a missing load, a "
                "missing "
                "wait or a missing __syncthreads().";
        else if (lse.count == 0)
            text =
                "LSE is finite in these rows, so S, m and l are right: V or the accumulators of O hold NaN. Memory that was never set, or "
                "is "
                "read before a copy has landed: look for a missing load of V, a missing wait or a missing __syncthreads().";
        else
            text =
                "Shared memory or a register was read before it was set (a missing load, a missing wait for a copy, a missing "
                "__syncthreads()), or exp(-inf - -inf) or 0 / 0 was computed.";
        if (problem_.kv_seq % 16 != 0 && whole_rows)
            text += " Nkv = " + std::to_string(problem_.kv_seq) +
                    " fills no whole number of tiles: rows of a K or V tile past the end must be zeroed, for 0 * NaN is NaN.";
        return text;
    }

    Where wrong_lse(const Verdict& verdict) const {
        return look_for(problem_, want_.rows, 1, [&](long long r, long long row, int) {
            return want_.lse[r] != got_.lse[row] && !(std::abs(want_.lse[r] - got_.lse[row]) <= verdict.lse_allowed);
        });
    }
    void locate() {
        const Verdict verdict = judge(problem_, want_, plain_, got_);
        const int d = problem_.head_dim;
        const Where o = look_for(problem_, want_.rows, d, [&](long long r, long long row, int c) {
            return !(std::abs(want_.o[r * d + c] - got_.o[address(problem_, row) + c]) <= verdict.o_allowed);
        });
        const Where lse = wrong_lse(verdict);
        if (o.count > 0) {
            bool zero = true;
            for (long long r = 0; r < size(); ++r)
                for (int c = 0; c < d; ++c) {
                    const double got = got_.o[address(problem_, want_.rows[r]) + c];
                    zero &= got == 0 || std::abs(want_.o[r * d + c] - got) <= verdict.o_allowed;
                }
            add("located", "O is wrong: " + describe(o) + "." +
                               (zero ? " All of these are 0: nothing was added to the accumulators, or they were cleared after." : "") +
                               (lse.count == 0 && lse_ok(verdict)
                                    ? " LSE is right, so S, m and l are: look at P V, at how o is rescaled and at the store."
                                    : ""));
        } else if (!o_ok(verdict)) {
            char ratio[32];
            std::snprintf(ratio, sizeof ratio, "%.2g", verdict.o.rel_rms / verdict.o_rms_allowed);
            add("located",
                std::string("O is a little off everywhere, by ") + ratio +
                    " times the allowed root mean square: something is rounded that should stay in float32 (accumulators, m, l).");
        }
        if (lse.count > 0) {
            add("located",
                "LSE is wrong: " + describe(lse) + "." +
                    (o.count == 0 && o_ok(verdict) ? " O is right, so m and l are: look at how LSE is computed and stored."
                     : o.count > 0 ? " It knows nothing of V: look at S = Q K^T (addresses, fragments, scale, mask), m and l before P V."
                                   : ""));
        }
    }

    const Problem problem_;
    const Tensors tensors_;
    ReferenceRows want_, plain_;  // of the rows that are still to be explained
    const Result& got_;
    Problem other_;  // in the other layout
    double logits_;
    std::vector<Finding> findings_;
    mutable Result moved_;
};

void check_size(const char* tensor, std::size_t given, long long wanted) {
    if (given != static_cast<std::size_t>(wanted))
        throw InvalidArgument(std::string(tensor) + " has " + std::to_string(given) + " elements; the problem says " +
                              std::to_string(wanted));
}

}  // namespace

std::vector<Finding> find_mistakes(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                                   const ReferenceRows& want, const ReferenceRows& plain, const Result& got) {
    check(problem);
    check_size("q", q.size(), problem.q_elements());
    check_size("k", k.size(), problem.kv_elements());
    check_size("v", v.size(), problem.kv_elements());
    return Diagnosis(problem, q.data(), k.data(), v.data(), want, plain, got).run();
}

std::string diagnose(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                     const ReferenceRows& want, const ReferenceRows& plain, const Result& got) {
    std::string text;
    for (const Finding& finding : find_mistakes(problem, q, k, v, want, plain, got)) text += (text.empty() ? "" : "\n") + finding.sentence;
    return text;
}

std::vector<std::string> known_mistakes() {
    std::vector<std::string> names{"maximum-starts-at-0", "maximum-not-subtracted", "empty-row-nan", "empty-row-finite"};
    for (const Mistake& mistake : mistakes().subspan(1)) names.push_back(mistake.name);
    for (const LseMistake& mistake : lse_mistakes().subspan(1)) names.push_back(mistake.name);
    return names;
}

}  // namespace workbook
