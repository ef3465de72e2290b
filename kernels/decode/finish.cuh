// From a row's sums, relative to a power of 2, to its output and lse.
#pragma once

#include "arch/exponential.cuh"
#include "attention/cache_entry.cuh"
#include "attention/config_decode.cuh"
#include "attention/descale.cuh"
#include "attention/softmax_mma.cuh"

namespace cupyflash {

/// What there is to know of a row beside its unnormalised output: probabilities are
/// exp2(exponent - shift), their sum is `sum`.
struct RowStatistics {
  float shift;
  float sum;
};

/// What a row's unnormalised output is multiplied by, and its lse.
struct RowResult {
  float factor;
  float lse;
};

/// The sink of a row is one more logit. A row that has seen nothing has shift `none` and sum 0.
template <DecodeConfig config>
__device__ inline RowResult finish_row(const CacheParams& params, const CacheEntry& entry,
                                       RowStatistics row, int head) {
  constexpr float none = MmaSoftmax<1, false>::none;
  constexpr float log2e = MmaSoftmax<1, false>::log2e;
  constexpr float log_of_2 = 0.6931471805599453f;
  float factor = 1.0f;
  if constexpr (config.float8_keys()) {
    factor = descaled_value<float>(params, entry.sequence(params.attention), head);
  }
  if constexpr (config.sinks) {
    const float sink = params.sinks[head * params.attention.sinks_stride] * log2e;
    const float shift = fmaxf(fmaxf(row.shift, sink), none);
    const float correction = exp2_hardware(row.shift - shift);
    row.sum = fmaf(row.sum, correction, exp2_hardware(sink - shift));
    row.shift = shift;
    factor *= correction;
  }
  if (row.sum == 0.0f) return {0.0f, -infinity<float>};
  return {factor / row.sum, fmaf(row.shift, log_of_2, logf(row.sum))};
}

__device__ inline void write_lse(const CacheParams& params, int entry, int head, int query,
                                 float lse) {
  if (params.lse == nullptr) return;
  const Attention& attention = params.attention;
  params.lse[(int64(entry) * attention.num_heads + head) * attention.seqlen_q + query] = lse;
}

}  // namespace cupyflash
