// Marks functions that both the CPU core and CUDA kernels compile.
#pragma once

#if defined(__CUDACC__)
#define WS_HD __host__ __device__
#else
#define WS_HD
#endif
