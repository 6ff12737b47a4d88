// Made by flashsmith export: forward of bf16 d=64, for sm_80.
//
// Compile flashsmith_forward_bf16_d64.cu, which includes this file, with
//     nvcc -std=c++17 -arch=sm_80 -c flashsmith_forward_bf16_d64.cu
// and link the object with the CUDA runtime (-lcudart) into any C or C++ program. Nothing else is needed.
//
// Example:
//     flashsmith_forward_bf16_d64_args args = {0};
//     args.B = B;
//     args.Hq = Hq;
//     args.Hk = Hk;
//     args.Nq = Nq;
//     args.Nk = Nk;
//     args.Q = (flashsmith_input){Q, Hq * Nq * 64, Nq * 64, 64};
//     args.K = (flashsmith_input){K, Hk * Nk * 64, Nk * 64, 64};
//     args.V = (flashsmith_input){V, Hk * Nk * 64, Nk * 64, 64};
//     args.O = (flashsmith_output){O, Hq * Nq * 64, Nq * 64, 64};
//     args.m = m;
//     args.l = l;
//     int error = flashsmith_forward_bf16_d64(&args);
//     if (error) {
//         const char *why = flashsmith_forward_bf16_d64_why_refused(&args);
//         fprintf(stderr, "%s\n", why ? why : cudaGetErrorString(error));
//     }
#ifndef FLASHSMITH_FORWARD_BF16_D64_H
#define FLASHSMITH_FORWARD_BF16_D64_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef FLASHSMITH_TENSORS
#define FLASHSMITH_TENSORS
// Tensors [batch, head, row, column] on the device. Strides count elements. Columns are contiguous, and every row starts on
// 16 bytes.
typedef struct {
    const void *data;
    int64_t batch, head, row;  // strides
} flashsmith_input;

typedef struct {
    void *data;
    int64_t batch, head, row;
} flashsmith_output;
#endif

// Tensors [batch, head, row, column] are of bf16; strides are multiples of 8.
typedef struct {
    flashsmith_input Q;  // [B, Hq, Nq, d]
    flashsmith_input K;  // [B, Hk, Nk, d]
    flashsmith_input V;  // [B, Hk, Nk, d]
    flashsmith_output O;  // [B, Hq, Nq, d]
    float *m;  // [B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key; contiguous
    float *l;  // [B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key; contiguous
    int64_t B;  // sequences
    int64_t Hq;  // query heads
    int64_t Hk;  // key/value heads; query head h reads head h / (Hq / Hk)
    int64_t Nq;  // query rows of a head
    int64_t Nk;  // keys of a head
    double scale;  // of Q K^T; 0: 0.125
    struct CUstream_st *stream;  // a cudaStream_t; null: the default stream
} flashsmith_forward_bf16_d64_args;

// Launch the pass on the stream and return at once; any thread may call it. Returns a cudaError_t: cudaSuccess (0),
// cudaErrorInvalidValue (1) for arguments that are refused, see below, or what the CUDA runtime says.
// Where B, Hq, Nq or Nk is 0 no kernel is launched: O is 0, m is -inf, l is 0.
int flashsmith_forward_bf16_d64(const flashsmith_forward_bf16_d64_args *args);

// Why these arguments cannot be launched, as a sentence; null if they can.
const char *flashsmith_forward_bf16_d64_why_refused(const flashsmith_forward_bf16_d64_args *args);

#ifdef __cplusplus
}
#endif
#endif
