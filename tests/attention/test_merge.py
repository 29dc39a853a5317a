from __future__ import annotations

import pytest
import torch

from steelyard.attention.merge import merge, merge_into


def partial(score: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(score, -1) @ value, torch.logsumexp(score, -1)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_two_parts_equal_the_whole(cut: int) -> None:
    generator = torch.Generator().manual_seed(0)
    score = 30 * torch.randn(4, 9, generator=generator, dtype=torch.float64)
    value = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    out, lse = merge(*partial(score[:, :cut], value[:cut]), *partial(score[:, cut:], value[cut:]))
    whole_out, whole_lse = partial(score, value)
    torch.testing.assert_close(out, whole_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rubbish", [0.0, float("nan"), float("inf")])
def test_a_part_without_keys_has_no_say(rubbish: float) -> None:
    """Rows: both parts, only the first, only the second, neither. What an empty part holds does not matter."""
    none = -torch.inf
    lse_a, lse_b = torch.tensor([1.0, 1.0, none, none]), torch.tensor([1.0, none, 2.0, none])
    out_a, out_b = torch.full((4, 2), 3.0), torch.full((4, 2), 5.0)
    out_a[lse_a == none], out_b[lse_b == none] = rubbish, rubbish
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out[:, 0], torch.tensor([4.0, 3.0, 5.0, 0.0]))
    torch.testing.assert_close(lse, torch.tensor([1.0 + torch.log(torch.tensor(2.0)).item(), 1.0, 2.0, none]))


def test_half_types_merge_in_fp32() -> None:
    out, lse = merge(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(2, 3), torch.zeros(2))
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, torch.full((2, 3), 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merging_in_place_is_the_same(dtype: torch.dtype) -> None:
    """Also where one part has nearly all the weight, or exactly half."""
    generator = torch.Generator().manual_seed(0)
    lse_a = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    lse_b = lse_a + torch.linspace(-800, 800, 50, dtype=torch.float64).index_fill_(0, torch.tensor([25]), 0.0)
    out_a, out_b = (torch.randn(2, 50, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    out_b = out_b.to(dtype)
    want_out, want_lse = merge(out_a, lse_a, out_b, lse_b)
    merge_into(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out_a, want_out, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(lse_a, want_lse, rtol=1e-14, atol=1e-14)
