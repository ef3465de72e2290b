// What the Hopper kernel is told beyond ForwardParams. Mirrored by cupyflash/_cuda/config_wgmma.py.
#pragma once

#include "arch/tma.cuh"
#include "attention/params.cuh"

namespace cupyflash {

struct WgmmaForwardParams {
  ForwardParams common;
  TensorMap query;   // (b, h, sq, d)
  TensorMap key;     // (b, hk, seen keys, d): those that no query sees are not in it
  TensorMap value;   // (b, hk, seen keys, dv)
  const int* order;  // (rounds, blocks): query tiles of all heads, numbered; -1: no more
  int first_key;     // that it holds
  float exponent_factor;
};

}  // namespace cupyflash
