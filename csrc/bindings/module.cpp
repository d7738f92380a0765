// The Python module weightsync._native._core. `_core.pyi` documents it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <string>
#include <system_error>

#include "kernels.h"
#include "memory.h"
#include "pages.h"
#include "program.h"

namespace py = pybind11;

namespace {

using weightsync::Program;
using weightsync::Span;

template <class T>
T* pointer(std::uint64_t address, const char* name) {
  if (address % alignof(T) != 0) throw py::value_error(std::string(name) + ": the address is not aligned");
  return reinterpret_cast<T*>(address);
}

template <class T>
Span<T> flat(const py::array& array, const std::string& name, std::size_t count) {
  const bool is_right = array.dtype().equal(py::dtype::of<std::remove_const_t<T>>()) && array.ndim() == 1 &&
                        static_cast<std::size_t>(array.size()) == count;
  if (!is_right) throw py::value_error(name + ": expected a uint64 array of length " + std::to_string(count));
  const bool is_contiguous = (array.flags() & py::array::c_style) != 0;
  if (!is_contiguous) throw py::value_error(name + ": expected a contiguous array");
  if constexpr (!std::is_const_v<T>) {
    if (!array.writeable()) throw py::value_error(name + ": the array is read-only");
  }
  return {const_cast<T*>(static_cast<const T*>(array.data())), count};
}

std::unique_ptr<Program> make_program(const py::array& moves) {
  if (!moves.dtype().equal(py::dtype::of<std::int64_t>()) || moves.ndim() != 2) {
    throw py::value_error("moves: expected an int64 array of two dimensions");
  }
  if (moves.shape(1) != static_cast<py::ssize_t>(weightsync::kColumns)) {
    throw py::value_error("moves: expected 38 columns, got " + std::to_string(moves.shape(1)));
  }
  const auto dense = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>(moves);
  const Span<const std::int64_t> table(dense.data(), static_cast<std::size_t>(dense.size()));
  const py::gil_scoped_release released;
  return std::make_unique<Program>(table);
}

int run(const Program& program, const py::array& src, const std::optional<py::array>& dst,
        const std::optional<py::array>& digests, int threads, std::uint64_t progress, std::uint64_t follow,
        std::uint64_t generation, double timeout_s, std::uint64_t cancel) {
  if (threads < 1) throw py::value_error("threads: expected at least 1, got " + std::to_string(threads));
  if (std::isnan(timeout_s)) throw py::value_error("timeout_s: not a number");
  const std::size_t count = program.moves();
  const auto sources = flat<const std::uint64_t>(src, "src", count);
  const auto targets = dst ? flat<const std::uint64_t>(*dst, "dst", count) : Span<const std::uint64_t>();
  const auto sums = digests ? flat<std::uint64_t>(*digests, "digests", count) : Span<std::uint64_t>();
  weightsync::RunOptions options;
  options.threads = static_cast<unsigned>(threads);
  options.progress = pointer<std::uint64_t>(progress, "progress");
  options.follow = pointer<const weightsync::Head>(follow, "follow");
  options.generation = generation;
  options.timeout_s = timeout_s;
  options.cancel = pointer<const std::uint32_t>(cancel, "cancel");
  const py::gil_scoped_release released;
  return static_cast<int>(program.run(sources, targets, sums, options));
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of weightsync.";
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      const py::object arguments = py::make_tuple(error.code().value(), std::string(error.what()));
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  py::class_<Program>(m, "Program")
      .def(py::init(&make_program), py::arg("moves"))
      .def_property_readonly("moves", &Program::moves)
      .def_property_readonly("size_bytes", &Program::size_bytes)
      .def_property_readonly("units", &Program::units)
      .def("run", &run, py::arg("src"), py::arg("dst").none(true), py::arg("digests").none(true), py::kw_only(),
           py::arg("threads") = 1, py::arg("progress") = 0, py::arg("follow") = 0, py::arg("generation") = 0,
           py::arg("timeout_s") = 30.0, py::arg("cancel") = 0);

  // Keeps the GIL: the exchange lasts some 40 us, handing the GIL over may take 5 ms.
  m.def("exchange", &weightsync::exchange, py::arg("a"), py::arg("b"), py::arg("scratch"), py::arg("size"));
  m.def("populate", &weightsync::populate, py::arg("address"), py::arg("size"), py::kw_only(), py::arg("write"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "memory_copy",
      [](std::uintptr_t dst, std::uintptr_t src, std::size_t size, int threads) {
        if (threads < 1) throw std::invalid_argument("threads: expected at least 1, got " + std::to_string(threads));
        weightsync::memory_copy(reinterpret_cast<std::byte*>(dst), reinterpret_cast<const std::byte*>(src), size,
                                static_cast<unsigned>(threads));
      },
      py::arg("dst"), py::arg("src"), py::arg("size"), py::arg("threads") = 1,
      py::call_guard<py::gil_scoped_release>());
  m.def("features", [] {
    py::dict found;
    found["avx2"] = weightsync::kernels().is_avx2;
    return found;
  });
}
