#include "attention/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>

namespace workbook {
namespace {

void check_size(const char* what, std::size_t given, long long wanted) {
    if (given != static_cast<std::size_t>(wanted))
        throw InvalidArgument(std::string(what) + " has " + std::to_string(given) + " elements; " + std::to_string(wanted) + " are needed");
}

/// How one element compares.
enum class Match { finite, equal, unwritten, nan, infinity };

// `equal` are two NaNs or two equal infinities; `finite` are two finite numbers, however far apart.
Match match(double want, float got, bool poisoned) {
    if (poisoned) return Match::unwritten;
    if (std::isnan(want) || std::isnan(got)) return std::isnan(want) && std::isnan(got) ? Match::equal : Match::nan;
    if (std::isinf(want) || std::isinf(got)) return want == got ? Match::equal : Match::infinity;
    return Match::finite;
}

/// The elements of one output that are compared, gathered from a run.
struct Selection {
    std::vector<float> got;
    std::vector<unsigned char> poisoned;
};

/// Largest magnitude and root mean square of the finite values.
struct Size {
    double most = 0;
    double rms = 0;
};

Size size_of_finite(std::span<const double> values) {
    Size size;
    double squares = 0;
    long long count = 0;
    for (double x : values) {
        if (!std::isfinite(x)) continue;
        size.most = std::max(size.most, std::abs(x));
        squares += x * x;
        ++count;
    }
    if (count > 0) size.rms = std::sqrt(squares / static_cast<double>(count));
    return size;
}

/// Half the distance from 1 to the next number: the largest relative error of rounding to the type.
double unit_roundoff(DType type) {
    switch (type) {
        case DType::f16: return 0x1p-11;
        case DType::bf16: return 0x1p-8;
        case DType::f32: break;
    }
    return 0x1p-24;
}

std::string text(double x) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%.7g", x);
    return buffer;
}

/// One output under judgement: what is needed to say what is wrong with it.
struct Output {
    const char* name;
    std::span<const double> want;
    const Selection& run;
    const Errors& errors;
    std::function<std::string(long long)> element;  ///< "O(0, 1, 5, 3)" for an index into `want`
};

// "O: 128 of 4096 elements were"
std::string of_elements(long long count, const Output& output, const char* was, const char* were) {
    return std::string(output.name) + ": " + std::to_string(count) + " of " + std::to_string(output.errors.compared) + " elements " +
           (count == 1 ? was : were);
}

std::string got_and_wanted(const Output& output, long long e) {
    return output.element(e) + ": got " + text(output.run.got[e]) + ", wanted " + text(output.want[e]);
}

// The first complaint about an output, worst kind first; empty when there is none. `rms_allowed` may be infinite.
std::string complaint(const Output& output, double allowed, double rms_allowed) {
    const Errors& errors = output.errors;
    const auto first = [&](Match kind) {
        long long e = 0;
        while (match(output.want[e], output.run.got[e], output.run.poisoned[e]) != kind) ++e;
        return e;
    };
    if (errors.unwritten > 0)
        return of_elements(errors.unwritten, output, "was", "were") + " never written, first at " + output.element(first(Match::unwritten));
    if (errors.nans > 0)
        return of_elements(errors.nans, output, "is", "are") + " NaN where the reference is not, or the reverse, first at " +
               got_and_wanted(output, first(Match::nan));
    if (errors.infinities > 0)
        return of_elements(errors.infinities, output, "is", "are") + " infinite where the reference is not, or the reverse, first at " +
               got_and_wanted(output, first(Match::infinity));
    if (!(errors.max_abs <= allowed)) {
        long long beyond = 0;
        for (std::size_t e = 0; e < output.want.size(); ++e)
            if (std::abs(output.run.got[e] - output.want[e]) > allowed) ++beyond;  // false where both are infinite or NaN
        return of_elements(beyond, output, "is", "are") + " off by more than the allowed " + text(allowed) + ", worst at " +
               got_and_wanted(output, errors.worst) + ", off by " + text(errors.max_abs);
    }
    if (!(errors.rel_rms <= rms_allowed))
        return std::string(output.name) + ": no single element is off by more than the allowed " + text(allowed) +
               ", but together they are: relative RMS error " + text(errors.rel_rms) + ", allowed " + text(rms_allowed) + ", worst at " +
               got_and_wanted(output, errors.worst);
    return {};
}

}  // namespace

