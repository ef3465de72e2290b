// How the warpgroups of a block on Hopper share its 64 Ki registers.
#pragma once

namespace cupyflash {

/// Registers of a thread, in eights, for one warpgroup that loads (the producer) and others that
/// compute; with `transposes` the first does more.
template <int consumers, bool transposes = false>
struct RegisterShares {
  static constexpr int producer = consumers == 3 ? 32 : transposes ? 40 : 24;
  static constexpr int consumer = consumers == 4   ? 112
                                  : consumers == 3 ? 160
                                  : transposes     ? 232
                                                   : 240;
};

}  // namespace cupyflash
