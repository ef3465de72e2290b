// Which query tiles of which heads pass by a key tile on Hopper.
#pragma once

#include "arch/opaque.cuh"
#include "attention/config_wgmma.cuh"
#include "attention/key_range.cuh"
#include "attention/params_wgmma.cuh"
#include "backward/locate_key_tile.cuh"

namespace cupyflash {

/// All roles of a block take the same walk: for each head of the group, query tiles from first to
/// last, so that those with a diagonal come first.
template <WgmmaBackwardConfig config>
struct BackwardWalk {
  TileIndex tile;  // of keys
  Band band;       // of its sequence
  Range tiles;     // of queries
  int left;        // query tiles, with this one
  int head;        // of the queries
  int m;           // the query tile

  /// Found by each role for itself: what the producer has to keep would not fit into its registers.
  __device__ explicit BackwardWalk(const WgmmaBackwardParams& params)
      : tile(locate_key_tile<config>(params.common, opaque(blockIdx.x))),
        band(visible_band<config.window>(params.common.attention, tile.sequence)),
        tiles(tiles_of(
            band.transposed().seen_by_any({tile.first_row, tile.first_row + config.block_n}),
            config.block_m)),
        left((tiles.end - tiles.begin) * params.common.attention.group_size),
        head(tile.head * params.common.attention.group_size),
        m(tiles.begin) {}

  __device__ bool exists() const { return left > 0; }
  __device__ int first_query() const { return m * config.block_m; }
  /// Number of the (batch, head) pair.
  __device__ int64 pair(const WgmmaBackwardParams& params) const {
    return int64(tile.sequence.batch) * params.common.attention.num_heads + head;
  }

  /// Counter of the key tiles that have added to this query tile's dQ.
  __device__ int* turns(const WgmmaBackwardParams& params, int64 pair) const {
    return params.turns + pair * params.tiles + m;
  }
  /// Key tiles before this one that see the query tile. Blocks start in the order of their key
  /// tiles, so the one waited for is running or done.
  __device__ int own_turn() const {
    const int first_key = band.seen_by_any({first_query(), first_query() + config.block_m}).begin;
    return tile.first_row / config.block_n - first_key / config.block_n;
  }

  __device__ void advance() {
    --left;
    if (++m == tiles.end) {
      m = tiles.begin;
      ++head;
    }
  }
};

}  // namespace cupyflash
