#include "ops/rms_norm/rms_norm.h"

#include "ops/rms_norm/rms_norm_cpu.h"

namespace fathom {

void rms_norm(const Stream& stream, ConstTensorView x, ConstTensorView weight, float eps,
              TensorView out) {
  FATHOM_CHECK(
      x.rank() == 2 && weight.rank() == 1 && out.rank() == 2 && x.size(1) > 0 &&
          weight.size(0) == x.size(1) && out.size(0) == x.size(0) && out.size(1) == x.size(1),
      "x {}, weight {}, out {}", x.shape_string(), weight.shape_string(), out.shape_string());
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::rms_norm(stream.pool(), x, weight, eps, out);
  }
}

}  // namespace fathom
