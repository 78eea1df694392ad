/* A float8 operand of matmul.h, widened to bfloat16 in the order in which it is multiplied there.
 *
 * A line is a row of a or a column of b: what a sum runs along. Lines are taken by groups of 16. A group is packed as
 * words [k / 2][16]: the numbers of its lines at k, in the high half, and at k + 1. What is beyond the matrix is 0.
 */
#ifndef QUAVER_PACK_H
#define QUAVER_PACK_H

#include "avx512.h"

enum { GROUP = 16 };

typedef struct {
    const uint8_t *codes;
    int float8;
    int64_t lines, k;
    int64_t to_line, to_k; /* from a code to that of the next line, and to the next of its line; one of them is 1 */
} Factor;

INLINE int64_t groups_of(int64_t lines) { return (lines + GROUP - 1) / GROUP; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__x86_64__) && defined(__GNUC__)

/* 16 codes of each of four lines: the first, fifth, ninth and thirteenth. */
AVX512_INLINE __m512i every_fourth(const uint8_t *codes, int64_t to_line) {
#define LINE(I) _mm_loadu_si128((const __m128i *)(codes + (I) * to_line))
    __m512i lines = _mm512_castsi128_si512(LINE(0));
    lines = _mm512_mask_broadcast_i32x4(lines, 0x00F0, LINE(4));
    lines = _mm512_mask_broadcast_i32x4(lines, 0x0F00, LINE(8));
    return _mm512_mask_broadcast_i32x4(lines, 0xF000, LINE(12));
#undef LINE
}

/* 16 codes of each of 16 lines, contiguous in each -> words [8][16]. Transposed by pairs of codes, then looked up. */
AVX512_INLINE void pack_block(Lookup numbers, const uint8_t *codes, int64_t to_line, uint32_t *words) {
    const __m512i swap = _mm512_set4_epi32(0x0E0F0C0D, 0x0A0B0809, 0x06070405, 0x02030001);
    __m512i line[4], pairs[4], of_lower, of_upper;
    for (int i = 0; i < 4; i++) line[i] = _mm512_shuffle_epi8(every_fourth(codes + i * to_line, to_line), swap);
    __m512i low = _mm512_unpacklo_epi16(line[0], line[1]), further_low = _mm512_unpacklo_epi16(line[2], line[3]);
    __m512i high = _mm512_unpackhi_epi16(line[0], line[1]), further_high = _mm512_unpackhi_epi16(line[2], line[3]);
    pairs[0] = _mm512_unpacklo_epi32(low, further_low), pairs[1] = _mm512_unpackhi_epi32(low, further_low);
    pairs[2] = _mm512_unpacklo_epi32(high, further_high), pairs[3] = _mm512_unpackhi_epi32(high, further_high);
    for (int i = 0; i < 4; i++) {
        look_up(numbers, pairs[i], &of_lower, &of_upper);
        _mm512_storeu_si512(words + 32 * i, of_lower);
        _mm512_storeu_si512(words + 32 * i + 16, of_upper);
    }
}

/* One group whose lines are contiguous, `depth` codes of each, of `lines` lines. */
AVX512_INLINE void pack_lines(Lookup numbers, const uint8_t *codes, int64_t to_line, int64_t lines, int64_t depth,
                              uint32_t *words) {
    int64_t k = 0;
    if (lines >= GROUP)
        for (; k + 16 <= depth; k += 16) pack_block(numbers, codes + k, to_line, words + k * 8);
    for (; k < depth; k += 16) {
        uint8_t padded[GROUP * 16] = {0};
        uint32_t packed[8 * GROUP];
        const int64_t count = least(16, depth - k);
        for (int64_t i = 0; i < least(lines, GROUP); i++) memcpy(padded + i * 16, codes + i * to_line + k, count);
        pack_block(numbers, padded, 16, packed);
        memcpy(words + k * 8, packed, (count + 1) / 2 * GROUP * sizeof(uint32_t));
    }
}

/* Up to four groups (64 lines) whose lines lie side by side: `depth` codes of each -> words [groups][to_group]. */
AVX512_INLINE void pack_columns(Lookup numbers, const uint8_t *codes, int64_t to_k, int64_t lines, int64_t depth,
                                uint32_t *words, int64_t to_group) {
    const __m512i first_two = _mm512_setr_epi64(0, 2, 1, 3, 8, 10, 9, 11);
    const __m512i last_two = _mm512_setr_epi64(4, 6, 5, 7, 12, 14, 13, 15);
    const __mmask64 there = lines >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << lines) - 1;
    const int64_t groups = groups_of(lines);
    for (int64_t k = 0; k < depth; k += 2) {
        __m512i even = _mm512_maskz_loadu_epi8(there, codes + k * to_k), odd = _mm512_setzero_si512(), packed[4];
        if (k + 1 < depth) odd = _mm512_maskz_loadu_epi8(there, codes + (k + 1) * to_k);
        __m512i low = _mm512_unpacklo_epi8(odd, even), high = _mm512_unpackhi_epi8(odd, even);
        look_up(numbers, _mm512_permutex2var_epi64(low, first_two, high), packed, packed + 1);
        look_up(numbers, _mm512_permutex2var_epi64(low, last_two, high), packed + 2, packed + 3);
        for (int i = 0; i < 4; i++)
            if (i < groups) _mm512_storeu_si512(words + i * to_group + k * 8, packed[i]);
    }
}

/* `groups` groups from `first` on, `depth` numbers of each line from `from_k` on, -> words
 * [groups][(depth + 1) / 2][16]. NaN and inf are looked up like all others. */
AVX512 static void pack(const Factor *factor, int64_t first, int64_t groups, int64_t from_k, int64_t depth,
                        uint32_t *words) {
    const int64_t to_line = factor->to_line, to_k = factor->to_k, to_group = (depth + 1) / 2 * GROUP;
    const int64_t lines = least(factor->lines - first * GROUP, groups * GROUP);
    const uint8_t *codes = factor->codes + first * GROUP * to_line + from_k * to_k;
    __m512i table[4];
    for (int i = 0; i < 4; i++) table[i] = _mm512_loadu_si512(bfloat16_of_code[factor->float8] + 32 * i);
    const Lookup numbers = lookup_of(table);
    if (to_k == 1) {
        for (int64_t i = 0; i < groups; i++)
            pack_lines(numbers, codes + i * GROUP * to_line, to_line, lines - i * GROUP, depth, words + i * to_group);
        return;
    }
    for (int64_t i = 0; i < groups; i += 4)
        pack_columns(numbers, codes + i * GROUP, to_k, least(lines - i * GROUP, 64), depth, words + i * to_group,
                     to_group);
}

#endif
#endif
