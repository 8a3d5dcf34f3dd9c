"""What the reshard kernels compute, in numpy: slow and obvious. This is the specification that tests hold them to.

The checksum of a tensor of n bytes is seed(n) + sum over its 32-bit little-endian words w_i of w_i * multiplier(i), mod
2^64, where the last word is padded with zero bytes. `csrc/reshard.h` says why.
"""

import ctypes

import numpy as np
import torch

MASK = 2**64 - 1


def multipliers(words: np.ndarray) -> np.ndarray:
    """The odd 32-bit multiplier of each word index, as uint64; any shape."""
    i = words.astype(np.uint64).astype(np.uint32)
    x = i * np.uint32(0x0BD794D6) + np.uint32(0xC2B2AE35)
    x = (x ^ (x >> np.uint32(16))) | np.uint32(1)
    x = x * np.uint32(0x9E3779B1)
    return ((x ^ (x >> np.uint32(15))) | np.uint32(1)).astype(np.uint64)


def seed(nbytes: int) -> int:
    """A tensor's size mixed into 64 bits: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (nbytes + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def tensor_bytes(t: torch.Tensor) -> np.ndarray:
    """The bytes [n] uint8 of a tensor in row-major order, whatever its strides."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(t: torch.Tensor) -> int:
    """The definition: whole words of the whole tensor."""
    data = tensor_bytes(t)
    words = np.pad(data, (0, -len(data) % 4)).view("<u4").astype(np.uint64)
    total = (words * multipliers(np.arange(len(words)))).sum(dtype=np.uint64)
    return (seed(len(data)) + int(total)) & MASK


def share(data: np.ndarray, pos: int) -> int:
    """What the bytes `data` [n] uint8 at offset `pos` of their tensor add to its checksum: each on its own."""
    at = pos + np.arange(len(data))
    in_place = data.astype(np.uint64) << (8 * (at % 4)).astype(np.uint64)
    return int((in_place * multipliers(at // 4)).sum(dtype=np.uint64))


def checksum_rects(pieces: np.ndarray, sums: np.ndarray) -> None:
    """Adds the share of every row of `pieces` [n] of `kernel.PIECE` to `sums` [tensors] uint64."""
    for p in pieces:
        for r in range(p["rows"]):
            add = share(_row(p, r), int(p["pos"]) + r * int(p["pos_ld"]))
            sums[p["tensor"]] = (int(sums[p["tensor"]]) + add) & MASK


def pack(pieces: np.ndarray, bucket: torch.Tensor, sums: np.ndarray) -> None:
    """Copies every row of `pieces` into `bucket` [bytes] uint8, and adds its share."""
    out = bucket.numpy()
    for p in pieces:
        for r in range(p["rows"]):
            start = int(p["dst"]) + r * int(p["dst_ld"])
            row = _row(p, r)
            out[start : start + len(row)] = row
    checksum_rects(pieces, sums)


def _row(p: np.void, r: int) -> np.ndarray:
    address = int(p["src"]) + r * int(p["src_ld"])
    return np.frombuffer(ctypes.string_at(address, int(p["cols"]) * int(p["item"])), dtype=np.uint8)
