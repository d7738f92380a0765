// A pointer and a count that travel together; owns nothing.
#pragma once

#include <cstddef>
#include <vector>

namespace weightsync {

template <class T>
class Span {
 public:
  Span() = default;
  Span(T* data, std::size_t size) : data_(data), size_(size) {}
  template <class U>
  Span(const std::vector<U>& items) : data_(items.data()), size_(items.size()) {}  // NOLINT: meant to convert

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](std::size_t i) const { return data_[i]; }
  Span subspan(std::size_t first, std::size_t count) const { return {data_ + first, count}; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace weightsync
