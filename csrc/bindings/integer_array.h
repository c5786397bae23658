// Arrays of integers that Python passes: of another width only where every number fits, never of floats.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpager/error.h"

namespace kvpager {

template <class T>
class IntegerArray {
 public:
  using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

  IntegerArray() : given_(Array(0)) {}

  // Nothing of what is no array of integers, nor makes one.
  static std::optional<IntegerArray> from(pybind11::handle given) {
    pybind11::array array = pybind11::array::ensure(given);  // which clears an error
    if (!array) return std::nullopt;
    if (array.size() == 0) return IntegerArray();
    const char kind = array.dtype().kind();
    if (kind != 'i' && kind != 'u' && kind != 'b') return std::nullopt;
    return IntegerArray(std::move(array));
  }

  const pybind11::array& given() const { return given_; }

  // InvalidArgumentError that names `name` and the numbers that do not fit.
  Array checked(const char* name) const {
    if (!given_.dtype().is(pybind11::dtype::of<T>())) {
      const pybind11::object least = given_.attr("min")(), most = given_.attr("max")();
      const pybind11::int_ low(std::numeric_limits<T>::min()), high(std::numeric_limits<T>::max());
      if (least < low || most > high) {
        throw InvalidArgumentError(str(name, ": integers from ", text(least), " to ", text(most),
                                       ", expected ", text(low), " to ", text(high)));
      }
    }
    return Array(given_);
  }
  std::vector<T> to_vector(const char* name) const {
    const Array array = checked(name);
    return std::vector<T>(array.data(), array.data() + array.size());
  }

 private:
  explicit IntegerArray(pybind11::array given) : given_(std::move(given)) {}
  static std::string text(const pybind11::handle& number) {
    return pybind11::cast<std::string>(pybind11::str(number));
  }

  pybind11::array given_;
};

}  // namespace kvpager

namespace pybind11::detail {

template <class T>
struct type_caster<kvpager::IntegerArray<T>> {
  using Array = typename kvpager::IntegerArray<T>::Array;
  PYBIND11_TYPE_CASTER(kvpager::IntegerArray<T>, handle_type_name<Array>::name);

  bool load(handle from, bool) {
    auto given = kvpager::IntegerArray<T>::from(from);
    if (given) value = std::move(*given);
    return given.has_value();
  }
  static handle cast(const kvpager::IntegerArray<T>& from, return_value_policy, handle) {
    return from.given().inc_ref();
  }
};

}  // namespace pybind11::detail
