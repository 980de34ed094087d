// A device guard that does nothing, for tensors "on cuda" where torch has no CUDA: autograd asks for one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

extern "C" void use_guard() {
    static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> nothing;
    auto& place = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
    if (place.load() == nullptr) place.store(&nothing);
}
