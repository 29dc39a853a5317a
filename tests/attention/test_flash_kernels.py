"""Every package's functions are called with parameters that they have, and the right package is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import ModuleType

import flash_packages as packages
import pytest
import torch

from steelyard.attention.flash_kernels import (
    Entries,
    Flash2,
    Flash3,
    Flash4,
    FlashKernels,
    Masking,
    TorchVarlen,
    load_kernels,
)
from steelyard.errors import UsageError

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
QUERIES, KEYS = [3, 1, 4], [3, 6, 4]


@pytest.fixture(scope="module", autouse=True)
def torch_operators() -> Iterator[None]:
    library = packages.register_torch_operators()
    yield
    library._destroy()


MAKERS: dict[str, Callable[[], FlashKernels]] = {
    "2": lambda: Flash2(packages.installed(packages.flash2())),
    "3": lambda: Flash3(packages.installed(packages.flash3())),
    "3 beta": lambda: Flash3(packages.installed(packages.flash3_beta())),
    "4": lambda: Flash4(packages.installed(packages.flash4())),
    "4 beta": lambda: Flash4(packages.installed(packages.flash4_beta())),
    "torch": lambda: TorchVarlen(packages.installed()),
}


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize(
    ("package", "softcap"),
    [*((name, None) for name in MAKERS), *((name, 1.5) for name in MAKERS if name[0] in "23")],
)
def test_both_directions_equal_autograd(package: str, softcap: float | None, window: int | None) -> None:
    kernels = MAKERS[package]()
    assert softcap is None or kernels.softcap
    masking = Masking(0.3, window, softcap)
    entries = Entries(offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64)
        for rows, heads in ((8, 4), (13, 2), (13, 2), (8, 4))
    )
    parts, lse_parts = [], []
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for m, n in packages.entries(entries.q_offset, entries.k_offset):
        left = None if window is None else window - 1
        score = packages.scores(leaves[0][m], leaves[1][n], 0.3, (left, 0), softcap or 0.0)
        lse_parts.append(score.logsumexp(-1))
        parts.append(torch.einsum("hmn,nhd->mhd", score.softmax(-1), leaves[2][n].repeat_interleave(2, dim=1)))
    want = torch.cat(parts)
    gradients = torch.autograd.grad(want, leaves, dout)
    out, lse = kernels.forward(q, k, v, entries, masking)
    torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.cat(lse_parts, dim=1).detach(), rtol=1e-12, atol=1e-12)
    for got, expected in zip(kernels.backward(dout, q, k, v, out, lse, entries, masking), gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("capability", "modules", "chosen"),
    [
        (HOPPER, [packages.flash2, packages.flash3, packages.flash4], Flash3),
        (HOPPER, [packages.flash2, packages.flash4], Flash2),
        (HOPPER, [], TorchVarlen),
        (BLACKWELL, [packages.flash2, packages.flash3, packages.flash4], Flash4),
        (BLACKWELL, [packages.flash2, packages.flash3], Flash2),
        (AMPERE, [packages.flash2, packages.flash3, packages.flash4], Flash2),
        (AMPERE, [packages.flash3, packages.flash4], TorchVarlen),
        ((12, 0), [packages.flash2], Flash2),
    ],
)
def test_the_fastest_that_fits_the_device(
    capability: tuple[int, int], modules: list[Callable[[], ModuleType]], chosen: type
) -> None:
    load = packages.installed(*(make() for make in modules))
    assert type(load_kernels(capability, load)) is chosen


@pytest.mark.parametrize(
    ("capability", "module", "why"),
    [
        (AMPERE, packages.flash2_of_2_6, "window_size_left"),
        (BLACKWELL, packages.flash4_without_lse, "return_lse"),
        (AMPERE, lambda: ModuleType("flash_attn.flash_attn_interface"), "flash_attn_varlen_func"),
    ],
)
def test_releases_that_do_not_fit_are_passed_over(
    capability: tuple[int, int], module: Callable[[], ModuleType], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert type(load_kernels(capability, packages.installed(module()))) is TorchVarlen
    assert why in caplog.text


def test_old_devices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"7\.5.*8\.0"):
        load_kernels((7, 5), packages.installed())


def test_the_operators_of_this_torch_have_the_parameters() -> None:
    """Of the installed torch, whatever the release: what `TorchVarlen` passes by keyword exists."""
    for operator, names in (
        (torch.ops.aten._flash_attention_forward.default, "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale"),
        (torch.ops.aten._flash_attention_backward.default, "cum_seq_q max_q rng_state unused window_size_left scale"),
    ):
        assert set(names.split()) <= {argument.name for argument in operator._schema.arguments}
