// The sizes, or the strides, of a tensor.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <vector>

namespace khot {

// A list of a few integers. A std::vector would allocate, and several of them for each tensor take longer
// than the kernel for a short row. Lists that are longer than kNear, which are rare, are allocated.
class Sizes {
 public:
  Sizes() = default;
  explicit Sizes(size_t count) : size_(count) {
    if (count > kNear) far_.resize(count);
  }
  template <class Iterator>
  Sizes(Iterator begin, Iterator end) : Sizes(static_cast<size_t>(std::distance(begin, end))) {
    std::copy(begin, end, data());
  }
  Sizes(std::initializer_list<int64_t> values) : Sizes(values.begin(), values.end()) {}
  Sizes(const std::vector<int64_t>& values) : Sizes(values.begin(), values.end()) {}
  operator std::vector<int64_t>() const { return {begin(), end()}; }

  void push_back(int64_t value) {
    if (size_ >= kNear) {
      if (size_ == kNear) far_.assign(near_.begin(), near_.end());
      far_.push_back(value);
    } else {
      near_[size_] = value;
    }
    ++size_;
  }
  void pop_back() {
    if (size_ == kNear + 1) std::copy(far_.begin(), far_.begin() + kNear, near_.begin());
    if (size_ > kNear) far_.pop_back();
    --size_;
  }

  size_t size() const { return size_; }
  int64_t* data() { return size_ > kNear ? far_.data() : near_.data(); }
  const int64_t* data() const { return size_ > kNear ? far_.data() : near_.data(); }
  int64_t& operator[](size_t i) { return data()[i]; }
  int64_t operator[](size_t i) const { return data()[i]; }
  int64_t back() const { return data()[size_ - 1]; }
  bool operator==(const Sizes& other) const {
    return size_ == other.size_ && std::equal(begin(), end(), other.begin());
  }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }

 private:
  static constexpr size_t kNear = 6;
  std::array<int64_t, kNear> near_{};
  std::vector<int64_t> far_;
  size_t size_ = 0;
};

}  // namespace khot
