"""GGUF files, and the blocks of ggml's types, by the layouts of ggml (``ggml-common.h`` and ``ggml-quants.c``).

Each quantiser takes the 256 or 32 values of a block, and gives its bytes and the values that they stand for in float64.
"""

import struct

import numpy as np

STRING, ARRAY, INT32, UINT32 = 8, 9, 5, 4
TYPES = {
    "F32": (0, 1),
    "F16": (1, 1),
    "Q4_0": (2, 32),
    "Q4_1": (3, 32),
    "Q5_0": (6, 32),
    "Q5_1": (7, 32),
    "Q8_0": (8, 32),
    "Q2_K": (10, 256),
    "Q3_K": (11, 256),
    "Q4_K": (12, 256),
    "Q5_K": (13, 256),
    "Q6_K": (14, 256),
    "IQ4_NL": (20, 32),
    "BF16": (30, 1),
}


def write(path, tensors, *, architecture="minimax_h3", shapes=None, alignment=32):
    """tensors: name -> (type, shape as stored, bytes). shapes: name -> orig_shape."""
    fields = [text("general.architecture") + struct.pack("<I", STRING) + text(architecture)] if architecture else []
    for name, shape in (shapes or {}).items():
        array = struct.pack("<IIQ", ARRAY, INT32, len(shape)) + struct.pack(f"<{len(shape)}i", *shape)
        fields.append(text(f"comfy.gguf.orig_shape.{name}") + array)
    infos, data = b"", b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", TYPES[kind][0], len(data))
        data += content
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields) + infos
    path.write_bytes(header + bytes(-len(header) % alignment) + data)


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def quantize(kind, weight):
    """(N, K) float64 -> bytes, and the values that they stand for."""
    blocks = weight.reshape(-1, TYPES[kind][1])
    content, values = zip(*(QUANTIZERS[kind](block) for block in blocks), strict=True)
    return b"".join(content), np.stack(values).reshape(weight.shape)


def half(x):
    """Rounded to float16, as a Python float."""
    return float(np.float16(x))


def half_bytes(x):
    return np.float16(x).tobytes()


def f32(block):
    return block.astype("<f4").tobytes(), block.astype("<f4").astype(float)


def f16(block):
    return block.astype("<f2").tobytes(), block.astype("<f2").astype(float)


def bf16(block):
    bits = block.astype("<f4").view("<u4") >> 16
    return bits.astype("<u2").tobytes(), (bits << 16).view("<f4").astype(float)


def q8_0(block):
    d = half(abs(block).max() / 127)
    q = (block / d).round().clip(-128, 127)
    return half_bytes(d) + q.astype(np.int8).tobytes(), d * q


def small(bits, has_min):
    """Q4_0, Q4_1, Q5_0, Q5_1: value j in the lower four bits of byte j, j + 16 in the upper; the fifth bits apart."""

    def quantizer(block):
        top = 2**bits - 1
        low = half(block.min()) if has_min else 0.0
        d = half((block.max() - low) / top if has_min else 2 * abs(block).max() / top)
        offset = 0 if has_min else 2 ** (bits - 1)
        q = ((block - low) / d + offset).round().clip(0, top).astype(int)
        nibbles = bytes((q[j] & 15) | (q[j + 16] & 15) << 4 for j in range(16))
        fifths = struct.pack("<I", sum(int(q[j] >> 4) << j for j in range(32))) if bits == 5 else b""
        minimum = half_bytes(low) if has_min else b""
        return half_bytes(d) + minimum + fifths + nibbles, d * (q - offset) + low

    return quantizer


def scales_and_mins(block, size, top, most):
    """d, dmin, scales, minima and codes of sub-blocks: value = d * scale * code - dmin * minimum."""
    parts = block.reshape(-1, size)
    lows = np.maximum(0, -parts.min(1))
    d, dmin = half((parts.max(1) + lows).max() / top / most), half(lows.max() / most)
    scales = ((parts.max(1) + lows) / top / d).round().clip(1, most).astype(int)
    mins = (lows / dmin).round().clip(0, most).astype(int)
    codes = ((parts + dmin * mins[:, None]) / (d * scales[:, None])).round().clip(0, top).astype(int)
    values = d * scales[:, None] * codes - dmin * mins[:, None]
    return d, dmin, scales, mins, codes.flatten(), values.flatten()


