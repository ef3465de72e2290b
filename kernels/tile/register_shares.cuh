// How the warpgroups of a block on Hopper share its 64 Ki registers.
#pragma once

namespace cupyflash {

/// Registers of a thread, in eights, for one warpgroup that loads (the producer) and others that
/// compute.
template <int consumers>
struct RegisterShares {
  static constexpr int producer = consumers == 3 ? 32 : 24;
  static constexpr int consumer = consumers == 4 ? 112 : consumers == 3 ? 160 : 240;
};

}  // namespace cupyflash
