// The eager half of an attention operator, without Python: allocate, launch, save; in the backward the same again.
//
//   call = Call(name, device, forward, watched, fallback)    a call of some shapes, strides, dtype and options
//   call(q, k, v)             -> (output, lse), differentiable; None where Python has to make the call
//   call.add_backward(pass)   what a backward did, for upstream gradients of one shape and strides
//
// A pass is what Python found out by launching once (triton/calls.py): tensors to allocate and kernels to launch, each kernel
// with a block of parameters in which the addresses of this call's tensors are put into their places. Whatever a pass
// does not describe goes to `fallback`, which is the Python half: another upstream gradient, gradients of gradients,
// modes and transforms, a launch that the driver refuses. Nothing here needs CUDA's headers or its library: Python says
// where the driver's two functions are.
// Sources: CUDA Driver API, cuLaunchKernelEx, CUlaunchAttribute and cuTensorMapReplaceAddress; PyTorch,
// torch/csrc/autograd/custom_function.h.

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace cs336_systems {

using at::Tensor;
using torch::autograd::variable_list;

constexpr size_t kAlignment = 64; // of a tensor map; parameters lie at multiples of it
constexpr size_t kMaxBackwards = 4; // of a call: upstream gradients come with other strides
constexpr uintptr_t kPointerAlignment = 16; // what the kernels were compiled for, and what the copy engine reads

// cuda.h's CUlaunchAttribute; its value, here one integer, is a union of 64 bytes
struct alignas(8) LaunchAttribute {
  int id, padding, value, rest[15];
};

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: may start before the kernel ahead in the stream has ended
constexpr LaunchAttribute kOverlaps{6, 0, 1, {}};
static_assert(sizeof(LaunchAttribute) == 72);

// cuda.h's CUlaunchConfig
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

using LaunchKernel = int (*)(const LaunchConfig*, void* function, void** parameters, void** extra);
using ReplaceAddress = int (*)(void* tensor_map, void* address);

LaunchKernel launch_kernel = nullptr;
ReplaceAddress replace_address = nullptr;

// Where in a block of parameters the address of a tensor goes.
struct Slot {
  size_t offset;
  size_t tensor_index; // which of the pass
  bool is_map; // within a tensor map, which the driver writes
};

struct Kernel {
  uint64_t function;
  LaunchConfig config;
  std::string block; // the parameters, each at a multiple of kAlignment
  std::vector<size_t> offsets; // of each
  std::vector<Slot> slots;
};

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

// The driver refused a launch. Python's launches say why.
struct Refused {};

// What a tensor has to be for a pass to take it.
struct Expected {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;

  bool operator==(const Expected&) const = default;

  bool describes(const Tensor& x, c10::Device device) const {
    // Whoever these stand for handles the tensor otherwise than by its memory.
    static const c10::DispatchKeySet others{
        c10::DispatchKey::Python, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
        c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize, c10::DispatchKey::Batched,
        c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper};
    return x.defined() && !x.key_set().has_any(others) && x.layout() == at::kStrided && x.device() == device &&
        x.scalar_type() == dtype && x.sizes() == at::IntArrayRef(sizes) && x.strides() == at::IntArrayRef(strides) &&
        reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kPointerAlignment == 0;
  }
};

// Tensors are numbered: first what the pass is given, then what it allocates, of which the first are its results.
struct Pass {
  std::vector<Expected> given;
  std::vector<Allocation> allocations;
  std::vector<Kernel> kernels;

  bool takes(const variable_list& inputs, c10::Device device) const {
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].describes(inputs[i], device)) {
        return false;
      }
    }
    return true;
  }

  // Everything allocated, with all kernels launched on the current stream. Throws Refused, with what was allocated
  // gone, and kernels that had been launched writing to it in their order on the stream.
  variable_list run(const variable_list& inputs, c10::Device device) const {
    const c10::DeviceGuard guard(device);
    std::vector<void*> addresses;
    addresses.reserve(given.size() + allocations.size());
    for (const auto& x : inputs) {
      addresses.push_back(const_cast<void*>(x.const_data_ptr()));
    }
    variable_list allocated;
    allocated.reserve(allocations.size());
    for (const auto& wanted : allocations) {
      const auto options = at::TensorOptions().dtype(wanted.dtype).device(device);
      allocated.push_back(at::empty_strided(wanted.sizes, wanted.strides, options));
      addresses.push_back(allocated.back().data_ptr());
    }
    void* stream = nullptr;
    if (!device.is_cpu()) {
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    }
    for (const auto& kernel : kernels) {
      launch(kernel, addresses, stream);
    }
    return allocated;
  }

 private:
  static void launch(const Kernel& kernel, const std::vector<void*>& addresses, void* stream) {
    struct alignas(kAlignment) Line {
      char bytes[kAlignment];
    };
    std::vector<Line> lines(kernel.block.size() / kAlignment);
    char* block = lines.data()->bytes;
    std::memcpy(block, kernel.block.data(), kernel.block.size());
    for (const auto& slot : kernel.slots) {
      void* address = addresses[slot.tensor_index];
      if (!slot.is_map) {
        std::memcpy(block + slot.offset, &address, sizeof(address));
      } else if (replace_address(block + slot.offset, address) != 0) {
        throw Refused();
      }
    }
    std::vector<void*> parameters;
    parameters.reserve(kernel.offsets.size());
    for (const auto offset : kernel.offsets) {
      parameters.push_back(block + offset);
    }
    LaunchConfig config = kernel.config;
    config.stream = stream;
    if (launch_kernel(&config, reinterpret_cast<void*>(kernel.function), parameters.data(), nullptr) != 0) {
      throw Refused();
    }
  }
};

