// A CUDA runtime without a GPU: it hands what an exported launcher asks for to whoever has set the hooks below.
#include <cstddef>
#include <map>
#include <string>

struct Dim3 {
    unsigned x, y, z;
};

namespace {

std::map<const void*, std::string>& kernels()  // by the address of their stub on the host
{
    static std::map<const void*, std::string> names;
    return names;
}

}  // namespace

extern "C" {

// name, blocks in x, y, z, threads in x, y, z, dynamic shared memory, stream, addresses of the arguments
int (*on_launch)(const char*, const unsigned*, size_t, void*, void**);
int (*on_set)(void*, size_t pitch, int value, size_t width, size_t height, void* stream);
int (*on_attribute)(const char*, int attribute, int value);
int current_device = 0;

int cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t smem, void* stream)
{
    const unsigned shape[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
    return on_launch(kernels().at(kernel).c_str(), shape, smem, stream, arguments);
}

int cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, void* stream)
{
    return on_set(to, pitch, value, width, height, stream);
}

int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) { return on_set(to, bytes, value, bytes, 1, stream); }

int cudaFuncSetAttribute(const void* kernel, int attribute, int value)
{
    return on_attribute(kernels().at(kernel).c_str(), attribute, value);
}

int cudaGetDevice(int* device)
{
    *device = current_device;
    return 0;
}

// What nvcc's own code calls when a program starts.
void** __cudaRegisterFatBinary(void*)
{
    static void* handle = nullptr;
    return &handle;
}

void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, void*, void*, void*, void*, int*)
{
    kernels()[stub] = name;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }

// What it would call for kernel<<<...>>>, which a launcher does not use.
int __cudaGetKernel(void**, const void*) { return 1; }
int __cudaLaunchKernel(void*, Dim3, Dim3, void**, size_t, void*) { return 1; }
int __cudaPopCallConfiguration(Dim3*, Dim3*, size_t*, void*) { return 1; }
}
