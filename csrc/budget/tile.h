// Short rows under a budget side by side, one row per lane: what is read of them.
#pragma once

#include <cmath>

#include "budget/weights.h"
#include "search/lanes.h"

namespace khot::KHOT_ISA {

template <bool kByValue>
class BudgetTile : public LaneTile<Cost<kByValue>> {
  using Tile = LaneTile<Cost<kByValue>>;

 public:
  using Tile::width, Tile::good;

 protected:
  using Tile::n_, Tile::goal_, Tile::goal_low_, Tile::tau_, Tile::scale_, Tile::x_, Tile::a_, Tile::rows_;

  explicit BudgetTile(const BudgetSpec& spec) : Tile(spec.n) {}

  // Costs are taken in units that make their mean about 1, a power of 2 for each row: a = w s. An entry that
  // may not be selected costs nothing, and its score is so low that y is 0, but finite.
  KHOT_APART void read(const BudgetRows& rows, int64_t first) {
    gather([&](int j) { return rows.x(first + j); }, n_, rows_, x_);
    gather([&](int j) { return rows.cost(first + j); }, n_, rows_, a_);
    this->from_ = static_cast<const float*>(rows.x(first).data);
    this->to_ = static_cast<const float*>(rows.out(first));
    ExactBlockSum total;
    IntF bad{};
    most_ = VecF{};
    origin_ = splat(kAbsent);
    for (int i = 0; i < n_; ++i) {
      VecF x = *column(x_, i), w = *column(a_, i);
      bad |= ~(x < kInf<float>) | ~((w >= 0) & (w < kInf<float>));
      const IntF absent = x == -kInf<float>;
      *column(x_, i) = x = absent ? splat(kAbsent) : x;
      *column(a_, i) = w = absent ? VecF{} : w;
      origin_ = origin_ == kAbsent ? x : origin_;
      total.add(w, i);
      most_ = w > most_ ? w : most_;
    }
    total.flush();
    const float count = static_cast<float>(n_);
    good = ~bad & (total.whole > 1e-30f * count) & (total.whole < 1e30f * count);
    for (int j = 0; j < width; ++j) {
      const double sum = static_cast<double>(total.whole[j]) + total.lost[j];
      const int power = good[j] ? -std::ilogb(sum / n_) : 0;
      unit_[j] = std::ldexp(1.0f, power);
      const double budget = given_[j] = rows.k(first + j) * unit_[j], all = sum * unit_[j];
      goal_[j] = static_cast<float>(budget), goal_low_[j] = static_cast<float>(budget - goal_[j]);
      total_[j] = static_cast<float>(all);
      odds_[j] = static_cast<float>(budget / (all - budget));
      tau_[j] = static_cast<float>(rows.tau(first + j));
    }
    good &= (odds_ > 1e-6f) & (odds_ < 1e6f) & (tau_ > 1e-25f) & (tau_ < 1e25f);
    odds_ = good ? odds_ : splat(1.0f);
    scale_ = 1 / tau_;
    most_ = u<Cost<kByValue>>(most_ * unit_);
    for (int i = 0; i < n_; ++i) *column(a_, i) *= unit_;
  }

  static constexpr float kAbsent = -1e30f;

  VecF total_{}, odds_{}, unit_{},
      most_{};           // the sum of a, y/(1 - y) for a y that all share, s, and the largest u
  VecF origin_{};        // a score of the row
  double given_[width];  // the budget
};

}  // namespace khot::KHOT_ISA
