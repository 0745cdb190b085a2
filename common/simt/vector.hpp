/// @file
/// Accesses of several bytes at once, checked and charged in emulation like those of single elements.
#pragma once

#include "simt/simt.hpp"

#include <cstdint>
#include <cstring>

namespace simt {

/// Reads 16 bytes of global memory, as uint4 or float4. `from` is &view(...); it and the row's remainder hold 16 aligned bytes.
template <class V = uint4, class Address>
SIMT_DEVICE V load_global_16(Address from) {
    static_assert(sizeof(V) == 16);
#if SIMT_EMULATED
    V value;
    std::memcpy(&value, static_cast<const void*>(from.read(Address::per_bytes(16))), 16);
    return value;
#else
    return *reinterpret_cast<const V*>(from);
#endif
}

/// Writes 16 bytes to global memory, a uint4 or float4. `to` is &view(...); it and the row's remainder hold 16 aligned bytes.
template <class V, class Address>
SIMT_DEVICE void store_global_16(Address to, const V& value) {
    static_assert(sizeof(V) == 16);
#if SIMT_EMULATED
    std::memcpy(static_cast<void*>(to.write(Address::per_bytes(16))), &value, 16);
#else
    *reinterpret_cast<V*>(to) = value;
#endif
}

/// Writes 8 bytes to global memory, a uint2 or float2. `to` is &view(...); it and the row's remainder hold 8 aligned bytes.
template <class Address, class V>
SIMT_DEVICE void store_global_8(Address to, const V& value) {
    static_assert(sizeof(V) == 8);
#if SIMT_EMULATED
    std::memcpy(static_cast<void*>(to.write(Address::per_bytes(8))), &value, 8);
#else
    *reinterpret_cast<V*>(to) = value;
#endif
}

/// Writes 4 bytes to global memory: two elements of 16 bits. `to` is &view(...); it and the row's remainder hold 4 aligned bytes.
template <class Address>
SIMT_DEVICE void store_global_4(Address to, std::uint32_t value) {
#if SIMT_EMULATED
    std::memcpy(static_cast<void*>(to.write(Address::per_bytes(4))), &value, 4);
#else
    *reinterpret_cast<std::uint32_t*>(to) = value;
#endif
}

/// Reads 16 aligned bytes of shared memory, as uint4 or float4.
template <class V = uint4>
[[gnu::always_inline]] SIMT_DEVICE V load_shared_16(const void* from) {
    static_assert(sizeof(V) == 16);
#if SIMT_EMULATED
    cpu::block().charge_shared(SharedAccess::vector_load, from, 16);
    cpu::block().read_shared_vector("16-byte load", from, 16);
#endif
    return *static_cast<const V*>(from);
}

/// Reads 8 aligned bytes of shared memory, as float2 or uint2.
template <class V = float2>
[[gnu::always_inline]] SIMT_DEVICE V load_shared_8(const void* from) {
    static_assert(sizeof(V) == 8);
#if SIMT_EMULATED
    cpu::block().charge_shared(SharedAccess::vector_load, from, 8);
    cpu::block().read_shared_vector("8-byte load", from, 8);
#endif
    return *static_cast<const V*>(from);
}

/// Writes two floats, 8 aligned bytes, to shared memory.
[[gnu::always_inline]] SIMT_DEVICE void store_shared_8(float* to, const float2& value) {
#if SIMT_EMULATED
    cpu::block().charge_shared(SharedAccess::vector_store, to, 8);
    cpu::block().write_shared_vector("8-byte store", to, 8);
#endif
    *reinterpret_cast<float2*>(to) = value;
}

/// Writes 16 aligned bytes to shared memory, a uint4 or float4.
template <class V>
[[gnu::always_inline]] SIMT_DEVICE void store_shared_16(void* to, const V& value) {
    static_assert(sizeof(V) == 16);
#if SIMT_EMULATED
    cpu::block().charge_shared(SharedAccess::vector_store, to, 16);
    cpu::block().write_shared_vector("16-byte store", to, 16);
#endif
    *static_cast<V*>(to) = value;
}

/// Reads 4 aligned bytes of shared memory.
[[gnu::always_inline]] SIMT_DEVICE std::uint32_t load_shared_4(const void* from) {
#if SIMT_EMULATED
    cpu::block().charge_shared(SharedAccess::vector_load, from, 4);
    cpu::block().read_shared_vector("4-byte load", from, 4);
#endif
    return *static_cast<const std::uint32_t*>(from);
}

/// Writes 4 aligned bytes to shared memory.
[[gnu::always_inline]] SIMT_DEVICE void store_shared_4(void* to, std::uint32_t value) {
#if SIMT_EMULATED
    cpu::block().charge_shared(SharedAccess::vector_store, to, 4);
    cpu::block().write_shared_vector("4-byte store", to, 4);
#endif
    *static_cast<std::uint32_t*>(to) = value;
}

}  // namespace simt
