// Rows of queries and outputs rotated on a device: the bits of the CPU's kernel.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernel_table.h"
#include "problem.h"

namespace kvpager::testing {
namespace {

TEST_CASE("rows are rotated on a device as on the processor, from and to any dtype and stride") {
  for_each_device([](device::Device& device) {
    std::mt19937 random(1);
    for (const int dim : {16, 32, 48, 80, 128, 192, 256, 512}) {
      CAPTURE(dim);
      const int64_t rows = 5;
      const int64_t heads = 3;
      const int64_t padding = dim % 3;  // between heads
      const int64_t head = dim + padding;
      const DType from = kDTypes[random() % 3];
      const DType to = kDTypes[random() % 3];
      const int64_t in_bytes = rows * heads * head * dtype_bytes(from);
      const int64_t out_bytes = rows * heads * dim * dtype_bytes(to);
      std::vector<std::byte> in(static_cast<size_t>(in_bytes), std::byte{0xFF});
      std::vector<std::byte> expected(static_cast<size_t>(out_bytes), std::byte{0x5A});
      std::normal_distribution<float> normal(0.0f, 3.0f);
      const int64_t counted = rows - 1;  // the last row is not of the forward
      for (int64_t i = 0; i < counted * heads; ++i) {
        std::vector<float> x(static_cast<size_t>(dim));
        for (int d = 0; d < dim; ++d) {
          float& number = x[static_cast<size_t>(d)];
          number = round_to(from, normal(random));
          round_to(from, number, in.data(), i * head + d);
        }
        kernels().rotate(x.data(), dim);
        for (int d = 0; d < dim; ++d) {
          round_to(to, x[static_cast<size_t>(d)], expected.data(), i * dim + d);
        }
      }
      const device::Memory device_in = device.allocate("in", in_bytes);
      const device::Memory device_out = device.allocate("out", out_bytes);
      const device::Memory device_header = device.allocate("header", sizeof(gpu::Header));
      TestStream stream(device);
      gpu::Header header;
      header.rows = static_cast<int32_t>(counted);
      stream.upload(device_in.data(), in.data(), in_bytes);
      stream.upload(device_header.data(), &header, sizeof header);
      stream.fill(device_out.data(), 0x5A, out_bytes);
      gpu::RotateParams params;
      params.header = reinterpret_cast<const gpu::Header*>(device_header.data());
      params.counts.rows = static_cast<int32_t>(rows);
      params.from = {device_in.data(), from, static_cast<int32_t>(heads), dim, heads * head, head};
      params.to = {device_out.data(), to, static_cast<int32_t>(heads), dim, heads * dim, dim};
      device.check(device.api().rotate(device.context(), &params, stream.get()), "rotate");
      std::vector<std::byte> got(expected.size());
      stream.download(got.data(), device_out.data(), out_bytes);
      CHECK(got == expected);
    }
  });
}

}  // namespace
}  // namespace kvpager::testing
