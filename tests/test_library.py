"""`steelyard.plan` and `steelyard.Balancer`: there when asked for, and plan without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import steelyard
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B, LLAMA_34B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.library import attention_shape
from steelyard.planner.checks import verify


def test_plan_takes_lengths_per_rank() -> None:
    plan = steelyard.plan([[4], [12]], tolerance=0.0)
    assert verify(plan).work_by_server.tolist() == [44, 44]
    assert plan.shape == LLAMA3_8B
    assert steelyard.plan([[4], []]).tolerance == 0.05
    assert steelyard.plan([(0, 0, 4, 1)], ranks=3).layout.ranks == 3


def test_plan_takes_shards_and_layouts() -> None:
    shards = [(0, 0, 5, 0), (0, 5, 7, 1), (1, 0, 2, 1)]
    given = Layout.from_shards(shards, 2)
    for layout in (shards, iter(shards), given):
        plan = steelyard.plan(layout, "llama-34b", 0.1)
        assert plan.layout.doc_lengths.tolist() == [12, 2]
        assert plan.layout.shard_rank.tolist() == [0, 1, 1]
        assert plan.shape == LLAMA_34B
        assert verify(plan).pairs_total == 78 + 3


def test_plan_takes_what_the_planner_takes() -> None:
    topology = Topology(2, speeds=(1.0, 0.5))
    plan = steelyard.plan([[400], [300]], topology=topology, policy="packed", window=7)
    assert (plan.policy, plan.topology, plan.window) == ("packed", topology, 7)


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        ([], {}, "the layout is empty"),
        ([(0, 0, 5)], {}, r"shard 0 has 3 values; expected \(document, start, length, rank\)"),
        ([(0, 3, 5, 0)], {}, "document 0 do not cover it exactly once"),
        ([(0, 0, 5, 2)], {"ranks": 2}, "shard on rank 2"),
        ([[5]], {"ranks": 2}, "ranks=2, but the layout has 1"),
        ([[5]], {"model": "llama3-8B"}, "no built-in model 'llama3-8B'; did you mean 'llama3-8b'?"),
        ([[5]], {"model": "none/config.json"}, "model none/config.json: there is no such file"),
        ([[5]], {"policy": "balancd"}, "did you mean 'balanced'"),
        ([[5]], {"tolerance": -1}, "tolerance=-1"),
    ],
)
def test_mistakes(layout: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        steelyard.plan(layout, **more)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_attention_heads": 8, "hidden_size": 64}, AttentionShape(8, 8, 8)),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}, AttentionShape(8, 2, 16)),
        ({"text_config": {"num_attention_heads": 4, "hidden_size": 64}, "model_type": "x"}, AttentionShape(4, 4, 16)),
    ],
)
def test_a_config_json_gives_the_shape(config: dict[str, Any], shape: AttentionShape, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert attention_shape(path) == attention_shape(str(path)) == attention_shape(tmp_path) == shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[]", "holds list, expected a JSON object"),
        ('{"hidden_size": 64}', "lacks the key num_attention_heads; expected a positive whole number"),
        ('{"num_attention_heads": 8}', "lacks the key hidden_size"),
        ('{"num_attention_heads": 8, "hidden_size": 60}', "hidden_size=60 is not a multiple of num_attention_heads=8"),
        (
            '{"num_attention_heads": 8, "num_key_value_heads": 3, "head_dim": 4}',
            "num_attention_heads=8 is not a multiple of num_key_value_heads=3",
        ),
        ('{"num_attention_heads": "8", "head_dim": 4}', "num_attention_heads is '8'; expected a positive whole number"),
    ],
)
def test_a_config_json_that_will_not_do(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        attention_shape(path)
    assert str(path) in str(caught.value)


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(steelyard.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_plan_needs_no_torch() -> None:
    code = "import sys, steelyard; print(len(steelyard.plan([[4], [12]]).tasks), 'torch' in sys.modules)"
    tasks, torch_loaded = run_python(code).split()
    assert int(tasks) >= 3
    assert torch_loaded == "False"


def test_balancer_is_the_one_of_balance() -> None:
    pytest.importorskip("torch")
    from steelyard.balance import Balancer

    assert steelyard.Balancer is Balancer


def test_other_names_do_not_exist() -> None:
    assert {"plan", "Balancer", "__version__"} <= set(dir(steelyard))
    with pytest.raises(AttributeError, match="module 'steelyard' has no attribute 'plans'"):
        _ = steelyard.plans  # type: ignore[attr-defined]
