/// @file
/// How a run is printed: the table for people, JSON for programs.
#pragma once

#include "stage/run.hpp"

#include <string>

namespace workbook {

/// `digits` significant digits without an exponent: 0.01235, 12.35, 123456.
std::string significant(double value, int digits = 4);

/// 1234567 as "1,234,567".
std::string grouped(long long value);

/// What stands above the tables: stage, problem, inputs, device, what is predicted and what is checked. Ends with a newline.
std::string heading(const Stage& stage, const Setup& setup);

/// What stands above the table of forward variants: what they are compared with, what the columns are, and column_heads().
/// @param previous label of the result that O is compared with; empty: none
std::string forward_heading(const Setup& setup, const std::string& previous);

/// The same for backward variants, with where dO comes from, and O and LSE where they were given.
std::string backward_heading(const Setup& setup, const BackwardSetup& backward, const std::string& previous);

/// The two heading lines of the columns, with units, and a rule. At most 120 columns wide.
/// @param emulated the emulator's columns (traffic counted), else the GPU's (traffic predicted, time measured)
/// @param backward those of a backward variant
std::string column_heads(bool emulated, bool backward = false);

/// A variant's two lines, and below them what is wrong.
std::string row(const Report& report, DType dtype, bool emulated);

/// Traffic tensor by tensor: requested, predicted, sectors, and requested bytes a sector (32: each byte of it once; less: the
/// rest of the sector is wasted; more: several threads share it). Below it, for each kind of access to shared memory that
/// is counted, its wavefronts and how many there would be without bank conflicts.
std::string traffic_table(const Report& report);

/// One line: a JSON object. Sizes are bytes, times seconds, rates operations a second; what is not known is null.
/// Keys:
/// - stage, variant (id), name, direction ("fwd" or "bwd"), status ("ok", "wrong", "failed", "refused", "skipped"), reason
/// - batch, heads, kv_heads, seq, kv_seq, head_dim, dtype, causal, scale, layout, inputs
/// - device, emulated, compute_capability, shared_memory_per_block, schedule (emulated only)
/// - rows, checked_rows; o and lse: objects of max_abs, max_rel, rel_rms, nans, unwritten, infinities, allowed (on max_abs)
/// - dq, dk, dv: likewise, of a backward variant, whose o and lse are those that its gradients were made from; else null
/// - previous (what O or the gradients are compared with), previous_max_abs, previous_rel_rms
/// - flops (as papers count them), calculated_flops (what the kernels calculate); requested_read, requested_written, sectors_read,
/// sectors_written (counted, so emulated only; a sector is 32 bytes)
/// - shared: an object of {wavefronts, ideal} (passes over the banks of shared memory, and those without bank conflicts) by kind of
///   access (see simt::Ledger::shared(); emulated only)
/// - predicted_read, predicted_written, predicted_dram, as_predicted (counted equals predicted for every tensor)
/// - naive_requested (predicted for stage 01, or for standard backward), requested_ratio (this variant's over it)
/// - extra_memory, predicted_extra_memory; saved_memory, predicted_saved_memory (held from forward to backward beside Q, K, V and O;
///   null for a forward variant)
/// - predicted_on (key of the GPU), predicted_seconds, predicted_compute_seconds, predicted_dram_seconds, predicted_l1_seconds,
///   bound_by
/// - emulation_seconds (emulated only); seconds, repetitions, flops_per_second (GPU only); baseline, speedup
/// - tensors: an array of tensor, read, written, read_sectors, written_sectors, predicted_read, predicted_written
std::string json_line(const Report& report, const Problem& problem, const std::string& inputs, const Device& device,
                      simt::Schedule schedule, const Gpu& target);

/// One line: a JSON object of what was traced. Keys:
/// - stage, variant (id), name, direction, batch, heads, kv_heads, seq, kv_seq, head_dim, dtype, causal
/// - blocks: an array of kernel, block ([x, y, z]) and touched: in order, arrays of tensor, "read" or "write", first and last row. Rows are
///   counted over batches and heads: row i of head h of batch b is (b H + h) N + i.
std::string trace_line(const Report& report, const Problem& problem);

}  // namespace workbook
