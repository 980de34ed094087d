// What the kernels read and write, row by row, whatever gives it: tensors of any strides in calls of the
// operators (bindings/tensors.h), or contiguous tensors in plain calls (eager/).
//
// Rows gives a Row for each row, and Numbers gives a double.
#pragma once

#include <optional>
#include <utility>

#include "kernels.h"

namespace khot {

// A number for each row or, where there are none, one for all rows.
struct Listed {
  const double* data;
  double same = 0;
  double operator()(int64_t row) const { return data != nullptr ? data[row] : same; }
  Listed from(int64_t first) const { return {data != nullptr ? data + first : nullptr, same}; }
};

// Temperatures whose reciprocals are numbers.
template <class Numbers>
struct Invertible {
  Numbers taus;
  double operator()(int64_t row) const { return invertible(taus(row)); }
};

// The rows of a contiguous result, each of so many bytes.
struct Results {
  char* data;
  int64_t bytes;
  void* operator()(int64_t row) const { return data + row * bytes; }
};

template <class Rows>
Row row_of(const std::optional<Rows>& rows, int64_t row, Dtype dtype) {
  return rows ? (*rows)(row) : Row{nullptr, dtype, 1};
}

template <class Rows, class Numbers, class Taus, class Interface = ForwardRows, class Out = Results>
struct SelectionRows : Interface {
  SelectionRows(Rows scores, Numbers ks, Taus taus, Out results, double* hi, double* lo)
      : scores(std::move(scores)),
        ks(std::move(ks)),
        taus(std::move(taus)),
        results(results),
        hi(hi),
        lo(lo) {}
  Row x(int64_t row) const override { return scores(row); }
  double k(int64_t row) const override { return ks(row); }
  double tau(int64_t row) const override { return taus(row); }
  void* out(int64_t row) const override { return results(row); }
  void put(int64_t row, Threshold t) const override { hi[row] = t.hi, lo[row] = t.lo; }

  Rows scores;
  Numbers ks;
  Taus taus;
  Out results;
  double *hi, *lo;
};

template <class Rows, class Numbers, class Taus, class Interface = BackwardRows, class Out = Results>
struct GradientRows : Interface {
  GradientRows(Dtype dtype, Rows scores, Taus taus, std::optional<Rows> outputs, std::optional<Rows> incoming,
               Numbers incoming_lo, Numbers his, Numbers los, Out results, double* dk, double* dtau)
      : dtype(dtype),
        scores(std::move(scores)),
        taus(std::move(taus)),
        outputs(std::move(outputs)),
        incoming(std::move(incoming)),
        incoming_lo(std::move(incoming_lo)),
        his(std::move(his)),
        los(std::move(los)),
        results(results),
        dk(dk),
        dtau(dtau) {}
  Row x(int64_t row) const override { return scores(row); }
  Row y(int64_t row) const override { return row_of(outputs, row, Dtype::kFloat); }
  Row grad(int64_t row) const override { return row_of(incoming, row, dtype); }
  double grad_lo(int64_t row) const override { return incoming_lo(row); }
  double tau(int64_t row) const override { return taus(row); }
  Threshold threshold(int64_t row) const override { return {his(row), los(row)}; }
  void* grad_x(int64_t row) const override { return results(row); }
  bool keeps_numbers() const override { return dk != nullptr || dtau != nullptr; }
  void put(int64_t row, double grad_k, double grad_tau) const override {
    if (dk != nullptr) dk[row] = grad_k;
    if (dtau != nullptr) dtau[row] = grad_tau;
  }

  Dtype dtype;  // of the scores
  Rows scores;
  Taus taus;
  std::optional<Rows> outputs, incoming;  // y; no incoming gradients stand for zeros
  Numbers incoming_lo, his, los;
  Out results;
  double *dk, *dtau;  // null where they are not wanted
};

template <class Rows, class Numbers>
struct PricedRows final : SelectionRows<Rows, Numbers, Numbers, BudgetRows> {
  Rows costs;

  template <class... Given>
  explicit PricedRows(Rows costs, Given&&... given)
      : SelectionRows<Rows, Numbers, Numbers, BudgetRows>(std::forward<Given>(given)...),
        costs(std::move(costs)) {}
  Row cost(int64_t row) const override { return costs(row); }
};

template <class Rows, class Numbers>
struct PricedGradients final : GradientRows<Rows, Numbers, Numbers, BudgetBackwardRows> {
  Rows costs;
  Results cost_results;

  template <class... Given>
  PricedGradients(Rows costs, Results cost_results, Given&&... given)
      : GradientRows<Rows, Numbers, Numbers, BudgetBackwardRows>(std::forward<Given>(given)...),
        costs(std::move(costs)),
        cost_results(cost_results) {}
  Row cost(int64_t row) const override { return costs(row); }
  void* grad_cost(int64_t row) const override { return cost_results(row); }
};

// Levels, and gradients in their counts, stand one behind the other: m for each row.
template <class Rows, class Numbers, class Grads>
struct LevelRows final : CountRows {
  LevelRows(int64_t m, Rows scores, Numbers taus, Numbers levels)
      : m(m), scores(std::move(scores)), taus(std::move(taus)), levels(std::move(levels)) {}
  Row x(int64_t row) const override { return scores(row); }
  double tau(int64_t row) const override { return invertible(taus(row)); }
  double level(int64_t row, int64_t j) const override { return levels(row * m + j); }
  double grad(int64_t row, int64_t j) const override { return (*grads)(row * m + j); }
  void* grad_x(int64_t row) const override { return results(row); }
  void put(int64_t row, int64_t j, double value) const override {
    if (values != nullptr) values[row * m + j] = value;
  }
  void put_tau(int64_t row, double value) const override {
    if (dtau != nullptr) dtau[row] = value;
  }

  int64_t m;
  Rows scores;
  Numbers taus, levels;
  std::optional<Grads> grads;
  Results results{};
  double *values = nullptr, *dtau = nullptr;  // null where they are not wanted
};

template <class Rows, class Numbers, class Out = Results>
struct HardRows final : MaskRows {
  HardRows(Rows scores, Numbers ks, Out results)
      : scores(std::move(scores)), ks(std::move(ks)), results(results) {}
  Row x(int64_t row) const override { return scores(row); }
  double k(int64_t row) const override { return ks(row); }
  void* out(int64_t row) const override { return results(row); }

  Rows scores;
  Numbers ks;
  Out results;
};

template <class Rows>
struct LargestRows final : TopKRows {
  LargestRows(Rows scores, Results results, int64_t* first, int64_t k)
      : scores(std::move(scores)), results(results), first(first), k(k) {}
  Row x(int64_t row) const override { return scores(row); }
  void* values(int64_t row) const override { return results(row); }
  int64_t* indices(int64_t row) const override { return first + row * k; }

  Rows scores;
  Results results;
  int64_t *first, k;
};

}  // namespace khot