Errors compare(std::span<const double> want, std::span<const float> got, std::span<const unsigned char> poisoned) {
    check_size("got", got.size(), static_cast<long long>(want.size()));
    if (!poisoned.empty()) check_size("poisoned", poisoned.size(), static_cast<long long>(want.size()));
    Errors errors;
    errors.compared = static_cast<long long>(want.size());
    double square_errors = 0, squares = 0;
    for (std::size_t e = 0; e < want.size(); ++e) {
        switch (match(want[e], got[e], !poisoned.empty() && poisoned[e])) {
            case Match::equal: continue;
            case Match::unwritten: ++errors.unwritten; continue;
            case Match::nan: ++errors.nans; continue;
            case Match::infinity: ++errors.infinities; continue;
            case Match::finite: break;
        }
        const double error = std::abs(got[e] - want[e]);
        square_errors += error * error;
        squares += want[e] * want[e];
        if (want[e] != 0) errors.max_rel = std::max(errors.max_rel, error / std::abs(want[e]));
        if (errors.worst < 0 || error > errors.max_abs) {
            errors.max_abs = error;
            errors.worst = static_cast<long long>(e);
        }
    }
    if (square_errors > 0) errors.rel_rms = squares > 0 ? std::sqrt(square_errors / squares) : std::numeric_limits<double>::infinity();
    return errors;
}

Verdict judge(const Problem& problem, const ReferenceRows& want, const ReferenceRows& plain, const Result& got) {
    check(problem);
    const long long count = static_cast<long long>(want.rows.size());
    const int d = problem.head_dim;
    if (count == 0) throw InvalidArgument("want has no rows; accepted is 1 or more");
    if (want.rows != plain.rows) throw InvalidArgument("plain.rows differ from want.rows: both must be computed for the same rows");
    check_size("want.o", want.o.size(), count * d);
    check_size("want.lse", want.lse.size(), count);
    check_size("want.o_scale", want.o_scale.size(), count * d);
    check_size("want.lse_scale", want.lse_scale.size(), count);
    check_size("plain.o", plain.o.size(), count * d);
    check_size("plain.lse", plain.lse.size(), count);
    check_size("got.o", got.o.size(), problem.q_elements());
    check_size("got.lse", got.lse.size(), problem.rows());
    if (!got.o_poisoned.empty()) check_size("got.o_poisoned", got.o_poisoned.size(), problem.q_elements());
    if (!got.lse_poisoned.empty()) check_size("got.lse_poisoned", got.lse_poisoned.size(), problem.rows());

    // Gather the rows of the reference from the run's layout.
    struct Place {
        long long b, h, i;
    };
    const auto place = [&](long long r) {
        const long long row = want.rows[r];
        return Place{row / problem.seq / problem.heads, row / problem.seq % problem.heads, row % problem.seq};
    };
    const Strides strides = problem.q_strides();
    Selection o{std::vector<float>(count * d), std::vector<unsigned char>(count * d, 0)};
    Selection lse{std::vector<float>(count), std::vector<unsigned char>(count, 0)};
    for (long long r = 0; r < count; ++r) {
        if (want.rows[r] < 0 || want.rows[r] >= problem.rows())
            throw InvalidArgument("want.rows: row " + std::to_string(want.rows[r]) + " is outside of 0 to " +
                                  std::to_string(problem.rows() - 1));
        const Place at = place(r);
        const long long row_o = at.b * strides[0] + at.h * strides[1] + at.i * strides[2];
        std::copy_n(got.o.begin() + row_o, d, o.got.begin() + r * d);
        if (!got.o_poisoned.empty()) std::copy_n(got.o_poisoned.begin() + row_o, d, o.poisoned.begin() + r * d);
        lse.got[r] = got.lse[want.rows[r]];
        if (!got.lse_poisoned.empty()) lse.poisoned[r] = got.lse_poisoned[want.rows[r]];
    }

    const std::vector<float> plain_o(plain.o.begin(), plain.o.end()), plain_lse(plain.lse.begin(), plain.lse.end());
    const Errors o_plain = compare(want.o, plain_o), lse_plain = compare(want.lse, plain_lse);
    const double logits = std::max(size_of_finite(want.lse).most, size_of_finite(want.lse_scale).most);
    const Size o_size = size_of_finite(want.o), noise_size = size_of_finite(want.o_scale);
    const double u = unit_roundoff(problem.dtype);
    const Rounding rounding = plain.rounding.value_or(Rounding{u, u, 0x1p-24});
    const double slack = rounding.p + rounding.o + 5e-6 + 4 * rounding.sum * logits;

    Verdict verdict;
    verdict.o = compare(want.o, o.got, o.poisoned);
    verdict.lse = compare(want.lse, lse.got, lse.poisoned);
    verdict.o_allowed = 2 * o_plain.max_abs + slack * std::max(o_size.most, noise_size.most);
    verdict.o_rms_allowed = 2 * o_plain.rel_rms + slack * (noise_size.rms > o_size.rms ? noise_size.rms / o_size.rms : 1);
    verdict.lse_allowed = 2 * lse_plain.max_abs + 16 * rounding.sum * (1 + logits);

    const auto row_text = [&](long long r) {
        const Place at = place(r);
        return std::to_string(at.b) + ", " + std::to_string(at.h) + ", " + std::to_string(at.i);
    };
    const std::string o_complaint =
        complaint({"O", want.o, o, verdict.o, [&](long long e) { return "O(" + row_text(e / d) + ", " + std::to_string(e % d) + ")"; }},
                  verdict.o_allowed, verdict.o_rms_allowed);
    const std::string lse_complaint =
        complaint({"LSE", want.lse, lse, verdict.lse, [&](long long r) { return "LSE(" + row_text(r) + ")"; }}, verdict.lse_allowed,
                  std::numeric_limits<double>::infinity());
    verdict.why = o_complaint + (o_complaint.empty() || lse_complaint.empty() ? "" : "; ") + lse_complaint;
    verdict.ok = verdict.why.empty();
    return verdict;
}

