#include "ops/embedding/embedding.h"

#include "ops/embedding/embedding_cpu.h"

namespace fathom {

void embedding(const Stream& stream, std::span<const int32_t> ids, ConstTensorView table,
               TensorView out) {
  const auto rows = static_cast<int64_t>(ids.size());
  FATHOM_CHECK(
      table.rank() == 2 && out.rank() == 2 && out.size(0) == rows && out.size(1) == table.size(1),
      "{} ids, table {}, out {}", rows, table.shape_string(), out.shape_string());
  for (const int32_t id : ids) {
    FATHOM_CHECK(id >= 0 && id < table.size(0), "id {} of {}", id, table.size(0));
  }
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::embedding(stream.pool(), ids, table, out);
  }
}

}  // namespace fathom
