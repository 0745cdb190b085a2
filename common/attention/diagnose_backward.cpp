#include "attention/diagnose_backward.hpp"

#include "attention/rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace workbook {
namespace {

/// How a wrong backward pass differs from the right one.
struct Mistake {
    const char* name;
    const char* sentence;                   ///< after "dQ and dK are those of a backward pass in which "
    bool (*possible)(const Problem&);       ///< whether it would show
    bool no_D = false;                      ///< dS = P o dP
    bool no_mask = false;                   ///< P = exp(s - LSE) of hidden keys too
    double lse_factor = 1;                  ///< P = exp(s - factor * LSE)
    double dq_power = 1, dk_power = 1;      ///< of the scale that dS K and dS^T Q are multiplied by
    enum { sum, last, first } heads = sum;  ///< query heads of a group that dK and dV come from
};

constexpr double log2_e = 1.4426950408889634;

bool always(const Problem&) { return true; }
bool causal(const Problem& p) { return p.causal; }
bool scaled(const Problem& p) { return p.scale() != 1.0f && p.scale() != 0.0f; }
bool grouped(const Problem& p) { return p.heads > p.kv_heads; }

const std::vector<Mistake>& mistakes() {
    static const std::vector<Mistake> table = {
        {.name = "D-omitted", .sentence = "D is left out: dS = P o (dP - D), with D = rowsum(dO o O)", .possible = always, .no_D = true},
        {.name = "mask-forgotten",
         .sentence = "P is computed again without the causal mask: set P to zero where key j > i + Nkv - Nq, as the forward pass did",
         .possible = causal,
         .no_mask = true},
        {.name = "lse-not-in-log2",
         .sentence = "LSE stands beside a score in units of log2 without having them: P = exp2(log2(e) * (s - LSE)) = exp(s - LSE)",
         .possible = always,
         .lse_factor = 1 / log2_e},
        {.name = "lse-in-log2",
         .sentence = "LSE is taken in units of log2 and the score is not: P = exp(s - LSE), LSE is a natural logarithm",
         .possible = always,
         .lse_factor = log2_e},
        {.name = "dq-scale-missing",
         .sentence = "dQ is not multiplied by the softmax scale: dQ = scale * dS K",
         .possible = scaled,
         .dq_power = 0},
        {.name = "dq-scale-twice",
         .sentence = "dQ is multiplied by the softmax scale twice: dQ = scale * dS K",
         .possible = scaled,
         .dq_power = 2},
        {.name = "dk-scale-missing",
         .sentence = "dK is not multiplied by the softmax scale: dK = scale * dS^T Q",
         .possible = scaled,
         .dk_power = 0},
        {.name = "dk-scale-twice",
         .sentence = "dK is multiplied by the softmax scale twice: dK = scale * dS^T Q",
         .possible = scaled,
         .dk_power = 2},
        {.name = "gqa-last-head",
         .sentence = "dK and dV are those of the last query head of each group: the heads overwrite each other, add them up",
         .possible = grouped,
         .heads = Mistake::last},
        {.name = "gqa-first-head",
         .sentence = "dK and dV are those of the first query head of each group alone: add up all heads",
         .possible = grouped,
         .heads = Mistake::first},
    };
    return table;
}

/// Makes a mistake in float64, on the rows of the reference.
class Mistaken {
public:
    Mistaken(const Problem& problem, const BackwardInputs& in, std::span<const float> o, std::span<const float> lse)
        : p_(problem), in_(in), strides_(problem.q_strides()), lse_(lse), D_(problem.rows()) {
        for (long long r = 0; r < p_.rows(); ++r) {
            const long long at = offset(place_of(p_, r));
            for (int c = 0; c < p_.head_dim; ++c) D_[r] += static_cast<double>(in_.d_o[at + c]) * o[at + c];
        }
    }

    std::vector<double> dq(const Mistake& mistake, const std::vector<long long>& rows) const {
        std::vector<double> out(rows.size() * p_.head_dim);
        const double factor = std::pow(static_cast<double>(p_.scale()), mistake.dq_power);
        on_all_cores(
            static_cast<long long>(rows.size()), [] { return 0; },
            [&](long long r, int) {
                const RowPlace at = place_of(p_, rows[r]);
                for (int j = 0; j < p_.kv_seq; ++j) {
                    const auto [p, ds, row] = pair(mistake, at, j);
                    for (int c = 0; c < p_.head_dim && ds != 0; ++c) out[r * p_.head_dim + c] += factor * ds * row.k[c];
                }
            });
        return out;
    }

