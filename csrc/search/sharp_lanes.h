// Short rows whose scores spread far beyond tau, one row per lane: the steps, for counts and for costs.
//
// With P the sum of a F over the entries that are to be left out, and Q that of a (1 - F) over those that are
// to be chosen, what is chosen misses its goal by P - Q. Far from all entries, both fall and rise like
// exponentials of t; so the steps are those of Newton's method for log P/Q, and t is right relatively beside
// tails, however small they are: on it depends which entries have a share of the gradients.
#pragma once

#include <type_traits>

#include "search/lanes.h"
#include "search/step.h"

namespace khot::KHOT_ISA {

template <class C, class Tile>
class SharpLanes : public LanePasses<C, Tile> {
  using Passes = LanePasses<C, Tile>;

 public:
  using typename Passes::Sums;

 protected:
  using Passes::hi_, Passes::lo_, Passes::scale_, Passes::sums_tails_, Passes::tau_;

  // From this variance of its scores on, in tau, a row is sharp. Where few are chosen, it is from less on:
  // moments tell little of where these few are. From half of the deviation on, rows beside a sharp one are
  // taken like it, whose passes cost them more.
  static constexpr float kSharp = C::value_from_odds ? 169 : C::full_support ? 81 : 6.25f;
  static constexpr float kFew = 14;
  static IntF sharp(IntF good, VecF few, VecF total) {
    const VecF least = kSharp * (C::full_support ? clamp_above<float>(few / kFew, 1) : splat(1.0f));
    const IntF found = good & ((total > least) | (few * few < 0.02f * total));
    return any(found) ? found | (good & (total > 0.25f * least)) : found;
  }
  // Sharp rows of no more variance start from the moments. With more, a step may end in a gap so wide that
  // its tails are nothing, and lead no further; under the normal CDF it may with any.
  static constexpr float kSpread = C::value_from_odds ? 0.3f * kSharp : 0;
  // Below, tails are not told from each other. Where entries are counted, the ends of a gap say where t is
  // then.
  static constexpr float kNothing = Tile::Terms::weighted ? 1e-35f : C::value_from_odds ? 1e-27f : 1e-20f;

  using Passes::Passes;

  void forget() { sums_tails_ = false, settled_ = far_ = IntF{}, last_ = next_ = VecF{}; }

  KHOT_INLINE VecF z_of(VecF x) const { return (x - hi_) * scale_ - lo_ * scale_; }

  // What is left of the miss after a step of this size. Beside the share that a broken k leaves, tails are no
  // exponentials.
  static KHOT_INLINE VecF missed_after(VecF P, VecF Q, VecF size, IntF whole) {
    const VecF larger = P > Q ? P : Q;
    return (C::value_from_odds ? (whole ? larger : splat(1.0f)) * larger : larger) * size * size;
  }

  // t of these rows in the middle of the gap between their last entry that is chosen and the next, where that
  // is chosen whole, and otherwise so many tau below `shared`, one of these. The middle is exact, because far
  // from both entries its last digits decide which of them counts.
  void place(IntF sharp, VecF last, VecF next, IntF whole, VecF shared, VecF z) {
    last_ = last, next_ = next;
    const VecF end = next > -kInf<float> ? next : last, gap = end - last, back = gap + last;
    const VecF lost = (end - back) - (last - (back - gap));
    const VecF from = whole ? last : shared, move = (whole ? 0.5f * gap : VecF{}) - z * tau_;
    const VecF hi = from + move, part = hi - from;
    const VecF lo = ((from - (hi - part)) + (move - part)) + (whole ? 0.5f * lost : VecF{});
    hi_ = sharp ? hi : hi_, lo_ = sharp ? lo : lo_;
  }