class Call;

// Calls live as long as the process, so that a node of the graph names its own by an id.
std::vector<Call*>& calls() {
  static auto* all = new std::vector<Call*>;
  return *all;
}
std::mutex calls_mutex;

struct AttentionOperator : torch::autograd::Function<AttentionOperator> {
  static variable_list forward(
      torch::autograd::AutogradContext* ctx, int64_t id, const Tensor& q, const Tensor& k, const Tensor& v);
  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads);
};

// Called with or without Python's lock, which is taken where Python is called.
class Call {
 public:
  Call(std::string name, c10::Device device, Pass forward, py::function watched, py::function fallback)
      : name_(std::move(name)), device_(device), forward_(std::move(forward)), watched_(std::move(watched)),
        fallback_(std::move(fallback)) {
    const std::lock_guard<std::mutex> lock(calls_mutex);
    id_ = static_cast<int64_t>(calls().size());
    calls().push_back(this);
  }

  static Call& by_id(int64_t id) {
    const std::lock_guard<std::mutex> lock(calls_mutex);
    return *calls().at(id);
  }

  variable_list launch_forward(const Tensor& q, const Tensor& k, const Tensor& v) const {
    RECORD_FUNCTION(name_, c10::ArrayRef<const c10::IValue>{});
    auto results = forward_.run({q, k, v}, device_);
    results.resize(2); // the rest is scratch memory
    return results;
  }

  std::optional<std::tuple<Tensor, Tensor>> operator()(const Tensor& q, const Tensor& k, const Tensor& v) const {
    if (!forward_.takes({q, k, v}, device_)) {
      return std::nullopt;
    }
    const bool differentiable =
        at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
    try {
      const auto results = differentiable ? AttentionOperator::apply(id_, q, k, v) : launch_forward(q, k, v);
      return std::make_tuple(results[0], results[1]);
    } catch (const Refused&) {
      return std::nullopt;
    }
  }

  // saved: q, k, v, output, lse; gradients that nobody sent are undefined.
  variable_list differentiate(variable_list saved, const Tensor& grad_output, const Tensor& grad_lse) const {
    if (!grad_lse.defined() && !at::GradMode::is_enabled() && !is_watched()) {
      saved.push_back(grad_output);
      for (const auto& kept : backwards_) {
        const Pass* pass = kept.load();
        if (pass == nullptr || !pass->takes(saved, device_)) {
          continue;
        }
        RECORD_FUNCTION(name_ + "_backward", c10::ArrayRef<const c10::IValue>{});
        try {
          auto results = pass->run(saved, device_);
          results.resize(3);
          return results;
        } catch (const Refused&) {
          break;
        }
      }
      saved.pop_back();
    }
    const py::gil_scoped_acquire gil;
    py::list arguments;
    for (const auto& x : saved) {
      arguments.append(x);
    }
    for (const auto& grad : {grad_output, grad_lse}) {
      arguments.append(grad.defined() ? py::cast(grad) : py::none());
    }
    return py::cast<variable_list>(fallback_(*arguments));
  }

