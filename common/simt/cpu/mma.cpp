#include "simt/cpu/mma.hpp"

#include "simt/convert.hpp"

#include <bit>

namespace simt::cpu {
namespace {

template <class T>
float half_of(std::uint32_t pair, int which) {
    return to_float(std::bit_cast<T>(static_cast<std::uint16_t>(pair >> (16 * which))));
}

}  // namespace

template <class T>
void mma_m16n8k16(const std::array<MmaFragments*, 32>& lanes) {
    float A[16][16], B[16][8], D[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 4; ++e) {
            for (int which = 0; which < 2; ++which) A[g + 8 * (e % 2)][2 * t + which + 8 * (e / 2)] = half_of<T>(lanes[lane]->a[e], which);
            D[g + 8 * (e / 2)][2 * t + e % 2] = lanes[lane]->d[e];
        }
        for (int e = 0; e < 2; ++e)
            for (int which = 0; which < 2; ++which) B[2 * t + which + 8 * e][g] = half_of<T>(lanes[lane]->b[e], which);
    }
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) D[m][n] += A[m][k] * B[k][n];
    for (int lane = 0; lane < 32; ++lane)
        for (int e = 0; e < 4; ++e) lanes[lane]->d[e] = D[lane / 4 + 8 * (e / 2)][2 * (lane % 4) + e % 2];
}

template void mma_m16n8k16<__half>(const std::array<MmaFragments*, 32>& lanes);
template void mma_m16n8k16<__nv_bfloat16>(const std::array<MmaFragments*, 32>& lanes);

}  // namespace simt::cpu
