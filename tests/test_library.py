"""`steelyard.plan` and `steelyard.Balancer`: there when asked for, and plan without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steelyard
from steelyard.cost.profiles import load_profile
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B, LLAMA_34B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.library import attention_shape
from steelyard.planner import make_plan
from steelyard.planner.checks import verify
from steelyard.planner.objective import row_keys_of


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


def test_plan_takes_whole_numbers_of_any_kind() -> None:
    assert steelyard.plan([np.array([4, 0]), np.array([12], dtype=np.int32)]).layout.doc_lengths.tolist() == [4, 12]
    assert steelyard.plan([(np.int64(0), 0, 5, 1)]).layout.shard_rank.tolist() == [1]


def test_lists_that_cannot_be_shards_are_lengths() -> None:
    rows = [[0, 0, 9, 5], [1, 9, 9, 1]]  # document 1 would begin at 9
    assert steelyard.plan(rows).layout.doc_lengths.tolist() == [9, 5, 1, 9, 9, 1]
    assert steelyard.plan([[4, 4, 4, 1]]).layout.docs == 4


def test_plan_takes_an_objective() -> None:
    layout = [[16_384], [512] * 200, [512] * 200, [8_192] * 2]
    pairs, time = (
        steelyard.plan(layout, tolerance=0.02, **more)
        for more in ({}, {"objective": "time", "device": "h200", "memory": "resend", "passes": "forward"})
    )
    assert pairs.row_keys == 0
    assert time.row_keys == row_keys_of(load_profile("h200").kernel(), LLAMA3_8B.head_dim) > 100
    pairs_done = verify(time).work_by_server
    work = pairs_done + time.row_keys * rows_by_server(time)
    assert work.max() <= 1.02 * work.mean()
    assert pairs_done.max() > 1.02 * pairs_done.mean()


def rows_by_server(plan: DispatchPlan) -> np.ndarray:
    return np.bincount(plan.tasks.server, weights=plan.tasks.end - plan.tasks.start, minlength=plan.layout.ranks)


def test_plan_hands_passes_and_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes differ by half a percent: too little to show in a plan of some documents."""
    given: dict[str, Any] = {}

    def record(layout: Layout, **more: Any) -> DispatchPlan:
        given.update(more)
        return make_plan(layout, **more)

    monkeypatch.setattr("steelyard.library.make_plan", record)
    steelyard.plan([[4], [12]], passes="backward", memory="resend")
    assert (given["passes"], given["memory"], given["objective"]) == ("backward", "resend", "pairs")


def test_the_exact_policy_is_offered() -> None:
    pytest.importorskip("scipy")
    assert verify(steelyard.plan([[4], [12]], policy="reference", tolerance=0.0)).work_by_server.tolist() == [44, 44]
    assert '"reference"' in (steelyard.plan.__doc__ or "")


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
        ([[3.7, 5]], {}, "entry 0 of the layout holds 3.7; expected whole numbers"),
        ([(0, 0, 5.0, 0)], {}, "entry 0 of the layout holds 5.0; expected whole numbers"),
        ([[5], [True]], {}, "entry 1 of the layout holds True"),
        ([[5], ["6"]], {}, "entry 1 of the layout holds '6'"),
        ([[5], [10**21]], {}, "entry 1 of the layout holds 1000000000000000000000; expected whole numbers below"),
        ([[5], [10**5_000]], {}, "entry 1 of the layout holds a value of type int"),
        ([5, 6], {}, "entry 0 of the layout is 5; expected a list of document lengths for each rank"),
        (["56"], {}, "entry 0 of the layout is '56'; expected a list"),
        ([(-1, 0, 5, 0)], {}, "document number -1, expected numbers from 0 on"),
        ([(10**8, 0, 5, 0)], {}, "document number 100,000,000, expected numbers from 0 on"),
        ([(0, 0, 5, 10**8)], {}, "shards on 100,000,001 ranks, expected at most 131,072"),
        ([(0, 0, 5, 0)], {"ranks": 10**12}, "shards on 1,000,000,000,000 ranks, expected at most 131,072"),
        ([[]] * (2**17 + 1), {}, "lengths for 131,073 ranks, expected at most 131,072"),
        ([[2**30 - 1]] * 20, {}, "plan: its 20 documents have 1.15e.19 .* pairs, more than 4.61e.18"),
        ([[5]], {"model": AttentionShape(10**21, 1, 1)}, "expected at most 262,144 channels together"),
        ([[5]], {"window": 10**21}, "window=1000000000000000000000"),
        ([[5]], {"objective": "time"}, "objective=time needs to know whose time; add device="),
        ([[5]], {"device": "h200"}, "device=h200 has a meaning with objective=time only"),
        ([[5]], {"objective": "time", "device": "h20"}, "unknown device 'h20'; did you mean 'h200'"),
        ([[5]], {"objective": "time", "device": "h200", "policy": "wlb"}, "'time' with policy 'balanced'"),
        ([[5]], {"objective": "speed"}, "objective='speed', expected 'pairs' or 'time'$"),
        ([(0, 0, 5, -1)], {}, r"shard \(0, 0, 5, -1\) is on rank -1, expected ranks from 0 on"),
        (5, {}, "the layout is 5; expected a list of document lengths for each rank"),
        ("4 5", {}, "the layout is '4 5'"),
        ({0: [5]}, {}, "the layout is {0: "),
        ([[5]], {"tolerance": True}, "tolerance=True, expected a number"),
        ([[5]], {"tolerance": "0.1"}, "tolerance='0.1', expected a number"),
        ([[5]], {"window": 1.5}, "window=1.5, expected a whole number"),
        ([[5]], {"window": "4"}, "window='4', expected a whole number"),
        ([[5]], {"window": True}, "window=True, expected a whole number"),
        ([[5]], {"ranks": 1.0}, "ranks=1.0, expected a whole number"),
        ([[5]], {"model": None}, "model=None, expected a name"),
        ([[5]], {"policy": ["balanced"]}, "policy=.'balanced'., expected a name"),
        ([[5]], {"topology": 4}, "topology=4, expected a steelyard.domain.topology.Topology"),
        ([[5]], {"device": 4}, "device=4, expected a name"),
        ([[0, 0, 4096, 0], [0, 4096, 4096, 1]], {}, "give each shard as a tuple, or leave out lengths of 0"),
        (np.array([[0, 0, 9, 0], [0, 9, 9, 1]]), {"ranks": 2}, "give each shard as a tuple"),
        ([[5]], {"memory": "forget"}, "memory='forget', expected one of"),
        ([[5]], {"passes": "back"}, "passes='back', expected one of"),
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
        ("[" * 100_000, "lists or objects within each other too deep"),
        ('{"head_dim": ' + "9" * 5_000 + "}", "not a JSON file in UTF-8 .a number of thousands of digits"),
        ('{"num_attention_heads": 1' + "0" * 21 + ', "head_dim": 4}', "1000000000000000000000; .* up to 262,144"),
        ('{"num_attention_heads": 4096, "head_dim": 4096}', "4,096 heads of size 4,096 .* at most 262,144 channels"),
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
