// Operands of products: matrix descriptors, canonical layouts, register fragments (PTX ISA,
// "asynchronous warpgroup level matrix").
#include "multiply.h"

#include <vector>

#include "formats.h"
#include "shared.h"

namespace emulator {
namespace {

constexpr int k_bytes = 32;
constexpr int chunk_bytes = 16;
constexpr int most_k = 32;

/// A descriptor's fields; addresses and offsets are in units of 16 bytes there.
struct Descriptor {
  unsigned start, leading, stride;
  unsigned swizzle_bytes;  // 16: none

  explicit Descriptor(uint64_t bits)
      : start(unsigned(bits & 0x3fff) << 4),
        leading(unsigned(bits >> 16 & 0x3fff) << 4),
        stride(unsigned(bits >> 32 & 0x3fff) << 4) {
    constexpr unsigned bytes_of_mode[4] = {16, 128, 64, 32};
    swizzle_bytes = bytes_of_mode[bits >> 62];
    if ((bits >> 49 & 7) != 0) {
      fail("descriptors with a base offset are not emulated, (base offset)", bits >> 49 & 7);
    }
  }

  /// Byte `byte` of k in row `row` (of a, or column of b), where k runs through neighbours.
  unsigned along_k(int row, int byte) const {
    const unsigned base = start + row / 8 * stride + row % 8 * swizzle_bytes;
    if (swizzle_bytes == chunk_bytes) {
      return base + byte / chunk_bytes * leading + byte % chunk_bytes;
    }
    return swizzled(base + byte);
  }

  /// Byte `byte` of the other axis at `k`, where the other axis runs through neighbours.
  unsigned along_other(int byte, int k) const {
    const unsigned atom = byte / swizzle_bytes, within = byte % swizzle_bytes;
    const bool plain = swizzle_bytes == chunk_bytes;
    const unsigned to_next_atom = plain ? stride : leading,
                   to_next_eight = plain ? leading : stride;
    return swizzled(start + atom * to_next_atom + within + k / 8 * to_next_eight +
                    k % 8 * swizzle_bytes);
  }

 private:
  /// The permutation takes bits 7 to 9 of the address and changes bits 4 to 6, or fewer.
  unsigned swizzled(unsigned address) const {
    return address ^ (address >> 7 & (swizzle_bytes / chunk_bytes - 1)) << 4;
  }
};

float decode_half(unsigned short bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 16);
    for (int each = 0; each < int(all.size()); ++each) {
      all[each] = from_half(static_cast<unsigned short>(each));
    }
    return all;
  }();
  return values[bits];
}

int bytes_of(Format format) { return format == Format::e4m3 ? 1 : 2; }

float decode(Format format, const unsigned char* bytes) {
  if (format == Format::e4m3) {
    return from_e4m3(*bytes);
  }
  unsigned short bits;
  memcpy(&bits, bytes, sizeof(bits));
  return format == Format::half ? decode_half(bits) : from_bfloat16(bits);
}

float element(const Operation& operation, const Descriptor& matrix, bool transposed, int row,
              int k) {
  const int bytes = bytes_of(operation.format);
  const unsigned address =
      transposed ? matrix.along_other(row * bytes, k) : matrix.along_k(row, k * bytes);
  return decode(operation.format, shared_at(address, bytes));
}

/// Shared memory of an operand must have been written by copies, or fenced.
void check_source(const Operation& operation, const Descriptor& matrix, bool transposed, int rows,
                  int depth) {
  const int in_chunk = chunk_bytes / bytes_of(operation.format);
  for (int row = 0; row < rows; row += transposed ? in_chunk : 1) {
    for (int k = 0; k < depth; k += transposed ? 1 : in_chunk) {
      const int bytes = bytes_of(operation.format);
      const unsigned address =
          transposed ? matrix.along_other(row * bytes, k) : matrix.along_k(row, k * bytes);
      shared_range(address, chunk_bytes, chunk_bytes);
      check_asynchronous_read(address, chunk_bytes);
    }
  }
}

/// Element k of a lane's row in its registers: pairs (16 bit) or fours (8 bit), then the row 8
/// further on, then k further on.
float of_fragments(const Operation& operation, const Fragments& fragments, int row, int k) {
  const int bytes = bytes_of(operation.format), in_word = 4 / bytes;
  const int half = k / (4 * in_word), word = half * 2 + row / 8;
  const int of_lane = row % 8 * 4 + k % (4 * in_word) / in_word;
  const auto* word_bytes = reinterpret_cast<const unsigned char*>(&fragments.at[of_lane][word]);
  return decode(operation.format, word_bytes + k % in_word * bytes);
}

}  // namespace

void multiply(Sums& sums, const Operation& operation, const Fragments& fragments, int part) {
  const int depth = k_bytes / bytes_of(operation.format);
  const Descriptor a(operation.a), b(operation.b);
  static float left[warp_rows][most_k], right[most_k][most_columns];
  if (!operation.a_in_registers) {
    check_source(operation, a, operation.a_transposed, warp_rows * (part + 1), depth);
  }
  check_source(operation, b, operation.b_transposed, operation.n, depth);
  for (int row = 0; row < warp_rows; ++row) {
    for (int k = 0; k < depth; ++k) {
      left[row][k] = operation.a_in_registers
                         ? of_fragments(operation, fragments, row, k)
                         : element(operation, a, operation.a_transposed, part * warp_rows + row, k);
    }
  }
  for (int k = 0; k < depth; ++k) {
    for (int col = 0; col < operation.n; ++col) {
      right[k][col] = element(operation, b, operation.b_transposed, col, k);
    }
  }
  for (int row = 0; row < warp_rows; ++row) {
    float* sum = sums.at[row];
    if (!operation.accumulate) {
      std::fill(sum, sum + operation.n, 0.0f);
    }
    for (int k = 0; k < depth; ++k) {
      const float factor = left[row][k];
      for (int col = 0; col < operation.n; ++col) {
        sum[col] += factor * right[k][col];
      }
    }
  }
}

}  // namespace emulator
