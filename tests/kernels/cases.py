"""Cases for every kernel on any device: run on a GPU by tests/gpu, in Triton's interpreter by tests/kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.kernels import block_fp8, block_fp8_triton
from skyrl_mega.kernels.boxes import Region, checksums_reference, pack_reference, regions, unpack_reference
from skyrl_mega.kernels.boxes_triton import Table
from tests.kernels import brute

SHARDS = [
    # rows, columns, row0, col0
    (128, 128, 0, 0),
    (1, 1, 127, 255),
    (100, 200, 64, 130),
    (130, 257, 127, 1),
    (256, 96, 1000, 96),
]


def hard(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Returns numbers of all magnitudes and signs, with zeros, a block of zeros in large matrices, and rounding
    ties."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 3, shape, generator=generator)
    values[..., ::7, ::5] = 0.0
    values[..., 1::11, :] = (
        values[..., 1::11, :].sign() * 2.0 ** torch.randint(-8, 2, (1,), generator=generator) * 1.0625
    )
    if shape[-2] > 100:
        values[..., -90:, -90:] = 0.0
    return values.to(dtype).to(device)


def same_bits(actual: Tensor, wanted: Tensor) -> None:
    """Compares every byte, including NaN and the sign of zero."""
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype
    assert torch.equal(actual.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def fp8_like_the_reference(weight: Tensor, row0: int, col0: int, dtype: torch.dtype) -> None:
    """Compares magnitudes, FP8 numbers, and dequantised weights."""
    amax = block_fp8.block_amax_reference(weight, row0, col0)
    same_bits(block_fp8_triton.block_amax(weight, row0, col0), amax)
    scales = block_fp8.scales(amax)
    numbers = block_fp8.quantise_reference(weight, scales, row0, col0)
    same_bits(block_fp8_triton.quantise(weight, scales, row0, col0), numbers)
    back = block_fp8.dequantise_reference(numbers, scales, row0, col0, dtype)
    same_bits(block_fp8_triton.dequantise(numbers, scales, row0, col0, dtype), back)


def fp8_every_byte(device: str) -> None:
    """Converts all 254 numbers in both directions with scale 1, and values between and next to the numbers."""
    every = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8, device=device)
    numbers = every.view(torch.float8_e4m3fn).reshape(2, 127)
    scale = torch.ones(1, 1, device=device)
    weight = block_fp8_triton.dequantise(numbers, scale, dtype=torch.float32)
    same_bits(weight, numbers.float())
    same_bits(block_fp8_triton.quantise(weight, scale), numbers)
    sizes = weight[0]
    middle = (sizes[1:] + sizes[:-1]) / 2
    for between in (middle, middle.nextafter(sizes[1:]), middle.nextafter(sizes[:-1])):
        pair = torch.stack([between, -between])
        same_bits(block_fp8_triton.quantise(pair, scale), pair.to(torch.float8_e4m3fn))


def fp8_not_a_number(device: str) -> None:
    """Checks that NaN and infinity survive."""
    weight = torch.ones(130, 130, device=device)
    weight[3, 4] = float("nan")
    weight[3, 129] = float("inf")
    amax = block_fp8_triton.block_amax(weight)
    assert amax.isnan().tolist() == [[True, False], [False, False]]
    assert amax.isinf().tolist() == [[False, True], [False, False]]
    numbers = block_fp8_triton.quantise(weight, torch.ones(2, 2, device=device)).float()
    assert numbers[3, 4].isnan() and numbers[3, 129].isnan() and int(numbers.isnan().sum()) == 2


def box_views(device: str, seed: int = 0) -> list[Tensor]:
    """Returns boxes of several dtypes, widths and shapes: rows, columns, stacks, single elements, whole tensors,
    none."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return (
            torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape).to(device)
        )

    a, b = random(40, 96, dtype=torch.bfloat16), random(6, 50, 33, dtype=torch.float32)
    c, d = random(301, dtype=torch.uint8), random(70, 130, dtype=torch.int16)
    return [
        a,
        a[3:17],
        a[:, 8:16],
        a[5:9, 1:4],
        a[7, 7],
        b[2],
        b[1:5, 10:20, 3:8],
        b[:, ::7, 1],
        b.transpose(0, 2)[:2, :3],
        b[:0],
        c[5:300],
        c[::3],
        d[1:],
        d[:, :128],
        random(3000, 5, dtype=torch.bfloat16)[:, :4],
    ]


