// Weighted quantiles of a row: the smallest entry up to which the weights sum to a share of all of them, as a
// running sum over the sorted row finds it. In a long row, histograms of the weights narrow down where that
// entry is, and only what is left is sorted. Sums in another order are rounded otherwise: where they reach
// the share so closely that this may decide, the row is sorted after all. Sums of whole numbers are exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "selection/ordered.h"

namespace khot::KHOT_ISA {

template <class I>
class WeightedQuantiles {
  struct Entry {
    I key;
    double weight;  // or the sum up to this entry
  };

 public:
  struct Scratch {
    std::vector<Entry> kept, next;
  };

  WeightedQuantiles(const Ordered<I>& order, Scratch& scratch, const Row& x, const Row& weights, int64_t n)
      : order_(order), kept_(scratch.kept), next_(scratch.next), x_(x), weights_(weights), n_(n) {}

  // Writes the quantiles of the levels; NaN where a level is not in [0, 1], and everywhere if the row has a
  // NaN, a weight that is negative, infinite or NaN, or no weight at all.
  void operator()(const double* levels, int64_t m, I* out) {
    std::fill(out, out + m, order_.nan);
    if (!survey()) return;
    const auto asked = [=](int64_t j) { return levels[j] >= 0 && levels[j] <= 1; };
    int64_t j = 0;
    if (n_ > kShort && m <= kFewLevels) {
      while (j < m && (!asked(j) || by_histograms(levels[j], out[j]))) ++j;
    }
    if (j == m) return;
    narrowed_ = false;
    keep([](I) { return true; });
    sort(0);
    total_ = kept_.back().weight;
    for (; j < m; ++j) {
      if (asked(j)) out[j] = Ordered<I>::bits(first_to_reach(levels[j]));
    }
  }

 private:
  static constexpr int64_t kShort = 24;     // so many entries are sorted
  static constexpr int64_t kFewLevels = 8;  // for more of them a sort takes less time
  static constexpr int kBins = 256;

  // Calls use(key, weight) for the entries that are left.
  template <class Use>
  void each(Use use) const {
    if (narrowed_) {
      for (const Entry& e : kept_) use(e.key, e.weight);
      return;
    }
    const I* const p = static_cast<const I*>(x_.data);
    double buffer[kBlock];
    for (int64_t at = 0; at < n_; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n_ - at));
      const double* const w = fetch(weights_, at, count, buffer);
      for (int i = 0; i < count; ++i) use(Ordered<I>::key(p[(at + i) * x_.step]), w[i]);
    }
  }

  // Leaves the entries with weight whose keys are wanted.
  template <class Wanted>
  void keep(Wanted wanted) {
    next_.clear();
    each([&](I key, double w) {
      if (w > 0 && wanted(key)) next_.push_back({key, w});
    });
    kept_.swap(next_);
    narrowed_ = true;
  }

  // Finds the sum of the weights, and the ends of the entries with weight. Returns false for a bad row.
  bool survey() {
    bool bad = false, whole = true;
    each([&](I key, double w) {
      bad |= (key > order_.infinity) | (key < -order_.infinity) | !(w >= 0);
      whole &= w == std::floor(w);
      total_ += w;
      least_ = w > 0 && key < least_ ? key : least_;
      most_ = w > 0 && key > most_ ? key : most_;
    });
    // Each of four sums, this one, a part of it, and those of the sorted row, is rounded n times.
    slack_ = whole && total_ <= 0x1p53 ? 0 : 0x1p-51 * static_cast<double>(n_) * total_;
    return !bad && total_ > 0 && total_ <= std::numeric_limits<double>::max();
  }

  // Whether a sum of weights reaches a level. Without any weight, not even 0 is reached.
  bool reaches(double sum, double level) const { return sum > 0 && sum / total_ >= level; }

  // Finds the entry that reaches the level. Returns false where rounding may decide.
  bool by_histograms(double level, I& out) {
    I low = least_, high = most_;
    double below = 0;
    narrowed_ = false;
    while (low < high && (!narrowed_ || static_cast<int64_t>(kept_.size()) > kShort)) {
      int shift = 0;
      while (distance(low, high) >> shift >= kBins) ++shift;
      const auto bin_of = [=](I key) {
        return static_cast<int>(std::min<uint64_t>(distance(low, key) >> shift, kBins));
      };
      double held[kBins + 1] = {};  // at the end what is beyond the others, which has no weight
      each([&](I key, double w) { held[bin_of(key)] += w; });
      int bin = 0;
      for (const int last = bin_of(high); bin < last && !reaches(below + held[bin], level); ++bin) {
        below += held[bin];
      }
      keep([=](I key) { return bin_of(key) == bin; });
      std::swap(low, high);
      for (const Entry& e : kept_) low = std::min(low, e.key), high = std::max(high, e.key);
    }
    if (!narrowed_) keep([](I) { return true; });  // all are equal
    sort(below);
    const I found = first_to_reach(level);
    out = Ordered<I>::bits(found);
    if (slack_ == 0) return true;
    const auto first = std::partition_point(kept_.begin(), kept_.end(),
                                            [=](const Entry& e) { return e.key < found; }),
               next =
                   std::partition_point(first, kept_.end(), [=](const Entry& e) { return e.key == found; });
    const double before = first == kept_.begin() ? below : (first - 1)->weight, goal = level * total_;
    return (found == least_ || before + slack_ < goal) &&
           (found == most_ || (next - 1)->weight - slack_ >= goal);
  }

  static uint64_t distance(I from, I to) {
    return static_cast<uint64_t>(int64_t{to}) - static_cast<uint64_t>(int64_t{from});
  }

  // Sorts what is left, and adds up its weights.
  void sort(double sum) {
    std::stable_sort(kept_.begin(), kept_.end(),
                     [](const Entry& a, const Entry& b) { return a.key < b.key; });
    for (Entry& e : kept_) e.weight = sum += e.weight;
  }

  I first_to_reach(double level) const {
    const auto found = std::partition_point(kept_.begin(), kept_.end(),
                                            [&](const Entry& e) { return !reaches(e.weight, level); });
    return std::min(found, kept_.end() - 1)->key;
  }

  const Ordered<I>& order_;
  std::vector<Entry>&kept_, &next_;
  Row x_, weights_;
  int64_t n_;
  bool narrowed_ = false;  // to kept_
  double total_ = 0, slack_ = 0;
  I least_ = Ordered<I>::kMost, most_ = Ordered<I>::kLeast;
};

inline void weighted_quantiles(const Row& x, const Row& weights, int64_t n, const double* levels, int64_t m,
                               void* out) {
  with_order(x.dtype, out, [&](const auto& order, auto* p) {
    using Quantiles = WeightedQuantiles<std::remove_reference_t<decltype(*p)>>;
    static thread_local typename Quantiles::Scratch scratch;
    Quantiles(order, scratch, x, weights, n)(levels, m, p);
    if (n > 1 << 20) scratch = {};  // up to 32 bytes an entry
  });
}

}  // namespace khot::KHOT_ISA
