// All kernels for one instruction set. The build compiles this file once for each, with its flags and its K3_LEVEL and K3_NAMESPACE.
#include "dense.h"
#include "kda.h"
#include "mla.h"
#include "moe.h"

namespace k3 {
namespace K3_NAMESPACE {
extern const Kernels kernels = {linear, gate_up, mix, rms_norm, situ, kda, mla_rows, mla_absorb, mla_attend, mla_value, route, experts};
}
}  // namespace k3