double GradientVerdict::max_abs() const { return std::max({dq.errors.max_abs, dk.errors.max_abs, dv.errors.max_abs}); }
double GradientVerdict::rel_rms() const { return std::max({dq.errors.rel_rms, dk.errors.rel_rms, dv.errors.rel_rms}); }

GradientVerdict judge_gradients(const Problem& problem, const ReferenceGradients& want, const ReferenceGradients& plain,
                                const GradientResult& got) {
    check(problem);
    if (want.rows.empty() || want.kv_rows.empty()) throw InvalidArgument("want has no rows; accepted is 1 or more");
    if (want.rows != plain.rows || want.kv_rows != plain.kv_rows)
        throw InvalidArgument("plain.rows differ from want.rows: both must be computed for the same rows");
    const int d = problem.head_dim;
    const double slack = 2 * unit_roundoff(problem.dtype) + 5e-6 + 0x1p-22 * want.logits;
    GradientVerdict verdict;

    const auto judge_one = [&](const char* name, const std::vector<long long>& rows, const Strides& strides, int heads, int length,
                               long long elements, const std::vector<double>& wanted, const std::vector<double>& scale,
                               const std::vector<double>& by_plain, const std::vector<float>& values,
                               const std::vector<unsigned char>& poisoned, GradientErrors& out) {
        const long long count = static_cast<long long>(rows.size());
        const std::string tensor(name);
        check_size(("want." + tensor).c_str(), wanted.size(), count * d);
        check_size(("the scale of want." + tensor).c_str(), scale.size(), count * d);
        check_size(("plain." + tensor).c_str(), by_plain.size(), count * d);
        check_size(("got." + tensor).c_str(), values.size(), elements);
        if (!poisoned.empty()) check_size((tensor + "_poisoned").c_str(), poisoned.size(), elements);
        Selection run{std::vector<float>(count * d), std::vector<unsigned char>(count * d, 0)};
        for (long long r = 0; r < count; ++r) {
            const long long row = rows[r],
                            at = row / length / heads * strides[0] + row / length % heads * strides[1] + row % length * strides[2];
            std::copy_n(values.begin() + at, d, run.got.begin() + r * d);
            if (!poisoned.empty()) std::copy_n(poisoned.begin() + at, d, run.poisoned.begin() + r * d);
        }
        const Errors plain_errors = compare(wanted, std::vector<float>(by_plain.begin(), by_plain.end()));
        const Size size = size_of_finite(wanted), noise = size_of_finite(scale);
        out.errors = compare(wanted, run.got, run.poisoned);
        out.allowed = 2 * plain_errors.max_abs + slack * std::max(size.most, noise.most);
        out.rms_allowed = 2 * plain_errors.rel_rms + slack * (noise.rms > size.rms ? noise.rms / size.rms : 1);
        const auto element = [&](long long e) {
            const long long row = rows[e / d];
            return tensor + "(" + std::to_string(row / length / heads) + ", " + std::to_string(row / length % heads) + ", " +
                   std::to_string(row % length) + ", " + std::to_string(e % d) + ")";
        };
        const std::string what = complaint({name, wanted, run, out.errors, element}, out.allowed, out.rms_allowed);
        if (!what.empty()) verdict.why += (verdict.why.empty() ? "" : "; ") + what;
    };
    judge_one("dQ", want.rows, problem.q_strides(), problem.heads, problem.seq, problem.q_elements(), want.dq, want.dq_scale, plain.dq,
              got.dq, got.dq_poisoned, verdict.dq);
    judge_one("dK", want.kv_rows, problem.kv_strides(), problem.kv_heads, problem.kv_seq, problem.kv_elements(), want.dk, want.dk_scale,
              plain.dk, got.dk, got.dk_poisoned, verdict.dk);
    judge_one("dV", want.kv_rows, problem.kv_strides(), problem.kv_heads, problem.kv_seq, problem.kv_elements(), want.dv, want.dv_scale,
              plain.dv, got.dv, got.dv_poisoned, verdict.dv);
    verdict.ok = verdict.why.empty();
    return verdict;
}

