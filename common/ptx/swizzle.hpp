/// @file
/// How TMA and wgmma permute shared memory.
#pragma once

namespace ptx {

/// How 16-byte chunks change places within 2, 4 or 8 of them, by the number of their 128-byte line in shared memory: bits 4 to 6 of
/// the address (32 bytes: bit 4; 64: bits 4 and 5) are XORed with the bits from 7 on. The memory must begin at a multiple of
/// 256, 512 or 1024 bytes. So a column of eight chunks lies in different banks.
enum class Swizzle { none, bytes_32, bytes_64, bytes_128 };

/// Bytes of a row that a swizzle permutes among themselves; 0 for none.
constexpr int span_of(Swizzle swizzle) { return swizzle == Swizzle::none ? 0 : 16 << static_cast<int>(swizzle); }

}  // namespace ptx
