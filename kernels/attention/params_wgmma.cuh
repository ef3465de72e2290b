// What the Hopper kernel is told beyond ForwardParams. Mirrored by cupyflash/_cuda/config_wgmma.py.
#pragma once

#include "arch/tma.cuh"
#include "attention/params.cuh"

namespace cupyflash {

struct WgmmaForwardParams {
  ForwardParams common;
  const int* order;       // (rounds, blocks), windows only: see tile_order.py
  int first_key;          // that any query sees: row 0 of the maps of key and value
  float exponent_factor;  // from what the products are to exponents of 2
  TensorMap query_map;    // (b, h, sq, d)
  TensorMap key_map;      // (b, hk, keys that are seen, d)
  TensorMap value_map;    // (b, hk, keys that are seen, dv)
};

}  // namespace cupyflash
