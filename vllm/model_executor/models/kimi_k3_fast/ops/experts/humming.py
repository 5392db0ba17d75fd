"""The layout in which stock vLLM keeps MXFP4 experts for the `humming` package (0.1.17) on Hopper with 16-bit activations.

Codes, int32 [E, K/16, 2 N]: of 16 columns and 64 rows, one after the other, 512 bytes. Lane 4 g + q of a warp has 16 bytes of
them, a word for each 16 rows; nibble p of word j is

    row 16 j + 8 (p / 2 mod 2) + g,    column 2 q + 8 (p mod 2) + p / 4

which is, register by register, the 16-row operand of mma.m16n8k16. Scales, E8M0 [E, K/32, N]: of 64 rows, byte 8 g + m is row
8 m + g, so that a lane has those of its rows in line.
Stock pads K to a multiple of 128 and N to one of 256, at the end: N is gate and up together. Padding is codes 0 and scales of 1.
Where a rank's experts are narrower than 256, stock's model has made them so wide before, with zeros: gate rows, rows of zeros, up
rows, more zeros. `Weights.pitch` then is that width, and `inner` the real one.

`pack` and `unpack` are this description as code. The first is what a GPU test compares with the bytes that stock makes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layout import padded_columns, padded_rows
from .torch_form import GROUP, HUMMING, Weights

ONE = 127  # the E8M0 code of 1


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[E, N, K/2] uint8, N a multiple of 64, K of 32 -> int32 [E, K/16, 2 N]."""
    e, n, half = codes.shape
    blocks, chunks = n // 64, half // 8
    split = codes.view(e, blocks, 4, 2, 8, chunks, 2, 4)  # of a row: word, upper rows, g; of a column pair: chunk, upper, q
    lower, upper = split[..., 0, :], split[..., 1, :]
    packed = codes.new_empty(e, chunks, blocks, 8, 4, 4, 2, 2)  # g, q, word, odd column, upper rows
    even, odd = (lower & 15) | (upper << 4), (lower >> 4) | (upper & 0xF0)
    for place, byte in enumerate((even, odd)):
        packed[..., place, :] = byte.permute(0, 5, 1, 4, 6, 2, 3)
    return packed.view(e, chunks, 8 * n).view(torch.int32)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    e, chunks, words = packed.shape
    split = packed.contiguous().view(torch.uint8).view(e, chunks, words // 128, 8, 4, 4, 2, 2)
    even, odd = (split[..., place, :].permute(0, 2, 5, 6, 3, 1, 4) for place in (0, 1))
    codes = split.new_empty(*even.shape[:-1], 2, 4)
    codes[..., 0, :], codes[..., 1, :] = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return codes.view(e, words // 2, chunks * 8)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[E, N, K/32] uint8 -> [E, K/32, N]."""
    e, n, groups = scales.shape
    return scales.view(e, n // 64, 8, 8, groups).permute(0, 4, 1, 3, 2).reshape(e, groups, n)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_scales`."""
    e, groups, n = packed.shape
    return packed.view(e, groups, n // 64, 8, 8).permute(0, 2, 4, 3, 1).reshape(e, n, groups)


def _padded(tensor: torch.Tensor, rows: int, columns: int, value: int) -> torch.Tensor:
    return F.pad(tensor, (0, columns - tensor.shape[2], 0, rows - tensor.shape[1]), value=value)


def widen(raw: Weights, pitch: int) -> Weights:
    """The same experts `pitch` wide, by zeros, as stock's model does."""
    e, more = raw.w13.shape[0], pitch - raw.width
    w13, s13 = (F.pad(t.view(e, 2, raw.width, -1), (0, 0, 0, more)).view(e, 2 * pitch, -1) for t in (raw.w13, raw.s13))
    return Weights(w13, s13, F.pad(raw.w2, (0, more // 2)), F.pad(raw.s2, (0, more // GROUP)))


def pack(raw: Weights, pitch: int = 0) -> Weights:
    """A layer in the checkpoint's layout -> the same in stock's, made `pitch` wide before."""
    found, width = [], raw.width
    raw = widen(raw, pitch) if pitch else raw
    for codes, scales in ((raw.w13, raw.s13), (raw.w2, raw.s2)):
        rows, columns = padded_rows(codes.shape[1]), padded_columns(2 * codes.shape[2])
        found += [pack_codes(_padded(codes, rows, columns // 2, 0)), pack_scales(_padded(scales, rows, columns // GROUP, ONE))]
    return Weights(*found, layout=HUMMING, inner=width, pitch=pitch)


def unpack(packed: Weights) -> Weights:
    """The inverse of `pack`."""
    hidden, width, pitch = packed.w2.shape[2] // 2, packed.width, packed.pitch or packed.width
    e, rows = packed.w13.shape[0], 2 * width

    def real(whole: torch.Tensor) -> torch.Tensor:
        return whole[:, : 2 * pitch].reshape(e, 2, pitch, -1)[:, :, :width].reshape(e, rows, -1)

    return Weights(
        real(unpack_codes(packed.w13)),
        real(unpack_scales(packed.s13)),
        unpack_codes(packed.w2)[:, :hidden, : width // 2].contiguous(),
        unpack_scales(packed.s2)[:, :hidden, : width // GROUP].contiguous(),
    )
