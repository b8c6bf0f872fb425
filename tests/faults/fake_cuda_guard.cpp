// One CUDA card for a torch that is built without CUDA: what autograd asks for before it takes fake tensors.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct CardGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
};
C10_REGISTER_GUARD_IMPL(CUDA, CardGuard)
}

namespace at {
struct CardHooks final : CUDAHooksInterface {
  explicit CardHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", CardHooks)
}
