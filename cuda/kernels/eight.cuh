// Eight neighbouring values of a row at a time: in 16-byte pieces where rows
// begin on 16 bytes, one by one elsewhere. Which of the two changes no bit.
#pragma once
#include "element.cuh"

struct Eight {
  float v[8];
};

// on16 says whether rows that begin at p are read and written in whole pieces.
template <typename T> __device__ inline bool on16(const T *p, int cols) {
  return (unsigned long long)p % 16 == 0 && cols % 8 == 0;
}

// load8 is values 8c..8c+7 of a row; past its end they are 0.
__device__ inline Eight load8(const bf16 *row, int c, int cols, bool whole) {
  Eight e;
  if (whole) {
    const uint4 bits = ((const uint4 *)row)[c];
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      e.v[2 * i] = __uint_as_float(words[i] << 16);
      e.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return e;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    e.v[i] = 8 * c + i < cols ? load(row + 8 * c + i) : 0;
  return e;
}

__device__ inline Eight load8(const float *row, int c, int cols, bool whole) {
  Eight e;
  if (whole) {
    const float4 a = ((const float4 *)row)[2 * c], b = ((const float4 *)row)[2 * c + 1];
    e.v[0] = a.x, e.v[1] = a.y, e.v[2] = a.z, e.v[3] = a.w, e.v[4] = b.x, e.v[5] = b.y, e.v[6] = b.z, e.v[7] = b.w;
    return e;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    e.v[i] = 8 * c + i < cols ? row[8 * c + i] : 0;
  return e;
}

// store8 writes them; what is past the row's end is left alone.
__device__ inline void store8(bf16 *row, int c, int cols, bool whole, const Eight &e) {
  if (whole) {
    uint4 bits;
    unsigned *words = (unsigned *)&bits;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(e.v[2 * i], e.v[2 * i + 1]);
      words[i] = *(const unsigned *)&two;
    }
    ((uint4 *)row)[c] = bits;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (8 * c + i < cols)
      store(row + 8 * c + i, e.v[i]);
}

__device__ inline void store8(float *row, int c, int cols, bool whole, const Eight &e) {
  if (whole) {
    ((float4 *)row)[2 * c] = make_float4(e.v[0], e.v[1], e.v[2], e.v[3]);
    ((float4 *)row)[2 * c + 1] = make_float4(e.v[4], e.v[5], e.v[6], e.v[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (8 * c + i < cols)
      row[8 * c + i] = e.v[i];
}
