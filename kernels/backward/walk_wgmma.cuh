// Which key tiles a thread block takes on Hopper, and which query tiles pass by each.
#pragma once

#include "arch/opaque.cuh"
#include "attention/config_wgmma.cuh"
#include "attention/key_range.cuh"
#include "attention/params_wgmma.cuh"
#include "backward/locate_key_tile.cuh"

namespace cupyflash {

/// The key tile that has the place, in the order of turns (turns_wgmma.cuh): of each of some heads
/// one, then of each the next one; with a band from the last to the first.
template <WgmmaBackwardConfig config>
__device__ TileIndex key_tile_in_turn(const BackwardParams& common, int place) {
  // Heads at a time, at least: without a band blocks of a head use the same queries anyway; with
  // one those of neighbours are some tiles apart, and what lies between of both should stay.
  constexpr int dim = 3 * config.head_dim + config.head_dim_v;
  const Attention& attention = common.attention;
  const int heads = attention.num_heads / attention.group_size;
  const int pairs = heads * attention.batch;
  const int tiles = ceil_div(attention.seqlen_k, config.block_n);
  const int cached = heads_in_half_cache(attention.seqlen_q, dim * attention.group_size);
  const int least = !config.descends() ? 8 : cached > 0 ? 2 : 1;
  const int number = grouped_order(place, tiles, pairs, minimum(pairs, maximum(least, cached)));
  TileIndex tile = locate_tile<false, true, true, config.block_n>(common, number, heads);
  if (config.descends()) tile.first_row = (tiles - 1) * config.block_n - tile.first_row;
  return tile;
}

/// The key tile at a place in the order of all. It is found again, instead of being kept.
template <WgmmaBackwardConfig config>
__device__ TileIndex key_tile_at(const WgmmaBackwardParams& params, int place) {
  const BackwardParams& common = params.common;
  place = opaque(place);
  if constexpr (config.persistent && config.window) {
    const int heads = common.attention.num_heads / common.attention.group_size;
    const int number = config.whole_heads ? place : params.order[place];
    return locate_tile<false, false, true, config.block_n>(common, number, heads);
  } else if constexpr (config.deterministic) {
    return key_tile_in_turn<config>(common, place);
  } else {
    return locate_key_tile<config>(common, place);
  }
}

/// Of one head.
template <WgmmaBackwardConfig config>
__device__ int key_tile_count(const WgmmaBackwardParams& params) {
  return ceil_div(params.common.attention.seqlen_k, config.block_n);
}

/// The place of this block's first key tile.
template <WgmmaBackwardConfig config>
__device__ int first_place(const WgmmaBackwardParams& params) {
  return blockIdx.x * (config.whole_heads ? key_tile_count<config>(params) : 1);
}

/// That of the one after `place`; -1: there is none.
template <WgmmaBackwardConfig config>
__device__ int next_place(const WgmmaBackwardParams& params, int place) {
  if constexpr (!config.persistent) return -1;
  const Attention& attention = params.common.attention;
  const int tiles = key_tile_count<config>(params);
  if constexpr (config.whole_heads) {
    if (++place % tiles == 0) place += (gridDim.x - 1) * tiles;
  } else {
    place += gridDim.x;
    if constexpr (config.window) return params.order[place] < 0 ? -1 : place;
  }
  const int heads = attention.num_heads / attention.group_size * attention.batch;
  return place < tiles * heads ? place : -1;
}

/// All roles of a block take the same walk past a key tile: for each head of the group, query tiles
/// from first to last, so that those with a diagonal come first. With whole heads every other key
/// tile has them come back: the L2 cache has the latest ones.
template <WgmmaBackwardConfig config>
struct BackwardWalk {
  static_assert(!config.deterministic || !config.persistent);

  TileIndex tile;  // of keys
  Band band;       // of its sequence
  Range tiles;     // of queries
  int left;        // query tiles, with this one
  int head;        // of the queries
  int m;           // the query tile

  /// Found by each role for itself: what the producer has to keep would not fit into its registers.
  __device__ BackwardWalk(const WgmmaBackwardParams& params, int place)
      : tile(key_tile_at<config>(params, place)),
        band(visible_band<config.window>(params.common.attention, tile.sequence)),
        tiles(tiles_of(
            band.transposed().seen_by_any({tile.first_row, tile.first_row + config.block_n}),
            config.block_m)),
        left((tiles.end - tiles.begin) * params.common.attention.group_size),
        head(tile.head * params.common.attention.group_size),
        m(first_tile()) {}

  __device__ bool exists() const { return left > 0; }
  __device__ bool last() const { return left == 1; }
  __device__ int first_query() const { return m * config.block_m; }
  /// Number of the (batch, head) pair.
  __device__ int64 pair(const WgmmaBackwardParams& params) const {
    return int64(tile.sequence.batch) * params.common.attention.num_heads + head;
  }

  /// Counter of the key tiles that have added to this query tile's dQ.
  __device__ int* turns(const WgmmaBackwardParams& params) const {
    return params.turns + pair(params) * params.tiles + m;
  }
  /// Key tiles that add before this one, of those that the query tile sees.
  __device__ int own_turn() const {
    const Range seen = seen_tiles();
    return config.descends() ? seen.end - 1 - number() : number() - seen.begin;
  }

  /// The key tile's number in its sequence, and those that the query tile sees.
  __device__ int number() const { return tile.first_row / config.block_n; }
  __device__ Range seen_tiles() const {
    return tiles_of(band.seen_by_any({first_query(), first_query() + config.block_m}),
                    config.block_n);
  }

  __device__ void advance() {
    --left;
    if (m == last_tile()) {
      m = first_tile();
      ++head;
    } else {
      m += backwards() ? -1 : 1;
    }
  }

 private:
  __device__ bool backwards() const { return config.whole_heads && number() % 2 == 1; }
  __device__ int first_tile() const { return backwards() ? tiles.end - 1 : tiles.begin; }
  __device__ int last_tile() const { return backwards() ? tiles.begin : tiles.end - 1; }
};

/// Calls visit(walk) at each query tile that passes by one of this block's key tiles.
template <WgmmaBackwardConfig config, class Visit>
__device__ void visit_query_tiles(const WgmmaBackwardParams& params, const Visit& visit) {
  int place = first_place<config>(params);
  for (; place >= 0; place = next_place<config>(params, place)) {
    for (BackwardWalk<config> walk(params, place); walk.exists(); walk.advance()) visit(walk);
  }
}

}  // namespace cupyflash
