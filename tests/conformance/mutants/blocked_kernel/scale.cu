// y = factor x.  The text is only mutated: `<` in a comment, a string and a template stay.
#include <cuda_fp16.h>
#define COUNT (1 + 1)

template <class T>
__device__ T larger(T a, T b) {
    return a < b ? b : max(a, b);
}

template <class T, int ROWS>
__global__ void scale(const T* x, T* y, int stride_b, int stride_h, float factor) {
    __shared__ T tile[ROWS];
    float total = 0.0f;
    for (int i = threadIdx.x; i < stride_h; i += 32) {
        tile[i] = x[offset(stride_b, stride_h) + i];  /* a < b */
        total += static_cast<float>(tile[i]);
    }
    __syncthreads();
    if (threadIdx.x == 0 && total > 0.5f) y[blockIdx.x + 1] = T(total * factor);
    printf("%d < %d\n", 1, 2);
}
