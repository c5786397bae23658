#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "bindings/bind.h"
#include "bindings/names.h"
#include "kvpager/error.h"
#include "kvpager/pager.h"
#include "kvpager/selection.h"

namespace kvpager {

namespace py = pybind11;

static std::optional<DType> named(std::initializer_list<DType> dtypes, const std::string& name) {
  for (const DType dtype : dtypes) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return std::nullopt;
}

DType dtype_from_name(const std::string& field, const std::string& name) {
  const auto found = named({DType::kFloat32, DType::kFloat16, DType::kBFloat16}, name);
  if (found) return *found;
  throw InvalidArgumentError(
      str(field, ": '", name, "', expected 'float32', 'float16' or 'bfloat16'"));
}

// Of elements in chunks.
static DType stored_dtype_from_name(const std::string& field, const std::string& name) {
  const auto found =
      named({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kQ8, DType::kQ4}, name);
  if (found) return *found;
  throw InvalidArgumentError(
      str(field, ": '", name, "', expected 'float32', 'float16', 'bfloat16', 'q8' or 'q4'"));
}

// Without a default case: the compiler warns of a policy that has no name.
static const char* policy_name(Policy policy) {
  switch (policy) {
    case Policy::kQk:
      return "qk";
    case Policy::kLru:
      return "lru";
  }
  throw InvariantError(str("policy is ", int{static_cast<uint8_t>(policy)}, "; expected 0 or 1"));
}

void bind_config(py::module_& m) {
  py::class_<Layout>(m, "Layout", "Shape of a chunk's bytes.")
      .def(py::init([](int32_t layers, int32_t kv_heads, int32_t chunk_tokens, int32_t k_dim,
                       int32_t v_dim, const std::string& k_dtype, const std::string& v_dtype,
                       bool k_rotated, bool v_rotated, const std::vector<int32_t>& float_layers,
                       const std::string& float_dtype) {
             Layout layout;
             layout.layers = layers;
             layout.kv_heads = kv_heads;
             layout.chunk_tokens = chunk_tokens;
             layout.k_dim = k_dim;
             layout.v_dim = v_dim;
             layout.k_dtype = stored_dtype_from_name("k_dtype", k_dtype);
             layout.v_dtype = stored_dtype_from_name("v_dtype", v_dtype);
             layout.k_rotated = k_rotated;
             layout.v_rotated = v_rotated;
             for (const int32_t layer : float_layers) {
               if (layer < 0 || layer >= std::min(layers, int32_t{kMostLayers})) {
                 throw InvalidArgumentError(
                     str("layout.float_layers has ", layer, "; expected 0 to ", layers - 1));
               }
               layout.float_layers.add(layer);
             }
             layout.float_dtype = dtype_from_name("float_dtype", float_dtype);
             layout.validate();
             return layout;
           }),
           py::kw_only(), py::arg("layers"), py::arg("kv_heads"), py::arg("chunk_tokens"),
           py::arg("k_dim"), py::arg("v_dim"), py::arg("k_dtype"), py::arg("v_dtype"),
           py::arg("k_rotated") = false, py::arg("v_rotated") = false,
           py::arg("float_layers") = std::vector<int32_t>(), py::arg("float_dtype") = "float32")
      .def_readonly("layers", &Layout::layers)
      .def_readonly("kv_heads", &Layout::kv_heads)
      .def_readonly("chunk_tokens", &Layout::chunk_tokens)
      .def_readonly("k_dim", &Layout::k_dim)
      .def_readonly("v_dim", &Layout::v_dim)
      .def_property_readonly("k_dtype", [](const Layout& l) { return dtype_name(l.k_dtype); })
      .def_property_readonly("v_dtype", [](const Layout& l) { return dtype_name(l.v_dtype); })
      .def_readonly("k_rotated", &Layout::k_rotated)
      .def_readonly("v_rotated", &Layout::v_rotated)
      .def_property_readonly("float_layers",
                             [](const Layout& l) {
                               std::vector<int32_t> layers;
                               for (int32_t layer = 0; layer < l.layers; ++layer) {
                                 if (l.float_layers.has(layer)) layers.push_back(layer);
                               }
                               return layers;
                             })
      .def_property_readonly("float_dtype",
                             [](const Layout& l) { return dtype_name(l.float_dtype); })
      .def("slice_bytes", &Layout::slice_bytes, py::arg("layer"))
      .def_property_readonly("largest_slice_bytes", &Layout::largest_slice_bytes)
      .def_property_readonly("chunk_bytes", &Layout::chunk_bytes)
      .def_property_readonly("token_bytes", &Layout::token_bytes);

  py::class_<Selection>(m, "Selection", "Which chunks a row attends to.")
      .def(py::init([](const std::string& kind, int32_t chunks, int64_t sinks, int64_t recent,
                       std::vector<std::pair<int64_t, int64_t>> always) {
             Selection s;
             if (kind == "dense") {
               s.kind = Selection::Kind::kDense;
             } else if (kind == "topk") {
               s.kind = Selection::Kind::kTopK;
             } else if (kind == "window") {
               s.kind = Selection::Kind::kWindow;
             } else {
               throw InvalidArgumentError(
                   str("selection: '", kind, "', expected 'dense', 'topk' or 'window'"));
             }
             s.chunks = chunks;
             s.sinks = sinks;
             s.recent = recent;
             s.always = std::move(always);
             return s;
           }),
           py::arg("kind"), py::kw_only(), py::arg("chunks") = 0, py::arg("sinks") = 64,
           py::arg("recent") = 256, py::arg("always") = std::vector<std::pair<int64_t, int64_t>>());

  py::class_<PagerOptions>(m, "PagerOptions", "Everything a pager is made from; plain fields.")
      .def(py::init<>())
      .def_readwrite("layout", &PagerOptions::layout)
      .def_readwrite("pool_blocks", &PagerOptions::pool_blocks)
      .def_readwrite("rows", &PagerOptions::rows)
      .def_readwrite("smaller_rows", &PagerOptions::smaller_rows)
      .def_readwrite("exact", &PagerOptions::exact)
      .def_readwrite("selection", &PagerOptions::selection)
      .def_readwrite("host_bytes", &PagerOptions::host_bytes)
      .def_readwrite("disk_bytes", &PagerOptions::disk_bytes)
      .def_readwrite("disk_path", &PagerOptions::disk_path)
      .def_readwrite("summary_bytes", &PagerOptions::summary_bytes)
      .def_property(
          "policy", [](const PagerOptions& o) { return policy_name(o.policy); },
          [](PagerOptions& o, const std::string& name) {
            for (const Policy policy : {Policy::kQk, Policy::kLru}) {
              if (name == policy_name(policy)) {
                o.policy = policy;
                return;
              }
            }
            throw InvalidArgumentError(str("policy: '", name, "', expected 'qk' or 'lru'"));
          })
      .def_readwrite("recall_chunks", &PagerOptions::recall_chunks)
      .def_readwrite("hysteresis", &PagerOptions::hysteresis)
      .def_readwrite("threads", &PagerOptions::threads)
      .def_readwrite("workers", &PagerOptions::workers)
      .def_readwrite("namespace_key", &PagerOptions::namespace_key)
      .def_readwrite("window", &PagerOptions::window)
      .def_readwrite("rewind", &PagerOptions::rewind)
      .def_readwrite("shuffle_seed", &PagerOptions::shuffle_seed)
      .def_readwrite("poison", &PagerOptions::poison)
      .def_readwrite("device", &PagerOptions::device)
      .def_readwrite("q_heads", &PagerOptions::q_heads)
      .def_readwrite("attention", &PagerOptions::attention)
      .def_readwrite("missed_chunks", &PagerOptions::missed_chunks);
}

}  // namespace kvpager
