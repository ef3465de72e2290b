// What a product computes: operands as the tensor cores find them in shared memory and registers.
#pragma once

#include "products.h"
#include "runtime.h"

namespace emulator {

constexpr int warp_rows = 16;
constexpr int most_columns = 256;

/// A warp's rows of a sum.
struct Sums {
  float at[warp_rows][most_columns];
};

/// The lanes' registers of the left operand.
struct Fragments {
  unsigned at[warp_size][4];
};

/// Adds to rows 16 * part ... of a product, or sets them.
void multiply(Sums& sums, const Operation& operation, const Fragments& fragments, int part);

}  // namespace emulator