    /// (dK, dV)
    std::pair<std::vector<double>, std::vector<double>> dk_dv(const Mistake& mistake, const std::vector<long long>& kv_rows) const {
        std::pair<std::vector<double>, std::vector<double>> out;
        out.first.resize(kv_rows.size() * p_.head_dim);
        out.second.resize(kv_rows.size() * p_.head_dim);
        const double factor = std::pow(static_cast<double>(p_.scale()), mistake.dk_power);
        const int group = p_.heads / p_.kv_heads;
        on_all_cores(
            static_cast<long long>(kv_rows.size()), [] { return 0; },
            [&](long long r, int) {
                const long long flat = kv_rows[r];
                const int j = static_cast<int>(flat % p_.kv_seq), hkv = static_cast<int>(flat / p_.kv_seq % p_.kv_heads),
                          b = static_cast<int>(flat / p_.kv_seq / p_.kv_heads);
                const int begin = mistake.heads == Mistake::last ? group - 1 : 0, end = mistake.heads == Mistake::first ? 1 : group;
                for (int h = hkv * group + begin; h < hkv * group + end; ++h)
                    for (int i = 0; i < p_.seq; ++i) {
                        const auto [p, ds, row] = pair(mistake, {b, h, i}, j);
                        if (p == 0) continue;
                        const float* const gradient = in_.d_o.data() + offset({b, h, i});
                        for (int c = 0; c < p_.head_dim; ++c) {
                            out.first[r * p_.head_dim + c] += factor * ds * row.q[c];
                            out.second[r * p_.head_dim + c] += p * gradient[c];
                        }
                    }
            });
        return out;
    }

private:
    struct Pair {
        double p, ds;
        Row row;  ///< with k and v of key j
    };

    Pair pair(const Mistake& mistake, RowPlace at, int j) const {
        const Range seen = p_.keys_of(at.i);
        const bool hidden = j < seen.begin || j >= seen.end;
        Row row = row_of_all_keys(p_, in_.q.data(), in_.k.data(), in_.v.data(), at);
        narrow(row, {j, j + 1});
        const long long r = (static_cast<long long>(at.b) * p_.heads + at.h) * p_.seq + at.i;
        if ((hidden && !mistake.no_mask) || !std::isfinite(lse_[r])) return {0, 0, row};
        const float* const gradient = in_.d_o.data() + offset(at);
        double s = 0, dp = 0;
        for (int c = 0; c < p_.head_dim; ++c) {
            s += static_cast<double>(row.q[c]) * row.k[c];
            dp += static_cast<double>(gradient[c]) * row.v[c];
        }
        const double p = std::exp(row.scale * s - mistake.lse_factor * lse_[r]);
        return {p, p * (dp - (mistake.no_D ? 0 : D_[r])), row};
    }

    long long offset(RowPlace at) const { return at.b * strides_[0] + at.h * strides_[1] + at.i * strides_[2]; }

    const Problem& p_;
    const BackwardInputs& in_;
    const Strides strides_;
    const std::span<const float> lse_;
    std::vector<double> D_;
};

/// The rows of a run that the reference has.
std::vector<float> gathered(const std::vector<float>& values, const std::vector<long long>& rows, const Strides& s, int heads, int length,
                            int d) {
    std::vector<float> out;
    out.reserve(rows.size() * d);
    for (const long long row : rows) {
        const auto first = values.begin() + (row / length / heads * s[0] + row / length % heads * s[1] + row % length * s[2]);
        out.insert(out.end(), first, first + d);
    }
    return out;
}

/// "dQ", "dQ and dK", "dQ, dK and dV"
std::string listed(const std::vector<std::string>& names) {
    std::string text;
    for (std::size_t n = 0; n < names.size(); ++n) text += (n == 0 ? "" : n + 1 == names.size() ? " and " : ", ") + names[n];
    return text;
}

}  // namespace