Errors compare_runs(const GradientResult& previous, const GradientResult& got) {
    std::vector<double> want;
    std::vector<float> now;
    std::vector<unsigned char> poisoned;
    const auto append = [&](const std::vector<float>& before, const std::vector<float>& after,
                            const std::vector<unsigned char>& flags_before, const std::vector<unsigned char>& flags_after) {
        check_size("got", after.size(), static_cast<long long>(before.size()));
        want.insert(want.end(), before.begin(), before.end());
        now.insert(now.end(), after.begin(), after.end());
        for (std::size_t e = 0; e < before.size(); ++e)
            poisoned.push_back((!flags_before.empty() && flags_before[e]) || (!flags_after.empty() && flags_after[e]));
    };
    append(previous.dq, got.dq, previous.dq_poisoned, got.dq_poisoned);
    append(previous.dk, got.dk, previous.dk_poisoned, got.dk_poisoned);
    append(previous.dv, got.dv, previous.dv_poisoned, got.dv_poisoned);
    return compare(want, now, poisoned);
}

Errors compare_runs(const Result& previous, const Result& got) {
    const std::vector<double> want(previous.o.begin(), previous.o.end());
    std::vector<unsigned char> poisoned(want.size(), 0);
    for (const std::vector<unsigned char>* flags : {&previous.o_poisoned, &got.o_poisoned}) {
        if (flags->empty()) continue;
        check_size("o_poisoned", flags->size(), static_cast<long long>(want.size()));
        for (std::size_t e = 0; e < want.size(); ++e) poisoned[e] |= (*flags)[e];
    }
    return compare(want, got.o, poisoned);
}

}  // namespace workbook
