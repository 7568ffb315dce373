// A libcuda.so.1 for machines without a driver, so that cuDNN builds plans for a described device: the engines that compile
// at run time load what they made and ask how many blocks fit. Nothing runs. Every other function of the driver that
// cuDNN names is appended by the test, and says that there is no device.
#include <cstdint>
#include <cstring>
#include <dlfcn.h>

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuGetErrorString(int, const char** text) { *text = "no device"; return 0; }
int cuGetErrorName(int, const char** text) { *text = "NO_DEVICE"; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) { *library = (void*)1; return 0; }
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(void** kernel, void*, const char*) { *kernel = (void*)1; return 0; }
int cuLibraryGetModule(void** module, void*) { *module = (void*)1; return 0; }
int cuKernelGetFunction(void** function, void*) { *function = (void*)1; return 0; }
int cuKernelGetAttribute(int* value, int, void*, int) { *value = 0; return 0; }
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuModuleLoadData(void** module, const void*) { *module = (void*)1; return 0; }
int cuModuleGetFunction(void** function, void*, const char*) { *function = (void*)1; return 0; }
int cuModuleUnload(void*) { return 0; }
int cuFuncGetAttribute(int* value, int, void*) { *value = 0; return 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuOccupancyMaxActiveClusters(int* count, void*, const void*) { *count = 66; return 0; }
int cuOccupancyMaxPotentialClusterSize(int* size, void*, const void*) { *size = 8; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) { *count = 1; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, void*, int, size_t, unsigned) { *count = 1; return 0; }
int cuGetProcAddress_v2(const char* name, void** address, int, uint64_t, int* status) {
    *address = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
    if (status) *status = *address ? 0 : 1;
    return *address ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, nullptr);
}
}
