// How many rows the lane solver of the soft top-k gives back, of rows that it should solve: a line for each
// CDF, with their share of all, and the largest share in a set of rows of one kind, length, k and tau.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "simd/standard.h"

#define KHOT_ISA baseline
#define KHOT_VECTOR_BYTES 16
#define KHOT_NAME "baseline"
#include "bindings/rows.h"
#include "soft_topk/lanes.h"

namespace khot::baseline {
namespace {

struct Floats {
  const std::vector<float>& data;
  int64_t n;
  Row operator()(int64_t row) const { return {data.data() + row * n, Dtype::kFloat, 1}; }
};

enum Kind { kNormal, kHeavy, kHalves };  // kHalves: multiples of 1/2, with ties

std::vector<float> scores(Kind kind, int64_t count) {
  std::mt19937 bits(0);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& v : x) {
    const float z = normal(bits);
    v = kind == kNormal ? z : kind == kHeavy ? z * std::fabs(z) : std::round(2 * z) / 2;
  }
  return x;
}

template <class C>
int64_t given_back(const C& F, Output output, const std::vector<float>& x, int n, double k, double tau) {
  const int64_t count = static_cast<int64_t>(x.size()) / n;
  std::vector<float> y(x.size());
  std::vector<double> hi(count), lo(count);
  const Results results{reinterpret_cast<char*>(y.data()), n * static_cast<int64_t>(sizeof(float))};
  const SelectionRows<Floats, Listed, Listed> rows({x, n}, {nullptr, k}, {nullptr, tau}, results, hi.data(),
                                                   lo.data());
  const Spec spec{Cdf::kLogistic, 0, output, n, nullptr};  // lanes ask F, not which CDF it is
  LaneSolver<C> solver(spec, F);
  Goal goal;
  int64_t left = 0;
  for (int64_t i = 0; i < count; i += solver.width) {
    bool done[solver.width];
    solver.solve(rows, i, goal, done);
    left += std::count(done, done + solver.width, false);
  }
  return left;
}

template <class C>
void count(const char* name, const C& F, Output output = Output::kValue) {
  int64_t left = 0, all = 0;
  double most = 0;
  for (const Kind kind : {kNormal, kHeavy, kHalves}) {
    for (const int n : {5, 8, 13, 32, 64, 256}) {
      const int64_t rows = 8 * std::max(32, 1024 / n);
      const std::vector<float> x = scores(kind, rows * n);
      for (const double k : {1.0, 1.5, 2.0, 8.0, n / 2.0, n - 1.0}) {
        for (const double tau : {3.0, 1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.08, 0.05, 0.03, 0.01, 0.001}) {
          if (k >= n) continue;
          const int64_t own = given_back(F, output, x, n, k, tau);
          left += own, all += rows;
          most = std::max(most, static_cast<double>(own) / rows);
        }
      }
    }
  }
  std::printf("%s %.6f %.6f\n", name, static_cast<double>(left) / all, most);
}

}  // namespace
}  // namespace khot::baseline

int main() {
  using namespace khot::baseline;
  count("logistic", Logistic());
  count("normal", Normal());
  count("laplace", Laplace());
  count("log, logistic", Logistic(), khot::Output::kLog);
  count("log, laplace", Laplace(), khot::Output::kLog);
  count("uniform", Uniform(2));
  count("power 1.5", Power(1.5));
  count("power 4/3", Power(4.0 / 3));
}
