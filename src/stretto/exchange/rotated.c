/* A rotated wire on a processor, in one pass over memory; `rotated.py` says what is computed. Sums of products are exact,
 * so that their order is free. All other steps are those of `rotated.py`, and -ffp-contract=off keeps them apart.
 *
 * From outside: BITS, STEPS, GOLDEN, CELLS_OF_NORM. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64, CELLS = 1024, BYTES = 8 * BITS + 2, CODE = (1 << BITS) - 1, INFINITE = 0x7F800000 };

static uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

typedef float Vector __attribute__((vector_size(32), aligned(4)));

#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast") /* here alone, where sums are exact */
static void multiply(const float *row, const float *matrix, float *product) {
    Vector a = {0}, b = a, c = a, d = a, e = a, f = a, g = a, h = a; /* in registers */
    const Vector *m = (const Vector *)matrix;
    for (int k = 0; k < BLOCK; ++k, m += 8) {
        float x = row[k];
        a += x * m[0], b += x * m[1], c += x * m[2], d += x * m[3];
        e += x * m[4], f += x * m[5], g += x * m[6], h += x * m[7];
    }
    Vector *p = (Vector *)product;
    p[0] = a, p[1] = b, p[2] = c, p[3] = d, p[4] = e, p[5] = f, p[6] = g, p[7] = h;
}
#pragma GCC pop_options

static float sum(float *values) { /* in the order of `block_sums` */
    for (int half = BLOCK / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) values[i] += values[i + half];
    return values[0];
}

/* Runs of the bits of numbers that fill bytes evenly: `_RUNS`. */
static inline void join(const uint8_t *codes, uint8_t *bytes, int first, int length) {
    memset(bytes, 0, 8 * length);
    for (int run = 0; run < 8 / length; ++run)
        for (int i = 0; i < 8 * length; ++i)
            bytes[i] |= (codes[8 * length * run + i] >> first & ((1 << length) - 1)) << length * run;
}

static inline void part(const uint8_t *bytes, uint8_t *codes, int first, int length) {
    for (int run = 0; run < 8 / length; ++run)
        for (int i = 0; i < 8 * length; ++i)
            codes[8 * length * run + i] |= (bytes[i] >> length * run & ((1 << length) - 1)) << first;
}

void pack(const float *values, uint8_t *packed, const float *turn, const float *offsets, const float *levels,
          long rows, long count, uint32_t first) {
    for (long block = 0; block < rows * count; ++block, values += BLOCK, packed += BYTES) {
        uint32_t top = 1, half = 0x7FC0; /* of a block with a value that is not finite */
        for (int i = 0; i < BLOCK; ++i) {
            uint32_t size = bits_of(values[i]) & 0x7FFFFFFF;
            top = size > top ? size : top;
        }
        uint8_t codes[BLOCK];
        memset(codes, bits_of(levels[0]) & CODE, BLOCK);
        if (top < INFINITE) {
            float largest = float_of(top), whole[BLOCK], turned[BLOCK], found[BLOCK];
            for (int i = 0; i < BLOCK; ++i) whole[i] = values[i] / largest, found[i] = whole[i] * whole[i];
            float root = sqrtf(sum(found)), width = 1.0f / (root < 1.0f ? 1.0f : root) * (float)STEPS;
            for (int i = 0; i < BLOCK; ++i) whole[i] = floorf(whole[i] * width + offsets[i]);
            for (int i = 0; i < BLOCK; ++i) found[i] = whole[i] * whole[i];
            float norm = sqrtf(sum(found)), by = 1.0f / (norm < 1.0f ? 1.0f : norm) * (float)CELLS_OF_NORM;
            multiply(whole, turn, turned);
            int32_t cells[BLOCK];
            for (int i = 0; i < BLOCK; ++i) turned[i] *= by, cells[i] = (int32_t)turned[i] & (CELLS - 1);
            for (int i = 0; i < BLOCK; ++i) found[i] = levels[cells[i]];
            for (int i = 0; i < BLOCK; ++i) codes[i] = bits_of(found[i]) & CODE;
            for (int i = 0; i < BLOCK; ++i) found[i] = float_of(bits_of(found[i]) & ~(uint32_t)CODE) * turned[i];
            float along = sum(found), scale = norm * (float)CELLS_OF_NORM / (along < 1.0f ? 1.0f : along) / width * largest;
            uint32_t bits = bits_of(scale), most = 0x7F7F0000;
            half = ((bits > most ? most : bits) + (((uint32_t)(block % count) * GOLDEN + first) & 0xFFFF)) >> 16;
        }
        join(codes, packed, 0, BITS == 3 ? 2 : BITS);
        if (BITS == 3) join(codes, packed + 16, 2, 1);
        packed[BYTES - 2] = half & 0xFF, packed[BYTES - 1] = half >> 8;
    }
}

void unpack(const uint8_t *packed, float *values, const float *uniform, const float *signs, const float *levels,
            long rows, long count) {
    for (long block = 0; block < rows * count; ++block, values += BLOCK, packed += BYTES) {
        uint8_t codes[BLOCK] = {0};
        part(packed, codes, 0, BITS == 3 ? 2 : BITS);
        if (BITS == 3) part(packed + 16, codes, 2, 1);
        float found[BLOCK], other[BLOCK], most = 0x1.fffffep127f;
        for (int i = 0; i < BLOCK; ++i) found[i] = levels[codes[i]];
        multiply(found, uniform, other);
        for (int i = 0; i < BLOCK; ++i) found[i] = other[i] * signs[BLOCK * (block / count) + i];
        for (int bit = 0; bit < 6; ++bit) { /* the product with 8 H: of halves, sums and differences side by side */
            for (int i = 0; i < BLOCK / 2; ++i) {
                other[2 * i] = found[i] + found[i + BLOCK / 2];
                other[2 * i + 1] = found[i] - found[i + BLOCK / 2];
            }
            memcpy(found, other, sizeof found);
        }
        float scale = float_of((uint32_t)(packed[BYTES - 2] | packed[BYTES - 1] << 8) << 16);
        for (int i = 0; i < BLOCK; ++i) {
            float value = found[i] / 8 * scale;
            value = value > most ? most : value;
            values[i] = (value < -most ? -most : value) + 0.0f;
        }
    }
}
