#include "stage/data.hpp"

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>

namespace workbook {
namespace {

/// Copies (B, H, N, d) from one set of strides to another, row by row.
void reorder(const std::byte* from, const Strides& from_strides, std::byte* to, const Strides& to_strides, int batch, int heads, int rows,
             int dim, std::size_t element) {
    for (int b = 0; b < batch; ++b)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < rows; ++i) {
                const long long source = b * from_strides[0] + h * from_strides[1] + i * from_strides[2];
                const long long target = b * to_strides[0] + h * to_strides[1] + i * to_strides[2];
                std::memcpy(to + target * element, from + source * element, dim * element);
            }
}

/// Files hold (B, H, N, d) packed whatever the layout in memory is, and whether or not a variant keeps pages.
Problem as_filed(Problem problem) {
    problem.layout = Layout::bhnd;
    problem.page_size = Problem{}.page_size;
    return problem;
}

std::string shape_text(const std::vector<long long>& shape) {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

const HostTensor& tensor_of(const TensorFile& file, const std::string& path, const char* name, std::size_t dims, const char* dims_text) {
    const auto found = file.tensors.find(name);
    if (found == file.tensors.end()) {
        std::string have;
        for (const auto& [other, tensor] : file.tensors) have += (have.empty() ? "" : ", ") + other;
        throw FileError(path + ": tensor " + name + " is missing; the file holds " + (have.empty() ? "no tensors" : have));
    }
    if (found->second.shape.size() != dims) {
        throw FileError(path + ": tensor " + name + " has shape " + shape_text(found->second.shape) + "; " + dims_text + " is accepted");
    }
    return found->second;
}

constexpr std::uint64_t hash_of_nothing = 14695981039346656037ull;

/// FNV-1a, 64 bit (Fowler, Noll, Vo): enough to notice that two files hold different numbers.
std::uint64_t hash(std::uint64_t state, const std::vector<std::byte>& bytes) {
    for (const std::byte b : bytes) state = (state ^ static_cast<std::uint64_t>(b)) * 1099511628211ull;
    return state;
}

std::string hash_text(std::uint64_t state) {
    char text[32];
    std::snprintf(text, sizeof text, "fnv1a=%016llx", static_cast<unsigned long long>(state));
    return text;
}

/// cu_seqlens_q or cu_seqlens_k of a file; empty where it has none.
std::vector<int> cu_seqlens_of(const TensorFile& file, const std::string& path, const char* name) {
    if (const auto other = file.tensors.find(name); other != file.tensors.end())
        throw FileError(path + ": tensor " + name + " is " + workbook::name(other->second.dtype) + "; I32 is accepted");
    const auto found = file.integers.find(name);
    if (found == file.integers.end()) return {};
    const IntTensor& tensor = found->second;
    if (tensor.shape.size() != 1 || tensor.values.empty())
        throw FileError(path + ": tensor " + name + " has shape " + shape_text(tensor.shape) + "; (sequences + 1) is accepted");
    return {tensor.values.begin(), tensor.values.end()};
}

/// What two runs must agree on to be comparable. The layout is not part of it: the numbers are the same.
std::string identity_of(const Inputs& inputs) {
    Problem problem = as_filed(inputs.problem);
    std::string sequences;  // describe() has their lengths in short
    if (problem.packed()) {
        std::uint64_t state = hash_of_nothing;
        for (const std::vector<int>* list : {&problem.cu_seqlens_q, &problem.cu_seqlens_k}) {
            const auto* bytes = reinterpret_cast<const std::byte*>(list->data());
            state = hash(state, {bytes, bytes + list->size() * sizeof(int)});
        }
        sequences = " cu_seqlens: " + hash_text(state);
    }
    char scale[32];
    std::snprintf(scale, sizeof scale, "%.9g", problem.scale());
    problem.softmax_scale.reset();
    return describe(problem) + sequences + " scale=" + scale + " inputs: " + inputs.identity;
}

}  // namespace

Problem problem_of(const Options& options, const TensorFile& file) {
    const std::string path = options.input->string();
    const char* four = "(B, H, N, d)";
    const HostTensor& q = tensor_of(file, path, "q", 4, four);
    const HostTensor& k = tensor_of(file, path, "k", 4, four);
    const HostTensor& v = tensor_of(file, path, "v", 4, four);
    const auto mismatch = [&](const std::string& what, const char* accepted) { throw FileError(path + ": " + what + "; " + accepted); };
    if (k.shape != v.shape) {
        mismatch("tensor k has shape " + shape_text(k.shape) + " and v " + shape_text(v.shape), "one shape for both is accepted");
    }
    if (q.shape[0] != k.shape[0]) {
        mismatch("tensor q has B=" + std::to_string(q.shape[0]) + " and k B=" + std::to_string(k.shape[0]), "one batch size is accepted");
    }
    if (q.shape[3] != k.shape[3]) {
        mismatch("tensor q has d=" + std::to_string(q.shape[3]) + " and k d=" + std::to_string(k.shape[3]),
                 "one head dimension is accepted");
    }
    if (q.dtype != k.dtype || q.dtype != v.dtype) {
        mismatch(std::string("tensor q is ") + name(q.dtype) + ", k " + name(k.dtype) + " and v " + name(v.dtype),
                 "one type for all is accepted");
    }
    for (const HostTensor* tensor : {&q, &k})
        for (const long long extent : tensor->shape)
            if (extent < 1 || extent > std::numeric_limits<int>::max())
                mismatch(std::string("tensor ") + (tensor == &q ? "q" : "k") + " has shape " + shape_text(tensor->shape),
                         "1 to 2147483647 in each dimension are accepted");

    Problem problem = options.problem(q.dtype);
    if (problem.dtype != q.dtype) {
        throw InvalidArgument(
            std::string("--dtype=") + name(problem.dtype) + ": the tensors of " + path + " are " + name(q.dtype) +
            " and are not converted, because rounding them is a choice that belongs to whoever wrote them; leave the option out");
    }
    const auto take = [&](const char* option, const std::optional<int>& given, long long extent, int& field) {
        if (given && *given != extent) {
            throw InvalidArgument(std::string(option) + "=" + std::to_string(*given) + " contradicts " + path + ", where it is " +
                                  std::to_string(extent) + "; leave the option out");
        }
        field = static_cast<int>(extent);
    };
    take("--batch", options.batch, q.shape[0], problem.batch);
    take("--heads", options.heads, q.shape[1], problem.heads);
    take("--kv-heads", options.kv_heads, k.shape[1], problem.kv_heads);
    take("--seq", options.seq, q.shape[2], problem.seq);
    take("--kv-seq", options.kv_seq, k.shape[2], problem.kv_seq);
    take("--head-dim", options.head_dim, q.shape[3], problem.head_dim);
    const auto take_list = [&](const char* name, const std::optional<std::vector<int>>& given, std::vector<int>& field) {
        const std::vector<int> filed = cu_seqlens_of(file, path, name);
        if (given && !filed.empty() && *given != filed)
            throw InvalidArgument(std::string(name) + " of the options contradicts that of " + path + "; leave the option out");
        field = given ? *given : filed;
    };
    take_list("cu_seqlens_q", options.cu_seqlens_q, problem.cu_seqlens_q);
    take_list("cu_seqlens_k", options.cu_seqlens_k, problem.cu_seqlens_k);
    return problem;
}

std::string origin_of(const Options& options) {
    if (options.input) return "q, k, v of " + options.input->string();
    return std::string(name(options.random_dist())) + ", seed " + std::to_string(options.random_seed());
}

Inputs random_inputs(const Problem& problem, const Options& options) {
    const std::uint64_t seed = options.random_seed();
    const Distribution dist = options.random_dist();
    Inputs inputs;
    inputs.problem = problem;
    inputs.identity = std::string(name(dist)) + " seed=" + std::to_string(seed);

    const std::size_t element = size_of(problem.dtype);
    const auto fill = [&](DeviceBuffer& buffer, std::vector<float>& host, Stream stream, int heads, int rows, const Strides& strides,
                          long long elements) {
        buffer = DeviceBuffer(elements * element);
        fill_random(buffer, problem.dtype, problem.batch, heads, rows, problem.head_dim, strides, seed, stream, dist);
        HostTensor tensor{problem.dtype, {elements}, std::vector<std::byte>(elements * element)};
        buffer.download(tensor.bytes.data(), tensor.bytes.size());
        host = tensor.to_float();
    };
    fill(inputs.q, inputs.q_host, Stream::q, problem.heads, problem.seq, problem.q_strides(), problem.q_elements());
    fill(inputs.k, inputs.k_host, Stream::k, problem.kv_heads, problem.kv_seq, problem.kv_strides(), problem.kv_elements());
    fill(inputs.v, inputs.v_host, Stream::v, problem.kv_heads, problem.kv_seq, problem.kv_strides(), problem.kv_elements());
    return inputs;
}

void upload_rounded(DeviceBuffer& buffer, DType type, std::vector<float>& values) {
    const HostTensor rounded = HostTensor::from_float(type, {static_cast<long long>(values.size())}, values);
    buffer.upload(rounded.bytes.data(), rounded.bytes.size());
    values = rounded.to_float();
}

void upload_rounded(Inputs& inputs) {
    upload_rounded(inputs.q, inputs.problem.dtype, inputs.q_host);
    upload_rounded(inputs.k, inputs.problem.dtype, inputs.k_host);
    upload_rounded(inputs.v, inputs.problem.dtype, inputs.v_host);
}

Inputs file_inputs(const Problem& problem, const TensorFile& file) {
    const HostTensor& q = file.tensors.at("q");
    const HostTensor& k = file.tensors.at("k");
    const HostTensor& v = file.tensors.at("v");
    Inputs inputs;
    inputs.problem = problem;
    inputs.identity = hash_text(hash(hash(hash(hash_of_nothing, q.bytes), k.bytes), v.bytes));

    const std::size_t element = size_of(problem.dtype);
    const auto load = [&](const HostTensor& from, DeviceBuffer& buffer, std::vector<float>& host, const Strides& filed,
                          const Strides& strides) {
        HostTensor tensor{from.dtype, from.shape, std::vector<std::byte>(from.bytes.size())};
        reorder(from.bytes.data(), filed, tensor.bytes.data(), strides, problem.batch, static_cast<int>(from.shape[1]),
                static_cast<int>(from.shape[2]), problem.head_dim, element);
        buffer = DeviceBuffer(tensor.bytes.size());
        buffer.upload(tensor.bytes.data(), tensor.bytes.size());
        host = tensor.to_float();
    };
    const Problem filed = as_filed(problem);
    load(q, inputs.q, inputs.q_host, filed.q_strides(), problem.q_strides());
    load(k, inputs.k, inputs.k_host, filed.kv_strides(), problem.kv_strides());
    load(v, inputs.v, inputs.v_host, filed.kv_strides(), problem.kv_strides());
    return inputs;
}

OutputGradient output_gradient(const Problem& problem, const Options& options, const TensorFile* file) {
    OutputGradient out;
    const std::size_t element = size_of(problem.dtype);
    out.d_o = DeviceBuffer(problem.q_elements() * element);
    HostTensor tensor{problem.dtype, {problem.q_elements()}, std::vector<std::byte>(out.d_o.size())};
    if (file && file->tensors.count("d_o")) {
        const std::string path = options.input->string();
        const HostTensor& filed = tensor_of(*file, path, "d_o", 4, "(B, Hq, Nq, d), as q has it");
        const std::vector<long long> shape = {problem.batch, problem.heads, problem.seq, problem.head_dim};
        if (filed.shape != shape || filed.dtype != problem.dtype) {
            throw FileError(path + ": tensor d_o is " + name(filed.dtype) + " " + shape_text(filed.shape) + "; " + name(problem.dtype) +
                            " " + shape_text(shape) + ", as q, is accepted");
        }
        reorder(filed.bytes.data(), as_filed(problem).q_strides(), tensor.bytes.data(), problem.q_strides(), problem.batch, problem.heads,
                problem.seq, problem.head_dim, element);
        out.d_o.upload(tensor.bytes.data(), tensor.bytes.size());
        out.origin = "d_o of " + path + " (" + hash_text(hash(hash_of_nothing, filed.bytes)) + ")";
    } else {
        fill_random(out.d_o, problem.dtype, problem.batch, problem.heads, problem.seq, problem.head_dim, problem.q_strides(),
                    options.random_seed(), Stream::d_o, options.random_dist());
        out.d_o.download(tensor.bytes.data(), tensor.bytes.size());
        out.origin = std::string(name(options.random_dist())) + ", seed " + std::to_string(options.random_seed());
    }
    out.d_o_host = tensor.to_float();
    return out;
}

namespace {

/// Packed in the problem's layout, as tensors of a file have it, and back.
std::vector<float> reordered(const std::vector<float>& values, const Problem& p, int heads, int rows, const Strides& from,
                             const Strides& to) {
    std::vector<float> out(values.size());
    reorder(reinterpret_cast<const std::byte*>(values.data()), from, reinterpret_cast<std::byte*>(out.data()), to, p.batch, heads, rows,
            p.head_dim, sizeof(float));
    return out;
}

/// A tensor of results: its name in files, its shape and where its values are.
struct Filed {
    const char* name;
    int heads, rows;
    Strides strides, filed_strides;
};

Filed of_queries(const char* name, const Problem& p) { return {name, p.heads, p.seq, p.q_strides(), as_filed(p).q_strides()}; }
Filed of_keys(const char* name, const Problem& p) { return {name, p.kv_heads, p.kv_seq, p.kv_strides(), as_filed(p).kv_strides()}; }

void put(TensorFile& file, const Problem& p, const Filed& as, const std::vector<float>& values) {
    file.tensors[as.name] = HostTensor::from_float(p.dtype, {p.batch, as.heads, as.rows, p.head_dim},
                                                   reordered(values, p, as.heads, as.rows, as.strides, as.filed_strides));
}

/// @throws FileError when the tensor is missing, or has another shape or type
std::vector<float> take(const TensorFile& file, const std::string& where, const Problem& p, const Filed& as, const char* dims) {
    const HostTensor& tensor = tensor_of(file, where, as.name, 4, dims);
    const std::vector<long long> shape = {p.batch, as.heads, as.rows, p.head_dim};
    if (tensor.shape != shape || tensor.dtype != p.dtype) {
        throw FileError(where + ": " + as.name + " is " + name(tensor.dtype) + " " + shape_text(tensor.shape) + "; " + name(p.dtype) + " " +
                        shape_text(shape) + " is needed");
    }
    return reordered(tensor.to_float(), p, as.heads, as.rows, as.filed_strides, as.strides);
}

void put_time(TensorFile& file, const char* key, const std::optional<double>& seconds) {
    if (!seconds) return;
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", 1e3 * *seconds);
    file.metadata[key] = text;
}

std::optional<double> take_time(const TensorFile& file, const std::string& where, const char* key) {
    const auto time = file.metadata.find(key);
    if (time == file.metadata.end()) return std::nullopt;
    double ms = 0;
    const char* last = time->second.data() + time->second.size();
    const auto [end, error] = std::from_chars(time->second.data(), last, ms);
    if (error != std::errc() || end != last || !(ms > 0)) {
        throw FileError(where + ": metadata " + key + " is '" + time->second + "'; a number above 0 is accepted");
    }
    return 1e-3 * ms;
}

}  // namespace

void write_results(const std::filesystem::path& path, const std::string& stage, const Inputs& inputs, const std::string& d_o,
                   const Written& written) {
    const Problem& p = inputs.problem;
    TensorFile file;
    file.metadata = {{"stage", stage}, {"problem", identity_of(inputs)}};
    if (written.forward) {
        put(file, p, of_queries("o", p), written.forward->result.o);
        file.tensors["lse"] = HostTensor::from_float(DType::f32, {p.batch, p.heads, p.seq}, written.forward->result.lse);
        file.metadata["variant"] = written.forward->label;
        file.metadata["device"] = written.forward->device;
        put_time(file, "time_ms", written.forward->seconds);
    }
    if (written.backward) {
        put(file, p, of_queries("dq", p), written.backward->result.dq);
        put(file, p, of_keys("dk", p), written.backward->result.dk);
        put(file, p, of_keys("dv", p), written.backward->result.dv);
        file.metadata["backward_variant"] = written.backward->label;
        file.metadata["device"] = written.backward->device;
        file.metadata["d_o"] = d_o;
        put_time(file, "backward_time_ms", written.backward->seconds);
    }
    write_safetensors(path, file);
}

Written read_results(const std::filesystem::path& path, const Inputs& inputs, const std::string& d_o) {
    const Problem& p = inputs.problem;
    const std::string where = path.string();
    const TensorFile file = read_safetensors(path);
    const auto metadata = [&](const char* key) {
        const auto found = file.metadata.find(key);
        if (found == file.metadata.end()) {
            throw FileError(where + ": metadata '" + key + "' is missing; a file that --output of an earlier stage wrote is accepted");
        }
        return found->second;
    };
    const std::string theirs = metadata("problem"), ours = identity_of(inputs);
    if (theirs != ours) throw FileError(where + " is the result of another problem: it has '" + theirs + "', this run has '" + ours + "'");

    Written result;
    if (!file.metadata.count("backward_variant") || file.tensors.count("o")) {
        Previous previous;
        previous.label = metadata("variant");
        previous.device = metadata("device");
        previous.result.o = take(file, where, p, of_queries("o", p), "(B, Hq, Nq, d)");
        const HostTensor& lse = tensor_of(file, where, "lse", 3, "(B, Hq, Nq)");
        const std::vector<long long> lse_shape = {p.batch, p.heads, p.seq};
        if (lse.shape != lse_shape || lse.dtype != DType::f32) {
            throw FileError(where + ": lse is " + name(lse.dtype) + " " + shape_text(lse.shape) + "; f32 " + shape_text(lse_shape) +
                            " is needed");
        }
        previous.result.lse = lse.to_float();
        previous.seconds = take_time(file, where, "time_ms");
        result.forward = std::move(previous);
    }
    if (file.metadata.count("backward_variant") && !d_o.empty()) {
        if (metadata("d_o") != d_o) {
            throw FileError(where + " holds gradients of another dO: it has '" + metadata("d_o") + "', this run has '" + d_o + "'");
        }
        PreviousGradients previous;
        previous.label = metadata("backward_variant");
        previous.device = metadata("device");
        previous.result.dq = take(file, where, p, of_queries("dq", p), "(B, Hq, Nq, d)");
        previous.result.dk = take(file, where, p, of_keys("dk", p), "(B, Hkv, Nkv, d)");
        previous.result.dv = take(file, where, p, of_keys("dv", p), "(B, Hkv, Nkv, d)");
        previous.seconds = take_time(file, where, "backward_time_ms");
        result.backward = std::move(previous);
    }
    return result;
}

}  // namespace workbook