std::vector<Finding> find_gradient_mistakes(const Problem& problem, const BackwardInputs& in, std::span<const float> o,
                                            std::span<const float> lse, const ReferenceGradients& want, const ReferenceGradients& plain,
                                            const GradientResult& got) {
    const GradientVerdict verdict = judge_gradients(problem, want, plain, got);
    if (verdict.ok) return {};
    const auto wrong = [](const GradientErrors& of) {
        return !of.errors.clean() || !(of.errors.max_abs <= of.allowed) || !(of.errors.rel_rms <= of.rms_allowed);
    };
    const bool wrong_dq = wrong(verdict.dq), wrong_dk = wrong(verdict.dk), wrong_dv = wrong(verdict.dv);
    if (wrong_dq && !wrong_dk && !wrong_dv && verdict.dq.errors.nans + verdict.dq.errors.unwritten == verdict.dq.errors.compared) {
        return {{"accumulator-not-zeroed",
                 "All of dQ is NaN, dK and dV are right: dQ is added to memory that was not set to zero before, or never written."}};
    }

    const int d = problem.head_dim;
    struct Tensor {
        const char* name;
        bool wrong;
        const GradientErrors& of;
        std::vector<float> got;
        std::vector<std::pair<double, const Mistake*>> explained_by;  ///< with the distance that remains
    };
    Tensor tensors[] = {
        {"dQ", wrong_dq, verdict.dq, gathered(got.dq, want.rows, problem.q_strides(), problem.heads, problem.seq, d), {}},
        {"dK", wrong_dk, verdict.dk, gathered(got.dk, want.kv_rows, problem.kv_strides(), problem.kv_heads, problem.kv_seq, d), {}},
        {"dV", wrong_dv, verdict.dv, gathered(got.dv, want.kv_rows, problem.kv_strides(), problem.kv_heads, problem.kv_seq, d), {}},
    };
    const Mistaken mistaken(problem, in, o, lse);
    for (const Mistake& mistake : mistakes()) {
        if (!mistake.possible(problem)) continue;
        const auto [dk, dv] = mistaken.dk_dv(mistake, want.kv_rows);
        const std::vector<double> dq = mistaken.dq(mistake, want.rows);
        const std::vector<double>* const made[] = {&dq, &dk, &dv};
        for (int n = 0; n < 3; ++n) {
            Tensor& tensor = tensors[n];
            if (!tensor.wrong || !tensor.of.errors.clean()) continue;
            const double distance = compare(*made[n], tensor.got).rel_rms;
            if (distance <= 2 * tensor.of.rms_allowed && 4 * distance <= tensor.of.errors.rel_rms)
                tensor.explained_by.emplace_back(distance, &mistake);
        }
    }

    struct Explained {
        std::string names, sentences;
        std::vector<std::string> tensors;
    };
    std::vector<Explained> groups;
    std::vector<std::string> unexplained;
    for (const Tensor& tensor : tensors) {
        if (!tensor.wrong) continue;
        if (tensor.explained_by.empty()) {
            unexplained.push_back(tensor.name);
            continue;
        }
        // Mistakes that fit markedly worse than the best are dropped.
        const double best = std::min_element(tensor.explained_by.begin(), tensor.explained_by.end())->first;
        Explained by;
        for (const auto& [distance, mistake] : tensor.explained_by) {
            if (distance > 2 * best + 1e-7) continue;
            by.names += (by.names.empty() ? "" : " or ") + std::string(mistake->name);
            by.sentences += (by.sentences.empty() ? "" : "; or ") + std::string(mistake->sentence);
        }
        auto group = std::find_if(groups.begin(), groups.end(), [&](const Explained& other) { return other.names == by.names; });
        if (group == groups.end()) group = groups.insert(groups.end(), by);
        group->tensors.push_back(tensor.name);
    }
    std::vector<Finding> findings;
    for (const Explained& group : groups) {
        const char* are = group.tensors.size() > 1 ? " are" : " is";
        findings.push_back({group.names, listed(group.tensors) + are + " what a backward pass gives in which " + group.sentences + "."});
    }
    if (!unexplained.empty()) {
        std::vector<std::string> right;
        for (const Tensor& tensor : tensors)
            if (!tensor.wrong) right.push_back(tensor.name);
        std::string sentence = listed(unexplained) + (unexplained.size() > 1 ? " are" : " is") + " wrong, and no known mistake explains it";
        if (!right.empty()) sentence += "; " + listed(right) + (right.size() > 1 ? " are" : " is") + " right";
        if (!wrong_dv && verdict.dq.errors.clean() && verdict.dk.errors.clean())
            sentence += ", so P is: look at dP, D, dS and the product after it";
        findings.push_back({"unexplained", sentence + "."});
    }
    return findings;
}

std::string diagnose_gradients(const Problem& problem, const BackwardInputs& in, std::span<const float> o, std::span<const float> lse,
                               const ReferenceGradients& want, const ReferenceGradients& plain, const GradientResult& got) {
    std::string text;
    for (const Finding& finding : find_gradient_mistakes(problem, in, o, lse, want, plain, got))
        text += (text.empty() ? "" : "\n") + finding.sentence;
    return text;
}

std::vector<std::string> known_gradient_mistakes() {
    std::vector<std::string> names = {"accumulator-not-zeroed"};
    for (const Mistake& mistake : mistakes()) names.push_back(mistake.name);
    return names;
}

}  // namespace workbook