  // Moves t of rows in a wide gap between the entries `last` and `next` to where the tails of both ends weigh
  // the same, as off_middle() in soft_topk/gap.h, which has no need of the bound on digits. each(add) adds
  // the entries that may weigh, and what they cost.
  template <class Each>
  KHOT_APART void weigh_ends(IntF wide, VecF last, VecF next, Each each) {
    constexpr bool bends = !C::value_from_odds;
    const VecF half = 0.5f * (last - next) * scale_;
    // it is so steep there that t may need more digits than a pair of floats has
    if (bends) this->good &= ~wide | (half * scale_ * (abs<float>(last) + abs<float>(next)) < 0x1p34f);
    VecF moved{};
    for (int trial = 0; trial < (bends ? 4 : 1); ++trial) {
      const VecF to_last = half - moved, to_next = half + moved;
      VecF A{}, B{}, away_A{}, away_B{};
      each([&](VecF x, VecF cost) {
        const IntF above = x >= last;
        const VecF away = (above ? x - last : next - x) * scale_, end = above ? to_last : to_next;
        const VecF far = bends ? (end + 0.5f * away) * away : away;
        VecF weight = far < 80 ? cost * exp2_held(far * static_cast<float>(-kLog2E)) : VecF{};
        if constexpr (bends) {
          weight *= tail_over_density(end + away);
          const VecF part = weight > 0 ? weight * away : VecF{};
          away_A += above ? part : VecF{}, away_B += above ? VecF{} : part;
        }
        A += above ? weight : VecF{}, B += above ? VecF{} : weight;
      });
      VecF step = 0.5f * log<float>(B / A);
      if constexpr (bends) step = 2 * (step - half * moved) / (2 * half + 2 / half + away_A / A + away_B / B);
      moved += step;
      if (!any(this->good & wide & (abs<float>(step) > 1e-5f))) break;
    }
    Passes::move(this->good & wide ? moved : VecF{});
  }

  // The step in t/tau of rows whose passes sum the tails on both sides; it moves z by up to `most` times as
  // much.
  KHOT_APART VecF sharp_step(const Sums& s, const CountSums<VecF>& sums, VecF most) {
    constexpr bool by_value = Tile::Terms::by_value;
    const VecF P = clamp_below<float>(s.below + clamp_below<float>(s.extra, 0), 1e-37f);
    const VecF Q = clamp_below<float>(s.above + clamp_below<float>(-s.extra, 0), 1e-37f);
    const IntF still = ((s.miss == 0) & (s.extra != 0)) | ((P < kNothing) & (Q < kNothing));
    const VecF safe_P = still ? splat(1.0f) : P, safe_Q = still ? splat(1.0f) : Q;
    const VecF slope = s.f_above / safe_Q + clamp_below<float>(s.S1 - s.f_above, 0) / safe_P;
    const VecF ratio = log<float>(safe_P / safe_Q), far = ratio / clamp_below<float>(slope, 1e-3f);
    const VecF near = s.miss / clamp_below<float>(s.S1, 1e-30f);
    // a short step may change tails many times over, and no polynomial follows them there
    const IntF is_near = (abs<float>(near) * most < 0.5f) & (abs<float>(ratio) < 0.5f);
    VecF h = is_near ? refined(is_near ? near : VecF{}, sums) : far;
    const VecF size = abs<float>(far) * most;
    IntF settled = (s.extra == 0) & (missed_after(P, Q, size, ~IntF{}) < 2e-7f);
    if (!C::value_from_odds || by_value || wants_t_) settled &= size < 1e-4f;
    if constexpr (std::is_same_v<C, Laplace> && !by_value) {  // whose logarithm is straight between entries
      const VecF to_last = (hi_ - last_) + (lo_ + far * tau_), to_next = (hi_ - next_) + (lo_ + far * tau_);
      settled |= (s.extra == 0) & (to_last < 0) & (to_next > 0);
    }
    h = still ? VecF{} : settled ? far : h;
    // by value, the ends of a gap do not say where t is in it
    if (by_value) this->good &= ~still | (s.extra != 0);
    settled_ = settled | still, far_ = ~is_near;
    return h;
  }

  // A normal tail beyond z over the density there, from z = 7 on.
  static KHOT_INLINE VecF tail_over_density(VecF z) {
    const VecF per = 1 / z, u = per * per;
    return per * (1 - u * (1 - 3 * u * (1 - 5 * u * (1 - 7 * u))));
  }

  // The rows that need a further pass after a step that suffices if it is no longer than the last.
  IntF unsettled(VecF size, float last) const { return ((size > last) | far_) & ~settled_; }

  bool wants_t_ = false;    // whether t itself has to be right, and not only y
  IntF settled_{}, far_{};  // rows that need no further pass, and those that need one, whatever their step is
  VecF last_{}, next_{};    // the last entry that is chosen, and the next
};

}  // namespace khot::KHOT_ISA
