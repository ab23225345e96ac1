#include "ops/convert/convert.h"

#include "ops/convert/convert_cpu.h"

namespace fathom {

void convert(const Stream& stream, ConstTensorView x, TensorView out) {
  bool same = x.rank() == out.rank() && (x.rank() == 2 || x.rank() == 3);
  for (int d = 0; same && d < x.rank(); ++d) same = x.size(d) == out.size(d);
  FATHOM_CHECK(same, "x {}, out {}", x.shape_string(), out.shape_string());
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::convert(stream.pool(), x, out);
  }
}

}  // namespace fathom