def boxes_like_the_reference(device: str) -> None:
    """Packs boxes with gaps between, unpacks the boxes, and checks that all other bytes stay."""
    views = box_views(device)
    offsets, end = [], 3
    for k, view in enumerate(views):
        offsets.append(end)
        end += view.nbytes + (0, 1, 2, 8)[k % 4]
    actual = torch.full((end + 5,), 0xA5, dtype=torch.uint8, device=device)
    wanted = actual.clone()
    packed_regions = regions(views, offsets)
    table = Table(packed_regions, torch.device(device))
    table.copy(views, actual, pack=True)
    pack_reference(packed_regions, views, wanted)
    same_bits(actual, wanted)
    # Unpacks into disjoint places of other tensors.
    flat = actual.flip(0).contiguous()
    bases = [torch.zeros(50, 90, dtype=torch.bfloat16, device=device) for _ in range(4)]
    both = []
    for base in (bases[:2], bases[2:]):
        both.append([base[0][:, 3:9], base[0][10:20, 20:84], base[1][1::2], base[1][0, 5:6]])
    places = [0, 600, 600 + 1280, 600 + 1280 + 4500]
    packed_regions = regions(both[0], places)
    Table(packed_regions, torch.device(device)).copy(both[0], flat, pack=False)
    unpack_reference(packed_regions, both[1], flat)
    same_bits(bases[0], bases[2])
    same_bits(bases[1], bases[3])
    assert bases[0].view(torch.int16)[10:20, 20:84].count_nonzero() > 0


def one_table_for_tensors_that_move(device: str) -> None:
    """Packs several boxes of a tensor, then of further tensors with the same form, also with another alignment."""
    wanted = [Region(0, 7, (5, 3), (20, 1), torch.bfloat16, 16), Region(1, 0, (4,), (1,), torch.uint8, 48)]
    table = Table(wanted, torch.device(device))
    for shift in (0, 0, 1, 4, 0, 4, 4, 4, 4):
        weight = torch.randn(shift + 200, device=device).bfloat16()[shift:].view(10, 20)
        other = torch.randint(0, 256, (4 + shift,), dtype=torch.uint8, device=device)[shift:]
        owners = [weight, other]
        actual, expected = (torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(2))
        table.copy(owners, actual, pack=True)
        pack_reference(wanted, owners, expected)
        same_bits(actual, expected)
        same_bits(actual[16:46].view(torch.bfloat16).view(5, 3), weight.view(-1)[7:107].view(5, 20)[:, :3])
        same_bits(table.checksums(owners), checksums_reference(wanted, owners))


def checksums_like_the_reference(device: str) -> None:
    """Compares the checksum of every kind of box with the checksum of its bytes, with rows ending anywhere in a
    word."""
    views = box_views(device, seed=1) + [
        torch.randn(rows, columns + 3, generator=torch.Generator().manual_seed(rows)).to(device).to(dtype)[:, 1:-2]
        for rows, columns in ((1, 1), (3, 5), (9, 64), (2, 5000))
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    ]
    for offsets in ([0] * len(views), range(len(views))):  # the offsets must not matter
        packed_regions = regions(views, offsets)
        sums = Table(packed_regions, torch.device(device)).checksums(views)
        same_bits(sums, checksums_reference(packed_regions, views))
        assert [int(value) % 2**64 for value in sums] == [brute.checksum(view) for view in views]
