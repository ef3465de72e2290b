// Which key tiles of which query tiles a thread block passes through, one after the other.
#pragma once

#include "attention/config_wgmma.cuh"
#include "attention/key_range.cuh"
#include "forward/dealt_tiles_wgmma.cuh"

namespace cupyflash {

/// Producer and consumers take the same walk, but that consumers pass over key tiles that none of
/// their rows sees. Key tiles come from right to left, so that those with a diagonal come first.
template <WgmmaForwardConfig config>
struct ForwardWalk {
  const WgmmaForwardParams& params;
  Range rows;  // of query tiles, whose keys matter
  int place;   // of the next query tile; -1: there is none. Varlen: they are dealt
  typename Either<config.varlen, DealtTiles<config>, NothingDealt<config>>::Type dealt;
  TileIndex tile;  // the query tile
  Band band;       // of its sequence
  Range unmasked;  // keys that all of `rows` see
  Range
      key_tiles;  // of the query tile; never empty: one that sees nothing has one outside the array
  Range own;      // those of `rows`, never empty either
  int n;          // the key tile

  __device__ ForwardWalk(const WgmmaForwardParams& params, const ForwardPipeline<config>& pipeline,
                         Range rows, bool alone = false)
      : params(params), rows(rows), place(blockIdx.x), dealt(pipeline, alone) {}

  __device__ bool first() const { return n == own.end - 1; }
  /// Key tiles of the query tile that come before those of `rows`, and after them.
  __device__ int leading() const { return config.window ? key_tiles.end - own.end : 0; }
  __device__ int trailing() const { return config.window ? own.begin - key_tiles.begin : 0; }

  /// Key tiles lie at multiples of their size, but for those at either end of what the query tile
  /// sees: these are moved inwards, as others may see NaN beyond, and 0 * NaN is NaN. Query tiles
  /// see no fewer keys than such a tile has, if they have as many rows. Varlen entries may have
  /// fewer; and the boxes of a bias begin at multiples of 16 bytes, so that nothing is moved: NaN
  /// then makes the call be done again (suspects.cuh).
  __device__ int first_key() const {
    int key = n * config.block_n;
    if constexpr ((config.window || config.varlen) && !config.bias) {
      const Range seen = seen_by_tile();
      if (seen.begin >= seen.end) return key;
      // What lies outside the maps is 0 anyway; outside varlen entries others begin.
      if (config.varlen || seen.end < band.cols) key = minimum(key, seen.end - config.block_n);
      if (config.varlen || seen.begin > params.first_key) key = maximum(key, seen.begin);
    }
    return key;
  }
  /// Moved tiles are masked too: `rows` do not see all that these would have been.
  __device__ bool masked() const {
    return !unmasked.covers({n * config.block_n, (n + 1) * config.block_n});
  }
  __device__ bool left_edge() const {
    return (config.window || config.varlen) &&
           (n * config.block_n < unmasked.begin || first_key() < n * config.block_n);
  }
  /// The band of the keys that belong to the key tile, counted from the first of these: what else
  /// is in a moved one belongs to its neighbour.
  __device__ Band own_band() const {
    const int first = n * config.block_n;
    return {band.lower - first, band.upper - first, band.rows,
            minimum(band.cols - first, config.block_n)};
  }
  __device__ bool last() const { return n == own.begin; }

  /// To the next key tile, or the first one of the next query tile; false: there is none.
  __device__ bool advance() {
    if (last()) return next_query_tile();
    --n;
    return true;
  }

  __device__ bool next_query_tile() {
    const Attention& attention = params.common.attention;
    if constexpr (config.varlen) {
      const QueryTilePlace found = dealt.take();
      if (found.first_row < 0) return false;
      tile = {varlen_entry(found.batch), found.head, found.first_row};
    } else {
      if (place < 0) return false;
      const QueryTilePlace found = params.places[place];
      if (found.first_row < 0) return false;
      place = found.next;
      const Sequence sequence = {found.batch, 0, 0, attention.seqlen_q, attention.seqlen_k};
      tile = {sequence, found.head, found.first_row};
    }
    band = visible_band<config.window>(attention, tile.sequence);
    const Range given = {tile.first_row + rows.begin, tile.first_row + rows.end};
    unmasked = band.seen_by_all(given);
    key_tiles = tiles_of(seen_by_tile(), config.block_n);
    if (key_tiles.begin >= key_tiles.end) {
      key_tiles.begin = ceil_div(attention.seqlen_k, config.block_n);
      key_tiles.end = key_tiles.begin + 1;
    }
    own = key_tiles;
    if constexpr (config.window) {
      const Range seen = tiles_of(band.seen_by_any(given), config.block_n);
      own = seen.begin < seen.end ? seen : Range{key_tiles.end - 1, key_tiles.end};
    }
    n = own.end - 1;
    return true;
  }

 private:
  __device__ Sequence varlen_entry(int entry) const {
    const ForwardParams& common = params.common;
    Sequence sequence =
        varlen_sequence(common.cu_seqlens_q, common.cu_seqlens_k, common.attention, entry);
    if (entry == common.attention.batch) sequence.hide_others(false);
    return sequence;
  }

  __device__ Range seen_by_tile() const {
    return band.seen_by_any({tile.first_row, tile.first_row + config.block_m});
  }
};

}  // namespace cupyflash