  // Whether it is kept now. Called with Python's lock, so by one thread at a time.
  bool add_backward(Pass pass) {
    for (auto& kept : backwards_) {
      if (kept.load() == nullptr) {
        kept.store(new Pass(std::move(pass)));
        return true;
      }
      if (kept.load()->given == pass.given) {
        return true; // another thread's
      }
    }
    return false;
  }

 private:
  bool is_watched() const {
    const py::gil_scoped_acquire gil;
    return py::cast<bool>(watched_());
  }

  std::string name_;
  c10::Device device_;
  Pass forward_;
  std::array<std::atomic<const Pass*>, kMaxBackwards> backwards_{}; // read without a lock, written once
  py::function watched_, fallback_;
  int64_t id_;
};

variable_list AttentionOperator::forward(
    torch::autograd::AutogradContext* ctx, int64_t id, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto results = Call::by_id(id).launch_forward(q, k, v);
  ctx->set_materialize_grads(false);
  ctx->save_for_backward({q, k, v, results[0], results[1]});
  ctx->saved_data["call"] = id;
  return results;
}

variable_list AttentionOperator::backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
  const auto& call = Call::by_id(ctx->saved_data["call"].toInt());
  auto results = call.differentiate(ctx->get_saved_variables(), grads[0], grads[1]);
  return {Tensor(), results[0], results[1], results[2]};
}

// From Python a pass is (given, allocations, kernels), in lists and tuples.
using TensorFacts = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;
using KernelFacts = std::tuple<
    uint64_t, std::tuple<unsigned, unsigned, unsigned>, unsigned, unsigned, bool, py::bytes, std::vector<size_t>,
    std::vector<std::tuple<size_t, size_t, bool>>>;
using PassFacts = std::tuple<std::vector<TensorFacts>, std::vector<TensorFacts>, std::vector<KernelFacts>>;

Pass pass_of(const PassFacts& facts) {
  Pass pass;
  for (const auto& [sizes, strides, dtype] : std::get<0>(facts)) {
    pass.given.push_back({sizes, strides, dtype});
  }
  for (const auto& [sizes, strides, dtype] : std::get<1>(facts)) {
    pass.allocations.push_back({sizes, strides, dtype});
  }
  for (const auto& [function, grid, threads, shared, overlaps, block, offsets, slots] : std::get<2>(facts)) {
    const auto [x, y, z] = grid;
    const LaunchConfig config{x, y, z, threads, 1, 1, shared, nullptr, overlaps ? &kOverlaps : nullptr, overlaps};
    Kernel kernel{function, config, block, offsets, {}};
    for (const auto& [offset, tensor_index, is_map] : slots) {
      kernel.slots.push_back({offset, tensor_index, is_map});
    }
    pass.kernels.push_back(std::move(kernel));
  }
  return pass;
}

} // namespace cs336_systems

using namespace cs336_systems;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_driver", [](uintptr_t launch, uintptr_t replace) {
    launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    replace_address = reinterpret_cast<ReplaceAddress>(replace);
  });
  py::class_<Call, std::unique_ptr<Call, py::nodelete>>(m, "Call")
      .def(py::init([](std::string name, c10::Device device, const PassFacts& forward, py::function watched,
                       py::function fallback) {
        return new Call(std::move(name), device, pass_of(forward), std::move(watched), std::move(fallback));
      }))
      .def("__call__", &Call::operator(), py::call_guard<py::gil_scoped_release>())
      .def("add_backward", [](Call& call, const PassFacts& facts) { return call.add_backward(pass_of(facts)); });
}
