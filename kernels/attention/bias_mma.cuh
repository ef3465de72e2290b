// The additive bias on its way to the fragments of mma.sync: tiles of it, as they are stored, pass
// through shared memory like the keys.
#pragma once

#include "arch/copy_async.cuh"
#include "arch/ldmatrix.cuh"
#include "arch/pack.cuh"
#include "attention/score.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/operand_mma.cuh"

namespace cupyflash {

/// rows x cols elements of two bytes, or of four (float64 is narrowed). A row of queries, whichever
/// way the scores lie.
template <int rows_, int cols_, DataType dtype_>
struct BiasTile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr DataType dtype = dtype_;
  static constexpr bool narrow = sizeof(Element<dtype>) == 2;
  static constexpr int itemsize = narrow ? 2 : 4;
  using Storage = SwizzledTile<rows, ceil_div(cols, 32) * 16 * itemsize>;
  static constexpr int bytes = Storage::bytes;

  Storage storage;

  __device__ unsigned at(int row, int col) const {
    return storage.chunk(row, col * itemsize >> 4) + (col * itemsize & 15);
  }
};

/// Loads tiles, `width` elements at a time; addresses and the row's length are multiples of it.
template <class Tile, int threads, int width>
struct BiasLoader {
  using Source = Element<Tile::dtype>;
  static constexpr int units = Tile::cols / width;
  static_assert(Tile::cols % width == 0 && width * sizeof(Source) <= 16);

  /// Elements that do not exist become 0 and are not read.
  __device__ static void load(const Tile& tile, const BiasPlane<float, Source>& plane,
                              int first_row, int first_col) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int base = 0; base < Tile::rows * units; base += threads) {
      const bool aligned = threads % units == 0;
      const int row = aligned ? thread / units + base / units : (base + thread) / units;
      const int col = (aligned ? thread % units : (base + thread) % units) * width;
      if (Tile::rows * units % threads != 0 && row >= Tile::rows) break;
      const int64 at = plane.strides.at(first_row + row, width > 1 ? 0 : first_col + col);
      copy(tile.at(row, col), plane.first + at + (width > 1 ? first_col + col : 0),
           plane.strides.contains(first_row + row, first_col + col));
    }
  }

 private:
  __device__ static void copy(unsigned target, const Source* source, bool exists) {
    constexpr int bytes = width * sizeof(Source);
    if constexpr (Tile::dtype == DataType::float64) {
      store_shared(target, exists ? __float_as_uint(finite_as<float>(*source)) : 0u);
    } else if constexpr (bytes == 2) {
      store_shared(target, exists ? source->bits : static_cast<unsigned short>(0));
    } else {
      copy_async_to<bytes>(target, source, exists);
    }
  }
};

/// Reads the bias of 16 x 16 scores, rows of which are queries, or keys where `transposed`: pieces
/// (i, 2 s) and (i, 2 s + 1) of a fragment that starts at the given query and key of the tile.
template <class Tile, bool transposed>
class BiasReader {
 public:
  __device__ BiasReader(const Tile& tile, int first_query, int first_key)
      : tile_(tile),
        walk_(transposed ? WalkOf<Storage>::right(tile.storage, first_query)
                         : WalkOf<Storage>::left(tile.storage, first_query)),
        first_query_(first_query),
        first_key_(first_key) {}

  __device__ void read(float (&bias)[2][4], int i, int s) {
    const int query = transposed ? s * 16 : i * 16, key = transposed ? i * 16 : s * 16;
    if constexpr (Tile::narrow) {
      unsigned pairs[4];
      const unsigned address = walk_.at((first_key_ + key) / 16, query);
      if constexpr (transposed) {
        load_matrices_transposed(pairs, address);
      } else {
        load_matrices(pairs, address);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        lowest_pair_ = minimum_pair<Tile::dtype>(lowest_pair_, pairs[e]);
        const float2 two = unpack_pair<Tile::dtype>(pairs[e]);
        bias[e / 2][e % 2 * 2] = two.x;
        bias[e / 2][e % 2 * 2 + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // Piece e / 4, element e % 4.
        const int row = e % 4 / 2 * 8 + MmaLane::row(), col = e / 4 * 8 + e % 2 + MmaLane::col();
        bias[e / 4][e % 4] =
            load_shared_float(tile_.at(first_query_ + query + (transposed ? col : row),
                                       first_key_ + key + (transposed ? row : col)));
        lowest_ = fminf(lowest_, bias[e / 4][e % 4]);
      }
    }
  }

  /// Whether one of the elements read so far is -inf, for this lane.
  __device__ bool hides() const {
    if constexpr (Tile::narrow) {
      const float2 lowest = unpack_pair<Tile::dtype>(lowest_pair_);
      return fminf(lowest.x, lowest.y) == -infinity<float>;
    } else {
      return lowest_ == -infinity<float>;
    }
  }

 private:
  using Storage = typename Tile::Storage;
  unsigned lowest_pair_ = 0;
  float lowest_ = 0.0f;
  Tile tile_;
  ColumnWalk<Storage> walk_;
  int first_query_;
  int first_key_;
};

}  // namespace cupyflash
