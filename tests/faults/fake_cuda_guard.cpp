// One CUDA card for a torch that is built without CUDA: what autograd asks for before it accepts CUDA tensors.
// Loaded by fake_cuda.py before torch is imported. The tensors are fake, so that nothing ever runs on this card.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
// Which streams a device has: autograd asks for the current one of each tensor, and here it is always the default.
struct CardGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
};
C10_REGISTER_GUARD_IMPL(CUDA, CardGuard)
}

namespace at {
// Whether there is CUDA: yes, with a context that exists already, so that nobody tries to create one.
struct CardHooks final : CUDAHooksInterface {
  explicit CardHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", CardHooks)
}