def scales_only(block, top, most):
    """d, scales of 16 values each, and signed codes from -top - 1 to top."""
    parts = block.reshape(-1, 16)
    d = half(abs(parts).max() / top / most)
    scales = (abs(parts).max(1) / top / d).round().clip(1, most).astype(int)
    scales[1::2] *= -1  # scales have signs
    codes = (parts / (d * scales[:, None])).round().clip(-top - 1, top).astype(int)
    return d, scales, codes.flatten(), (d * scales[:, None] * codes).flatten()


def two_bits(codes):
    """Value 128 n + 32 j + l in bits 2 j and 2 j + 1 of byte 32 n + l."""
    out = bytearray(64)
    for i, code in enumerate(codes):
        out[i // 128 * 32 + i % 32] |= int(code) << 2 * (i % 128 // 32)
    return bytes(out)


def four_bits(codes):
    """Value 64 n + l in the lower bits of byte 32 n + l, value 64 n + 32 + l in the upper."""
    out = bytearray(128)
    for i, code in enumerate(codes):
        out[i // 64 * 32 + i % 32] |= int(code) << 4 * (i % 64 // 32)
    return bytes(out)


def high_bits(bits):
    """Bit i // 32 of byte i % 32."""
    out = bytearray(32)
    for i, bit in enumerate(bits):
        out[i % 32] |= int(bit) << i // 32
    return bytes(out)


def six_bit_pairs(scales, mins):
    """8 scales and 8 minima in 12 bytes."""
    out = bytearray(12)
    for i in range(4):
        out[i] = scales[i] | scales[i + 4] >> 4 << 6
        out[i + 4] = mins[i] | mins[i + 4] >> 4 << 6
        out[i + 8] = scales[i + 4] & 15 | (mins[i + 4] & 15) << 4
    return bytes(out)


def q2_k(block):
    d, dmin, scales, mins, codes, values = scales_and_mins(block, 16, 3, 15)
    packed = bytes(int(scale) | int(low) << 4 for scale, low in zip(scales, mins, strict=True))
    return packed + two_bits(codes) + half_bytes(d) + half_bytes(dmin), values


def q3_k(block):
    d, scales, codes, values = scales_only(block, 3, 31)
    raised, packed = [int(scale) + 32 for scale in scales], bytearray(12)
    for i, scale in enumerate(raised):
        packed[i % 8] |= (scale & 15) << 4 * (i // 8)
        packed[8 + i % 4] |= (scale >> 4) << 2 * (i // 4)
    # The high bit says that nothing is taken away; without it, 4 is.
    return high_bits(codes >= 0) + two_bits(codes & 3) + bytes(packed) + half_bytes(d), values


def q4_k(block):
    d, dmin, scales, mins, codes, values = scales_and_mins(block, 32, 15, 63)
    return half_bytes(d) + half_bytes(dmin) + six_bit_pairs(scales, mins) + four_bits(codes), values


def q5_k(block):
    d, dmin, scales, mins, codes, values = scales_and_mins(block, 32, 31, 63)
    head = half_bytes(d) + half_bytes(dmin) + six_bit_pairs(scales, mins)
    return head + high_bits(codes >> 4) + four_bits(codes & 15), values


def q6_k(block):
    d, scales, codes, values = scales_only(block, 31, 127)
    low, high = bytearray(128), bytearray(64)
    for i, code in enumerate(codes + 32):
        half_of, quarter, place = i // 128, i % 128 // 32, i % 32
        low[64 * half_of + 32 * (quarter % 2) + place] |= (int(code) & 15) << 4 * (quarter // 2)
        high[32 * half_of + place] |= int(code) >> 4 << 2 * quarter
    return bytes(low) + bytes(high) + scales.astype(np.int8).tobytes() + half_bytes(d), values


QUANTIZERS = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q4_0": small(4, has_min=False),
    "Q4_1": small(4, has_min=True),
    "Q5_0": small(5, has_min=False),
    "Q5_1": small(5, has_min=True),
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
