// What `Replay.__call__` of attention/triton/launch.py does, without Python: allocate, write addresses, launch.
//
//   replay = Replay(device, places, buffers, num_results, words, kernels, replace_address, launch)
//   replay(arguments) -> results; None where Python has to make the call: misaligned memory, a refusal of the driver
//
// Python laid everything out and keeps it alive; here are only its addresses. Nothing needs CUDA's headers or library.

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <mutex>
#include <tuple>
#include <vector>

namespace {

using Address = uint64_t;
constexpr Address kPointerAlignment = 16; // what the kernels were compiled for, and what the copy engine reads

struct Buffer {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Kernel {
  Address config; // cuda.h's CUlaunchConfig
  Address stream_in_config;
  Address function;
  Address parameters;
  std::vector<std::pair<Address, size_t>> maps; // tensor maps, and the numbers of their tensors
};

class Replay {
 public:
  using KernelFacts = std::tuple<Address, Address, Address, Address, std::vector<std::pair<Address, size_t>>>;
  using BufferFacts = std::tuple<std::vector<int64_t>, std::vector<int64_t>, py::object>;

  Replay(
      int device, std::vector<size_t> places, const std::vector<BufferFacts>& buffers, size_t num_results,
      Address words, const std::vector<KernelFacts>& kernels, Address replace_address, Address launch)
      : device_(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)), places_(std::move(places)),
        num_results_(num_results), words_(reinterpret_cast<Address*>(words)),
        replace_address_(reinterpret_cast<int (*)(Address, Address)>(replace_address)),
        launch_(reinterpret_cast<int (*)(Address, Address, Address, void*)>(launch)) {
    for (const auto& [sizes, strides, dtype] : buffers) {
      buffers_.push_back({sizes, strides, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type});
    }
    for (const auto& [config, stream, function, parameters, maps] : kernels) {
      kernels_.push_back({config, stream, function, parameters, maps});
    }
  }

  py::object operator()(const py::tuple& arguments) {
    std::vector<Address> addresses;
    addresses.reserve(places_.size() + buffers_.size());
    for (const auto place : places_) {
      const at::Tensor& x = THPVariable_Unpack(PyTuple_GET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(place)));
      addresses.push_back(reinterpret_cast<Address>(x.const_data_ptr()));
      if (addresses.back() % kPointerAlignment != 0) {
        return py::none();
      }
    }
    std::vector<at::Tensor> made;
    made.reserve(buffers_.size());
    for (const auto& buffer : buffers_) {
      const auto options = at::TensorOptions().dtype(buffer.dtype).device(device_);
      made.push_back(at::empty_strided(buffer.sizes, buffer.strides, options));
      addresses.push_back(reinterpret_cast<Address>(made.back().data_ptr()));
    }
    void* stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
    {
      const std::lock_guard<std::mutex> lock(mutex_); // the blocks of parameters serve one call at a time
      std::memcpy(words_, addresses.data(), addresses.size() * sizeof(Address));
      for (const auto& kernel : kernels_) {
        for (const auto& [map, number] : kernel.maps) {
          if (replace_address_(map, addresses[number]) != 0) {
            return py::none();
          }
        }
        std::memcpy(reinterpret_cast<void*>(kernel.stream_in_config), &stream, sizeof(stream));
        if (launch_(kernel.config, kernel.function, kernel.parameters, nullptr) != 0) {
          return py::none();
        }
      }
    }
    py::tuple results(num_results_);
    for (size_t i = 0; i < num_results_; ++i) {
      results[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(made[i])));
    }
    return results;
  }

 private:
  c10::Device device_;
  std::vector<size_t> places_; // of the tensors among the arguments
  std::vector<Buffer> buffers_; // results first
  size_t num_results_;
  Address* words_; // the addresses of all tensors, where kernels find them
  std::vector<Kernel> kernels_;
  int (*replace_address_)(Address map, Address tensor);
  int (*launch_)(Address config, Address function, Address parameters, void* extra);
  std::mutex mutex_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Replay>(module, "Replay")
      .def(py::init<
           int, std::vector<size_t>, const std::vector<Replay::BufferFacts>&, size_t, Address,
           const std::vector<Replay::KernelFacts>&, Address, Address>())
      .def("__call__", &Replay::operator());
}
